"""Texts decoded across virtual links, and what they measure."""

# P conversations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from pipedraft.eval.edge.methods import METHODS, Decoded, Simulation, decode
from pipedraft.eval.intervals import bootstrap_ratio
from pipedraft.eval.lossless import GreedyReference, text_logits
from pipedraft.eval.metrics import WallClock, ratio
from pipedraft.eval.record import LatencyRecord, LosslessRecord
from pipedraft.eval.run import prompt_seed
from pipedraft.eval.tasks import Prompt, encode_turn
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.sources import make_source
from pipedraft.inference.tree import TokenTree
from pipedraft.inference.verify import probabilities, top_k_bias
from pipedraft.models.target import Keep

UNCHECKED = LosslessRecord(checked=0, mismatches=0)
SAME_TEXT_RULES = ("match", "gumbel")
"""Whose text does not depend on the draft tokens: the same random numbers give the same text."""


@dataclass
class Texts:
    """All texts of one method on one link at one temperature."""

    method: str
    network: str
    simulation: Simulation
    conversations: list[list[Decoded]] = field(default_factory=list)
    """The turns of each."""

    @property
    def turns(self) -> list[Decoded]:
        return [decoded for turns in self.conversations for decoded in turns]

    @property
    def results(self) -> list[DecodeResult]:
        return [decoded.result for decoded in self.turns]


def decode_all(
    names: Sequence[str],
    simulations: Sequence[tuple[str, Simulation]],
    benchmarks: Mapping[str, Sequence[Prompt]],
) -> list[Texts]:
    """Every method in every scene; a later turn answers the texts generated before it.

    A turn that leaves no room in the target's positions is left out, with the turns after it.
    """
    prompts = [prompt for prompts in benchmarks.values() for prompt in prompts]
    num_turns = sum(len(prompt.turns) for prompt in prompts)
    found = []
    with tqdm(total=num_turns * len(names) * len(simulations), unit="turn") as bar:
        for network, simulation in simulations:
            for name in names:
                bar.set_description(f"{network} T={simulation.temperature:g} {name}")
                texts = Texts(name, network, simulation)
                for prompt in prompts:
                    texts.conversations.append(_converse(name, simulation, prompt))
                    bar.update(len(prompt.turns))
                found.append(texts)
    return found


def _converse(name: str, simulation: Simulation, prompt: Prompt) -> list[Decoded]:
    limit = simulation.target.staged().max_positions
    answers: list[str] = []
    turns = []
    for turn in range(len(prompt.turns)):
        ids = encode_turn(simulation.tokenizer, prompt, answers)
        if len(ids) >= limit:
            break
        decoded = decode(METHODS[name], simulation, ids, prompt_index=prompt_seed(prompt, turn))
        answers.append(decoded.result.text)
        turns.append(decoded)
    return turns


def measure(texts: Sequence[Texts], reference: Any | None, *, seed: int) -> list[LatencyRecord]:
    """One row of results.json for each method, network and temperature.

    Args:
        reference: target to compare greedy texts with; None: texts are not compared.
    """
    plain = {(t.network, t.simulation.temperature): t for t in texts if t.method == "cloud"}
    checks: dict[int, GreedyReference] = {}
    rows = []
    for mine in texts:
        alone = plain.get((mine.network, mine.simulation.temperature))
        row = _latency(mine, alone, seed=seed) | _traffic(mine) | _acceptance(mine)
        lossless = UNCHECKED
        if reference is not None:
            length = mine.simulation.max_new_tokens
            greedy = checks.setdefault(length, GreedyReference(reference, length))
            lossless = _lossless(mine, alone, greedy)
        rows.append(LatencyRecord(**row, lossless=lossless))
    return rows


def _latency(mine: Texts, alone: Texts | None, *, seed: int) -> dict[str, Any]:
    seconds_P, tokens_P = _per_conversation(mine)
    kept_P = tokens_P > 0
    each_P = 1e3 * seconds_P[kept_P] / tokens_P[kept_P]
    low, high = bootstrap_ratio(1e3 * seconds_P[kept_P], tokens_P[kept_P], seed=seed)
    clock = WallClock.measure(mine.results)
    speedup = float("nan")
    if alone is not None:
        other_s, other_tokens = (float(values_P.sum()) for values_P in _per_conversation(alone))
        speedup = ratio(
            ratio(other_s, other_tokens), ratio(float(seconds_P.sum()), float(tokens_P.sum()))
        )
    return {
        "method": mine.method,
        "network": mine.network,
        "temperature": mine.simulation.temperature,
        "rule": _rule(mine),
        "caveat": mine.simulation.caveat(METHODS[mine.method]),
        "prompts": len(mine.conversations),
        "tokens": int(tokens_P.sum()),
        "ms_per_token": ratio(1e3 * float(seconds_P.sum()), float(tokens_P.sum())),
        "ci95": (float(low), float(high)),
        "ms_per_token_p50": float(np.quantile(each_P, 0.5)) if len(each_P) else float("nan"),
        "ms_per_token_p99": float(np.quantile(each_P, 0.99)) if len(each_P) else float("nan"),
        "tokens_per_s": ratio(float(tokens_P.sum()), float(seconds_P.sum())),
        "speedup": speedup,
        "ttft_ms": None if clock is None else clock.ttft_ms,
        "itl_ms_p50": None if clock is None else clock.itl_ms_p50,
        "itl_ms_p99": None if clock is None else clock.itl_ms_p99,
    }


