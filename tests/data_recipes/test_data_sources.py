"""Data recipes at scale: streams, damaged rows, the command."""

import gzip
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import data_rows
import datasets
import pytest
import yaml
from data_rows import CHINESE, WORDS, chat, total, write
from pyarrow import feather

from pipedraft.data_recipes.__main__ import main
from pipedraft.data_recipes.recipe import DataConfig, load_data
from pipedraft.data_recipes.regenerate import scan
from pipedraft.data_recipes.sources import Source, read_source

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


tokenizer, load = data_rows.tokenizer, data_rows.load
"""Fixtures."""


# Sources


def spoken(number: int) -> list[dict]:
    return [chat(f"Say {index}.", str(index)) for index in range(number)]


def read(path: Path, **settings: object) -> list[dict]:
    found = [*read_source(Source(path=str(path), **settings))]
    assert not any(row.error for row in found)
    return [json.loads(row.text) for row in found]


def test_a_folder_of_save_to_disk_is_read_in_its_order(tmp_path):
    data = datasets.Dataset.from_list(spoken(5))
    data.save_to_disk(tmp_path / "saved", num_shards=2)
    data.select([3, 0]).save_to_disk(tmp_path / "picked")
    splits = datasets.DatasetDict({"train": data, "test": data.select([4])})
    splits.save_to_disk(tmp_path / "splits")
    for folder in ("saved", "splits", "splits/train"):
        assert read(tmp_path / folder) == spoken(5)
    assert read(tmp_path / "picked") == [spoken(5)[3], spoken(5)[0]]
    assert read(tmp_path / "splits", split="test") == spoken(5)[4:]
    assert scan(Source(path=str(tmp_path / "saved")))[0] == 5
    with pytest.raises(ValueError, match=r"^sources.split: 'dev' .*; give one of train, test"):
        read(tmp_path / "splits", split="dev")


def test_arrow_files_parquet_folders_and_snapshots_of_the_hub_are_read(tmp_path):
    data = datasets.Dataset.from_list(spoken(3))
    (tmp_path / "files").mkdir()
    feather.write_feather(data.data.table, tmp_path / "files" / "a.arrow")
    with datasets.arrow_writer.ArrowWriter(path=str(tmp_path / "files" / "b.arrow")) as writer:
        writer.write_table(data.data.table)
        writer.finalize()
    assert read(tmp_path / "files") == spoken(3) * 2
    repository = tmp_path / "datasets--a--b"
    for commit in ("old", "new"):
        place = repository / "snapshots" / commit
        data.to_parquet(place / "data" / "train-0.parquet")
        (place / "dataset_infos.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("new")
    assert read(repository) == spoken(3)


def damage_state(folder: Path) -> None:
    (folder / "state.json").write_text("[")


def cut_rows(folder: Path) -> None:
    file = folder / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:300])


def lose_rows(folder: Path) -> None:
    (folder / "data-00000-of-00001.arrow").unlink()


def lose_all_but_the_description(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name != "dataset_info.json":
            file.unlink()


def make_a_cache(folder: Path) -> None:
    (folder / "state.json").unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damage_state, "state.json' does not hold what it should"),
        (cut_rows, "is not a readable Arrow file"),
        (lose_rows, "lacks data-00000-of-00001.arrow; copy the whole folder again"),
        (lose_all_but_the_description, "has dataset_info.json, which describes a data set, and no"),
        (
            make_a_cache,
            "is a cache of the datasets library, with several splits and versions",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_of_datasets_is_said(change, said, tmp_path):
    datasets.Dataset.from_list(spoken(2)).save_to_disk(tmp_path / "saved")
    change(tmp_path / "saved")
    with pytest.raises(ValueError) as caught:
        read(tmp_path / "saved")
    assert said in str(caught.value) and str(caught.value).startswith("sources.path: ")


def test_what_pipedraft_data_wrote_is_said_to_be_tokenized(tmp_path):
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2], "loss_mask": [0, 1]}])
    for name in ("train", "valid"):
        rows.save_to_disk(tmp_path / "own" / name)
    with pytest.raises(ValueError, match=r"holds tokenized rows \(input_ids and loss_mask, writt"):
        read(tmp_path / "own" / "train")
    with pytest.raises(ValueError, match=r"written by save_to_disk \(train, valid\); give one of"):
        read(tmp_path / "own")
    (tmp_path / "datasets--a--b" / "snapshots").mkdir(parents=True)
    with pytest.raises(ValueError, match="is the Hub's cache; give the name of one data set"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["[", "[1", "[1 2]", "[1]x", '["a', "[1,,2]", "[" * 10**5])
