"""What drafts are still worth when their target has been fine-tuned: acceptance against drift.

Drafts of one base target decode with the base and with what came of it, without being trained
again. The check that a draft belongs to its target is made for the base, and left out for the
others: here alone, since a mismatch is what is measured.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from pipedraft.eval.checkpoints import TableContext
from pipedraft.eval.intervals import paired_intervals
from pipedraft.eval.lossless import output_logits
from pipedraft.eval.metrics import pooled_ratio, ratio
from pipedraft.eval.plots import plot_retention
from pipedraft.eval.record import (
    AcceptedPerPrompt,
    DriftRecord,
    Manifest,
    Results,
    RetentionRecord,
)
from pipedraft.eval.run import draft_hash
from pipedraft.eval.spec import BASE, Spec, decode_config
from pipedraft.eval.tables import Table, align_columns, bounds, markdown, number
from pipedraft.eval.tasks import Prompt, load_tasks
from pipedraft.eval.traces import traces_of
from pipedraft.eval.turns import DecodedTurn, evaluate
from pipedraft.files import Values, to_json, write_atomically
from pipedraft.inference.edge.channel import PRESETS
from pipedraft.inference.engine import DraftNetwork, Engine
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.sources.lookup import Lookup
from pipedraft.models.fingerprint import fingerprint_mismatch
from pipedraft.models.language_model import LanguageModelDraft
from pipedraft.models.target import load_target
from pipedraft.models.target_part import out_of_scope, weights_identity

# P prompts, X values of each, R decoded turns, S the two targets that are compared (0 the base)
# A tokens of an answer, V vocabulary
# counts_4P: accepted, tested, emitted, rounds of each prompt

PLOT = "retention.png"
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


def add_up(
    records: Sequence[DecodedTurn],
    num_prompts: int,
    measure: Callable[[DecodeResult], Sequence[float]],
) -> np.ndarray:
    """Sums over each prompt's turns of X values, [X, P]; 0 where none was decoded."""
    values_RX = np.array([measure(record.result) for record in records], dtype=np.float64)
    sums_XP = np.zeros((values_RX.shape[1], num_prompts))
    np.add.at(sums_XP.T, [record.conversation[1] for record in records], values_RX)
    return sums_XP


def count(result: DecodeResult) -> tuple[int, int, int, int]:
    """Draft tokens accepted and tested, tokens emitted, rounds."""
    rounds = result.round_lengths
    return result.num_accepted, result.num_tested, sum(rounds), len(rounds)


def describe(
    counts_4P: np.ndarray,
    base_4P: np.ndarray,
    *,
    seed: int,
    where: tuple[str, str, str],
    loads: bool,
    draft_bytes: int = 0,
) -> RetentionRecord:
    """alpha, tau and the share of the base's alpha that is left, with intervals over prompts.

    The share is of the same prompts, resampled together, though each target writes its own output.

    Args:
        where: domain, target and draft.
    """
    accepted_P, tested_P, emitted_P, rounds_P = counts_4P
    numerator_SP, denominator_SP = np.stack([base_4P, counts_4P], 1)[:2]
    alpha, alpha_ci95 = pooled_ratio(accepted_P, tested_P, seed=seed)
    tau, tau_ci95 = pooled_ratio(emitted_P, rounds_P, seed=seed)
    _, retained = paired_intervals(numerator_SP, denominator_SP, seed=seed)
    domain, target, draft = where
    return RetentionRecord(
        domain=domain,
        target=target,
        draft=draft,
        loads=loads,
        draft_bytes=draft_bytes,
        alpha=alpha,
        alpha_ci95=alpha_ci95,
        tau=tau,
        tau_ci95=tau_ci95,
        retained=ratio(alpha, ratio(*base_4P[:2].sum(1).tolist())),
        retained_ci95=tuple(retained.tolist()),
        accepted=int(accepted_P.sum()),
        tested=int(tested_P.sum()),
        emitted=int(emitted_P.sum()),
        rounds=int(rounds_P.sum()),
        per_prompt=AcceptedPerPrompt(accepted=accepted_P.tolist(), tested=tested_P.tolist()),
    )


