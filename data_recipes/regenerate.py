"""Conversations in the target's own words: every assistant turn is replaced by its answer.

    python -m pipedraft.data_recipes.regenerate --data chats.jsonl --target assets/target \\
        --out own.jsonl
    python -m pipedraft.data_recipes.regenerate --data chats.jsonl --server http://localhost:8000 \\
        --model Qwen/Qwen3-8B --concurrency 128 --out own.jsonl

Turn by turn: an answer is given in view of the target's own earlier answers. A conversation that
ends with the user's turn is answered there too, so {"prompt": text} rows are conversations as well.
Rows are written in the order of the input. The same command goes on where a stopped or killed one
was; OUT.errors.jsonl has the rows without answer and why, --retry-errors asks for those again.

A server may add settings of its own (vLLM: top-k and penalties from the model's
generation_config.json); start vLLM with `--generation-config vllm` for the target's distribution.
"""

import argparse
import asyncio
import hashlib
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from pipedraft.data_recipes.answers import AnswerFile, Dialogue, RowFailed, Sampling, TargetLost
from pipedraft.data_recipes.sources import Source, read_source
from pipedraft.errors import Parser, UsageError, run_command

SERVER_OPTIONS: dict[str, Any] = {
    "model": None,
    "concurrency": 64,
    "attempts": 8,
    "deadline": 600.0,
    "key_variable": None,
}
LOCAL_OPTIONS: dict[str, Any] = {"batch": 32, "dtype": "bfloat16"}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m pipedraft.data_recipes.regenerate",
        description=__doc__,
    )
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="JSONL (.gz) or parquet of conversations")
    add("--out", type=Path, required=True, metavar="FILE", help="JSONL file to write or go on with")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--target", metavar="FOLDER", help="folder or Hub id of a chat model")
    who.add_argument("--server", metavar="URL", help="an OpenAI-compatible server")
    add("--retry-errors", action="store_true", help="ask for failed rows again")
    add = parser.add_argument_group("answers").add_argument
    add(
        "--thinking",
        choices=["keep", "strip"],
        default="keep",
        help="keep: in <think> marks, also what a server separates; strip: only what is said",
    )
    add("--temperature", type=float, default=1.0, help="of sampled rows (default 1)")
    add("--top-p", type=float, default=1.0, help="of sampled rows (default 1)")
    add("--max-tokens", type=int, default=1024, help="per answer (default 1024)")
    add("--greedy-share", type=float, default=0.5, help="rows with greedy answers (default 0.5)")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("with --server").add_argument
    add("--model", metavar="NAME", help="what the server calls the target")
    add("--concurrency", type=int, metavar="N", help="requests at a time (default 64)")
    add("--attempts", type=int, metavar="N", help="per answer, waits between them grow (default 8)")
    add("--deadline", type=float, metavar="SECONDS", help="of each request (default 600)")
    add("--key-variable", metavar="NAME", help="environment variable that holds the API key")
    add = parser.add_argument_group("with --target").add_argument
    add("--batch", type=int, metavar="N", help="rows at a time (default 32)")
    add("--dtype", choices=["bfloat16", "float32"], help="of the weights (default bfloat16)")
    options = parser.parse_args(arguments)
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Fill in the defaults of the way taken, --server or --target; refuse what does not fit."""
    used, unused, other = LOCAL_OPTIONS, SERVER_OPTIONS, "--server"
    if options.server is not None:
        used, unused, other = SERVER_OPTIONS, LOCAL_OPTIONS, "--target"
    values = vars(options)
    for name in unused:
        if values[name] is not None:
            raise UsageError(f"{as_option(name)}: {values[name]!r} is for {other}; leave it out")
    for name, default in used.items():
        if values[name] is None:
            values[name] = default
    for name in ("temperature", "deadline"):
        value = values[name]
        if value is not None and not (value > 0 and math.isfinite(value)):
            hint = "; for greedy answers --greedy-share 1" if name == "temperature" else ""
            raise UsageError(f"--{name}: {value:g}; give a number above 0{hint}")
    for name in ("max_tokens", "concurrency", "attempts", "batch"):
        if values[name] is not None and values[name] < 1:
            raise UsageError(f"{as_option(name)}: {values[name]}; give 1 or more")
    if not 0 < options.top_p <= 1:
        raise UsageError(f"--top-p: {options.top_p:g}; give a number above 0, at most 1")
    if not 0 <= options.greedy_share <= 1:
        raise UsageError(f"--greedy-share: {options.greedy_share:g}; give a number from 0 to 1")
    if options.server is not None:
        if not is_address(options.server):
            raise UsageError(
                f"--server: {options.server!r} is no address; give for example "
                "http://localhost:8000"
            )
        if not options.model:
            raise UsageError("--model: missing; name the target as the server calls it")
        if options.key_variable and not os.environ.get(options.key_variable):
            raise UsageError(
                f"--key-variable: {options.key_variable!r} is not set in the environment; "
                "export the key under that name"
            )
    elif not Path(options.target).exists() and options.target.count("/") != 1:
        raise UsageError(f"--target: no folder {options.target!r}; give a chat model")


def is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def as_option(name: str) -> str:
    return "--" + name.replace("_", "-")


def scan(source: Source) -> tuple[int, str]:
    """(number of rows, digest of their texts) of the input."""
    if not Path(source.path).is_file():
        raise UsageError(f"--data: no file {source.path}; give JSONL or parquet rows")
    digest, num_rows = hashlib.sha256(), 0
    try:
        for raw in read_source(source):
            digest.update(raw.text.encode() + b"\n")
            num_rows += 1
    except ValueError as error:
        raise UsageError(f"--data{str(error).removeprefix('sources.path')}") from error
    if not num_rows:
        raise UsageError(f"--data: {source.path} has no rows; give a file of conversations")
    return num_rows, digest.hexdigest()[:16]


@dataclass
class Run:
    """The rows of one input on their way to one output."""

    source: Source
    answers: AnswerFile
    sampling: Sampling
    bar: tqdm
    num_cut: int = 0

    def dialogues(self) -> Iterator[Dialogue]:
        """Rows that are not settled; those that cannot be asked about are settled on the way."""
        for row, raw in enumerate(read_source(self.source)):
            if not self.answers.is_pending(row):
                continue
            try:
                if raw.error:
                    raise RowFailed(raw.error)
                dialogue = Dialogue.read(row, raw.text)
            except RowFailed as error:
                self._fail(row, str(error), raw.text)
                continue
            yield dialogue

    def settle(self, dialogue: Dialogue, reason: str) -> None:
        row = dialogue.row
        if reason:
            self._fail(row, reason, dialogue.text)
            return
        self.answers.add(row, dialogue.to_row(is_greedy=self.sampling.is_greedy(row)))
        self.num_cut += dialogue.num_cut
        self._count()

    def _fail(self, row: int, reason: str, text: str) -> None:
        self.answers.fail(row, reason, text)
        self._count()

    def _count(self) -> None:
        self.bar.set_postfix(errors=self.answers.num_failed, refresh=False)
        self.bar.update()


async def ask_server(run: Run, options: argparse.Namespace) -> str:
    """Answer all rows; returns what the summary says of the requests."""
    from pipedraft.data_recipes.server import ChatServer, Service, answer_dialogues

    service = Service(
        options.server,
        options.model,
        key=os.environ[options.key_variable] if options.key_variable else None,
        concurrency=options.concurrency,
        deadline_s=options.deadline,
        attempts=options.attempts,
    )
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with ChatServer(service, run.sampling, random.Random()) as server:
        await server.check()
        await answer_dialogues(server, run.dialogues(), run.settle)
    return f"{server.num_requests} requests, {server.num_repeats} of them repeats; "


def ask_local(run: Run, options: argparse.Namespace) -> str:
    from pipedraft.data_recipes.sample import LocalTarget, answer_dialogues

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    target = LocalTarget(options.target, options.dtype, run.sampling)
    answer_dialogues(target, run.dialogues(), run.settle, batch_size=options.batch)
    return ""


def settings_of(options: argparse.Namespace, sampling: Sampling, digest: str) -> dict[str, Any]:
    """What the answers depend on, by option. The server's address may change, its model may not."""
    folder = Path(options.target or "")
    is_folder = options.target is not None and folder.exists()
    return {
        "--data (digest)": digest,
        "--target": str(folder.resolve()) if is_folder else options.target,
        "--model": options.model,
        "--dtype": options.dtype,
        **{as_option(name): value for name, value in asdict(sampling).items()},
    }


