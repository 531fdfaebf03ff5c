"""Published numbers: one copy beside the tables, and relations between SPD's tables."""

import re

import numpy as np
import pytest
from scripts import load_script
from tiny_models import REPOSITORY

SCRIPT = vars(load_script("benchmarks/papers/check.py"))
BENCHMARKS = (" on MT-Bench", " on GSM8K", " on HumanEval")
PLACES = [("4B", "0"), ("4B", "1"), ("9B", "0"), ("9B", "1")]


def test_every_published_cell_of_the_tables_is_in_the_file():
    assert SCRIPT["differences"]() == []
    lines = SCRIPT["read_published"]()
    assert len({line["cell"] for line in lines.values()} - {""}) > 1_200
    measures = {spec: SCRIPT["read_spec"](spec).measures for spec in SCRIPT["table_names"]()}
    for line in lines.values():
        assert not line["measure"] or line["measure"] in measures[line["table"]], line


def test_a_line_without_a_row_is_found(tmp_path, monkeypatch):
    spec = load_script("benchmarks/papers/spec.py")
    path, right = tmp_path / "published.csv", spec.beside
    path.write_text(right(spec.PUBLISHED)[-1].read_text() + "spd1,SPDD,0,,S,1.5,,,\n")
    files = [*right(spec.PUBLISHED)[:-1], path]
    monkeypatch.setattr(spec, "beside", lambda x: files if x == spec.PUBLISHED else right(x))
    assert SCRIPT["differences"]() == ["('spd1', 'SPDD', '0', '', 'S'): only in one of the two"]
    path.write_text(path.read_text() + "spd1,SPDD,0,,S,1.6,,,\n")
    with pytest.raises(ValueError, match="two lines have the same table, row"):
        SCRIPT["differences"]()


def test_a_number_that_differs_is_found(tmp_path):
    numbers = tmp_path / "numbers.yaml"
    numbers.write_text("spd_table1_mean: {Qwen3.5-4B: {'EAGLE-3 (m=3)': ['2.71 / 2.47']}}\nx: [1]")
    found = SCRIPT["differences"](numbers)
    assert "spd_table1_mean/Qwen3.5-4B/EAGLE-3 (m=3)/0/0: 2.7, " in "\n".join(found)
    assert f"x/0: only in {numbers}" in found


def lengths(size: str, temperature: str, methods: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """L' from SPD's table 1 [M], and by benchmark from its tables 3 to 5 [M, 3]."""
    cells = {
        (line["row"], line["column"]): float(line["published"])
        for line in SCRIPT["read_published"]().values()
        if (line["table"], line["T"]) == ("spd1", temperature)
    }
    name = f"{size} L'"
    rows = [row for row, column in cells if column == name and row.startswith(methods)]
    table_M = np.array([cells[row, name] for row in rows])
    return table_M, np.array([[cells[row, name + on] for on in BENCHMARKS] for row in rows])


@pytest.mark.parametrize(("size", "temperature"), PLACES)
def test_spds_table_1_averages_benchmarks_for_eagle_and_pools_them_for_itself(size, temperature):
    table_M, lengths_MB = lengths(size, temperature, ("EAGLE-3",))
    assert np.abs(table_M - lengths_MB.mean(1)).max() < 0.0075
    # L' = n sum(N) / sum(K) of benchmarks pooled has 1 / L' = sum(share of N / L' of each).
    table_M, lengths_MB = lengths(size, temperature, ("SPD", "PPSD"))
    share_B, *_ = np.linalg.lstsq(1 / lengths_MB, 1 / table_M, rcond=None)
    assert abs(share_B.sum() - 1) < 0.02 and (share_B > 0.2).all()
    off_M = np.abs(table_M - 1 / (1 / lengths_MB @ share_B))
    assert off_M.mean() < 0.01 and off_M.max() < 0.03
    assert (lengths_MB.mean(1) - table_M).min() > 0.01, "the plain mean is above every cell"


def test_what_spds_cells_are_by_the_mean_that_eagle_has():
    def mean(size: str, row: str) -> float:
        lines = SCRIPT["read_published"]()
        on = [float(lines["spd1", row, "0", "", f"{size} L'{b}"]["published"]) for b in BENCHMARKS]
        return round(float(np.mean(on)), 2)

    assert mean("4B", "SPD, n = 8, Ls = 4") == 3.06  # printed: 2.82
    assert mean("9B", "SPD, n = 16, Ls = 2") == 3.67  # printed: 3.21
    assert mean("4B", "SPD, n = 8, Ls = 4, W = 4") == 3.15  # printed: 2.91


def test_the_table_of_mechanisms_names_what_exists_and_why_a_part_is_missing():
    text = (REPOSITORY / "docs" / "lab" / "seeds.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    rows = [row for row in rows if row[0] != "mechanism" and not row[0].startswith("---")]
    assert len(rows) > 60
    folders = [REPOSITORY, *REPOSITORY.glob("tests/**/"), *REPOSITORY.glob("benchmarks/*/tables/")]
    folders += [REPOSITORY / name for name in ("inference/schedules",)]
    for mechanism, _, file, test, state in rows:
        assert re.match(r"there\b|(partial|missing): \w", state), mechanism
        for name in re.findall(r"`([\w/]+\.(?:py|yaml)|[\w/]+/)`", f"{file} {test}"):
            assert any((folder / name).exists() for folder in folders), name
        assert test != "-" or state.startswith("missing"), mechanism
