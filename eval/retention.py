"""What drafts are still worth when their target has been fine-tuned: acceptance against drift.

    python -m pipedraft.eval --retention configs/retention/tiny.yaml --out out/retention

Drafts of one base target decode with the base and with what came of it, without being trained
again. The check that a draft belongs to its target is made for the base, and left out for the
others: here alone, since a mismatch is what is measured.
"""

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from pipedraft.errors import UsageError, make_folder
from pipedraft.eval.manifest import build_manifest
from pipedraft.eval.metrics import bootstrap_ratio, ratio
from pipedraft.eval.paired import paired_intervals
from pipedraft.eval.record import AcceptedPerPrompt, DriftRecord, RetentionRecord
from pipedraft.eval.retention_report import write_retention
from pipedraft.eval.run import Record, draft_hash, evaluate
from pipedraft.eval.tasks import Prompt, load_tasks
from pipedraft.eval.traces import Traces, traces_of
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import DecodeResult
from pipedraft.models import load_draft
from pipedraft.models.draft import CONFIG_FILE, resolve_folder
from pipedraft.models.fingerprint import fingerprint_mismatch
from pipedraft.models.language_model import load_draft_model
from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.models.target_part import out_of_scope, weights_identity

# P prompts, S the two targets that are compared (0 the base), A tokens of an answer, V vocabulary
# counts_4P: accepted, tested, emitted, rounds of each prompt

BASE = "base"
EXAMPLE = """\
example:
  python -m pipedraft.eval --retention configs/retention/tiny.yaml --limit 8 --out out/retention

writes results.json, report.md, manifest.json and a plot into --out and prints the tables. What was
decoded is kept in OUT/traces: the same command goes on after a kill.
"""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Targets that were fine-tuned for one purpose, and prompts of it."""

    benchmarks: list[str]
    """As --benchmarks of an evaluation."""
    targets: dict[str, str]
    """Name of a fine-tuned target -> its folder, or the output folder of the run that made it."""


@dataclass(frozen=True, kw_only=True)
class RetentionConfig:
    """Drafts, targets and prompts of one report."""

    base: str
    """Folder or Hub id of the target that the drafts were trained for."""
    domains: dict[str, Domain]
    drafts: dict[str, str] = field(default_factory=dict)
    """Name -> checkpoint folder of a draft, or the output folder of its run."""
    draft_models: dict[str, str] = field(default_factory=dict)
    """Name -> folder of a language model with the target's tokenizer, as a draft."""
    tree: str = "chain:4"
    """What a round drafts, as --tree of an evaluation."""
    temperature: float = 0.0
    max_new_tokens: int = 96
    data_dir: str | None = None
    """As --data-dir of an evaluation; null: the repository's own prompts."""
    limit: int | None = None
    """The first prompts of each benchmark."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.drafts and not self.draft_models:
            raise ValueError("drafts: {} and draft_models: {}; name at least one draft")
        if not self.domains:
            raise ValueError("domains: {}; name at least one, with benchmarks and targets")
        twice = sorted(self.drafts.keys() & self.draft_models.keys())
        if twice:
            raise ValueError(f"draft_models: {twice[0]!r} is the name of a draft, too; rename one")
        for name, domain in self.domains.items():
            if BASE in domain.targets:
                raise ValueError(
                    f"domains.{name}.targets: {BASE!r} is the name of the base; rename the target"
                )

    def folders(self) -> dict[str, str]:
        """Every folder that must be there, by the place that names it."""
        named = {f"drafts.{name}": path for name, path in self.drafts.items()}
        named |= {f"draft_models.{name}": path for name, path in self.draft_models.items()}
        for domain, found in self.domains.items():
            named |= {f"domains.{domain}.targets.{t}": path for t, path in found.targets.items()}
        return named

    def check_folders(self) -> None:
        """Raise ValueError that names all that are missing."""
        missing = [
            f"{path} ({place})"
            for place, path in self.folders().items()
            if not any((Path(path) / part / CONFIG_FILE).is_file() for part in ("", "best"))
        ]
        if missing:
            raise ValueError(
                f"--retention: no {CONFIG_FILE} in {', '.join(missing)}; train them "
                "(docs/flexspec.md), or take them out of the configuration"
            )

    def decode_config(self, num_stages: int | None) -> DecodeConfig:
        return DecodeConfig.of(
            "eagle",
            num_stages=num_stages or 1,
            tree=self.tree,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
        )


def parse(argv: Sequence[str]) -> tuple[RetentionConfig, argparse.Namespace]:
    """``--retention FILE`` and flags over it.

    Raises:
        UsageError: one line.
    """
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

    wants_help = any(word in ("-h", "--help") for word in argv)
    if wants_help:  # reads the docstring under every field, which takes a second
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="python -m pipedraft.eval",
        description="Acceptance of drafts on a target and on what it was fine-tuned to.",
        epilog=EXAMPLE,
        exit_on_error=False,
    )
    parser.add_argument("--retention", action="config", help="YAML file of the fields below")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--fresh", action="store_true", help="decode again what OUT/traces has already"
    )
    parser.add_class_arguments(RetentionConfig, as_group=False)
    if wants_help:
        print(parser.format_help(), EXAMPLE, sep="\n")  # an epilog would be filled like prose
        sys.exit(0)
    try:
        found = vars(parser.instantiate(parser.parse_args(list(argv))))
        options = {key: found.pop(key) for key in ("out", "fresh", "retention")}
        return RetentionConfig(**found), argparse.Namespace(**options)
    except (ArgumentError, ValueError, TypeError) as error:
        raise UsageError(f"--retention: {' '.join(str(error).split())}") from error


# -- counting -------------------------------------------------------------------------------


def count(records: Sequence[Record], num_prompts: int) -> np.ndarray:
    """[4, P] of what each prompt's turns add up to; 0 where none was decoded."""
    counts_4P = np.zeros((4, num_prompts))
    for record in records:
        result = record.result
        counts_4P[:, record.conversation[1]] += (
            result.num_accepted,
            result.num_tested,
            sum(result.round_lengths),
            len(result.round_lengths),
        )
    return counts_4P


