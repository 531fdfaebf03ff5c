"""report.html: one file without network that shows evaluations to people, on any screen and paper.

Everything that was read from files is escaped by jinja2, and the page's policy forbids scripts but
its own. Pictures are in figures.py, the template in page.py.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipedraft.eval import provenance, tables
from pipedraft.eval.html import page as template
from pipedraft.eval.html.charts import Missing, Picture, Span
from pipedraft.eval.html.figures import all_pictures, time_line
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.tables import Run, Table

# Not allowed in XML, or able to turn the reading direction of what follows.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(value: Any) -> Any:
    """The same with a replacement character for each character that no page can hold."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {printable(key): printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [printable(entry) for entry in value]
    return value


@dataclass(frozen=True, kw_only=True)
class Source:
    """What one folder holds."""

    name: str
    entries: list[Run]
    manifest: dict[str, Any] | None = None
    """None: there is none."""
    latency: list[dict[str, Any]] = field(default_factory=list)
    digest: str
    """SHA-256 of results.json."""

    @property
    def facts(self) -> list[tuple[str, str]]:
        described = provenance.describe(self.manifest or {})
        if self.manifest is None:
            described.append(("manifest.json", "missing: what the numbers depend on is unknown"))
        found = [fact for fact in described if fact[0] != "command"]
        return [*found, ("results.json", f"SHA-256 {self.digest}")]

    @property
    def command(self) -> str | None:
        return provenance.fact(self.manifest or {}, "command")

    @property
    def settings(self) -> list[tuple[str, str]]:
        return provenance.settings(self.manifest or {})


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A folder against the first one."""

    title: str
    warnings: list[str]
    table: Table | None
    """None: nothing can be compared; the warnings say why."""


def _summary(pooled: Sequence[Run]) -> dict[str, Any]:
    """The one number of every method, and where its interval lies between 0 and the largest."""
    drafted = [run for run in pooled if run["schedule"] != AUTOREGRESSIVE and run["steps"]]
    lengths = [run["equivalent_acceptance_length"] for run in drafted]
    known = [v for x in lengths for v in (x["pooled"], *x["ci95"]) if tables.is_known(v)]
    scale = max(1.0, *known) * 1.05 if known else 1.0

    def percent(value: float | None) -> str | None:
        return f"{100 * value / scale:.2f}" if tables.is_known(value) else None

    rows = []
    for run, length in zip(drafted, lengths, strict=True):
        low, high = map(percent, length["ci95"])
        shape = run["tree"] or f"W={run['tree_width']}"
        rows.append(
            {
                "method": ", ".join(
                    filter(None, (run["method"], f"n={run['stages']}", shape, run.get("run")))
                ),
                "temperature": f"{run['temperature']:g}",
                "length": tables.number(length["pooled"]),
                "interval": tables.bounds(length["ci95"]),
                "point": percent(length["pooled"]),
                "low": low if high is not None else None,
                "high": high,
                "lossless": tables.lossless_share(run),
            }
        )
    return {"summary": rows, "scale": f"{scale:.1f}", "one": percent(1.0)}


def _losses(runs: Sequence[Run]) -> str:
    drafted = [r for r in runs if r["benchmark"] != OVERALL and r["schedule"] != AUTOREGRESSIVE]
    checked = sum(run["lossless"]["checked"] for run in drafted)
    wrong = sum(run["lossless"]["mismatches"] for run in drafted)
    if not checked:
        return "No text was compared with the target's own."
    if wrong:
        return f"{wrong} of {checked} greedy texts differ from the target's own."
    return f"All {checked} greedy texts that were checked equal the target's own."


def _overview(sources: Sequence[Source], runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What was measured, on which target."""

    def listed(values: Any) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

    prompts = {(run["benchmark"], run["prompts"]) for run in runs if run["benchmark"] != OVERALL}
    manifests = [source.manifest or {} for source in sources]
    fact = provenance.fact
    found = {
        "target": listed(fact(manifest, "target", "name") for manifest in manifests),
        "methods": listed(r["method"] for r in runs if r["schedule"] != AUTOREGRESSIVE),
        "benchmarks": ", ".join(f"{name} ({count} prompts)" for name, count in sorted(prompts)),
        "stages": listed(sorted({run["stages"] for run in runs})),
        "temperatures": listed(f"{t:g}" for t in sorted({run["temperature"] for run in runs})),
        "dtype": listed(fact(manifest, "dtype") for manifest in manifests),
        "machine": listed(fact(manifest, "hardware", "processor") for manifest in manifests),
        "runs": ", ".join(source.name for source in sources) if len(sources) > 1 else "",
    }
    return [(name, text) for name, text in found.items() if text]


