"""Compare a head's draft tokens in a serving engine with ours, and explain differences.

The engine decodes the prompts in a process with its own environment and reports its rounds. Compare
its draft tokens with the head's forward pass over the engine's own output. Where they differ, rerun
the head once with each known engine or export fault. A fault that reproduces the engine's draft
tokens is the cause. So the engine has to report only tokens.
"""

# R compared draft tokens, U draft vocabulary

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations, zip_longest
from os.path import commonprefix
from pathlib import Path
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import Failure, UsageError
from ..files import Values, to_json
from ..inference.result import DecodeResult
from ..models.exchange.commands import Written
from ..models.heads.dflash import DFlash
from ..models.heads.draft import Draft
from ..models.transformer.layers import RMSNorm, RotaryEmbedding
from .parity_rows import (
    ROUNDING,
    Check,
    Parting,
    Text,
    over_vocabulary,
    size_of,
    trained_depth,
    vocabulary,
)
from .tasks import Prompt

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
MALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
ROTARY_BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
"""RoPE bases to try; 10,000 first, the default of engines that ignore this setting."""
EXPLAINED = 0.97
"""Name a fault only if it reproduces this share of the engine's draft tokens."""
REDUCED = 0.25
"""Maximum share of differences that a named fault may leave unexplained."""

# -- the engine's process ---------------------------------------------------------------------


class EngineRound(msgspec.Struct):
    root: int
    """Index of the round's root token, counted over prompt and output."""
    drafted: list[int]
    """Draft tokens, or only the accepted ones if the engine does not name the others."""
    missed: int | None = None
    """The output's token behind these, if known not to have been drafted."""


class EngineRun(msgspec.Struct):
    token_ids: list[int]
    rounds: list[EngineRound]
    rendered: list[int] | None = None
    """Prompt tokens rendered by the engine from the messages; None: no chat template."""
    seconds: float | None = None
    """Wall time of the prompt and its output, if the engine's process takes it."""


class EngineAnswer(msgspec.Struct):
    engine: str
    dtype: str
    runs: list[EngineRun]
    num_drafts: int
    accepted: list[int]
    """Accepted draft tokens by position, from the engine's own counters."""
    starts: list[int] = []
    """Accepted draft tokens in each fresh pipeline; empty: one was started."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """A serving engine, and the heads it runs on a CPU."""

    name: str
    """Value of --engine, and prefix of its process's file name."""
    layouts: Mapping[str, Written]
    """Head type -> the layout exported for it."""
    environment: Callable[[Path], dict[str, str]]
    python: Path
    """Program in the environment that `make engines` makes, or our own: Python, or the server."""
    is_server: bool = False
    """True: ``python`` is a server, and our own Python asks it."""

    @property
    def script(self) -> Path:
        return Path(__file__).with_name(f"{self.name.replace('.', '_')}_process.py")

    def command(self, program: Path, *words: str | Path) -> list[str | Path]:
        """Return the command that runs the engine's script with its program."""
        return [sys.executable if self.is_server else program, self.script, *words]


def engine_environment(python: Path) -> dict[str, str]:
    """Return environment variables for a vLLM process on a CPU, with its OpenMP loaded first."""
    libraries = [python.absolute().parents[1] / "lib" / "libiomp5.so", MALLOC]
    preload = ":".join(str(path) for path in libraries if path.exists())
    own = {**os.environ, **ENVIRONMENT, **({"LD_PRELOAD": preload} if preload else {})}
    own.pop("PYTHONPATH", None)
    return own


def plain_environment(python: Path) -> dict[str, str]:
    """Return environment variables for an engine that needs none but offline mode."""
    own = {**os.environ, "HF_HUB_OFFLINE": "1"}
    own.pop("PYTHONPATH", None)
    return own