def main() -> None:
    options = parse(sys.argv[1:])
    source = Source(path=options.data)
    num_rows, digest = scan(source)
    values = vars(options)
    sampling = Sampling(**{part.name: values[part.name] for part in fields(Sampling)})
    settings = settings_of(options, sampling, digest)
    retry = options.retry_errors
    answers = AnswerFile(options.out, settings, num_rows=num_rows, retry_errors=retry)
    num_before = answers.num_answered + answers.num_failed
    begin = time.monotonic()
    try:
        with tqdm(total=num_rows, initial=num_before, unit="row", delay=1) as bar:
            run = Run(source, answers, sampling, bar)
            if options.server is not None:
                said = asyncio.run(ask_server(run, options))
            else:
                said = ask_local(run, options)
        answers.finish()
    except (KeyboardInterrupt, asyncio.CancelledError, TargetLost) as error:
        left = num_rows - answers.num_answered - answers.num_failed
        why = str(error) if isinstance(error, TargetLost) else "interrupted"
        print(
            f"error: {why}; {left} of {num_rows} rows left, resume with the same command",
            file=sys.stderr,
        )
        sys.exit(1 if isinstance(error, TargetLost) else 130)
    finally:
        answers.close()
    num_failed, seconds = answers.num_failed, time.monotonic() - begin
    rate = (num_rows - num_before) / seconds
    failed = f"{num_failed} failed ({answers.errors_path})" if num_failed else "0 failed"
    print(
        f"{answers.num_answered} rows answered, {failed}; {run.num_cut} answers cut at "
        f"--max-tokens; {said}{num_rows - num_before} rows in {seconds:.0f} s ({rate:.1f}/s)"
    )
    if not answers.num_answered:
        reason = next(iter(answers.reasons.values()))
        sys.exit(f"error: no row was answered; the first reason: {reason}")


if __name__ == "__main__":
    run_command(main)
