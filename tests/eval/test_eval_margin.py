"""Greedy outputs in half precision: ties within rounding are told apart from faults."""

import pytest
import torch
from decode_runs import SMALL, engine_for
from eval_runs import first_layer
from tiny_models import tiny_llama

from pipedraft.eval.lossless import BestFew, GreedyReference, generate_greedy, pool_checks
from pipedraft.eval.record import LosslessRecord
from pipedraft.eval.traces import TraceFile
from pipedraft.inference.result import DecodeResult

NEW_TOKENS = 20
PROMPTS = [[seed % 16, (7 * seed + 3) % 16, (5 * seed + 1) % 16] for seed in range(12)]


@pytest.fixture(scope="module")
def half():
    target = tiny_llama(layers=4, hidden=16, vocab=16)
    target.lm_head.weight.mul_(4)
    return target.bfloat16()


def as_result(prompt: list[int], tokens: list[int]) -> DecodeResult:
    return DecodeResult(prompt, tokens, "", "max_new_tokens", 4)


def decode(target, prompts=PROMPTS, **way) -> list[DecodeResult]:
    draft = first_layer(target).to(target.dtype)
    engine = engine_for(target, draft=draft, num_stages=4, max_new_tokens=NEW_TOKENS, **way)
    return [engine.decode(prompt) for prompt in prompts]


def test_noting_the_best_tokens_changes_nothing_and_finds_the_margins(half) -> None:
    best = BestFew()
    tokens = generate_greedy(half, PROMPTS[0], max_new_tokens=8, best_few=best)
    assert tokens == generate_greedy(half, PROMPTS[0], max_new_tokens=8)
    assert [int(few[0]) for few in best.tokens] == tokens
    assert all(margins.diff().min() >= 0 for margins in best.margins)
    logits_V = half(torch.tensor([PROMPTS[0]])).logits[0, -1].float().sort(descending=True).values
    torch.testing.assert_close(best.margins[0], (logits_V[0] - logits_V[1:8]), atol=0.05, rtol=0)


@pytest.mark.parametrize(("dtype", "seed"), [(torch.bfloat16, 2), (torch.float16, 1)])
def test_half_precision_differs_by_ties_alone(dtype, seed) -> None:
    """Tokens have twins with almost equal logits; segment shapes differ from one token's."""
    target = tiny_llama(layers=4, hidden=16, vocab=16, seed=seed)
    head = target.lm_head.weight
    head[8:] = head[:8] + 1e-4 * head[8:]
    target.to(dtype)
    reference = GreedyReference(target, NEW_TOKENS)
    check = reference.check(decode(target, schedule="eagle", tree=SMALL))
    assert check.checked == len(PROMPTS) and check.faults == 0
    assert check.mismatches > 0, "no tie fell differently: the test says nothing"
    assert check.noise is not None and 0 < check.noise < 1
    assert all(margin <= max(check.noise, 0.1) for margin in check.margins)
    assert check.near_ties is not None and check.mismatches <= check.near_ties
    assert check.ties == check.mismatches


def test_a_planted_fault_is_found_among_ties(half, monkeypatch) -> None:
    """Known-bad target: the stages see every position one too far, reading and writing."""
    from pipedraft.inference.tree import TokenTree

    positions = TokenTree.positions
    monkeypatch.setattr(TokenTree, "positions", lambda *a: positions(*a) + 3)
    reference = GreedyReference(half, NEW_TOKENS)
    check = reference.check(decode(half, PROMPTS[:4], schedule="spd"))
    assert check.faults > 0


def test_one_wrong_token_is_a_tie_or_a_fault_by_its_margin(half) -> None:
    reference = GreedyReference(half, NEW_TOKENS)
    text = reference.output(PROMPTS[0])
    surest = max(range(NEW_TOKENS), key=text.margins.__getitem__)
    assert text.margins[surest] > 1
    ids = torch.tensor([[*PROMPTS[0], *text.tokens[:surest]]])
    second = int(half(ids).logits[0, -1].topk(2).indices[1])
    wrong = [*text.tokens[:surest], second, *text.tokens[surest + 1 :]]
    check = reference.check([as_result(PROMPTS[0], wrong), as_result(PROMPTS[0], text.tokens)])
    assert (check.checked, check.mismatches, check.faults) == (2, 1, 1)
    assert check.margins[0] == pytest.approx(text.margins[surest], abs=text.noise + 1e-6)
    short = reference.check([as_result(PROMPTS[0], text.tokens[:-1])])
    assert (short.mismatches, short.faults) == (1, 1)


def test_a_single_precision_target_has_no_ties() -> None:
    target = tiny_llama(layers=4, hidden=16, vocab=16)
    reference = GreedyReference(target, NEW_TOKENS)
    check = reference.check(decode(target, PROMPTS[:4], schedule="spd"))
    assert check == LosslessRecord(checked=4, mismatches=0)
    tokens = reference.output(PROMPTS[0]).tokens
    wrong = [*tokens[:-1], (tokens[-1] + 1) % 16]
    check = reference.check([as_result(PROMPTS[0], wrong)])
    assert check == LosslessRecord(checked=1, mismatches=1)


def test_reference_texts_are_kept_with_their_margins(half, tmp_path, monkeypatch) -> None:
    def reference() -> GreedyReference:
        return GreedyReference(half, 8, TraceFile(tmp_path, {"greedy": 1}, (0, 1)))

    text = reference().output(PROMPTS[0])
    monkeypatch.setattr("pipedraft.eval.lossless.generate_greedy", None)  # would fail
    assert reference().output(PROMPTS[0]) == text


def test_checks_of_benchmarks_add_up() -> None:
    one = LosslessRecord(checked=3, mismatches=2, faults=1, near_ties=4, positions=30, noise=0.1,
                         margins=[0.05, 2.0], ties=1)  # fmt: skip
    two = LosslessRecord(checked=1, mismatches=0, faults=0, near_ties=1, positions=9, noise=0.2,
                         margins=[], ties=0)  # fmt: skip
    both = pool_checks([one, two])
    assert (both.checked, both.mismatches, both.faults, both.near_ties) == (4, 2, 1, 5)
    assert (both.positions, both.noise, both.margins) == (39, 0.2, [0.05, 2.0]) and both.ties == 1
    exact = [LosslessRecord(checked=checked, mismatches=1) for checked in (1, 2)]
    assert pool_checks(exact) == LosslessRecord(checked=3, mismatches=2)
