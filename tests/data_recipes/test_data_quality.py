"""Data recipes at scale: filters, duplicates, benchmark overlap, mixing, streams, the card."""

import gzip
import json
from collections import Counter
from dataclasses import replace

import data_rows
import numpy as np
import pytest
from data_rows import CHINESE, WORDS, chat, total, write
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedraft.data_recipes.config import RowFilters
from pipedraft.data_recipes.overlap import (
    hash_ngrams,
    hash_words,
    prompts_of,
    read_benchmarks,
    split_words,
)
from pipedraft.data_recipes.rows import content_hash, draw_copies, split_rows
from pipedraft.data_recipes.sources import Source

tokenizer, load = data_rows.tokenizer, data_rows.load
"""Fixtures."""


def lines_of(records):
    return [int(record["location"].rpartition(":")[2]) for record in records]


# Filters

FILTER_CASES = [
    ("min_turns", 3, [chat("a"), chat("a", "b", "c")], "2"),
    ("max_turns", 2, [chat("a", "b", "c"), chat("a", system="two turns and this one")], "4"),
    ("min_characters", 8, [chat("abc"), chat("abcd")], "7"),
    ("max_characters", 7, [chat("abcd"), chat("abc")], "8"),
    ("max_non_alphabetic", 0.5, [chat("1234567"), chat("1 2 3 4")], "0.6364"),
    ("max_repeated_lines", 0.4, [chat("x\nx\n\nx"), chat("x\ny\nx")], "0.5"),
    ("max_cut_answers", 0, [chat("a", "b") | {"cut_answers": 1}, chat("a", "b")], "1"),
    ("max_cut_answers", 0, [chat("a", "b") | {"finish_reason": "length"}, chat("a", "b")], "1"),
    ("min_cjk", 0.5, [chat("what is it"), chat(CHINESE)], "0"),
    ("max_cjk", 0.5, [chat(CHINESE), chat("what is it")], "0.7778"),
]


@pytest.mark.parametrize(
    ("name", "limit", "rows", "value"), FILTER_CASES, ids=lambda x: str(x)[:18]
)
def test_a_filter_leaves_out_what_misses_its_limit_and_says_so(
    load, tmp_path, name, limit, rows, value
):
    source = write(tmp_path / "rows.jsonl", [*rows, chat(f"ok {CHINESE} fine\nthen", "yes", "no")])
    free = load(source).report
    assert free.rows_kept == 3 and free.filtered_rows == {} and load.left_out() == []
    limits = RowFilters(**{name: limit})
    texts = [turn["content"] for turn in rows[1]["messages"]]
    assert limits.refuse(texts, sum(t["role"] != "system" for t in rows[1]["messages"]))[0] == ""
    report = load(replace(source, filters=limits)).report
    first = load.left_out()[0]
    assert first["reason"] == f"filter: {name}" and first["detail"] == value
    assert lines_of(load.left_out())[0] == 1 and json.loads(first["row"]) == rows[0]
    assert report.filtered_rows == {name: len(load.left_out())} and total(report) == 3


def test_filters_of_one_source_leave_the_others_alone(load, tmp_path):
    first = write(tmp_path / "a.jsonl", [chat(f"a {i}") for i in range(4)])
    second = write(tmp_path / "b.jsonl", [chat(f"b {i}") for i in range(4)])
    report = load(replace(first, filters=RowFilters(min_turns=9)), second).report
    assert [s["rows_kept"] for s in report.sources.values()] == [0, 4]


def test_long_rows_are_cut_or_dropped_and_short_ones_filtered(load, tmp_path):
    rows = [chat("q", "ok " * n) for n in (1, 10, 300)]
    source = write(tmp_path / "rows.jsonl", rows)
    cut = load(source, max_length=64).report
    assert (cut.rows_kept, cut.truncated_rows, cut.too_long_rows) == (3, 1, 0)
    tokens = [
        len(ids) for ids in load(source, max_length=9999, valid_fraction=0.0).train["input_ids"]
    ]
    least = RowFilters(min_tokens=tokens[0] + 1)
    report = load(replace(source, filters=least), max_length=tokens[1], too_long="drop").report
    assert (report.rows_kept, report.truncated_rows, report.too_long_rows) == (1, 0, 1)
    assert [(r["reason"], r["detail"]) for r in load.left_out()] == [
        ("filter: min_tokens", str(tokens[0])),
        ("too long", str(tokens[2])),
    ]
    assert report.length_max == tokens[1] and total(report) == 3


# Duplicates


