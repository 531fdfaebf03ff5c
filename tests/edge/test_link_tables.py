"""The papers' tables of links: planted faults, and one table as files."""

import json

import eval_runs
import paper_runs
import pytest
from paper_runs import check_written, planted, table_names

from pipedraft.endings import run_command

no_pictures, place, write = eval_runs.no_pictures, paper_runs.place, paper_runs.write
pytestmark = pytest.mark.usefixtures("no_pictures")
EXPECTED = [f"picospec{i}" for i in range(1, 5)] + [f"flexspec{i}" for i in range(3, 7)]
KEPT = {"test_a_fault_in_a_declaration_is_refused": 3}


def test_the_tables_of_the_papers_are_there():
    assert {*EXPECTED, "flexspec_lengths"} <= set(table_names())


@pytest.mark.parametrize(
    ("name", "edit", "expected"),
    [
        ("picospec1", lambda t: t["measures"].append("tau on gsm8k"), "leave ' on gsm8k' out"),
        ("picospec1", lambda t: t["rows"][1]["run"].update(method="pico"), "method 'pico'"),
        ("picospec1", lambda t: t["rows"][1]["run"].update(rule="luck"), "rule 'luck'"),
        ("picospec1", lambda t: t["run"].update(network="6g"), "link: '6g'"),
        ("picospec1", lambda t: t["run"].update(policy="best"), "best"),
        ("picospec1", lambda t: t["run"].update(times="fast"), "times 'fast' is unknown; give one"),
        ("picospec1", lambda t: t["run"].pop("times"), "run: 'times' is missing"),
    ],
)
def test_a_fault_in_a_declaration_is_refused(tmp_path, name, edit, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        planted(tmp_path, name, edit)
    assert "\n" not in str(caught.value)


def test_a_fixed_length_may_be_as_long_as_the_longest_batch(tmp_path):
    planted(tmp_path, "picospec2", lambda t: t["run"].update(policy="fixed:12", max_length=16))


def test_the_command_writes_the_table_and_what_it_rests_on(write):
    out, printed = write("picospec2")
    table = check_written("picospec2", out, printed)
    rows = json.loads((out / "results.json").read_text())["latency"]
    assert [row["method"] for row in rows] == [row.name for row in table.rows]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["picospec2", "--sequences", "4", "--out", "x"], "--sequences: 4, but picospec2"),
        (["flexspec3", "--shard", "1/2", "--out", "x"], "--shard: 1/2, but flexspec3"),
    ],
)
def test_what_is_for_pipelines_is_refused(capsys, arguments, expected):
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: paper_runs.TABLE.run(arguments))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and expected in said
