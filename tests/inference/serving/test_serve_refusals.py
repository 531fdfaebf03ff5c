"""Forbidden requests to `pipedraft serve`: one error in OpenAI's shape, and nothing ends."""

import json
import socket

import openai
import pytest
from http_runs import MESSAGES, WAIT_S, body, make_engine, serving, wait_until

from pipedraft.inference.serving.listen import open_socket
from pipedraft.inference.serving.options import HttpOptions
from pipedraft.inference.serving.requests import ChatRequest, CompletionRequest, parse


@pytest.fixture(scope="module")
def place():
    with serving(make_engine()) as made:
        yield made


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


def turn(**fields) -> bytes:
    return body(messages=[fields])


HOSTILE = [
    (b"", 400, "body"),
    (b"{", 400, "JSON"),
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
    (body(max_tokens=5000), 400, "max_tokens"),
    (body(max_tokens=True), 400, "max_tokens"),
    (body(temperature=-1), 400, "temperature"),
    (body(top_p=0), 400, "top_p"),
    (body(top_k=2**40), 400, "top_k"),
    (body(n=0), 400, "n"),
    (body(n=9), 400, "n"),
    (body(seed=2**64), 400, "seed"),
    (body(stop=""), 400, "stop"),
    (body(stop=["a"] * 17), 400, "stop"),
    (body(stream="yes"), 400, "stream"),
    (body(stream_options={"include_usage": 1}), 400, "stream_options"),
    (body(stream_options={"include_usage": True}), 400, "stream_options"),
    (body(pipedraft_events=True), 400, "pipedraft_events"),
    (body(model="other"), 404, "model"),
    (body(messages=[]), 400, "messages"),
    (body(messages="hi"), 400, "messages"),
    (b'{"max_tokens": 2}', 400, "messages"),
    (turn(role="robot", content="a"), 400, "role"),
    (turn(content="a"), 400, "role"),
    (turn(role="user"), 400, "content"),
    (turn(role="user", content="a", tool_calls=[{}]), 400, "tool_calls"),
    (turn(role="user", content=[{"type": "image_url", "image_url": {}}]), 400, "content"),
    (turn(role="user", content="a b"), 400, "messages"),  # no token of this vocabulary
    (turn(role="user", content="a" * 3000), 400, "messages"),
    (body(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (body(top_logprobs=2), 400, "top_logprobs"),
    (body(enable_thinking=False), 400, "chat_template_kwargs"),
    (body(do_sample=False), 400, "do_sample"),
    (body(min_tokens=3), 400, "min_tokens"),
    (body(stop_token_ids=[94]), 400, "stop_token_ids"),
    (body(guided_json={}), 400, "guided_json"),
    (body(max_new_tokens=4), 400, "max_new_tokens"),
    (body(tools=[{"type": "function"}]), 400, "tools"),
    (body(response_format={"type": "json_object"}), 400, "response_format"),
    (body(grammar="root ::= x"), 400, "grammar"),
    (body(top_a=0.2), 400, "top_a: not supported"),
    (body(logit_bias={"1": 5}), 400, "logit_bias"),
    (body(frequency_penalty=0.5), 400, "frequency_penalty"),
    (body(temprature=1), 400, "did you mean temperature"),
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
    assert place.service.admissions.num_open == 0 and place.ask("GET", "/health").json == {
        "status": "ok"
    }


def test_other_requests_get_errors_of_the_same_shape(place):
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
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
        mirostat=0,
        top_a=0,
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
    asked = parse(b'{"messages": [{"role": "user", "content": "a"}], "top_k": -1}', ChatRequest)[0]
    assert asked.top_k == -1 and asked.longest() is None


def test_a_client_that_leaves_inside_its_body_is_no_fault(place, caplog):
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", place.port), timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
    left = 'pipedraft:request_refused_total{model_name="tiny",status="499"} 1.0'
    wait_until(lambda: left in place.ask("GET", "/metrics").content.decode())
    assert caplog.records == []


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_may_have_brackets(host):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with open_socket(HttpOptions(host=host, port=0)) as listening:
        assert listening.getsockname()[0] == "::1"
