"""`pipedraft new`: a recipe that its parser reads, and commands that run."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from command_runs import assert_one_line, call
from doc_commands import check, make_command
from tiny_models import REPOSITORY, tiny_qwen3, write_rows
from transformers import AutoTokenizer, BertConfig, LlamaConfig

from pipedraft.data_recipes.config import Source
from pipedraft.endings import needed
from pipedraft.errors import UsageError
from pipedraft.train.config import check_run, parse_run
from pipedraft.train.help import METHODS
from pipedraft.train.methods import methods
from pipedraft.train.new.commands import Work, duration
from pipedraft.train.new.machine import Machine
from pipedraft.train.new.planning import answering, fit, values_of
from pipedraft.train.new.recipe import (
    SIZES,
    WHY,
    Chosen,
    copied_values,
    make_recipe,
    nearest_size,
    page_of,
    shipped,
    text_of,
)
from pipedraft.train.new.rows import Limits, given_answers, measure_rows
from pipedraft.train.plan import Plan, RunSizes

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {i} plus 1?"}]}
    | ({"id": i} if i % 2 else {"source": "sums"})
    for i in range(40)
]


@pytest.fixture(scope="module")
def qwen3(world, tmp_path_factory) -> Path:
    """A random Qwen3 target with the world's tokenizer."""
    folder = tmp_path_factory.mktemp("qwen3") / "qwen3"
    shutil.copytree(world.target, folder)
    tiny_qwen3(layers=8, vocab=len(AutoTokenizer.from_pretrained(folder))).save_pretrained(folder)
    return folder


@pytest.fixture
def chats(tmp_path) -> str:
    return write_rows(tmp_path / "chats.jsonl", *ROWS)


def new(monkeypatch, capfd, *words: object) -> list[str]:
    """Run the command and return what it prints."""
    assert call("new", [str(word) for word in words], monkeypatch) == 0, capfd.readouterr().err
    return capfd.readouterr().out.splitlines()


def commands(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if line.startswith("    ")]


def check_parses(recipe: Path, lines: list[str], monkeypatch) -> None:
    """Let the trainer read the recipe, and each printed command's parser its command."""
    run, model, _ = parse_run(["--config", str(recipe)], methods(), "")
    assert type(model) is methods()[run.method]
    assert len(commands(lines)) == 3
    monkeypatch.chdir(REPOSITORY)
    for text in commands(lines):
        check(make_command("printed", 1, text))
        assert text in recipe.read_text()  # the recipe's head has them, too


@pytest.mark.parametrize(
    "method",
    [m if m == "eagle3" else pytest.param(m, marks=pytest.mark.all) for m in METHODS],
)
def test_the_recipe_and_the_commands_are_read_by_their_own_parsers(
    method, qwen3, chats, tmp_path, monkeypatch, capfd
):
    recipe = tmp_path / "own" / "mine.yaml"
    words = [qwen3, "--data", chats, "--method", method, "--out", recipe]
    lines = new(monkeypatch, capfd, *words)
    check_parses(recipe, lines, monkeypatch)
    run, _, _ = parse_run(["--config", str(recipe)], methods(), "")
    assert run.data.sources[0].path == str(tmp_path / "own" / "mine_answers.jsonl")
    assert (run.method, run.target, run.output_dir) == (method, str(qwen3), recipe.with_suffix(""))
    assert [line.split()[1] for line in commands(lines)] == ["data", "train", "eval"]
    answers = tmp_path / "own" / "mine_answers.jsonl"
    missing = f"{str(answers)!r} does not exist", ["--config", str(recipe)]
    assert needed(*missing) == f"; this makes it: {commands(lines)[0]}"
    answers.touch()
    assert needed(*missing) == ""


def test_values_are_those_of_the_shipped_configuration_for_this_size(
    chats, tmp_path, monkeypatch, capfd
):
    recipe = tmp_path / "mine.yaml"
    monkeypatch.chdir(REPOSITORY)
    lines = new(monkeypatch, capfd, "assets/target", "--data", chats, "--out", recipe)
    check_parses(recipe, lines, monkeypatch)
    own, tiny = (yaml.safe_load(x.read_text()) for x in (recipe, REPOSITORY / TINY))
    for key in ("method", "optim", "batch_tokens", "evaluation", "save_every_steps"):
        assert own[key] == tiny[key]
    assert own["data"]["max_length"] == tiny["data"]["max_length"]
    assert own["epochs"] == 4.0  # the shipped one counts steps of its own data
    assert lines[0].startswith("target: assets/target, 7,084,224 parameters")


