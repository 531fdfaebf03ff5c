"""Several sessions in one forward pass: each gets the same result as alone."""

import pytest
import torch
from grpc_runs import drafted
from needs import NEEDS_KERNELS
from staged_targets import tiny
from tiny_models import tiny_llama, tiny_mistral, tiny_qwen3

from pipedraft.inference.edge.session_messages import Open, Preverify, Settings
from pipedraft.inference.edge.target_session import SharedTarget, TargetSession, run_together
from pipedraft.models.speed import kernels
from pipedraft.models.speed.rounded import round_target
from pipedraft.models.stages.together import can_run_together, forward_together
from pipedraft.models.target import KeepRows, Segment, StagedTarget

KEPT = {"test_rows_of_several_texts_are_what_each_gives_alone": 2}

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [2, 2]]
ROWS = [[3, 1], [7], [9, 9, 9, 2, 1], [0, 1, 2]]
TARGETS = {
    "llama": lambda: tiny_llama(layers=3, vocab=16),
    "qwen3": lambda: tiny_qwen3(layers=3, vocab=16),
    "mistral": lambda: tiny_mistral(layers=3, vocab=16),
    "sliding": lambda: tiny_mistral(layers=3, vocab=16, sliding_window=4),
}


def begin(model, prompt):
    staged = StagedTarget(model, 1)
    staged.prefill(torch.tensor(prompt))
    return staged


def segment_of(staged, ids):
    (stage,) = staged.stages
    first, base = stage.num_speculative, stage.num_committed
    return Segment(
        positions=torch.arange(len(ids)) + base + first,
        visible=torch.ones(len(ids), first + len(ids), dtype=torch.bool).tril(first),
        ids=torch.tensor(ids),
    )


def run_both_ways(model, turns):
    """Yield hidden states from shared and from single passes, as caches grow and roll back."""
    together = [begin(model, prompt) for prompt in PROMPTS]
    apart = [begin(model, prompt) for prompt in PROMPTS]
    for turn in range(turns):
        rows = [ids[turn % len(ids) :] + ids for ids in ROWS]
        stages = [staged.stages[0] for staged in together]
        segments = [segment_of(staged, ids) for staged, ids in zip(together, rows, strict=True)]
        hidden = forward_together(stages, segments)
        for index, (staged, ids) in enumerate(zip(apart, rows, strict=True)):
            (stage,) = staged.stages
            yield hidden[index].hidden, stage.forward(segment_of(staged, ids)).hidden
            num_kept = turn % stage.num_speculative + 1
            for one in (stage, stages[index]):
                one.keep(KeepRows(tuple(range(num_kept)), 2 * num_kept // 3))
    assert max(staged.stages[0].num_committed for staged in together) > 1.83 * turns


@pytest.mark.parametrize("name", TARGETS)
def test_rows_of_several_texts_are_what_each_gives_alone(name):
    for together, alone in run_both_ways(TARGETS[name](), turns=70):
        torch.testing.assert_close(together, alone, atol=2e-4, rtol=2e-4)


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.int4])
@pytest.mark.parametrize("name", ["qwen3", "sliding"])
def test_rounded_targets_give_a_row_the_same_bits_among_several_texts(name, dtype):
    model = TARGETS[name]()
    round_target(model, dtype)
    assert all((together == alone).all() for together, alone in run_both_ways(model, turns=12))


def by_torch(own, rows_MH, product=kernels.product):
    """Products that sum in another order for another row count, like a library's."""
    doubled = product(own, rows_MH)
    return doubled + len(rows_MH) * 1e-7


def with_one_scale(own, rows_MH, product=kernels.product):
    """Round inputs by the largest one in the pass."""
    step = rows_MH.abs().max() / 2**12
    return product(own, (rows_MH / step).round() * step)


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.int4])
@pytest.mark.parametrize("mutant", [by_torch, with_one_scale])
def test_products_that_depend_on_other_texts_would_be_noticed(mutant, dtype, monkeypatch):
    model = TARGETS["qwen3"]()
    round_target(model, dtype)
    monkeypatch.setattr(kernels, "product", mutant)
    assert not all((together == alone).all() for together, alone in run_both_ways(model, turns=12))


def test_attention_that_mixed_the_texts_would_be_noticed():
    """Known-bad: with another sequence's cache, the rows change."""
    model = TARGETS["llama"]()
    staged = [begin(model, prompt) for prompt in PROMPTS[:2]]
    wrong = [begin(model, PROMPTS[0]), begin(model, [9])]
    segments = [segment_of(one, [3, 1]) for one in staged]
    right_rows = forward_together([one.stages[0] for one in staged], segments)
    wrong_rows = forward_together([one.stages[0] for one in wrong], segments)
    torch.testing.assert_close(right_rows[0].hidden, wrong_rows[0].hidden)
    assert (right_rows[1].hidden - wrong_rows[1].hidden).abs().max() > 0.1


def test_one_pass_serves_sessions_with_rows_and_prompts(monkeypatch):
    """Rows share a pass, prompts do not, and both come to the right session."""
    target = SharedTarget(TARGETS["llama"]())
    settings = Settings(pre_verifies=True, has_bonus=False)
    passes = []
    monkeypatch.setattr(
        "pipedraft.inference.edge.target_session.forward_together",
        lambda stages, segments: passes.append(len(stages)) or forward_together(stages, segments),
    )
    sessions, alone = [], []
    for turn in range(2):
        # The last one opens while the others send rows.
        for prompt in PROMPTS[:3] if turn == 0 else PROMPTS[3:]:
            for made in (sessions, alone):
                made.append(TargetSession(target, Open(prompt_ids=prompt, settings=settings)))
        for index in range(3 if turn == 1 else 0):
            for session in (sessions[index], alone[index]):
                request = drafted(session._tokens, ROWS[index], Preverify, next_s=100.0)
                session.receive(request, 0.0)
        due = [session for session in sessions if session.start(0.0)]
        run_together(due)
        for session in alone:
            if session.start(0.0):
                session.run()
                session.finish(0.0)
        for session in due:
            session.finish(0.0)
    assert passes == [3]
    for session, other in zip(sessions, alone, strict=True):
        assert session._tokens == other._tokens and session._tokens
        assert len(session._logits) == len(other._logits)
        for ours, theirs in zip(session._logits, other._logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def test_recurrent_targets_run_one_after_the_other():
    for name, together in (("llama", True), ("qwen3_5", False)):
        (stage,) = StagedTarget(tiny(name), 1).stages
        assert can_run_together(stage) == together
