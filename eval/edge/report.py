"""Decode table rows across virtual links, measure them, and write their report."""

# P conversations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
from transformers import PreTrainedModel

from ...files import Values, to_json, write_atomically
from ...inference.edge.channel import load_link
from ...inference.edge.simulated import Times
from ...inference.result import DecodeResult, ratio
from ...inference.rules.filters import TokenFilters
from ..lossless import PLAIN_PROMPTS, GreedyReference, check_equal
from ..metrics import decode_seconds, measure_times, pooled_ratio
from ..record import (
    UNCHECKED,
    LatencyRecord,
    LosslessRecord,
    Manifest,
    Results,
    is_known,
)
from ..tables import (
    Table,
    align_columns,
    bounds,
    describe,
    estimate,
    given_options,
    lossless_share,
    markdown,
    number,
)
from ..tasks import Prompt
from ..turns import DecodedTurn, check_room, evaluate
from .methods import EDGE_W, METHODS, RADIOS, EdgeOutput, Simulation, decode

SAME_TEXT_RULES = ("match", "gumbel")
"""Rules whose output does not depend on the draft tokens: the same random numbers give the same
text."""


@dataclass
class LinkRun:
    """All outputs of one method on one link at one temperature."""

    method: str
    network: str
    simulation: Simulation
    name: str = ""
    """Name in results, if a method has several runs; "": the method's name."""
    num_prompts: int = 0
    costs: list[EdgeOutput] = field(default_factory=list)
    turns: list[DecodedTurn] = field(default_factory=list)

    def decode(self, prompt_ids: list[int], *, prompt_index: int) -> DecodeResult:
        method = METHODS[self.method]
        decoded = decode(method, self.simulation, prompt_ids, prompt_index=prompt_index)
        self.costs.append(decoded)
        return decoded.result

    def run(self, benchmarks: Mapping[str, Sequence[Prompt]]) -> "LinkRun":
        """Decode every turn that fits into the target's positions."""
        positions = self.simulation.target.staged().max_positions
        check_room(benchmarks, self.simulation.tokenizer, positions, 1)
        for name, prompts in benchmarks.items():
            self.num_prompts += len(prompts)
            self.turns += evaluate(
                self,
                prompts,
                self.simulation.tokenizer,
                max_prompt_tokens=positions - 1,
                description=f"{self.method} {self.network} T={self.simulation.sampling} {name}",
            )
        return self

    @property
    def results(self) -> list[DecodeResult]:
        return [turn.result for turn in self.turns]

    @property
    def place(self) -> tuple[str, str, Times]:
        """Return network, sampling label and times. Rows with equal values are comparable."""
        return self.network, self.simulation.sampling, self.simulation.times

    @property
    def rule(self) -> str | None:
        """Return the acceptance rule, or None if decoding is greedy or tests no draft tokens."""
        method = METHODS[self.method]
        if not self.simulation.temperature or method.drafts_in in (None, "draft"):
            return None
        return self.simulation.config(method).rule

    def times(self) -> np.ndarray:
        """Return each conversation's decoding milliseconds and number of decoded tokens, [2, P].

        Milliseconds are from first to last token, and the first token is not counted. Conversations
        without a later token are left out.
        """
        sums: dict[tuple[str, int], tuple[float, int]] = {}
        for turn in self.turns:
            seconds, tokens = sums.get(turn.conversation, (0.0, 0))
            seconds += decode_seconds(turn.result)
            sums[turn.conversation] = seconds, tokens + turn.result.num_tokens
        counted = [(1e3 * seconds, tokens) for seconds, tokens in sums.values() if tokens]
        return np.array(counted, dtype=np.float64).reshape(-1, 2).T


def measure(
    runs: Sequence[LinkRun], reference: PreTrainedModel | None, *, seed: int
) -> list[LatencyRecord]:
    """Return each run's row for results.json. Without a reference, outputs are not compared."""
    plain = {run.place: run for run in runs if run.method == "cloud"}
    checks: dict[int, GreedyReference] = {}
    rows = []
    for run in runs:
        lossless, alone = UNCHECKED, plain.get(run.place)
        if reference is not None:
            length = run.simulation.max_new_tokens
            greedy = checks.setdefault(length, GreedyReference(reference, length))
            lossless = _lossless(run, alone, greedy)
        rows.append(_latency_record(run, alone, lossless, seed))
    return rows