TINY = "configs/eagle/tiny_eagle3.yaml"


@pytest.mark.skipif(not (REPOSITORY / "out/smollm2").exists(), reason="`make real` makes it")
def test_smollm2_gets_its_own_recipe(chats, tmp_path, monkeypatch, capfd):
    recipe = tmp_path / "mine.yaml"
    monkeypatch.chdir(REPOSITORY)
    lines = new(monkeypatch, capfd, "out/smollm2", "--data", chats, "--out", recipe)
    check_parses(recipe, lines, monkeypatch)
    own = yaml.safe_load(recipe.read_text())
    assert own["model"] == shipped("real/smollm2_eagle3")["model"]


@pytest.mark.all
def test_an_8b_configuration_gets_a_launch_on_eight_gpus(chats, tmp_path, monkeypatch, capfd):
    recipe = tmp_path / "mine.yaml"
    monkeypatch.chdir(REPOSITORY)
    lines = new(monkeypatch, capfd, "configs/sizes/qwen3_8b", "--data", chats, "--out", recipe)
    check_parses(recipe, lines, monkeypatch)
    launch = "accelerate launch --config_file configs/accelerate/ddp.yaml --num_processes 8"
    assert commands(lines)[1] == f"{launch} -m pipedraft.train --config {recipe}"
    assert lines[1] == "machine: 8 x GPU like an H100, 80 GB, 989 TFLOPS"
    assert any(line.startswith("note: configs/sizes/qwen3_8b has no weights") for line in lines)
    own, like = yaml.safe_load(recipe.read_text()), shipped("eagle/eagle3_qwen3_8b")
    for key in ("model", "optim", "batch_tokens", "epochs", "precision", "evaluation"):
        assert own[key] == like[key]
    assert own["data"]["max_length"] == like["data"]["max_length"]


# -- the parts ----------------------------------------------------------------------------------


def test_every_copied_value_is_known_to_the_trainer_and_every_comment_has_a_page():
    for size in SIZES:
        for method in METHODS:
            recipe = make_recipe(size, method, None, vocab_size=10**6)
            assert {key: entry.value for key, entry in recipe.items()} == copied_values(
                size, method
            )
            base = {"method": Chosen(method), "target": Chosen("x"), "output_dir": Chosen("y")}
            base["data.sources"] = Chosen([{"path": "z"}])
            text = text_of(base | recipe, "two\nlines")
            assert text.startswith("# two\n# lines\nmethod: ")
            values = yaml.safe_load(text)
            assert values == values_of(base | recipe)
            check_run(values, methods())
            assert all("docs/" in chosen.why or key in WHY for key, chosen in recipe.items())
            assert (REPOSITORY / page_of(method)).is_file()
    for page in re.findall(r"docs/[\w/]+\.md", " ".join(WHY.values())):
        assert (REPOSITORY / page).is_file()


def test_the_nearest_size_is_nearest_by_ratio():
    parameters = (1e6, 3e7, 3.3e7, 1.35e8, 2.8e8, 2.9e8, 8e9, 7e10)
    found = [SIZES.index(nearest_size(number)) for number in parameters]
    assert found == [0, 0, 1, 1, 1, 2, 2, 2]


def test_a_recipe_takes_what_saves_memory_in_order(qwen3, monkeypatch):
    # Every fit would measure the same passes again.
    sizes, measure = dict[tuple[int, bool], RunSizes](), Plan.measure

    def once(plan: Plan) -> RunSizes:
        key = plan.run.batch_tokens, plan.run.checkpointing
        sizes[key] = sizes.get(key) or measure(plan)
        return sizes[key]

    monkeypatch.setattr(Plan, "measure", once)
    recipe = {"method": Chosen("eagle3"), "target": Chosen(str(qwen3)), "output_dir": Chosen("x")}
    recipe |= {"data.sources": Chosen([{"path": "x"}]), "precision": Chosen("bf16")}
    recipe |= make_recipe(SIZES[0], "eagle3", None, vocab_size=300)
    recipe |= {"model.num_steps": Chosen(1), "batch_tokens": Chosen(1024)}
    machine = Machine("two", 2, 1e12, True, 1e12, 1e12, 1e12)
    found, settings = fit(recipe, machine), list[dict[str, object]]()
    while True:
        settings.append({key: entry.value for key, entry in found.recipe.items()})
        # Room for all but the last byte of the one before.
        machine = replace(machine, memory=(found.bytes - 1) / 0.9)
        try:
            found = fit(recipe, machine)
        except UsageError as error:
            assert re.match(r"--gpus: 2 \(two\): a process needs at least", str(error))
            break
    assert "checkpointing" not in settings[0] and settings[0]["batch_tokens"] == 1024
    assert settings[-1]["checkpointing"] and settings[-1]["shard_target"]
    assert (settings[-1]["batch_tokens"], settings[-1]["accumulation"]) == (512, 2)
    assert len(settings) > 2


