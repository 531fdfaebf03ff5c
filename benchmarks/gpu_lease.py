"""Use a short loan of one GPU to measure, to generate text and to train the heads that ship.

    python benchmarks/gpu_lease.py prepare --target DIR --prompts FILE.jsonl --out LEASE
    python benchmarks/gpu_lease.py measure --sizes LEASE/sizes --out OUT
    python benchmarks/gpu_lease.py generate --target DIR --prompts LEASE/prompts.safetensors \
        --seconds 120 --out OUT
    python benchmarks/gpu_lease.py trials --target DIR --data OUT --seconds 75 --out OUT
    python benchmarks/gpu_lease.py heads --target DIR --data OUT --seconds 240 --out OUT
    python benchmarks/gpu_lease.py rows --target DIR --prompts FILE.jsonl \
        --self-made FILE.safetensors --out OUT

``prepare`` runs on any machine before the loan. The other commands run on the GPU, and write JSON,
token rows and heads. Commands with --seconds end after that time. For a small model, a training
step is mostly launches and Python, so ``generate``, ``trials`` and ``heads`` run several processes
on one device. ``trials`` and ``heads`` skip heads that are already trained. ``rows`` writes what
``heads`` reads from conversations with answers, instead of ``generate``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from measurement import make_parser
from safetensors import safe_open
from safetensors.torch import save_file

from pipedraft.data_recipes.card import DataReport
from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.data_recipes.rows import SEQUENCES
from pipedraft.data_recipes.table import Rows

SMOLLM2_LISTED = {
    "spd_n4": "[[7], [14], [22], [22, 30]]",
    "spd_n8": "[[2], [6], [6], [14], [14], [22], [22], [30]]",
}
"""Hidden states per depth: only a few distinct ones, so depths share projections and a head stays
small."""

MIN_STEPS = 3
"""Steps before a run's length is estimated."""
COMMON = ["--optim.name", "muon", "--optim.lr", "3e-3", "--max_steps", "1000000"]


@dataclass(frozen=True)
class Head:
    """One training run, given by a configuration file and options that change it."""

    config: str
    options: tuple[str, ...] = ()
    labels: str = "all"
    tokens: int = 32768
    """Tokens per step."""


RIDGE = ("--model.start", "ridge")
N4 = "configs/real/smollm2_spd_n4.yaml"
N8 = "configs/real/smollm2_spd_n8.yaml"
TRIALS = {
    "base": Head(N4, labels="assistant", tokens=8192),
    "ridge": Head(N4, RIDGE, labels="assistant", tokens=8192),
    "all_rows": Head(N4, RIDGE, tokens=8192),
    "two_fills": Head(N4, (*RIDGE, "--model.fills", "2"), tokens=8192),
    "four_layers": Head(N4, (*RIDGE, "--model.num_layers", "4"), tokens=8192),
    "query_all": Head(N4, (*RIDGE, "--model.query", "all"), tokens=8192),
    "anchors": Head(
        N4,
        (
            *RIDGE,
            "--model.features",
            "anchors",
            "--model.anchors",
            "[7, 14, 22, 30]",
            "--model.depth_layers",
            "[]",
        ),
        tokens=8192,
    ),
    "few_states": Head(N4, (*RIDGE, "--model.depth_layers", SMOLLM2_LISTED["spd_n4"]), tokens=8192),
}
HEADS = {
    "spd_n4": Head(N4, (*RIDGE, "--model.depth_layers", SMOLLM2_LISTED["spd_n4"])),
    "spd_n8": Head(N8, (*RIDGE, "--model.depth_layers", SMOLLM2_LISTED["spd_n8"])),
    "spd_n4_all": Head(
        N4,
        (*RIDGE, "--model.depth_layers", SMOLLM2_LISTED["spd_n4"], "--model.query", "all"),
    ),
    "eagle3": Head("configs/real/smollm2_eagle3.yaml", ("--optim.lr", "2e-3")),
}


