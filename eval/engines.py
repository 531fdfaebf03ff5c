"""Check every exported head in vLLM against ours, with old exports and planted faults.

`make engines` runs this. Each case exports a head, possibly changes its files, and decodes the same
prompts in vLLM and here. A sound case must agree with ours; each planted fault must be identified.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipedraft.cli import Failure, make_folder
from pipedraft.eval.arguments import EnginesOptions
from pipedraft.eval.checkpoints import load_head, read_drafts
from pipedraft.eval.engine_parity import (
    EngineComparison,
    ask_engine,
    engine_depth,
    engine_request,
)
from pipedraft.eval.parity_rows import Decoding
from pipedraft.eval.tables import Table, align_columns
from pipedraft.eval.tasks import encode_turn, load_tasks
from pipedraft.files import Values, to_json, write_atomically
from pipedraft.models.draft import WEIGHTS_FILE
from pipedraft.models.exchange.export import export
from pipedraft.models.target import choose_decoding_threads, load_target, load_tokenizer
from pipedraft.pretrained import quieten

CONFIG = "config.json"
LARGEST_DIFFERENCE = 0.02
"""Maximum difference between the engine's tau and ours."""
EMBEDDED, SMOLLM2 = "assets/target", "out/smollm2"
SMOLLM2_HEAD, EAGLE3_HEAD = "assets/heads/smollm2_eagle3", "assets/heads/eagle3"
FOLDER = "out/engines"
"""Folder for heads that do not ship; the Makefile trains each of them for 60 steps."""

Change = Callable[[Path], None]
"""Changes exported files in place."""


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """One head in one layout, as exported or changed."""

    name: str
    checkpoint: str
    target: str = EMBEDDED
    layout: str = "speculators"
    change: Change | None = None
    cause: str | None = None
    """Fault to identify; None: the case must agree."""
    refused: bool = False
    """The engine must refuse the head."""
    dtype: str = "float32"
    """Engine dtype."""
    template: bool = False
    """Give the engine's copy of the target another chat template."""


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """A case's result."""

    name: str
    layout: str
    outputs: str
    here: str
    """Accepted draft tokens per round by position."""
    there: str
    tau_here: float | None
    tau_there: float | None
    found: str
    is_expected: bool


# -- changes of exported files --------------------------------------------------------------


def _configured(**settings: object) -> Change:
    """Set entries in config.json and its ``transformer_layer_config``; None removes an entry."""

    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        places = [config, *(x for x in [config.get("transformer_layer_config")] if x)]
        for name, value in settings.items():
            for place in [x for x in places if name in x] or places[:1]:
                place.pop(name, None)
                if value is not None:
                    place[name] = value
        (folder / CONFIG).write_text(json.dumps(config))

    return change