VLLM = EngineKind(
    name="vllm",
    layouts={"eagle": "sglang", "eagle3": "speculators", "dflash": "speculators", "mtp": "sglang"},
    environment=engine_environment,
    python=Path("out/engines/vllm/bin/python"),
)
TRANSFORMERS = EngineKind(
    name="transformers",
    layouts={"dflash": "transformers"},
    environment=plain_environment,
    python=Path(sys.executable),
)
OPENVINO = EngineKind(
    name="openvino",
    layouts={"eagle3": "openvino", "dflash": "openvino"},
    environment=plain_environment,
    python=Path("out/engines/openvino/bin/python"),
)
LLAMA_CPP = EngineKind(
    name="llama.cpp",
    layouts={"eagle3": "gguf", "dflash": "gguf", "dspark": "gguf"},
    environment=plain_environment,
    python=Path("out/engines/llama_cpp/bin/llama-server"),
    is_server=True,
)
ENGINES = {engine.name: engine for engine in (VLLM, TRANSFORMERS, OPENVINO, LLAMA_CPP)}


def check_python(python: Path, engine: str = VLLM.name) -> None:
    if not os.access(python, os.X_OK):
        program = "the python of an environment with"
        if ENGINES[engine].is_server:
            program = "the server of"
        raise UsageError(
            f"--engine-python: {str(python)!r} is no program; give {program} {engine} (make "
            f"engines makes out/engines/{engine.replace('.', '_')})"
        )


def engine_failure(stderr: str, status: int, engine: str = VLLM.name) -> Failure:
    """Return an error with the engine's last informative line on stderr, else its exit status."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [line for line in said if not line.startswith("For further information")]
    return Failure(f"{engine}: {said[-1] if said else f'ended with {status}'}")


def ask_engine(engine: EngineKind, python: Path, request: Values) -> EngineAnswer:
    """Run the engine in its own process, and return its answer to a request.

    Raises:
        Failure: the process ends without an answer. The message contains its last line.
    """
    check_python(python, engine.name)
    with tempfile.TemporaryDirectory() as place:
        question, answer = Path(place) / "request.json", Path(place) / "answer.json"
        question.write_bytes(to_json(request | {"program": str(python)}))
        done = subprocess.run(
            engine.command(python, "decode", question, answer),
            env=engine.environment(python),
            capture_output=True,
            text=True,
        )
        if not answer.exists():
            raise engine_failure(done.stderr, done.returncode, engine.name)
        return msgspec.json.decode(answer.read_bytes(), type=EngineAnswer)


def target_file(engine: EngineKind, program: Path, name: str, place: Path) -> str:
    """Return a target's GGUF file for llama.cpp, converted into ``place`` if it is none.

    Raises:
        Failure: llama.cpp's converter cannot convert it.
    """
    if name.endswith(".gguf"):
        return name
    check_python(program, engine.name)
    file = place / "target.gguf"
    words = engine.command(program, "convert", program, name, file)
    done = subprocess.run(words, env=engine.environment(program), capture_output=True, text=True)
    if not file.exists():
        raise engine_failure(done.stderr, done.returncode, engine.name)
    return str(file)


def engine_depth(draft: Draft, depth: int) -> int:
    """Return draft tokens per round in the engine.

    A block head always drafts its whole block, because the block's rows see each other.
    """
    return draft.config.num_tokens if isinstance(draft, DFlash) else trained_depth(draft, depth)


# -- faults ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineFault:
    """One possible deviation of an engine from training."""

    what: str
    detail: str
    change: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes a context in which the head computes as the faulty engine would."""
    tokens: Callable[[Tensor], Tensor] | None = None
    """Maps draft ids to target tokens, for faults in the vocabulary map."""


def known_faults(draft: Draft) -> Iterator[EngineFault]:
    """Yield possible engine faults for a head, the most frequent first."""
    yield from _layer_faults(draft)
    yield from _norm_faults(draft)
    for name, bias in draft.named_parameters():
        if name.endswith("bias") and bool(bias.any()):
            change = partial(_filled, [bias], 0.0)
            yield EngineFault(what="bias", detail=f"{name} is left out", change=change)
    yield from _position_faults(draft)
    ids_U = vocabulary(draft)
    if len(ids_U) < draft.target_vocab_size:
        offsets_U = ids_U - torch.arange(len(ids_U), device=ids_U.device)
        for detail, map_U in (
            ("draft ids are taken for the target's tokens", torch.arange(len(ids_U))),
            ("the offsets of d2t are taken for tokens", offsets_U),
            ("the tokens of d2t are taken for offsets", ids_U + torch.arange(len(ids_U))),
        ):
            tokens = map_U.to(ids_U.device).__getitem__
            yield EngineFault(what="vocabulary map", detail=detail, tokens=tokens)