def _disagreements(sources: Sequence[Source]) -> list[str]:
    """Why the numbers of several folders may not be comparable."""
    lines = []
    for name, path in (
        ("targets", ("target", "fingerprint", "hash")),
        ("numbers (dtype)", ("dtype",)),
        ("lengths of answers (--max-new-tokens)", ("config", "max_new_tokens")),
    ):
        values = [provenance.fact(source.manifest or {}, *path) for source in sources]
        if len({value for value in values if value is not None}) > 1:
            lines.append(f"The runs have different {name}: their L' are not comparable.")
    return lines


def _legend(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The Markdown legend as terms; entries begin with a bold one."""
    plain = " ".join(re.sub(r"[*`]", "", tables.legend(runs)).split())
    entries = [entry.strip() for entry in plain.removeprefix("- ").split(" - ")]
    return [(entry.partition(" ")[0].rstrip(","), entry) for entry in entries]


def build_page(
    sources: Sequence[Source],
    *,
    comparisons: Sequence[Comparison] = (),
    comparison_legend: str = "",
    traces: Mapping[str, Mapping[str, Sequence[Span]]] | None = None,
) -> bytes:
    """
    Args:
        sources: one or more; the order is the page's.
        traces: name -> process -> what it did when; the names are printable.
    """
    from jinja2 import Environment, StrictUndefined

    runs, pooled = [], []
    for source in sources:
        name = {"run": source.name} if len(sources) > 1 else {}
        entries = [printable(entry | name) for entry in source.entries]
        runs += entries
        pooled += tables.pooled_runs(entries)
    several = sum(bool(source.latency) for source in sources) > 1
    latency = [
        printable(row | ({"run": source.name} if several else {}))
        for source in sources
        for row in source.latency
    ]
    repeated = [run for run in pooled if run.get("repeats")]
    found = all_pictures(runs, pooled, latency)
    found += [
        time_line(name, number, tracks)
        for number, (name, tracks) in enumerate((traces or {}).items())
    ] or [Missing(title="Time line", reason="no trace was given (--trace)")]
    summary = _summary(pooled)
    sections = ["Summary"] * bool(summary["summary"]) + ["Results"] * bool(runs) + ["Plots"]
    sections += ["Comparison"] * bool(comparisons) + ["Provenance"]
    script = template.SCRIPT
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(template.PAGE).render(
        title="Evaluation" if len(sources) == 1 else f"{len(sources)} evaluations",
        sections=sections,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=template.STYLE,
        colours=[(key, template.LIGHT[key], template.DARK[key]) for key in template.LIGHT],
        text_columns=tables.TEXT_COLUMNS,
        facts=_overview(sources, runs),
        warnings=[*_disagreements(sources), *tables.warnings(runs)],
        losses=_losses(runs),
        **summary,
        results=tables.results_table(runs, with_benchmark=True) if runs else None,
        legend=_legend(runs),
        repeats=tables.repeats_table(repeated) if repeated else None,
        repeats_text=tables.REPEATS_TEXT,
        pictures=[entry for entry in found if isinstance(entry, Picture)],
        missing=[entry for entry in found if isinstance(entry, Missing)],
        comparisons=comparisons,
        comparison_legend=comparison_legend,
        sources=[
            {
                "name": source.name,
                "command": source.command,
                "facts": source.facts,
                "settings": source.settings,
            }
            for source in sources
        ],
    )
    return printable(page).encode()
