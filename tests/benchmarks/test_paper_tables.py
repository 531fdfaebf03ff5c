"""The papers' tables: their declarations, and each one run on tiny drafts for a tiny target."""

import json
from copy import deepcopy
from functools import cache

import eval_runs
import msgspec
import paper_runs
import pytest
import yaml
from paper_runs import (
    KINDS,
    ROWS,
    SPEC,
    TABLE,
    check,
    check_written,
    planted,
    read_spec,
    table_names,
    words,
)
from scripts import load_script
from tiny_models import REPOSITORY

from pipedraft.endings import run_command
from pipedraft.inference.shapes import segment_sizes
from pipedraft.models.target import load_target, load_tokenizer

DRAFTS = load_script("benchmarks/papers/drafts.py")
OPTIONS = load_script("benchmarks/papers/table_options.py").TableOptions
EXPECTED = ["spd1", "spd2", "spd_release_greedy", "spd_release_sampled", "spd_modules"]
EXPECTED += ["flowspec1", "flowspec2", "specpipe", "pipeinfer4"]
OWN = REPOSITORY / "configs" / "eval"
no_pictures, place, write = eval_runs.no_pictures, paper_runs.place, paper_runs.write
pytestmark = pytest.mark.usefixtures("no_pictures")
ALL_BENCHMARKS = ("spd_release_greedy",)
"""Tables run on all their benchmarks; the others take one benchmark each, to save seconds."""


# -- declarations -------------------------------------------------------------------------------