def test_rows_are_counted_by_the_targets_tokenizer(qwen3, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    answer = {"role": "assistant", "content": "It is 3."}
    rows = [{"messages": [*row["messages"], answer]} for row in ROWS]
    source = Source(path=write_rows(tmp_path / "rows.jsonl", *rows, {"messages": []}))
    length = len(tokenizer("It is 3.", add_special_tokens=False).input_ids)
    found = measure_rows(source, tokenizer, Limits(answer=100, row=500))
    assert (found.num_answers, found.answers, found.is_bound) == (1, length, False)
    assert list(found.left_out.values()) == [1]
    whole = [
        len(tokenizer.apply_chat_template(row["messages"], tokenize=True)["input_ids"])
        for row in rows
    ]
    assert found.row == pytest.approx(sum(whole) / len(whole))
    cut = measure_rows(source, tokenizer, Limits(answer=2, row=500))
    assert cut.answers == 2 and found.row - cut.row == pytest.approx(length - 2)


def test_answers_that_a_file_lacks_count_with_their_limit(qwen3, tmp_path):
    turns = [*ROWS[0]["messages"], {"role": "assistant", "content": "1."}, ROWS[1]["messages"][0]]
    rows = [{"messages": turns}, {"prompt": "Hello"}]
    source = Source(path=write_rows(tmp_path / "rows.jsonl", *rows))
    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    found = measure_rows(source, tokenizer, Limits(answer=50, row=500))
    length = len(tokenizer("1.", add_special_tokens=False).input_ids)
    assert found.is_bound and found.num_answers == 1.5
    assert found.answers == (length + 50 + 50) / 2
    without = measure_rows(source, None, Limits(answer=50, row=500))
    assert (without.answers, without.row, without.is_bound) == (75, 500, True)


def test_a_call_before_its_result_is_no_answer():
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "content": "Rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    assert given_answers(json.dumps({"messages": turns})) == ["It rains."]
    alpaca = {"instruction": "Add", "input": "1 1", "output": "2"}
    assert given_answers(json.dumps(alpaca)) == ["2"]
    assert given_answers('{"prompt": "Hi"}') == []


def test_times_are_said_in_minutes_or_hours():
    assert [duration(x) for x in (1, 61, 3600, 5e4)] == [
        "1 minute",
        "2 minutes",
        "1.0 hours",
        "13.9 hours",
    ]


# -- bad input ----------------------------------------------------------------------------------


CASES: list[tuple[list[str], list[str]]] = [
    (["{qwen3}"], ["--data", "missing"]),
    (["{qwen3}", "--data", "nosuch.jsonl"], ["--data: no file nosuch.jsonl"]),
    (["{qwen3}", "--data", "{chats}", "--method", "eagel3"], ["--method", "did you mean 'eagle3'"]),
    (["{qwen3}", "--data", "{chats}", "--out", "{old}.yaml"], ["--out", "old.yaml' exists"]),
    (["{qwen3}", "--data", "{chats}", "--out", "{old}"], ["--out", "does not end in .yaml"]),
    (["{qwen3}", "--data", "{chats}", "--stages", "2"], ["--stages: 2", "leave it out"]),
    (
        ["{qwen3}", "--data", "{chats}", "--method", "spd", "--stages", "9"],
        ["--stages: 9", "choose 1 to 8"],
    ),
    (["{qwen3}", "--data", "{chats}", "--gpus", "-1"], ["--gpus: -1", "at least 0"]),
    (
        ["{qwen3}", "--data", "{chats}", "--gpus", "0", "--gpu-memory", "9"],
        ["--gpu-memory: 9.0 with --gpus 0"],
    ),
    (
        ["{qwen3}", "--data", "{chats}", "--gpus", "1", "--gpu-memory", "0.0001"],
        ["--gpus: 1", "a process needs at least", "--gpu-memory"],
    ),
    (["no/such/folder", "--data", "{chats}"], ["target: no folder 'no/such/folder'"]),
    (["{bert}", "--data", "{chats}"], ["target", "(bert)", "see docs/targets.md"]),
    (["{empty}", "--data", "{chats}"], ["target", "empty", "config.json"]),
    (["{base}", "--data", "{chats}"], ["target", "no chat template"]),
    (["{quantized}", "--data", "{chats}"], ["target", "stored quantized"]),
    (["{pickled}", "--data", "{chats}"], ["target", "pickled", "safetensors"]),
    (["{qwen3}", "--data", "{bad}"], ["--data", "2 times: no turns", "see docs/data.md"]),
]


@pytest.fixture(scope="module")
def place(qwen3, tmp_path_factory) -> Path:
    """Targets and files of the cases."""
    folder = tmp_path_factory.mktemp("bad")
    write_rows(folder / "chats", *ROWS)
    write_rows(folder / "bad", {"messages": []}, {"messages": []}, {"text": "?"})
    for name in ("chats", "bad"):
        (folder / name).rename(folder / f"{name}.jsonl")
    (folder / "old.yaml").write_text("")
    (folder / "empty").mkdir()
    for name in ("base", "quantized", "pickled", "qwen3"):
        shutil.copytree(qwen3, folder / name)
    (folder / "base" / "chat_template.jinja").unlink()
    LlamaConfig(quantization_config={"quant_method": "gptq"}).save_pretrained(folder / "quantized")
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")
    BertConfig().save_pretrained(folder / "bert")
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[0])[:50])
def test_bad_input_is_one_line_and_writes_nothing(case, place, monkeypatch, capfd):
    words, said = case
    files = {"chats": place / "chats.jsonl", "bad": place / "bad.jsonl"}
    monkeypatch.chdir(place)
    filled = [
        re.sub(r"\{(\w+)\}", lambda found: str(files.get(found[1], place / found[1])), word)
        for word in words
    ]
    status = call("new", filled, monkeypatch)
    captured = capfd.readouterr()
    # Before a plan is refused, the target and the machine are printed.
    out = re.sub(r"\Atarget: .*\nmachine: .*\n", "", captured.out)
    assert_one_line(status, out, captured.err, said)
    assert not list(place.glob("out/*.yaml"))


