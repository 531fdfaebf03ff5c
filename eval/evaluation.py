"""Decode benchmarks with several methods and compare each with autoregressive decoding."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import msgspec
import transformers
from msgspec import UNSET, UnsetType
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import Values
from ..inference.auto_tree import FIRST
from ..inference.batch import BatchEngine, BatchLimits
from ..inference.config import DecodeConfig
from ..inference.defaults import measure_shape, with_shape
from ..inference.engine import DraftNetwork, Engine
from ..inference.pipelines import Pipeline
from ..inference.pipelines.local import LocalPipeline
from ..inference.result import DecodeResult
from ..inference.schedules.autoregressive import Autoregressive
from ..inference.shapes import TreeShape
from ..models.target import StagedTarget
from ..models.transformer.fingerprint import weights_hash
from ..pretrained import context_length
from .groups import acceptance_by_group, count_groups, sum_groups
from .lossless import (
    GreedyReference,
    check_equal,
    check_for,
    check_plain,
    output_entropies,
    pool_checks,
)
from .metrics import (
    AUTOREGRESSIVE,
    OVERALL,
    acceptance_by_category,
    acceptance_by_entropy,
    acceptance_intervals_by_position,
    count_by_entropy,
    decode_seconds,
    measure_times,
    repeats_record,
    run_record,
    sum_lists,
)
from .record import (
    UNCHECKED,
    LosslessRecord,
    ProcessRecord,
    PromptRecord,
    RunRecord,
    ShapeRecord,
    add_up,
    number_or_nan,
)
from .replay import speedups_by_row
from .scores import save_answers, score_turns, summarize_scores
from .tasks import Prompt, encode_turn
from .traces import WHOLE, TraceFile, Traces
from .turns import DecodedTurn, any_fits, check_room, evaluate

WARM_UP_TOKENS, PROMPTS_TIMED = 8, 4
LOTS = 1 << 20
"""Room for all sequences: no conversation waits for others."""


@dataclass(frozen=True, kw_only=True)
class EvalMethod:
    """Draft with decoding settings, shown as one line in the tables."""

    name: str
    config: DecodeConfig
    draft: DraftNetwork | None
    checkpoint: str | None = None
    picks_shape: bool = False
    """True to time shapes in first rounds, and to decode everything with the fastest."""
    chosen: ShapeRecord | UnsetType = UNSET


def draft_hash(draft: DraftNetwork) -> str:
    """Return SHA-256 over a draft's type and weights."""
    return f"{type(draft).__name__} {weights_hash(list(draft.state_dict().values()))}"


def recorded_draft(draft: DraftNetwork | None, target: StagedTarget) -> Values:
    """Return the facts about draft and target that a trace file's header stores for ``replay``."""
    return {
        "draft_type": None if draft is None else draft.draft_type,
        "relative_cost": 0.0 if draft is None else draft.relative_cost(target),
        "boundaries": list(target.boundaries),
    }


def per_prompt(repeats: Sequence[Sequence[DecodedTurn]]) -> list[PromptRecord]:
    """Return each conversation's counts, to compare two reports prompt by prompt.

    Counts come from the first repeat. Seconds are means over all repeats.
    """
    turns: dict[tuple[str, int], list[list[DecodedTurn]]] = {}
    for index, records in enumerate(repeats):
        for record in records:
            own = turns.setdefault(record.conversation, [[] for _ in repeats])
            own[index].append(record)
    return list(map(_prompt_record, turns.values()))