def test_a_damaged_array_is_an_error_that_names_the_file(text, tmp_path):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=r"^sources.path: .*rows.json' is not valid JSON"):
        list(read_source(Source(path=str(tmp_path / "rows.json"))))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_a_local_file_is_read_in_constant_memory(tmp_path, suffix):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / f"rows{suffix}"
    row = chat("x" * 1000, "y" * 1000)
    rows = [json.dumps(row)] * 4000  # 8 MB
    if suffix == ".parquet":
        table = pyarrow.table({"messages": [row["messages"]] * 4000, "vector": [[0.5] * 50] * 4000})
        pyarrow.parquet.write_table(table, path, row_group_size=2000)
    else:
        data = "\n".join(rows).encode()
        path.write_bytes(gzip.compress(data, 1) if suffix.endswith("gz") else data)
    del rows
    tracemalloc.start()
    count = 0
    for found in read_source(Source(path=str(path))):
        assert json.loads(found.text) == row  # without the parquet file's column of vectors
        count += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000 and peak < 6e6


class Stream:
    """Stand-in for load_dataset(streaming=True): makes rows on demand."""

    def __init__(self, rows):
        self.rows, self.column_names, self.read = rows, None, 0

    def select_columns(self, names):
        self.rows = [{name: row[name] for name in names} for row in self.rows]
        return self

    def __iter__(self):
        for row in self.rows:
            self.read += 1
            yield row


def test_a_stream_is_read_only_as_far_as_max_rows(load, monkeypatch, tmp_path):
    import datasets

    stream = Stream([chat(f"q {i}") | {"vector": [0.5] * 9} for i in range(1000)])
    asked = {}

    def load_dataset(path, **options):
        asked.update(options, path=path)
        return stream

    class Builder:
        hash = "commit"

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda path, **_: Builder)
    source = Source(path="user/name", subset="all", streaming=True, max_rows=7, revision="v1")
    report = load(source).report
    assert report.rows_read == 7 and stream.read <= 10
    assert list(report.sources) == ["user/name:all"]
    assert asked["streaming"] is True and (asked["name"], asked["revision"]) == ("all", "v1")


def test_a_data_set_that_is_a_script_is_an_error_that_says_so(load, monkeypatch):
    import datasets

    def load_dataset(path, **options):
        raise RuntimeError("Dataset scripts are no longer supported, but found name.py")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="name 'all'.*scripts are no longer supported"):
        load(Source(path="user/name", subset="all"))


def test_questions_with_answers_and_text_fields_are_read(load, tokenizer, tmp_path):
    pairs = [{"question": f"q {i}", "answer": "ok"} for i in range(3)]
    source = write(
        tmp_path / "pairs.jsonl", [*pairs, {"question": "q"}, {"question": "", "answer": "a"}]
    )
    source = replace(source, prompt_field="question", answer_field="answer")
    data = load(source, valid_fraction=0.0)
    expected = [{"role": "user", "content": "q 0"}, {"role": "assistant", "content": "ok"}]
    rendered = tokenizer.apply_chat_template(expected, tokenize=False)
    assert tokenizer.decode(data.train[0]["input_ids"]) == rendered
    assert data.report.bad_rows == {"answer is not a string": 1, "empty question": 1}
    import datasets

    columns = {name: [name] for name in ("question", "answer", "task", "solution")}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "columns.parquet")
    for asked, said in (("question", "answer"), ("task", "solution")):
        table = Source(
            path=str(tmp_path / "columns.parquet"), prompt_field=asked, answer_field=said
        )
        (row,) = load(table, valid_fraction=0.0).train
        assert said in tokenizer.decode(row["input_ids"])
    texts = write(
        tmp_path / "texts.jsonl", [{"text": "one"}, {"text": "two"}, {"txt": 1}, {"text": " "}]
    )
    data = load(replace(texts, kind="text", text_field="text"), valid_fraction=0.0)
    assert [tokenizer.decode(ids) for ids in data.train["input_ids"]] == ["one", "two"]
    assert sum(sum(mask) for mask in data.train["loss_mask"]) == data.report.tokens
    assert data.report.bad_rows == {"text_field is not a string": 1, "empty document": 1}
    assert [json.loads(r["row"]) for r in load.left_out()] == [{"txt": 1}, {"text": " "}]


