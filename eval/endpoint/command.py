"""Run `eval --endpoint`: ask, count, write the report."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...chats import set_template_variables
from ...data_recipes.chat_client import run_workers
from ...errors import UsageError, make_folder
from ...files import Values, locked
from ...inference.result import DecodeResult, ratio
from ...models.transformer.fingerprint import tokenizer_hash
from ...pretrained import load_tokenizer, quieten
from ..evaluation import per_prompt
from ..groups import acceptance_by_group, count_groups
from ..manifest import describe_call
from ..metrics import (
    OVERALL,
    acceptance_by_category,
    acceptance_intervals_by_position,
    decode_seconds,
    run_record,
)
from ..record import RunRecord, WallClockRecord
from ..report import write_report
from ..screen import check_folder, screen_table
from ..tables import GROUP_COLUMNS, Table, align_columns, pooled_runs
from ..tasks import Prompt, encode_turn, load_tasks
from ..traces import Traces, remove_traces
from ..turns import DecodedTurn, OpenConversation
from .arguments import EndpointOptions
from .client import FLAG, EndpointClient

SCHEDULE = "endpoint"
"""Schedule in results: the server's own."""
SHAPE = "as served"
PROBE = Prompt(task="", id="", category="", turns=["Count from one to ten."])


def measured(results: Sequence[DecodeResult]) -> WallClockRecord | None:
    """Return the server's own times, or None unless it told them for every answer."""
    if not all(result.token_times_s for result in results):
        return None
    seconds = sum(map(decode_seconds, results))
    first_s = [result.token_times_s[0] for result in results]
    return WallClockRecord(
        tokens_per_s=ratio(sum(result.num_tokens for result in results), seconds),
        ttft_ms=float(np.median(first_s)) * 1e3,
    )


def make_entry(
    name: str, turns: Sequence[DecodedTurn], num_turns: int, settings: Values
) -> RunRecord:
    """Return the entry of results.json for one benchmark.

    Args:
        num_turns: the benchmark's turns, left out ones included.
        settings: further fields of the record.
    """
    rows, results = per_prompt([turns]), [turn.result for turn in turns]
    stages, seed = results[0].num_stages, settings["seed"]
    return run_record(
        results,
        conversations=[turn.conversation for turn in turns],
        wallclock=measured(results),
        benchmark=name,
        skipped_turns=num_turns - len(turns),
        stop_reasons=dict(Counter(result.stop_reason for result in results)),
        acceptance_by_category=acceptance_by_category(rows, num_stages=stages, seed=seed),
        acceptance_by_position_ci95=acceptance_intervals_by_position(rows),
        acceptance_by_group=acceptance_by_group(rows),
        per_prompt=rows,
        **settings,
    )


