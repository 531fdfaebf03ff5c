"""Training loop for all methods. A method is an objective, and accelerate handles processes."""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor

from ..data_recipes.recipe import TokenizedData
from ..data_recipes.table import Rows, row_lengths
from ..files import naming, partial
from ..models.heads.draft import WEIGHTS_FILE
from ..models.speed.cpu import muon_in_float32
from ..pretrained import context_length
from . import checkpoint
from .batch import Batch
from .checkpoint import Progress, TrainingState
from .config import RunConfig
from .decoding import DECODED_LENGTH, decode, first_turns, longest_round
from .features.online import FeaturesLost
from .forecast import RunForecast, told
from .launch import (
    GO_ON,
    Stop,
    Stopping,
    is_sharded,
    make_optimizers,
    on_main_process,
    rate_factor,
)
from .log import (
    MetricsLog,
    StepPace,
    flop_counter,
    save_bad_batches,
    truncate_log,
)
from .objective import DraftObjective, LossOutput
from .position import Cut, DonePart, batches_left
from .record import Change, Identity, check_record
from .reuse import KeptStates
from .screen import RunFacts, Screen

STATE = "training_state"
"""Folder in a checkpoint, needed only to resume."""

EVALUATED_ROWS = 8
"""Maximum validation rows per forward pass and process."""