def describe(
    counts_4P: np.ndarray, base_4P: np.ndarray, *, seed: int, **fields: Any
) -> RetentionRecord:
    """alpha, tau and the share of the base's alpha that is left, with intervals over prompts.

    The share is of the same prompts, resampled together, though each target writes its own text.

    Args:
        fields: what was decoded: domain, target, draft, loads.
    """
    accepted_P, tested_P, emitted_P, rounds_P = counts_4P
    numerator_SP, denominator_SP = np.stack([base_4P, counts_4P], 1)[:2]
    base_alpha, alpha = (
        ratio(a, t) for a, t in zip(numerator_SP.sum(-1), denominator_SP.sum(-1), strict=True)
    )
    _, retained = paired_intervals(numerator_SP, denominator_SP, seed=seed)
    return RetentionRecord(
        **fields,
        alpha=float(alpha),
        alpha_ci95=tuple(bootstrap_ratio(accepted_P, tested_P, seed=seed).tolist()),
        tau=float(ratio(emitted_P.sum(), rounds_P.sum())),
        tau_ci95=tuple(bootstrap_ratio(emitted_P, rounds_P, seed=seed).tolist()),
        retained=float(ratio(alpha, base_alpha)),
        retained_ci95=tuple(retained.tolist()),
        accepted=int(accepted_P.sum()),
        tested=int(tested_P.sum()),
        emitted=int(emitted_P.sum()),
        rounds=int(rounds_P.sum()),
        per_prompt=AcceptedPerPrompt(accepted=accepted_P.tolist(), tested=tested_P.tolist()),
    )


@torch.inference_mode()
def divergence(base: Any, evolved: Any, result: DecodeResult) -> tuple[float, int]:
    """Sum of KL(base || evolved) over the rows that predict an answer, and their number.

    Args:
        result: what the base answered to a prompt.
    """
    ids_1T = torch.tensor([[*result.prompt_ids, *result.token_ids]], device=base.device)
    num_rows = len(result.token_ids)
    log_p_AV, log_q_AV = (
        model(input_ids=ids_1T, logits_to_keep=num_rows + 1, use_cache=False)
        .logits[0, :-1]
        .float()
        .log_softmax(-1)
        for model in (base, evolved)
    )
    return float(F.kl_div(log_q_AV, log_p_AV, log_target=True, reduction="sum")), num_rows


def drift(
    base: Any, evolved: Any, records: Sequence[Record], num_prompts: int, seed: int
) -> dict[str, Any]:
    """Mean KL(base || evolved) per token of the base's answers, in nats.

    Args:
        records: of the base.
    """
    sums_2P = np.zeros((2, num_prompts))
    for record in records:
        sums_2P[:, record.conversation[1]] += divergence(base, evolved, record.result)
    divergence_P, rows_P = sums_2P
    return {
        "kl": float(ratio(divergence_P.sum(), rows_P.sum())),
        "kl_ci95": bootstrap_ratio(divergence_P, rows_P, seed=seed).tolist(),
    }


# -- the report -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """All prompts, by one draft on one target."""

    records: list[Record]
    loads: bool
    """The draft would load on this target without the exception for evolved ones."""


