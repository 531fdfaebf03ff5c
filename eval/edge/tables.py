"""Tables of latencies across links: methods x networks x temperatures, as the papers print them."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipedraft.eval.edge.constants import EDGE_W, RADIOS
from pipedraft.eval.edge.methods import METHODS
from pipedraft.eval.record import LatencyRecord, Results, is_known
from pipedraft.eval.tables import Table, align_columns, bounds, describe, markdown, number
from pipedraft.files import to_json, write_atomically
from pipedraft.inference.link_files import load_link
from pipedraft.inference.pipelines.link import Times

LEGEND = """\
ms/token: seconds from the first token to the last over the tokens after the first, pooled over the
prompts, with 95 % intervals of a bootstrap over prompts; smaller is better. p50, p99: over prompts.
speed-up: over the cloud alone, streamed, on the same network. alpha: accepted over tested tokens.
up, down: payload bytes per token, the prompt included; wire: with headers and what was sent again.
J/token: of the edge, its idle time included. same: texts equal to transformers' greedy ones, or at
T > 0 to the cloud's with the same random numbers; - where a rule keeps only the distribution."""


def _columns(rows: Sequence[LatencyRecord]) -> list[tuple[str, float]]:
    return list(dict.fromkeys((row.network, row.temperature) for row in rows))


def latency_table(rows: Sequence[LatencyRecord]) -> Table:
    """Methods x (network, temperature): ms/token and its interval."""
    columns = _columns(rows)
    cells = {(row.method, row.network, row.temperature): row for row in rows}
    header = ["method", *(f"{network}, T = {degrees:g}" for network, degrees in columns)]
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        line = [method]
        for column in columns:
            row = cells[(method, *column)]
            mark = " *" if row.caveat else ""
            line.append(
                f"{number(row.ms_per_token, 1)} {bounds(row.ci95 or (None, None), 1)}{mark}"
            )
        lines.append(line)
    return Table(header, lines)


def detail_table(rows: Sequence[LatencyRecord]) -> Table:
    header = ["network", "T", "method", "rule", "ms/token", "95 % CI", "p50", "p99", "tokens/s"]
    header += ["speed-up", "alpha", "up", "down", "wire", "J/token", "same"]
    lines = []
    for row in rows:
        checked, wrong = row.lossless.checked, row.lossless.mismatches
        lines.append(
            [
                row.network,
                f"{row.temperature:g}",
                row.method,
                row.rule or "-",
                number(row.ms_per_token, 1),
                bounds(row.ci95 or (None, None), 1),
                number(row.ms_per_token_p50, 1),
                number(row.ms_per_token_p99, 1),
                number(row.tokens_per_s, 2),
                number(row.speedup, 2),
                number(row.draft_acceptance_rate),
                number(row.up_bytes_per_token, 0),
                number(row.down_bytes_per_token, 0),
                number(row.wire_bytes_per_token, 0),
                number(row.joules_per_token),
                f"{checked - wrong}/{checked}" if checked else "-",
            ]
        )
    return Table(header, lines)


def notes(rows: Sequence[LatencyRecord]) -> list[str]:
    """What is wrong with some rows, and where drafting on the edge does not pay."""
    found = []
    for row in rows:
        where = f"{row.method}, {row.network}, T = {row.temperature:g}"
        if row.total_variation_bound is not None:
            found.append(
                f"{where}: total variation of a tested token from the target's distribution "
                f"{row.total_variation_bound:.4f} on average"
            )
        if row.lossless.mismatches:
            found.append(f"{where}: {row.lossless.mismatches} texts differ")
    for caveat in dict.fromkeys(row.caveat for row in rows if row.caveat):
        names = dict.fromkeys(row.method for row in rows if row.caveat == caveat)
        found.append(f"* {', '.join(names)}: {caveat}")
    for network, degrees in _columns(rows):
        here = [r for r in rows if (r.network, r.temperature) == (network, degrees)]
        slower = [
            row.method
            for row in here
            if METHODS[row.method].drafts_in == "both" and is_known(row.speedup) and row.speedup < 1
        ]
        if slower:
            found.append(
                f"{network}, T = {degrees:g}: slower than the cloud alone: {', '.join(slower)}"
            )
    return found


def constants(rows: Sequence[LatencyRecord], times: Times, config: dict[str, Any]) -> list[str]:
    """Everything that the clock and the energy rest on."""
    found = [f"computing: {name} {value:g} s" for name, value in asdict(times).items()]
    for network in dict.fromkeys(row.network for row in rows):
        link = load_link(network)
        state = link.state(0.0)
        found.append(
            f"link {network}: at its beginning {state.up_bytes_per_s * 8e-6:g} Mbit/s up, "
            f"{state.down_bytes_per_s * 8e-6:g} down, round trip {state.round_trip_s * 1e3:g} ms "
            f"+- {link.jitter_s * 2e3:g}, loss {link.loss:g}, {link.header_bytes} bytes of headers"
        )
    found += [f"radio {name}: {values}" for name, values in RADIOS.items()]
    found.append(f"edge: {EDGE_W:g} W while it drafts")
    names = ("policy", "draft_length", "top_k", "tail_samples", "max_new_tokens", "seed", "draft")
    return [*found, *(f"{name}: {config[name]}" for name in names)]


def write_edge_report(
    folder: Path, rows: Sequence[LatencyRecord], manifest: dict[str, Any], times: Times
) -> str:
    """Write the files; returns what the terminal shows."""
    table, details, said = latency_table(rows), detail_table(rows), notes(rows)
    known = constants(rows, times, manifest["config"])
    methods = [f"{n}: {METHODS[n].summary}" for n in dict.fromkeys(r.method for r in rows)]
    parts = ["# Decoding across links", "## ms/token", markdown(table), LEGEND]
    parts += ["## Details", markdown(details)]
    for title, lines in (("Notes", said), ("Methods", methods), ("Constants", known)):
        if lines:
            parts += [f"## {title}", "\n".join(f"- {line}" for line in lines)]
    parts += ["## Provenance", "\n".join(f"- {n}: {text}" for n, text in describe(manifest))]
    write_atomically(folder / "manifest.json", to_json(manifest))
    write_atomically(folder / "report.md", ("\n\n".join(parts) + "\n").encode())
    results = Results(latency=list(rows), times=asdict(times))
    write_atomically(folder / "results.json", to_json(results))
    shown = [align_columns(table.header, table.rows), *said]
    shown.append(align_columns(details.header, details.rows))
    return "\n\n".join([shown[0], "\n".join(said), shown[-1], "\n".join(known)])