class EndpointEvaluation:
    """The benchmarks asked of one server."""

    def __init__(
        self,
        options: EndpointOptions,
        tokenizer: PreTrainedTokenizerBase,
        benchmarks: dict[str, list[Prompt]],
    ) -> None:
        self.options, self.tokenizer, self.benchmarks = options, tokenizer, benchmarks
        self.client = EndpointClient(options)
        self.server: Values = {}
        """Facts for the manifest."""
        self.num_turns = 0
        self.num_unplaced = 0
        """Answers whose rounds have no known order."""

    async def run(self) -> list[RunRecord]:
        """Ask everything that OUT/traces lacks, and return the entries of results.json."""
        async with self.client.server:
            self.server = await self.client.open(encode_turn(self.tokenizer, PROBE, []))
            turns = sum(len(p.turns) for prompts in self.benchmarks.values() for p in prompts)
            total = turns * len(self.options.temperature)
            with tqdm(total=total, unit="turn", disable=None) as bar:
                return [
                    entry
                    for temperature in sorted(self.options.temperature)
                    for entry in await self._at(temperature, bar)
                ]

    async def _at(self, temperature: float, bar: tqdm) -> list[RunRecord]:
        options = self.options
        settings: Values = {
            "temperature": temperature,
            "seed": options.seed,
            "max_new_tokens": options.max_new_tokens,
        }
        identity = {"server": self.server, "tokenizer": tokenizer_hash(self.tokenizer)}
        traces = Traces(options.out / "traces", identity).open(**settings)
        conversations = [
            OpenConversation((name, index), prompt, self.tokenizer, None, traces, bar)
            for name, prompts in self.benchmarks.items()
            for index, prompt in enumerate(prompts)
        ]
        bar.set_description(f"{self.client.model} T={temperature:g}")
        await self._ask(conversations, temperature)
        by_benchmark: dict[str, list[DecodedTurn]] = {name: [] for name in self.benchmarks}
        for conversation in conversations:
            by_benchmark[conversation.name[0]] += map(self._grouped, conversation.records)
        for name, turns in by_benchmark.items():
            if not turns:
                raise UsageError(f"--benchmarks: no prompt of {name} fits the server; leave it out")
        if len(by_benchmark) > 1:
            by_benchmark[OVERALL] = [turn for turns in by_benchmark.values() for turn in turns]
        return [
            make_entry(
                name,
                turns,
                sum(
                    len(prompt.turns)
                    for own, prompts in self.benchmarks.items()
                    for prompt in prompts
                    if name in (own, OVERALL)
                ),
                settings
                | {"method": self.client.model, "schedule": SCHEDULE}
                | {"tree_width": 1, "tree": SHAPE},
            )
            for name, turns in by_benchmark.items()
        ]

    async def _ask(self, conversations: Sequence[OpenConversation], temperature: float) -> None:
        """Ask all open turns, with ``concurrency`` conversations at a time."""
        waiting = iter(conversations)

        async def work() -> None:
            for one in waiting:
                await self._converse(one, temperature)

        await run_workers(work, self.options.concurrency)

    async def _converse(self, one: OpenConversation, temperature: float) -> None:
        while (prompt_ids := one.next_prompt()) is not None:
            result = await self.client.ask(prompt_ids, temperature, one.prompt_index)
            if result is None:
                one.leave_out_rest()
                return
            if self.options.concurrency > 1:  # times among other requests are no answer's own
                result = replace(result, prefill_s=0.0, token_times_s=[])
            one.add(result)

    def _grouped(self, turn: DecodedTurn) -> DecodedTurn:
        """Add a turn's counts by group."""
        result = turn.result
        self.num_turns += 1
        self.num_unplaced += bool(result.round_lengths and not result.round_ends)
        groups = count_groups(result, turn.answer, turn.question, self.tokenizer)
        return replace(turn, groups=groups)

    def notes(self) -> Iterator[str]:
        """Yield what a reader should know about the answers, one line each."""
        if old := self.num_turns - self.client.num_asked:
            yield (
                f"{old} of {self.num_turns} answers were asked before and come from "
                f"{self.options.out}/traces; --fresh asks again."
            )
        if self.num_unplaced:
            yield (
                f"{self.num_unplaced} of {self.num_turns} answers do not tell the order of their "
                "rounds: they count in groups of the whole answer, not by place or text entropy. "
                f"vLLM tells it with {FLAG}, unless some rounds have no draft."
            )


def run(options: EndpointOptions, argv: Sequence[str]) -> None:
    """Run the whole command.

    Args:
        argv: the call, for the manifest.
    """
    quieten()
    benchmarks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    tokenizer = load_tokenizer(options.tokenizer, field="--tokenizer")
    set_template_variables(tokenizer, options.chat_template_kwargs)
    make_folder("--out", options.out)
    config = options.to_dict()
    with ExitStack() as held:
        held.enter_context(locked(options.out, "--out"))
        check_folder(options.out, config, is_fresh=options.fresh)
        if options.fresh:
            remove_traces(options.out)
        evaluation = EndpointEvaluation(options, tokenizer, benchmarks)
        entries = asyncio.run(evaluation.run())
        command = ["python", "-m", "pipedraft.eval", *argv]
        manifest = describe_call(
            tokenizer, benchmarks, config=config, argv=command, seed=options.seed
        )
        write_report(options.out, entries, manifest | {"target": evaluation.server})
    print(screen_table(entries))
    for entry in pooled_runs(entries):
        print(f"\nby group, T = {entry.temperature:g}:")
        print(align_columns(Table.of(GROUP_COLUMNS, entry.acceptance_by_group)))
    files = f"{options.out}/report.html, report.md, results.json, manifest.json"
    print(*evaluation.notes(), f"everything else: {files}", sep="\n")