def _per_conversation(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """[P], [P]: seconds from first to last token, and tokens after the first, of all turns."""
    pairs = [
        (sum(d.decode_s for d in turns), sum(d.result.num_tokens for d in turns))
        for turns in texts.conversations
    ]
    seconds_P, tokens_P = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return seconds_P, tokens_P


def _rule(texts: Texts) -> str | None:
    """None: greedy, or no draft token is tested."""
    method = METHODS[texts.method]
    if not texts.simulation.temperature or method.drafts_in in (None, "draft"):
        return None
    return texts.simulation.config(method).rule


def _traffic(texts: Texts) -> dict[str, Any]:
    turns = texts.turns
    tokens = sum(len(decoded.result.token_ids) for decoded in turns)
    joules = {
        cause: ratio(sum(decoded.joules[cause] for decoded in turns), tokens)
        for cause in turns[0].joules
    }
    return {
        "up_bytes_per_token": ratio(sum(decoded.up_bytes for decoded in turns), tokens),
        "down_bytes_per_token": ratio(sum(decoded.down_bytes for decoded in turns), tokens),
        "messages_per_token": ratio(sum(decoded.messages for decoded in turns), tokens),
        "wire_bytes_per_token": ratio(sum(decoded.wire_bytes for decoded in turns), tokens),
        "joules_per_token": sum(joules.values()),
        "joules_by_cause": joules,
    }


def _acceptance(texts: Texts) -> dict[str, Any]:
    results = texts.results
    tested = sum(result.num_tested for result in results)
    rounds = [length for result in results for length in result.round_lengths]
    bias = None
    if _rule(texts) == "topk":
        bias = float(np.mean([_top_k_bias(texts.simulation, result) for result in results]))
    return {
        "draft_acceptance_rate": ratio(sum(result.num_accepted for result in results), tested),
        "mean_acceptance_length": ratio(sum(rounds), len(rounds)),
        "drafted_per_token": ratio(
            sum(result.num_drafted for result in results),
            sum(result.num_tokens for result in results),
        ),
        "total_variation_bound": bias,
    }


@torch.inference_mode()
def _top_k_bias(simulation: Simulation, result: DecodeResult) -> float:
    """Mean over the text of what ``topk`` loses where a token is tested; bonuses lose nothing."""
    assert simulation.draft is not None
    source, first = make_source(simulation.draft), len(result.prompt_ids)
    source.begin({}, [*result.prompt_ids, result.token_ids[0]])
    logits_NV = text_logits(simulation.target.model, result.prompt_ids, result.token_ids)
    total = 0.0
    for place, token in enumerate(result.token_ids[1:]):
        p_V = probabilities(logits_NV[place + 1].float(), simulation.temperature)
        q_V = torch.zeros_like(p_V)
        (logits_U,) = source.leaf_logits(TokenTree(result.token_ids[place], first + place), [0], {})
        q_V[source.draft_ids] = probabilities(logits_U, simulation.temperature)
        total += top_k_bias(p_V, q_V, simulation.top_k)
        source.keep(Keep((0,), 1))
        source.observe({}, [token])
    return ratio(total, result.num_tokens)


def _lossless(mine: Texts, alone: Texts | None, greedy: GreedyReference) -> LosslessRecord:
    """Greedy: against transformers. Sampled by a rule that draft tokens do not touch: against the
    cloud alone with the same random numbers. Other rules keep the distribution, not the text."""
    if METHODS[mine.method].caveat:
        return UNCHECKED
    if not mine.simulation.temperature:
        return greedy.check(mine.results).record()
    rule = mine.simulation.config(METHODS[mine.method]).rule
    if alone is None or alone is mine or rule not in SAME_TEXT_RULES:
        return UNCHECKED
    if alone.simulation.config(METHODS["cloud"]).rule != rule:
        return UNCHECKED
    pairs = list(zip(mine.results, alone.results, strict=True))
    differ = sum(ours.token_ids != theirs.token_ids for ours, theirs in pairs)
    return LosslessRecord(checked=len(pairs), mismatches=differ)