def test_damaged_rows_are_counted_and_kept_aside(load, tmp_path):
    good = [json.dumps(chat(f"q {i}")) for i in range(3)]
    half_pair = (
        '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "gpt", "content": "x"}]}'
    )
    nested = "[" * 100_000
    lines = [*good, half_pair, nested, '{"messages": [{"role": "gpt", "content": NaN}]}', "null"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    report = load(Source(path=str(tmp_path / "rows.jsonl")), duplicates="exact").report
    assert report.bad_rows == {
        "not valid Unicode": 1,
        "not valid JSON": 1,
        "role or content is not a string": 1,
        "row is not an object": 1,
    }
    assert [r["row"] for r in load.left_out()] == lines[3:] and total(report) == 7
    (tmp_path / "array.json").write_text(f"[{','.join(good + [half_pair])}]")
    report = load(Source(path=str(tmp_path / "array.json"))).report
    assert report.bad_rows == {"not valid Unicode": 1}


# The command


@pytest.fixture
def recipe(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [chat(f"question {i}") | {"license": "MIT" if i % 2 else None} for i in range(20)]
    rows += [chat(" ".join(WORDS)), chat("question 3"), {"messages": 1}]
    write(tmp_path / "rows.jsonl", rows)
    write(tmp_path / "bench.jsonl", [{"question": " ".join(WORDS)}, {"question": "short"}])
    source = {"path": str(tmp_path / "rows.jsonl"), "license": "cc-by-4.0", "weight": 2.0}
    source["filters"] = {"min_turns": 2, "max_repeated_lines": 0.5}
    data = {"sources": [source], "duplicates": "exact", "cache_dir": str(tmp_path / "cache")}
    data["decontaminate"] = [str(tmp_path / "bench.jsonl")]
    data["valid_fraction"] = 0.2
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"tokenizer": str(tmp_path / "tokenizer"), "data": data}))
    return ["--config", str(path), "--out", str(tmp_path / "out")]


def test_the_report_has_every_count(recipe, tmp_path, capsys):
    main(recipe)
    said, out = capsys.readouterr().out, tmp_path / "out"
    assert "1 rows with one of 2 prompts, 1 prompts too short" in said
    report = json.loads((out / "report.json").read_text())
    assert report["licenses"] == {"cc-by-4.0": 10, "mit": 10} and report["rows_kept"] == 20
    for words in (
        "rows: 23 read, 20 kept, 1 bad",
        "bad rows: 1 messages are not a list",
        "left out: 1 duplicate: exact",
        "left out: 1 contaminated",
        f"benchmark {tmp_path.name}/bench.jsonl: 1 rows with one of 2 prompts",
    ):
        assert words in said
    records = [json.loads(line) for line in (out / "bad_rows.jsonl").open()]
    assert len(records) == 3 == report["rows_read"] - report["rows_kept"]
    # The written configuration makes the same data again.
    main(["--config", str(out / "config.yaml"), "--out", str(tmp_path / "again")])
    assert json.loads((tmp_path / "again" / "report.json").read_text()) == report