class Trainer:
    """Training loop with its prepared objective, optimizers, data position and screen output."""

    def __init__(
        self,
        config: RunConfig,
        objective: DraftObjective,
        data: TokenizedData,
        *,
        pad_id: int,
        accelerator: Accelerator,
        started: float,
    ) -> None:
        """Prepare the objective and its optimizers for this process.

        Args:
            started: ``time.monotonic()`` at the start of ``max_minutes``.
        """
        if config.evaluation.patience and not len(data.valid):
            raise ValueError(
                f"evaluation.patience: {config.evaluation.patience}, but there are no validation "
                "rows; give data.valid_fraction or leave it out"
            )
        self.config, self.objective, self.data = config, objective, data
        self.accelerator, self.pad_id = accelerator, pad_id
        self.progress = Progress()
        self.lengths = row_lengths(data.train)
        group = config.batch_group or self.world
        self.progress.cut = Cut(config.batch_tokens, config.packing, group, config.reuse)
        self.kept = KeptStates(config.reuse)
        if group % self.world:
            raise ValueError(
                f"batch_group: {config.batch_group} with {self.world} processes; give a multiple "
                "of their number"
            )
        # Counted before prepare: ZeRO-3 leaves every process empty parameters.
        self.num_trainable = sum(p.numel() for p in objective.parameters() if p.requires_grad)
        self.layout = objective.layout()
        # All processes fit the same initial weights, so these batches are not shared out.
        objective.start_on(self.load(data.train, rows) for rows in self.epoch_batches(0))
        # After start_on sets weights, and before prepare copies or shards them.
        optimizers = make_optimizers(list(objective.named_parameters()), config.optim)
        self.module, *self.optimizers = accelerator.prepare(objective, *optimizers)
        self.state = TrainingState(accelerator, self.module, self.optimizers)
        self.record: Identity | None = None
        self.progress.epoch_steps = self._epoch_steps()
        self.num_steps = self._count_steps()
        self.stopping = Stopping(max_minutes=config.max_minutes, started=started)
        self.stop: Stop | None = None
        self.pace = StepPace()
        self.prompts = self._prompts_to_decode()
        self.screen = Screen(is_shown=accelerator.is_main_process)

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    # -- data -------------------------------------------------------------------------------

    @property
    def per_step(self) -> int:
        """Return the number of batches in an optimizer step, over all processes."""
        return self.config.accumulation * self.world

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """Return an epoch's batches for all processes. Batch i is for process i mod world."""
        return batches_left(self.lengths, self.config.seed, epoch, self.progress.cut, [])

    def _rest_of_epoch(self) -> list[list[int]]:
        """Return the batches that ``progress.batch`` counts in."""
        progress, seed = self.progress, self.config.seed
        return batches_left(self.lengths, seed, progress.epoch, progress.cut, progress.done)

    def _epoch_steps(self) -> int:
        # An epoch's last window may be short; it is a step, too.
        return math.ceil(len(self.epoch_batches(0)) / self.per_step)

    def _count_steps(self) -> int:
        if self.config.max_steps is not None:
            return self.config.max_steps
        whole = math.ceil(self.progress.epoch_steps * self.config.epochs)
        return max(1, whole + self.progress.extra_steps)

    def windows(self) -> Iterator[list[Batch]]:
        """Yield this process's batches for each optimizer step, from the saved position onward."""
        progress, per_step = self.progress, self.per_step
        while True:
            batches = self._rest_of_epoch()
            while progress.batch < len(batches):
                chosen = batches[progress.batch : progress.batch + per_step]
                # Before the yield: this step's checkpoint must point to the next window.
                progress.batch += len(chosen)
                if self.objective.features is not None:
                    # The next step's hidden states load during this step.
                    coming = batches[progress.batch : progress.batch + per_step]
                    mine = coming[self.rank :: self.world]
                    ids = [self.data.train[rows]["input_ids"] for rows in mine]
                    self.objective.features.expect(list(zip(mine, ids, strict=True)))
                yield [self.load(self.data.train, rows) for rows in chosen[self.rank :: self.world]]
            progress.epoch, progress.batch, progress.done = progress.epoch + 1, 0, []

    def load(self, dataset: Rows, rows: list[int]) -> Batch:
        batch = Batch.of_rows(dataset, rows, self.pad_id, packing=self.config.packing)
        # A dump numbers validation rows after the training rows.
        first = 0 if dataset is self.data.train else len(self.data.train)
        batch = replace(batch, rows=[first + row for row in rows])
        return batch.to(self.accelerator.device)

    def generator(self, *key: int) -> torch.Generator:
        """Return the random generator for a forward pass. A resumed run draws the same numbers.

        A training batch's key is the step and the batch's place in the window over all processes.
        """
        mixed = 0
        for part in (self.config.seed, 0, *key):
            # The + 1 makes zeros count: keys with one more zero stay distinct.
            mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
        return torch.Generator().manual_seed(mixed)

    # -- one optimizer step -----------------------------------------------------------------

    def optimize(self, window: list[Batch]) -> dict[str, float]:
        """Run one optimizer step on the mean loss over all supervised tokens in the window.

        A mean of micro-batch means would depend on how the window is cut into micro-batches.
        """
        accelerator, world = self.accelerator, self.world
        self.objective.done = self.progress.step / self.num_steps
        count = sum(self.objective.num_supervised(batch) for batch in window)
        total = torch.tensor(count, device=accelerator.device)
        total = accelerator.reduce(total, "sum").clamp_min(1)
        rate = self._set_rate()
        # Counting slows a step down, so a launch counts its first step only.
        counts_flops = self.config.peak_tflops is not None and not self.pace.flops_per_token
        with flop_counter() if counts_flops else nullcontext() as counter:
            # DDP averages gradients over processes; their number makes it a sum again.
            sums, losses = self._passes(window, scale=world / total)
        flops = self.pace.flops_of(sum(batch.ids_BT.numel() for batch in window), counter)
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        largest = self.config.optim.clip_norm or math.inf
        norm = float(accelerator.clip_grad_norm_(parameters, largest))
        totals = self.reduce(sums, {**self.stopping.wishes(), "flops": flops})
        if not (math.isfinite(norm) and math.isfinite(totals["loss"])):
            self._refuse(window, losses, norm, totals["loss"] / int(total))
        self.stopping.agree(totals)
        self.pace.flops += totals["flops"]
        with muon_in_float32(accelerator.device):
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += int(total)
        metrics = self.objective.summarize(totals)
        return {**metrics, "grad_norm": norm, "lr": rate}

    def _wait_for_features(self, batch: Batch) -> None:
        """Fetch hidden states from a server. If one process has lost its server, all raise."""
        features = self.objective.features
        if features is None or not features.may_be_lost:
            return
        lost = features.wait_for(batch)
        # All raise together: the others would wait for this process in their next collective call.
        count = torch.tensor(float(lost is not None), device=self.accelerator.device)
        if float(self.accelerator.reduce(count, "sum")):
            raise lost or FeaturesLost("features: another process has lost its server")

    def _set_rate(self) -> float:
        """Set the learning rate before the backward pass, because DeepSpeed steps inside it."""
        optim = self.config.optim
        rate = optim.lr * rate_factor(self.progress.step, self.num_steps, optim)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        return rate

    def _passes(
        self, window: list[Batch], *, scale: Tensor
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Add the gradients of ``scale`` times each loss. Return the metric sums and the losses."""
        accelerator = self.accelerator
        sums: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        for index, batch in enumerate(window):
            self._wait_for_features(batch)
            if self.config.reuse > 1:
                with accelerator.autocast():
                    batch = self.kept.attach(batch, self.objective.hidden)
            generator = self.generator(self.progress.step, index * self.world + self.rank)
            # Processes exchange gradients only in a window's last backward pass.
            is_last = index == len(window) - 1
            sync = nullcontext() if is_last else accelerator.no_sync(self.module)
            with accelerator.autocast(), sync:
                output = self.module(batch, generator)
                accelerator.backward(output.loss * scale)
            losses.append(output.loss.detach())
            add_sums(sums, output)
        return sums, losses

    def _refuse(
        self, window: list[Batch], losses: list[Tensor], norm: float, loss: float
    ) -> NoReturn:
        """Save the batches with a non-finite loss, or all if there are none, and end the run."""
        # Norm and loss cover all processes, so every process gets here at the same step.
        own = {index * self.world + self.rank: float(x) for index, x in enumerate(losses)}
        bad = {index: value for index, value in own.items() if not math.isfinite(value)}
        count = torch.tensor(len(bad), device=self.accelerator.device)
        # If only the gradient norm is bad, any batch may be the cause.
        kept = bad if int(self.accelerator.reduce(count, "sum")) else own
        step = self.progress.step
        where = "the batch is that of another process"
        if kept:
            batches = {index: window[index // self.world] for index in kept}
            path = save_bad_batches(self.config.output_dir, step, self.rank, kept, batches)
            where = f"the batch is kept in {path}"
        raise FloatingPointError(
            f"gradient norm is {norm}, loss {loss} at step {step}; {where}; lower optim.lr, or "
            "leave these rows out"
        )

    def reduce(
        self, sums: dict[str, Tensor], numbers: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Sum over processes, in one exchange. Every process must have the same keys."""
        device = self.accelerator.device
        # One copy to the device for all that the host knows.
        known = {k: float(sums[k]) for k in sorted(sums) if sums[k].device.type == "cpu"}
        known |= numbers or {}
        names = sorted(sums.keys() - known.keys())
        parts = [sums[name].double() for name in names]
        parts.append(torch.tensor(list(known.values()), dtype=torch.float64, device=device))
        totals = self.accelerator.reduce(torch.hstack(parts), "sum")
        return dict(zip([*names, *known], totals.tolist(), strict=True))

    # -- evaluation and checkpoints ---------------------------------------------------------

    def _prompts_to_decode(self) -> list[list[int]]:
        """Return held-out prompts to decode in evaluations, or none if the target is not whole."""
        evaluation, objective = self.config.evaluation, self.objective
        count, prompts = evaluation.decode_prompts, list[list[int]]()
        has_target = self.config.features is None and not is_sharded(self.config, self.accelerator)
        if count and has_target:
            room = context_length(objective.target.config)
            prompts = first_turns(self.data.valid, count, max_positions=room)
        if evaluation.best_by == "decoded" and not prompts:
            raise ValueError(
                "evaluation.best_by: 'decoded', but no prompt can be decoded, which needs "
                "validation rows and a whole target (no features, no shard_target); give expected"
            )
        return prompts

    @property
    def best_by(self) -> str:
        """Describe the score. Two scores compare only if their descriptions are equal."""
        is_decoded = self.prompts and self.config.evaluation.best_by != "expected"
        return f"decoded L' of {len(self.prompts)} prompts" if is_decoded else "expected L'"

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return metrics over the first validation rows (if any), which the processes share."""
        rows = list(range(min(self.config.evaluation.max_rows, len(self.data.valid))))
        if not rows:
            return {}
        # At most the training batch's tokens: they have fitted into memory before.
        longest = max(len(ids) for ids in self.data.valid[rows]["input_ids"])
        fitting = min(EVALUATED_ROWS, max(1, self.config.batch_tokens // longest))
        together = fitting * self.world
        self.module.eval()
        sums: dict[str, Tensor] = {}
        options = self.objective.evaluation_options()
        for start in range(0, len(rows), together):
            mine = rows[start : start + together][self.rank :: self.world]
            # With a sharded network every process must run equally often. A process without rows
            # runs one with weight 0.
            batch = self.load(self.data.valid, mine or rows[:1])
            self._wait_for_features(batch)
            with self.accelerator.autocast():
                # The same draws in every evaluation: scores differ by the weights alone.
                output = self.module(batch, self.generator(0, start), **options)
            add_sums(sums, output, weight=bool(mine))
        self.module.train()
        return self.objective.summarize(self.reduce(sums))

    def save(self, metrics: dict[str, float]) -> None:
        """Write a checkpoint for resuming the run."""
        folder = checkpoint.step_folder(self.config.output_dir, self.progress.step)
        temporary = partial(folder)
        if self.accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / STATE).mkdir(parents=True)
        # Every process must call this: it gathers a sharded network.
        weights = self.accelerator.get_state_dict(self.module)
        with naming(folder):
            if self.accelerator.is_main_process:
                self._write_head(temporary, metrics, weights)
            # Nobody may write before the main process has made the folder.
            self.accelerator.wait_for_everyone()
            self.state.save(temporary / STATE, self.progress)
        # Nothing is published before every process has written its part.
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            if self.state.sharding == DistributedType.DEEPSPEED:
                checkpoint.check_deepspeed(temporary / STATE, self.world)
            with naming(folder):
                checkpoint.publish_folder(temporary, folder)
            checkpoint.rotate(self.config.output_dir, self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _add_decoded(self, metrics: dict[str, float], weights: dict[str, Tensor]) -> None:
        """Decode the held-out prompts in the main process, and give every process the figures."""
        if not self.prompts:
            return
        metrics |= on_main_process(
            self.accelerator, lambda: decode(self.objective, weights, self.prompts)
        )
        if self.config.evaluation.best_by != "expected":
            metrics["score"] = metrics[DECODED_LENGTH]

    def _save_best(self, metrics: dict[str, float], weights: dict[str, Tensor]) -> bool:
        """Replace best/ after a better score or without validation rows. Return True if done."""
        progress = self.progress
        if metrics:
            if metrics["score"] <= progress.best_score:
                progress.since_best += 1
                return False
            progress.best_score, progress.since_best = metrics["score"], 0
        progress.best_step, progress.best_metrics = progress.step, metrics
        progress.best_by = self.best_by
        if self.accelerator.is_main_process:
            checkpoint.replace_folder(
                self.config.output_dir / "best",
                lambda folder: self._write_head(folder, metrics, weights),
            )
        return True

    def _write_head(
        self, folder: Path, metrics: dict[str, float], weights: dict[str, Tensor]
    ) -> None:
        """Write the head and the run's record, and read the weights' file back."""
        self.objective.save(folder, metrics, weights)
        if self.record is not None:
            self.record.write(folder)
        due, is_deepspeed = self.layout, self.state.sharding == DistributedType.DEEPSPEED
        if is_deepspeed and self.accelerator.mixed_precision == "bf16":
            # DeepSpeed holds the weights themselves in bfloat16.
            due = {
                name: (torch.bfloat16 if dtype.is_floating_point else dtype, shape)
                for name, (dtype, shape) in self.layout.items()
            }
        checkpoint.check_written(folder / WEIGHTS_FILE, due)

    def restore(self) -> None:
        """Load the newest undamaged checkpoint, if there is any.

        Raises:
            ValueError: every checkpoint is damaged, the newest does not fit this run, or ``resume``
                is false although there is a checkpoint.
        """
        output_dir = self.config.output_dir
        folders = checkpoint.step_folders(output_dir)
        if folders and not self.config.resume:
            raise ValueError(
                f"resume: false, but {folders[-1]} is there; remove {output_dir}, or "
                "give --resume true or another --output_dir"
            )
        folder = on_main_process(self.accelerator, self._choose_checkpoint)
        changes = on_main_process(self.accelerator, lambda: self._check_records(folder))
        # This launch's own, before loading replaces the progress.
        cut = self.progress.cut
        if folder is not None:
            try:
                self.progress = self.state.load(folder / STATE)
            except (RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[-1].strip()
                raise ValueError(
                    f"resume: {folder} was written with another configuration ({reason}); "
                    "give another --output_dir, or the settings in its config.yaml"
                ) from error
            self._keep_place(cut)
            if self.progress.step > self.num_steps:
                raise ValueError(
                    f"max_steps: {self.num_steps}, but {folder} is past it; raise it, or epochs"
                )
            told = "".join(f"; {change.name}: {change}" for change in changes)
            if self.progress.step == self.num_steps:
                told += "; nothing is left to train: raise max_steps, or epochs"
            self.screen.say(f"resumed at step {self.progress.step} of {self.num_steps}{told}")
        self._check_best()
        if self.accelerator.is_main_process:
            # Also without a checkpoint: a killed run may have logged steps but saved none.
            log, is_evaluated = output_dir / "metrics.jsonl", not self.progress.evaluation_pending
            truncate_log(log, step=self.progress.step, is_evaluated=is_evaluated)

    def _keep_place(self, own: Cut) -> None:
        """Go on behind the checkpoint's last row, also with batches cut in another way.

        Args:
            own: this launch's. The checkpoint's group stays if it suits settings and processes.
        """
        progress, saved = self.progress, self.progress.cut
        if self.config.batch_group is None and not saved.group % self.world:
            own = replace(own, group=saved.group)
        # A place inside a round of processes would give some of them a batch less.
        if own != saved or progress.batch % self.world:
            if progress.batch:
                progress.done = [*progress.done, DonePart(saved, progress.batch)]
                what = "batches" if own.group == saved.group else f"groups of {own.group} batches"
                self.screen.say(f"the rows that are left in this epoch are cut into new {what}")
            progress.cut, progress.batch = own, 0
        if progress.epoch_steps != (epoch_steps := self._epoch_steps()) or progress.done:
            # Steps of another size are behind: count those that are left.
            progress.epoch_steps, progress.extra_steps = epoch_steps, 0
            rest = math.ceil((len(self._rest_of_epoch()) - progress.batch) / self.per_step)
            more = self.config.epochs - progress.epoch - 1
            left = max(0, rest + math.ceil(epoch_steps * more))
            whole = math.ceil(epoch_steps * self.config.epochs)
            progress.extra_steps = progress.step + left - whole
        self.num_steps = self._count_steps()

    def _choose_checkpoint(self) -> Path | None:
        """Remove partial and damaged checkpoints, and return the newest sound one."""
        checkpoint.tidy(self.config.output_dir)
        folder, damages = checkpoint.newest_sound(self.config.output_dir)
        for line in damages:
            self.screen.say(line)
        return folder

    def _check_records(self, folder: Path | None) -> list[Change]:
        """Refuse checkpoints of another run. Return what has changed since the newest one."""
        assert self.record is not None
        best = self.config.output_dir / "best"
        found = [place for place in (folder, best) if place is not None and place.exists()]
        changes = [check_record(place, self.record) for place in found]
        return changes[0] if changes else []

    def _check_best(self) -> None:
        """Let the next evaluation replace best/ if its score cannot be compared with new ones."""
        progress, best = self.progress, self.config.output_dir / "best"
        has_best = on_main_process(self.accelerator, best.exists)
        reason = ""
        if has_best and not progress.step:
            reason = f"{best} is of this run, which ended before its first checkpoint"
        elif progress.best_step and not has_best:
            reason = f"{best} is gone"
        elif progress.best_step and progress.best_by != self.best_by:
            reason = f"{best} was chosen by another score"
        if reason:
            progress.best_score, progress.since_best = -math.inf, 0
            self.screen.say(f"{reason}: the next evaluation writes it anew")

    # -- the run ----------------------------------------------------------------------------

    def start_log(self) -> MetricsLog:
        """Start the run's log, and print the run's settings."""
        config, accelerator, num_steps = self.config, self.accelerator, self.num_steps
        forecast = RunForecast(
            method=config.method,
            kind="decoded" if self.prompts else "expected",
            peak_rate=config.optim.lr,
            final_decay=1 - rate_factor(num_steps - 1, num_steps, config.optim),
            num_steps=num_steps,
            longest=longest_round(self.objective),
            is_first=self.objective.config.init_from is None,
        )
        log = MetricsLog(
            config, accelerator, progress=self.progress, pace=self.pace, forecast=forecast
        )
        facts = RunFacts(
            config=config,
            accelerator=accelerator,
            num_trainable=self.num_trainable,
            num_steps=num_steps,
            num_valid=len(self.data.valid),
            num_prompts=len(self.prompts),
            notes=list(self.objective.notes()),
        )
        self.screen.begin(facts, self.progress.step)
        return log

    def run(self) -> dict[str, float]:
        """Train to the last step or until ``stop`` is set. Return the last evaluation's metrics."""
        progress, log = self.progress, self.start_log()
        windows = self.windows()
        with self.stopping.signals():
            if progress.evaluation_pending:
                self._evaluate_and_keep(log)
            self.stop = self.stop or self._out_of_patience()
            while progress.step < self.num_steps and self.stop is None:
                place = progress.epoch, progress.batch, progress.done
                began = time.perf_counter()
                window = next(windows)
                loaded = time.perf_counter()
                try:
                    values = self.optimize(window)
                except FeaturesLost as lost:
                    # The window was taken but not trained on: the resumed run begins with it.
                    progress.epoch, progress.batch, progress.done = place
                    self.save(progress.metrics)
                    self.stop = stop_for(lost)
                    break
                self.pace.waited_s += loaded - began
                self.pace.total_s += time.perf_counter() - began
                log.add(values, self.screen)
                self._finish_step(log)
        log.close()
        self.screen.end(self.config.output_dir, progress, self.stop)
        return progress.metrics

    def _finish_step(self, log: MetricsLog) -> None:
        """Evaluate, save or stop after a step, if due."""
        config, progress = self.config, self.progress
        done = progress.step == self.num_steps
        # A signal during the last step changes nothing: the run is complete, with status 0.
        self.stop = None if done else self.stopping.agreed
        if done or config.evaluation.is_due(progress.step, self.num_steps):
            if self.stop is None:
                self._evaluate_and_keep(log)
                self.stop = self.stop or (None if done else self._out_of_patience())
            else:  # whoever sent a signal may not wait long enough for an evaluation
                progress.evaluation_pending = True
        # After the evaluation: the checkpoint needs its metrics and best score.
        if done or self.stop is not None or progress.step % config.save_every_steps == 0:
            self.save(progress.metrics)

    def _evaluate_and_keep(self, log: MetricsLog) -> None:
        """Evaluate, log the metrics, and save the network to best/ after a better score."""
        progress = self.progress
        try:
            progress.metrics = metrics = self.evaluate()
        except FeaturesLost as lost:
            progress.evaluation_pending, self.stop = True, stop_for(lost)
            return
        # Gathered once, for decoding and for best/.
        weights = self.accelerator.get_state_dict(self.module)
        self._add_decoded(metrics, weights)
        progress.evaluation_pending = False
        values = {f"valid/{key}": value for key, value in metrics.items()}
        forecast = log.figures(values) if metrics and progress.step == self.num_steps else {}
        if metrics:
            log.write(values | forecast)
        is_best = self._save_best(metrics, weights)
        if metrics:
            self.screen.evaluated(progress.step, metrics, is_best=is_best)
        if forecast:
            self.screen.say(told(forecast, log.forecast.kind))

    def _out_of_patience(self) -> Stop | None:
        progress, patience = self.progress, self.config.evaluation.patience
        if not patience or progress.since_best < patience:
            return None
        return Stop(
            f"the {self.best_by} turned: {progress.metrics['score']:.4f} now, at most "
            f"{progress.best_score:.4f} in the last {progress.since_best} evaluations "
            f"(evaluation.patience); best/ has step {progress.best_step}; with a larger patience "
            "the same command goes on"
        )


def stop_for(lost: FeaturesLost) -> Stop:
    """Return the end of a run whose servers for hidden states are lost."""
    return Stop(f"{lost}; {GO_ON}", 1)


def add_sums(sums: dict[str, Tensor], output: LossOutput, *, weight: float = 1.0) -> None:
    entries = {"loss": output.loss.detach(), "count": output.counted, **output.sums}
    for name, value in entries.items():
        # In float64, float32 losses add up without drift, and counts stay exact.
        sums[name] = sums.get(name, 0.0) + weight * value.double()
