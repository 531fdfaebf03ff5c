"""`pipedraft serve`: OpenAI's own client, careless clients, and the server's messages."""

import base64
import gc
import hashlib
import json
import re
import socket
import threading
from concurrent.futures import Future
from itertools import accumulate

import openai
import pytest
from http_runs import (
    LENGTH,
    MESSAGES,
    PROMPT,
    WAIT_S,
    Place,
    alone,
    body,
    make_engine,
    serving,
    wait_until,
)
from prometheus_client.parser import text_string_to_metric_families

from pipedraft.inference.batch import Handle
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.shared import SharedStages
from pipedraft.inference.schedules.autoregressive import Autoregressive
from pipedraft.inference.serving.answers import Choice, Piece

AS_PROMPT = f"user:{PROMPT};"
"""Prompt after the tests' chat template."""
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


def streamed(place: Place, **fields) -> tuple[str, list]:
    """Return the output streamed to OpenAI's client, and its chunks."""
    ask = {"model": "tiny", "messages": MESSAGES, "stream": True, **fields}
    chunks = list(place.client().chat.completions.create(**ask))
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
    accepted, drafted = figures["per_step_accepted"], figures["per_step_drafted"]
    assert [accepted.count(j) for j in range(len(histogram))] == histogram
    assert sum(drafted) == expected.num_tested
    pairs = list(zip(accepted, drafted, strict=True))
    for place, tests in enumerate(expected.position_tests):
        assert sum(d > place for _, d in pairs) == tests
        assert sum(a > place for a, _ in pairs) == expected.position_accepts[place]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_has_the_token_ids_on_request(place, reference, path):
    said = {"messages": MESSAGES} if "chat" in path else {"prompt": AS_PROMPT}
    asked = {"max_tokens": LENGTH, "temperature": 0, "return_token_ids": True, **said}
    told = place.ask("POST", path, asked).json
    expected = alone(reference, AS_PROMPT, temperature=0.0, verifier="auto")
    (choice,) = told["choices"]
    assert choice["token_ids"] == expected.token_ids
    prompt = (told if "chat" in path else choice)["prompt_token_ids"]
    assert prompt == expected.prompt_ids
    refused = place.ask("POST", path, asked | {"stream": True})
    assert refused.status == 400 and "return_token_ids" in refused.json["error"]["message"]
    assert (
        "token_ids"
        not in place.ask("POST", path, asked | {"return_token_ids": False}).json["choices"][0]
    )


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=ids_of)
def test_a_stream_has_the_same_text_and_says_who_made_each_token(place, reference, sampling):
    expected = alone(reference, AS_PROMPT, **sampling)
    text, chunks = streamed(
        place,
        max_completion_tokens=LENGTH,
        stream_options={"include_usage": True},
        extra_body={"pipedraft_events": True},
        **sampling,
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
    wrong = [event for event in events if event["rejected"]]
    assert len(wrong) == expected.num_tested - expected.num_accepted > 0
    assert all(event["origin"] == "target" for event in wrong)
    steps = [rows for event in events for rows in event["steps"]]
    assert len(steps) == expected.num_steps and {len(rows) for rows in steps} == {2}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=ids_of)
def test_a_request_can_leave_the_draft_out(place, reference, sampling):
    sampled = {"verifier": "gumbel"} if sampling["temperature"] else {}
    plain = {"schedule": Autoregressive(), **sampling, **sampled}
    expected = alone(reference, AS_PROMPT, **plain)
    told = place.chat(pipedraft_draft=False, **sampling).json
    assert told["choices"][0]["message"]["content"] == expected.text
    figures = told["metrics"]["speculative_decoding"]
    assert (figures["num_draft_tokens"], figures["num_steps"]) == (0, 2 * (LENGTH - 1))


def test_without_usage_the_last_chunk_has_the_figures(place):
    text, chunks = streamed(place, max_tokens=4, seed=1)
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
    events = {"pipedraft_events": True}
    _, chunks = streamed(place, max_tokens=LENGTH, temperature=0, stop=stop, extra_body=events)
    assert sum(hasattr(chunk, "pipedraft") for chunk in chunks) == LENGTH  # held back or not
    pieces = [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content]
    assert "".join(pieces) == whole
    ends = set(accumulate(map(len, pieces)))
    assert ends == set(range(1, LENGTH + 1)) - {5, 6, 7, 8}


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
        first = place.client("first").chat.completions
        with pytest.raises(openai.BadRequestError, match="at most 2"):  # however long it waits
            first.create(n=3, **ask)
        with place.held() as held:
            answer = in_background(lambda: first.create(n=2, **ask))
            wait_until(held.arrived.is_set)
            with pytest.raises(openai.RateLimitError):  # its share, not the others'
                first.create(**ask)
            held.release()
        assert len(answer.result(WAIT_S).choices) == 2
        assert len(place.client("second").chat.completions.create(n=2, **ask).choices) == 2


