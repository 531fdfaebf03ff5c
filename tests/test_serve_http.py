"""`pipedraft serve`: OpenAI's own client, clients without manners, and what the server says."""

import base64
import contextlib
import hashlib
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from itertools import accumulate

import openai
import pytest
from command_processes import Process
from command_runs import assert_one_line, call
from http_runs import LENGTH, PROMPT, WAIT_S, Place, alone, make_engine, serving, wait_until
from prometheus_client.parser import text_string_to_metric_families

from pipedraft.inference.engine import Engine
from pipedraft.inference.serving.requests import ChatRequest, CompletionRequest, parse

MESSAGES = [{"role": "user", "content": PROMPT}]
AS_PROMPT = f"user:{PROMPT};"
"""What the tests' chat template makes of it."""
SAMPLINGS = [
    {"temperature": 0.0, "seed": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.3, "seed": -5, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def reference():
    return make_engine()


@pytest.fixture(scope="module")
def place():
    with serving(make_engine()) as made:
        yield made


def ids_of(sampling: dict) -> str:
    return "-".join(f"{name}={value}" for name, value in sampling.items())


def streamed(stream) -> tuple[str, list]:
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, chunks


# -- outputs are the engine's ----------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=ids_of)
def test_an_answer_is_what_the_engine_decodes_alone_with_its_figures(place, reference, sampling):
    expected = alone(reference, AS_PROMPT, **sampling)
    answer = place.client().chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=LENGTH, **sampling
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens) == (len(AS_PROMPT), LENGTH)
    assert used.total_tokens == len(AS_PROMPT) + LENGTH
    assert answer.seed == sampling["seed"]
    figures = answer.metrics["speculative_decoding"]
    assert figures["equivalent_acceptance_length"] == expected.equivalent_acceptance_length
    assert figures["mean_acceptance_length"] == expected.mean_acceptance_length
    assert figures["draft_acceptance_rate"] == expected.draft_acceptance_rate
    assert (figures["num_steps"], figures["num_stages"]) == (expected.num_steps, 2)
    assert figures["num_accepted_draft_tokens"] == expected.num_accepted > 0
    assert figures["num_draft_tokens"] == expected.num_tested
    histogram = figures["acceptance_histogram"]
    assert sum(histogram) == figures["num_spec_steps"] == len(expected.round_lengths)
    assert sum(j * count for j, count in enumerate(histogram)) == expected.num_accepted


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=ids_of)
def test_a_stream_has_the_same_text_and_says_who_made_each_token(place, reference, sampling):
    expected = alone(reference, AS_PROMPT, **sampling)
    text, chunks = streamed(
        place.client().chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_completion_tokens=LENGTH,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"pipedraft_events": True},
            **sampling,
        )
    )
    assert text == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == LENGTH
    assert all(chunk.usage is None for chunk in chunks[:-1])
    figures = chunks[-1].metrics["speculative_decoding"]
    assert figures["equivalent_acceptance_length"] == expected.equivalent_acceptance_length
    events = [c.pipedraft for c in chunks if hasattr(c, "pipedraft")]
    assert len(events) == LENGTH
    assert sum(event["origin"] == "draft" for event in events) == expected.num_accepted
    steps = [rows for event in events for rows in event["steps"]]
    assert len(steps) == expected.num_steps and {len(rows) for rows in steps} == {2}


def test_without_usage_the_last_chunk_has_the_figures(place):
    text, chunks = streamed(
        place.client().chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, stream=True, seed=1
        )
    )
    assert len(text) == 4 and chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].seed == 1 and chunks[-1].metrics["speculative_decoding"]["num_stages"] == 2
    assert not any(hasattr(chunk, "pipedraft") for chunk in chunks)


def test_completions_take_texts_and_token_ids_and_several_of_them(place, reference):
    greedy = {"temperature": 0.0, "max_tokens": LENGTH}
    expected = [alone(reference, prompt, temperature=0.0).text for prompt in ("ab", "xyz")]
    ask = place.client().completions.create
    ids = [reference.tokenizer(prompt).input_ids for prompt in ("ab", "xyz")]
    for prompt in (["ab", "xyz"], ids):
        answer = ask(model="tiny", prompt=prompt, **greedy)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == 5
    for prompt in ("ab", ids[0]):
        assert ask(model="tiny", prompt=prompt, **greedy).choices[0].text == expected[0]
    chunks = list(ask(model="tiny", prompt="ab", stream=True, **greedy))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0]


