"""The staged target against the plain Hugging Face model.

Oracle: the model's own forward on one root-to-node path, from scratch, without a cache. Weights are
drawn large enough (std 0.1, norms included) for a wrong mask or a stale row to move the logits
(of order 3) by far more than the tolerances. Those only allow for float32 sums in another order:
1e-5, and 5e-5 where recurrent layers exchange the chunked for the one-row form of the same sum.
"""

import json
import os
import random
import subprocess
import sys

import pytest
import torch
import transformers as hf

from pipedraft.models import target as target_module
from pipedraft.models.stage_cache import additive_mask
from pipedraft.models.target import (
    Keep,
    Segment,
    StagedTarget,
    capture_hidden,
    fingerprint_mismatch,
    load_target,
    load_tokenizer,
    prune_segment,
    stage_boundaries,
    target_fingerprint,
)

VOCAB = 61
NUM_LAYERS = 4
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LINEAR_SIZES = dict(
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4
)
WINDOW = 6
FAMILIES = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama_tied": lambda: hf.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: hf.Qwen2Config(**SIZES),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=8),
    "qwen3_half_sliding": lambda: hf.Qwen3Config(
        **SIZES, head_dim=8, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=None),
    "mistral_sliding": lambda: hf.MistralConfig(**SIZES, sliding_window=WINDOW),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**SIZES, head_dim=16, **LINEAR_SIZES),
}
_MODELS: dict[tuple[str, str], hf.PreTrainedModel] = {}


def tiny(name: str, attention: str = "sdpa") -> hf.PreTrainedModel:
    if (name, attention) not in _MODELS:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation=attention)
        model.eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        _MODELS[name, attention] = model
    return _MODELS[name, attention]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def tolerance(name: str) -> float:
    return 5e-5 if name == "qwen3_5" else 1e-5


def random_ids(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (num,), generator=torch.Generator().manual_seed(seed))


def run(target: StagedTarget, segment: Segment, taps=()) -> Segment:
    for stage in target.stages:
        segment = stage.forward(segment, taps)
    return segment


def chain_segment(target: StagedTarget, ids: torch.Tensor) -> Segment:
    """Rows that continue the chain of all speculative rows so far."""
    lo = target.stages[0].num_speculative
    first = target.stages[0].num_committed + lo
    return Segment(
        positions=torch.arange(first, first + len(ids)),
        visible=torch.ones(len(ids), lo + len(ids), dtype=torch.bool).tril(lo),
        ids=ids,
    )


def keep_everywhere(target: StagedTarget, keep: Keep) -> None:
    for stage in target.stages:
        stage.keep(keep)