def in_background(work) -> Future:
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_a_full_queue_says_when_to_come_again(monkeypatch):
    with serving(make_engine(), max_sequences=1, max_waiting=1) as place, place.held() as held:
        decoder = place.service.decoder
        waiting = [in_background(place.chat)]
        wait_until(held.arrived.is_set)
        waiting.append(in_background(place.chat))
        wait_until(lambda: decoder.batch.num_waiting == 1)
        with monkeypatch.context() as without:
            without.setattr(
                place.service.admissions, "_encode", None
            )  # a busy server tokenizes nothing
            told = place.chat()
        assert told.status == 429 and 1 <= int(told.headers["retry-after"]) <= 120
        assert told.json["error"]["type"] == "rate_limit_error"
        told = place.chat(n=3)  # however long it waits
        assert told.status == 400 and "at most 2" in told.json["error"]["message"]
        held.release()
        assert [answer.result(WAIT_S).status for answer in waiting] == [200, 200]
        assert place.chat().status == 200


def test_many_at_once_each_get_what_they_would_alone(place, reference):
    asked = [SAMPLINGS[index % 3] | {"seed": index, "max_tokens": 6 + index} for index in range(12)]
    work = [in_background(lambda fields=fields: place.chat(**fields)) for fields in asked]
    for answer, fields in zip(work, asked, strict=True):
        length = fields.pop("max_tokens")
        expected = alone(reference, AS_PROMPT, max_new_tokens=length, **fields)
        told = answer.result(WAIT_S).json
        assert told["choices"][0]["message"]["content"] == expected.text
        figures = told["metrics"]["speculative_decoding"]
        assert figures["num_accepted_draft_tokens"] == expected.num_accepted


def open_request(place: Place, **fields) -> socket.socket:
    """Send a request and do not read the response."""
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
        wait_until(lambda: service.decoder.batch.num_waiting == 1)
        other = in_background(place.chat)
        wait_until(lambda: service.decoder.batch.num_waiting == 2)
        waiting.close()
        wait_until(lambda: service.decoder.batch.num_waiting == 1)
        running.close()
        wait_until(lambda: service.admissions.num_open == 1)
        held.release()
        assert other.result(WAIT_S).status == 200
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
            wait_until(lambda: place.service.admissions.num_open == 0)
        wait_until(lambda: place.service.decoder.batch.num_live == 0)


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
        path, bad = "/v1/completions", {"prompt": "x", "max_tokens": 4}
        asked = [
            in_background(lambda stream=stream: place.ask("POST", path, bad | {"stream": stream}))
            for stream in (False, False, True)
        ]
        wait_until(lambda: place.service.admissions.num_open == 4)
        held.release()
        *whole, streamed, right = (answer.result(WAIT_S) for answer in (*asked, other))
        assert not any(b"defect" in told.content for told in (*whole, streamed, right))
        assert [told.status for told in whole] == [500, 500]
        assert whole[0].json["error"]["type"] == "server_error"
        assert b'"server_error"' in streamed.content
        assert right.status == 200 == place.chat().status


def test_nothing_is_left_of_requests_that_have_ended(place):
    """Count without garbage collection: the next one may be thousands of requests later."""

    def records():
        kinds = (Choice, Handle, Piece, SharedStages)
        return sum(type(thing) in kinds for thing in gc.get_objects())

    place.chat()
    gc.collect()
    gc.disable()
    try:
        for stream in (False, True, False, True):
            assert place.chat(stream=stream).status == 200
        wait_until(lambda: place.service.admissions.num_open == 0)
        wait_until(lambda: records() == 0)
    finally:
        gc.enable()


@pytest.mark.parametrize("hurries", [False, True])
def test_told_to_end_it_finishes_what_runs_and_refuses_the_rest(hurries):
    with serving(make_engine(), grace_s=WAIT_S) as place, place.held() as held:
        answer = in_background(place.chat)
        wait_until(held.arrived.is_set)
        place.service.end()
        wait_until(lambda: place.service.admissions.is_draining)
        told = place.chat()
        assert told.status == 503 and told.headers["retry-after"]
        assert place.ask("GET", "/health").status == 503
        if hurries:
            place.service.end()
            answer.result(WAIT_S)  # though its sequence goes no further
            assert place.service.admissions.num_open == 0
        held.release()
        assert answer.result(WAIT_S).status == (503 if hurries else 200)
        place.thread.join(WAIT_S)
        assert not place.thread.is_alive()
        with pytest.raises(OSError):
            place.ask("GET", "/health")


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


FOREIGN = re.compile(
    r"https?://|innerHTML|outerHTML|setHTML|insertAdjacent|document\.write|DOMParser|"
    r"createContextualFragment|srcdoc|\son\w+=|style=|eval"
)
"""Ways to turn text into more than text, or to load from elsewhere."""


def test_the_page_has_nothing_from_elsewhere_and_runs_no_other_script(place):
    told = place.ask("GET", "/")
    policy, page = told.headers["content-security-policy"], told.content.decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not FOREIGN.search(page)
    safe = "made.textContent = text"
    for unsafe in ("made.innerHTML = text", "document.write(text)", "made.setHTMLUnsafe(text)"):
        assert safe in page and FOREIGN.search(page.replace(safe, unsafe))
