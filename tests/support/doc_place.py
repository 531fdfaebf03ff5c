"""Reader's folder for the documentation, and its commands scaled down to seconds."""

import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.state import AcceleratorState
from doc_commands import PAGES, Command, commands_of, run_module
from eval_runs import PROMPTS
from scripts import load_script
from tiny_models import REPOSITORY, tiny_llama
from transformers import AutoTokenizer

measurement = load_script("benchmarks/measurement.py")
SPEC = load_script("benchmarks/papers/spec.py")
read_roles, table_files = SPEC.read_roles, SPEC.table_files
COMMANDS = [command for page in PAGES for command in commands_of(page)]
PAGE_NAMES = sorted({command.page for command in COMMANDS})

GENERATED = ("cli.md", "config.md")
"""Pages whose commands are only parsed: docs/reference.py copies them from --help."""
NOT_RUN = {
    "make": "installs, tests, or the quickstart, whose two lines run",
    "pip": "not a program of this project",
    "mlx_lm": "not a program of this project",
    "vllm": "not a program of this project",
    "sglang.launch_server": "not a program of this project",
    "zipfile": "not a program of this project",
    "benchmarks/gpu_check.py": "needs a GPU; test_gpu_check.py runs it on a pretended one",
    "benchmarks/planted_faults.py": "runs vLLM, which is not installed here",
    "benchmarks/vllm_fill.py": "runs vLLM, which is not installed here",
    "benchmarks/engines_speed.py": "runs other engines, which are not installed here",
    "benchmarks/links.py": "needs root, and namespaces of the network",
    "benchmarks/emulated_link.py": "needs root, and namespaces of the network",
    "benchmarks/edge/links.py": "needs root, and namespaces of the network",
    "benchmarks/gpu_lease.py": "trains for an hour and a half on SmolLM2's answers",
    "benchmarks/peer_logits.py": "runs beside packages that are not installed here",
    "benchmarks/peer_losses.py": "runs beside packages that are not installed here",
    "benchmarks/time_to_acceptance.py": "runs beside packages that are not installed here",
    "pipedraft.models.exchange.openvino_ir": "runs beside packages that are not installed here",
    "docs/lab/other_engines.py": "runs beside packages that are not installed here",
    "docs/lab/cpu_products.py": "times products of a real size",
    "docs/lab/forecast_curves.py": "trains two dozen heads",
}
"""Reason not to run it, by launcher or module."""


def num_ranks(words: list[str]) -> int:
    """Count the processes started by a command itself."""
    return int(after(words, "--processes", "0")) if "--backend" in words else 0


