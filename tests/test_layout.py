"""The layout is a contract: import direction, sizes, dependencies, the wheel, the configs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from quick_sample import KEPT
from source_imports import COUNT, nodes_of, resolved

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "models": set(),
    "data_recipes": set(),
    "inference": {"models"},
    "eval": {"models", "data_recipes", "inference"},
    "train": {"models", "data_recipes", "inference", "eval"},
}
FLOORS = ["transformer", "speed", "stages", "*", "heads", "exchange"]
"""Folders of models/, and "*" for its files; each imports only those before it."""
ROOT_MAY_IMPORT = {"doctor.py": {"models"}, "api.py": {*MAY_IMPORT}}
VAGUE_NAMES = {"utils", "helpers", "common", "misc", "core", "manager"}
ROOT_FILES = sorted({*ROOT.glob("*.py")} - {ROOT / "setup.py"})
SOURCES = ROOT_FILES + [f for folder in MAY_IMPORT for f in sorted((ROOT / folder).rglob("*.py"))]
SCRIPTS = [f for folder in ("benchmarks", "tests") for f in sorted((ROOT / folder).rglob("*.py"))]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(path: Path) -> Iterator[str]:
    """Every module name imported by a file, inside functions too; relative ones from the root."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].relative_to(ROOT).parts
            module = ".".join(["pipedraft", *base, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def check_imports_only_the_folders_below(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for module in imported_modules(path):
        top, _, rest = module.partition(".")
        assert top not in MAY_IMPORT, f"write a relative import, not {module}"
        used = rest.partition(".")[0]
        if top == "pipedraft" and used in MAY_IMPORT and used != folder:
            allowed = MAY_IMPORT | ROOT_MAY_IMPORT
            assert used in allowed.get(folder, set()), f"{folder} must not import {used}"


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_of_models_imports_only_the_floors_before_it(floor: str) -> None:
    below = FLOORS[: FLOORS.index(floor) + 1]
    files = ("target", "target_part", "families")
    paths = [ROOT / "models" / f"{name}.py" for name in files]
    for path in paths if floor == "*" else (ROOT / "models" / floor).rglob("*.py"):
        for module in imported_modules(path):
            if module.startswith("pipedraft.models."):
                used = module.split(".")[2]
                used = "*" if used in files else used
                assert used in below, f"{label(path)} must not import {module}"


def test_code_lines_stay_within_what_stands() -> None:
    lines = sum(COUNT["code_lines"](path, ast.parse(path.read_text())) for path in SOURCES)
    assert lines <= COUNT["MAX_CODE_LINES"], "raise it with the change that adds code"


def test_blank_lines_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        '"""Two lines\nof words."""\n\nx = 1  # one\n"""Under a field."""\n\n\n# none\n'
        'def f() -> str:  # two\n    """Words."""\n    return """three\n    four"""\n'
    )
    assert COUNT["code_lines"](path, ast.parse(path.read_text())) == 4


def test_no_files_import_each_other_not_even_for_types() -> None:
    graph = COUNT["import_graph"]({path: ast.parse(path.read_text()) for path in SOURCES})
    assert COUNT["circles"](graph) == []


def test_an_import_for_types_closes_a_circle(tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("if TYPE_CHECKING:\n    from .second import B\n")
    second.write_text("from .first import A\n")
    graph = COUNT["import_graph"]({p: ast.parse(p.read_text()) for p in (first, second)})
    assert COUNT["circles"](graph) == [[first, second]]


def copy_sources(folder: Path) -> Path:
    for path in SOURCES:
        (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.relative_to(ROOT))
    return folder


def test_every_import_is_found_in_a_checkout_of_any_name(tmp_path: Path) -> None:
    copy = copy_sources(tmp_path / "any-name.2")
    number, missing = resolved(copy, copy)
    assert number > 1000 and not missing


@pytest.mark.all
def test_types_are_checked_in_a_checkout_of_any_name(tmp_path: Path) -> None:
    """An import that mypy cannot find would be Any, and no error."""
    folder = copy_sources(tmp_path / "checkout")
    wrong = folder / "models" / "wrong.py"
    wrong.write_text("from .heads.spd import SPD\n\nx: int = SPD.load\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, str(wrong)], cwd=folder, text=True, capture_output=True)
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(lines) == 1 and "int" in lines[0]


@pytest.mark.parametrize("path", SCRIPTS, ids=label)
def test_scripts_and_tests_import_through_the_package(path: Path) -> None:
    modules = [*imported_modules(path)]
    tops = {module.partition(".")[0] for module in modules}
    assert not tops & MAY_IMPORT.keys(), "write `from pipedraft.models import ...`"
    assert "pipedraft.benchmarks" not in modules, "scripts find those beside them by name"
    tests = sorted(top for top in tops if top.startswith("test_"))
    assert not tests, f"what {tests} share with others goes to conftest.py or a *_runs.py"


def check_has_small_functions(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 700, "split by responsibility"
    assert path.stem not in VAGUE_NAMES, "name the file after what is in it"
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert num_lines < 80, f"{node.name} has {num_lines} lines"
            arguments = [a for a in node.args.args if a.arg not in ("self", "cls")]
            assert len(arguments) <= 6, f"{node.name} takes {len(arguments)} positional arguments"
            says = (ast.get_docstring(node) or "").partition("\n")[0]
            has_sentence = node.name == "__init__" or says not in ("Args:", "Raises:", "Returns:")
            assert has_sentence, f"{node.name}: its docstring begins with no sentence of its own"


def check_loads_through_pretrained(path: Path) -> None:
    """They refuse code in the model's folder, pickles, and missing weights."""
    loaders = [ROOT / "pretrained.py", ROOT / "gguf_files.py"]
    # These run where pipedraft's own packages need not be.
    loaders += [ROOT / "eval/transformers_process.py", ROOT / "models/exchange/openvino_ir.py"]
    for node in nodes_of(path):
        is_loader = isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
        assert not is_loader or path in loaders, "use pipedraft.pretrained"


PARSERS = ("__main__", "commands")


@pytest.mark.all
def test_networks_load_without_an_option_parser() -> None:
    files = [f for f in SOURCES if f.is_relative_to(ROOT / "models") and f.stem not in PARSERS]
    names = [".".join(["pipedraft", *f.relative_to(ROOT).with_suffix("").parts]) for f in files]
    code = f"""if True:
        import importlib, sys
        for name in {names!r}:
            importlib.import_module(name)
        sys.exit("jsonargparse" in sys.modules)"""
    assert len(names) > 30
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


HEAVY = ("datasets", "pandas", "sklearn", "deepspeed", "peft", "wandb", "torchvision", "matplotlib")
"""Packages that a run does without, unless its configuration asks for one."""


@pytest.mark.all
def test_a_trainer_imports_no_package_that_it_does_without() -> None:
    """Of what it imports, scipy.optimize is transformers' own choice, where scipy is installed."""
    code = f"""if True:
        import sys
        from pipedraft.train import overfit, plan, run
        found = sorted({{*{HEAVY!r}}} & sys.modules.keys())
        sys.exit(f"imported: {{found}}" if found else 0)"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def check_imports_no_entry_point(path: Path) -> None:
    """Under ``-m`` such a module would exist twice."""
    modules = [module for module in imported_modules(path) if "__main__" in module.split(".")]
    assert not modules, "what others use goes to a file named for it"


RULES = (
    check_imports_only_the_folders_below,
    check_has_small_functions,
    check_loads_through_pretrained,
    check_imports_no_entry_point,
)


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_a_file_keeps_every_rule(path: Path) -> None:
    for rule in RULES:
        rule(path)


def requirement_name(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_every_imported_library_is_declared() -> None:
    project = PYPROJECT["project"]
    declared = [*project["dependencies"]]
    declared += [r for extra in project["optional-dependencies"].values() for r in extra]
    names = {requirement_name(requirement) for requirement in declared}
    installed = packages_distributions()
    for path in SOURCES:
        for top in {module.partition(".")[0] for module in imported_modules(path)}:
            if top in {"pipedraft", "_typeshed"} or top in sys.stdlib_module_names:
                continue  # _typeshed: the type checker's own stubs
            distributions = {requirement_name(d) for d in installed.get(top, [top])}
            assert distributions & names, f"{label(path)} imports {top}: add it to pyproject.toml"


def test_constraints_pin_every_declared_library_within_its_bounds() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {requirement_name(name): version for name, version in pins.items()}
    project = PYPROJECT["project"]
    extras = [r for extra in project["optional-dependencies"].values() for r in extra]
    for text in [*project["dependencies"], *extras]:
        requirement = Requirement(text)
        name = requirement_name(requirement.name)
        if name != "pipedraft":
            assert name in pins, f"constraints.txt does not pin {name}"
            assert requirement.specifier.contains(pins[name]), f"{text} excludes {pins[name]}"


TRAINING = ["train", "train.features", "train.new"]
DECODING = ["inference", "inference.serving", "inference.vllm"]
NAMES = ("compare", "parity", "replay", "report")
EVAL = ["eval", "eval.audit", *(f"eval {name}" for name in NAMES)]


@pytest.mark.parametrize(
    "commands",
    [["doctor"], ["models"], ["data_recipes"], TRAINING, DECODING, EVAL],
    ids=lambda commands: commands[0],
)
def test_help_comes_without_torch(commands: list[str]) -> None:
    code = f"""if True:
        import runpy, sys
        for command in {commands!r}:
            module, *words = command.split()
            sys.argv = ["x", *words, "--help"]
            try:
                runpy.run_module(f"pipedraft.{{module}}", run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                if ended.code or "torch" in sys.modules:
                    sys.exit(f"{{command}}: {{ended.code}}, or torch was imported")"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")
    assert len(re.findall("^usage: ", done.stdout, re.MULTILINE)) == len(commands)


TYPED = [
    ["train", "--config", "configs/spd/tiny.yaml", "--model.num_layrs", "2"],
    ["train", "--config", "configs/spd/tiny.yaml", "--max_steps", "0"],
    ["train", "--plan", "configs/spd/tiny.yaml", "--lr", "1"],
    ["train.features", "--config", "configs/spd/tiny.yaml", "--outt", "x"],
    ["train.new", "assets/target", "--data", "nosuch.jsonl"],
    ["inference", "--prompt", "x", "--schedule", "egle"],
    ["train.new", "assets/target", "--data", "x", "--method", "eagle4"],
    ["data_recipes", "--outt", "x"],
    ["data_recipes.regenerate", "--outt", "x"],
    *([name, "--checkpoit", "x"] for name in ("eval", "eval.audit", *DECODING, "inference.demo")),
    *([f"eval {name}", "--checkpoit", "x"] for name in ("parity", "replay")),
    *([f"models {name}", "--outt", "x"] for name in ("export", "import", "push", "from-gguf")),
    ["doctor", "--jsn"],
    *([name, "--target", "no/such/folder"] for name in ("eval", "inference", "inference.demo")),
    *(
        [name, "--checkpoint", "no/such/head"]
        for name in ("models export", "models push", "eval parity", "inference.serving")
    ),
    ["inference.vllm", "out/smollm2", "--draf", "ngram"],
    ["train", "--config", "configs/spd/tiny.yaml", "--target", "./asets/target"],
    ["train", "--config", "configs/spd/tiny.yaml", "--data", "nosuch.jsonl"],
    ["data_recipes", "--data", "nosuch.jsonl", "--tokenizer", "assets/target", "--out", "out/x"],
]


def test_typing_errors_are_found_without_torch() -> None:
    """Each costs a few tenths of a second instead of torch's seconds."""
    code = f"""if True:
        import runpy, sys
        for first, *words in {TYPED!r}:
            module, *more = first.split()
            sys.argv = ["x", *more, *words]
            try:
                runpy.run_module(f"pipedraft.{{module}}", run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                if ended.code != 2 or "torch" in sys.modules:
                    sys.exit(f"{{words}}: {{ended.code}}, or torch was imported")"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^error: --", done.stderr, re.MULTILINE)) == len(TYPED), done.stderr


PACKAGED = [
    path.relative_to(ROOT)
    for pattern in PYPROJECT["tool"]["setuptools"]["package-data"]["pipedraft"]
    for path in ROOT.glob(pattern)
]
"""The embedded target, two heads for it, and the evaluation prompts."""


def wheel_of(source: Path, folder: Path) -> Path:
    """Build a wheel from copied package files, without network and build isolation."""
    copy = folder / "any_name"
    copy.mkdir()
    for name in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        *(f.name for f in ROOT_FILES),
    ):
        shutil.copy(source / name, copy / name)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*MAY_IMPORT, "configs", "tests"):
        shutil.copytree(source / name, copy / name, ignore=ignore)
    for path in PACKAGED:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, copy / path)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(copy)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_holds_the_package_and_runs_from_another_directory(tmp_path: Path) -> None:
    wheel = wheel_of(ROOT, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "site")
    found = [path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.*")]
    templates = [path for path in found if path.suffix in (".jinja", ".html", ".cpp", ".csv")]
    expected = {f"pipedraft/{label(path)}" for path in [*SOURCES, *templates]}
    assert held == expected | {f"pipedraft/{path}" for path in PACKAGED} and templates
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = (
        "import runpy, sys, pipedraft; print(pipedraft.__file__);"
        "sys.argv = ['pipedraft', '--version']; runpy.run_module('pipedraft', run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=elsewhere, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    module_file, version = done.stdout.splitlines()
    assert Path(module_file).is_relative_to(tmp_path / "site")
    assert re.fullmatch(r"pipedraft \d+\.\d+\.\d+", version)


@pytest.mark.all
def test_a_wheel_decodes_outside_a_checkout(tmp_path: Path) -> None:
    """The environment has this one's libraries and no other copy of the package."""
    wheel = wheel_of(ROOT, tmp_path)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    programs = tmp_path / "venv" / "bin"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def out(*words: str) -> str:
        run = partial(subprocess.run, cwd=elsewhere, env=environment, text=True)
        done = run([str(programs / words[0]), *words[1:]], capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "times as fast" in out("pipedraft", "demo", "--max-new-tokens", "8", "--repeats", "1")
    page = (ROOT / "docs" / "python.md").read_text()
    decode, inside = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    check = f"import pipedraft\nassert pipedraft.__file__.startswith({str(site)!r})\n"
    said = out("python", "-c", check + decode + inside)
    assert "GeneratedToken(" in said and said.splitlines()[-1].startswith("True ")
    assert (elsewhere / "timeline.svg").is_file()


@pytest.mark.parametrize(
    "arguments, status, expected",
    [
        (["--help"], 0, "usage: pipedraft"),
        ([], 2, "usage: pipedraft"),
        (["evl"], 2, "error: command: 'evl' is unknown; did you mean 'eval'?"),
        (["export"], 2, "error: command: 'export' is unknown; did you mean 'models export'?"),
        (["zzz"], 2, "error: command: 'zzz' is unknown; give one of new, train,"),
    ],
)
def test_the_console_script_answers(arguments: list[str], status: int, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipedraft", *arguments], text=True, capture_output=True
    )
    assert done.returncode == status
    output = done.stderr if status else done.stdout
    assert output.startswith(expected)
    if expected.startswith("error"):
        assert output.count("\n") == 1


def test_second_words_that_get_a_hint_are_subcommands() -> None:
    from pipedraft.__main__ import NESTED
    from pipedraft.eval.__main__ import SUBCOMMANDS as OF_EVAL
    from pipedraft.models.exchange.commands import SUBCOMMANDS as OF_MODELS

    assert set(NESTED["models"]) == set(OF_MODELS)
    assert set(NESTED["eval"]) <= set(OF_EVAL)


def test_the_console_script_names_modules_that_exist_and_lists_each_on_a_line() -> None:
    from pipedraft.__main__ import COMMANDS, usage

    for command, (folder, summary, example) in COMMANDS.items():
        modules = [ROOT / folder / "__main__.py", ROOT / f"{folder}.py"]
        assert sum(module.is_file() for module in modules) == 1, f"{command}: no {folder}"
        assert example.startswith(f"pipedraft {command} ")
        lines = [line for line in usage().splitlines() if line.split()[:1] == [command]]
        assert len(lines) == 1 and lines[0].endswith(summary) and len(lines[0]) <= 100


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_accelerate_reads_the_launch_configuration(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    kind = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(name, "DEEPSPEED")
    assert config.distributed_type == kind
    assert config.num_machines == 1
    assert not config.use_cpu
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if kind == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(name[-1])


def test_sampled_tests_exist() -> None:
    """A renamed test would otherwise run in full unnoticed."""
    tests = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    own = {
        name: ast.literal_eval(node.value)
        for name, source in tests.items()
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KEPT"
    }
    for file, names in (own | KEPT).items():
        missing = [name for name in names if f"def {name}(" not in tests[file]]
        assert not missing, f"{file} has no {missing}"
