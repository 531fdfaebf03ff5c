"""Regenerate conversations with the target's own answers (`pipedraft data regenerate --help`)."""

import asyncio
import hashlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from ..endings import leave_at_interrupts, run_command
from ..errors import UsageError, check_ranges, did_you_mean, flag_name, one_line
from ..options import Options, option

if __name__ == "__main__":
    leave_at_interrupts()

from tqdm import tqdm

from ..files import Values
from .answers import (
    WAS_CUT,
    AnswerFile,
    AnswerSampling,
    Dialogue,
    RowFailed,
    TargetLost,
)
from .chat_client import ChatServer, ChatServerOptions, is_address
from .saved import saved_files
from .sources import Source, read_source

EXAMPLE = """example:
  pipedraft data regenerate --data chats.jsonl --target assets/target --out own.jsonl
  pipedraft data regenerate --data chats.jsonl --server http://localhost:8000 \\
      --model Qwen/Qwen3-8B --concurrency 128 --out own.jsonl
  pipedraft data regenerate --self-prompt 4000 --target assets/target --batch 512 \\
      --max-tokens 448 --out own.jsonl

With --self-prompt the target also writes the users' turns (Magpie). Rows that loop, end early,
repeat a question or contain a prompt from --decontaminate are dropped.

A conversation that ends with a user's turn gets an answer there, too. docs/data.md has the rest.
Rows keep the order of the input. Run the same command again to resume. OUT.errors.jsonl lists the
rows without an answer and the reason; --retry-errors answers them again.
"""
RANGES = {
    "temperature": "(0, inf); for greedy answers give --greedy-share 1",
    "deadline": "(0, inf)",
    "top_p": "(0, 1]",
    "greedy_share": "[0, 1]",
}


@dataclass(frozen=True, kw_only=True)
class LocalOptions(Options):
    """with --target"""

    batch: int = option(32, least=1)
    """conversations decoded at once"""
    device: str = option("auto", metavar="DEVICE")
    """cpu, cuda or cuda:N; auto: an accelerator if there is one"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """weights' dtype"""


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(AnswerSampling, ChatServerOptions, LocalOptions):
    """Replace every assistant turn in conversations with the target's own answer."""

    PROG: ClassVar[str] = "pipedraft data regenerate"
    EXAMPLE: ClassVar[str] = EXAMPLE
    ONE_OF = (("target", "server"), ("data", "self_prompt"))

    data: str | None = option(None, metavar="FILE")
    """conversations as JSONL (.gz) or parquet"""
    self_prompt: int | None = option(None, least=1)
    """instead of --data: let --target write this many conversations itself"""
    decontaminate: tuple[str, ...] = option((), metavar="FILES")
    """with --self-prompt: comma-separated benchmark files; drop rows with their prompts"""
    out: Path
    """JSONL file to write or resume"""
    target: str | None = option(None, metavar="FOLDER")
    """a chat model's folder or Hub id"""
    server: str | None = option(None, metavar="URL")
    """an OpenAI-compatible server"""
    drop_cut: bool = False
    """leave out conversations with an answer that was cut at --max-tokens"""
    retry_errors: bool = False
    """answer failed rows again"""

    def __post_init__(self) -> None:
        super().__post_init__()
        unused, other = (
            (ChatServerOptions, "--server") if self.target else (LocalOptions, "--target")
        )
        for part in fields(unused):
            value = getattr(self, part.name)
            if value != part.default:
                raise UsageError(f"{flag_name(part.name)}: {value!r} is for {other}; leave it out")
        check_ranges(self, RANGES)
        if self.self_prompt is not None:
            self._check_self_prompt()
        elif self.decontaminate:
            raise UsageError("--decontaminate: is for --self-prompt; leave it out")
        if self.server is not None:
            self._check_server()
        elif not Path(str(self.target)).exists() and str(self.target).count("/") != 1:
            raise UsageError(f"--target: no folder {self.target!r}; give a chat model")

    def _check_self_prompt(self) -> None:
        for name in ("temperature", "top_p", "thinking", "retry_errors", "server"):
            if getattr(self, name) != getattr(RegenerateOptions, name):
                raise UsageError(
                    f"{flag_name(name)}: {getattr(self, name)} with --self-prompt, which samples "
                    "from the target's own distribution; leave it out"
                )

    def _check_server(self) -> None:
        if not is_address(str(self.server)):
            raise UsageError(
                f"--server: {self.server!r} is no address; give for example http://localhost:8000"
            )
        if not self.model:
            raise UsageError("--model: missing; name the target as the server calls it")