def runner_of(command: Command) -> str:
    """Name the test file that runs a command; "" for a command in ``NOT_RUN``.

    Commands with accelerate run as one process here. test_parallel.py trains with two processes
    under each accelerate configuration, and through the launcher itself.
    """
    words = command.arguments
    if command.page in GENERATED:
        return "test_docs.py"
    if command.launcher in NOT_RUN or command.module in NOT_RUN:
        return ""
    if words[:1] == ["from-gguf"]:
        return "test_gguf.py"  # it writes a GGUF file first
    if words[:1] == ["export"] and "gguf" in words:
        return "test_export_gguf.py"  # it makes a target's file first
    if "out/imported" in words:
        return "test_peers.py"  # it makes heads in other projects' formats
    if command.module == "pipedraft.eval" and "--endpoint" in words:
        return "test_endpoint.py"  # it starts servers
    if words[:2] == ["replay", "out/wall"]:
        return "test_calibrate.py"  # of a run on several processes
    if command.module == "pipedraft.eval.audit":
        return "test_audit.py"  # it starts servers
    is_states_server = command.module == "pipedraft.train.features" and words[:1] == ["serve"]
    if is_states_server or "http://127.0.0.1:7500" in words:
        return "test_features_served.py"  # it starts a server for hidden states
    if "--engine" in words:  # this starts an engine's process
        is_dump = command.module == "pipedraft.train.features"
        return "test_features_vllm.py" if is_dump else "test_engine_parity.py"
    if command.page.startswith("adding_"):
        return "test_doc_examples.py"  # on a copy with the page's code
    if command.module == "pipedraft.doctor":
        return "test_doctor.py"  # it runs the command in a process
    if command.module == "benchmarks/serve_storm.py":
        return "test_serve_load.py"
    if command.module == "pipedraft.inference.conformance" or "--conformance" in words:
        return "test_conformance.py"
    if command.module == "pipedraft.inference.vllm":
        return "test_vllm_fill.py"
    if command.module == "pipedraft.inference.serving":
        return "test_serve_http.py"  # it starts these servers
    if command.module.startswith(("docs/images/", "docs/lab/write_results")):
        return "test_docs.py"  # it compares their output
    if command.module == "docs/lab/servers.py":
        return "test_serve_command.py"
    lab = [f"docs/lab/{name}.py" for name in ("runs", "same_tokens", "auto_tree", "launches")]
    if command.module in lab:
        return "test_lab_scripts.py"
    if command.module == "benchmarks/edge/shared_link.py":
        return "test_shared_link.py"
    is_served = any(word.startswith("127.0.0.1:") for word in words)
    is_client = command.module == "pipedraft.inference" and "--server" in words
    is_several = is_client or (
        words[:1] in (["serve"], ["edge"]) and command.module != "pipedraft.eval"
    )
    is_several |= command.launcher == "torchrun" or num_ranks(words) > 0
    if is_served or is_several:
        return "test_doc_processes.py"
    return "test_doc_runs.py"


CHATS = "conversations.jsonl"
SOURCES = f'--data.sources=[{{"path": "{CHATS}"}}]'
SMALL_TRAINING = [
    SOURCES,
    "--data.max_length=96",
    "--data.valid_fraction=0.2",
    "--batch_tokens=256",
    "--max_steps=1",
    "--evaluation.max_rows=2",
    "--evaluation.decode_prompts=0",
    "--trackers=[]",
]
TARGETS = "assets/target/train.py"
TABLES = "benchmarks/papers/table.py"
TRAINERS = ("pipedraft.train", TARGETS)
NO_FEATURES = {"pipedraft.train": ["--features=null"]}
SMALL_TARGETS = [
    SOURCES,
    "--row_length=96",
    "--data.valid_fraction=0.2",
    "--training.max_steps=1",
    "--training.per_device_train_batch_size=1",
    "--training.eval_strategy=no",
    "--training.load_best_model_at_end=false",
    "--training.disable_tqdm=true",
    "--training.use_cpu=true",
]
SMALL_EVALUATION = ["--limit=1", "--max-new-tokens=2"]
SMALL_TARGET = "--layers=4 --hidden=64 --vocab=64 --tokens=8 --texts=2"
SMALL_STEP = (
    "--length=64 --batch=1 --hidden=64 --intermediate=64 --target-layers=4 --heads=1 --key-heads=1 "
    "--vocabulary=64 --repeats=1"
)
# Options added to a module's command, or replacing its own: the last occurrence counts.
SMALLER = {
    "pipedraft.train": SMALL_TRAINING,
    "pipedraft.train.features": SMALL_TRAINING,
    TARGETS: SMALL_TARGETS,
    "pipedraft.inference": ["--max-new-tokens=4"],
    "pipedraft.inference.demo": ["--max-new-tokens=4", "--repeats=1"],
    "pipedraft.eval": ["--benchmarks=gsm8k", *SMALL_EVALUATION, "--fresh"],
    "pipedraft.data_recipes": [SOURCES, "--tokenizer=assets/target", "--data.decontaminate=[]"],
    "assets/train/prompts.py": ["--functions=0"],  # searches the whole library
    "pipedraft.data_recipes.regenerate": ["--max-tokens=4", "--batch=4"],
    "benchmarks/spd_step.py": f"{SMALL_STEP} --n=2 --num-layers=1".split(),
    "benchmarks/eagle3_step.py": f"{SMALL_STEP} --steps=2".split(),
    "benchmarks/retention.py": SMALL_EVALUATION,
    "benchmarks/scaling.py": ["--tokens=20"],
    "benchmarks/edge/draft_length.py": [
        "--seeds=2",
        "--tokens=20",
        "--traces",
        "assets/net_traces",
    ],
    "benchmarks/pipeline_step.py": [*SMALL_TARGET.split(), "--first=1"],
}
EVALUATIONS = ("out/eval", "out/other", "out/real/table")
"""Results read by pages, but written by none."""
# Stand-ins for files outside the repository.
STAND_INS = {
    "hub:": "assets/eval",
    "PATH/stories260K": "assets/target",
    "configs/sizes/qwen3_8b": "assets/target",
    "assets/heads/smollm2_spd_n4": "assets/heads/spd_n4",
    "assets/heads/smollm2_spd_n8": "assets/heads/eagle3",  # any other head than n4's
    "assets/heads/smollm2_eagle3": "assets/heads/eagle3",
    "out/deep/target": "assets/target",
    "out/deep/head": "assets/heads/eagle3",
}
HUB_TARGETS = {
    "out/smollm2": "assets/target",
    "Qwen/Qwen3-0.6B": "assets/target",
    "Qwen/Qwen3-8B": "assets/target",
    "Qwen/Qwen3.5-4B": "random_target",
    "Qwen/Qwen3.5-9B": "random_target",
    "meta-llama/Llama-3.1-8B-Instruct": "random_target",
}
"""Folders under these names: the embedded target, or 32 layers with random weights."""


