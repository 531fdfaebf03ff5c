"""Acceptance by the target's entropy: tested tokens, their entropy, the bins."""

import math

import numpy as np
import pytest
import torch
from decode_runs import CHAIN, SMALL, PlainTokenizer
from eval_runs import make_prompts, prompt_record
from tiny_drafts import noisy_copy
from tiny_models import byte_tokenizer, tiny_llama

from pipedraft.eval import lossless
from pipedraft.eval.evaluation import EvalMethod, Evaluation
from pipedraft.eval.intervals import wilson_over_prompts
from pipedraft.eval.lossless import entropies, output_entropies, output_logits
from pipedraft.eval.metrics import (
    AUTOREGRESSIVE,
    ENTROPY_EDGES,
    acceptance_by_entropy,
    count_by_entropy,
    token_tests,
)
from pipedraft.eval.traces import TraceFile
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import DecodeResult

WAYS = [
    {"schedule": "spd"},
    {"schedule": "spd", "temperature": 1.0},
    {"schedule": "pipedec", "tree_width": 3},
    {"schedule": "eagle", "tree": CHAIN},
    {"schedule": "pruned_pp", "tree": SMALL},
    {"schedule": "flowspec_continued"},
    {"schedule": "pipeinfer"},
    {"schedule": "ppsd"},
    {"schedule": "autoregressive"},
]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(layers=4, vocab=16)


@pytest.fixture(scope="module")
def draft(target):
    return noisy_copy(target)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way.values())))
def test_the_tested_tokens_are_those_that_the_engine_counted(way, target, draft) -> None:
    """Compare the positions in the round too; the output ends in the middle of one."""
    config = DecodeConfig.of(num_stages=3, max_new_tokens=20, **way)
    result = Engine(target, PlainTokenizer(), config, draft).decode([1, 2, 3])
    starts = np.cumsum([1, *result.round_lengths])
    tests, accepts = [], []
    for index, accepted in token_tests(result):
        place = index - int(starts[starts <= index][-1])
        tests += [0] * (place + 1 - len(tests))
        accepts += [0] * (place + 1 - len(accepts))
        tests[place] += 1
        accepts[place] += accepted
    assert (tests, accepts) == (result.position_tests, result.position_accepts)
    assert bool(tests) == (way["schedule"] != AUTOREGRESSIVE)


def test_entropies_are_those_of_single_tokens(target) -> None:
    prompt, tokens = [1, 2, 3], [4, 5, 6, 7]
    found = entropies(output_logits(target, prompt, tokens))
    for place, entropy in enumerate(found):
        ids = torch.tensor([[*prompt, *tokens[:place]]])
        log_p = torch.log_softmax(target(ids).logits[0, -1].double(), -1)
        assert entropy == pytest.approx(float(-(log_p.exp() * log_p).sum()), abs=1e-4)


def test_entropies_of_certain_and_of_even_rows(monkeypatch) -> None:
    monkeypatch.setattr(lossless, "CHUNK_ROWS", 1)
    rows = torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf], [1.0, 1.0, 1.0, 1.0]])
    assert entropies(rows) == pytest.approx([0.0, math.log(4)])
    assert entropies(rows.bfloat16()) == pytest.approx([0.0, math.log(4)])


def test_a_text_is_computed_once_and_kept(target, tmp_path, monkeypatch) -> None:
    result = DecodeResult([1, 2], [3, 4, 5], "", "eos", 4)
    traces = TraceFile(tmp_path, {"entropies": 1})
    first = output_entropies(target, result, traces)
    assert len(first) == 3
    monkeypatch.setattr(lossless, "output_logits", None)  # would fail
    assert output_entropies(target, result, traces) == first
    traces = TraceFile(tmp_path, {"entropies": 1})
    assert output_entropies(target, result, traces) == first
    with pytest.raises(TypeError):
        output_entropies(target, DecodeResult([1, 2], [3, 4, 6], "", "eos", 4), traces)


def test_tests_fall_into_the_bins_of_their_entropies() -> None:
    result = DecodeResult([1], [0] * 8, "", "eos", 4, round_lengths=[3, 1, 2, 1], round_ends="ruua")
    #        prefill  1     2     3 r   4 u  5     6 u  7 a
    found = [9.0, -1e-9, 0.05, 0.19, 9.0, 3.0, 9.0, 50.0]
    tests, accepts = count_by_entropy(result, found)
    assert tests == [1, 2, 0, 0, 0, 0, 2] and accepts == [1, 1, 0, 0, 0, 0, 2]
    rows = [prompt_record(entropy_tests=tests, entropy_accepts=accepts)] * 2 + [prompt_record()]
    bins = acceptance_by_entropy(rows)
    assert [b.entropy_from for b in bins] == list(ENTROPY_EDGES)
    assert [b.entropy_to for b in bins] == [*ENTROPY_EDGES[1:], math.inf]
    assert [b.tests for b in bins] == [2, 4, 0, 0, 0, 0, 4]
    assert bins[1].draft_acceptance_rate == 0.5 and math.isnan(bins[2].draft_acceptance_rate)
    expected = wilson_over_prompts(np.array([1, 1]), np.array([2, 2]))
    assert bins[1].draft_acceptance_rate_ci95 == expected
    assert acceptance_by_entropy([prompt_record()]) == []


def test_a_certain_target_is_drafted_for_better_and_entries_say_so(tmp_path) -> None:
    """End to end: a noisy copy agrees where the target is sure."""
    tokenizer = byte_tokenizer()
    model = tiny_llama(layers=2, vocab=len(tokenizer))
    model.lm_head.weight.mul_(4)
    prompts = {
        name: make_prompts(name, *([f"{name} {i}"] for i in range(3))) for name in ("one", "two")
    }
    config = DecodeConfig.of(schedule="spd", num_stages=2, max_new_tokens=24)
    method = EvalMethod(name="spd", config=config, draft=noisy_copy(model, 0.3))

    def entries(reference):
        comparison = Evaluation(
            target=model, tokenizer=tokenizer, benchmarks=prompts, reference=reference,
        )  # fmt: skip
        return comparison.run([method])

    found = entries(model)
    for entry in found:
        bins = entry.acceptance_by_entropy
        assert sum(b.tests for b in bins) == sum(entry.position_tests)
        assert sum(b.accepts for b in bins) == sum(entry.position_accepts)
        assert bool(bins) == (entry.schedule != AUTOREGRESSIVE)
    overall = found[-1].acceptance_by_entropy
    parts = [entry.acceptance_by_entropy for entry in found[3:5]]
    for pooled, first, second in zip(overall, *parts, strict=True):
        assert pooled.tests == first.tests + second.tests
    sure = [sum(getattr(b, f) for b in overall[:4]) for f in ("accepts", "tests")]
    torn = [sum(getattr(b, f) for b in overall[4:]) for f in ("accepts", "tests")]
    assert sure[0] / sure[1] > torn[0] / torn[1]
    assert all(entry.acceptance_by_entropy == [] for entry in entries(None))