def test_exact_duplicates_keep_the_first_good_row(load, tmp_path):
    rows = [
        chat("What is  it?", "An \ufb01sh \uff11"),
        chat("what IS it?\n", "an fish 1"),  # other case, white space and forms of fi and 1
        chat("What is it?", "An fish 1"),
        chat("What is it?", "An fish 1", system="another conversation"),
        chat("What is it? An", "fish 1"),
        {"messages": "damaged"},
        {"messages": "damaged"},
    ]
    first = write(tmp_path / "a.jsonl", rows)
    second = write(tmp_path / "b.jsonl", [rows[0], chat("new")])
    assert load(first, second).report.rows_kept == 7
    report = load(first, second, duplicates="exact").report
    assert report.duplicate_rows == {"exact": 3} and report.bad_rows == {
        "messages are not a list": 2
    }
    assert total(report) == report.rows_read == 9
    duplicates = [r for r in load.left_out() if r["reason"] == "duplicate: exact"]
    assert lines_of(duplicates) == [2, 3, 1] and {r["detail"] for r in duplicates} == {
        f"{tmp_path}/a.jsonl:1"
    }
    # A row that is left out itself does not stand for its copies.
    strict = replace(first, filters=RowFilters(max_characters=1))
    assert load(strict, second, duplicates="exact").report.duplicate_rows == {}


# Benchmarks


def test_thirteen_shared_words_contaminate_and_twelve_do_not(load, tmp_path):
    prompt = " ".join(WORDS)
    write(tmp_path / "bench.jsonl", [{"turns": [prompt, "Shorter than that."]}])
    rows = [
        chat("User: " + ", ".join(WORDS[5:18]).upper() + "!"),
        chat("q", "answer " + "\n".join(WORDS[20:33])),
        chat("q " + " ".join(WORDS[5:17]) + " and " + " ".join(WORDS[18:30])),
        chat("harmless"),
    ]
    source = write(tmp_path / "rows.jsonl", rows)
    report = load(source, decontaminate=[str(tmp_path / "bench.jsonl")]).report
    assert report.contaminated_rows == 2 and lines_of(load.left_out()) == [1, 2]
    name = f"{tmp_path.name}/bench.jsonl"
    assert report.benchmarks == {name: {"prompts": 2, "short_prompts": 1, "rows": 2}}
    assert load.left_out()[0]["detail"] == f"{name}: {' '.join(WORDS[5:18])}"
    assert total(report) == 4


def test_a_prompt_of_eight_to_twelve_words_counts_as_a_whole(tmp_path):
    short = " ".join(WORDS[:8])
    write(tmp_path / "bench.jsonl", [{"question": short}, {"question": " ".join(WORDS[20:27])}])
    found = read_benchmarks([str(tmp_path / "bench.jsonl")])
    assert (found.num_prompts, found.num_short) == ([2], [1])
    assert found.find(f"so {short} then")[0] == 1
    assert found.find(" ".join(WORDS[:7]))[0] == found.find(" ".join(WORDS[20:27]))[0] == 0


def test_the_frame_around_all_questions_is_no_overlap(tmp_path):
    frame = " ".join(WORDS[:15])
    write(
        tmp_path / "a.jsonl",
        [{"prompt": f"{frame} q{i} " + " ".join(WORDS[20:])} for i in range(9)],
    )
    write(tmp_path / "b.jsonl", [{"prompt": f"{frame} " + f"q{i} " * 13} for i in range(10)])
    found = read_benchmarks([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert found.find(frame)[0] == 0b01  # nine prompts share it in one file, ten in the other
    assert found.find("q3 " * 13)[0] == 0b10


def test_official_rows_folders_and_hub_sets_are_read(tmp_path, monkeypatch):
    import datasets

    question = " ".join(WORDS[:20])
    assert prompts_of({"question": question, "answer": "#### 1"}) == [question]
    assert prompts_of({"task_id": "HumanEval/0", "prompt": "def f():"}) == ["def f():"]
    assert prompts_of({"prompt": ["one", "two"], "category": "x"}) == ["one", "two"]
    assert prompts_of({"instruction": "add", "input": "1 2", "output": "3"}) == ["add\n\n1 2"]
    assert prompts_of(chat("user text", "assistant text")) == ["user text"]
    folder = tmp_path / "eval"
    folder.mkdir()
    rows = json.dumps({"prompt": question}).encode()
    (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress(rows))
    write(folder / "other.jsonl", [{"prompt": " ".join(WORDS[20:])}])
    hub = datasets.Dataset.from_list([{"question": CHINESE, "answer": "x"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **_: hub)
    found = read_benchmarks([str(folder), Source(path="openai/gsm8k", subset="main", split="test")])
    assert found.names == ["eval/HumanEval.jsonl.gz", "eval/other.jsonl", "openai/gsm8k:main:test"]
    assert found.names_of(found.find(f"x {question}")[0]) == found.names[:1]
    assert found.names_of(found.find(f"\u597d\uff0c{CHINESE}\u3002")[0]) == found.names[2:]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"unknown": "x"}', "none of the known fields"),
        ('{"turns": ["x", 3]}', "a prompt is not a text"),
        ("[1]", "row is not an object"),
        ("{", "Expecting property name"),
        ("", "holds no rows"),
    ],
)
def test_a_benchmark_that_cannot_be_read_is_an_error_with_its_place(tmp_path, content, words):
    (tmp_path / "bench.jsonl").write_text(content)
    with pytest.raises(ValueError, match=words) as error:
        read_benchmarks([str(tmp_path / "bench.jsonl")])
    assert "data.decontaminate" in str(error.value) and "bench.jsonl" in str(error.value)


def test_a_benchmark_on_this_machine_keeps_its_limit_and_is_named_where_missing(tmp_path):
    source = write(tmp_path / "bench.jsonl", [{"prompt": word} for word in WORDS[:5]])
    assert read_benchmarks([replace(source, max_rows=3)]).num_prompts == [3]
    with pytest.raises(ValueError, match=r"^data.decontaminate: '.*absent.jsonl' does not exist"):
        read_benchmarks([str(tmp_path / "absent.jsonl")])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=30), st.integers(1, 14))