def after(words: list[str], option: str, default: str = "") -> str:
    return words[words.index(option) + 1] if option in words else default


def output_of(words: list[str]) -> str:
    """Return a training command's output folder."""
    own = yaml.safe_load((REPOSITORY / words[1]).read_text())["output_dir"]
    return after(words, "--output_dir", after(words, "--out", own))


def started_from(words: list[str]) -> list[str]:
    """Return the checkpoints whose weights initialize a training command."""
    return [after(words, "--model.init_from"), after(words, "--init_from")]


def made_by(command: str) -> tuple[str, list[str]]:
    """Split a training command into its module or script, and its own words."""
    words = shlex.split(command)
    return TARGETS if TARGETS in words else "pipedraft.train", words[words.index("--config") :]


def trained() -> dict[str, tuple[str, list[str]]]:
    """Map checkpoints read by commands to the documented training commands."""
    found = {f"out/{name}": made_by(command) for name, command in read_roles().items()}
    for command in COMMANDS:
        words = command.arguments
        if command.page in GENERATED:
            continue
        writes = words[:1] == ["--config"] and "--overfit-one" not in words
        if command.module in TRAINERS and writes:
            found.setdefault(output_of(words), (command.module, words))
    stories = ["--config", "configs/spd/tiny.yaml", "--output_dir", "out/stories"]
    tuned = ["--config", "configs/target/evolve_lora_mild.yaml", "--output_dir", "out/tuned"]
    return found | {"out/stories": ("pipedraft.train", stories), "out/tuned": (TARGETS, tuned)}


def fitted(config: str) -> str:
    """Adapt a configuration (head or table) from SmolLM2 to the embedded target."""
    for name in re.findall(r"assets/heads/\w+", config):
        config = config.replace(name, STAND_INS[name])
    config = re.sub(r"(draft_vocab_size:) \d+", r"\1 60", config)
    layers = r"(?m)^ *(?:boundaries|depth_layers): .*"
    return re.sub(layers, lambda m: re.sub(r"\d+", scaled_layer, m[0]), config)


