"""Compare every exported head in vLLM with pipedraft, and plant faults that must be found.

`make engines` runs this. Each case exports a head, possibly changes its files, and decodes the same
prompts in vLLM and here. A sound case must agree with ours. Each planted fault must be identified.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from pipedraft.endings import leave_at_interrupts, run_command
from pipedraft.errors import Failure, make_folder
from pipedraft.options import option

if __name__ == "__main__":
    leave_at_interrupts()

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipedraft.eval.arguments import FewPromptsOptions
from pipedraft.eval.checkpoints import load_head, read_drafts
from pipedraft.eval.engine_parity import VLLM, EngineComparison, decode_in_engine, engine_depth
from pipedraft.eval.parity_rows import Decoding
from pipedraft.eval.tables import Table, align_columns
from pipedraft.eval.tasks import encode_turn, load_tasks
from pipedraft.files import Values, to_json, write_atomically
from pipedraft.models.exchange.export import export
from pipedraft.models.heads.draft import CONFIG_FILE, WEIGHTS_FILE
from pipedraft.models.target import choose_decoding_threads, load_target, load_tokenizer
from pipedraft.pretrained import quieten

LARGEST_DIFFERENCE = 0.02
"""Maximum difference between the engine's tau and ours."""
EMBEDDED, SMOLLM2 = "assets/target", "out/smollm2"
SMOLLM2_HEAD, EAGLE3_HEAD = "assets/heads/smollm2_eagle3", "assets/heads/eagle3"
FOLDER = "out/engines"
"""Folder for heads that do not ship; the Makefile trains each of them for 60 steps."""
Settings = dict[str, object]
Tensors = dict[str, torch.Tensor]


EXAMPLE = """\
example:
  make engines  # vLLM's environment, heads of 60 steps, this command
  python benchmarks/planted_faults.py --only whole,DFlash

Exit status 0: all agree. 1: a head differs from ours, or a planted fault is not found. 2: bad
input.
"""


@dataclass(frozen=True, kw_only=True)
class FaultOptions(FewPromptsOptions):
    """Decode with every exported head in vLLM and here, and find planted faults."""

    PROG: ClassVar[str] = "benchmarks/planted_faults.py"
    EXAMPLE: ClassVar[str] = EXAMPLE

    engine_python: Path = option(Path("out/engines/vllm/bin/python"), metavar="FILE")
    """python executable in the environment with vLLM"""
    only: tuple[str, ...] = option((), metavar="NAMES")
    """comma list: run cases with any listed word in their name; default: all"""
    depth: int = option(3, metavar="K", least=1)
    """draft tokens per chain, for heads without a fixed number"""
    max_new_tokens: int = option(64, metavar="M", least=2)
    """new tokens per answer"""
    out: Path = option(Path("out/engines"), metavar="OUT")
    """folder for engines.json"""


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """Test case with one head in one layout, either as exported or changed."""

    name: str
    checkpoint: str = EAGLE3_HEAD
    target: str = EMBEDDED
    layout: str = "speculators"
    settings: Callable[[Settings], Settings] | None = None
    """Returns changed entries of the exported config.json."""
    weights: Callable[[Tensors], Tensors] | None = None
    cause: str | None = None
    """Fault to identify; None: the case must agree."""
    dtype: str = "float32"
    has_other_template: bool = False
    """Give the engine's copy of the target another chat template."""


LAYERS = "eagle_aux_hidden_state_layer_ids"
ROPE = {"rope_type": "default", "rope_theta": 500000.0}


def _next_layers(config: Values) -> Settings:
    return {LAYERS: [layer + 1 for layer in config[LAYERS]]}


def _other_base(config: Values) -> Settings:
    changed = config["transformer_layer_config"] | {"rope_theta": 5e5, "rope_parameters": ROPE}
    return {"transformer_layer_config": changed}


def _norms_of_one(weights: Tensors) -> Tensors:
    return {name: torch.ones_like(x) for name, x in weights.items() if "fc_norm" in name}


CASES = (
    EngineCase(name="EAGLE-3, draft vocabulary, fc_norm", checkpoint=SMOLLM2_HEAD, target=SMOLLM2),
    EngineCase(name="EAGLE-3, whole vocabulary"),
    EngineCase(name="EAGLE-3, five layers", checkpoint=f"{FOLDER}/eagle3_five"),
    EngineCase(name="EAGLE-3, layers 13, 2, 8", checkpoint=f"{FOLDER}/eagle3_unsorted"),
    EngineCase(name="EAGLE-1, no bias", checkpoint=f"{FOLDER}/eagle_no_bias", layout="sglang"),
    EngineCase(name="DFlash", checkpoint=f"{FOLDER}/dflash"),
    EngineCase(name="DFlash", checkpoint=f"{FOLDER}/dflash", layout="sglang"),
    EngineCase(name="planted: layer", settings=_next_layers, cause="layer off by one"),
    EngineCase(name="planted: position", settings=_other_base, cause="position"),
    EngineCase(
        name="planted: norm",
        checkpoint=SMOLLM2_HEAD,
        target=SMOLLM2,
        weights=_norms_of_one,
        cause="norm",
    ),
    EngineCase(
        name="planted: vocabulary",
        checkpoint=SMOLLM2_HEAD,
        target=SMOLLM2,
        weights=lambda held: {"d2t": torch.zeros_like(held["d2t"])},
        cause="vocabulary map",
    ),
    EngineCase(name="planted: dtype", dtype="bfloat16", cause="dtype"),
    EngineCase(name="planted: template", has_other_template=True, cause="template"),
)