# -- token rows ------------------------------------------------------------------------------
#
# Conversations as token ids in one safetensors file: no text, no tokenizer, read into memory.
# Tensors: `ids` (uint16 or int32 [tokens], all rows joined), `ends` (int64 [rows], end offset per
# row) and `prompt` (int32 [rows], tokens before the answer, excluded from the loss).


def token_rows(ids: Sequence[np.ndarray], prompt_lengths: Sequence[int]) -> Rows:
    """Return rows of token ids with their loss masks.

    Args:
        ids: token ids of each row.
        prompt_lengths: prompt tokens of each row. Prompts and first tokens are no labels.
    """
    masks = [
        (np.arange(len(row)) >= max(1, length)).astype(np.int8)
        for row, length in zip(ids, prompt_lengths, strict=True)
    ]
    columns = {"input_ids": ids, "loss_mask": masks}
    schema = pyarrow.schema({name: SEQUENCES[name] for name in columns})
    return Rows([pyarrow.RecordBatch.from_pydict(columns, schema=schema)])


def write_token_rows(path: Path, ids: Sequence[np.ndarray], prompt_lengths: Sequence[int]) -> None:
    """Write token rows, as uint16 if all ids fit, which halves the file."""
    flat = np.concatenate(ids)
    fits = flat.max() < 2**16
    tensors = {
        "ids": torch.from_numpy(flat.astype(np.uint16 if fits else np.int32)),
        "ends": torch.from_numpy(np.cumsum([len(row) for row in ids])),
        "prompt": torch.tensor(prompt_lengths, dtype=torch.int32),
    }
    save_file(tensors, path)


def read_token_rows(path: Path) -> tuple[list[np.ndarray], list[int]]:
    """Return a file's rows as int32 arrays, and each row's prompt length.

    Raises:
        ValueError: the tensors are missing or do not fit together.
    """
    with safe_open(path, "pt") as file:
        missing = {"ids", "ends", "prompt"} - set(file.keys())
        if missing:
            raise ValueError(f"{path}: no tensor {sorted(missing)[0]!r}; not a file of token rows")
        flat = file.get_tensor("ids").to(torch.int32).numpy()
        ends, prompt = file.get_tensor("ends").numpy(), file.get_tensor("prompt").tolist()
    if (
        len(ends) != len(prompt)
        or not len(ends)
        or ends[-1] != len(flat)
        or (np.diff(ends) < 1).any()
    ):
        raise ValueError(f"{path}: 'ends' does not cut 'ids' into rows; write the file again")
    return np.split(flat, ends[:-1]), prompt


def token_data(
    ids: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
    *,
    num_valid: int,
    max_length: int,
    labels: str = "assistant",
    min_answer: int = 8,
) -> TokenizedData:
    """Return training and validation rows. The first ``num_valid`` rows are held out.

    Args:
        labels: "assistant" makes only answers labels, "all" also the prompts in training rows. The
            prompts in validation rows are never labels.
        min_answer: minimum answer tokens. Rows with fewer are dropped.
    """
    cut = [(row[:max_length], n) for row, n in zip(ids, prompt_lengths, strict=True)]
    kept = [(row, n) for row, n in cut if len(row) - n >= min_answer]
    valid, train = kept[:num_valid], kept[num_valid:]
    prompts_of_train = [1 if labels == "all" else n for _, n in train]
    train_rows = token_rows([row for row, _ in train], prompts_of_train)
    valid_rows = token_rows([row for row, _ in valid], [n for _, n in valid])
    lengths = np.array([len(row) for row, _ in kept])
    p50, p90, p99, longest = (int(np.percentile(lengths, q)) for q in (50, 90, 99, 100))
    tokens = int(lengths.sum())
    report = DataReport(
        rows_read=len(ids),
        rows_kept=len(kept),
        bad_rows={},
        empty_mask_rows=len(cut) - len(kept),
        truncated_rows=sum(len(row) > max_length for row in ids),
        missing_turns=0,
        tokens=tokens,
        supervised_tokens=sum(int(mask.sum()) for _, mask in train_rows.pieces("loss_mask")),
        length_p50=p50,
        length_p90=p90,
        length_p99=p99,
        length_max=longest,
        sources={"own": {"rows_read": len(ids), "rows_kept": len(kept), "tokens": tokens}},
        licenses={"unknown": len(kept)},
    )
    report.train_rows, report.valid_rows = len(train), len(valid)
    return TokenizedData(train=train_rows, valid=valid_rows, report=report)


