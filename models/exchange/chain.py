"""Compute the best chain length and simulator settings from acceptance by draft position.

vLLM and SGLang can accept draft tokens at given rates instead of verifying them, so you can measure
a rate's effect on other hardware. Rates from a real run make the figures reproducible.
"""

# V target vocabulary, H hidden

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from operator import mul

from ...files import Values
from ..heads.dflash import DFlash
from ..heads.draft import Description, Draft
from .card import MeasuredRun

CHAIN_LENGTH = 3
"""Chain length if the head's acceptance is unknown."""


def sum_counts(runs: Sequence[MeasuredRun]) -> list[float]:
    """Return acceptance rates by draft position, given acceptance at all earlier positions."""
    counts = [run.position_tests for run in runs], [run.position_accepts for run in runs]
    tests, accepts = ([sum(x) for x in zip_longest(*rows, fillvalue=0)] for rows in counts)
    return [a / t for a, t in zip(accepts, tests, strict=True) if t]


def chains_of(runs: Sequence[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """Group benchmark entries by sampling, keeping only the longest evaluated chain.

    Raises:
        ValueError: this checkpoint has no evaluated chain.
    """
    chains: dict[str, dict[int, list[MeasuredRun]]] = {}
    for run in runs:
        kind, _, length = (run.tree or "").partition(":")
        is_chain = kind == "chain" and length.isdigit() and run.checkpoint is not None
        # The line over all benchmarks repeats the same counts.
        if is_chain and run.benchmark != "overall" and run.position_tests:
            chains.setdefault(run.sampling, {}).setdefault(int(length), []).append(run)
    if not chains:
        raise ValueError(
            "--results: no chain of this checkpoint was evaluated; give the results of "
            "pipedraft eval --schedule eagle --tree chain:7"
        )
    return {sampling: by_length[max(by_length)] for sampling, by_length in chains.items()}


def validated_acceptance(description: Description) -> list[float]:
    """Return, for each position, how often draft and target agree on held-out rows."""
    metrics = description.get("training", {}).get("metrics") or {}
    names = [f"agreement_{position}" for position in range(1, len(metrics) + 1)]
    return [float(metrics[name]) for name in names if name in metrics]


def relative_cost(head: Draft) -> float:
    """Return weights read per draft token, divided by weights read per target pass."""
    layer = head.layer_config
    num_heads = 2 * (layer.num_heads + layer.num_key_value_heads)
    block = layer.hidden_size * (num_heads * layer.head_size + 3 * layer.intermediate_size)
    vocabulary = head.target_vocab_size * layer.hidden_size
    own = sum(value.numel() for name, value in head.state_dict().items() if name != "draft_ids")
    # A head without its own LM head reads the target's one for every draft token.
    if "lm_head.weight" not in head.state_dict():
        own += vocabulary
    return own / (int(head.reference.fingerprint["num_layers"]) * block + vocabulary)


def draft_tokens(head: Draft, acceptance: Sequence[float]) -> int:
    """Return the draft tokens per round for a launch command. Block heads fix this number."""
    if isinstance(head, DFlash):
        return head.config.num_tokens
    return best_chain(acceptance, relative_cost(head))


def best_chain(acceptance: Sequence[float], cost: float) -> int:
    """Return the chain length k with the most tokens per time, if a round takes 1 + k ``cost``."""
    # Token j counts only if all before it are accepted; 1.0 is the target's own token.
    tokens = list(accumulate(accumulate(acceptance, mul), initial=1.0))
    lengths = range(1, len(acceptance) + 1)
    return max(lengths, key=lambda k: tokens[k] / (1 + k * cost), default=CHAIN_LENGTH)


def simulated(chains: dict[str, list[MeasuredRun]]) -> Values:
    """Return both engines' simulator settings by sampling and benchmark.

    vLLM's rates are unconditional: entry j is the share of rounds accepting tokens 1 .. j. Both
    engines count the target's own token in the acceptance length.
    """
    found: Values = {}
    for sampling, runs in chains.items():
        names = sorted({run.benchmark for run in runs})
        parts = {name: [run for run in runs if run.benchmark == name] for name in names}
        for name, part in ({"all": runs} | parts).items():
            rates = [round(rate, 6) for rate in accumulate(sum_counts(part), mul)]
            # The expected accepted count sums P(at least j accepted) over j.
            length = 1 + sum(rates)
            vllm = {
                "num_speculative_tokens": len(rates),
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates,
            }
            sglang = {
                "SGLANG_SIMULATE_ACC_LEN": f"{length:.4f}",
                "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            }
            sizes = {"acceptance_length": round(length, 4), "vllm": vllm, "sglang": sglang}
            found.setdefault(f"temperature {sampling}", {})[name] = sizes
    return found
