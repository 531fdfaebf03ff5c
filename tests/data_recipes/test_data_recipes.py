"""Data recipes: counts, split, packing, batches. All tokenizers are trained in the test."""

import gzip
import json
from collections import Counter

import data_rows
import numpy as np
import pytest
from data_rows import CHAT, PLAIN, Loader, chat, templated, tokenize_conversation, write
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import train_tokenizer

from pipedraft.data_recipes.__main__ import main
from pipedraft.data_recipes.batch import length_bucketed_batches
from pipedraft.data_recipes.chat import ChatRenderer
from pipedraft.data_recipes.recipe import DataConfig, Source, load_data, split_rows
from pipedraft.data_recipes.sources import list_files
from pipedraft.train.batch import Batch

REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{% endfor %}" + PLAIN
)


tokenizer, load = data_rows.tokenizer, data_rows.load
"""Fixtures."""


def chat_row(index, answer="an answer"):
    return chat(f"question {index}", f"{answer} {index}")


def test_bad_rows_reach_the_side_file_and_the_counts_add_up(tokenizer, tmp_path):
    good = [chat_row(i) for i in range(10)]
    late = {"messages": [{"role": "user", "content": "x " * 200}, *chat_row(99)["messages"]]}
    path = tmp_path / "rows.jsonl"
    write(path, [*good, {"text": 1}, {"messages": [{"role": "user", "content": "q"}]}, late])
    with path.open("ab") as lines:
        lines.write(b'{"messages": [\n\xff\xfe\n')
    side_file = tmp_path / "side" / "bad.jsonl"
    sources, cache = [Source(path=str(path))], str(tmp_path / "cache")
    config = DataConfig(sources=sources, cache_dir=cache, max_length=64)
    data = load_data(config, tokenizer, side_file=side_file)
    report = data.report
    assert report.rows_read == 15
    assert report.rows_kept == 10 == len(data.train) + len(data.valid)
    assert report.rows_read == report.rows_kept + sum(report.bad_rows.values()) + 1
    assert report.empty_mask_rows == 1
    records = [json.loads(line) for line in side_file.read_text().splitlines()]
    assert Counter(record["reason"] for record in records) == Counter(
        report.bad_rows | {"empty mask": 1}
    )
    assert [record["location"].rpartition(":")[2] for record in records] == list(
        ["11", "12", "13", "14", "15"]
    )
    assert json.loads(records[2]["row"]) == late
    assert "5" not in report.summary().splitlines()[0].split("bad")[0].split("kept")[1]


def test_truncated_rows_tokens_and_lengths_are_counted(tokenizer, load, tmp_path):
    rows = [chat_row(i) for i in range(9)] + [chat_row(9, "long " * 100)]
    source = write(tmp_path / "rows.jsonl", rows)
    data = load(source, max_length=64)
    both = [*data.train, *data.valid]
    lengths = [len(tokenize_conversation(tokenizer, r["messages"], 10**6)[0]) for r in rows]
    assert data.report.truncated_rows == 1
    assert data.report.length_max == max(lengths)
    assert data.report.length_p50 == sorted(lengths)[5]
    assert data.report.tokens == sum(min(n, 64) for n in lengths)
    assert data.report.supervised_tokens == sum(sum(row["loss_mask"]) for row in both)
    assert json.loads(json.dumps(data.report.to_dict()))["rows_read"] == 10


def test_a_template_that_drops_the_assistant_is_an_error_that_says_so(tokenizer, tmp_path):
    template = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    source = write(tmp_path / "rows.jsonl", [chat_row(i, "reply") for i in range(3)])
    with pytest.raises(ValueError, match=r"3 empty mask \(3 assistant turns left no trace"):
        Loader(templated(tokenizer, template), tmp_path)(source)


def test_rows_without_assistant_are_an_error_that_says_so(load, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "q"}]}] * 3
    source = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match="none of 3 rows is usable; left out: 3 no assistant turn"):
        load(source)


def test_a_row_that_the_template_refuses_is_a_bad_row(tokenizer, tmp_path):
    refused = {"messages": [{"role": "system", "content": "s"}, *chat_row(0)["messages"]]}
    source = write(tmp_path / "rows.jsonl", [refused, chat_row(1), chat_row(2)])
    report = Loader(templated(tokenizer, REFUSES_SYSTEM), tmp_path)(source).report
    assert report.bad_rows == {"chat template refused: no system role": 1}