def _layer_faults(draft: Draft) -> Iterator[EngineFault]:
    layers: tuple[int, ...] = getattr(draft.config, "feature_layers", ())
    last = getattr(draft.config, "num_target_layers", 0)

    def reads(what: str, detail: str, other: tuple[int, ...]) -> EngineFault:
        config = replace(draft.config, feature_layers=other)
        return EngineFault(
            what=what, detail=detail, change=partial(patch.object, draft, "config", config)
        )

    for shift, word in ((1, "higher"), (-1, "lower")):
        other = tuple(layer + shift for layer in layers)
        if other and all(0 <= layer <= last for layer in other):
            detail = f"it reads layers {list(other)} for {list(layers)}: one {word}"
            yield reads("layer off by one", detail, other)
    few = [tuple(sorted(layers)), layers[::-1]]
    orders = [*permutations(layers)] if 1 < len(layers) <= 4 else few
    for order in orders:
        if order != layers:
            detail = f"columns of fc for layers {list(layers)} get those of {list(order)}"
            yield reads("order of layers", detail, order)


def _norm_faults(draft: Draft) -> Iterator[EngineFault]:
    for name in ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm"):
        is_on = getattr(draft.config, name, None)
        if is_on is None or (name in ("norm_before_fc", "fc_norm") and not is_on):
            continue
        config = replace(draft.config, **{name: not is_on})
        change = partial(patch.object, draft, "config", config)
        yield EngineFault(what="norm", detail=f"{name} is {not is_on}", change=change)
    norms: dict[str, list[Tensor]] = {}
    for name, module in draft.named_modules():
        if isinstance(module, RMSNorm):  # fc_norm.0, .1, .. together
            norms.setdefault(re.sub(r"\.\d+$", "", name), []).append(module.weight)
    for name, weights in norms.items():
        detail = f"the weights of {name} are 1"
        yield EngineFault(what="norm", detail=detail, change=partial(_filled, weights, 1.0))


def _position_faults(draft: Draft) -> Iterator[EngineFault]:
    rotary = getattr(draft, "rotary", None)
    if rotary is None:
        return
    rope = draft.layer_config.rope_parameters
    for base in (rope["rope_theta"], *ROTARY_BASES):
        other = {"rope_type": "default", "rope_theta": base}
        if other != dict(rope):
            layer = replace(draft.layer_config, rope_parameters=other)
            turned = RotaryEmbedding(layer).to(vocabulary(draft).device)
            change = partial(patch.object, draft, "rotary", turned)
            yield EngineFault(what="position", detail=f"rotary positions by {other}", change=change)
    of_heads = rotary.of_heads

    @contextmanager
    def stays(by: int) -> Iterator[None]:
        steps = iter(range(1 << 20))
        with patch.object(
            rotary, "of_heads", lambda rows, dtype: of_heads(rows + by * next(steps), dtype)
        ):
            yield

    for by, detail in ((-1, "draft tokens all stand at one"), (1, "draft tokens advance by two")):
        yield EngineFault(what="position", detail=detail, change=partial(stays, by))


@contextmanager
def _filled(values: Sequence[Tensor], number: float) -> Iterator[None]:
    kept = [value.detach().clone() for value in values]
    for value in values:
        value.fill_(number)
    try:
        yield
    finally:
        for value, old in zip(values, kept, strict=True):
            value.copy_(old)


def agree(tokens_R: Tensor, wanted_R: Tensor) -> Tensor:
    """Return bool [R]: the head's token is the engine's, or not the one that the engine missed."""
    return torch.where(wanted_R < 0, tokens_R != -1 - wanted_R, tokens_R == wanted_R)


# -- comparison -------------------------------------------------------------------------------


