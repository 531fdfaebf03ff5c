"""The card of a built data set: README.md with the metadata that the Hub reads."""

from collections.abc import Sequence
from dataclasses import fields

import yaml

from pipedraft.data_recipes.decontaminate import MIN_WORDS, NGRAM_WORDS
from pipedraft.data_recipes.quality import Filters
from pipedraft.data_recipes.recipe import DataConfig
from pipedraft.data_recipes.report import DataReport
from pipedraft.data_recipes.sources import list_files

# Rows below which the Hub's size category holds.
SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}
LARGER = "1M<n<10M"


def dataset_card(config: DataConfig, tokenizer_name: str, report: DataReport) -> str:
    """What the rows are made of, what was left out and why, and how to make them again."""
    form = f"blocks of {config.max_length} tokens" if config.pack else "one row per conversation"
    sections = [
        f"# Token sequences for training drafts of {tokenizer_name}",
        f"{report.train_rows} training and {report.valid_rows} held-out rows ({form}), "
        f"{report.tokens} tokens, {report.supervised_tokens} of them supervised. Columns: "
        "`input_ids`, `loss_mask` (1 on what the assistant writes, or on all of a text), `source`. "
        f"Tokenizer and chat template: `{tokenizer_name}`; at most {config.max_length} tokens a "
        f"row, longer ones are {'cut' if config.too_long == 'cut' else 'left out'}; seed "
        f"{config.seed}.",
        "    python -m pipedraft.data_recipes --config config.yaml --out OUT    # makes it again\n"
        '    datasets.load_from_disk("OUT/train")',
        "## Sources",
        _source_table(config, report),
        "## Licences",
        _table(["licence", "rows kept"], list(report.licenses.items())),
        "## Rows left out",
        _refusal_table(report),
        "Every one of them but those not drawn is in `bad_rows.jsonl`, with the reason and its "
        "place in the source.",
        *_decontamination(report),
    ]
    metadata = yaml.safe_dump(_metadata(config, report), sort_keys=False)
    return f"---\n{metadata}---\n" + "\n\n".join(sections) + "\n"


def _metadata(config: DataConfig, report: DataReport) -> dict[str, object]:
    rows = report.train_rows + report.valid_rows
    hub_sources = [s.path for s in config.sources if list_files(s) is None]
    files = [{"split": "train", "path": "train/*.arrow"}]
    if report.valid_rows:
        files.append({"split": "validation", "path": "valid/*.arrow"})
    return {
        "license": sorted(report.licenses),
        "task_categories": ["text-generation"],
        "size_categories": [next((s for limit, s in SIZES.items() if rows < limit), LARGER)],
        "tags": ["speculative-decoding", "pipedraft"],
        **({"source_datasets": hub_sources} if hub_sources else {}),
        "configs": [{"config_name": "default", "data_files": files}],
    }


def _source_table(config: DataConfig, report: DataReport) -> str:
    """One line per source; sources of one path share their counts."""
    rows = []
    for source in config.sources:
        counts = report.sources[source.name]
        place = [source.split, source.revision] if list_files(source) is None else []
        if source.max_rows is not None:
            place.append(f"first {source.max_rows}")
        rows.append(
            [
                " ".join([f"`{source.name}`", *(f"({part})" for part in place if part)]),
                source.license or "as the rows say",
                f"{source.weight:g}",
                counts["rows_read"],
                counts["rows_kept"],
                counts["tokens"],
                describe_filters(source.filters) or "none",
            ]
        )
    head = ["source", "licence", "weight", "rows read", "rows kept", "tokens", "filters"]
    return _table(head, rows)


def describe_filters(filters: Filters | None) -> str:
    """The limits that are set, as NAME VALUE."""
    if filters is None:
        return ""
    limits = {field.name: getattr(filters, field.name) for field in fields(filters)}
    return ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)


def _refusal_table(report: DataReport) -> str:
    counts = {**report.bad_rows, **report.refused_rows()}
    if report.empty_mask_rows:
        counts["empty mask"] = report.empty_mask_rows
    return _table(["reason", "rows"], list(counts.items()))


def _decontamination(report: DataReport) -> list[str]:
    if not report.benchmarks:
        return ["## Decontamination", "Not checked against any benchmark."]
    rows = [
        [name, counts["prompts"], counts["short_prompts"], counts["rows"]]
        for name, counts in report.benchmarks.items()
    ]
    return [
        "## Decontamination",
        f"A row is left out if it shares {NGRAM_WORDS} consecutive words with a prompt of these "
        "benchmarks, in lower case and without punctuation, or holds a whole prompt of "
        f"{MIN_WORDS} to {NGRAM_WORDS - 1} words; shorter prompts are not looked for. "
        f"{report.contaminated_rows} rows were, some because of several benchmarks.",
        _table(["benchmark", "prompts", "too short", "rows left out"], rows),
    ]


def _table(head: list[str], rows: Sequence[Sequence[object]]) -> str:
    empty = [["none", *[""] * (len(head) - 1)]]
    cells: list[Sequence[object]] = [head, ["---"] * len(head), *(rows or empty)]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in cells)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
