"""A recipe's values, from the shipped configuration for the target nearest in size, and its text.

No number of a network or optimizer stands here: the configurations have them, and this file the
reasons. What a target or machine cannot take is changed, with the reason in the recipe.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...files import Values, read_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
OF_A_TARGET = ("boundaries", "features", "depth_layers")
"""Keys under model that fit one number of layers."""
COPIED = ("optim", "batch_tokens", "evaluation", "save_every_steps")


@dataclass(frozen=True)
class Size:
    """Shipped configurations for targets of about one size."""

    parameters: float
    heads: Mapping[str, str]
    """Method -> configuration. A missing method has the paper's network, which is the default, and
    the rest from eagle3's."""
    epochs: str
    """Configuration for the epochs, as some count steps for one data set."""
    max_answer: int
    """--max-tokens of data regenerate."""
    answer_batch: int
    """--batch of data regenerate."""
    answers: str
    """Where these two are from."""


SIZES = (
    Size(
        parameters=7e6,
        heads={
            "eagle3": "eagle/tiny_eagle3",
            "eagle": "eagle/tiny_eagle",
            "spd": "spd/tiny_n4",
            "ppsd": "ppsd/tiny_n4",
            **{name: f"{name}/tiny" for name in ("mtp", "dflash", "dspark", "flexspec")},
        },
        epochs="spd/tiny",
        max_answer=128,
        answer_batch=210,
        answers="docs/lab/results_embedded.md",
    ),
    Size(
        parameters=1.35e8,
        heads={
            **{name: f"real/smollm2_{name}_n4" for name in ("spd", "ppsd")},
            **{
                name: f"real/smollm2_{name}"
                for name in ("eagle3", "eagle", "dflash", "dspark", "flexspec")
            },
        },
        epochs="spd/tiny",
        max_answer=320,
        answer_batch=96,
        answers="docs/lab/reproduce_smollm2.md",
    ),
    Size(
        parameters=6e8,
        heads={
            "eagle3": "eagle/eagle3_qwen3_8b",
            "spd": "spd/qwen3_5_4b_n4",
            "ppsd": "ppsd/qwen3_5_4b_n4",
            "flexspec": "flexspec/llama_3_1_8b",
        },
        epochs="",
        max_answer=1024,
        answer_batch=32,
        answers="docs/data.md",
    ),
)
"""The last one's parameters are those of its smallest target, in docs/tutorial.md."""

WHY = {
    "model.draft_vocab_size": "the most frequent tokens of {vocab_size:,}; a smaller LM head, "
    "docs/train.md#use-less-memory",
    "model.share_head": "the target's LM head: nothing to learn or store, "
    "docs/lab/reproduce_smollm2.md",
    "model.teacher_vocabulary": "steps take 19 to 35 % less time, docs/lab/plan_tables.md",
    "model.loss": "compared in docs/lab/training_trials.md",
    "model.start": "0.15 more acceptance after 100 steps, docs/train.md#recipes",
    "model.distillation_weight": "the paper's 0.1 learned more slowly, docs/lab/training_trials.md",
    "model.num_stages": "stages of the target's pipeline; --stages of pipedraft new",
    "data.max_length": "tokens per row; longer rows are cut",
    "data.too_long": "as in the paper",
    "optim.name": "as docs/train.md#recipes for targets of this size",
    "optim.lr": "peak rate, with the same source",
    "optim.schedule": "the rate falls to zero",
    "optim.warmup_fraction": "share of the steps in which the rate rises",
    "batch_tokens": "tokens per forward pass of a process; with few tokens, small batches learn "
    "more, docs/train.md#recipes",
    "epochs": "prefer new text to more epochs, docs/train.md#what-to-expect",
    "evaluation.every_steps": "a shorter run is evaluated in its middle and at its end",
    "evaluation.max_rows": "held-out rows",
    "save_every_steps": "Ctrl-C saves, too; the same command resumes",
}
"""Key -> comment. Other keys of a network are explained on their method's page."""


@dataclass(frozen=True)
class Chosen:
    """One value, and its comment."""

    value: Any
    why: str = ""


Recipe = dict[str, Chosen]
"""Key with a dot for a section -> value."""


def nearest_size(parameters: float) -> Size:
    """Return the size nearest by ratio."""
    return min(SIZES, key=lambda size: abs(math.log(size.parameters / parameters)))


def shipped(name: str) -> Values:
    found: Values = read_yaml(CONFIGS / f"{name}.yaml", "configs")
    return found


def page_of(method: str) -> str:
    return f"docs/methods/{'eagle1' if method == 'eagle' else method}.md"


def flat(section: str, values: Values) -> Values:
    return {f"{section}.{key}": value for key, value in values.items()}


def copied_values(size: Size, method: str) -> Values:
    """Return the values that a recipe takes from shipped configurations, by key with dots."""
    rest = shipped(size.heads.get(method, size.heads["eagle3"]))
    network = rest.get("model", {}) if method in size.heads else {}
    found = flat("model", {k: v for k, v in network.items() if k not in OF_A_TARGET})
    lengths = {k: rest["data"][k] for k in ("max_length", "too_long") if k in rest["data"]}
    found |= flat("data", lengths)
    for key in COPIED:
        found |= flat(key, rest[key]) if isinstance(rest[key], dict) else {key: rest[key]}
    epochs = shipped(size.epochs) if size.epochs else rest
    return found | {"epochs": epochs["epochs"]}


def sources_of(size: Size, method: str) -> str:
    """Name the configurations behind ``copied_values``."""
    name = size.heads.get(method)
    own = f"configs/{name or size.heads['eagle3']}.yaml"
    network = "" if name else ", the network the paper's (docs/config.md)"
    epochs = f", epochs configs/{size.epochs}.yaml's" if size.epochs else ""
    return own + network + epochs


def make_recipe(size: Size, method: str, stages: int | None, *, vocab_size: int) -> Recipe:
    """Return a recipe's entries, without target and machine."""
    values = copied_values(size, method)
    if values.get("model.draft_vocab_size", 0) >= vocab_size:
        del values["model.draft_vocab_size"]
    if stages is not None:
        values["model.num_stages"] = stages
    page = f"{page_of(method)}#settings"
    return {
        key: Chosen(value, WHY.get(key, page).format(vocab_size=vocab_size))
        for key, value in values.items()
    }


ORDER = ("method", "target", "output_dir", "model", "data", "optim")
COLUMN = 34


def text_of(recipe: Recipe, head: str) -> str:
    """Return a recipe as commented YAML.

    Args:
        head: lines of comment at the top.
    """
    sections = dict.fromkeys([*ORDER, *(key.partition(".")[0] for key in recipe)])
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for section in sections:
        if section in recipe:
            lines.append(_line(section, recipe[section]))
        own = [key for key in recipe if key.startswith(f"{section}.")]
        lines += [f"{section}:"] * bool(own)
        lines += [_line(f"  {key.partition('.')[2]}", recipe[key]) for key in own]
    return "\n".join(lines) + "\n"


def _line(key: str, entry: Chosen) -> str:
    shown = yaml.safe_dump(entry.value, default_flow_style=True, width=math.inf)
    line = f"{key}: {shown.partition(chr(10) + '...')[0].strip()}"
    return f"{line:<{COLUMN}}  # {entry.why}" if entry.why else line