def test_choices_differ_by_their_seeds_as_single_requests_do(place, reference):
    answer = place.client().chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=LENGTH, n=3, seed=11, temperature=1.0
    )
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [alone(reference, AS_PROMPT, seed=11 + index).text for index in range(3)]
    assert len(set(texts)) == 3 and answer.metrics is None
    assert answer.usage.completion_tokens == 3 * LENGTH
    assert answer.usage.prompt_tokens == len(AS_PROMPT)


def test_without_a_seed_each_answer_has_one_of_its_own_that_gives_it_again(place):
    first, second = (place.chat().json for _ in range(2))
    assert first["seed"] != second["seed"]
    again = place.chat(seed=first["seed"]).json
    assert again["choices"] == first["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_ends_the_text_before_it(place, reference, stream):
    whole = alone(reference, AS_PROMPT, temperature=0.0).text
    for start, size in ((0, 1), (3, 4), (9, 2), (LENGTH - 3, 3)):
        stop = whole[start : start + size]
        ask = {"temperature": 0.0, "stop": ["~~nowhere~~", stop], "stream": stream}
        told = place.chat(**ask)
        if stream:
            chunks = [json.loads(line) for line in re.findall(rb"data: (\{.*)", told.content)]
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = told.json["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
            assert told.json["usage"]["completion_tokens"] == len(text) + size
        assert (text, reason) == (whole[: whole.index(stop)], "stop")


def test_text_that_may_begin_a_stop_string_is_held_back_and_then_shown(place, reference):
    whole = alone(reference, AS_PROMPT, temperature=0.0).text
    stop = whole[4:8] + ("a" if whole[8] != "a" else "b")
    _, chunks = streamed(
        place.client().chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=LENGTH,
            temperature=0,
            stop=stop,
            stream=True,
            extra_body={"pipedraft_events": True},
        )
    )
    assert sum(hasattr(chunk, "pipedraft") for chunk in chunks) == LENGTH  # held back or not
    pieces = [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content]
    assert "".join(pieces) == whole
    ends = set(accumulate(map(len, pieces)))
    assert ends == set(range(1, LENGTH + 1)) - {5, 6, 7, 8}


# -- refusals ----------------------------------------------------------------------------------


def test_the_clients_own_errors_come_from_the_statuses(place):
    client = place.client()
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert found.value.code == "model_not_found" and found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
    assert found.value.param == "temperature" and found.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="tiny", prompt="a" * 600)
    assert found.value.code == "context_length_exceeded"
    assert client.models.retrieve("tiny").id == "tiny" == client.models.list().data[0].id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


def body(**fields) -> bytes:
    return json.dumps({"messages": MESSAGES, "max_tokens": 2, **fields}).encode()


def turn(**fields) -> bytes:
    return body(messages=[fields])