def scan(source: Source) -> tuple[int, str]:
    """Return the input's row count, and a digest of the rows' texts."""
    digest, num_rows = hashlib.sha256(), 0
    try:
        place = Path(source.path)
        is_saved = place.is_dir() and saved_files(place, source.split) is not None
        if not place.is_file() and not is_saved:
            hint = did_you_mean(str(place))
            raise ValueError(f": no file {place}{hint}; give JSONL, parquet or Arrow rows")
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
    """One run. It reads rows from an input and stores their answers."""

    source: Source
    answers: AnswerFile
    sampling: AnswerSampling
    bar: tqdm
    drops_cut: bool = False

    def dialogues(self) -> Iterator[Dialogue]:
        """Yield each unsettled row as a dialogue. Rows that cannot be read fail."""
        for row, raw in enumerate(read_source(self.source)):
            if not self.answers.is_pending(row):
                continue
            try:
                if raw.error:
                    raise RowFailed(raw.error)
                dialogue = Dialogue.read(row, raw.text)
                usual = self.sampling.chat_template_kwargs or {}
                dialogue.variables = {**usual, **dialogue.variables}
                dialogue.drops_cut = self.drops_cut
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
        self._count()

    def _fail(self, row: int, reason: str, text: str) -> None:
        self.answers.fail(row, reason, text)
        self._count()

    def _count(self) -> None:
        self.bar.set_postfix(errors=self.answers.num_failed, refresh=False)
        self.bar.update()


async def ask_server(run: Run, options: RegenerateOptions) -> str:
    """Answer all rows, and return a text about the requests for the summary."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):  # cancel: an error would lose tasks
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with ChatServer(str(options.server), options, run.sampling) as server:
        await server.check()
        await server.answer_dialogues(run.dialogues(), run.settle)
    return f"{server.num_requests} requests, {server.num_repeats} of them repeats; "


def ask_itself(answers: AnswerFile, options: RegenerateOptions, bar: tqdm) -> str:
    """Sample self-made conversations, and return a text about them for the summary."""
    from ..pretrained import load_tokenizer
    from .local import load_on
    from .self_prompt import SelfPrompting

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tokenizer = load_tokenizer(str(options.target), field="--target")
    model = load_on(str(options.target), options.device, options.dtype)
    prompting = SelfPrompting(
        model, tokenizer, options, options.decontaminate, drops_cut=options.drop_cut
    )
    prompting.fill(answers, options.self_prompt or 0, options.batch, bar)
    return f"{prompting.num_tokens} tokens sampled; "


def ask_local(run: Run, options: RegenerateOptions) -> str:
    from .local import LocalTarget, answer_dialogues

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    target = LocalTarget(str(options.target), options.device, options.dtype, run.sampling)
    answer_dialogues(target, run.dialogues(), run.settle, batch_size=options.batch)
    return ""


def settings_of(options: RegenerateOptions, digest: str) -> Values:
    """Return the options that change the answers.

    A resumed run may use another server address, but not another model.
    """
    folder = Path(options.target or "")
    is_folder = options.target is not None and folder.exists()
    return {
        "--data (digest)": digest,
        "--self-prompt": options.self_prompt,
        "--decontaminate": list(options.decontaminate),
        "--target": str(folder.resolve()) if is_folder else options.target,
        "--model": options.model,
        "--dtype": None if options.target is None else options.dtype,
        **{flag_name(part.name): getattr(options, part.name) for part in fields(AnswerSampling)},
        "--drop-cut": options.drop_cut or None,  # as in a run that began without this option
    }


def main() -> None:
    options = RegenerateOptions.read(sys.argv[1:])
    source = None if options.data is None else Source(path=options.data)
    num_rows, digest = (options.self_prompt or 0, "") if source is None else scan(source)
    settings, retry = settings_of(options, digest), options.retry_errors
    answers = AnswerFile(options.out, settings, num_rows=num_rows, retry_errors=retry)
    num_before = answers.num_answered + answers.num_failed
    begin = time.monotonic()
    try:
        # Rows end in groups, so only the mean pace of the whole run says how long the rest takes.
        with tqdm(total=num_rows, initial=num_before, unit="row", delay=1, smoothing=0) as bar:
            if source is None:
                said = ask_itself(answers, options, bar)
            else:
                run = Run(source, answers, options, bar, options.drop_cut)
                is_local = options.server is None
                said = (
                    ask_local(run, options) if is_local else asyncio.run(ask_server(run, options))
                )
        answers.finish()
        num_cut = answers.num_cut
    except (KeyboardInterrupt, asyncio.CancelledError, TargetLost) as error:
        left = num_rows - answers.num_answered - answers.num_failed
        why = one_line(str(error)) if isinstance(error, TargetLost) else "interrupted"
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
    cut = f"{num_cut} answers cut at --max-tokens"
    if options.drop_cut:
        num_dropped = list(answers.reasons.values()).count(WAS_CUT)
        cut = f"{num_dropped} of these for an answer cut at --max-tokens"
    print(
        f"{answers.num_answered} rows answered, {failed}; {cut}; {said}{num_rows - num_before} "
        f"rows in {seconds:.0f} s ({rate:.1f}/s)"
    )
    if not answers.num_answered:
        reason = next(iter(answers.reasons.values()))
        sys.exit(f"error: no row was answered; the first reason: {one_line(reason)}")


if __name__ == "__main__":
    run_command(main)