@cache
def _target(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    target = load_target(name, dtype=torch.float32)
    choose_decoding_threads(target)
    return target, load_tokenizer(name)


def _with_other_template(target: str, folder: Path) -> str:
    folder.mkdir()
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = f"{tokenizer.chat_template} "
    tokenizer.save_pretrained(folder)
    for file in Path(target).resolve().iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    return str(folder)


def _export(case: EngineCase, checkpoint: Path, files: Path) -> None:
    export(checkpoint, case.layout, files, target=case.target)  # type: ignore[arg-type]
    if case.settings is not None:
        config = json.loads((files / CONFIG_FILE).read_text())
        (files / CONFIG_FILE).write_text(json.dumps(config | case.settings(config)))
    if case.weights is not None:
        held = load_file(files / WEIGHTS_FILE)
        save_file(held | case.weights(held), files / WEIGHTS_FILE, metadata={"format": "pt"})


def run_case(case: EngineCase, options: FaultOptions, place: Path) -> EngineComparison:
    """Export the head, change its files, decode in the engine and here, and compare.

    Raises:
        Failure: the engine does not run the head.
    """
    target, tokenizer = _target(case.target)
    (folder,) = read_drafts([case.checkpoint], case.target, None)[2]
    draft = load_head(folder, target)
    depth = engine_depth(draft, options.depth)
    _export(case, folder, place / "files")
    tasks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    prompts = [prompt for task in tasks.values() for prompt in task]
    encoded = [(encode_turn(tokenizer, prompt, []), prompt) for prompt in prompts]
    name = case.target
    if case.has_other_template:
        name = _with_other_template(case.target, place / "target")
    compared = decode_in_engine(
        VLLM,
        options.engine_python,
        encoded,
        draft,
        target,
        name=str(Path(name).resolve()),
        files=str(place / "files"),
        depth=depth,
        max_new_tokens=options.max_new_tokens,
        dtype=case.dtype,
    )
    decoding = Decoding(
        target, tokenizer, draft, depth=depth, max_new_tokens=options.max_new_tokens
    )
    with torch.inference_mode():
        for ids, prompt in encoded:
            decoding.run(ids)
            compared.add(f"{prompt.task}/{prompt.id}", decoding.result)
        compared.finish()
    return compared


def row_of(case: EngineCase, options: FaultOptions) -> tuple[list[str], bool]:
    """Return a case's table row, and True if the result is as expected."""
    with tempfile.TemporaryDirectory() as place:
        try:
            compared = run_case(case, options, Path(place))
        except Failure as error:
            return [case.name, case.layout, *"-----", f"{error}"[:90]], False
    here, there = compared.shares
    tau_here, tau_there = compared.mean_acceptance_lengths
    cause = compared.check.first.what if compared.check.first else None
    num_texts = len(compared.texts)
    agrees = compared.num_equal == num_texts and abs(tau_here - tau_there) < LARGEST_DIFFERENCE
    row = [case.name, case.layout, f"{compared.num_equal}/{num_texts}"]
    row += [" ".join(f"{x:.3f}" for x in side) for side in (here, there)]
    row += [f"{tau_here:.3f}", f"{tau_there:.3f}", cause or "agrees"]
    return row, cause == case.cause and (agrees or cause is not None)


HEADER = ["head", "layout", "outputs equal", "here by position", "there"]
HEADER += ["tau here", "tau there", "found"]


def main() -> None:
    """Run all cases. Exit with status 1 if one is not as expected."""
    options = FaultOptions.read(sys.argv[1:])
    quieten()
    make_folder("--out", options.out)
    rows, wrong = [], []
    for case in CASES:
        if options.only and not any(word in case.name for word in options.only):
            continue
        row, is_expected = row_of(case, options)
        rows.append(row)
        wrong += [] if is_expected else [case.name]
        print(f"{case.name}: {row[-1]}", file=sys.stderr, flush=True)
        content = {"engine": "vllm", "rows": [dict(zip(HEADER, x, strict=True)) for x in rows]}
        write_atomically(options.out / "engines.json", to_json(content))
    print(align_columns(Table(HEADER, rows)))
    if wrong:
        sys.exit(f"error: not as expected: {', '.join(wrong)}")


if __name__ == "__main__":
    run_command(main)
