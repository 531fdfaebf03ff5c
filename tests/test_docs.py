"""The documentation is true: commands parse and run, links resolve, messages and pictures exist."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from conftest import REPOSITORY
from doc_commands import PAGES, Command, check, commands_of, make_command, run_module

pytestmark = pytest.mark.timeout(600)  # many commands in one test, on a machine that may be busy

COMMANDS = [command for page in PAGES for command in commands_of(page)]
PAGE_NAMES = sorted({command.page for command in COMMANDS})

# Why a command is parsed and not run, by a pattern of "page: text". Each must match one.
PARSED_ONLY = {
    r".*: make ": "installs, tests, or takes ten minutes; the quickstart's two lines run",
    r".*: pip |.*: vllm |.*sglang.launch_server": "not a program of this project",
    r".*: torchrun ": "several processes: tests/test_process.py, tests/test_calibrate.py",
    r".*(8b|qwen3_5_.b_n\d+)\.yaml(?!.*Qwen3-0\.6B)": "the target is on the Hub",
    r".*configs/data/": "the data are on the Hub",
    r".*--server ": "a server: tests/test_regenerate_answers.py has one",
    r".* push (?!.*--dry-run)": "uploads: tests/test_hub.py has a Hub of its own",
    r".*user/name-sglang": "uploads",
    r".*features serve|.*--features 127": "two processes: tests/test_features_served.py",
    r".*inference (serve|edge) ": "a server that runs until it is ended: tests/test_serve.py",
    r".*--retention|.* scope ": "trained targets: tests/test_retention.py, tests/test_evolution.py",
    r".*doctor|.*completion": "tests/test_doctor.py, tests/test_completion.py",
    r"adding_": "they need the code of the page: tests/test_doc_examples.py",
    r".*draw_(schedules|links)": "run by a test below",
    r".*python benchmarks/": "measures for minutes to hours",
    r"paper_tables.md": "dozens of evaluations each: tests/test_paper_tables.py has small networks",
    r"flexspec.md": "trains ten targets: tests/test_evolution.py has small ones",
    r"results.md:.*(\.\.\.|PATH)": "says what is like another command of the page",
    r"results.md:.*data_recipes": "reads conversations that do not ship",
}

CHATS = "conversations.jsonl"
SMALL_DATA = [f'--data.sources=[{{"path": "{CHATS}"}}]', "--data.max_length=96"]
SMALL_TRAINING = [
    *SMALL_DATA,
    "--data.pack=false",
    "--data.valid_fraction=0.2",
    "--batch_tokens=256",
    "--max_steps=1",
    "--evaluation.max_rows=2",
    "--trackers=[]",
]
# What a module's command gets besides, or instead: the last one of an option counts.
SMALLER = {
    "pipedraft.train": SMALL_TRAINING,
    "pipedraft.train.features": SMALL_TRAINING,
    "pipedraft.inference": ["--max-new-tokens=4"],
    "pipedraft.eval": ["--benchmarks=gsm8k", "--limit=1", "--max-new-tokens=3"],
    "pipedraft.data_recipes.regenerate": ["--max-tokens=4", "--batch=4"],
}
# What stands for names that are on the Hub, or for files that do not ship.
STAND_INS = {
    "Qwen/Qwen3-0.6B": "assets/target",
    "Qwen/Qwen3-8B": "assets/target",
    "hub:": "assets/eval",
}
# Checkpoints that commands use, and the configuration that the documentation trains them with.
TRAINED = {
    "out/spd": "configs/spd/tiny.yaml",
    "out/spd_n4": "configs/spd/tiny_n4.yaml",
    "out/eagle": "configs/eagle/tiny_eagle.yaml",
    "out/quickstart/train": "configs/spd/quickstart.yaml",
    "out/eagle3": "configs/eagle/tiny_eagle3.yaml",
    "out/ppsd_n4": "configs/ppsd/tiny_n4.yaml",
    "out/flexspec": "configs/flexspec/tiny.yaml",
    "out/draft_model": "configs/target/tiny_draft.yaml",
}


def is_only_parsed(command: Command) -> bool:
    return any(re.match(pattern, f"{command.page}: {command.text}") for pattern in PARSED_ONLY)


# -- parsing --------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_commands_are_read_by_their_own_parsers(page, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    failures = []
    for command in COMMANDS:
        if command.page == page and not re.match("adding_", page):
            try:
                check(command)
            except (Exception, SystemExit) as error:  # all of the page's are reported at once
                failures.append(f"{command}\n    {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


def test_most_commands_are_found():
    """A page that is written in a way the reader does not know would have none."""
    assert len(COMMANDS) > 100
    assert {"README.md", "tutorial.md", "methods.md", "training.md"} <= set(PAGE_NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "python -m pipedraft.inference --target assets/target --prompt Hi --temprature 1",
        "python -m pipedraft.eval --checkpoint out/spd --benchmarks gsm8k",
        "python -m pipedraft.eval compare out/a out/b --bogus",
        "python -m pipedraft.train --config configs/spd/none.yaml",
        "python -m pipedraft.train --config configs/spd/tiny.yaml --optim.momentum 1",
        "python -m pipedraft.models export --checkpoint out/a --format gguf --out out/b",
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


# -- running --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder as the documentation's reader has it: a checkout's configurations, some chats."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("configs", "assets", "benchmarks"):
        (folder / name).symlink_to(REPOSITORY / name)
    rows = []
    for i in range(30):
        turns = [("user", f"What is {i} plus {i % 7}?"), ("assistant", f"It is {i + i % 7}.")]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append(json.dumps({"messages": messages}) + "\n")
    (folder / CHATS).write_text("".join(rows))
    (folder / "chats.jsonl").write_text("".join(rows[:2]))
    gsm8k = folder / "data" / "eval" / "gsm8k"
    gsm8k.mkdir(parents=True)
    row = {"question": "How many apples are five apples and six more apples?", "answer": "#### 11"}
    (gsm8k / "test.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def done() -> set[str]:
    """Commands that were run; another page's copy of one is not run again."""
    return set()