def _weights(make: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    """Add or replace tensors."""

    def change(folder: Path) -> None:
        held = load_file(folder / WEIGHTS_FILE)
        changed = {name: x.contiguous() for name, x in (held | make(held)).items()}
        save_file(changed, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    return change


def _both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def _maps(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return d2t and t2d for a whole vocabulary."""
    size = held["lm_head.weight"].shape[0]
    zeros, ones = torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.bool)
    return {"d2t": zeros, "t2d": ones}


def _rotated(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Permute fc's columns so that they no longer match the layers."""
    parts = held["fc.weight"].chunk(3, 1)
    return {"fc.weight": torch.cat([parts[2], parts[0], parts[1]], 1)}


def _next_layer(folder: Path) -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    layers = json.loads((folder / CONFIG).read_text())[name]
    _configured(**{name: [layer + 1 for layer in layers]})(folder)


ROPE = {"rope_type": "default", "rope_theta": 500000.0}
VLLM_EAGLE = _configured(architectures=["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"])


def cases() -> Iterator[EngineCase]:
    """Yield sound exports, exports as earlier versions wrote them (cases D1 to D5), and planted
    faults."""
    smollm2: Values = {"checkpoint": SMOLLM2_HEAD, "target": SMOLLM2}
    five, plain = f"{FOLDER}/eagle3_five", f"{FOLDER}/eagle_no_bias"
    yield EngineCase(name="EAGLE-3, draft vocabulary, fc_norm", **smollm2)
    yield EngineCase(name="EAGLE-3, whole vocabulary", checkpoint=EAGLE3_HEAD)
    yield EngineCase(name="EAGLE-3, five layers", checkpoint=five)
    yield EngineCase(name="EAGLE-3, layers 13, 2, 8", checkpoint=f"{FOLDER}/eagle3_unsorted")
    yield EngineCase(name="EAGLE-1, no bias", checkpoint=plain, layout="sglang")
    dflash = f"{FOLDER}/dflash"
    yield EngineCase(name="DFlash", checkpoint=dflash)
    yield EngineCase(name="DFlash", checkpoint=dflash, layout="sglang")
    biased: Values = {"checkpoint": f"{FOLDER}/eagle", "layout": "sglang"}
    yield EngineCase(name="EAGLE-1 with bias", **biased, refused=True)

    maps, none = _weights(_maps), {"num_aux_hidden_states": None}
    named = _configured(architectures=["LlamaForCausalLMEagle"])
    yield EngineCase(name="D1 before", checkpoint=EAGLE3_HEAD, change=maps, refused=True)
    yield EngineCase(name="D2 before", checkpoint=five, change=_configured(**none), refused=True)
    order = _weights(_rotated)
    yield EngineCase(
        name="D3 before", checkpoint=EAGLE3_HEAD, change=order, cause="order of layers"
    )
    yield EngineCase(
        name="D4 before", checkpoint=plain, layout="sglang", change=named, refused=True
    )
    yield EngineCase(name="D5 before", **biased, change=VLLM_EAGLE, cause="bias")

    ones = _weights(lambda x: {n: torch.ones_like(w) for n, w in x.items() if "fc_norm" in n})
    zeros = _weights(lambda x: {"d2t": torch.zeros_like(x["d2t"])})
    turned = _configured(rope_theta=500000.0, rope_parameters=ROPE)
    eagle3: Values = {"checkpoint": EAGLE3_HEAD}
    for cause, head, change in (
        ("layer off by one", eagle3, _next_layer),
        ("norm", smollm2, ones),
        ("position", eagle3, turned),
        ("vocabulary map", smollm2, zeros),
    ):
        yield EngineCase(name=f"planted: {cause}", **head, change=change, cause=cause)
    yield EngineCase(name="planted: dtype", checkpoint=EAGLE3_HEAD, cause="dtype", dtype="bfloat16")
    yield EngineCase(
        name="planted: template", checkpoint=EAGLE3_HEAD, cause="template", template=True
    )


# -- running them -----------------------------------------------------------------------------


@cache
def _target(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    target = load_target(name, dtype=torch.float32)
    choose_decoding_threads(target)
    return target, load_tokenizer(name)


def _with_template(target: str, folder: Path) -> str:
    """Copy the target, by links, with another chat template."""
    folder.mkdir()
    load_tokenizer(target).save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = f"{tokenizer.chat_template} "
    tokenizer.save_pretrained(folder)
    for file in Path(target).resolve().iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    return str(folder)


def run_case(case: EngineCase, options: EnginesOptions, place: Path) -> EngineComparison:
    """Export the head, change its files, decode in the engine and here, and compare.

    Raises:
        Failure: the engine does not run the head.
    """
    target, tokenizer = _target(case.target)
    ((folder, description),) = read_drafts([case.checkpoint], case.target, None)[2].items()
    draft = load_head(folder, target)
    depth = engine_depth(draft, options.depth)
    files = place / "files"
    export(folder, case.layout, files, target=case.target)  # type: ignore[arg-type]
    if case.change is not None:
        case.change(files)
    tasks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    prompts = [prompt for task in tasks.values() for prompt in task]
    encoded = [(encode_turn(tokenizer, prompt, []), prompt) for prompt in prompts]
    name = case.target
    if case.template:
        name = _with_template(case.target, place / "target")
    request = engine_request(
        encoded,
        target=str(Path(name).resolve()),
        files=str(files),
        kind=description["draft_type"],
        depth=depth,
        max_new_tokens=options.max_new_tokens,
        dtype=case.dtype,
    )
    answer = ask_engine(options.engine_python, request)
    compared = EngineComparison(draft=draft, target=target, depth=depth, answer=answer)
    decoding = Decoding(
        target, tokenizer, draft, depth=depth, max_new_tokens=options.max_new_tokens
    )
    with torch.inference_mode():
        for ids, prompt in encoded:
            decoding.run(ids)
            compared.add(f"{prompt.task}/{prompt.id}", decoding.result)
        compared.finish()
    return compared


def row_of(case: EngineCase, options: EnginesOptions) -> EngineRow:
    with tempfile.TemporaryDirectory() as place:
        try:
            compared = run_case(case, options, Path(place))
        except Failure as error:
            said = f"refused: {str(error).removeprefix('vllm: ')}"
            return EngineRow(
                name=case.name,
                layout=case.layout,
                outputs="-",
                here="-",
                there="-",
                tau_here=None,
                tau_there=None,
                found=said,
                is_expected=case.refused,
            )
    here, there = compared.shares
    tau = compared.mean_acceptance_lengths
    cause = compared.check.first.what if compared.check.first else None
    apart = abs(tau[0] - tau[1])
    agrees = cause is None and apart < LARGEST_DIFFERENCE and compared.is_equal
    return EngineRow(
        name=case.name,
        layout=case.layout,
        outputs=f"{compared.num_equal}/{len(compared.texts)}",
        here=" ".join(f"{x:.3f}" for x in here),
        there=" ".join(f"{x:.3f}" for x in there),
        tau_here=tau[0],
        tau_there=tau[1],
        found=str(compared.check.first.what if compared.check.first else "agrees"),
        is_expected=not case.refused and (cause == case.cause if case.cause else agrees),
    )


def table(rows: Sequence[EngineRow]) -> Table:
    columns: dict[str, Callable[[EngineRow], str]] = {
        "head": lambda row: row.name,
        "layout": lambda row: row.layout,
        "outputs equal": lambda row: row.outputs,
        "here by position": lambda row: row.here,
        "there": lambda row: row.there,
        "tau here": lambda row: "-" if row.tau_here is None else f"{row.tau_here:.3f}",
        "tau there": lambda row: "-" if row.tau_there is None else f"{row.tau_there:.3f}",
        "found": lambda row: f"{row.found[:90]}{'' if row.is_expected else '  (UNEXPECTED)'}",
    }
    return Table.of(columns, rows)


def run_engines(options: EnginesOptions) -> None:
    """Run the whole subcommand; status 1 if a case is not as expected."""
    quieten()
    make_folder("--out", options.out)
    rows = []
    for case in cases():
        if options.only and not any(word in case.name for word in options.only):
            continue
        rows.append(row_of(case, options))
        print(f"{rows[-1].name}: {rows[-1].found}", file=sys.stderr, flush=True)
        content = {"engine": "vllm", "rows": [asdict(row) for row in rows]}
        write_atomically(options.out / "engines.json", to_json(content))
    print(align_columns(table(rows)))
    if not all(row.is_expected for row in rows):
        sys.exit(1)
