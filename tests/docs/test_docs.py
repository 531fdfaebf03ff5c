"""Check the documentation: commands parse, links resolve, messages and pictures exist."""

import ast
import csv
import json
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from browser_runs import BROWSER, browsing
from doc_commands import PAGES, check, make_command, run_module
from doc_place import (
    COMMANDS,
    NOT_RUN,
    PAGE_NAMES,
    TABLES,
    TRAINERS,
    after,
    output_of,
    read_roles,
    runner_of,
)
from tiny_models import REPOSITORY

from pipedraft import __main__ as program
from pipedraft.eval import __main__ as evaluation
from pipedraft.inference.decode_options import WINGS
from pipedraft.models import __main__ as checkpoints
from pipedraft.train import config
from pipedraft.train.methods import methods
from pipedraft.wings import commands_of

CLI_PAGE = REPOSITORY / "docs" / "cli.md"
MODELS = sorted((REPOSITORY / "benchmarks" / "papers" / "models").glob("*.yaml"))

# -- parsing --------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def one_parser_a_method() -> Iterator[None]:
    """Reuse parsers: making one takes longer than reading a command with it."""
    make = config.make_parser
    made = cache(lambda method: make(method, methods(), ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "make_parser", lambda method, *_: made(method))
        yield


RECORDS = {path.name for path in (REPOSITORY / "docs" / "lab").glob("*.md")}
"""Pages with records of experiments; `make test` leaves their commands to `make test-all`."""


@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=[pytest.mark.all] * (name in RECORDS)) for name in PAGE_NAMES]
)
def test_commands_are_read_by_their_own_parsers(page, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    failures = []
    for command in COMMANDS:
        if command.page == page and not re.match("adding_", page):
            try:
                check(command)
            except (Exception, SystemExit) as error:  # report all the page's errors at once
                failures.append(f"{command}\n    {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


def test_most_commands_are_found():
    """A page in a form unknown to ``commands_of`` would seem to have no command."""
    assert len(COMMANDS) > 100
    assert {"README.md", "tutorial.md", "train.md"} <= set(PAGE_NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "python -m pipedraft.inference --target assets/target --prompt Hi --temprature 1",
        "python -m pipedraft.eval --checkpoint out/spd --benchmarks gsm8k",
        "python -m pipedraft.eval compare out/a out/b --bogus",
        "python -m pipedraft.train --config configs/spd/none.yaml",
        "python -m pipedraft.train --config configs/spd/tiny.yaml --optim.momentum 1",
        "python -m pipedraft.models export --checkpoint out/a --format ggml --out out/b",
        "accelerate launch --config_file configs/accelerate/none.yaml -m pipedraft.train --config "
        "configs/spd/tiny.yaml",
        "accelerate launch --num_procs 2 -m pipedraft.train --config configs/spd/tiny.yaml",
        "python benchmarks/spd_step.py --jsn",
        "python benchmarks/none.py",
        "make quickstrat",
        "pip install 'pipedraft[peftt]'",
    ],
)
def test_a_wrong_command_is_noticed(text, monkeypatch, capfd):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises((Exception, SystemExit)):
        check(make_command("page.md", 1, text))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_drafts_of_the_papers_models_are_made_by_the_commands_above_them(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    lines = re.findall(r"^#     (.*)$", path.read_text(), re.MULTILINE)
    commands = [make_command(path.name, 0, line) for line in lines]
    made = set()
    for command in commands:
        check(command)
        words = command.arguments
        is_trained = command.module in TRAINERS
        made.add(output_of(words) if is_trained else after(words, "--out"))
    drafts = yaml.safe_load(path.read_text())
    assert drafts.keys() <= read_roles().keys()
    assert {f for f in drafts.values() if f.startswith("out/")} <= made
    assert commands[-1].module == TABLES and str(path).endswith(
        after(commands[-1].arguments, "--checkpoints")
    )


def test_every_command_of_this_project_runs_in_one_test_or_another():
    runners = [runner_of(command) for command in COMMANDS]
    assert set(runners) - {""} <= {path.name for path in (REPOSITORY / "tests").rglob("test_*.py")}
    assert min(runners.count(f"test_doc_{kind}.py") for kind in ("runs", "processes")) > 14
    not_run = [command for command in COMMANDS if not runner_of(command)]
    assert {c.launcher for c in not_run} | {c.module for c in not_run} >= NOT_RUN.keys()
    ours = [c.module for c in not_run if re.match(r"pipedraft|.*\.py$", c.module)]
    assert set(ours) <= {
        "benchmarks/links.py",
        "benchmarks/emulated_link.py",
        "benchmarks/edge/links.py",
        "pipedraft.models.exchange.openvino_ir",
        "benchmarks/gpu_lease.py",
        "benchmarks/peer_logits.py",
        "benchmarks/planted_faults.py",
        "benchmarks/vllm_fill.py",
        "benchmarks/engines_speed.py",
        "benchmarks/peer_losses.py",
        "benchmarks/time_to_acceptance.py",
        "benchmarks/gpu_check.py",
        "docs/lab/other_engines.py",
        "docs/lab/cpu_products.py",
        "docs/lab/forecast_curves.py",
    }


# -- links ----------------------------------------------------------------------------------


def links_of(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


def anchors_of(page: Path) -> set[str]:
    """Return the page's anchors, made from headings like GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for link in links_of(page):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}"


def test_every_page_is_reachable_from_the_readme():
    seen, waiting = set(), [PAGES[0]]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        paths = [link.partition("#")[0] for link in links_of(page)]
        linked = [(page.parent / path).resolve() for path in paths if path.endswith(".md")]
        waiting += [page for page in linked if page.exists()]
    assert set(PAGES) <= seen, sorted(page.name for page in set(PAGES) - seen)


SOURCE = r"(?:models|train|data_recipes|inference|eval|tests|benchmarks|configs|assets)/[\w./-]+"


def quoted_sources(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield files quoted by a page, each with the names promised in it."""
    for path, names in re.findall(rf"`({SOURCE})(?:: ([^`]*))?`", page.read_text()):
        if not path.endswith("...") and "NAME" not in path:
            yield path, re.findall(r"\b[A-Za-z_]\w+\b", names)


def misquotes(quotes: Iterator[tuple[str, list[str]]]) -> Iterator[str]:
    for path, names in quotes:
        file = REPOSITORY / path
        if not file.exists():
            yield path
        elif file.suffix == ".py" and names:
            text = file.read_text()
            yield from (f"{path}: {name}" for name in names if not re.search(rf"\b{name}\b", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_files_exist_and_hold_what_is_said(page):
    if not page.name.startswith("adding_"):  # these pages name files written by their reader
        assert list(misquotes(quoted_sources(page))) == []


def test_the_tutorial_shows_the_configuration_that_ships():
    text = (REPOSITORY / "configs" / "eagle" / "eagle3_my_model.yaml").read_text()
    shown = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    assert f"```yaml\n{shown}```" in (REPOSITORY / "docs" / "tutorial.md").read_text()


def test_a_file_that_has_moved_is_noticed():
    quotes = [("inference/schedules/layered.py", []), ("models/heads/spd.py", ["SPD", "SPQ"])]
    assert list(misquotes(iter(quotes))) == [
        "inference/schedules/layered.py",
        "models/heads/spd.py: SPQ",
    ]


def test_every_picture_is_shown():
    shown = {(page.parent / link).resolve() for page in PAGES for link in links_of(page)}
    folder = REPOSITORY / "docs" / "images"
    assert {*folder.glob("*.svg"), *folder.glob("*.png")} <= shown


def test_the_layout_names_files_that_exist():
    blocks = re.findall(
        r"^    ([\w./]+/)\s+(.*?)(?=^    \S|\n\n)",
        (REPOSITORY / "docs" / "layout.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert {"models/", "train/", "inference/", "eval/", "./"} <= {folder for folder, _ in blocks}
    for folder, text in blocks:
        if folder == "docs/":
            continue
        for name in re.findall(r"\b[a-z_0-9]+(?:\.py|/)", text):
            assert list((REPOSITORY / folder).glob(name)), f"{folder}{name}"


def test_the_references_are_what_the_script_writes():
    script = runpy.run_path(str(REPOSITORY / "docs" / "reference.py"))
    for page, text in script["pages"]():
        assert page.read_text() == text, f"{page.name}: run python docs/reference.py"


def test_the_reference_has_every_command():
    two_words = {" ".join(words) for words in program.SUBCOMMANDS}
    two_words |= {f"inference {name}" for name in commands_of(WINGS)}
    two_words |= {f"eval {name}" for name in evaluation.SUBCOMMANDS}
    two_words |= {f"models {name}" for name in checkpoints.SUBCOMMANDS}
    headings = re.findall(r"^## pipedraft (.*)$", CLI_PAGE.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted({*program.COMMANDS, *two_words} - {"models"})


# -- messages -------------------------------------------------------------------------------


def texts_of(source: Path) -> Iterator[str]:
    """Yield string literals, with a NUL for every inserted value."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [x.value if isinstance(x, ast.Constant) else "\0" for x in node.values]
            yield "".join(map(str, parts))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    folders = ("models", "train", "data_recipes", "inference", "eval")
    sources = [f for folder in folders for f in (REPOSITORY / folder).rglob("*.py")]
    return [text for f in [*sources, *REPOSITORY.glob("*.py")] for text in texts_of(f)]


def is_said(message: str, texts: list[str]) -> bool:
    """Return True if a text has the message; ``...`` matches a value, or a longer line's ends."""
    parts = [re.escape(part) for part in message.split("...") if part.strip()]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def quoted_messages() -> list[str]:
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^- `(.*)`$", text, re.MULTILINE)


def test_every_message_that_is_explained_is_in_the_source(texts):
    messages = quoted_messages()
    assert len(messages) > 40
    assert [message for message in messages if not is_said(message, texts)] == []


def test_a_message_that_nothing_says_is_noticed(texts):
    assert not is_said("target: does not fit this draft, which was trained for ...", texts)
    assert not is_said("tree: ... is no shrub; give chain:7", texts)


# -- pictures -------------------------------------------------------------------------------


def test_the_pictures_are_what_the_engine_draws(tmp_path):
    folder = REPOSITORY / "docs" / "images"
    drawings = ("schedules", "links", "demo", "benchmarks", "flow", "screens")
    for name in (f"draw_{drawing}" for drawing in drawings):
        run_module(f"docs/images/{name}.py", ["--out", str(tmp_path)])
    names = sorted(path.name for path in folder.glob("*.svg"))
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (folder / name).read_text() == (tmp_path / name).read_text(), f"draw {name} again"


def test_the_screens_are_those_of_commands_that_still_parse(monkeypatch):
    """``record_screens.py`` records them again; times are a machine's own."""
    monkeypatch.chdir(REPOSITORY)
    commands = runpy.run_path(str(REPOSITORY / "docs/images/record_screens.py"))["COMMANDS"]
    shown = json.loads((REPOSITORY / "docs/images/screens.json").read_text())
    assert {name: screen["command"] for name, screen in shown.items()} == commands
    for command in commands.values():
        check(make_command("record_screens.py", 0, command))


# -- figures --------------------------------------------------------------------------------


def section_of(link: str) -> str:
    """Return a CSV file, or the part of a page under a heading and above the next one."""
    path, _, anchor = link.partition("#")
    page = REPOSITORY / "docs" / path
    parts = re.split(r"^(?=#+ )", page.read_text(), flags=re.MULTILINE)
    if not anchor:
        assert page.suffix == ".csv", link
        return "".join(parts)
    titles = (re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lower()) for part in parts)
    found = [p for p, t in zip(parts, titles, strict=True) if t.strip().replace(" ", "-") == anchor]
    assert len(found) == 1, link
    return found[0]


def test_every_figure_of_the_charts_stands_in_its_source():
    with (REPOSITORY / "docs" / "lab" / "figures.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) > 200
    sections = {link: section_of(link) for link in {line["source"] for line in lines}}
    for line in lines:
        number = re.escape(line["y"] or line["x"])
        assert re.search(rf"(?<![\d.]){number}(?!\.?\d)", sections[line["source"]]), line


def test_the_sortable_page_shows_the_tables(tmp_path):
    run_module("docs/lab/write_results.py", ["--out", str(tmp_path)])
    written = (tmp_path / "results.html").read_text()
    assert written == (REPOSITORY / "docs" / "lab" / "results.html").read_text()
    script = written.partition("<script>")[2].partition("</script>")[0]
    assert len(script.splitlines()) < 40


@pytest.mark.all
@pytest.mark.skipif(BROWSER is None, reason="no browser that could be asked")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_sortable_page_fits_a_screen(width, tmp_path):
    page = REPOSITORY / "docs" / "lab" / "results.html"
    with browsing(tmp_path) as browser:
        browser.open(page.as_uri(), width=width, height=800)
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelectorAll('.scroll > table').length") == 3