def test_the_tables_of_the_papers_are_there(capsys):
    assert set(EXPECTED) <= set(table_names())
    TABLE.run(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == table_names()


@pytest.mark.parametrize("name", sorted(path.name for path in OWN.glob("*.yaml")))
def test_a_table_of_our_own_decodes_what_exists(name):
    check(name, read_spec(str(OWN / name)))


@pytest.mark.parametrize("name", table_names())
def test_a_table_names_what_exists_and_where_its_numbers_are_from(name):
    table = read_spec(name)
    check(name, table)
    assert table.sources and all(source.strip() for source in table.sources.values())
    used = {column for row in table.rows for column in row.published}
    unused = set(table.sources) - used
    # A column without any number must say so.
    assert all("not found" in table.sources[column] for column in unused)
    assert table.paper and table.differences and table.measures


def test_flowspecs_tables_have_its_five_micro_batches():
    table = read_spec("flowspec1")
    config = SPEC.decode_config(table.settings(table.rows[0]))
    rows = 1 + config.schedule.tree.num_tokens
    sizes = segment_sizes(rows, config.num_stages + 1, config.schedule.max_segment_rows)
    assert sizes == [16, 16, 16, 16, 17]


def test_a_kind_that_no_folder_adds_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("title: x\nrows: [{name: a}]\nkind: pipelin")
    with pytest.raises(ValueError, match="kind: 'pipelin' is unknown; did you mean 'pipeline'"):
        check("mine", read_spec(str(tmp_path / "mine.yaml")))


def test_every_training_command_names_a_configuration_that_ships(repository):
    for training in SPEC.read_roles().values():
        words = training.split()
        starts = words[: words.index("--config")]
        assert starts in (
            ["accelerate", "launch", "-m", "pipedraft.train"],
            ["python", "assets/target/train.py"],
        )
        path = repository / words[words.index("--config") + 1]
        assert path.is_file()


@pytest.mark.parametrize(
    ("name", "edit", "expected"),
    [
        ("spd1", lambda t: t["rows"][0]["run"].update(schedule="spdd"), "did you mean 'spd'"),
        ("spd1", lambda t: t["rows"][0]["run"].update(tree="bush"), "tree: 'bush'"),
        ("spd1", lambda t: t["rows"][0]["run"].update(depth=3), "depth"),
        ("spd1", lambda t: t["rows"][0].update(draft="eagle4"), "did you mean 'eagle'"),
        ("spd1", lambda t: t["rows"][0].update(draft=None), "needs a draft, and has draft None"),
        (
            "spd1",
            lambda t: t["rows"][0].update(color="red"),
            "unknown field `color`.*give one of",
        ),
        ("spd1", lambda t: t["rows"][0].update(published={"x": 1.0}), "'x' has no source"),
        ("pipeinfer4", lambda t: t["rows"][-1].update(remark=""), "without a remark"),
        ("spd1", lambda t: t["rows"].append(deepcopy(t["rows"][0])), "there are two"),
        ("spd1", lambda t: t["measures"].append("speed"), "'speed' is none of a pipeline table"),
        ("spd1", lambda t: t["measures"].append("S over nobody"), "there is no row 'nobody'"),
        (
            "spd1",
            lambda t: t.update(benchmarks=["nq", "rag"], measures=["L' on nq"]),
            "no benchmark here is 'nq'; did you mean 'natural_questions'",
        ),
        ("spd1", lambda t: t["measures"].append("L' on rag"), "give one of gsm8k, humaneval, mt"),
        ("spd1", lambda t: t["measures"].append("S on gsm8"), "did you mean 'gsm8k'"),
    ],
)
def test_a_fault_in_a_declaration_is_refused(tmp_path, name, edit, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        planted(tmp_path, name, edit)
    assert "\n" not in str(caught.value)


def test_a_copy_of_a_table_has_its_published_numbers(tmp_path):
    content = yaml.safe_load(SPEC.table_files()["spd1"].read_text())
    content["rows"] = [row for row in content["rows"] if row["name"] == "EAGLE-3, m = 3"][:1]
    content["measures"] = []
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    (row,) = read_spec(str(tmp_path / "mine.yaml")).rows
    assert row.published["4B L'"] == 2.7
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content | {"published": "spd"}))
    with pytest.raises(ValueError, match="'spd' is no table in published.csv; did you mean"):
        read_spec(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("titel: x", "did you mean 'title'"),
        ("title: x\nrows: [{name: a, drafts: b}]", "did you mean 'draft'"),
        ("title: x\nrows: [{name: a}]\nlimit: 0", "limit"),
        ("title: x\nrows: [{name: a}]\nseed: -1", "seed"),
        ("title: x", "missing required field `rows`"),
        ("title: x\nrows: []", "rows"),
        ("title: [", "not valid YAML"),
        ("- 1", "Expected `object`"),
        ("title: x" + "y" * 2**20, "more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_specification_is_one_line(tmp_path, text, expected):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=expected) as caught:
        read_spec(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(caught.value) and "mine.yaml" in str(caught.value)


# -- on tiny drafts -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make(place):
    """Table, outcomes and text rows by name, without the files."""

    @cache
    def made(name: str):
        out = place / "made" / name
        options = OPTIONS.read(words(place, name, out))
        table = TABLE.read_options(options)
        if name not in ALL_BENCHMARKS:
            table = msgspec.structs.replace(table, benchmarks=["gsm8k"])
        outcomes, _ = KINDS.KINDS[table.kind].run(table, ROWS.load_context(table, options))
        return table, outcomes, TABLE.paper_table(table, outcomes)

    return made


@pytest.mark.parametrize("name", table_names())
def test_a_table_runs_and_says_why_a_row_does_not(make, name):
    table, outcomes, shown = make(name)
    assert len(shown.rows) == len(table.rows) == len(outcomes)
    run = [outcome for outcome in outcomes if outcome.values]
    assert run, "nothing was run"
    for index, (row, outcome) in enumerate(zip(table.rows, outcomes, strict=True)):
        line = dict(zip(shown.header, shown.rows[index], strict=True))
        if outcome.values:
            value, _ = TABLE.measured(table, outcomes, index, SPEC.Column.parse(table.measures[0]))
            assert value is None or value >= 0
            assert "train" not in outcome.remark
            checked = outcome.agreement.split("/")
            assert checked[0] == checked[-1], "an output differs"
        else:
            tall = "stages" in outcome.remark  # than four layers can be cut into
            said = row.remark if row.run is None else "; train it: accelerate"
            assert tall or said in outcome.remark
        for column in table.sources:
            cell = line[f"published: {column}"]
            if column in row.published:
                assert cell == str(row.published[column]) or float(cell) == row.published[column]
            else:
                assert cell == ("-" if row.is_ours else TABLE.NOT_PUBLISHED)


def test_drafts_are_found_by_their_folders_name_and_belong_to_the_target(place):
    target, tokenizer = load_target(str(place / "target")), load_tokenizer(str(place / "target"))
    search = DRAFTS.CheckpointSearch.of([str(place / "runs")])
    drafts = DRAFTS.Drafts(search, target, tokenizer)
    assert drafts.find("spd_n4").config.query == "newest"
    assert drafts.folders["spd_n4"].parts[-2:] == ("spd_n4", "best")
    assert (
        drafts.find("spd_n8") is None and "--config configs/spd/tiny_n8" in drafts.missing["spd_n8"]
    )
    target.lm_head.weight.data.add_(1.0)
    drafts = DRAFTS.Drafts(search, target, tokenizer)
    assert drafts.find("eagle3") is None and "does not match this draft" in drafts.missing["eagle3"]


def test_a_file_of_roles_decides(place, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"eagle3: {place / 'runs' / 'eagle3'}\n")
    target, tokenizer = load_target(str(place / "target")), load_tokenizer(str(place / "target"))
    drafts = DRAFTS.Drafts(
        DRAFTS.CheckpointSearch.of([str(tmp_path / "mine.yaml")]), target, tokenizer
    )
    assert drafts.find("eagle3") is not None and drafts.find("eagle") is None
    (tmp_path / "mine.yaml").write_text("eagle4: x\n")
    with pytest.raises(ValueError, match="no table asks for 'eagle4'"):
        DRAFTS.CheckpointSearch.of([str(tmp_path / "mine.yaml")])


def test_the_command_writes_the_table_and_what_it_rests_on(write):
    check_written("pipeinfer_parts", *write("pipeinfer_parts"))


def test_shares_of_conversations_at_once_make_the_same_table(place, write, tmp_path, capsys):
    (alone, _), shared = write("pipeinfer_parts"), tmp_path / "shared"
    many = ["--sequences", "3"]
    for share in ("1/2", "2/2"):
        TABLE.run(words(place, "pipeinfer_parts", shared, *many, "--fresh", "--shard", share))
        assert "decoded turns of this share" in capsys.readouterr().out
        assert not (shared / "table.json").exists()
    before = {path: path.read_bytes() for path in (shared / "traces").iterdir()}
    TABLE.run(words(place, "pipeinfer_parts", shared, *many))
    tables = [json.loads((out / "table.json").read_text()) for out in (alone, shared)]
    assert tables[0] == tables[1]
    assert before == {path: path.read_bytes() for path in (shared / "traces").iterdir()}


def test_benchmarks_have_columns_of_their_own(make):
    table, outcomes, shown = make("spd_release_greedy")
    index = next(i for i, outcome in enumerate(outcomes) if outcome.values)
    values = outcomes[index].values
    assert set(values) == {None, "mt_bench", "gsm8k", "humaneval"}
    line = dict(zip(shown.header, shown.rows[index], strict=True))
    for benchmark in ("mt_bench", "gsm8k", "humaneval"):
        assert line[f"ours: S on {benchmark}"] == f"{values[benchmark]['S'][0]:.3f}"
    found = [outcome.values for outcome in outcomes if outcome.values]
    lengths = {name: [values[name]["L'"][0] for values in found] for name in found[0]}
    pooled = lengths.pop(None)
    assert pooled not in lengths.values()
    for length, *parts in zip(pooled, *lengths.values(), strict=True):
        assert min(parts) <= length <= max(parts)
    _, alone, _ = make("flowspec1")  # of one benchmark
    values = next(outcome.values for outcome in alone if outcome.values)
    assert set(values) == {None, "gsm8k"} and values[None] == values["gsm8k"]


def test_a_ratio_is_of_rows_at_the_same_temperature(make):
    table, outcomes, _ = make("flowspec1")
    measure = SPEC.Column.parse("S over Naive PP")
    for index, row in enumerate(table.rows):
        value, _ = TABLE.measured(table, outcomes, index, measure)
        base = next(
            i
            for i, other in enumerate(table.rows)
            if other.name == "Naive PP" and table.place(other) == table.place(row)
        )
        own, over = (outcomes[i].values[None]["S"][0] for i in (index, base))
        assert value == own / over
        if index == base:
            assert value == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "NAME: missing"),
        (["spd9", "--out", "x"], "NAME: 'spd9' is no table; did you mean 'spd"),
        (["spd1"], "--out: missing"),
        (["nowhere.yaml", "--out", "x"], "there is no file 'nowhere.yaml'"),
        (["spd1", "--checkpoints", "nowhere"], "--checkpoints: there is no folder or file"),
        (["spd1", "--checkpoints", "EMPTY"], "nothing of spd1 can be run: no checkpoint; train it"),
        (["spd1", "--checkpoints", "EMPTY", "--shard", "1/2"], "nothing of spd1 can be run: no"),
        (["spd1", "--limit", "0"], "--limit"),
        (["spd1", "--seed", "-1"], "--seed: -1; give at least 0"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(place, tmp_path, capsys, arguments, expected):
    arguments = [str(tmp_path) if word == "EMPTY" else word for word in arguments]
    if "--checkpoints" in arguments:
        arguments += words(place, "spd1", tmp_path / "out")[1:5] + ["--out", str(tmp_path / "o")]
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: TABLE.run(arguments))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and expected in said