# -- the commands run ----------------------------------------------------------------------------


@pytest.mark.all
def test_the_three_commands_run_on_the_embedded_target(tmp_path):
    (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    write_rows(tmp_path / "chats.jsonl", *ROWS)

    def run(command: str, *words: str) -> str:
        first, *rest = command.split()
        assert first == "pipedraft"
        done = subprocess.run(
            [sys.executable, "-m", "pipedraft", *rest, *words],
            cwd=tmp_path,
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run("pipedraft new assets/target --data chats.jsonl --out out/mine.yaml")
    answer, train, evaluate = commands(said.splitlines())
    assert "40 rows answered, 0 failed" in run(answer, "--max-tokens", "8")
    run(train, "--max-steps", "2", "--evaluation.max_rows", "2", "--evaluation.decode_prompts", "1")
    table = run(evaluate, "--limit", "1", "--max-new-tokens", "4")
    assert "eagle3" in table and (tmp_path / "out/mine_eval/results.json").is_file()
    assert (tmp_path / "out/mine/best/model.safetensors").is_file()


def test_the_longest_conversation_ends_alone_and_long_answers_have_their_time():
    seconds = {4: 0.4, 1: 0.1}
    lengths = SimpleNamespace(
        num_answers=2.0, answers=20.0, most_turns=5, most_answers=90, row=20.0, is_bound=False
    )
    work = SimpleNamespace(
        size=SimpleNamespace(answer_batch=4, max_answer=50),
        lengths=lengths,
        num_rows=8,
        pass_s=seconds.__getitem__,
        token_flops=0.0,
        answer_flops=1.0,
    )
    # 8 rows of 20 tokens are 40 passes of 4; the longest row needs 50 more, alone.
    assert Work.answer_s(work) == pytest.approx(40 * 0.4 + 50 * 0.1)
    # 8 rows of 2 answers of 50 tokens are 200 passes; 5 answers of 50 need 50 more.
    assert Work.answer_s(work, longest=True) == pytest.approx(200 * 0.4 + 50 * 0.1)
    work.answer_s = partial(Work.answer_s, work)
    text = answering(work)
    assert text.startswith("about 1 minute if") and text.endswith(
        "2 minutes if all answers have 50 tokens"
    )
    lengths.is_bound = True
    assert answering(work) == "at most 2 minutes"
