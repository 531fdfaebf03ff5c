"""report.html: self-contained, escaped, complete, readable; on a real run and on drawn ones."""

import hashlib
import html
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from eval_runs import MANIFEST, make_runs, read_back, source

from pipedraft.eval import __main__ as command
from pipedraft.eval import report as report_command
from pipedraft.eval.compare import Evaluated
from pipedraft.eval.metrics import AUTOREGRESSIVE
from pipedraft.eval.report import build_page, write_report
from pipedraft.files import to_json

VOID = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</svg><svg onload=alert(1)>",
    "$\\frac{1}{",
    "{{ 7 * 7 }}{% raw %}",
    "_hidden & <b>bold</b>",
    "null \x00, escape \x1b[31m, half a pair \ud800, turned \u202etxet",
    "a name that is much longer than what fits beside an axis of a plot on any screen",
)


class Page(HTMLParser):
    """Parser for a page's elements; an unclosed or twice closed one is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def page_of(*sources: Evaluated) -> Page:
    return Page(build_page(sources).decode())


def write_results(folder: Path, entries: list[dict]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_bytes(to_json({"runs": entries, "overall": []}))
    (folder / "manifest.json").write_bytes(to_json(MANIFEST))


def figures(text: str) -> dict[str, str]:
    """Title -> figure."""
    found = re.findall(r"<figure[^>]*><h3>(.*?)</h3>(.*?)</figure>", text, re.S)
    return {html.unescape(title): body for title, body in found}


@pytest.fixture(scope="module")
def text() -> str:
    """Page for three stage counts and three benchmarks, one with categories."""
    return build_page([source(make_runs(), manifest=MANIFEST)]).decode()


@pytest.fixture(scope="module")
def evaluated(small_target, tmp_path_factory) -> tuple[Path, Path]:
    """Real evaluations for two stage counts and two draft lengths."""
    root = tmp_path_factory.mktemp("evaluated")
    folders = root / "n2", root / "n4"
    for folder in folders:
        words = ["--target", small_target, "--draft-model", small_target, "--schedule", "eagle"]
        words += ["--stages", folder.name[1:], "--tree", "chain:2,chain:4", "--benchmarks", "gsm8k"]
        words += ["--limit", "2", "--max-new-tokens", "6"]
        command.run([*words, "--out", str(folder)])
    return folders


def test_the_page_needs_nothing_but_itself(text) -> None:
    page = Page(text)
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster"):
            value = attributes.get(name, "#")
            assert value.startswith("#") or value == "data:,", (tag, name, value)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.findall(r"url\((?!#)|@import", text)
    assert Counter(re.findall(r"https?://[^\s\"<]+", text)) == {}
    assert "<script" not in text and "script-src" not in text and "default-src 'none'" in text
    ids = Counter(a["id"] for _, a in page.elements if "id" in a)
    assert max(ids.values()) == 1
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
    assert {a or b for a, b in used} <= ids.keys()
    light, dark = text.split("@media screen and (prefers-color-scheme: dark)")
    defined = [set(re.findall(r"(--[\w-]+): #", part)) for part in (light, dark)]
    assert defined[0] == defined[1] >= set(re.findall(r"var\((--[\w-]+)\)", text))


def test_one_number_of_every_method_stands_first(text) -> None:
    runs = [run for run in read_back(make_runs()) if run["benchmark"] == "overall"]
    summary = text.partition('id="Summary"')[2].partition('id="Results"')[0]
    shown = re.findall(r'label="(speed-up|tau)"><strong>(.*?)</strong>', summary)
    taus = [f"{run['mean_acceptance_length']:.2f}" for run in runs if run["method"] == "spd"]
    assert shown == [pair for tau in taus for pair in (("speed-up", "-"), ("tau", tau))]
    rows = re.findall(
        r"L'\"><strong>(.*?)</strong>.*?\[(.*?), (.*?)\].*?cx=\"(.*?)%\"", summary, re.S
    )
    drafted = [run["equivalent_acceptance_length"] for run in runs if run["method"] == "spd"]
    expected = [[f"{x:.3f}" for x in (found["pooled"], *found["ci95"])] for found in drafted]
    assert [list(row[:3]) for row in rows] == expected
    scale = 1.05 * max(found["ci95"][1] for found in drafted)
    for row, found in zip(rows, drafted, strict=True):
        assert float(row[3]) == pytest.approx(100 * found["pooled"] / scale, abs=0.01)
    assert "144 of 144 outputs that were checked equal the target" in summary


def test_the_table_has_every_cell_of_the_markdown_report(tmp_path) -> None:
    write_report(tmp_path, make_runs(), MANIFEST)
    shown = Counter(
        html.unescape(cell)
        for cell in re.findall(r"<td[^>]*>(.*?)</td>", (tmp_path / "report.html").read_text())
    )
    for line in (tmp_path / "report.md").read_text().splitlines():
        if line.startswith("| spd |"):
            cells = [cell.strip().replace("\\|", "|") for cell in line.strip("| ").split(" | ")]
            assert all(shown[cell] for cell in cells), line


def test_points_of_a_plot_lie_where_the_numbers_are(text) -> None:
    """L' against n: three points, with both coordinates proportional to n and L'."""
    found = figures(text)
    assert list(found) == ["L' by benchmark", "L' against n", "Acceptance by position"]
    assert all(re.search(r"(fill|stroke): var\(--series-\d", body) for body in found.values())
    assert all(found["L' by benchmark"].count(f">spd, n={n}</text>") == 1 for n in (4, 8, 16))
    svg = found["L' against n"]
    mark = r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: var\(--series-1\); stroke'
    marks = re.findall(mark, svg)
    points = np.array(marks[:-1], dtype=float)  # the last one is the legend's
    runs = [
        r for r in read_back(make_runs()) if r["benchmark"] == "overall" and r["method"] == "spd"
    ]
    lengths = np.array([run["equivalent_acceptance_length"]["pooled"] for run in runs])
    assert len(points) == 3
    steps = np.diff(points, axis=0)
    assert steps[1, 0] / steps[0, 0] == pytest.approx((16 - 8) / (8 - 4), abs=0.01)
    assert steps[1, 1] / steps[0, 1] == pytest.approx(
        (lengths[2] - lengths[1]) / (lengths[1] - lengths[0]), abs=0.01
    )
    assert np.sign(steps[0, 1]) == -np.sign(lengths[1] - lengths[0])  # y grows downwards


def test_a_baseline_alone_has_no_empty_plot() -> None:
    runs = [run for run in read_back(make_runs(("gsm8k",))) if run["method"] == AUTOREGRESSIVE]
    alone = build_page([source(runs)]).decode()
    assert Page(alone).count("figure") == 0
    assert "manifest.json" in alone and "missing" in alone


def test_one_prompt_has_points_without_intervals() -> None:
    runs = read_back(make_runs(("gsm8k",), stages=(4,)))
    for run in runs:
        run["equivalent_acceptance_length"]["ci95"] = [float("nan")] * 2
    alone = build_page([source(runs)]).decode()
    assert 'class="bounds"' not in alone and "<circle" in alone
    assert not re.findall(r"(?i)\bnan\b", alone)


@pytest.mark.parametrize("shift", [0, 3])
def test_names_from_files_stay_text(shift: int) -> None:
    """Hostile names in eight fields; every name is tried in two fields."""
    names = [HOSTILE[(index + shift) % len(HOSTILE)] for index in range(len(HOSTILE))]
    method, benchmark, tree, category, process, kind, network, other = names
    runs = read_back(make_runs(("mt_bench", "gsm8k"), stages=(4, 8)))
    for run in runs:
        run |= {"processes": [{"name": process, "seconds": {kind: 1.0}, "peak_rss_mb": 1}]}
        run["acceptance_by_category"] = {
            category + key: value for key, value in run["acceptance_by_category"].items()
        }
        run["tree"] = tree
        if run["method"] != AUTOREGRESSIVE:
            run["method"] = method
        if run["benchmark"] == "gsm8k":
            run["benchmark"] = benchmark
    row = {"method": method, "network": network, "temperature": 0, "ms_per_token": 3, "ci95": None}
    manifest = MANIFEST | {"command": other, "target": {"name": other}, "config": {other: other}}
    page = page_of(
        source(runs, other, manifest=manifest, latency=[row]), source(runs, "b", manifest=manifest)
    )
    assert page.count("script") == page.count("img") == page.count("b") == 0
    for _, attributes in page.elements:
        assert not any(key.startswith("on") for key in attributes)
    words = " ".join("".join(page.text).split())
    for name in names:
        shown = re.sub(r"[\x00\x1b\ud800\u202e]", "\ufffd", name)
        assert " ".join(shown.split()) in words
    assert re.search(r"[\x00-\x08\x1b\u202e\ud800]", words) is None


def test_a_manifest_of_another_shape_is_shown(text) -> None:
    manifest = MANIFEST | {"target": {"name": 5}, "checkpoints": 5}
    assert "5" in build_page([source(make_runs(), manifest=manifest)]).decode()


def test_the_same_results_give_the_same_bytes(text) -> None:
    assert build_page([source(make_runs(), manifest=MANIFEST)]).decode() == text


def test_many_runs_stay_below_two_megabytes() -> None:
    """A figure draws 12 runs, and refers to the table for the others."""
    runs = read_back(make_runs())
    page = build_page([source(runs, f"run {index}") for index in range(5)]).decode()
    assert len(page) < 2e6
    assert "The first 12 of 15 are drawn." in figures(page)["L' by benchmark"]
    assert page.count('aria-label="All results"') == 1
    assert len(re.findall(r'data-label="run" class="text">run 4<', page)) >= 16


def test_a_real_evaluation_writes_its_page(evaluated) -> None:
    folder = evaluated[0]
    page = (folder / "report.html").read_text()
    results = json.loads((folder / "results.json").read_text())
    Page(page)
    found = figures(page)
    assert "L' by benchmark" in found and "Processes" in page
    for run in results["runs"]:
        if run["schedule"] != AUTOREGRESSIVE:
            assert f"<strong>{run['equivalent_acceptance_length']['pooled']:.3f}</strong>" in page
    digest = hashlib.sha256((folder / "results.json").read_bytes()).hexdigest()
    fingerprint = json.loads((folder / "manifest.json").read_text())["target"]["fingerprint"]
    for fact in (digest, fingerprint["hash"], "--max-new-tokens", "versions torch"):
        assert fact in page


def test_several_runs_make_one_page_with_their_differences(evaluated, tmp_path, capsys) -> None:
    out = tmp_path / "new" / "both.html"
    command.run(["report", *map(str, evaluated), "--out", str(out)])
    assert str(out) in capsys.readouterr().out
    page = out.read_text()
    assert "L' against n" in figures(page)
    (section,) = re.findall(r'id="Comparison">(.*?)id="Provenance"', page, re.S)
    assert "n4 compared with n2" in section
    arguments = ["compare", *map(str, evaluated), "--json", str(tmp_path / "compared.json")]
    command.run(arguments)
    compared = json.loads((tmp_path / "compared.json").read_text())["comparisons"]
    assert section.count("<tr") == 1 + len(compared)
    for line in compared:
        assert f">{line['ratio']:.3f}</td>" in section
    for folder in evaluated:
        assert f"<h3>{folder.name}</h3>" in page.partition('id="Provenance"')[2]
    command.run(["report", str(evaluated[0]), "--out", str(out)])  # a page of its own kind
    assert out.read_text() != page
    mine = evaluated[0] / "manifest.json"
    before = mine.read_bytes()
    with pytest.raises(ValueError, match="--out: .*manifest.json.* would be replaced"):
        command.run(["report", *map(str, evaluated), "--out", str(mine)])
    assert mine.read_bytes() == before


def test_runs_that_share_no_prompt_are_not_compared(evaluated, tmp_path, monkeypatch) -> None:
    write_results(tmp_path / "drawn", make_runs(("humaneval",), stages=(4,)))
    monkeypatch.chdir(tmp_path)
    report_command.run([str(evaluated[0]), str(tmp_path / "drawn")])
    page = (tmp_path / "report.html").read_text()
    assert "Not compared: " in page and "share no prompt" in page


def test_latencies_alone_make_a_page(tmp_path) -> None:
    rows = [
        {"method": m, "network": net, "temperature": t, "ms_per_token": ms, "ci95": [ms - 1, ms]}
        | {"caveat": "" if m == "cloud" else "another text"}
        for m, scale in (("cloud", 1), ("picospec", 2))
        for net, ms in (("4g", 31.25 * scale), ("wifi", 11.5 * scale))
        for t in (0, 1.0)
    ]
    (tmp_path / "results.json").write_text(json.dumps({"latency": rows}))
    report_command.run([str(tmp_path)])
    found = figures((tmp_path / "report.html").read_text())
    assert list(found) == ["Latency against network"]
    (body,) = found.values()
    assert len(re.findall("<use [^>]*series-[12]", body)) == 2 * 4 + 2  # and in the legend
    assert body.count(">62.500</td>") == body.count(">[61.500, 62.500]</td>") == 2
    assert ">T = 0</text>" in body and ">T = 1</text>" in body
    assert ">cloud</text>" in body and ">picospec *</text>" in body and "* another text." in body


def test_repeats_and_entropies_are_tables() -> None:
    runs = read_back(make_runs(("gsm8k",), stages=(4,)))
    runs[1]["repeats"] = {"repeats": 2, "unequal_turns": 0, "tokens_per_s": [40.5, 41.5]}
    bins = [(0.0, 0.5, 90, 100), (0.5, None, 20, 80), (9.0, 10.0, 0, 0)]
    runs[1]["acceptance_by_entropy"] = [
        {
            "entropy_from": low,
            "entropy_to": high,
            "tests": tests,
            "accepts": accepts,
            "draft_acceptance_rate": accepts / tests if tests else None,
            "draft_acceptance_rate_ci95": [0.1, 0.95] if tests else [None, None],
        }
        for low, high, accepts, tests in bins
    ]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", build_page([source(runs)]).decode())
    assert {"40.50 41.50", "0 to 0.5", "0.5 up", "9 to 10"} <= set(cells)
    assert {"0.900 [0.100, 0.950]", "0.250 [0.100, 0.950]"} <= set(cells)


def test_folders_are_named_by_as_much_of_the_path_as_it_takes() -> None:
    names = report_command.short_names([Path("/x/a/eval"), Path("/x/b/eval")])
    assert names == ["a/eval", "b/eval"]
    assert report_command.short_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    with pytest.raises(ValueError, match="twice"):
        report_command.short_names([Path("/x/a"), Path("/x/./a")])