def test_the_side_of_a_row_depends_on_its_content_and_the_seed_only(tokenizer, load, tmp_path):
    rows = [chat_row(i) for i in range(200)]
    whole = write(tmp_path / "a.jsonl", [row | {"id": i} for i, row in enumerate(rows)])
    other = write(tmp_path / "b.jsonl", rows[150:20:-1])

    def valid_texts(source, **values):
        data = load(source, valid_fraction=0.2, **values)
        return {tokenizer.decode(ids) for ids in data.valid["input_ids"]}

    first = valid_texts(whole)
    assert 20 < len(first) < 60
    questions = {text.split("\n")[1] for text in valid_texts(other)}
    assert questions == {
        text.split("\n")[1]
        for text in first
        if 20 < int(text.split("\n")[1].split()[1].removesuffix("<|im_end|>")) <= 150
    }
    assert valid_texts(whole, seed=1) != first


@pytest.mark.parametrize("num_rows", [2, 3, 10])
def test_few_rows_still_give_both_sets(num_rows):
    hashes = np.arange(num_rows, dtype=np.int64) + 2**62
    for fraction in (0.02, 0.98):
        assert 1 <= split_rows(hashes, fraction).sum() < num_rows
    assert not split_rows(hashes, 0.0).any()
    assert not split_rows(hashes[:1], 0.9).any()