@torch.inference_mode()
def divergence(
    base: PreTrainedModel, evolved: PreTrainedModel, result: DecodeResult
) -> tuple[float, int]:
    """Sum of KL(base || evolved) over the rows that predict an answer, and their number.

    Args:
        result: what the base answered to a prompt.
    """
    log_p_AV, log_q_AV = (
        output_logits(model, result.prompt_ids, result.token_ids).float().log_softmax(-1)
        for model in (base, evolved)
    )
    total = F.kl_div(log_q_AV, log_p_AV, log_target=True, reduction="sum")
    return float(total), len(result.token_ids)


@dataclass(frozen=True)
class Decoded:
    """All prompts, by one draft on one target."""

    records: list[DecodedTurn]
    loads: bool
    """The draft would load on this target without the exception for evolved ones."""
    draft_bytes: int


@dataclass(frozen=True)
class Retention:
    """Everything that one report needs besides the fine-tuned targets."""

    spec: Spec
    settings: Values
    """Settings of decoding: tree, temperature."""
    context: TableContext
    drafts: Mapping[str, Path]

    def run(
        self, domains: Mapping[str, tuple[Sequence[str], Mapping[str, Path]]]
    ) -> tuple[list[DriftRecord], list[RetentionRecord]]:
        """Entries of results.json: one for each domain and target, one for each draft on these.

        Args:
            domains: name -> benchmarks, and name -> folder of the fine-tuned targets.
        """
        targets: list[DriftRecord] = []
        drafts: list[RetentionRecord] = []
        for name, (benchmarks, places) in domains.items():
            tasks = load_tasks(benchmarks, self.spec.data_dir, self.spec.limit)
            prompts = [prompt for found in tasks.values() for prompt in found]
            for target, measured in self._domain(name, prompts, places):
                targets.append(target)
                drafts += measured
        return targets, drafts

    def _domain(
        self, name: str, prompts: Sequence[Prompt], places: Mapping[str, Path]
    ) -> Iterator[tuple[DriftRecord, list[RetentionRecord]]]:
        spec, whole = self.spec, self.context.target
        base = self._decode(f"{name}, {BASE}", whole, spec.target, prompts)
        answers = next(iter(base.values())).records
        for target, place in {BASE: spec.target, **places}.items():
            model, decoded, scope, folder = whole, base, [], str(place)
            if target != BASE:
                model = load_target(folder, dtype=whole.dtype, device=whole.device)
                decoded = self._decode(f"{name}, {target}", model, folder, prompts)
                scope = out_of_scope(spec.target, folder)
            turns, same = _agreement(decoded.values())
            # Per token of the base's answers, in nats.
            sums_2P = add_up(answers, len(prompts), partial(divergence, whole, model))
            kl, kl_ci95 = pooled_ratio(*sums_2P, seed=spec.seed)
            record = DriftRecord(
                domain=name,
                target=target,
                kl=kl,
                kl_ci95=kl_ci95,
                out_of_scope=scope,
                turns=turns,
                same_text=same,
                checkpoint=folder,
                weights=weights_identity(folder),
            )
            yield (
                record,
                [
                    describe(
                        add_up(found.records, len(prompts), count),
                        add_up(base[draft].records, len(prompts), count),
                        seed=spec.seed,
                        where=(name, target, draft),
                        loads=found.loads,
                        draft_bytes=found.draft_bytes,
                    )
                    for draft, found in decoded.items()
                ],
            )

    def _decode(
        self, description: str, model: PreTrainedModel, folder: str, prompts: Sequence[Prompt]
    ) -> dict[str, Decoded]:
        """The prompts decoded by every draft; on the base, one of another target is refused."""
        tokens = self.spec.max_new_tokens
        room = model.config.get_text_config().max_position_embeddings - tokens
        traces, found = traces_of(self.context.out, model, weights=weights_identity(folder)), {}
        for name, place in self.drafts.items():
            evolved = model is not self.context.target
            draft = self.context.drafts.load(place, model, allow_evolved=evolved)
            config = decode_config(
                {"schedule": "eagle", "num_stages": draft.num_stages or 1, **self.settings},
                max_new_tokens=tokens,
                seed=self.spec.seed,
            )
            records = evaluate(
                Engine(model, self.context.tokenizer, config, draft),
                prompts,
                self.context.tokenizer,
                max_prompt_tokens=room,
                description=f"{description}, {name}",
                traces=traces.open(config=config.to_dict(), draft=draft_hash(draft)),
            )
            if not records:
                raise ValueError(
                    f"max_new_tokens: {tokens} leaves no room for any prompt of {description}; "
                    "lower it"
                )
            found[name] = Decoded(records, _loads(draft, model), _num_bytes(draft))
        return found