@dataclass(kw_only=True)
class EngineComparison:
    """Comparison of the engine's outputs with pipedraft's, prompt by prompt."""

    draft: Draft
    target: PreTrainedModel
    depth: int
    answer: EngineAnswer
    texts: list[tuple[Text, list[tuple[int, int, int]]]] = field(default_factory=list)
    """Each output, and its compared draft tokens: root, draft position, token. A token below 0 is
    -1 - x, for any other token than x."""
    num_equal: int = 0
    ours: list[int] = field(default_factory=list)
    """Accepted draft tokens here, by position; ``num_rounds`` counts the rounds."""
    num_rounds: int = 0

    def __post_init__(self) -> None:
        self.check = Check(name=self.answer.engine)
        self.rounding = ROUNDING[self.target.dtype]

    def add(self, name: str, ours: DecodeResult) -> None:
        """Compare the engine's run of a prompt with ``ours``, the run in pipedraft."""
        prompt_ids = ours.prompt_ids
        run = self.answer.runs[len(self.texts)]
        last = int(self.target.get_decoder().config.num_hidden_layers)
        layers = {layer + by for layer in self.draft.taps for by in (-1, 0, 1)}  # as faults read
        text = Text(self.target, prompt_ids + run.token_ids, layers & set(range(last + 1)))
        ids, found = text.ids_T.tolist(), []
        for one in run.rounds:
            for place, token in enumerate(one.drafted[: self.depth], 1):
                end = one.root + place
                if end < len(ids) and one.drafted[: place - 1] == ids[one.root + 1 : end]:
                    found.append((one.root, place, token))
            if one.missed is not None and len(one.drafted) < self.depth:
                found.append((one.root, len(one.drafted) + 1, -1 - one.missed))
        self.texts.append((text, found))
        self.num_equal += ours.token_ids == run.token_ids
        self.ours = [a + b for a, b in zip_longest(self.ours, ours.position_accepts, fillvalue=0)]
        self.num_rounds += len(ours.round_lengths)
        if self.check.first is None:
            self.check.first = self._of_prompt(name, prompt_ids, run)

    def _of_prompt(self, name: str, prompt_ids: list[int], run: EngineRun) -> Parting | None:
        """Return a difference outside the head, in the prompt's tokens or in the dtype, or None."""
        if run.rendered is not None and run.rendered != prompt_ids:
            at = len(commonprefix([prompt_ids, run.rendered]))
            detail = f"the prompt is {len(run.rendered)} tokens there, {len(prompt_ids)} here; "
            detail += f"token {at} is the first that differs"
            return Parting(prompt=name, what="template", detail=detail)
        if self.answer.dtype != str(self.target.dtype).removeprefix("torch."):
            detail = f"it computes in {self.answer.dtype}, this in {self.target.dtype}"
            return Parting(what="dtype", detail=detail.replace("torch.", ""))
        return None

    def finish(self) -> Check:
        """Compare the draft tokens for all prompts, and explain differences."""
        if self.check.first is None and len(set(self.answer.starts)) > 1:
            self.check.first = Parting(what="starts", detail=f"accepted {self.answer.starts}")
        wanted = self._wanted()
        logits_RU = self._logits()
        self.check.rows = len(wanted)
        if not len(wanted):
            self.check.remark = "not compared: it drafted nothing"
            return self.check
        logits_RV = over_vocabulary(self.draft, logits_RU)
        best_R = logits_RV.argmax(-1)
        wrong_R = ~agree(best_R, wanted)
        second_R = logits_RV.topk(2, -1).values[:, 1]
        other_R = logits_RV.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        below_R = logits_RV.amax(-1) - torch.where(wanted < 0, second_R, other_R)
        size = size_of(logits_RU)
        tie_R = wrong_R & (below_R <= self.rounding * size)
        self.check.ties = int(tie_R.sum())
        if self.check.first is None and bool((wrong_R & ~tie_R).any()):
            half = bool((below_R[wrong_R] <= ROUNDING[torch.bfloat16] * size).all())
            self.check.first = self._explain(wanted, tie_R, half)
        return self.check

    def _wanted(self) -> Tensor:
        tokens = [token for _, found in self.texts for _, _, token in found]
        return torch.tensor(tokens, device=self.target.device, dtype=torch.long)

    def _logits(self) -> Tensor:
        parts = []
        for text, found in self.texts:
            states = text.states(self.draft, self.depth)
            parts += [states[place - 1][root][None] for root, place, _ in found]
        return self.draft.logits(torch.cat(parts)) if parts else torch.empty(0)

    def _explain(self, wanted: Tensor, tie_R: Tensor, is_half: bool) -> Parting:
        ids_U = vocabulary(self.draft)
        logits_RU = self._logits()
        own = float((agree(ids_U[logits_RU.argmax(-1)], wanted) | tie_R).float().mean())
        best, cause = own, None
        for fault in known_faults(self.draft):
            with fault.change():
                chosen_R = self._logits().argmax(-1)
            tokens_R = (fault.tokens or ids_U.__getitem__)(chosen_R)
            share = float(agree(tokens_R, wanted).float().mean())
            if share > best:
                best, cause = share, fault
        count = f"of {len(wanted)} draft tokens"
        if cause and best >= EXPLAINED and 1 - best <= REDUCED * (1 - own):
            detail = f"{cause.detail}; so {best:.1%} {count} are the engine's, {own:.1%} without"
            return Parting(what=cause.what, detail=detail)
        said = f"{own:.1%} {count} are the engine's"
        if is_half and own > 0.5:
            return Parting(what="dtype", detail=f"{said}, the others within bfloat16's rounding")
        return Parting(what="unexplained", detail=f"{said}, and no known fault yields the others")

    @property
    def shares(self) -> tuple[list[float], list[float]]:
        """Return accepted draft tokens per round by position, in pipedraft and in the engine."""
        ours = [number / max(self.num_rounds, 1) for number in self.ours]
        theirs = [number / max(self.answer.num_drafts, 1) for number in self.answer.accepted]
        return ours, theirs

    @property
    def mean_acceptance_lengths(self) -> tuple[float, float]:
        """Return tokens per round in pipedraft and in the engine, as engines count them."""
        ours, theirs = self.shares
        return 1 + sum(ours), 1 + sum(theirs)

    def lines(self) -> list[str]:
        """Return lines with the engine's counters next to pipedraft's."""
        ours, theirs = (", ".join(f"{x:.3f}" for x in side) for side in self.shares)
        tau, starts, lines = self.mean_acceptance_lengths, self.answer.starts, []
        if len(starts) > 1:
            counts = f"{min(starts)} to {max(starts)} draft tokens"
            lines = [f"accepted {counts} in each of {len(starts)} pipelines"]
        return [
            f"{self.answer.engine} in {self.answer.dtype}: {self.num_equal} of {len(self.texts)} "
            "outputs are the ones decoded here",
            f"accepted in a round by position there {theirs}; here {ours}",
            f"tau {tau[1]:.3f} in {self.answer.num_drafts} rounds there, {tau[0]:.3f} in "
            f"{self.num_rounds} here",
            *lines,
        ]