# -- prepare ----------------------------------------------------------------------------------


def prepare(options: argparse.Namespace) -> None:
    """Tokenize the prompts, and copy the target's configuration for models with random weights."""
    from pipedraft.pretrained import load_tokenizer

    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = load_tokenizer(options.target, field="--target")
    user, assistant = turn_markers(tokenizer)
    rows = []
    for line in options.prompts.open():
        message = {"role": "user", "content": json.loads(line)["prompt"]}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) <= options.longest:
            rows.append(np.array(ids, np.int32))
    write_token_rows(options.out / "prompts.safetensors", rows, [len(row) for row in rows])
    notes = {"user": user, "assistant": assistant, "ends": [int(tokenizer.eos_token_id)]}
    (options.out / "turns.json").write_text(json.dumps(notes))
    (options.out / "sizes").mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(Path(options.target) / name, options.out / "sizes" / name)
    print(len(rows), "prompts,", sum(map(len, rows)), "tokens;", notes)


def turn_markers(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return token ids before a user's first turn, and between its end token and the answer."""
    message = {"role": "user", "content": "CONTENT"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, _, after = text.partition("CONTENT")
    bridge = after.split(tokenizer.eos_token, 1)[-1]
    user, assistant = (
        tokenizer(part, add_special_tokens=False).input_ids for part in (before, bridge)
    )
    return user, assistant


# -- measure ----------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    """Measure tokens per second for bulk sampling with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipedraft.data_recipes.bulk import Opening, sample_rows

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = AutoConfig.from_pretrained(options.sizes)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    found: dict[str, Any] = {"device": str(device), "torch": torch.__version__}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name()
    generator = torch.Generator(device).manual_seed(0)
    for rows in options.rows:
        openings = [Opening(tuple(range(5, 25)))] * rows
        for length in (24, 24 + options.steps):  # the first warms up
            begin = time.monotonic()
            sample_rows(
                model, openings, assistant=[5], ends=[], max_length=length, generator=generator
            )
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.monotonic() - begin
        name = f"{rows} rows, tokens/s"
        found[name] = round(rows * (length - 1) / seconds)
        print(name, found[name], flush=True)
    if device.type == "cuda":
        found["peak GB, sampling"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    print(json.dumps(found), flush=True)
    write(options.out / "measure.json", found)
    if options.random_target is not None:
        write_random(model, config.vocab_size, options.random_target)


def write_random(model: Any, vocab_size: int, folder: Path) -> None:
    """Store the random target and random rows, to rehearse training."""
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    lengths = rng.integers(60, 448, 3000)
    rows = [rng.integers(5, vocab_size, length).astype(np.int32) for length in lengths]
    write_token_rows(folder / "rows.safetensors", rows, [30] * len(rows))


# -- generate ---------------------------------------------------------------------------------


def generate(options: argparse.Namespace) -> None:
    """Sample conversations in several processes until time is up, and join the processes' rows."""
    begin = time.monotonic()
    folder = options.out / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for worker in range(options.workers):
        arguments = ["generate-part", "--target", options.target, "--out", str(folder)]
        arguments += ["--prompts", str(options.prompts), "--seconds", str(options.seconds)]
        arguments += ["--rows", str(options.rows), "--length", str(options.length)]
        arguments += ["--seed", str(options.seed)]
        children.append(start([*arguments, "--worker", str(worker), "--of", str(options.workers)]))
    wait(children)
    join(folder, options.out, time.monotonic() - begin)


def generate_part(options: argparse.Namespace) -> None:
    from pipedraft.data_recipes.bulk import Opening, repeats_itself, sample_rows
    from pipedraft.data_recipes.local import load_on

    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_on(options.target, str(device), str(dtype).removeprefix("torch."))
    turns = json.loads((options.prompts.parent / "turns.json").read_text())
    prompts, _ = read_token_rows(options.prompts)
    mine = prompts[options.worker :: options.of]
    rng = np.random.default_rng(options.seed + options.worker)
    generator = torch.Generator(device).manual_seed(options.seed + options.worker)
    took, number = 0.0, 0
    # Skip a pass that would not end in time.
    while time.monotonic() - begin + took < options.seconds:
        started = time.monotonic()
        openings = []
        for index in range(options.rows):
            if index % 2:
                openings.append(Opening(tuple(turns["user"]), index % 4 == 1, writes_user=True))
            else:
                ids = mine[int(rng.integers(len(mine)))]
                openings.append(Opening(tuple(ids.tolist()), index % 4 == 0))
        openings = [o for o in openings if len(o.ids) < options.length - 16]
        sampled = sample_rows(
            model,
            openings,
            assistant=turns["assistant"],
            ends=turns["ends"],
            max_length=options.length,
            generator=generator,
        )
        good = [
            row
            for row in sampled
            if len(row.ids) - row.answer_start >= 9 and not repeats_itself(row.ids)
        ]
        # "prompt" is negative for self-made rows: known and self-made ones can be told apart.
        marks = [-r.answer_start if r.opening.writes_user else r.answer_start for r in good]
        path = options.out / f"part{options.worker}_{number}.safetensors"
        write_token_rows(path, [row.ids for row in good], marks)
        took, number = time.monotonic() - started, number + 1
        tokens = sum(len(row.ids) for row in sampled)
        line = f"worker {options.worker}: {len(good)} of {len(openings)} rows, {tokens} tokens"
        print(f"{line} in {took:.1f} s: {tokens / took:.0f} tokens/s", flush=True)


def join(folder: Path, out: Path, seconds: float) -> None:
    """Write the rows of all parts into one file, shuffled and without repeated rows."""
    rows: dict[bytes, tuple[np.ndarray, int]] = {}
    for path in sorted(folder.glob("part*.safetensors")):
        for ids, prompt in zip(*read_token_rows(path), strict=True):
            rows.setdefault(ids.tobytes(), (ids, prompt))
    pairs = list(rows.values())
    np.random.default_rng(0).shuffle(pairs)  # type: ignore[arg-type]
    pairs.sort(key=lambda pair: pair[1] < 0)  # known prompts first: held-out rows come from these
    known = sum(pair[1] > 0 for pair in pairs)
    head, rest = pairs[:64], pairs[64:]
    np.random.default_rng(1).shuffle(rest)  # type: ignore[arg-type]
    pairs = [*head, *rest]
    write_token_rows(out / "rows.safetensors", [p[0] for p in pairs], [p[1] for p in pairs])
    tokens = sum(len(pair[0]) for pair in pairs)
    answers = sum(len(pair[0]) - abs(pair[1]) for pair in pairs)
    found = {
        "rows": len(pairs),
        "known": known,
        "tokens": tokens,
        "answer_tokens": answers,
        "seconds": round(seconds, 1),
        "tokens/s": round(tokens / seconds),
    }
    print(json.dumps(found), flush=True)
    write(out / "generate.json", found)


def rows_of_answers(options: argparse.Namespace) -> None:
    """Tokenize answered prompts, add self-made rows, and hold 64 answered ones out."""
    from pipedraft.pretrained import load_tokenizer

    tokenizer: Any = load_tokenizer(options.target, field="--target")
    known = []
    for line in options.prompts.open():
        *turns, answer = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        answer_ids = tokenizer(answer["content"], add_special_tokens=False).input_ids
        whole = [*ids, *answer_ids, tokenizer.eos_token_id][: options.length]
        known.append((np.array(whole, np.int32), len(ids)))
    rng = np.random.default_rng(0)
    rng.shuffle(known)  # type: ignore[arg-type]
    rest = known[64:]
    if options.self_made is not None:
        rest += list(zip(*read_token_rows(options.self_made), strict=True))
    pairs = known[:64] + [rest[index] for index in rng.permutation(len(rest))]
    options.out.mkdir(parents=True, exist_ok=True)
    write_token_rows(options.out / "rows.safetensors", [p[0] for p in pairs], [p[1] for p in pairs])
    print(f"{len(pairs)} rows, {sum(len(ids) for ids, _ in pairs)} tokens")


# -- train ------------------------------------------------------------------------------------


def trials(options: argparse.Namespace) -> None:
    train_together(TRIALS, options)


def heads(options: argparse.Namespace) -> None:
    train_together(HEADS, options)
    for name in HEADS:
        pack(options.out / name / "best", options.out, name)


def train_together(known: dict[str, Head], options: argparse.Namespace) -> None:
    """Train all heads at once, one process each, until time is up, and print the results."""
    names = options.only.split(",") if options.only else list(known)
    children = []
    for name in names:
        if (options.out / name / "best").exists():
            continue
        arguments = ["head", "--name", name, "--target", options.target, "--of", options.part]
        arguments += ["--data", str(options.data), "--seconds", str(options.seconds)]
        arguments += ["--every", str(options.every), "--out", str(options.out / name)]
        children.append(start([*arguments, "--", *options.more]))
    wait(children)
    table = {name: last_metrics(options.out / name / "metrics.jsonl") for name in names}
    write(options.out / f"{options.part}.json", table)
    for name, values in table.items():
        print(name, json.dumps(values), flush=True)


def last_metrics(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        found |= json.loads(line)
    wanted = ("agreement", "acceptance", "loss", "step", "tokens_per_s", "length", "seconds")
    return {k: v for k, v in found.items() if any(part in k for part in wanted)}


def train_head(options: argparse.Namespace) -> None:
    from pipedraft.train.config import RunConfig, parse_run
    from pipedraft.train.methods import methods
    from pipedraft.train.run import build_trainer, train

    spec = {"trials": TRIALS, "heads": HEADS}[options.of][options.name]
    cuda = torch.cuda.is_available()
    dtype = "bf16" if cuda else "fp32"
    tokens = spec.tokens if options.tokens is None else options.tokens
    arguments = ["--config", spec.config, "--target", options.target, *COMMON, *spec.options]
    arguments += ["--batch_tokens", str(tokens), "--output_dir", str(options.out)]
    arguments += ["--target_dtype", dtype, "--precision", dtype, "--packing", "false"]
    arguments += ["--evaluation.every_steps", str(options.every), "--evaluation.max_rows", "64"]
    arguments += ["--save_every_steps", "1000000", "--log_every_steps", "25", *options.more]
    run, model, resolved = parse_run(arguments, methods(), "")

    def load(run: RunConfig, *_: Any) -> TokenizedData:
        ids, marks = read_token_rows(options.data / "rows.safetensors")
        prompt_lengths, longest = [abs(mark) for mark in marks], run.data.max_length
        return token_data(ids, prompt_lengths, num_valid=64, max_length=longest, labels=spec.labels)

    started = time.monotonic()
    trainer = build_trainer(run, model, load)
    print(options.name, f"ready after {time.monotonic() - started:.0f} s", flush=True)
    begin, finish = time.monotonic(), trainer._finish_step

    def finish_in_time(log: Any) -> None:
        """Let the run, and with it the learning rate's decay, end with the seconds."""
        step, share = trainer.progress.step, (time.monotonic() - begin) / options.seconds
        if step >= MIN_STEPS:  # kernels are loaded in the first
            trainer.num_steps = step if share >= 1 else max(step + 1, round(step / share))
        finish(log)

    trainer._finish_step = finish_in_time  # type: ignore[method-assign]
    train(trainer, resolved)
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    line = f"{trainer.progress.step} steps, {trainer.progress.tokens} supervised tokens"
    print(f"{options.name}: {line} in {time.monotonic() - begin:.0f} s, peak {peak:.1f} GB")


def pack(folder: Path, out: Path, name: str) -> None:
    """Store a head's weights in float16, as shipped, in files below 15 MB."""
    from safetensors.torch import load_file, save_file

    if not (folder / "model.safetensors").exists():
        return
    weights = load_file(folder / "model.safetensors")
    half = {key: x.to(torch.float16) if x.is_floating_point() else x for key, x in weights.items()}
    parts: list[dict[str, torch.Tensor]] = [{}]
    for key, x in half.items():
        size = x.numel() * x.element_size()
        if sum(y.numel() * y.element_size() for y in parts[-1].values()) + size > 15e6:
            parts.append({})
        parts[-1][key] = x
    for number, part in enumerate(parts):
        save_file(part, out / f"{name}.{number}.safetensors")
    shutil.copy(folder / "config.json", out / f"{name}.json")


# -- processes --------------------------------------------------------------------------------


def start(arguments: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen([sys.executable, __file__, *arguments], env=environment)


def wait(children: list[subprocess.Popen]) -> None:
    failed = [child.args for child in children if child.wait()]
    for arguments in failed:
        print("failed:", arguments, flush=True)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def read_options() -> argparse.Namespace:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    arguments, more = words[:at], words[at + 1 :]
    parser = make_parser(__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    known: dict[str, tuple[Any, tuple[str, ...]]] = {
        "prepare": (prepare, ("target", "prompts", "out", "longest")),
        "measure": (measure, ("sizes", "out", "rows", "steps", "random")),
        "generate": (generate, ("target", "prompts", "out", "seconds", "workers", "batch")),
        "generate-part": (generate_part, ("target", "prompts", "out", "seconds", "batch", "part")),
        "rows": (rows_of_answers, ("target", "prompts", "out", "answered")),
        "trials": (trials, ("target", "data", "out", "seconds", "training")),
        "heads": (heads, ("target", "data", "out", "seconds", "training")),
        "head": (train_head, ("target", "data", "out", "seconds", "training", "one")),
    }
    for name, (_, groups) in known.items():
        sub = parts.add_parser(name)
        for group in groups:
            add_options(sub, group)
    options = parser.parse_args(arguments)
    options.more, options.run = more, known[options.part][0]
    return options


def add_options(sub: argparse.ArgumentParser, group: str) -> None:
    if group in ("target", "sizes"):
        sub.add_argument(f"--{group}", required=True)
    elif group in ("prompts", "out", "data"):
        sub.add_argument(f"--{group}", type=Path, required=True)
    elif group == "longest":
        sub.add_argument("--longest", type=int, default=256)
    elif group == "seconds":
        sub.add_argument("--seconds", type=float, required=True)
    elif group == "rows":
        sub.add_argument("--rows", type=int, nargs="+", default=[512, 2048])
    elif group == "steps":
        sub.add_argument("--steps", type=int, default=64)
    elif group == "random":
        sub.add_argument("--random-target", type=Path)
    elif group == "answered":
        sub.add_argument("--self-made", type=Path)
        sub.add_argument("--length", type=int, default=512)
    elif group == "workers":
        sub.add_argument("--workers", type=int, default=3)
    elif group == "batch":
        sub.add_argument("--rows", type=int, default=1536)
        sub.add_argument("--length", type=int, default=448)
        sub.add_argument("--seed", type=int, default=1, help="another seed samples other rows")
    elif group == "part":
        sub.add_argument("--worker", type=int, default=0)
        sub.add_argument("--of", type=int, default=1)
    elif group == "training":
        sub.add_argument("--every", type=int, default=200)
        sub.add_argument("--only", default="")
    else:
        sub.add_argument("--name", required=True)
        sub.add_argument("--of", required=True)
        sub.add_argument("--tokens", type=int)


if __name__ == "__main__":
    chosen = read_options()
    chosen.run(chosen)