def _prompt_record(repeats: Sequence[Sequence[DecodedTurn]]) -> PromptRecord:
    """Return one conversation's record, from its decoded turns in each repeat."""
    records = repeats[0]
    seconds = [sum(decode_seconds(record.result) for record in records) for records in repeats]
    prompt, results = records[0].prompt, [record.result for record in records]
    by_entropy = [
        count_by_entropy(r.result, r.entropies) for r in records if r.entropies is not None
    ]
    groups = [r.groups for r in records if r.groups is not None]
    score = records[-1].score
    is_timed = any(result.token_times_s for result in results)
    return PromptRecord(
        benchmark=prompt.task,
        id=prompt.id,
        category=prompt.category,
        turns=len(records),
        tokens=sum(result.num_tokens for result in results),
        steps=sum(result.num_steps for result in results),
        rounds=sum(len(result.round_lengths) for result in results),
        virtual_time=sum((r.virtual_time for r in results), 0.0),
        virtual_time_autoregressive=sum((r.virtual_time_autoregressive for r in results), 0.0),
        decode_s=sum(seconds) / len(seconds) if is_timed else UNSET,
        decode_s_repeats=seconds if is_timed else [],
        position_tests=sum_lists([result.position_tests for result in results]),
        position_accepts=sum_lists([result.position_accepts for result in results]),
        entropy_tests=sum_lists([tests for tests, _ in by_entropy]) if by_entropy else UNSET,
        entropy_accepts=sum_lists([right for _, right in by_entropy]) if by_entropy else UNSET,
        groups=sum_groups(groups) if groups else UNSET,
        score=UNSET if score is None else int(score.passed),
        outcome=UNSET if score is None else score.outcome,
    )


@dataclass(frozen=True, kw_only=True)
class BenchmarkRun:
    """One method on one benchmark, or on all of them together."""

    repeats: list[list[DecodedTurn]]
    """Turns of each repeat, at least one; repeats differ only in their times."""
    lossless: LosslessRecord | None
    num_turns: int
    processes: list[ProcessRecord]
    """Measurements from each process in the first repeat."""

    @property
    def records(self) -> list[DecodedTurn]:
        return self.repeats[0]

    @property
    def times(self) -> list[DecodeResult]:
        """Return the results from all repeats, which differ only in their times."""
        return [record.result for records in self.repeats for record in records]

    def entry(
        self, method: EvalMethod, name: str, baseline: "BenchmarkRun", engine: Engine
    ) -> RunRecord:
        config, plain = method.config, measure_times(baseline.times)
        rows, results = per_prompt(self.repeats), [record.result for record in self.records]
        repeats = [{(r.conversation, r.turn): r.result for r in rs} for rs in self.repeats]
        plain_tokens_per_s = math.nan if plain is None else number_or_nan(plain.tokens_per_s)
        return run_record(
            results,
            conversations=[record.conversation for record in self.records],
            wallclock=measure_times(self.times, plain_tokens_per_s),
            method=method.name,
            schedule=config.schedule.name,
            benchmark=name,
            temperature=config.temperature,
            filters=config.active,
            tree_width=config.schedule.width,
            tree=config.schedule.label,
            theoretical_speedup_by_row=speedups_by_row(results, engine),
            lossless=self.lossless or UNCHECKED,
            checkpoint=method.checkpoint,
            chosen=method.chosen,
            verifier=config.rule,
            seed=config.seed,
            max_new_tokens=config.max_new_tokens,
            skipped_turns=self.num_turns - len(self.records),
            processes=self.processes,
            stop_reasons=dict(Counter(result.stop_reason for result in results)),
            repeats=repeats_record(rows, repeats) if len(repeats) > 1 else UNSET,
            acceptance_by_category=acceptance_by_category(
                rows, num_stages=config.num_stages, seed=config.seed
            ),
            acceptance_by_position_ci95=acceptance_intervals_by_position(rows),
            acceptance_by_entropy=acceptance_by_entropy(rows),
            acceptance_by_group=acceptance_by_group(rows),
            score=UNSET if name == OVERALL else summarize_scores(self.records),  # no common one
            per_prompt=rows,
        )


def _pool(parts: Sequence[BenchmarkRun]) -> BenchmarkRun:
    same_repeats = zip(*(part.repeats for part in parts), strict=True)
    checks = [part.lossless for part in parts if part.lossless is not None]
    return BenchmarkRun(
        repeats=[[record for records in same for record in records] for same in same_repeats],
        lossless=pool_checks(checks) if checks else None,
        num_turns=sum(part.num_turns for part in parts),
        processes=[add_up(same) for same in zip(*(part.processes for part in parts), strict=True)],
    )