HOSTILE = [
    (b"", 400, "body"),
    (b"{", 400, "JSON"),
    (b"[]", 400, "object"),
    (b"\xff\xfe{}", 400, "JSON"),
    (b'{"messages": "\xc3\x28"}', 400, "JSON"),
    (b"[" * 100_000, 400, "JSON"),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400, "JSON"),
    (b'{"messages": ' + b"[" * 40 + b"]" * 40 + b"}", 400, "levels"),
    (b'{"temperature": NaN, "messages": []}', 400, "JSON"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "JSON"),
    (body(temperature=1e400).replace(b"Infinity", b"1e999"), 400, ""),
    (b'{"seed": 1' + b"0" * 400 + b', "messages": []}', 400, ""),
    (b"{" + b" " * 2**20 + b"}", 413, "1048576"),
    (body(max_tokens=0), 400, "max_tokens"),
    (body(max_tokens=-1), 400, "max_tokens"),
    (body(max_tokens=2**70), 400, "max_tokens"),
    (body(max_tokens=5000), 400, "max_tokens"),
    (body(max_tokens=True), 400, "max_tokens"),
    (body(max_tokens="9"), 400, "max_tokens"),
    (body(temperature=-1), 400, "temperature"),
    (body(temperature=1e-9), 400, "temperature"),
    (body(temperature="hot"), 400, "temperature"),
    (body(top_p=0), 400, "top_p"),
    (body(top_p=2), 400, "top_p"),
    (body(top_k=2**40), 400, "top_k"),
    (body(n=0), 400, "n"),
    (body(n=9), 400, "n"),
    (body(n=10**9), 400, "n"),
    (body(seed=2**64), 400, "seed"),
    (body(seed=1.5), 400, "seed"),
    (body(stop=""), 400, "stop"),
    (body(stop=["a"] * 17), 400, "stop"),
    (body(stop="x" * 300), 400, "stop"),
    (body(stop=[1]), 400, "stop"),
    (body(stream="yes"), 400, "stream"),
    (body(stream_options={"include_usage": 1}), 400, "stream_options"),
    (body(model="other"), 404, "model"),
    (body(model=7), 400, "model"),
    (body(messages=[]), 400, "messages"),
    (body(messages="hi"), 400, "messages"),
    (body(messages=[1]), 400, "messages"),
    (b'{"max_tokens": 2}', 400, "messages"),
    (turn(role="robot", content="a"), 400, "role"),
    (turn(role="tool", content="a"), 400, "role"),
    (turn(content="a"), 400, "role"),
    (turn(role="user"), 400, "content"),
    (turn(role="user", content=7), 400, "content"),
    (turn(role="user", content="a", tool_calls=[{}]), 400, "tool_calls"),
    (turn(role="user", content=[{"type": "image_url", "image_url": {}}]), 400, "content"),
    (turn(role="user", content="a b"), 400, "messages"),  # no token of this vocabulary
    (turn(role="user", content="a" * 3000), 400, "messages"),
    (body(logprobs=True), 400, "logprobs"),
    (body(tools=[{"type": "function"}]), 400, "tools"),
    (body(response_format={"type": "json_object"}), 400, "response_format"),
    (body(logit_bias={"1": 5}), 400, "logit_bias"),
    (body(frequency_penalty=0.5), 400, "frequency_penalty"),
    (body(temprature=1), 400, "did you mean temperature"),
    (body(**{"x" * 5000: 1}), 400, "unknown"),
]


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: repr(case[0][-40:]))
def test_a_hostile_body_gets_one_error_in_openais_shape(case, place):
    content, status, word = case
    told = place.ask("POST", "/v1/chat/completions", content)
    assert told.status == status, told.content
    error = told.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert word in f"{error['message']} {error['param']}" and len(error["message"]) < 1100
    assert "Traceback" not in error["message"] and "\n" not in error["message"]


def test_after_all_of_them_the_server_still_answers(place):
    assert place.chat(max_tokens=2).status == 200
    assert place.service.num_open == 0 and place.ask("GET", "/health").json == {"status": "ok"}


def test_other_requests_get_errors_of_the_same_shape(place):
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/../../etc/passwd", 404),
    ):
        told = place.ask(method, path)
        assert told.status == status and "message" in told.json["error"]
    told = place.ask("POST", "/v1/chat/completions", body(), content_type="text/plain")
    assert told.status == 415 and "application/json" in told.json["error"]["message"]