def test_json_gzip_parquet_and_folders_give_the_rows_of_the_jsonl(load, tmp_path):
    from datasets import Dataset

    rows = [chat_row(i) for i in range(6)]
    expected = load(write(tmp_path / "r.jsonl", rows)).train[:]
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress((tmp_path / "r.jsonl").read_bytes()))
    Dataset.from_list(rows).to_parquet(tmp_path / "r.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "1.jsonl", rows[:2])
    (folder / "2.json").write_text(json.dumps(rows[2:]))
    (folder / "notes.txt").write_text("not a row")
    for name in ("array.json", "r.jsonl.gz", "r.parquet", "folder"):
        found = load(Source(path=str(tmp_path / name))).train[:]
        assert found["input_ids"] == expected["input_ids"], name
        assert found["loss_mask"] == expected["loss_mask"], name


def test_a_hub_id_is_loaded_with_its_split_and_a_failure_names_it(load, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([chat_row(i) for i in range(6)])

    def load_dataset(path, split, **options):
        if path != "user/name":
            raise FileNotFoundError(f"Dataset {path} does not exist")
        return rows.select(range(4)) if split == "small" else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for split, count in (("train", 6), ("small", 4)):
        found = load(Source(path="user/name", split=split))
        assert found.report.rows_read == count
    with pytest.raises(ValueError, match="'user/other' is neither a file nor a Hub data set"):
        load(Source(path="user/other"))


def test_a_second_call_tokenizes_nothing_and_a_changed_file_is_read_again(
    load, tmp_path, monkeypatch
):
    source = write(tmp_path / "r.jsonl", [chat_row(i) for i in range(5)])
    first = load(source)
    calls = []
    tokenize = ChatRenderer.tokenize
    monkeypatch.setattr(ChatRenderer, "tokenize", lambda *args: calls.append(1) or tokenize(*args))
    again = load(source)
    assert not calls and again.train[:] == first.train[:]
    write(tmp_path / "r.jsonl", [chat_row(i) for i in range(7)])
    assert load(source).report.rows_read == 7
    assert calls


def test_two_processes_give_the_rows_of_one(tokenizer, load, tmp_path):
    source = write(tmp_path / "r.jsonl", [chat_row(i) for i in range(40)])
    one = load(source)
    two = Loader(tokenizer, tmp_path / "second")(source, num_proc=2)
    assert one.train[:] == two.train[:] and one.valid[:] == two.valid[:]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (dict(path="data/absent.jsonl"), "does not exist"),
        (dict(path="absent/folder/x"), "does not exist"),
        (dict(path="absent", kind="text"), "does not exist"),
        (dict(path="{tmp}/rows.csv"), "unknown extension"),
        (dict(path="{tmp}/rows.csv", kind="text"), "unknown extension"),
        (dict(path="{tmp}/empty"), "no .jsonl, .json, .parquet, .arrow file"),
        (dict(path="{tmp}/empty.jsonl"), "holds no rows"),
        (dict(path="{tmp}/broken.json"), "not valid JSON"),
        (dict(path="{tmp}/broken.parquet"), "not a readable parquet"),
        (dict(path="{tmp}/empty", files="*.jsonl"), "sources.files: '\\*.jsonl' with"),
        (dict(path="{tmp}/rows.csv", split="test"), "sources.split: 'test' with"),
    ],
)
def test_an_unreadable_source_is_named_with_its_value(load, tmp_path, source, words):
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.json").write_text("[{")
    (tmp_path / "broken.parquet").write_text("PAR")
    (tmp_path / "empty").mkdir()
    source["path"] = source["path"].format(tmp=tmp_path)
    with pytest.raises(ValueError, match=words) as error:
        load(Source(**source))
    assert source["path"] in str(error.value)


def test_the_standard_library_source_is_sorted_and_without_tests():
    files = list_files(Source(kind="python_stdlib"))
    assert files == sorted(files) and len(files) > 100
    assert not [f for f in files if {"test", "tests", "site-packages"} & set(f.parts[-4:])]
    assert any(f.name == "textwrap.py" for f in files)


def test_a_trained_tokenizer_is_deterministic_of_exact_size_and_splits_digits(tmp_path):
    source = write(tmp_path / "r.jsonl", [chat_row(i) for i in range(50)])
    config = DataConfig(sources=[source])
    first, second = train_tokenizer(config, 300), train_tokenizer(config, 300)
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert len(first) == 300 and len(train_tokenizer(config, 2000)) == 2000
    assert (first.eos_token, first.pad_token, first.bos_token) == (
        "<|im_end|>",
        "<|endoftext|>",
        None,
    )
    text = "123 \u65e5 \U0001f600\t\n  x"
    assert first.decode(first(text)["input_ids"]) == text
    assert [first.decode([i]) for i in first("123")["input_ids"]] == ["1", "2", "3"]
    first.save_pretrained(tmp_path / "tokenizer")
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert tokenize_conversation(loaded, CHAT, 999) == tokenize_conversation(first, CHAT, 999)
    with pytest.raises(ValueError, match="vocab_size: 100"):
        train_tokenizer(config, 100)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=150),
    group=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_batches_fit_and_cover_every_row_once(lengths, group, epoch):
    batches = length_bucketed_batches(lengths, 60, 7, epoch, group)
    assert len(batches) % group == 0
    assert all(max(lengths[i] for i in batch) * len(batch) <= 60 for batch in batches)
    times = Counter(i for batch in batches for i in batch)
    assert set(times) == set(range(len(lengths)))
    if any(len(batch) > 1 for batch in batches):
        assert set(times.values()) == {1}
    else:
        assert len(batches) - len(lengths) < group


def test_batches_change_with_the_epoch_and_pad_little():
    lengths = np.random.default_rng(0).integers(10, 500, 3000).tolist()
    first = length_bucketed_batches(lengths, 4096, 0, 0)
    assert first == length_bucketed_batches(lengths, 4096, 0, 0)
    assert first != length_bucketed_batches(lengths, 4096, 0, 1)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in first)
    assert sum(lengths) / padded > 0.9


def test_collate_pads_ids_and_leaves_padding_unsupervised():
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [8], "loss_mask": [1]},
    ]
    batch = Batch.padded(rows, pad_id=9)
    assert batch.ids_BT.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.mask_BT.tolist() == [[False, True, True], [True, False, False]]
    assert batch.lengths == [3, 1]


def test_the_command_writes_sets_and_report(tokenizer, tmp_path, capsys):
    from datasets import load_from_disk

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    source = write(tmp_path / "r.jsonl", [chat_row(i) for i in range(8)])
    config = {
        "tokenizer": str(tmp_path / "tokenizer"),
        "data": {"sources": [{"path": source.path}], "cache_dir": str(tmp_path / "cache")},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    out = tmp_path / "out"
    arguments = ["--config", str(tmp_path / "c.yaml"), "--out", str(out)]
    main(arguments)
    assert "rows: 8 read, 8 kept" in capsys.readouterr().out
    assert len(load_from_disk(out / "train")) + len(load_from_disk(out / "valid")) == 8
    assert json.loads((out / "report.json").read_text())["rows_read"] == 8
    assert (out / "config.yaml").is_file() and (out / "bad_rows.jsonl").read_text() == ""
