"""A retention report: results.json, report.md and a plot of acceptance against drift."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipedraft.eval.plots import plot_retention
from pipedraft.eval.record import DriftRecord, Results, RetentionRecord
from pipedraft.eval.tables import Table, align_columns, bounds, markdown, number
from pipedraft.files import to_json, write_atomically

PLOT = "retention.png"
MEASURES = {
    "alpha": "Acceptance rate alpha",
    "tau": "Tokens per round tau",
    "retained": "Share of the base's alpha",
}
LEGEND = """\
- **KL** mean KL(base || target) per token of the base's answers to the prompts, in nats; **scope**
  in: embedding, last block, final norm and LM head are the base's, out: how many of their modules
  are not.
- **alpha** accepted over tested draft tokens; **tau** tokens per round, the target's own one
  included; **share** alpha over the same draft's alpha on the base, prompts resampled together.
- In brackets 95 % bootstrap intervals over prompts. * the draft is refused on that target unless
  the check of its fingerprint is left out, as here.
"""


def cell(entry: RetentionRecord, measure: str) -> str:
    star = "" if entry.loads else " *"
    return f"{number(getattr(entry, measure))} {bounds(getattr(entry, f'{measure}_ci95'), 2)}{star}"


def retention_table(
    targets: Sequence[DriftRecord], drafts: Sequence[RetentionRecord], measure: str
) -> Table:
    """One line for each target, one column for each draft."""
    names = list(dict.fromkeys(entry.draft for entry in drafts))
    found = {(e.domain, e.target, e.draft): cell(e, measure) for e in drafts}
    rows = []
    for target in targets:
        where = target.domain, target.target
        changed = len(target.out_of_scope)
        drift = f"{number(target.kl)} {bounds(target.kl_ci95, 2)}"
        scope = f"out: {changed}" if changed else "in"
        rows.append([*where, drift, scope, *(found[*where, name] for name in names)])
    return Table(["domain", "target", "KL", "scope", *names], rows)


def format_retention(
    targets: Sequence[DriftRecord], drafts: Sequence[RetentionRecord], manifest: dict[str, Any]
) -> str:
    """report.md."""
    turns, same = (
        sum(getattr(target, key) for target in targets) for key in ("turns", "same_text")
    )
    parts = [
        "# Retention",
        f"Base target `{manifest['target']['name']}` ({manifest['dtype']}), seed "
        f"{manifest['seed']}.",
        f"    {manifest['command']}",
        f"All drafts gave a target the same text in {same} of {turns} turns.",
    ]
    for measure, title in MEASURES.items():
        parts += [f"## {title}", markdown(retention_table(targets, drafts, measure))]
    return "\n\n".join([*parts, LEGEND, f"![acceptance against drift]({PLOT})"]) + "\n"


def write_retention(out_dir: Path, results: Results, manifest: dict[str, Any]) -> str:
    """Write everything into an existing folder.

    Returns:
        The table of alpha, for the terminal.
    """
    targets, drafts = results.targets or [], results.drafts or []
    write_atomically(out_dir / PLOT, plot_retention(targets, drafts))
    write_atomically(out_dir / "manifest.json", to_json(manifest))
    report = format_retention(targets, drafts, manifest)
    write_atomically(out_dir / "report.md", report.encode())
    # Last: whoever finds results.json finds the rest.
    write_atomically(out_dir / "results.json", to_json(results))
    table = retention_table(targets, drafts, "alpha")
    return align_columns(table.header, table.rows)