def decode_in_engine(
    engine: EngineKind,
    python: Path,
    prompts: Sequence[tuple[list[int], Prompt]],
    draft: Draft,
    target: PreTrainedModel,
    *,
    name: str,
    files: str,
    depth: int,
    max_new_tokens: int,
    dtype: str,
    starts: int = 1,
) -> EngineComparison:
    """Decode prompts in the engine. Return a comparison to which ``add`` adds our own runs.

    Args:
        prompts: each prompt's token ids and messages.
        name: the target's folder or Hub name.
        files: the head's folder in the engine's layout.
        depth: draft tokens per round.
        starts: fresh pipelines to decode in, for OpenVINO.
    """
    # Room for two rounds of draft tokens: beyond the model length vLLM drafts token 0.
    longest = max(len(ids) for ids, _ in prompts) + max_new_tokens + 2 * depth + 1
    method = {"method": draft.draft_type, "model": files, "num_speculative_tokens": depth}
    request = {
        "target": name,
        "dtype": dtype,
        "max_model_len": longest,
        "max_new_tokens": max_new_tokens,
        "starts": starts,
        "speculative_config": method,
        "prompts": [{"prompt_ids": ids, "messages": prompt.messages()} for ids, prompt in prompts],
    }
    answer = ask_engine(engine, python, request)
    return EngineComparison(draft=draft, target=target, depth=depth, answer=answer)