def _latency_record(
    run: LinkRun, alone: LinkRun | None, lossless: LosslessRecord, seed: int
) -> LatencyRecord:
    ms_P, tokens_P = run.times()
    ms_per_token, ci95 = pooled_ratio(ms_P, tokens_P, seed=seed)
    ms, tokens = float(ms_P.sum()), float(tokens_P.sum())
    p50, p99 = np.quantile(ms_P / tokens_P, [0.5, 0.99]) if len(ms_P) else (np.nan, np.nan)
    plain_ms, plain_tokens = (np.nan, np.nan) if alone is None else alone.times().sum(1)
    results, method = run.results, METHODS[run.method]
    clock: Values = msgspec.to_builtins(measure_times(results)) or {}
    rounds = [length for result in results for length in result.round_lengths]
    num_ids = sum(len(result.token_ids) for result in results)

    def total(owners: Iterable[object], name: str) -> float:
        return sum(getattr(owner, name) for owner in owners)

    bytes_and_messages: Values = {
        f"{name}_per_token": ratio(total(run.costs, name), num_ids)
        for name in ("up_bytes", "down_bytes", "messages", "wire_bytes")
    }
    return LatencyRecord(
        method=run.name or run.method,
        network=run.network,
        temperature=run.simulation.temperature,
        filters=run.simulation.active,
        rule=run.rule,
        caveat=run.simulation.caveat(method),
        prompts=run.num_prompts,
        tokens=int(tokens),
        ms_per_token=ms_per_token,
        ci95=ci95,
        ms_per_token_p50=float(p50),
        ms_per_token_p99=float(p99),
        ms_per_round=ratio(ms, len(rounds)) if rounds else None,
        tokens_per_s=ratio(1e3 * tokens, ms),
        speedup=ratio(ratio(float(plain_ms), float(plain_tokens)), ms_per_token),
        ttft_ms=clock.get("ttft_ms"),
        itl_ms_p50=clock.get("itl_ms_p50"),
        itl_ms_p99=clock.get("itl_ms_p99"),
        **bytes_and_messages,
        joules_per_token=ratio(total(run.costs, "total_joules"), num_ids),
        joules_by_cause={
            cause: ratio(sum(cost.joules[cause] for cost in run.costs), num_ids)
            for cause in run.costs[0].joules
        },
        draft_acceptance_rate=ratio(total(results, "num_accepted"), total(results, "num_tested")),
        mean_acceptance_length=ratio(sum(rounds), len(rounds)),
        drafted_per_token=ratio(total(results, "num_drafted"), total(results, "num_tokens")),
        lossless=lossless,
    )


def _lossless(run: LinkRun, alone: LinkRun | None, greedy: GreedyReference) -> LosslessRecord:
    """Compare greedy outputs with transformers.

    Compare outputs sampled by ``SAME_TEXT_RULES`` with cloud-only decoding under the same random
    numbers, and this decoding, greedily on a few prompts, with transformers.
    """
    if METHODS[run.method].caveat:
        return UNCHECKED
    if not run.simulation.temperature:
        return greedy.check(run.results)
    rule = run.simulation.config(METHODS[run.method]).rule
    if alone is run:
        greedily = replace(run.simulation, temperature=0.0, **asdict(TokenFilters()))
        prompts = [result.prompt_ids for result in run.results[:PLAIN_PROMPTS]]
        cloud = [decode(METHODS["cloud"], greedily, ids, prompt_index=0) for ids in prompts]
        return greedy.check([output.result for output in cloud])
    if alone is None or rule not in SAME_TEXT_RULES:
        return UNCHECKED
    if alone.simulation.config(METHODS["cloud"]).rule != rule:
        return UNCHECKED
    return check_equal(run.turns, alone.turns)


# -- report.md: methods x networks x temperatures, as the papers print them ------------------------

LEGEND = """\
ms/token (TPOT): time from the first token to the last over the tokens after the first, pooled over
the prompts, with 95 % bootstrap intervals over prompts. p50, p99: over prompts. ms/round: the same
time over rounds. TTFT: median ms from the request to the first token; a pass over the prompt takes
as long as one over a token. speed-up: over the cloud alone, streamed, on the same network. up,
down: payload bytes per token, the prompt included; wire: with headers and what was sent again.
J/token: of the edge, its idle time included. same: outputs equal to transformers' greedy ones, or
at T > 0 to the cloud's with the same random numbers, where the cloud's own row compares greedy
outputs for its first prompts; - where a rule keeps only the distribution."""
DETAILS: dict[str, Callable[[LatencyRecord], str]] = {
    "network": lambda row: row.network,
    "T": lambda row: row.sampling,
    "method": lambda row: row.method,
    "rule": lambda row: row.rule or "-",
    "ms/token": lambda row: number(row.ms_per_token, 1),
    "95 % CI": lambda row: bounds(row.ci95 or (None, None), 1),
    "p50": lambda row: number(row.ms_per_token_p50, 1),
    "p99": lambda row: number(row.ms_per_token_p99, 1),
    "ms/round": lambda row: number(row.ms_per_round, 1),
    "TTFT": lambda row: number(row.ttft_ms, 1),
    "tokens/s": lambda row: number(row.tokens_per_s, 2),
    "speed-up": lambda row: number(row.speedup, 2),
    "alpha": lambda row: number(row.draft_acceptance_rate),
    "up": lambda row: number(row.up_bytes_per_token, 0),
    "down": lambda row: number(row.down_bytes_per_token, 0),
    "wire": lambda row: number(row.wire_bytes_per_token, 0),
    "J/token": lambda row: number(row.joules_per_token),
    "same": lossless_share,
}