def _loads(draft: DraftNetwork, model: PreTrainedModel) -> bool:
    """Whether the draft would load here without the exception; drafts without a tie always do."""
    if isinstance(draft, LanguageModelDraft | Lookup):
        return True
    return fingerprint_mismatch(draft.reference.fingerprint, draft.fingerprint(model)) is None


def _num_bytes(draft: DraftNetwork) -> int:
    network = draft.model if isinstance(draft, LanguageModelDraft) else draft
    return sum(weight.numel() * weight.element_size() for weight in network.parameters())


def sync_seconds(draft_bytes: int) -> dict[str, float]:
    """Time to send a draft again, by the link: its weights over the link's bandwidth down."""
    return {name: draft_bytes / link.state(0.0).down_bytes_per_s for name, link in PRESETS.items()}


def sync_table(drafts: Sequence[RetentionRecord]) -> Table:
    """FlexSpec, table I: what a draft costs that has to be trained again for every target."""
    sizes = {entry.draft: entry.draft_bytes for entry in drafts}
    rows = [
        [name, number(size / 1e6, 1), *(number(s, 2) for s in sync_seconds(size).values())]
        for name, size in sizes.items()
    ]
    return Table(["draft", "MB", *(f"{name}, s" for name in PRESETS)], rows)


def _agreement(decoded: Iterable[Decoded]) -> tuple[int, int]:
    """Turns, and those that every draft gave the same output, as greedy decoding does to all."""
    outputs = zip(*([r.result.token_ids for r in found.records] for found in decoded), strict=True)
    same = [all(output == turn[0] for output in turn) for turn in outputs]
    return len(same), sum(same)


# -- report.md and the plot ------------------------------------------------------------------------


def cell(entry: RetentionRecord, measure: str) -> str:
    star = "" if entry.loads else " *"
    return f"{number(getattr(entry, measure))} {bounds(getattr(entry, f'{measure}_ci95'), 2)}{star}"


def retention_table(
    targets: Sequence[DriftRecord], drafts: Sequence[RetentionRecord], measure: str
) -> Table:
    """One line for each target, one column for each draft."""
    names = list(dict.fromkeys(entry.draft for entry in drafts))
    found = {(e.domain, e.target, e.draft): cell(e, measure) for e in drafts}
    rows = []
    for target in targets:
        where = target.domain, target.target
        changed = len(target.out_of_scope)
        drift = f"{number(target.kl)} {bounds(target.kl_ci95, 2)}"
        scope = f"out: {changed}" if changed else "in"
        rows.append([*where, drift, scope, *(found[*where, name] for name in names)])
    return Table(["domain", "target", "KL", "scope", *names], rows)


def format_retention(
    targets: Sequence[DriftRecord], drafts: Sequence[RetentionRecord], manifest: Manifest
) -> str:
    """Text of report.md."""
    turns, same = (
        sum(getattr(target, key) for target in targets) for key in ("turns", "same_text")
    )
    parts = [
        "# Retention",
        f"Base target `{manifest['target']['name']}` ({manifest['dtype']}), seed "
        f"{manifest['seed']}.",
        f"    {manifest['command']}",
        f"All drafts gave a target the same output in {same} of {turns} turns.",
    ]
    for measure, title in MEASURES.items():
        parts += [f"## {title}", markdown(retention_table(targets, drafts, measure))]
    parts += ["## Sending a draft again", markdown(sync_table(drafts))]
    return "\n\n".join([*parts, LEGEND, f"![acceptance against drift]({PLOT})"]) + "\n"


def write_retention(out_dir: Path, results: Results, manifest: Manifest) -> str:
    """Write everything into an existing folder.

    Returns:
        The table of alpha, for the terminal.
    """
    targets, drafts = results.targets or [], results.drafts or []
    write_atomically(out_dir / PLOT, plot_retention(targets, drafts))
    write_atomically(out_dir / "manifest.json", to_json(manifest))
    report = format_retention(targets, drafts, manifest)
    write_atomically(out_dir / "report.md", report.encode())
    # Last: whoever finds results.json finds the rest.
    write_atomically(out_dir / "results.json", to_json(results))
    table = retention_table(targets, drafts, "alpha")
    return align_columns(table)