class Controller:
    """The slow obvious side of the fuzz: a token tree and one slot in front of every stage."""

    def __init__(self, name: str, num_stages, seed: int, attention: str = "sdpa"):
        self.random = random.Random(seed)
        self.model = tiny(name, attention)
        self.target = StagedTarget(self.model, num_stages)
        self.name = name
        self.committed = random_ids(self.random.randint(1, 12), seed).tolist()
        self.target.prefill(torch.tensor(self.committed), chunk_rows=5)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.slots: list[Segment | None] = [None] * self.target.num_stages
        self.num_returned = 0
        self.num_compared = 0

    def path(self, row: int) -> list[int]:
        rows = []
        while row >= 0:
            rows.append(row)
            row = self.parents[row]
        return rows[::-1]

    def inject(self) -> None:
        lo = len(self.tokens)
        for _ in range(self.random.choice([1, 1, 2, 3, 5])):
            size = len(self.tokens)
            parent = size - 1 if self.target.is_chain_only else self.random.randrange(-1, size)
            self.tokens.append(self.random.randrange(VOCAB))
            self.parents.append(parent)
        hi = len(self.tokens)
        visible = torch.zeros(hi - lo, hi, dtype=torch.bool)
        for row in range(lo, hi):
            visible[row - lo, self.path(row)] = True
        depths = [len(self.path(row)) - 1 for row in range(lo, hi)]
        self.slots[0] = Segment(
            positions=torch.tensor(depths) + len(self.committed),
            visible=visible,
            ids=torch.tensor(self.tokens[lo:hi]),
        )

    def step(self) -> None:
        """Every stage forwards what waits in front of it, last stage first."""
        for index in reversed(range(len(self.slots))):
            segment, self.slots[index] = self.slots[index], None
            if segment is None:
                continue
            segment = self.target.stages[index].forward(segment, taps=(0, 2, NUM_LAYERS))
            if index + 1 < len(self.slots):
                self.slots[index + 1] = segment
            else:
                self.compare(segment)
                self.num_returned = segment.hi

    def compare(self, segment: Segment) -> None:
        logits_lV = self.target.logits(segment.hidden)
        for row, logits_V, raw_H in zip(
            range(segment.lo, segment.hi), logits_lV, segment.taps[2], strict=True
        ):
            tokens = self.committed + [self.tokens[i] for i in self.path(row)]
            output = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
            assert_close(logits_V, output.logits[0, -1], tolerance(self.name))
            assert_close(raw_H, output.hidden_states[2][0, -1], tolerance(self.name))
            self.num_compared += 1
        assert torch.equal(segment.taps[NUM_LAYERS], segment.hidden)

    def random_keep(self) -> Keep:
        """A path through returned rows is committed, some of what hangs below it is retained."""
        path: list[int] = []
        while self.random.random() < 0.6:
            last = path[-1] if path else -1
            children = [i for i in range(self.num_returned) if self.parents[i] == last]
            if not children:
                break
            path.append(self.random.choice(children))
        share = self.random.choice([0.0, 0.7, 1.0, 1.0])
        retained: list[int] = []
        alive = {path[-1] if path else -1}
        for row in range(len(self.tokens)):
            if self.parents[row] in alive and self.random.random() < share:
                alive.add(row)
                retained.append(row)
        return Keep(tuple(path + retained), len(path))

    def apply(self, keep: Keep) -> None:
        for index, stage in enumerate(self.target.stages):
            if self.slots[index] is not None:
                self.slots[index] = prune_segment(self.slots[index], keep, stage.num_speculative)
            stage.keep(keep)
        a = keep.num_committed
        self.committed += [self.tokens[i] for i in keep.rows[:a]]
        new_index = {row: j for j, row in enumerate(keep.rows[a:])}
        self.tokens = [self.tokens[i] for i in keep.rows[a:]]
        self.parents = [new_index.get(self.parents[i], -1) for i in keep.rows[a:]]
        self.num_returned = sum(i < self.num_returned for i in keep.rows[a:])
        assert self.target.stages[-1].num_committed == len(self.committed)

    def fuzz(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.random.random() < 0.8 and len(self.committed) + len(self.tokens) < 70:
                self.inject()
            self.step()
            if self.random.random() < 0.35:
                self.apply(self.random_keep())
        for _ in range(self.target.num_stages):
            self.step()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_chained_stages_equal_the_models_forward_in_full_and_row_by_row(name, num_stages):
    model, ids = tiny(name), random_ids(40)
    target = StagedTarget(model, num_stages)
    reference_TV = model(ids[None], use_cache=False).logits[0]
    target.prefill(ids[:1])
    target.reset()
    full = run(target, chain_segment(target, ids))
    assert_close(target.logits(full.hidden), reference_TV, tolerance(name))

    logits_V, _ = target.prefill(ids[:17], chunk_rows=7)
    rows = [logits_V[None]]
    start = 17
    for size in [5, 1, 1, 3] + [1] * 13:
        rows.append(target.logits(run(target, chain_segment(target, ids[start:][:size])).hidden))
        keep_everywhere(target, Keep(tuple(range(size)), size))
        start += size
    assert_close(torch.cat(rows), reference_TV[16:], tolerance(name))


def test_chain_equals_forward_with_eager_attention():
    model, ids = tiny("qwen3_half_sliding", "eager"), random_ids(30)
    target = StagedTarget(model, 3)
    target.prefill(ids[:11])
    logits_lV = target.logits(run(target, chain_segment(target, ids[11:])).hidden)
    reference_TV = model(ids[None], use_cache=False).logits[0, 11:]
    assert_close(logits_lV, reference_TV)


@pytest.mark.parametrize("num_stages", [1, 3, (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("name", FAMILIES)
def test_random_segments_and_keeps_equal_recomputing_each_path_from_scratch(name, num_stages):
    num_compared = 0
    for seed in range(2):
        controller = Controller(name, num_stages, seed)
        controller.fuzz(num_steps=24)
        num_compared += controller.num_compared
    assert num_compared > 25


def test_fuzz_holds_with_eager_attention():
    Controller("llama", 2, seed=5, attention="eager").fuzz(num_steps=16)


@pytest.mark.parametrize("name", ["llama", "qwen3_half_sliding", "mistral_sliding"])
def test_fuzz_catches_a_mask_that_is_ignored_for_single_rows(name, monkeypatch):
    def ignores_single_rows(visible_lS, positions_C, window, dtype):
        if visible_lS.shape[0] == 1:
            visible_lS = torch.ones_like(visible_lS)
        return additive_mask(visible_lS, positions_C, window, dtype)

    monkeypatch.setattr(target_module, "additive_mask", ignores_single_rows)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        for seed in range(4):
            Controller(name, 3, seed).fuzz(num_steps=16)


def test_fuzz_catches_a_window_that_is_ignored(monkeypatch):
    def ignores_window(visible_lS, positions_C, window, dtype):
        return additive_mask(visible_lS, positions_C, None, dtype)

    monkeypatch.setattr(target_module, "additive_mask", ignores_window)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        for seed in range(4):
            Controller("mistral_sliding", 2, seed).fuzz(num_steps=16)


def test_fuzz_catches_rows_that_are_not_gathered(monkeypatch):
    """The mutant keeps the first rows instead of the retained ones."""

    def first_rows(self, num_cached):
        return tuple(range(sum(i < num_cached for i in self.rows)))

    monkeypatch.setattr(Keep, "cached", first_rows)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        for seed in range(4):
            Controller("llama", 3, seed).fuzz(num_steps=16)


def test_fuzz_catches_a_recurrent_state_that_is_not_rolled_back(monkeypatch):
    def keeps_latest_state(self, keep):
        latest = self.cache._history[-1]
        self.cache.keep(keep)
        self.cache._history[-1] = latest

    monkeypatch.setattr(target_module.Stage, "keep", keeps_latest_state)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        for seed in range(4):
            Controller("qwen3_5", 2, seed).fuzz(num_steps=16)


@pytest.mark.parametrize(
    "keep",
    [
        Keep((0, 1, 2, 3, 4, 5), 6),
        Keep((0, 1, 2), 2),
        Keep((2,), 0),
        Keep((0, 2, 5), 1),
        Keep((), 0),
        Keep((0,), 1),
    ],
    ids=["chain commit", "prefix", "one row", "sibling prune", "no row", "commit the root"],
)
def test_keep_holds_the_rows_of_exactly_the_retained_indices(keep):
    """Positions stand for rows: they are gathered by the same code as keys and values."""
    target = StagedTarget(tiny("llama"), 2)
    target.prefill(random_ids(3))
    run(target, chain_segment(target, random_ids(6)))
    keep_everywhere(target, keep)
    for stage in target.stages:
        assert stage.num_committed == 3 + keep.num_committed
        assert stage.num_speculative == len(keep.rows) - keep.num_committed
        held = stage.cache._positions_C[: stage.cache.num_rows].tolist()
        assert held == [0, 1, 2] + [3 + i for i in keep.rows]


def test_chain_commit_moves_no_row():
    target = StagedTarget(tiny("llama"), 1)
    target.prefill(random_ids(3))
    run(target, chain_segment(target, random_ids(6)))
    target.stages[0].cache._keys = None  # fails when touched
    keep_everywhere(target, Keep((0, 1, 2, 3), 2))
    with pytest.raises(AttributeError):
        keep_everywhere(target, Keep((1,), 0))


def test_cache_grows_past_its_first_capacity_without_losing_rows():
    config = hf.LlamaConfig(**{**SIZES, "max_position_embeddings": 400})
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = random_ids(300)
    target = StagedTarget(model, 2)
    target.prefill(ids[:120])
    parts = [run(target, chain_segment(target, part)).hidden for part in ids[120:].split(50)]
    reference_TV = model(ids[None], use_cache=False).logits[0, 120:]
    assert_close(target.logits(torch.cat(parts)), reference_TV)


def test_prune_segment_keeps_rows_columns_and_taps_together():
    visible = torch.arange(15).reshape(3, 5) % 2 == 0
    segment = Segment(
        positions=torch.tensor([7, 8, 9]),
        visible=visible,
        hidden=torch.arange(3.0)[:, None].expand(3, 4),
        taps={1: torch.arange(3.0)[:, None]},
    )
    pruned = prune_segment(segment, Keep((0, 1, 3, 4), 1), num_cached=2)
    assert pruned.positions.tolist() == [8, 9]
    assert torch.equal(pruned.visible, visible[1:][:, [1, 3, 4]])
    assert pruned.hidden[:, 0].tolist() == pruned.taps[1][:, 0].tolist() == [1, 2]
    assert (pruned.lo, pruned.hi) == (1, 3)
    assert prune_segment(segment, Keep((0, 1), 0), num_cached=2) is None


def test_committing_a_row_that_a_stage_has_not_cached_is_refused():
    target = StagedTarget(tiny("llama"), 1)
    target.prefill(random_ids(3))
    run(target, chain_segment(target, random_ids(2)))
    with pytest.raises(AssertionError, match="commits row 2, but this stage holds only 2"):
        keep_everywhere(target, Keep((0, 1, 2), 3))


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_are_raw_layer_outputs_and_index_L_is_before_the_final_norm(name):
    model, ids = tiny(name), random_ids(14)
    raw: dict[int, torch.Tensor] = {}
    layers = [model.model.embed_tokens, *model.model.layers]
    handles = [
        layer.register_forward_hook(lambda m, a, out, i=i: raw.__setitem__(i, out[0]))
        for i, layer in enumerate(layers)
    ]
    model(ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    every = range(NUM_LAYERS + 1)
    target = StagedTarget(model, 3)
    _, prompt = target.prefill(ids[:9], taps=every, chunk_rows=4)
    taps = run(target, chain_segment(target, ids[9:]), taps=every).taps
    captured = capture_hidden(model, ids[None], layers=every)
    assert sorted(prompt) == sorted(taps) == sorted(captured) == list(every)
    for i in every:
        atol = tolerance(name)
        assert_close(torch.cat([prompt[i], taps[i]]), raw[i], atol)
        assert_close(captured[i][0], raw[i], 0)
    normed = model.model.norm(captured[NUM_LAYERS][0])
    assert not torch.allclose(normed, captured[NUM_LAYERS][0], atol=0.1)


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_states_of_the_text_do_not_depend_on_right_padding(name):
    model, ids = tiny(name), random_ids(20).reshape(2, 10)
    padded = torch.cat([ids, torch.zeros(2, 6, dtype=torch.long)], dim=1)
    plain, wide = (capture_hidden(model, x, layers=[1, NUM_LAYERS]) for x in (ids, padded))
    assert sorted(plain) == [1, NUM_LAYERS]
    for i in plain:
        assert_close(wide[i][:, :10], plain[i])


def test_capture_computes_no_logits_and_leaves_no_hook():
    model = tiny("llama")
    hooks = [len(layer._forward_hooks) for layer in model.model.layers]
    sizes = []
    handle = model.lm_head.register_forward_hook(lambda m, a, out: sizes.append(out.numel()))
    captured = capture_hidden(model, random_ids(5)[None], layers=[2])
    handle.remove()
    assert sizes == [0]
    assert not captured[2].requires_grad
    assert [len(layer._forward_hooks) for layer in model.model.layers] == hooks


def test_packed_texts_are_captured_as_if_apart():
    model, ids = tiny("mistral_sliding"), random_ids(16)
    packed = capture_hidden(model, ids[None], [NUM_LAYERS], [9, 7])
    apart = [capture_hidden(model, part[None], [NUM_LAYERS]) for part in ids.split([9, 7])]
    expected = torch.cat([part[NUM_LAYERS][0] for part in apart])
    assert_close(packed[NUM_LAYERS][0], expected)
    with pytest.raises(ValueError, match="^packing: true, but the recurrent layers"):
        capture_hidden(tiny("qwen3_5"), ids[None], [1], [9, 7])


def test_capture_refuses_a_layer_that_does_not_exist():
    with pytest.raises(ValueError, match="layers: index 5 is outside"):
        capture_hidden(tiny("llama"), random_ids(4)[None], layers=[0, 5])


def test_branching_segment_is_refused_by_a_target_with_recurrent_layers():
    target = StagedTarget(tiny("qwen3_5"), (0, 3, 4))
    assert target.is_chain_only
    target.prefill(random_ids(4))
    segment = chain_segment(target, random_ids(3))
    segment.visible[2, 1] = False
    for stage in target.stages:
        with pytest.raises(ValueError, match="recurrent layers"):
            stage.forward(segment)


def test_recurrent_chain_continues_exactly_after_each_rollback():
    model, ids = tiny("qwen3_5"), random_ids(30)
    reference_TV = model(ids[None], use_cache=False).logits[0]
    for num_kept in range(5):
        target = StagedTarget(model, 2)
        target.prefill(ids[:10])
        wrong = torch.cat([ids[10 : 10 + num_kept], (ids[10 + num_kept : 14] + 1) % VOCAB])
        run(target, chain_segment(target, wrong))
        keep_everywhere(target, Keep(tuple(range(num_kept)), num_kept // 2))
        rest = ids[10 + num_kept :]
        logits_lV = target.logits(run(target, chain_segment(target, rest)).hidden)
        assert_close(logits_lV, reference_TV[10 + num_kept :], tolerance("qwen3_5"))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_in_one_row_segments_equals_generate(name):
    model, prompt = tiny(name), random_ids(9, seed=3)
    expected = model.generate(prompt[None], do_sample=False, max_new_tokens=24)[0, 9:]
    assert decode_greedily(StagedTarget(model, 3), prompt, 24) == expected.tolist()


def decode_greedily(target: StagedTarget, prompt: torch.Tensor, max_new_tokens: int) -> list[int]:
    logits_V, _ = target.prefill(prompt)
    tokens = [int(logits_V.argmax())]
    while len(tokens) < max_new_tokens and tokens[-1] not in target.eos_token_ids:
        segment = run(target, chain_segment(target, torch.tensor(tokens[-1:])))
        keep_everywhere(target, Keep((0,), 1))
        tokens.append(int(target.logits(segment.hidden)[0].argmax()))
    return tokens


def test_a_second_prompt_forgets_the_first():
    target = StagedTarget(tiny("qwen3_5"), 2)
    once = decode_greedily(target, random_ids(8, seed=4), 8)
    decode_greedily(target, random_ids(13, seed=5), 8)
    assert decode_greedily(target, random_ids(8, seed=4), 8) == once


def test_stage_boundaries_are_near_even_with_the_longer_stages_last():
    assert stage_boundaries(10, 4) == (0, 2, 4, 7, 10)
    for num_layers in range(1, 20):
        for num_stages in range(1, num_layers + 1):
            cuts = stage_boundaries(num_layers, num_stages)
            sizes = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
            assert cuts[0] == 0 and sum(sizes) == num_layers and len(sizes) == num_stages
            assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_layers_or_none_are_refused(num_stages):
    with pytest.raises(ValueError, match=f"num_stages: {num_stages} stages"):
        stage_boundaries(4, num_stages)


@pytest.mark.parametrize("cuts", [(0, 2), (1, 4), (0, 2, 2, 4), (0,), ()])
def test_boundaries_that_do_not_cut_the_layers_are_refused(cuts):
    with pytest.raises(ValueError, match="num_stages: boundaries"):
        StagedTarget(tiny("llama"), cuts)


def test_prompt_length_is_checked():
    target = StagedTarget(tiny("llama"), 2)
    for num_rows in (0, 97):
        with pytest.raises(ValueError, match=f"prompt: {num_rows} tokens"):
            target.prefill(torch.zeros(num_rows, dtype=torch.long))


def test_fingerprint_sees_the_shared_weights_and_only_those():
    config = FAMILIES["llama"]()
    torch.manual_seed(1)
    model = hf.LlamaForCausalLM(config).requires_grad_(False)
    first = target_fingerprint(model)
    assert {k: first[k] for k in first if k != "hash"} == {
        "hidden_size": 32,
        "vocab_size": VOCAB,
        "num_layers": NUM_LAYERS,
    }
    model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert fingerprint_mismatch(first, target_fingerprint(model)) is None
    for weight in (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight):
        before = target_fingerprint(model)
        weight.view(-1)[-1] += 1
        assert fingerprint_mismatch(before, target_fingerprint(model)).startswith("hash: ")


def test_fingerprint_of_bfloat16_weights_is_that_of_the_same_numbers_in_float32():
    torch.manual_seed(2)
    model = hf.LlamaForCausalLM(FAMILIES["llama_tied"]()).to(torch.bfloat16)
    assert target_fingerprint(model) == target_fingerprint(model.float())


def test_fingerprint_mismatch_names_the_first_field_and_both_values():
    a = {"hidden_size": 32, "vocab_size": 61, "num_layers": 4, "hash": "x"}
    assert fingerprint_mismatch(a, a) is None
    assert fingerprint_mismatch(a, {**a, "num_layers": 5, "hash": "y"}) == "num_layers: 4 != 5"


def test_eos_ids_are_a_tuple_from_the_generation_config_first():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "eos_token_id": 2}))
    assert StagedTarget(model, 1).eos_token_ids == (2,)
    model.generation_config.eos_token_id = [3, 4]
    assert StagedTarget(model, 1).eos_token_ids == (3, 4)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert StagedTarget(model, 1).eos_token_ids == ()


def test_load_refuses_truncated_weights(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="no loadable safetensors weights"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_5"])
def test_saved_target_loads_frozen_with_the_same_fingerprint(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    model = load_target(str(tmp_path))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert fingerprint_mismatch(target_fingerprint(model), target_fingerprint(tiny(name))) is None
    assert load_target(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_text_part_of_a_multimodal_qwen3_5_checkpoint_is_staged(tmp_path):
    text = dict(FAMILIES["qwen3_5"]().to_dict())
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = hf.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    whole = hf.Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    model, ids = load_target(str(tmp_path)), random_ids(12)
    logits_V, _ = StagedTarget(model, 2).prefill(ids)
    reference_V = whole(input_ids=ids[None]).logits[0, -1]
    assert_close(logits_V, reference_V)


def test_load_refuses_a_missing_path():
    for load in (load_target, load_tokenizer):
        with pytest.raises(ValueError, match="no folder './no/such/model'; give an existing"):
            load("./no/such/model")


def test_load_refuses_a_folder_without_config(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        load_target(str(tmp_path))
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_load_refuses_an_unsupported_family_and_lists_the_supported_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type 'gpt2'.*supported: llama, qwen2, qwen3,"):
        load_target(str(tmp_path))


def test_load_refuses_pickled_weights(tmp_path):
    tiny("llama").config.save_pretrained(tmp_path)
    torch.save(tiny("llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no loadable safetensors weights"):
        load_target(str(tmp_path))


def test_attention_kernels_without_tree_masks_are_refused():
    with pytest.raises(ValueError, match="attention: 'flash_attention_2'"):
        load_target("unused", attention="flash_attention_2")


def test_a_trained_tiny_model_decodes_as_generate_does(shared_dir):
    folder = shared_dir / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"needs the model {folder}")
    model, tokenizer = load_target(str(folder)), load_tokenizer(str(folder))
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
    target = StagedTarget(model, 4)
    assert target.boundaries == (0, 1, 2, 3, 5)
    assert target.eos_token_ids == (1, 2)
    expected = model.generate(prompt, do_sample=False, max_new_tokens=60)[0, prompt.shape[1] :]
    assert decode_greedily(target, prompt[0], 60) == expected.tolist()


def test_a_hub_target_is_identified_by_its_commit(tmp_path):
    """In a process of its own: the cache's folder is read when the libraries are imported."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--user--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    tiny("llama").config.save_pretrained(snapshot)
    code = "from pipedraft.models.target_part import weights_identity as f; print(f('user/tiny'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == f"commit:{commit}", done.stderr