def latency_table(rows: Sequence[LatencyRecord]) -> Table:
    """Tabulate ms/token with intervals by method (rows) and by link and temperature (columns)."""
    places = dict.fromkeys((row.network, row.sampling) for row in rows)
    cells = {
        (row.method, row.network, row.sampling): estimate(
            row.ms_per_token, row.ci95 or (None, None), 1
        )
        + " *" * bool(row.caveat)
        for row in rows
    }
    header = ["method", *(f"{network}, T = {sampling}" for network, sampling in places)]
    methods = dict.fromkeys(row.method for row in rows)
    return Table(header, [[m, *(cells[m, *place] for place in places)] for m in methods])


def notes(rows: Sequence[LatencyRecord]) -> list[str]:
    """Return notes on wrong outputs, on caveats, and on places where the cloud alone is faster."""
    found, slower = [], dict[str, list[str]]()
    for row in rows:
        place = f"{row.network}, T = {row.sampling}"
        if row.lossless.mismatches:
            found.append(f"{row.method}, {place}: {row.lossless.mismatches} outputs differ")
        drafts_away = METHODS[row.method].drafts_in == "both"
        if drafts_away and is_known(row.speedup) and row.speedup < 1:
            slower.setdefault(place, []).append(row.method)
    for caveat in dict.fromkeys(row.caveat for row in rows if row.caveat):
        names = dict.fromkeys(row.method for row in rows if row.caveat == caveat)
        found.append(f"* {', '.join(names)}: {caveat}")
    return found + [
        f"{place}: slower than the cloud alone: {', '.join(names)}"
        for place, names in slower.items()
    ]


def constants(rows: Sequence[LatencyRecord], times: Values) -> list[str]:
    """List the constants of the clock and of the energy model. The manifest has the options."""
    found = [f"computing: {name} {value:g} s" for name, value in times.items()]
    for network in dict.fromkeys(row.network for row in rows):
        link = load_link(network)
        state = link.state(0.0)
        found.append(
            f"link {network}: at its beginning {state.up_bytes_per_s * 8e-6:g} Mbit/s up, "
            f"{state.down_bytes_per_s * 8e-6:g} down, round trip {state.round_trip_s * 1e3:g} ms "
            f"+- {link.jitter_s.at(0.0) * 2e3:g}, loss {link.loss.at(0.0):g}, {link.header_bytes} "
            f"bytes of headers{'; ' * bool(link.note)}{link.note}"
        )
    found += [f"radio {name}: {values}" for name, values in RADIOS.items()]
    return [*found, f"edge: {EDGE_W:g} W while it drafts"]


def write_edge_report(
    folder: Path, rows: Sequence[LatencyRecord], manifest: Manifest, times: Times
) -> str:
    """Write the report's files, and return the text for the terminal."""
    known = {name: value for name, value in asdict(times).items() if value is not None}
    table, details = latency_table(rows), Table.of(DETAILS, rows)
    lists = {
        "Notes": notes(rows),
        "Methods": [f"{n}: {METHODS[n].summary}" for n in dict.fromkeys(r.method for r in rows)],
        "Constants": constants(rows, known),
        "Options": [f"{name}: {value}" for name, value in given_options(manifest)],
        "Provenance": [f"{name}: {value}" for name, value in describe(manifest)],
    }
    parts = ["# Decoding across links", "## ms/token", markdown(table), LEGEND]
    parts += ["## Details", markdown(details)]
    for title, lines in lists.items():
        parts += [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []
    write_atomically(folder / "manifest.json", to_json(manifest))
    write_atomically(folder / "report.md", ("\n\n".join(parts) + "\n").encode())
    results = Results(latency=list(rows), times=known)
    write_atomically(folder / "results.json", to_json(results))
    shown = [align_columns(table), "\n".join(lists["Notes"]), align_columns(details)]
    return "\n\n".join([*shown, "\n".join(lists["Constants"])])