@pytest.mark.parametrize(
    ("source", "data", "words"),
    [
        ({"weight": 0}, {}, ["sources.weight: 0", "remove the source"]),
        ({"weight": "x"}, {}, ["weight", "x"]),
        ({"filters": {"min_turn": 1}}, {}, ["min_turn"]),
        ({"filters": {"min_turns": -1}}, {}, ["sources.filters.min_turns: -1", "at least 0"]),
        (
            {"filters": {"min_turns": 3, "max_turns": 2}},
            {},
            ["sources.filters.min_turns: 3 is above max_turns = 2"],
        ),
        ({"filters": {"min_cjk": 30}}, {}, ["sources.filters.min_cjk: 30", "at most 1"]),
        ({"kind": "text", "filters": {"max_turns": 2}}, {}, ["filters.max_turns", "leave it out"]),
        ({"prompt_field": "q"}, {}, ["sources.prompt_field: 'q'", "answer_field"]),
        ({"text_field": "text"}, {}, ["sources.text_field: 'text'", "kind 'text'"]),
        ({}, {"duplicates": "fuzzy"}, ["duplicates", "fuzzy"]),
        ({}, {"seed": 10**40}, ["data.seed: 1", "give at least 0 and at most"]),
        ({}, {"valid_fraction": 1.0}, ["data.valid_fraction: 1.0", "below 1"]),
        ({}, {"sources": []}, ["data.sources: []", "name at least one"]),
        ({}, {"decontaminate": ["absent.jsonl"]}, ["absent.jsonl", "does not exist"]),
        ({"filters": {"min_turns": 99}}, {}, ["none of 23 rows", "filter: min_turns", "loosen"]),
    ],
)
def test_a_malformed_recipe_is_one_line_with_field_value_and_fix(
    recipe, tmp_path, capsys, source, data, words
):
    path = tmp_path / "recipe.yaml"
    content = yaml.safe_load(path.read_text())
    content["data"]["sources"][0].update(source)
    content["data"].update(data)
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as stop:
        main(recipe)
    error = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert all(word in error[-1] for word in words), error


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_shipped_recipe_runs_on_rows_of_its_form(path, tokenizer, tmp_path, monkeypatch):
    """A few rows with the same columns replace the Hub's data sets."""
    import datasets
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--tokenizer", type=str)
    parser.add_class_arguments(DataConfig, "data")
    config = parser.instantiate(parser.parse_path(path)).data
    text = (
        f"{CHINESE} " * 3 + "An answer of some words that goes on for a while, and then on again. "
    )
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": text}]
    forms = {
        "openai/gsm8k": {"question": "q", "answer": "2 + 2 = 4 #### 4"},
        "openai/openai_humaneval": {"task_id": "0", "prompt": "def f(): " + " ".join(WORDS)},
        "HuggingFaceH4/mt_bench_prompts": {"prompt": [" ".join(WORDS), "again"], "category": "x"},
        "ise-uiuc/Magicoder-OSS-Instruct-75K": {"problem": "p", "solution": text, "lang": "python"},
        "togethercomputer/RedPajama-Data-1T": {"text": text * 5, "meta": "{}"},
        "anon8231489123/ShareGPT_Vicuna_unfiltered": {"id": "x", "conversations": turns},
        "mlabonne/open-perfectblend": {"conversations": turns, "source": "x"},
        "opencsg/smoltalk-chinese": {"conversations": turns, "score": 3.5},
    }

    def load_dataset(path, **options):
        form = forms.get(path, chat("q", text))
        return datasets.Dataset.from_list([form | {"number": i} for i in range(4)])

    class Builder:
        hash = str(path)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda path, **_: Builder)
    if path.stem == "chat_mix":
        local = write(tmp_path / "train.jsonl", [chat("q", text)] * 4)
        config = replace(config, sources=[local])
    # The four rows of a source are equal.
    changes = {"num_proc": 1, "cache_dir": str(tmp_path / "cache"), "duplicates": "keep"}
    report = load_data(replace(config, **changes), tokenizer).report
    assert report.rows_kept == report.rows_read == 4 * len(config.sources)