@dataclass(kw_only=True)
class Decoded:
    """One method's turns in one repeat, and each process's measurements, by benchmark."""

    traces: TraceFile
    turns: dict[str, list[DecodedTurn]] = field(default_factory=dict)
    reports: dict[str, list[ProcessRecord]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation of several methods on the same target and prompts, in one process."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    benchmarks: dict[str, list[Prompt]]
    reference: PreTrainedModel | None
    """Whole target for transformers: it decodes every turn again to compare greedy outputs, and
    gives the entropy at every token; None: skip both."""
    trusts_plain: bool = False
    """Without a reference, compare greedy outputs with autoregressive decoding here, as for
    sampled ones."""
    connect: Callable[[StagedTarget], Pipeline] = LocalPipeline
    scores: bool = False
    answers: Path | None = None
    repeats: int = 1
    """Decoding repeats; 2 or more separate the machine's noise from the prompts'."""
    sequences: int = 1
    """Conversations decoded at once, each with the same outputs and counts as alone; above 1,
    wall-clock times are left out."""
    traces: Traces = Traces()
    """Turns decoded before; in memory by default."""

    def decode_shard(self, methods: Sequence[EvalMethod]) -> int:
        """Decode this shard's turns with every method, baselines and greedy references included.

        Returns:
            Number of turns now on disk.
        """
        most = max(method.config.max_new_tokens for method in methods)
        check_room(self.benchmarks, self.tokenizer, self._num_positions, most)
        room = self._num_positions - most
        benchmarks = {
            name: prompts
            for name, prompts in self.traces.mine(self.benchmarks).items()
            if any_fits(prompts, self.tokenizer, room)
        }
        entries = replace(self, benchmarks=benchmarks).run(methods) if benchmarks else []
        parts = [entry for entry in entries if entry.benchmark != OVERALL]
        return sum(row.turns for entry in parts for row in entry.per_prompt)

    def run(self, methods: Sequence[EvalMethod]) -> list[RunRecord]:
        """Return entries for results.json, by sampling setting, each with the baseline first.

        The autoregressive baseline is decoded once per sampling setting, on the smallest requested
        number of stages. There its wall clock is fastest, and its L' is 1 for every n. With more
        than one benchmark, each method also gets a pooled entry "overall".
        """
        for method in methods:  # refuse impossible methods before decoding
            self._engine(method)
            tokens = method.config.max_new_tokens
            check_room(self.benchmarks, self.tokenizer, self._num_positions, tokens)
        methods = [self._with_shape(method) for method in methods]
        samplings = {method.config.sampling for method in methods}
        drafted = [m for m in methods if m.config.schedule.name != AUTOREGRESSIVE]
        turns = sum(len(p.turns) for prompts in self.benchmarks.values() for p in prompts)
        total = turns * self.repeats * (len(samplings) + len(drafted))
        with tqdm(total=total, unit="turn", disable=None) as bar:
            return self._run(methods, bar)

    def _run(self, methods: Sequence[EvalMethod], bar: tqdm) -> list[RunRecord]:
        references: dict[int, GreedyReference] = {}
        entries = []
        by_temperature = sorted(methods, key=lambda method: method.config.temperature)
        for sampling in dict.fromkeys(method.config.sampling for method in by_temperature):
            chosen = [m for m in methods if m.config.sampling == sampling]
            smallest = min(chosen, key=lambda method: method.config.num_stages)
            baseline = EvalMethod(
                name=AUTOREGRESSIVE,
                draft=None,
                config=replace(smallest.config, schedule=Autoregressive(), verifier="auto"),
            )
            chosen = [m for m in chosen if m.config.schedule.name != AUTOREGRESSIVE]
            baseline_parts: dict[str, BenchmarkRun] = {}
            for method, passes in self._decode([baseline, *chosen], bar):
                parts = self._check(method, passes, references, baseline_parts)
                baseline_parts = baseline_parts or parts
                engine = self._engine(method)
                for name, part in parts.items():
                    entries.append(part.entry(method, name, baseline_parts[name], engine))
        return entries

    def _with_shape(self, method: EvalMethod) -> EvalMethod:
        """Return the method with a fixed shape, if it is to pick one.

        The choice is stored with the turns, so that a resumed evaluation goes on with its shape.
        """
        if not method.picks_shape:
            return method
        config, draft = method.config, cast(DraftNetwork, method.draft)
        traces = self.traces.open(chosen_for=config.to_dict(), draft=draft_hash(draft))
        found = traces.find(["shape"], lambda: self._choose_shape(method))
        chosen = msgspec.convert(found, ShapeRecord)
        fixed = with_shape(config, TreeShape.parse(chosen.tree))
        return replace(method, config=fixed, picks_shape=False, chosen=chosen)

    def _choose_shape(self, method: EvalMethod) -> Values:
        config = method.config
        room = self._num_positions - config.max_new_tokens
        # Some of every benchmark: one prompt's acceptance says little about the others'.
        firsts = zip_longest(*(some[:PROMPTS_TIMED] for some in self.benchmarks.values()))
        chosen = [prompt for group in firsts for prompt in group if prompt is not None]
        prompts = [encode_turn(self.tokenizer, prompt, []) for prompt in chosen]
        prompts = [ids for ids in prompts if len(ids) <= room]
        measured = None
        if prompts and self.traces.shard == WHOLE:  # other shares decode with the same shape
            measured = measure_shape(self._engine(method), prompts)
        if measured is None:
            return {"tree": FIRST.label}
        return {"tree": measured.shape.label, "tokens_per_s": measured.tokens_per_s}

    @property
    def _num_positions(self) -> int:
        return context_length(self.target.config)

    def _check(
        self,
        method: EvalMethod,
        passes: Sequence[Decoded],
        references: dict[int, GreedyReference],
        plain: Mapping[str, BenchmarkRun],
    ) -> dict[str, BenchmarkRun]:
        """Compare a method's outputs with the reference's, and score them.

        Args:
            passes: the method's turns in each repeat.
            plain: the baseline's turns at this temperature, empty for the baseline itself.
        """
        config, engine = method.config, self._engine(method)
        parts = {}
        for name, prompts in self.benchmarks.items():
            repeats = [once.turns[name] for once in passes]
            reports = passes[0].reports[name]
            records = self._with_entropies(repeats[0], method)
            if method.config.schedule.name != AUTOREGRESSIVE:
                records = [
                    replace(r, groups=count_groups(r.result, r.answer, r.question, self.tokenizer))
                    for r in records
                ]
            if self.scores:
                records = score_turns(records)
            if self.answers is not None:
                save_answers(self.answers / name, _described(method), records)
            check = None
            kind = check_for(
                config,
                self.target,
                is_baseline=name not in plain,
                has_reference=bool(self.reference),
                trusts_plain=self.trusts_plain,
            )
            if kind == "transformers":
                reference = references.setdefault(
                    config.max_new_tokens, self._greedy_reference(config.max_new_tokens)
                )
                check = reference.check([record.result for record in records])
            elif kind == "baseline":
                check = check_equal(records, plain[name].records)
            elif kind == "plain":
                reference = self._greedy_reference(config.max_new_tokens)
                tokens, stages = config.max_new_tokens, config.num_stages
                traces = self.traces.open(plain="greedy", tokens=tokens, stages=stages)
                check = check_plain(engine, reference, records, traces)
            parts[name] = BenchmarkRun(
                repeats=[records, *repeats[1:]],
                lossless=check,
                num_turns=sum(len(prompt.turns) for prompt in prompts),
                processes=[add_up([report]) for report in reports],
            )
        if len(parts) > 1:
            parts[OVERALL] = _pool(list(parts.values()))
        return parts

    def _decode(
        self, methods: Sequence[EvalMethod], bar: tqdm
    ) -> Iterator[tuple[EvalMethod, list[Decoded]]]:
        """Decode every benchmark with every method, and yield each method's turns by repeat.

        In one process on a CPU, all methods decode a conversation before the next one begins. A
        machine that changes its pace then slows them all, and the speed-up stays.
        """
        is_local = self.connect is LocalPipeline and self.target.device.type == "cpu"
        if is_local and self.sequences == 1:
            yield from zip(methods, self._decode_in_turn(methods, bar), strict=True)
            return
        for method in methods:
            (passes,) = self._decode_in_turn([method], bar)
            yield method, passes

    def _decode_in_turn(self, methods: Sequence[EvalMethod], bar: tqdm) -> list[list[Decoded]]:
        for method in methods:
            self._warm_up(method, self._num_positions - method.config.max_new_tokens)
        engines = [self._engine(method) for method in methods]
        found: list[list[Decoded]] = [[] for _ in methods]
        # Run all benchmarks once, then again: a slowing machine then shows between repeats.
        for repeat in range(self.repeats):
            for method, engine, passes in zip(methods, engines, found, strict=True):
                passes.append(Decoded(traces=self._open_traces(method, engine, repeat)))
            for name, prompts in self.benchmarks.items():
                for engine in engines:
                    engine.pipeline.clear()
                size = len(prompts) if len(methods) == 1 else 1
                for first in range(0, len(prompts), size):
                    for method, engine, passes in zip(methods, engines, found, strict=True):
                        again = f" repeat {repeat + 1}" if repeat else ""
                        passes[-1].turns.setdefault(name, []).extend(
                            self._decode_part(
                                method,
                                engine,
                                prompts[first : first + size],
                                first_index=first,
                                description=f"{_described(method)} {name}{again}",
                                traces=passes[-1].traces,
                                bar=bar,
                            )
                        )
                for engine, passes in zip(engines, found, strict=True):
                    timed = engine.pipeline.reports() if self.sequences == 1 else []
                    reports = [msgspec.convert(report, ProcessRecord) for report in timed]
                    passes[-1].reports[name] = reports
        return found

    def _decode_part(
        self, method: EvalMethod, engine: Engine, prompts: Sequence[Prompt], **options: Any
    ) -> list[DecodedTurn]:
        """Decode conversations with a method. ``options`` are those of ``evaluate``."""
        batch = None if self.sequences == 1 else self._batch(method)
        with nullcontext() if batch is None else closing(batch):
            return evaluate(
                batch or engine,
                prompts,
                self.tokenizer,
                max_prompt_tokens=self._num_positions - method.config.max_new_tokens,
                **options,
            )

    def _with_entropies(self, records: list[DecodedTurn], method: EvalMethod) -> list[DecodedTurn]:
        """Add the target's entropies to a method's records, except in autoregressive decoding."""
        if self.reference is None or method.config.schedule.name == AUTOREGRESSIVE:
            return records
        traces = self.traces.open(entropies="nats, T = 1")
        return [
            replace(record, entropies=output_entropies(self.reference, record.result, traces))
            for record in records
        ]

    def _open_traces(self, method: EvalMethod, engine: Engine, repeat: int) -> TraceFile:
        again = {"repeat": repeat} if repeat else {}
        if self.sequences > 1:
            again |= {"together": 1}
        return self.traces.open(
            config=method.config.to_dict(),
            draft=None if method.draft is None else draft_hash(method.draft),
            # Only methods across a link have another kind of target, and these are not recorded.
            recorded=recorded_draft(method.draft, cast(StagedTarget, engine.target)),
            **again,
        )

    def _greedy_reference(self, max_new_tokens: int) -> GreedyReference:
        assert self.reference is not None
        traces = self.traces.open(greedy=transformers.__version__, tokens=max_new_tokens)
        return GreedyReference(self.reference, max_new_tokens, traces)

    def _warm_up(self, method: EvalMethod, max_prompt_tokens: int) -> None:
        """Decode a few tokens untimed, because first calls allocate memory and choose kernels."""
        prompt = next(iter(self.benchmarks.values()))[0]
        prompt_ids = encode_turn(self.tokenizer, prompt, [])
        if len(prompt_ids) > max_prompt_tokens:
            return
        num_tokens = min(WARM_UP_TOKENS, method.config.max_new_tokens)
        short = replace(method, config=replace(method.config, max_new_tokens=num_tokens))
        self._engine(short).decode(prompt_ids)

    def _engine(self, method: EvalMethod) -> Engine:
        return Engine(
            self.target, self.tokenizer, method.config, method.draft, connect=self.connect
        )

    def _batch(self, method: EvalMethod) -> BatchEngine:
        return BatchEngine(
            self.target,
            self.tokenizer,
            method.config,
            method.draft,
            limits=BatchLimits(sequences=self.sequences, rows=LOTS, prompt_rows=LOTS, waiting=LOTS),
            counts_alone=True,
            connect=self.connect,
        )


def _described(method: EvalMethod) -> str:
    """Return a method's name for progress bars and files."""
    config = method.config
    shape = config.schedule.label or f"W={config.schedule.width}"
    return f"{method.name} n={config.num_stages} T={config.sampling} {shape}"
