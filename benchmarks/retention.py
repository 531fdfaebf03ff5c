"""Measure the acceptance of drafts for a fine-tuned target, against the target's drift.

    python benchmarks/retention.py configs/retention/embedded.yaml --out out/retention

Drafts trained for one base target decode with the base and with its fine-tuned versions, without
new training (FlexSpec, arXiv 2601.00644, table II). On the base, a draft for another target is
refused. Fine-tuned targets skip this check, because the mismatch is measured here. The run writes
report.md, results.json and a plot into --out, and keeps the decoded turns in OUT/traces. The last
line of the output is one JSON object with the acceptance rates.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipedraft.endings import leave_at_interrupts, run_command
from pipedraft.errors import UsageError, make_folder

if __name__ == "__main__":
    leave_at_interrupts()

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from measurement import make_parser
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipedraft.eval.charts import Estimate, LineChart
from pipedraft.eval.evaluation import draft_hash
from pipedraft.eval.intervals import paired_interval
from pipedraft.eval.lossless import output_logits
from pipedraft.eval.metrics import pooled_ratio
from pipedraft.eval.tables import Table, align_columns, bounds, markdown, number
from pipedraft.eval.tasks import Prompt, load_tasks
from pipedraft.eval.traces import traces_of
from pipedraft.eval.turns import DecodedTurn, evaluate
from pipedraft.files import read_yaml, to_json, write_atomically
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import DraftNetwork, Engine
from pipedraft.inference.result import DecodeResult, ratio
from pipedraft.models import load_draft
from pipedraft.models.heads.draft import Draft
from pipedraft.models.heads.language_model import LanguageModelDraft, load_draft_model
from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.models.target_part import load_target_part, weights_identity
from pipedraft.models.transformer.fingerprint import fingerprint_mismatch
from pipedraft.models.transformer.layers import LayerConfig

# P prompts, X values per prompt, R decoded turns, S the two compared targets (0 the base)
# A answer tokens, V vocabulary
# counts_4P: accepted, tested, emitted, rounds per prompt

BASE = "base"
PLOT = "retention.png"
DOWN_MBPS = {"5g": 300, "4g": 50, "wifi": 10}
"""Bandwidth of a link down to the edge, by name: FlexSpec, table I."""
MEASURES = {
    "alpha": "Acceptance rate alpha",
    "tau": "Tokens per round tau",
    "retained": "Share of the base's alpha",
}
LEGEND = """\
- **KL** mean KL(base || target) per token of the base's answers to the prompts, in nats; **scope**
  in: embedding, last block, final norm and LM head are the base's, out: how many of their modules
  are not.
- **alpha** accepted over tested draft tokens; **tau** tokens per round, the target's own one
  included; **share** alpha over the same draft's alpha on the base, prompts resampled together.
- **s** seconds to send a draft's weights, as after training it for another target: bytes over the
  bandwidths of FlexSpec's table I.
- In brackets 95 % bootstrap intervals over prompts. * the draft is refused on that target unless
  the check of its fingerprint is left out, as here.
"""


class Domain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets fine-tuned for one purpose, and prompts for it."""

    benchmarks: list[str]
    targets: dict[str, str]
    """Name -> folder, per fine-tuned target."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """YAML file for a report. Every draft runs on the base and on each domain's targets."""

    title: str
    target: str
    drafts: dict[str, str]
    """Name -> checkpoint or language model folder."""
    domains: dict[str, Domain]
    tree: str
    temperature: float = 0.0
    limit: int | None = None
    max_new_tokens: int = 128
    seed: int = 0


def add_up(
    records: Sequence[DecodedTurn],
    num_prompts: int,
    measure: Callable[[DecodeResult], Sequence[float]],
) -> np.ndarray:
    """Sum X values over each prompt's turns, and return the sums [X, P]. A prompt without a decoded
    turn has the sum 0."""
    values_RX = np.array([measure(record.result) for record in records], dtype=np.float64)
    sums_XP = np.zeros((values_RX.shape[1], num_prompts))
    np.add.at(sums_XP.T, [record.conversation[1] for record in records], values_RX)
    return sums_XP


