"""What happened to every row: counts, never ratios."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

EMPTY_MASK = "empty mask"


@dataclass(kw_only=True)
class DataReport:
    """rows_read = documents kept + bad rows + rows with an empty mask (those only if unpacked)."""

    rows_read: int
    rows_kept: int
    bad_rows: dict[str, int]
    """Rows left out, by reason; an empty mask is counted apart."""
    empty_mask_rows: int
    """Conversations without a supervised token; left out unless packed."""
    truncated_rows: int
    """Rows kept that were cut at max_length; 0 if packed."""
    missing_turns: int
    """Assistant turns that the chat template dropped or rewrote beyond recognition."""
    tokens: int
    """Tokens in the two sets, separators included."""
    supervised_tokens: int
    """Tokens with loss_mask 1."""
    length_p50: int
    length_p90: int
    length_p99: int
    length_max: int
    """Lengths of the kept rows before the cut, in tokens."""
    sources: dict[str, dict[str, int]]
    """Per source: rows_read, rows_kept, tokens (separators excluded)."""
    train_rows: int = 0
    valid_rows: int = 0
    """Rows of the two sets (blocks, if packed)."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """A few lines for a person."""
        bad = sum(self.bad_rows.values())
        lines = [
            f"rows: {self.rows_read} read, {self.rows_kept} kept, {bad} bad, "
            f"{self.empty_mask_rows} with an empty mask, {self.truncated_rows} truncated",
            f"tokens: {self.tokens}, supervised {self.supervised_tokens}",
            f"length before the cut: p50 {self.length_p50}, p90 {self.length_p90}, "
            f"p99 {self.length_p99}, max {self.length_max}",
            f"sets: {self.train_rows} train rows, {self.valid_rows} valid rows",
        ]
        lines += [f"bad rows: {count} {reason}" for reason, count in self.bad_rows.items()]
        if self.missing_turns:
            lines.append(f"assistant turns not found in the rendered text: {self.missing_turns}")
        if len(self.sources) > 1:
            lines += [
                f"{name}: {counts['rows_kept']} of {counts['rows_read']} rows, "
                f"{counts['tokens']} tokens"
                for name, counts in self.sources.items()
            ]
        return "\n".join(lines)


def build_report(
    rows: "Dataset", errors: np.ndarray, *, max_length: int, chat_sources: set[str], pack: bool
) -> DataReport:
    """Count the tokenised rows; ``errors`` holds the reason for each row left out, else ""."""
    kept = errors == ""
    names = np.asarray(rows["source"][:], dtype=object)
    full = np.asarray(rows["num_tokens"][:], dtype=np.int64)
    supervised = np.asarray(rows["num_supervised"][:], dtype=np.int64)
    lengths = full if pack else np.minimum(full, max_length)
    is_text = ~np.isin(names.astype(str), sorted(chat_sources))
    reasons = Counter(errors[~kept])
    empty = reasons.pop(EMPTY_MASK, 0)
    if pack:
        empty = int((kept & (supervised == 0)).sum())
    quantiles = (
        np.quantile(full[kept], [0.5, 0.9, 0.99, 1.0], method="higher") if kept.any() else [0] * 4
    )
    p50, p90, p99, longest = (int(value) for value in quantiles)
    return DataReport(
        rows_read=len(rows),
        rows_kept=int(kept.sum()),
        bad_rows=dict(reasons.most_common()),
        empty_mask_rows=empty,
        truncated_rows=0 if pack else int((full[kept] > max_length).sum()),
        missing_turns=sum(rows["num_missing"][:]),
        tokens=int(lengths[kept].sum() + pack * kept.sum()),
        supervised_tokens=int(supervised[kept].sum() + pack * (kept & is_text).sum()),
        length_p50=p50,
        length_p90=p90,
        length_p99=p99,
        length_max=longest,
        sources={
            name: {
                "rows_read": int((names == name).sum()),
                "rows_kept": int((kept & (names == name)).sum()),
                "tokens": int(lengths[kept & (names == name)].sum()),
            }
            for name in dict.fromkeys(names)
        },
    )
