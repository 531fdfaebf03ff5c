"""Compare decoding across links with stored results, before and after a refactoring.

    python benchmarks/edge/edge_identity.py --write out/edge_identity.json      # before the change
    python benchmarks/edge/edge_identity.py --compare out/edge_identity.json    # after it

Runs every method from `pipedraft eval edge`, greedy and at temperature 1, with every rule, on
steady links and links with jitter and loss. Target and drafts are small and random, equal in every
run. Each sequence's token ids, bytes, messages, times, rounds, tests and energy are stored. The
last output line is one JSON object.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the scripts in the folder above
from identity import (
    PlainTokenizer,
    add_noise,
    make_draft,
    make_target,
    read_options,
    write_or_compare,
)

from pipedraft.eval.edge.methods import METHODS, TIMES, Simulation, decode, radio_energy, radio_of
from pipedraft.inference.edge.channel import NEVER, PRESETS, Link, Steps
from pipedraft.inference.edge.simulated import Times
from pipedraft.inference.edge.target_session import SharedTarget
from pipedraft.inference.rules import ROUND_RULES, RULE_NAMES
from pipedraft.models.heads.language_model import LanguageModelDraft

PROMPTS = [[5], [index * 5 % 60 for index in range(29)], [7, 7, 11]]
NEW_TOKENS = 24
EOS = 9
STEADY = {
    f"{name} steady": replace(link, jitter_s=NEVER, loss=NEVER) for name, link in PRESETS.items()
}
CHANGING = Link(
    up_bytes_per_s=Steps((0.0, 0.4, 0.7), (5e4, 2e3, 1e5), 1.0),
    down_bytes_per_s=Steps((0.0, 0.5), (1e5, 8e3), 1.3),
    delay_s=Steps((0.0, 2.0), (0.03, 0.15), 3.0),
)
LINKS = STEADY | PRESETS | {"changing": CHANGING}
ALL_TIMES = TIMES | {
    "rows": Times(draft_s=0.02, verify_s=0.09, verify_row_s=0.002, cloud_draft_s=0.005),
    "slow": Times(draft_s=0.05, verify_s=0.03, verify_row_s=0.001, cloud_draft_s=0.0125),
}
LINK_RULES = [rule for rule in RULE_NAMES if rule not in ROUND_RULES]
WAYS: list[dict[str, Any]] = [
    *({"link": link, "temperature": t} for link in LINKS for t in (0.0, 1.0)),
    *(
        {"link": "4g steady", "temperature": 1.0, "rule": rule, "payload_tokens": 2}
        for rule in LINK_RULES
    ),
    *({"link": "wifi", "times": "rows", "temperature": 0.7, "rule": rule} for rule in LINK_RULES),
    *({"link": "4g steady", "times": times} for times in ("flexspec", "rows", "slow")),
    *({"link": "wifi steady", "times": "rows", "policy": p} for p in ("fixed:5", "geometric")),
    {"link": "5g", "times": "slow", "temperature": 1.0, "tail_samples": 1, "payload_tokens": 1},
    {"link": "4g", "times": "flexspec", "policy": "alg2", "fixed_length": 7, "max_length": 16},
]


PARTS: dict[str, dict[str, Any]] = {
    "picospec_serial": {"serial": True},
    "picospec_slow": {"slow": True},
    "picospec_full": {"rule": "rejection"},
}
"""Name -> settings: PicoSpec without one of its parts."""


def all_drafts(target: Any) -> dict[str, Any]:
    near = LanguageModelDraft(add_noise(make_target(), 0.02), target)
    return {"language_model": near, "flexspec": make_draft("flexspec", target, 1)}


def all_runs(target: Any) -> Iterator[tuple[str, str, Simulation]]:
    """Yield each run's name, method and simulation."""
    drafts = all_drafts(target)
    for number, given in enumerate(WAYS):
        way = dict(given)
        link, times = way.pop("link"), ALL_TIMES[way.pop("times", "picospec")]
        kind = "flexspec" if number % 3 == 2 else "language_model"
        words = " ".join(f"{key}={value}" for key, value in given.items())
        simulation = Simulation(
            target=SharedTarget(target),
            draft=drafts[kind],
            tokenizer=PlainTokenizer(),
            link=LINKS[link],
            times=times,
            energy=radio_energy(radio_of(link), draft_s=times.draft_s),
            max_new_tokens=NEW_TOKENS,
            seed=3,
            **way,
        )
        for method in METHODS:
            yield f"{method} {kind} {words}", method, simulation
        for name, settings in PARTS.items():
            yield f"{name} {kind} {words}", "picospec", replace(simulation, **settings)


def summarize(decoded: Any) -> dict[str, Any]:
    result = decoded.result
    return {
        "token_ids": result.token_ids,
        "stop": result.stop_reason,
        "up": decoded.up_bytes,
        "down": decoded.down_bytes,
        "messages": decoded.messages,
        "wire": decoded.wire_bytes,
        "times_ms": [round(1e3 * time_s, 6) for time_s in result.token_times_s],
        "rounds": result.round_lengths,
        "tests": [result.position_tests, result.position_accepts],
        "drafted": [result.num_drafted, result.num_draft_forwards],
        "joules": {name: round(value, 9) for name, value in decoded.joules.items()},
    }


def main() -> None:
    options = read_options(__doc__)
    torch.set_num_threads(1)
    target, found = make_target(), {}
    target.generation_config.eos_token_id = EOS
    for name, method, simulation in all_runs(target):
        if options.only in name:
            found[name] = [
                summarize(decode(METHODS[method], simulation, prompt, prompt_index=index))
                for index, prompt in enumerate(PROMPTS)
            ]
    write_or_compare(found, options)


if __name__ == "__main__":
    main()
