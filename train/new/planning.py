"""Plan a recipe for a target and a machine, make it fit the memory, and write it."""

import math
from collections.abc import Iterator
from copy import deepcopy
from operator import itemgetter
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ...data_recipes.config import Source
from ...devices import stored_dtype
from ...errors import UsageError
from ...files import Values, packaged, write_atomically
from ...pretrained import check_whole, context_length, load_tokenizer, read_config
from ...weights import plain_files
from ..config import check_run
from ..methods import methods
from ..plan import Plan, RunSizes
from ..run import registry
from .commands import LAUNCHES, Fit, Work, answers_of, duration, run_of
from .machine import Machine, cpu_machine, gpu_machine
from .options import NewOptions
from .recipe import (
    SIZES,
    Chosen,
    Recipe,
    Size,
    make_recipe,
    nearest_size,
    page_of,
    sources_of,
    text_of,
)
from .rows import SAMPLED, Limits, measure_rows

USED_SHARE = 0.9
"""Share of a device's memory for what the plan counts; the rest is for its allocator."""
LARGE_GPUS = 8
"""GPUs to plan for if a large target meets a machine without one, as in configs/accelerate."""
FEW_STEPS = 500
"""After 500 steps, a head says little about a trained one (docs/lab/training_trials.md)."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def has_weights(target: str) -> bool:
    """Return False for a folder with a config.json alone, which can be planned but not trained."""
    place = Path(packaged(target))
    return not place.is_dir() or any(file.suffix in WEIGHTS for file in place.iterdir())


def check_weights(target: str) -> PreTrainedTokenizerBase | None:
    """Return a target's tokenizer, or None for a config.json alone.

    Raises:
        ValueError: quantized or pickled weights, no tokenizer, or no chat template.
    """
    check_whole(read_config(target, None), target, None)
    if not has_weights(target):
        return None
    if Path(packaged(target)).exists():  # from the Hub this would download the weights
        plain_files(target, None)
    tokenizer = load_tokenizer(target)
    if not tokenizer.chat_template:
        raise UsageError(
            f"target: {target!r} has no chat template; give the instruction-tuned model"
        )
    return tokenizer


# -- a recipe that fits -------------------------------------------------------------------------


def values_of(recipe: Recipe) -> Values:
    """Return a recipe as nested values."""
    found: Values = {}
    for key, chosen in recipe.items():
        section, _, name = key.partition(".")
        if name:
            found.setdefault(section, {})[name] = chosen.value
        else:
            found[section] = chosen.value
    return found


def plan_of(recipe: Recipe) -> Plan:
    # A copy: the parser fills in the sources' other fields.
    run, model, _ = check_run(deepcopy(values_of(recipe)), methods())
    return Plan(run, model, registry()[run.method])


def savings(recipe: Recipe, num_gpus: int) -> Iterator[Recipe]:
    """Yield the recipe, then with ever more changes that save memory, the cheapest first."""
    yield recipe
    if num_gpus > 1:
        why = "each GPU holds a part of the target; whole, it leaves too little memory"
        recipe = recipe | {"shard_target": Chosen(True, why)}
        yield recipe
    why = "less memory, more time: the head's layers are computed again in backward"
    recipe = recipe | {"checkpointing": Chosen(True, why)}
    yield recipe
    tokens, count = recipe["batch_tokens"].value, 1
    while tokens // 2 >= recipe["data.max_length"].value:
        tokens, count = tokens // 2, count * 2
        recipe = recipe | {
            "batch_tokens": Chosen(tokens, "tokens per forward pass; more do not fit the memory"),
            "accumulation": Chosen(count, "forward passes per optimizer step"),
        }
        yield recipe


def fit(recipe: Recipe, machine: Machine) -> Fit:
    """Return the first of ``savings`` that fits a device, under DDP if possible.

    Raises:
        UsageError: none fits.
    """
    limit, least = USED_SHARE * machine.memory, math.inf
    is_divided = machine.processes > 1 and recipe["optim.name"].value == "adamw"
    measured: dict[tuple[int, bool], RunSizes] = {}
    for strategy in [*LAUNCHES] if is_divided else ["ddp"]:
        for tried in savings(recipe, machine.num_gpus):
            plan = plan_of(tried)
            sizes = RunSizes(**vars(plan.count()), step_bytes=0.0, evaluation_bytes=0.0, flops=0.0)
            total = total_bytes(plan, sizes, machine, strategy)
            if total <= limit:  # else it is in vain to measure a batch, which takes long
                key = plan.run.batch_tokens, plan.run.checkpointing
                measured[key] = sizes = measured.get(key) or plan.measure()
                total = total_bytes(plan, sizes, machine, strategy)
                if total <= limit:
                    return Fit(tried, plan, sizes, strategy, total)
            least = min(least, total)
    raise UsageError(
        f"--gpus: {machine.num_gpus} ({machine.text}): a process needs at least {least / 1e9:.1f} "
        f"GB, more than {USED_SHARE:.0%} of a device; give more GPUs, or --gpu-memory"
    )


def total_bytes(plan: Plan, sizes: RunSizes, machine: Machine, strategy: str) -> float:
    parts = plan.memory_bytes(sizes, processes=machine.processes, strategy=strategy)
    return sum(max(part, 0.0) for part in parts.values())


# -- the command --------------------------------------------------------------------------------


def machine_for(options: NewOptions, size: Size, shape: tuple[int, int, int]) -> Machine:
    number = options.gpus
    if number is None:
        wants_gpu = size is SIZES[-1] or options.gpu_memory or options.peak_tflops
        number = torch.cuda.device_count() or (LARGE_GPUS if wants_gpu else 0)
    if not number:
        return cpu_machine(shape)
    return gpu_machine(number, options.gpu_memory, options.peak_tflops, shape)


def plan_target(options: NewOptions, source: Source, num_rows: int) -> Iterator[str]:
    """Write the recipe, and yield the lines to print as they are known."""
    tokenizer = check_weights(options.target)
    base = {
        "method": Chosen(options.method, page_of(options.method)),
        "target": Chosen(options.target),
        "output_dir": Chosen(
            str(run_of(options.recipe)), "the head: --checkpoint of eval, inference and serve"
        ),
        "data.sources": Chosen(
            [{"path": str(answers_of(options.recipe))}],
            "the target's own answers, docs/data.md#let-the-target-answer",
        ),
    }
    # Any network: the plan knows the target's size, and refuses what is no target.
    plan = plan_of(base)
    config, counts = plan.config, plan.count()
    parameters = counts.target_layers + counts.target_ends
    base["target"] = Chosen(options.target, f"{parameters:,} parameters")
    size = nearest_size(parameters)
    recipe = base | make_recipe(size, options.method, options.stages, vocab_size=config.vocab_size)
    positions = context_length(config)
    if positions < recipe["data.max_length"].value:
        recipe["data.max_length"] = Chosen(positions, "the target's positions")
    shape = recipe["batch_tokens"].value, config.hidden_size, plan.layer.intermediate_size
    machine = machine_for(options, size, shape)
    yield f"target: {options.target}, {parameters:,} parameters"
    yield f"machine: {machine.text}"
    recipe |= precision_of(machine)
    limits = Limits(size.max_answer, recipe["data.max_length"].value)
    is_single = stored_dtype(options.target, None) in (None, torch.float32)
    work = Work(
        options=options,
        size=size,
        machine=machine,
        lengths=measure_rows(source, tokenizer, limits),
        fit=fit(recipe, machine),
        num_rows=num_rows,
        answer_dtype="float32" if is_single or not machine.has_bf16 else "bfloat16",
    )
    write_atomically(options.recipe, text_of(work.fit.recipe, head_of(work)).encode())
    yield from report(work)


def precision_of(machine: Machine) -> Recipe:
    why = "saves time on this device" if machine.has_bf16 else "bfloat16 saves no time here"
    found = {"precision": Chosen("bf16" if machine.has_bf16 else "fp32", why)}
    if machine.num_gpus:
        peak = float(f"{machine.flops / 1e12:.3g}")
        found["peak_tflops"] = Chosen(peak, "of each planned GPU; adds mfu to the log")
    return found


def answering(work: Work) -> str:
    """Return the expected time for the target's answers."""
    time, most = duration(work.answer_s()), duration(work.answer_s(longest=True))
    if work.lengths.is_bound:
        return f"at most {most}"
    if time == most:
        return f"about {time}"
    longest = f"all answers have {work.size.max_answer} tokens"
    return f"about {time} if its answers are as long as the file's, {most} if {longest}"


