"""Small targets from every family, cut into stages, and a controller to test them.

Weights are drawn large enough (std 0.1, norms included) for a wrong mask or a stale row to move the
logits (about 3) by far more than the tolerances. The tolerances only allow for another order in
float32 sums: 1e-5, and 5e-5 for recurrent layers, because they sum in chunks or row by row.
"""

# H hidden, V vocabulary, l rows of a segment

import random

import torch
import transformers as hf

from pipedraft.models.target import KeepRows, Segment, StagedTarget, prune_segment

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
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**SIZES, head_dim=16, **LINEAR_SIZES),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeTextConfig(
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        **LINEAR_SIZES,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}
_MODELS: dict[tuple[str, str], hf.PreTrainedModel] = {}


def tiny(name: str, attention: str = "sdpa") -> hf.PreTrainedModel:
    if (name, attention) not in _MODELS:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation=attention)
        _MODELS[name, attention] = roughen(model)
    return _MODELS[name, attention]


def roughen(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.1)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def tolerance(name: str) -> float:
    recurrent = ("qwen3_5", "granite_hybrid", "kimi_linear", "bailing_hybrid")
    return 5e-5 if name.startswith(recurrent) else 1e-5


def random_ids(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (num,), generator=torch.Generator().manual_seed(seed))


def run(target: StagedTarget, segment: Segment, taps=()) -> Segment:
    for stage in target.stages:
        segment = stage.forward(segment, taps)
    return segment


def chain_segment(target: StagedTarget, ids: torch.Tensor) -> Segment:
    """Return rows that continue the speculative chain so far."""
    lo = target.stages[0].num_speculative
    first = target.stages[0].num_committed + lo
    return Segment(
        positions=torch.arange(first, first + len(ids)),
        visible=torch.ones(len(ids), lo + len(ids), dtype=torch.bool).tril(lo),
        ids=ids,
    )


def keep_everywhere(target: StagedTarget, keep: KeepRows) -> None:
    for stage in target.stages:
        stage.keep(keep)


def continue_the_row_before(monkeypatch) -> None:
    """A known-bad state: a tree row starts from another branch's state."""
    rows_before = property(lambda segment: list(range(segment.lo - 1, segment.hi - 1)))
    monkeypatch.setattr(Segment, "parents", rows_before)


class Controller:
    """Slow, obvious reference in the fuzz: a token tree and one slot before every stage."""

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
            self.parents.append(self.random.randrange(-1, len(self.tokens)))
            self.tokens.append(self.random.randrange(VOCAB))
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
        """Forward the waiting segment in every stage, last stage first."""
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

    def random_keep(self) -> KeepRows:
        """Commit a path through returned rows, and retain some rows below it."""
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
        return KeepRows(tuple(path + retained), len(path))

    def apply(self, keep: KeepRows) -> None:
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