@dataclass(frozen=True)
class Retention:
    """Everything that one report needs besides the fine-tuned targets."""

    config: RetentionConfig
    out: Path
    base: Any
    tokenizer: Any

    def run(self) -> tuple[list[DriftRecord], list[RetentionRecord]]:
        """Entries of results.json: one for each domain and target, one for each draft on these."""
        targets: list[DriftRecord] = []
        drafts: list[RetentionRecord] = []
        for name, domain in self.config.domains.items():
            for target, measured in self._domain(name, domain):
                targets.append(target)
                drafts += measured
        return targets, drafts

    def prompts(self, domain: Domain) -> list[Prompt]:
        config = self.config
        tasks = load_tasks(domain.benchmarks, config.data_dir, config.limit)
        return [prompt for found in tasks.values() for prompt in found]

    def _domain(
        self, name: str, domain: Domain
    ) -> Iterator[tuple[DriftRecord, list[RetentionRecord]]]:
        seed, prompts = self.config.seed, self.prompts(domain)
        num_prompts = len(prompts)
        base = self._decode(f"{name}, {BASE}", self.base, self.config.base, prompts)
        answers = next(iter(base.values())).records
        for target, place in {BASE: self.config.base, **domain.targets}.items():
            model, decoded, scope, folder = self.base, base, [], place
            if target != BASE:
                folder = str(resolve_folder(place))
                model = self._load(folder)
                decoded = self._decode(f"{name}, {target}", model, folder, prompts)
                scope = out_of_scope(self.config.base, folder)
            turns, same = _agreement(decoded.values())
            where: dict[str, Any] = {"domain": name, "target": target}
            yield (
                DriftRecord(
                    **where,
                    **drift(self.base, model, answers, num_prompts, seed),
                    out_of_scope=scope,
                    turns=turns,
                    same_text=same,
                    checkpoint=folder,
                    weights=weights_identity(folder),
                ),
                [
                    describe(
                        count(found.records, num_prompts),
                        count(base[draft].records, num_prompts),
                        seed=seed,
                        **where,
                        draft=draft,
                        loads=found.loads,
                    )
                    for draft, found in decoded.items()
                ],
            )

    def _load(self, folder: str) -> Any:
        dtype = getattr(torch, self.config.dtype)
        return load_target(folder, dtype=dtype, device=self.base.device)

    def _drafts(self, model: Any) -> Iterator[tuple[str, Any, bool]]:
        """Name, draft, and whether it would load here without the exception for evolved targets.

        On the base none is made: a draft of another target is refused.
        """
        for name, path in self.config.drafts.items():
            draft = load_draft(path, model, allow_evolved=model is not self.base)
            own = draft.reference.fingerprint
            loads = fingerprint_mismatch(own, draft.fingerprint(model)) is None
            yield name, draft.to(model.device, model.dtype), loads
        for name, path in self.config.draft_models.items():
            yield name, load_draft_model(str(resolve_folder(path)), model, self.tokenizer), True

    def _decode(
        self, description: str, model: Any, folder: str, prompts: Sequence[Prompt]
    ) -> dict[str, Decoded]:
        """The prompts decoded by every draft."""
        room = model.config.get_text_config().max_position_embeddings - self.config.max_new_tokens
        arguments = argparse.Namespace(out=self.out, fresh=False, backend="local", shard=None)
        traces: Traces = traces_of(arguments, model, folder, None)
        found = {}
        for name, draft, loads in self._drafts(model):
            config = self.config.decode_config(draft.num_stages)
            records = evaluate(
                Engine(model, self.tokenizer, config, draft),
                prompts,
                self.tokenizer,
                max_prompt_tokens=room,
                description=f"{description}, {name}",
                traces=traces.open(config=asdict(config), draft=draft_hash(draft)),
            )
            if not records:
                raise ValueError(
                    f"max_new_tokens: {self.config.max_new_tokens} leaves no room for any prompt "
                    f"of {description}; lower it"
                )
            found[name] = Decoded(records, loads)
        return found


def _agreement(decoded: Iterable[Decoded]) -> tuple[int, int]:
    """Turns, and those that every draft gave the same text, as greedy decoding does to all."""
    texts = zip(*([r.result.token_ids for r in found.records] for found in decoded), strict=True)
    same = [all(text == turn[0] for text in turn) for turn in texts]
    return len(same), sum(same)


def run(argv: Sequence[str]) -> None:
    """The whole command; bad input raises ValueError, cheap checks before anything loads."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config, options = parse(argv)
    config.check_folders()
    config.decode_config(None)
    make_folder("--out", options.out)
    if options.fresh:
        shutil.rmtree(options.out / "traces", ignore_errors=True)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    base = load_target(config.base, dtype=getattr(torch, config.dtype), device=device)
    tokenizer = load_tokenizer(config.base)
    retention = Retention(config, options.out, base, tokenizer)
    benchmarks = {name: retention.prompts(domain) for name, domain in config.domains.items()}
    targets, drafts = retention.run()
    manifest = build_manifest(
        target=base,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        checkpoints=[resolve_folder(path) for path in config.drafts.values()],
        config=asdict(config),
        argv=["python", "-m", "pipedraft.eval", *argv],
        seed=config.seed,
    )
    print(write_retention(options.out, targets, drafts, manifest))
    print(f"written: {options.out}/results.json, report.md, manifest.json and retention.png")