def scaled_layer(layer: re.Match[str]) -> str:
    """Map a layer of 30 to a layer of 16."""
    return str(int(layer[0]) * 16 // 30)


def make_place(folder: Path) -> None:
    """Make a checkout's files, chats, benchmark files, and stand-ins for targets on the Hub."""
    for name in ("assets", "benchmarks"):
        (folder / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "configs", folder / "configs")
    configs = folder / "configs"
    # for 16 layers and a small vocabulary
    for pattern in ("real/*", "eval/smollm2*", "retention/smollm2*"):
        for config in configs.glob(pattern):
            config.write_text(fitted(config.read_text()))
    sources = re.findall(r"--take ([\w/-]+)=", " ".join(command.text for command in COMMANDS))
    rows = []
    for i in range(30):
        turns = [("user", f"What is {i} plus {i % 7}?"), ("assistant", f"It is {i + i % 7}.")]
        messages = [{"role": role, "content": content} for role, content in 2 * turns]
        rows.append({"messages": messages, "source": sources[i % len(sources)]})
    lines = [json.dumps(row) + "\n" for row in rows]
    contents = {CHATS: lines, "chats.jsonl": lines[:2]}
    contents |= {"data/chat.jsonl": lines, "data/chat_mix.jsonl": lines}
    contents |= {f"data/eval/{name}": [json.dumps(row) + "\n"] for name, row in PROMPTS.items()}
    parts = ("translation", "summarization", "qa", "rag")
    contents["data/eval/spec_bench/question.jsonl"] = [
        json.dumps({"question_id": i, "category": part, "turns": ["And then?"]}) + "\n"
        for i, part in enumerate(parts)
    ]
    contents["stories.jsonl"] = [json.dumps({"prompt": "Once upon a time"}) + "\n"]
    for name, texts in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(texts))
    random_target = folder / "random_target"
    tiny_llama(layers=32, vocab=8192).save_pretrained(random_target)
    AutoTokenizer.from_pretrained(REPOSITORY / "assets" / "target").save_pretrained(random_target)
    for name, stand_in in HUB_TARGETS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / stand_in)


def override(words: list[str], options: list[str]) -> list[str]:
    """Override options in the words with these, each --NAME=VALUE."""
    kept = list(words)
    for option in options:
        name, equals, _ = option.partition("=")
        if equals and name in kept:
            at = kept.index(name)
            del kept[at : at + 2]
    return [*kept, *options]


def adapted(words: list[str]) -> list[str]:
    if "configs/eagle/eagle3_" in " ".join(words):
        return [*words, "--model.draft_vocab_size=null"]  # the tokenizer has 8,192 tokens
    if words[:2] == ["--plan", "configs/spd/qwen3_5_4b_n4.yaml"]:
        return [*words, "--model.num_layers=1"]  # each layer is traced
    return words


def scaled(command: Command, stand_ins: dict[str, str] = STAND_INS) -> list[str]:
    words = [stand_ins.get(word, word) for word in command.arguments]
    module, first = command.module, (words or [""])[0]
    smaller = SMALLER.get(module, [])
    if module == TABLES:
        smaller = SMALL_EVALUATION
    elif module == "pipedraft.eval" and first != "edge" and not first.startswith("-"):
        smaller = []  # reads an evaluation's files
    elif first == "edge" and module == "pipedraft.eval":
        links = after(words, "--links")
        links = links if links.startswith("rtt") else links.split(",")[0]
        smaller = ["--benchmarks=gsm8k", *SMALL_EVALUATION, f"--links={links}"]
    elif "--lengths" in words:
        smaller = [*smaller, "--lengths=64"]
    elif "--server" in words and first == "--data":
        smaller = []
    return override(adapted(words), smaller)


def folders_of(words: list[str]) -> list[str]:
    """Return files and folders named by a command or its configuration."""
    first = (words or [""])[0]
    if first.endswith(".yaml"):
        return re.findall(r"out/\w+(?:/\w+)?", " ".join([*words, Path(first).read_text()]))
    if first in (tables := table_files()):
        text = tables[first].read_text()
        used = [name for name in read_roles() if re.search(rf"\b{name}\b", text)]
        return [f"out/{name}" for name in used]
    return words