def count(result: DecodeResult) -> tuple[int, int, int, int]:
    """Return draft tokens accepted and tested, tokens emitted, and verification rounds."""
    rounds = result.round_lengths
    return result.num_accepted, result.num_tested, sum(rounds), len(rounds)


def describe(counts_4P: np.ndarray, base_4P: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """Compute alpha, tau and alpha's ratio to the base's alpha, with intervals over prompts.

    The ratio compares the same prompts, resampled together. Each target still writes its own
    output.
    """
    accepted_P, tested_P, emitted_P, rounds_P = counts_4P
    numerator_SP, denominator_SP = np.stack([base_4P, counts_4P], 1)[:2]
    alpha, alpha_ci95 = pooled_ratio(accepted_P, tested_P, seed=seed)
    tau, tau_ci95 = pooled_ratio(emitted_P, rounds_P, seed=seed)
    low, high = paired_interval(numerator_SP, denominator_SP, seed=seed).tolist()
    return {
        "alpha": alpha,
        "alpha_ci95": alpha_ci95,
        "tau": tau,
        "tau_ci95": tau_ci95,
        "retained": ratio(alpha, ratio(*base_4P[:2].sum(1).tolist())),
        "retained_ci95": (low, high),
        "accepted": accepted_P.tolist(),
        "tested": tested_P.tolist(),
    }


@torch.inference_mode()
def divergence(
    base: PreTrainedModel, evolved: PreTrainedModel, result: DecodeResult
) -> tuple[float, int]:
    """Return KL(base || evolved) summed over an answer's tokens, and the number of tokens.

    Args:
        result: the base's answer to the prompt.
    """
    log_p_AV, log_q_AV = (
        output_logits(model, result.prompt_ids, result.token_ids).float().log_softmax(-1)
        for model in (base, evolved)
    )
    total = F.kl_div(log_q_AV, log_p_AV, log_target=True, reduction="sum")
    return float(total), len(result.token_ids)


@dataclass(frozen=True)
class DraftRun:
    """All prompts from a domain, decoded by one draft on one target."""

    records: list[DecodedTurn]
    loads: bool
    """True if the draft would load on this target without the exception for fine-tuned ones."""
    draft_bytes: int


@dataclass(frozen=True)
class Retention:
    """One report's run, with its settings and the base target."""

    spec: Spec
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    out: Path

    def measure(self, name: str, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Decode a domain's prompts with every draft on every target.

        Returns:
            One entry per target, which contains one entry per draft.
        """
        spec, entries = self.spec, []
        on_base = self.decode(f"{name}, {BASE}", self.base, spec.target, prompts)
        answers = next(iter(on_base.values())).records
        for target, place in {BASE: spec.target, **spec.domains[name].targets}.items():
            best = Path(place) / "best"  # a training run writes its best checkpoint here
            folder = str(best) if best.exists() else place
            model, found = self.base, on_base
            if target != BASE:
                model = load_target(folder, dtype=self.base.dtype, device=self.base.device)
                found = self.decode(f"{name}, {target}", model, folder, prompts)
            sums_2P = add_up(answers, len(prompts), partial(divergence, self.base, model))
            kl, kl_ci95 = pooled_ratio(*sums_2P, seed=spec.seed)
            turns, same = agreement(found.values())
            entries.append(
                {
                    "domain": name,
                    "target": target,
                    "kl": kl,
                    "kl_ci95": kl_ci95,
                    "out_of_scope": [] if target == BASE else out_of_scope(spec.target, folder),
                    "turns": turns,
                    "same_text": same,
                    "drafts": {
                        draft: describe(
                            add_up(run.records, len(prompts), count),
                            add_up(on_base[draft].records, len(prompts), count),
                            seed=spec.seed,
                        )
                        | {"loads": run.loads, "draft_bytes": run.draft_bytes}
                        for draft, run in found.items()
                    },
                }
            )
        return entries

    def decode(
        self, where: str, model: PreTrainedModel, folder: str, prompts: Sequence[Prompt]
    ) -> dict[str, DraftRun]:
        """Decode the prompts with every draft. The base refuses drafts for other targets."""
        spec, tokens = self.spec, self.spec.max_new_tokens
        room = model.config.get_text_config().max_position_embeddings - tokens
        weights, found = weights_identity(folder), {}
        traces = traces_of(self.out, model, weights=weights, dtype=model.dtype)
        for name, place in spec.drafts.items():
            draft = load(place, model, self.tokenizer, allow_evolved=model is not self.base)
            config = DecodeConfig.of(
                schedule="eagle",
                num_stages=draft.num_stages or 1,
                tree=spec.tree,
                temperature=spec.temperature,
                max_new_tokens=tokens,
                seed=spec.seed,
            )
            records = evaluate(
                Engine(model, self.tokenizer, config, draft),
                prompts,
                self.tokenizer,
                max_prompt_tokens=room,
                description=f"{where}, {name}",
                traces=traces.open(config=config.to_dict(), draft=draft_hash(draft)),
            )
            if not records:
                raise UsageError(
                    f"max_new_tokens: {tokens} leaves no room for any prompt of {where}; lower it"
                )
            found[name] = DraftRun(records, would_load(draft, model), num_bytes(draft))
        return found


def load(
    place: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, allow_evolved: bool
) -> DraftNetwork:
    """Load a language model or a head, from a folder or from best/ in it."""
    for folder in (Path(place), Path(place) / "best"):
        if (folder / "config.json").is_file():
            if b'"draft_type"' in (folder / "config.json").read_bytes():
                draft = load_draft(str(folder), target, allow_evolved=allow_evolved)
                return draft.to(target.device, target.dtype)
            return load_draft_model(str(folder), target, tokenizer)
    raise UsageError(f"drafts: no config.json in {place}; train it, or take it out of the file")


def would_load(draft: DraftNetwork, model: PreTrainedModel) -> bool:
    """Return True if the draft loads on this model without the exception for fine-tuned targets.

    A language model always loads.
    """
    if not isinstance(draft, Draft):
        return True
    return fingerprint_mismatch(draft.reference.fingerprint, draft.fingerprint(model)) is None


def num_bytes(draft: DraftNetwork) -> int:
    network = draft.model if isinstance(draft, LanguageModelDraft) else draft
    return sum(weight.numel() * weight.element_size() for weight in network.parameters())


def sync_seconds(draft_bytes: int) -> dict[str, float]:
    """Return each link's seconds to send a draft's weights again at its downlink bandwidth."""
    return {name: draft_bytes / (mbps * 125_000) for name, mbps in DOWN_MBPS.items()}


def agreement(runs: Iterable[DraftRun]) -> tuple[int, int]:
    """Return the number of turns, and the number of turns with the same output from all drafts.

    With greedy decoding the two numbers are equal.
    """
    outputs = zip(*([r.result.token_ids for r in found.records] for found in runs), strict=True)
    same = [all(output == turn[0] for output in turn) for turn in outputs]
    return len(same), sum(same)


# -- report.md and the plot ------------------------------------------------------------------------


def retention_table(targets: Sequence[dict[str, Any]], measure: str) -> Table:
    """Return a table with a line per target and a column per draft."""
    names = list(targets[0]["drafts"])
    rows = []
    for target in targets:
        cells = [
            f"{number(draft[measure])} {bounds(draft[f'{measure}_ci95'], 2)}"
            + " *" * (not draft["loads"])
            for draft in target["drafts"].values()
        ]
        drift = f"{number(target['kl'])} {bounds(target['kl_ci95'], 2)}"
        changed = len(target["out_of_scope"])
        scope = f"out: {changed}" if changed else "in"
        rows.append([target["domain"], target["target"], drift, scope, *cells])
    return Table(["domain", "target", "KL", "scope", *names], rows)


def sync_table(drafts: dict[str, dict[str, Any]]) -> Table:
    """Return FlexSpec's table I, the cost of sending a draft trained again for a new target."""
    rows = [
        [name, number(entry["draft_bytes"] / 1e6, 1)]
        + [number(s, 2) for s in sync_seconds(entry["draft_bytes"]).values()]
        for name, entry in drafts.items()
    ]
    return Table(["draft", "MB", *(f"{name}, s" for name in DOWN_MBPS)], rows)


def plot(targets: Sequence[dict[str, Any]]) -> bytes:
    """Plot each draft's acceptance, with its interval, against the drift of the target."""
    panels: dict[str, dict[str, dict[float, Estimate]]] = {}
    for target in targets:
        for name, draft in target["drafts"].items():
            series = panels.setdefault(target["domain"], {}).setdefault(name, {})
            series[target["kl"]] = Estimate(draft["alpha"], *draft["alpha_ci95"])
    return LineChart(
        title="Retention",
        caption="",
        panels=panels,
        axis="acceptance rate",
        place_axis="drift: KL(base || target) per token, nats",
        limits=(0, 1.02),
        whole_places=False,
    ).png()


def report(spec: Spec, targets: Sequence[dict[str, Any]]) -> str:
    """Return the report as Markdown, for report.md."""
    turns, same = (sum(target[key] for target in targets) for key in ("turns", "same_text"))
    parts = [
        f"# {spec.title}",
        f"Base target `{spec.target}`, seed {spec.seed}.",
        f"    {shlex.join(sys.argv)}",
        f"All drafts gave a target the same output in {same} of {turns} turns.",
    ]
    for measure, title in MEASURES.items():
        parts += [f"## {title}", markdown(retention_table(targets, measure))]
    parts += ["## Sending a draft again", markdown(sync_table(targets[0]["drafts"]))]
    return "\n\n".join([*parts, LEGEND, f"![acceptance against drift]({PLOT})"]) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("spec", type=Path, help="YAML file, as in configs/retention")
    parser.add_argument("--data-dir", help="folder of the benchmarks' files; see eval --help")
    parser.add_argument("--limit", type=int, help="first prompts of each benchmark")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    args = parser.parse_args()
    spec = msgspec.convert(read_yaml(args.spec, str(args.spec)), Spec)
    given = {"limit": args.limit, "max_new_tokens": args.max_new_tokens}
    spec = msgspec.structs.replace(spec, **{k: v for k, v in given.items() if v is not None})
    make_folder("--out", args.out)
    runs = Retention(spec, load_target(spec.target), load_tokenizer(spec.target), args.out)
    targets = []
    for name, domain in spec.domains.items():
        tasks = load_tasks(domain.benchmarks, args.data_dir, spec.limit)
        targets += runs.measure(name, [prompt for found in tasks.values() for prompt in found])
    write_atomically(args.out / PLOT, plot(targets))
    write_atomically(args.out / "report.md", report(spec, targets).encode())
    write_atomically(args.out / "results.json", to_json({"targets": targets}))
    print(align_columns(retention_table(targets, "alpha")))
    alphas = {
        f"{entry['domain']}, {entry['target']}": {
            name: draft["alpha"] for name, draft in entry["drafts"].items()
        }
        for entry in targets
    }
    print(json.dumps(alphas))


# -- what a fine-tuned target has changed -----------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
COPIED_SETTINGS = ("rms_norm_eps", "rope_parameters")
"""``LayerConfig`` settings used by the last block's computation; weights show the shapes."""


def out_of_scope(base: str, evolved: str) -> list[str]:
    """List modules outside layers 1 .. L-1 that differ from the base or have an adapter.

    A changed setting in the last block's computation is listed as config.SETTING.

    Args:
        base: a target's folder or Hub id.
        evolved: another target's folder or Hub id, or an adapter's folder.

    Raises:
        ValueError: unreadable files, or two targets that are not versions of one model.
    """
    folder = Path(evolved)
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    try:
        part = _copied_part(base, is_weightless=is_adapter)
    except ValueError as error:  # the message names the field "target"
        raise ValueError(f"--base{str(error).removeprefix('target')}") from error
    if is_adapter:
        return targeted_modules(part, folder)
    return changed_modules(part, _copied_part(evolved))


def _copied_part(name: str, *, is_weightless: bool = False) -> PreTrainedModel:
    """Load only the target's parts that drafts copy. If weightless, load only module names."""
    part = load_target_part(name, layers=(), has_embedding=False, has_head=False)
    if is_weightless:
        return part
    last = part.get_decoder().config.num_hidden_layers - 1
    return load_target_part(name, layers=(last,), has_embedding=True, has_head=True)


def copied_modules(target: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules with weights in embedding, last block, final norm and LM head, by name."""
    decoder = target.get_decoder()
    parts = (decoder.embed_tokens, decoder.layers[-1], decoder.norm, target.get_output_embeddings())
    names = {module: name for name, module in target.named_modules()}
    leaves = [module for part in parts for module in part.modules() if module._parameters]
    return {names[module]: module for module in leaves}


def changed_modules(base: PreTrainedModel, evolved: PreTrainedModel) -> list[str]:
    """List copied modules with at least one weight that differs, compared as float32.

    Raises:
        ValueError: the models have different numbers of layers.
    """
    depths = [len(target.get_decoder().layers) for target in (base, evolved)]
    if depths[0] != depths[1]:
        raise ValueError(
            f"target: {evolved.name_or_path!r} has {depths[1]} layers, the base {depths[0]}; give "
            "two versions of one target"
        )
    modules, others = copied_modules(base), copied_modules(evolved)
    names = [name for name in modules if not _is_same(modules[name], others.get(name))]
    names += [name for name in others if name not in modules]
    layers = [asdict(LayerConfig.from_target(x.get_decoder().config)) for x in (base, evolved)]
    settings = [name for name in COPIED_SETTINGS if layers[0][name] != layers[1][name]]
    return names + [f"config.{name}" for name in settings]


def _is_same(module: nn.Module, other: nn.Module | None) -> bool:
    if other is None:
        return False
    weights, others = (dict(m.named_parameters(recurse=False)) for m in (module, other))
    return weights.keys() == others.keys() and all(
        torch.equal(weight.float(), others[name].float()) for name, weight in weights.items()
    )


def targeted_modules(base: PreTrainedModel, folder: Path) -> list[str]:
    """List the copied modules for which a peft adapter has weights of any value.

    Args:
        base: the adapter's model; its weights are not read.

    Raises:
        ValueError: no safetensors weights, or weights for no module in the base.
    """
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            tensors = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"target: the adapter in {str(folder)!r} has no loadable {ADAPTER_WEIGHTS} "
            f"({error}); save it again with safe_serialization"
        ) from error
    known = {name for name, _ in base.named_modules() if name}
    adapted = {_module_of(tensor, known, folder) for tensor in tensors}
    return [name for name in copied_modules(base) if adapted & _with_parents(name)]


def _module_of(tensor: str, known: Iterable[str], folder: Path) -> str:
    """Return the innermost base module that the name of an adapter's tensor contains."""
    candidates = _with_parents(tensor.removeprefix(PEFT_PREFIX)).intersection(known)
    if not candidates:
        kind = json.loads((folder / ADAPTER_CONFIG).read_text()).get("peft_type")
        raise ValueError(
            f"target: {tensor!r} of the adapter in {str(folder)!r} (peft_type {kind}) belongs to "
            "no module of the base; give an adapter of modules, such as LoRA, or a merged target"
        )
    return max(candidates, key=len)


def _with_parents(name: str) -> set[str]:
    """Return a module's name and its parents' names: "a.b" gives {"a", "a.b"}."""
    parts = name.split(".")
    return {".".join(parts[:size]) for size in range(1, len(parts) + 1)}


if __name__ == "__main__":
    run_command(main)