def test_hashed_ngrams_are_equal_exactly_where_the_words_are(letters, length):
    grams = hash_ngrams(hash_words(letters), length)
    windows = [tuple(letters[i : i + length]) for i in range(len(letters) - length + 1)]
    assert len(grams) == len(windows)
    for i, left in enumerate(windows):
        for j, right in enumerate(windows):
            assert (grams[i] == grams[j]) == (left == right)


def test_words_are_letters_and_digits_and_each_chinese_character():
    assert split_words("Don't x_1, 3.5!") == ["don", "t", "x_1", "3", "5"]
    assert split_words(f"a{CHINESE[:2]}b") == ["a", CHINESE[0], CHINESE[1], "b"]


# Mixing


def test_weights_draw_by_content_and_a_larger_one_only_adds(load, tokenizer, tmp_path):
    source = write(tmp_path / "rows.jsonl", [chat(f"question {i}") for i in range(400)])
    other = write(tmp_path / "other.jsonl", [chat(f"other {i}") for i in range(50)])

    def drawn(*sources, **values):
        data = load(*sources, valid_fraction=0.2, **values)
        train, valid = (
            Counter(
                tokenizer.decode(row["input_ids"]) for row in part if "other" not in row["source"]
            )
            for part in (data.train, data.valid)
        )
        assert data.report.train_rows == len(data.train)
        assert total(data.report) == data.report.rows_read
        lengths = [len(ids) for part in (data.train, data.valid) for ids in part["input_ids"]]
        assert data.report.tokens == sum(lengths)
        assert data.report.supervised_tokens == sum(
            sum(mask) for part in (data.train, data.valid) for mask in part["loss_mask"]
        )
        return train, valid, data.report

    whole, held, _ = drawn(source)
    assert set(whole.values()) == set(held.values()) == {1} and len(whole) + len(held) == 400
    less, less_held, report = drawn(replace(source, weight=0.25))
    assert 70 < len(less) + len(less_held) < 130
    assert report.not_drawn_rows == 400 - len(less) - len(less_held)
    assert set(less) <= set(whole) and set(less_held) <= set(held)
    assert 0.1 < len(less_held) / (len(less) + len(less_held)) < 0.32
    more, more_held, report = drawn(replace(source, weight=2.5))
    assert set(more) == set(whole) and set(more.values()) == {2, 3}
    assert set(more_held.values()) == {1} and set(more_held) == set(held)
    assert abs(sum(more.values()) / len(more) - 2.5) < 0.1 and report.rows_kept == 400
    mixed, mixed_held, _ = drawn(other, replace(source, weight=0.25))
    assert (mixed, mixed_held) == (less, less_held)
    assert drawn(replace(source, weight=0.25), seed=1)[0] != less


def test_the_draw_does_not_follow_the_split():
    hashes = np.array([content_hash(str(i), 0) for i in range(20_000)])
    is_valid = split_rows(hashes, 0.3)
    for weight in (0.1, 0.5, 1.75):
        copies = draw_copies(hashes, np.full(len(hashes), weight))
        assert abs(copies.mean() - weight) < 0.02
        assert abs(copies[is_valid].mean() - copies[~is_valid].mean()) < 0.03
        larger = draw_copies(hashes, np.full(len(hashes), weight + 0.3))
        assert (larger >= copies).all()