def head_of(work: Work) -> str:
    """Return the comment at a recipe's top. The line with Needs ends the error about that file."""
    options = work.options
    return (
        f"{options.method} for {options.target}, planned for {work.machine.text}.\n"
        f"Values are from {sources_of(work.size, options.method)}.\n"
        f"Needs {answers_of(options.recipe)}: {work.answer()}\n"
        f"Then: {work.train()}\n"
        f"Then: {work.evaluate()}"
    )


def report(work: Work) -> Iterator[str]:
    """Yield what the run needs, then the three commands."""
    run, recipe, lengths = work.fit.plan.run, work.recipe, work.lengths
    yield (
        f"memory: {work.fit.bytes / 1e9:.1f} GB in a process, with {run.batch_tokens:,} tokens in "
        "a pass"
    )
    about = "at most" if lengths.is_bound else "about"
    yield (
        f"data: {work.num_rows:,} rows of {about} {lengths.row:,.0f} tokens; {work.num_steps:,} "
        "training steps"
    )
    if lengths.left_out:
        reason, number = max(lengths.left_out.items(), key=itemgetter(1))
        total = sum(lengths.left_out.values())
        yield (
            f"note: {total:,} of the first {min(work.num_rows, SAMPLED):,} rows have no prompt for "
            f"the target and will be left out ({number:,} times: {reason})"
        )
    if work.num_steps < FEW_STEPS:
        yield (
            f"note: {work.num_steps:,} steps are few: after {FEW_STEPS}, a head is still far from "
            "trained (docs/lab/training_trials.md); give more rows"
        )
    yield f"written: {recipe}"
    if not has_weights(work.options.target):
        yield (
            f"note: {work.options.target} has no weights; in {recipe} and the commands, write the "
            "folder or Hub id that has them"
        )
    yield f"\n1. answer with the target, {answering(work)}:\n    {work.answer()}"
    yield f"\n2. train the head, {about} {duration(work.train_s())}:\n    {work.train()}"
    yield f"\n3. measure it, about {duration(work.evaluate_s())}:\n    {work.evaluate()}"
