"""Requests from clients written for vLLM and OpenAI to `pipedraft serve`, and the responses."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from http_runs import LENGTH, PROMPT, VOCABULARY, alone, make_engine, serving

from pipedraft.inference.serving.metrics import COUNTERS, GAUGES, HISTOGRAMS, LABELS, Metrics

AS_PROMPT = f"user:{PROMPT};"
IGNORED = "x-pipedraft-ignored"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def reference():
    return make_engine()


@pytest.fixture(scope="module")
def place():
    with serving(make_engine()) as made:
        yield made


def text_of(told) -> str:
    assert told.status == 200, told.content
    return told.json["choices"][0]["message"]["content"]


def chunks_of(told) -> list[dict]:
    assert told.status == 200, told.content
    return [json.loads(line) for line in re.findall(rb"data: (\{.*)", told.content)]


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 9e-5])
def test_a_temperature_near_0_is_greedy(place, reference, temperature):
    expected = alone(reference, AS_PROMPT, temperature=0.0).text
    assert text_of(place.chat(temperature=temperature, top_p=0.9)) == expected


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_every_int64_is_a_seed(place, seed):
    told = place.chat(seed=seed, n=2, max_tokens=2)
    assert told.status == 200 and told.json["seed"] == seed


def test_every_chunk_has_the_usage_where_that_is_asked_for(place):
    usage = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": None}
    chunks = chunks_of(place.chat(stream=True, stream_options=usage, **GREEDY))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == LENGTH
    chunks = chunks_of(place.chat(stream=True, stream_options=usage | {"future": 1}, **GREEDY))
    assert chunks[-1]["usage"]["completion_tokens"] == LENGTH


def test_unknown_fields_are_ignored_and_named(place):
    message = {"role": "user", "content": PROMPT, "cache_control": {"type": "x"}, "odd": 1}
    for stream in (False, True):
        told = place.chat(messages=[message], frobnicate=1, stream=stream, **{"a\r\nb": 2})
        assert told.status == 200 and told.headers[IGNORED] == "a??b, frobnicate, messages.odd"
    assert len(place.chat(**{"x" * 5000: 1}).headers[IGNORED]) == 64
    assert IGNORED not in place.chat(user="me", max_tokens=1).headers


def test_parts_of_every_client_are_text(place):
    parts = [
        {"type": "text", "text": "Hel", "image_url": None, "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "l"},
        "o",
    ]
    expected = text_of(place.chat(**GREEDY))
    told = place.chat(messages=[{"role": "user", "content": parts, "name": None}], **GREEDY)
    assert text_of(told) == expected and IGNORED not in told.headers


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_an_echoed_reasoning_reaches_the_template(place, field, monkeypatch):
    tokenizer = place.service.admissions.tokenizer
    template = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.content }};{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    turn = {"role": "assistant", "content": None, field: "ab"}
    told = place.chat(messages=[turn, {"role": "user", "content": "c"}], max_tokens=1)
    assert told.json["usage"]["prompt_tokens"] == len("ab/;/c;")


def test_a_stop_token_ends_the_text_before_it(place, reference):
    whole = alone(reference, AS_PROMPT, temperature=0.0)
    token = whole.token_ids[5]
    count = whole.token_ids.index(token) + 1
    told = place.chat(stop_token_ids=[token], **GREEDY).json
    choice = told["choices"][0]
    assert choice["message"]["content"] == reference.tokenizer.decode(whole.token_ids[: count - 1])
    assert choice["finish_reason"] == "stop" and told["usage"]["completion_tokens"] == count


def test_min_tokens_keeps_ends_from_being_drawn(place, reference):
    token = alone(reference, AS_PROMPT, temperature=0.0).token_ids[0]
    for sampling in (GREEDY, {"temperature": 0.9, "seed": 3}):
        told = place.chat(stop_token_ids=[token], min_tokens=9, logprobs=True, **sampling).json
        entries = told["choices"][0]["logprobs"]["content"]
        first = reference.tokenizer.decode([token])
        assert len(entries) >= 9 and first not in [one["token"] for one in entries[:9]]


def test_ignore_eos_goes_on_behind_it(reference, monkeypatch):
    token = alone(reference, AS_PROMPT, temperature=0.0).token_ids[3]
    engine = make_engine()
    engine.target.model.config.eos_token_id = token
    engine.target.model.generation_config.eos_token_id = token
    with serving(engine) as place:
        ended = place.chat(**GREEDY).json
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert ended["usage"]["completion_tokens"] <= 4
        told = place.chat(ignore_eos=True, **GREEDY).json
        assert told["usage"]["completion_tokens"] == LENGTH
        assert told["choices"][0]["finish_reason"] == "length"


def test_logprobs_are_the_targets_of_every_emitted_token(place, reference):
    whole = alone(reference, AS_PROMPT, temperature=0.0)
    ids = torch.tensor([[*whole.prompt_ids, *whole.token_ids]])
    logp_LV = reference.target.model(ids).logits[0].log_softmax(-1)[len(whole.prompt_ids) - 1 : -1]
    expected = logp_LV.gather(1, torch.tensor(whole.token_ids)[:, None])[:, 0].tolist()
    ask = {"logprobs": True, "top_logprobs": 2, **GREEDY}
    found = place.chat(**ask).json["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in found] == pytest.approx(expected, abs=1e-3)
    assert "".join(one["token"] for one in found) == whole.text
    assert all(one["top_logprobs"][0]["token"] == one["token"] for one in found)
    assert all(len(one["top_logprobs"]) == 2 for one in found)
    chunks = chunks_of(place.chat(stream=True, **ask))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [one["logprob"] for part in parts if part for one in part["content"]]
    assert streamed == pytest.approx(expected, abs=1e-3)
    body = {"prompt": AS_PROMPT, "max_tokens": LENGTH, "logprobs": 1, **GREEDY}
    plain = place.ask("POST", "/v1/completions", body).json["choices"][0]["logprobs"]
    assert plain["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    assert plain["text_offset"] == list(range(LENGTH)) and math.isfinite(plain["text_offset"][0])


def test_the_tokenizer_is_asked_alone(place, reference):
    ids = reference.tokenizer("abc").input_ids
    told = place.ask("POST", "/tokenize", {"prompt": "abc"}).json
    assert (told["count"], told["tokens"]) == (3, ids) and told["max_model_len"] > 0
    messages = [{"role": "user", "content": PROMPT}]
    assert place.ask("POST", "/tokenize", {"messages": messages}).json["count"] == len(AS_PROMPT)
    assert place.ask("POST", "/detokenize", {"tokens": ids}).json == {"prompt": "abc"}
    for body in ({}, {"prompt": "a", "messages": messages}, {"model": "x", "prompt": "a"}):
        assert place.ask("POST", "/tokenize", body).status in (400, 404)
    assert place.ask("POST", "/detokenize", {"tokens": [VOCABULARY]}).status == 400


def test_version_and_schema_are_told(place):
    assert re.match(r"\d+\.", place.ask("GET", "/version").json["version"])
    document = place.ask("GET", "/openapi.json").json
    assert document["openapi"].startswith("3.") and "/v1/chat/completions" in document["paths"]
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "min_tokens", "seed"} <= chat.keys()


def test_metrics_have_vllms_names_where_that_is_asked_for(place):
    assert b"vllm:" not in place.ask("GET", "/metrics").content
    place.service.metrics._has_vllm_names = True
    try:
        page = place.ask("GET", "/metrics").content.decode()
    finally:
        place.service.metrics._has_vllm_names = False
    assert 'vllm:generation_tokens_total{model_name="tiny"}' in page
    assert "vllm:time_to_first_token_seconds_bucket" in page
    assert "vllm:pipeline_steps" not in page and "pipedraft:pipeline_steps" in page


def test_every_metric_without_a_reason_is_shown_before_the_first_request():
    nobody = SimpleNamespace(num_waiting=0, num_live=0)
    page = Metrics("tiny").page(nobody).decode()
    shown = [*GAUGES, *(f"{name}_count" for name in HISTOGRAMS)]
    shown += [f"{name}_total" for name in COUNTERS.keys() - LABELS.keys()]
    for name in shown:
        assert f'pipedraft:{name}{{model_name="tiny"}} 0.0\n' in page