def scaled(command: Command) -> list[str]:
    words = [STAND_INS.get(word, word) for word in command.arguments]
    if words and words[0] == "edge":
        return [*words, *SMALLER["pipedraft.eval"]]
    if command.module == "pipedraft.eval" and not words[0].startswith("-"):
        return words  # reads what an evaluation wrote
    if "configs/eagle/eagle3_qwen3_8b.yaml" in words:
        words.append("--model.draft_vocab_size=null")  # the embedded target has 8,192 tokens
    return [*words, *SMALLER.get(command.module, [])]


def train(config: str) -> None:
    run_module("pipedraft.train", ["--config", config, *SMALL_TRAINING])


def make_what_it_reads(words: list[str]) -> None:
    """Train the checkpoints that a command names, in the way the documentation does."""
    for word in words:
        for folder, config in TRAINED.items():
            if (word == folder or word.startswith(folder + "/")) and not Path(folder).exists():
                train(config)
        if word == "out/other" and not Path(word).exists():
            shutil.copytree("out/eval", word)
        if word == "out/cost.json" and not Path(word).exists():
            Path(word).write_text(json.dumps({"row": 0.01, "link": 0.02}))


def clear_output(command: Command, words: list[str]) -> None:
    """What makes or goes on with a folder would find the one of another page."""
    option = {"pipedraft.train": "--output_dir"}.get(command.module, "--out")
    if option in words and command.module != "pipedraft.eval":
        shutil.rmtree(words[words.index(option) + 1], ignore_errors=True)


def run(command: Command, done: set[str]) -> None:
    words = scaled(command)
    key = " ".join([command.module, *words])
    if key in done:
        return
    AcceleratorState._reset_state(reset_partial_state=True)  # of the process before
    clear_output(command, words)
    if command.module == "pipedraft.train":
        if "--output_dir" not in words and "--plan" not in words:
            words = [*words, "--output_dir", f"out/documented-{len(done)}"]
    else:
        make_what_it_reads(words)
    try:
        run_module(command.module, words)
    except SystemExit as stop:
        assert not stop.code, stop.code
    done.add(key)


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_commands_run(page, place, done, monkeypatch, capfd):
    monkeypatch.chdir(place)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    failures = []
    for command in COMMANDS:
        if command.page == page and not is_only_parsed(command):
            try:
                run(command, done)
            except (Exception, SystemExit) as error:  # all of the page's are reported at once
                failures.append(f"{command}\n    {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


def test_the_table_of_what_is_only_parsed_holds_nothing_superfluous():
    texts = [f"{command.page}: {command.text}" for command in COMMANDS]
    for pattern in PARSED_ONLY:
        assert any(re.match(pattern, text) for text in texts), pattern
    named = re.findall(r"tests/\w+\.py", " ".join(PARSED_ONLY.values()))
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []
    assert sum(not is_only_parsed(command) for command in COMMANDS) > 30


# -- links ----------------------------------------------------------------------------------


def links_of(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
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


def test_every_picture_is_shown():
    shown = {(page.parent / link).resolve() for page in PAGES for link in links_of(page)}
    folder = REPOSITORY / "docs" / "images"
    assert {*folder.glob("*.svg"), *folder.glob("*.png")} <= shown


def test_the_layout_names_files_that_exist():
    blocks = re.findall(
        r"^    ([\w.]+/) +(.*?)(?=^    \S|\n\n)",
        (REPOSITORY / "docs" / "layout.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert {"models/", "train/", "inference/", "eval/", "./"} <= {folder for folder, _ in blocks}
    for folder, text in blocks:
        if folder == "docs/":
            continue
        for name in re.findall(r"\b[a-z_0-9]+(?:\.py|/)", text):
            assert list((REPOSITORY / folder).glob(name)), f"{folder}{name}"


# -- messages -------------------------------------------------------------------------------


def texts_of(source: Path) -> Iterator[str]:
    """String literals with a blank for every value that is put in."""
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
    """``...`` stands for a value, or for the beginning or the end of a longer line."""
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
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); out = sys.argv[2]\n"
        "for name in ('draw_schedules', 'draw_links'):\n"
        "    sys.argv = [name, '--out', out]\n"
        "    runpy.run_path(f'{sys.path[0]}/{name}.py', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path)]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert drawn.returncode == 0, drawn.stderr
    names = sorted(path.name for path in folder.glob("*.svg"))
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (folder / name).read_text() == (tmp_path / name).read_text(), f"draw {name} again"