def clear_output(command: Command, words: list[str]) -> None:
    """Delete a command's output folder: one left by another page would be found or continued."""
    if words[:1] == ["push"]:
        shutil.rmtree("out/upload", ignore_errors=True)
    if command.module in TRAINERS:
        output = output_of(words) if words[0] == "--config" else ""
    else:
        output = after(words, "--out")
    if output and command.module not in ("pipedraft.eval", TABLES):
        shutil.rmtree(output, ignore_errors=True)
        for path in (Path(output), Path(output).with_suffix(".sqlite")):  # answers
            path.unlink(missing_ok=True)


def measure_here(*options: str) -> dict[str, Any]:
    """Run ``measurement.measure_apart`` in this process: a new one would import torch first."""
    with redirect_stdout(io.StringIO()) as said:
        run_module(sys.argv[0], [*sys.argv[1:], *options])
    return json.loads(said.getvalue())


def failures_of(commands: list[Command], page: str, run: Callable[[Command], None]) -> list[str]:
    """Run a page's commands and return all failures at once."""
    failures = []
    for command in commands:
        if command.page == page:
            try:
                run(command)
            except (Exception, SystemExit) as error:
                failures.append(f"{command}\n    {type(error).__name__}: {error}")
    return failures


class Reader:
    """Reader running commands one after the other in this process.

    A command repeated on another page runs once.
    """

    def __init__(self, folder: Path, is_whole: bool = False) -> None:
        """Make the folder. ``is_whole``: commands start real processes, as for a reader."""
        make_place(folder)
        self.folder, self.is_whole, self.checkpoints = folder, is_whole, trained()
        self.stand_ins = dict(STAND_INS)
        self._done: set[str] = set()

    def make_what_it_reads(self, words: list[str]) -> None:
        """Train the checkpoints named by a command, with the documented commands."""
        for word in folders_of(words):
            for folder, (module, made_by) in self.checkpoints.items():
                if (word == folder or word.startswith(folder + "/")) and not Path(folder).exists():
                    self.make_what_it_reads(started_from(made_by))
                    AcceleratorState._reset_state(reset_partial_state=True)  # from the run before
                    smaller = [*SMALLER[module], *NO_FEATURES.get(module, [])]
                    run_module(module, override(adapted(made_by), smaller))
            if word in EVALUATIONS and word != after(words, "--out") and not Path(word).exists():
                self.evaluate("out/spd", word)
            if word == "out/cost.json" and not Path(word).exists():
                Path(word).write_text(json.dumps({"row": 0.01, "link": 0.02}, indent=2))
        checkpoint = after(words, "--checkpoint")
        if "--results" in words and checkpoint in self.checkpoints:  # another page may train it
            self.evaluate(checkpoint, str(Path(after(words, "--results")).parent))

    def evaluate(self, checkpoint: str, out: str) -> None:
        self.make_what_it_reads([checkpoint])
        options = ["--checkpoint", checkpoint, "--out", out, *SMALLER["pipedraft.eval"]]
        run_module("pipedraft.eval", options)

    def run(self, command: Command) -> None:
        """Run a command in ``folder``, the current one."""
        words = scaled(command, self.stand_ins)
        key = " ".join([command.module, *words])
        if key in self._done:
            return
        AcceleratorState._reset_state(reset_partial_state=True)  # from the run before
        clear_output(command, words)
        is_training = command.module in TRAINERS
        self.make_what_it_reads(started_from(words) if is_training else words)
        code, said = 0, io.StringIO()
        try:
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
                if not self.is_whole:
                    patch.setattr(measurement, "measure_apart", measure_here)
                run_module(command.module, words)
        except SystemExit as stop:
            code = stop.code or 0
        assert code == 0, code
        if command.module.startswith("benchmarks/") and "/papers/" not in command.module:
            assert json.loads(said.getvalue().splitlines()[-1]), said.getvalue()[-300:]
        self._done.add(key)