def test_fields_that_change_nothing_are_accepted(place):
    told = place.chat(
        user="me",
        metadata={"a": "b"},
        store=False,
        logprobs=False,
        presence_penalty=0.0,
        tools=None,
        response_format={"type": "text"},
        temperature=0,
        top_p=0.5,
        messages=[
            {"role": "developer", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"},
            {"role": "assistant", "content": "b", "refusal": None, "tool_calls": []},
            {"role": "user", "content": "c"},
        ],
    )
    assert told.status == 200, told.content
    assert told.json["usage"]["prompt_tokens"] == len("system:x;user:a;assistant:b;user:c;")


def test_a_prompt_is_a_text_or_ids_but_no_mixture():
    for prompt in (["a", 1], [1, "a"], [[1], 2], [], [[]], [-1], {}, [["a"]]):
        with pytest.raises(Exception, match="prompt|texts and token ids"):
            parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    asked = parse(b'{"messages": [{"role": "user", "content": "a"}], "top_k": -1}', ChatRequest)
    assert asked.top_k == -1 and asked.longest() is None


def test_a_client_that_leaves_inside_its_body_is_no_fault(place, caplog):
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", place.port), timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
    left = 'pipedraft:request_refused_total{model_name="tiny",status="499"} 1.0'
    wait_until(lambda: left in place.ask("GET", "/metrics").content.decode())
    assert caplog.records == []


# -- keys, queue, time, end --------------------------------------------------------------------


def test_keys_guard_everything_that_tells_of_the_model():
    with serving(make_engine(), keys=("first", "second"), max_client_sequences=2) as place:
        for path in ("/v1/models", "/v1/models/tiny", "/metrics"):
            for sent in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first"}):
                told = place.ask("GET", path, **sent)
                assert told.status == 401 and told.json["error"]["code"] == "invalid_api_key"
            assert place.ask("GET", path, authorization="Bearer second").status == 200
        assert place.ask("GET", "/").status == place.ask("GET", "/health").status == 200
        with pytest.raises(openai.AuthenticationError):
            place.client("none").chat.completions.create(model="tiny", messages=MESSAGES)
        ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
        with pytest.raises(openai.RateLimitError):  # its share, which is not the others'
            place.client("first").chat.completions.create(n=3, **ask)
        assert len(place.client("second").chat.completions.create(n=2, **ask).choices) == 2


def in_background(work) -> tuple[threading.Thread, list]:
    found: list = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_a_full_queue_says_when_to_come_again():
    with serving(make_engine(), max_sequences=1, max_waiting=1) as place, place.held() as held:
        decoder = place.service.decoder
        waiting = [in_background(place.chat)]
        wait_until(held.arrived.is_set)
        waiting.append(in_background(place.chat))
        wait_until(lambda: decoder.num_waiting == 1)
        told = place.chat()
        assert told.status == 429 and 1 <= int(told.headers["retry-after"]) <= 120
        assert told.json["error"]["type"] == "rate_limit_error"
        held.release()
        for thread, found in waiting:
            thread.join(WAIT_S)
            assert found[0].status == 200
        assert place.chat().status == 200


def test_many_at_once_each_get_what_they_would_alone(place, reference):
    asked = [SAMPLINGS[index % 3] | {"seed": index, "max_tokens": 6 + index} for index in range(12)]
    work = [in_background(lambda fields=fields: place.chat(**fields)) for fields in asked]
    for (thread, found), fields in zip(work, asked, strict=True):
        thread.join(WAIT_S)
        length = fields.pop("max_tokens")
        expected = alone(reference, AS_PROMPT, max_new_tokens=length, **fields)
        assert found[0].json["choices"][0]["message"]["content"] == expected.text
        figures = found[0].json["metrics"]["speculative_decoding"]
        assert figures["num_accepted_draft_tokens"] == expected.num_accepted


def test_in_turn_as_on_ranks_outputs_are_the_same_and_those_who_left_are_skipped(reference):
    expected = alone(reference, AS_PROMPT, seed=5).text
    with serving(make_engine(), in_turn=True) as place:
        told = place.chat(seed=5, n=2)
        assert told.json["choices"][0]["message"]["content"] == expected
        place.chat(stream=True, stop=expected[3])
        with contextlib.closing(open_request(place, n=8)):
            wait_until(lambda: place.service.decoder.num_waiting > 0)
        assert place.chat(seed=5).json["choices"][0]["message"]["content"] == expected


def open_request(place: Place, **fields) -> socket.socket:
    """Sent, and not read."""
    content = body(max_tokens=LENGTH, **fields)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", place.port), timeout=WAIT_S)
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_that_leaves_ends_its_sequence_alone(stream):
    with serving(make_engine(), max_sequences=1) as place, place.held() as held:
        service = place.service
        running = open_request(place, stream=stream)
        wait_until(held.arrived.is_set)
        waiting = open_request(place, stream=stream)
        wait_until(lambda: service.decoder.num_waiting == 1)
        other = in_background(place.chat)
        wait_until(lambda: service.decoder.num_waiting == 2)
        waiting.close()
        wait_until(lambda: service.decoder.num_waiting == 1)
        running.close()
        wait_until(lambda: service.num_open == 1)
        held.release()
        other[0].join(WAIT_S)
        assert other[1][0].status == 200
        page = place.ask("GET", "/metrics").content.decode()
        ended = 'pipedraft:request_success_total{finished_reason="%s",model_name="tiny"} %s'
        assert ended % ("abort", "2.0") in page and ended % ("length", "1.0") in page
        assert f'pipedraft:generation_tokens_total{{model_name="tiny"}} {LENGTH}.0' in page


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(stream):
    with serving(make_engine(), request_s=0.3) as place:
        with place.held():
            told = place.chat(stream=stream)
            if stream:
                assert told.status == 200 and b'"code":"timeout"' in told.content
            else:
                assert told.status == 504 and told.json["error"]["code"] == "timeout"
                assert told.headers["x-should-retry"] == "false"
            wait_until(lambda: place.service.num_open == 0)
        wait_until(lambda: place.service.decoder.num_running == 0)


def test_a_sequence_that_fails_takes_no_other_with_it(monkeypatch):
    decode = Engine.decode

    def failing(self, prompt_ids, **options):
        if len(prompt_ids) == 1:
            raise ZeroDivisionError("a defect")
        return decode(self, prompt_ids, **options)

    monkeypatch.setattr(Engine, "decode", failing)
    with serving(make_engine()) as place, place.held() as held:
        other = in_background(place.chat)
        wait_until(held.arrived.is_set)
        bad = {"prompt": "x", "max_tokens": 4}
        told = [in_background(lambda: place.ask("POST", "/v1/completions", bad)) for _ in range(2)]
        streamed = in_background(
            lambda: place.ask("POST", "/v1/completions", bad | {"stream": True})
        )
        wait_until(lambda: place.service.num_open == 4)
        held.release()
        for thread, found in (*told, streamed, other):
            thread.join(WAIT_S)
            assert b"defect" not in found[0].content
        assert {found[0].status for _, found in told} == {500}
        assert told[0][1][0].json["error"]["type"] == "server_error"
        assert b'"server_error"' in streamed[1][0].content
        assert other[1][0].status == 200 == place.chat().status


@pytest.mark.parametrize("hurries", [False, True])
def test_told_to_end_it_finishes_what_runs_and_refuses_the_rest(hurries):
    with serving(make_engine(), grace_s=WAIT_S) as place, place.held() as held:
        thread, found = in_background(place.chat)
        wait_until(held.arrived.is_set)
        place.service.end()
        wait_until(lambda: place.service.is_draining)
        told = place.chat()
        assert told.status == 503 and told.headers["retry-after"]
        assert place.ask("GET", "/health").status == 503
        if hurries:
            place.service.end()
            wait_until(lambda: place.service.is_ending)
        held.release()
        thread.join(WAIT_S)
        place.thread.join(WAIT_S)
        assert not place.thread.is_alive()
        assert found[0].status == (503 if hurries else 200)
        with pytest.raises(OSError):
            place.ask("GET", "/health")


@pytest.fixture
def command(parent, tmp_path):
    """Starts `pipedraft serve` as a process; it is ended with the test."""
    started = []

    def start(*arguments: str, **environment: str) -> tuple[Process, str]:
        module = "pipedraft.inference.serving"
        words = ("--port", "0", *arguments)
        process = Process.start(parent, tmp_path, *words, module=module, environment=environment)
        started.append(process)
        return process, process.wait_for(r"on https?://127\.0\.0\.1:(\d+) \(.*\n")[1]

    yield start
    for process in started:
        if process.status is None:
            process.send(signal.SIGKILL)
            process.finish()


def ask_at(port: str, **fields):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sesame", max_retries=0)
    said = [{"role": "user", "content": "How many legs do 12 cats have?"}]
    options = {"max_tokens": 8, "temperature": 0, **fields}
    return client.chat.completions.create(model="spd_n4", messages=said, **options)


def test_the_command_serves_a_checkpoint_until_a_signal(command, repository):
    assets = repository / "assets"
    words = ("--checkpoint", str(assets / "heads" / "spd_n4"), "--target", str(assets / "target"))
    process, port = command(*words, "--tree-width", "4", PIPEDRAFT_API_KEY="sesame")
    assert ask_at(port).choices[0].message.content == "There are 12 cats and "
    stream = ask_at(port, max_tokens=64, stream=True)
    next(iter(stream))
    process.send(signal.SIGTERM)  # what runs is finished
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    status, out, err = process.finish()
    assert (status, err) == (0, "") and "spd, n = 4, with API key" in out
    assert out.endswith("ended: 2 requests answered\n")


@pytest.mark.all
def test_the_command_decodes_on_ranks(repository):
    words = (
        "-m pipedraft.inference.serving --checkpoint assets/heads/spd_n4 --tree-width 4 --port 0"
    )
    ranks = ["--backend", "process", "--processes", "4"]
    process = subprocess.Popen(
        [sys.executable, *words.split(), *ranks],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        port = re.search(r":(\d+) ", process.stdout.readline())[1]
        assert ask_at(port).choices[0].message.content == "There are 12 cats and "
        told = ask_at(port, max_tokens=64, stop=" so ")
        assert told.choices[0].message.content.endswith("There are 12 cats,")
        assert told.metrics["speculative_decoding"]["num_stages"] == 4
        assert ask_at(port).choices[0].message.content == "There are 12 cats and "
    finally:
        process.terminate()
        process.wait(WAIT_S)
        process.stdout.close()


def test_with_a_certificate_it_speaks_tls(command, repository, tmp_path):
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    target = str(repository / "assets" / "target")
    _, port = command("--target", target, "--tls-cert", "cert.pem", "--tls-key", "key.pem")
    trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    with urllib.request.urlopen(
        f"https://127.0.0.1:{port}/v1/models", context=trusted, timeout=WAIT_S
    ) as answer:
        assert json.load(answer)["data"][0]["id"] == "target"


BAD = [
    ([], ["--checkpoint", "missing", "--target"]),
    (["--port", "70000"], ["--port", "70000", "0 to 65535"]),
    (["--host", "192.0.2.1"], ["--port", "192.0.2.1:0", "give another"]),
    (["--tls-cert", "a.pem"], ["--tls-cert", "--tls-key", "both"]),
    (["--tls-cert", "a.pem", "--tls-key", "a.pem"], ["--tls-cert", "a.pem", "PEM"]),
    (["--api-key-file", "a.pem"], ["--api-key-file", "a.pem", "write one"]),
    (["--api-key-file", "none"], ["--api-key-file", "none", "another file"]),
    (["--max-waiting", "0"], ["--max-waiting", "0", "at least 1"]),
    (["--request-s", "nan"], ["--request-s", "nan", "float"]),
    (["--temperature", "1"], ["--temperature", "unknown"]),
    (["--target", "nowhere"], ["target", "nowhere", "existing folder"]),
    (["--target", "nowhere", "--schedule", "spdd"], ["schedule", "'spdd'"]),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: " ".join(case[0]))
def test_bad_options_are_one_line_with_option_value_and_fix(case, tmp_path, monkeypatch, capfd):
    words, expected = case
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pem").write_text("no key, no certificate\n")
    status = call("serve", ["--port", "0", *words], monkeypatch)
    assert_one_line(status, *capfd.readouterr(), expected)


# -- metrics and the page ----------------------------------------------------------------------


def test_the_counters_add_up_to_what_the_answers_say():
    with serving(make_engine()) as place:
        answers = [place.chat(seed=seed).json["metrics"] for seed in range(3)]
        place.chat(max_tokens=0)
        told = place.ask("GET", "/metrics")
    figures = [answer["speculative_decoding"] for answer in answers]
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(told.content.decode())
        for sample in family.samples
        if "le" not in sample.labels
    }
    for name, field in (
        ("spec_decode_num_drafts", "num_spec_steps"),
        ("spec_decode_num_draft_tokens", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens", "num_accepted_draft_tokens"),
        ("pipeline_steps", "num_steps"),
    ):
        assert found[f"pipedraft:{name}_total"] == sum(f[field] for f in figures) > 0
    expected = {
        "prompt_tokens_total": 3 * len(AS_PROMPT),
        "generation_tokens_total": 3 * LENGTH,
        "request_success_total": 3,
        "request_refused_total": 1,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 3 * (LENGTH - 1),
        "request_time_per_output_token_seconds_count": 3,
        "e2e_request_latency_seconds_count": 3,
        "request_queue_time_seconds_count": 3,
        "step_time_seconds_count": sum(f["num_steps"] for f in figures),
        "equivalent_acceptance_length_count": 3,
    }
    assert {name: found[f"pipedraft:{name}"] for name in expected} == expected
    lengths = sum(f["equivalent_acceptance_length"] for f in figures)
    assert found["pipedraft:equivalent_acceptance_length_sum"] == pytest.approx(lengths)


def test_the_page_has_nothing_from_elsewhere_and_runs_no_other_script(place):
    told = place.ask("GET", "/")
    policy, page = told.headers["content-security-policy"], told.content.decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.findall(
        r"https?://|innerHTML|outerHTML|insertAdjacent|\son\w+=|style=|eval", page
    )
