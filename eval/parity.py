"""Find where a draft's training and decoding disagree: `python -m pipedraft.eval parity --help`.

Take a greedy chain. While the target accepts its draft tokens, the draft reads the same inputs as
in teacher-forced training. In these rows, decoding must produce the same draft token as the
training forward pass, up to ties within rounding.
"""

# R rows (roots), U draft vocabulary, V vocabulary

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from os.path import commonprefix
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..chats import set_template_variables
from ..data_recipes.chat import ChatRenderer
from ..devices import place_draft, resolve_device, resolve_dtype
from ..errors import UsageError
from ..files import make_place, to_json, write_atomically
from ..models.exchange.card import LAYOUTS
from ..models.exchange.export import export
from ..models.exchange.llama_cpp import export_gguf
from ..models.exchange.peers import import_head
from ..models.heads.draft import CONFIG_FILE, Draft, resolve_folder
from ..models.target import choose_decoding_threads, load_target, load_tokenizer
from ..pretrained import quieten
from .arguments import ParityOptions
from .checkpoints import load_head, read_drafts
from .engine_parity import (
    ENGINES,
    OPENVINO,
    EngineComparison,
    decode_in_engine,
    engine_depth,
    target_file,
)
from .parity_rows import (
    ROUNDING,
    Check,
    Decoding,
    Drafted,
    Parting,
    Text,
    difference,
    over_vocabulary,
    size_of,
    trained_depth,
    vocabulary,
    why_decoding_parts,
    why_files_part,
)
from .tables import Table, align_columns, number
from .tasks import Prompt, encode_turn, load_tasks

READ_BACK = ("sglang", "speculators")
"""Layouts that ``import_head`` reads."""
NOTED = ("agreement_1", "agreement_filling", "agreement")
"""Checkpoint metrics: how often the first draft token equaled the target's, on validation rows."""
LEGEND = """\
Shares of rows whose draft token is the target's own. training, and files: the training's forward
pass at every row of the answers. there, decoding: at the rows that decoding reached by right draft
tokens alone, by the training's forward pass and as decoded, which have to be equal.
"""


# -- prompts, files, and the whole -----------------------------------------------------------


def training_prompt(
    renderer: ChatRenderer, prompt: Prompt, answer: str, prompt_ids: list[int]
) -> tuple[list[int], tuple[str, str] | None]:
    """Return the prompt's token ids in training, and the difference in decoding, if any."""
    chat = renderer.render([*prompt.messages(), {"role": "assistant", "content": answer}])
    ((ids, mask),) = renderer.tokenize([chat])
    if 1 not in mask:
        return prompt_ids, ("loss mask", "no token of the answer is supervised in training")
    own = ids[: mask.index(1)]
    if own == prompt_ids:
        return own, None
    at = len(commonprefix([own, prompt_ids]))
    words = [
        renderer.tokenizer.convert_ids_to_tokens(x[at : at + 1]) or ["the answer"]
        for x in (own, prompt_ids)
    ]
    if ids[: len(prompt_ids)] == prompt_ids:
        return own, ("loss mask", f"the answer begins at token {len(prompt_ids)}, its mask at {at}")
    return own, (
        "template",
        f"token {at} is {words[0][0]!r} in training, {words[1][0]!r} in decoding",
    )


def exported_drafts(
    folder: Path, kind: str, target: PreTrainedModel, name: str, given: Sequence[str]
) -> dict[str, Draft | str]:
    """Return the draft read from each layout or folder, or the reason why there is none."""
    if kind not in LAYOUTS and not given:
        known = ", ".join(LAYOUTS)
        return {"files": f"SGLang's and vLLM's layouts are of {known}; of {kind} there is none"}
    found: dict[str, Draft | str] = {}
    with tempfile.TemporaryDirectory() as place:
        for layout in given or [x for x in LAYOUTS[kind] if x in READ_BACK]:
            files = layout
            try:
                if not given:
                    files = f"{place}/{layout}"
                    export(folder, layout, Path(files), target=name)  # type: ignore[arg-type]
                out = Path(place) / f"from-{len(found)}"
                draft, _ = import_head(files, name, out, warn=_warn)
            except ValueError as error:
                if given:
                    raise UsageError(str(error).replace("--from", "--exported", 1)) from error
                found[layout] = str(error)
                continue
            if draft.draft_type != kind:
                raise UsageError(
                    f"--exported: {layout!r} holds a draft of type {draft.draft_type!r}, the "
                    f"checkpoint one of {kind!r}; give files of that"
                )
            draft.attach(target)
            found[Path(layout).name] = place_draft(draft, target)
    return found


@dataclass(kw_only=True)
class Parity:
    """Comparison of training, decoding and exported files on the same prompts."""

    draft: Draft
    decoding: Decoding
    files: Mapping[str, Draft | str]
    renderer: ChatRenderer | None
    """Renderer used in training; None: its tokenizer has no chat template."""
    depth: int
    engine: EngineComparison | None = None
    checks: dict[str, Check] = field(default_factory=dict)
    counts: list[Counter[str]] = field(default_factory=list)
    """Counts by draft position: rows, and accepted rows."""

    def __post_init__(self) -> None:
        self.counts = [Counter() for _ in range(self.depth)]
        self.target = self.decoding.target
        self.rounding = ROUNDING[self.target.dtype]
        remark = "" if self.renderer else "not compared: there is no chat template"
        self.checks["prompts"] = Check(name="prompts", unit="prompts", remark=remark)
        self.checks["decoding"] = Check(name="decoding")
        self.heads = {name: x for name, x in self.files.items() if isinstance(x, Draft)}
        for name, reason in self.files.items():
            remark = f"not compared: {reason}" if isinstance(reason, str) else ""
            self.checks[name] = Check(name=name, remark=remark)

    def add(self, prompt: Prompt) -> None:
        """Decode a prompt, and compare the draft with its training pass and exported files."""
        name = f"{prompt.task}/{prompt.id}"
        prompt_ids = encode_turn(self.decoding.tokenizer, prompt, [])
        answer, drafted = self.decoding.run(prompt_ids)
        if self.engine is not None:
            self.engine.add(name, self.decoding.result)
        own = self._compare_prompt(name, prompt, prompt_ids, answer)
        taps = {layer for draft in (self.draft, *self.heads.values()) for layer in draft.taps}
        text = Text(self.target, prompt_ids + answer, taps)
        trained = text if own == prompt_ids else Text(self.target, own + answer, taps)
        roots = range(len(own), len(own) + len(answer))
        states = text.states(self.draft, self.depth)
        trained_states = states if trained is text else trained.states(self.draft, self.depth)
        others = {n: trained.states(head, self.depth) for n, head in self.heads.items()}
        for step in range(min(self.depth, len(roots) - 1)):
            rows = roots[: -1 - step]  # the label must lie in the answer, too
            place_R = torch.tensor(rows, device=text.ids_T.device)
            logits_RU = self.draft.logits(trained_states[step][place_R])
            logits_RV = over_vocabulary(self.draft, logits_RU)
            in_order_R = vocabulary(self.draft).sort().values[logits_RU.argmax(-1)]
            right = int((in_order_R == trained.teacher_T[place_R + step]).sum())
            self.counts[step]["in order"] += right
            self._count(step, "training", logits_RV, trained.teacher_T[place_R + step])
            self.counts[step]["rows"] += len(rows)
            for other, head in self.heads.items():
                theirs_RV = over_vocabulary(head, head.logits(others[other][step][place_R]))
                self._count(step, other, theirs_RV, trained.teacher_T[place_R + step])
                self._compare_files(other, name, rows, step, logits_RV, theirs_RV)
        for found in drafted:
            end = found.root + found.depth
            if end < len(text.ids_T) and found.path == text.ids_T[found.root : end].tolist():
                self._compare_draft_token(name, found, text, states[found.depth - 1][found.root])

    def _compare_prompt(
        self, name: str, prompt: Prompt, prompt_ids: list[int], answer: list[int]
    ) -> list[int]:
        check = self.checks["prompts"]
        said = str(self.decoding.tokenizer.decode(answer, skip_special_tokens=True))
        if self.renderer is None or not said.strip():
            return prompt_ids
        own, why = training_prompt(self.renderer, prompt, said, prompt_ids)
        check.rows += 1
        if why is not None and check.first is None:
            check.first = Parting(prompt=name, what=why[0], detail=why[1])
        return own

    def _count(self, step: int, name: str, logits_RV: Tensor, teacher_R: Tensor) -> None:
        self.counts[step][name] += int((logits_RV.argmax(-1) == teacher_R).sum())

    def _compare_files(
        self,
        name: str,
        prompt: str,
        rows: range,
        step: int,
        ours_RV: Tensor,
        theirs_RV: Tensor,
    ) -> None:
        check, differ_R = self.checks[name], difference(ours_RV, theirs_RV)
        check.rows += len(rows)
        check.largest_difference = max(check.largest_difference, float(differ_R.max()))
        wrong = (differ_R > self.rounding * size_of(ours_RV)).nonzero().flatten().tolist()
        if wrong and check.first is None:
            what, detail = why_files_part(self.draft, self.heads[name])
            check.first = Parting(
                prompt=prompt,
                root=rows[wrong[0]],
                draft_position=step + 1,
                what=what,
                detail=detail,
            )

    def _compare_draft_token(self, name: str, found: Drafted, text: Text, state: Tensor) -> None:
        """Compare a draft token from decoding that follows accepted draft tokens only."""
        check, counts = self.checks["decoding"], self.counts[found.depth - 1]
        ours_V = over_vocabulary(self.draft, self.draft.logits(state[None]))[0]
        best, teacher = int(ours_V.argmax()), int(text.teacher_T[found.root + found.depth - 1])
        limit = self.rounding * size_of(ours_V)
        check.rows += 1
        counts["reached"] += 1
        counts["there"] += best == teacher
        counts["decoding"] += found.token == teacher
        is_tie = best != found.token and bool(ours_V[best] - ours_V[found.token] <= limit)
        check.ties += is_tie
        parts = best != found.token and not is_tie
        if found.logits_U is not None:
            theirs_V = over_vocabulary(self.draft, found.logits_U)
            apart = float(difference(ours_V[None], theirs_V))
            check.largest_difference = max(check.largest_difference, apart)
            parts = parts or apart > limit
        if parts and check.first is None:
            what, detail = why_decoding_parts(self.draft, found, text, state, self.rounding)
            check.first = Parting(
                prompt=name,
                root=found.root,
                draft_position=found.depth,
                what=what,
                detail=detail,
            )

    def compare_with_note(self, metrics: Mapping[str, float]) -> None:
        """Compare the training forward pass with the checkpoint's recorded metrics."""
        first, check = self.counts[0], Check(name="checkpoint")
        self.checks["checkpoint"] = check
        here = first["training"] / max(first["rows"], 1)
        noted = next((metrics[name] for name in NOTED if name in metrics), None)
        check.remark = f"{here:.3f} of the first draft tokens are right in training's forward pass"
        if noted is not None:
            check.remark += f"; the checkpoint lists {noted:.3f} on validation rows"
        if noted is not None and here < noted / 2:
            check.remark += ", more than twice that: other prompts, or other weights"
        if first["in order"] > 2 * first["training"]:
            check.first = Parting(
                what="vocabulary map",
                detail=f"{first['training']} of {first['rows']} first draft tokens are right, "
                f"{first['in order']} would be with ascending ids, which training writes",
            )

    @property
    def positions(self) -> list[dict[str, int]]:
        """Return counts by draft position."""
        names = ("rows", "training", *self.heads, "reached", "there", "decoding")
        return [{name: row[name] for name in names} for row in self.counts]

    def table(self) -> Table:
        def share(part: str, whole: str) -> Callable[[tuple[int, Counter[str]]], str]:
            return lambda row: number(row[1][part] / row[1][whole] if row[1][whole] else None)

        columns = {
            "draft position": lambda row: str(row[0]),
            "rows": lambda row: str(row[1]["rows"]),
            **{name: share(name, "rows") for name in ("training", *self.heads)},
            "reached": lambda row: str(row[1]["reached"]),
            "there": share("there", "reached"),
            "decoding": share("decoding", "reached"),
        }
        return Table.of(columns, enumerate(self.counts, 1))


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


@contextmanager
def own_checkpoint(options: ParityOptions) -> Iterator[str]:
    """Yield the given checkpoint, converted into this project's format if needed."""
    folder = resolve_folder(options.checkpoint)
    try:
        is_peer = "draft_type" not in json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        is_peer = False  # reading it as a checkpoint explains the error
    if not is_peer:
        yield options.checkpoint
        return
    if options.target is None:
        raise UsageError(
            f"--target: missing; {options.checkpoint!r} is no checkpoint of pipedraft, so name the "
            "target that this head was trained for"
        )
    with tempfile.TemporaryDirectory() as place:
        import_head(str(folder), options.target, Path(place) / "imported", warn=_warn)
        yield f"{place}/imported"


@contextmanager
def _refused_for(engine: str) -> Iterator[None]:
    """Name --engine where an export refuses a head's setting and would name --format."""
    try:
        yield
    except ValueError as error:
        option, _, reason = str(error).partition("; ")[0].partition(": ")
        if option != "--format":
            raise
        raise UsageError(
            f"--engine: {engine} cannot run this head: {reason}; name another engine"
        ) from error


def in_engine(
    options: ParityOptions, parity: Parity, kind: str, folder: str, prompts: Sequence[Prompt]
) -> EngineComparison:
    assert options.engine is not None
    engine = ENGINES[options.engine]
    if kind not in engine.layouts:
        known = ", ".join(engine.layouts)
        raise UsageError(
            f"--engine: {options.engine} runs {known} heads, {options.checkpoint!r} is of type "
            f"{kind!r}; leave out --engine"
        )
    if options.starts > 1 and engine is not OPENVINO:
        raise UsageError(
            f"--starts: {options.starts} is for openvino; {engine.name} starts once, leave it out"
        )
    if options.exported and engine.layouts[kind] == "gguf":
        raise UsageError(
            f"--exported: {options.exported[0]!r} with --engine {engine.name}, which reads GGUF "
            "files; leave it out, the command exports the head itself"
        )
    target, depth = parity.target, engine_depth(parity.draft, parity.depth)
    name = options.target or parity.draft.reference.name
    encoded = [(encode_turn(parity.decoding.tokenizer, one, []), one) for one in prompts]
    program, layout = options.engine_python or engine.python, engine.layouts[kind]
    with tempfile.TemporaryDirectory() as place:
        files = f"{place}/exported"
        if options.exported:
            files = options.exported[0]
        elif layout == "gguf":
            name = target_file(engine, program, name, Path(place))
            with _refused_for(engine.name):
                export_gguf(resolve_folder(folder), Path(files), target=name)
        elif folder != options.checkpoint:  # files from another project, unchanged
            files = str(resolve_folder(options.checkpoint))
        else:
            with _refused_for(engine.name):
                export(resolve_folder(folder), layout, Path(files), target=name)
        return decode_in_engine(
            engine,
            program,
            encoded,
            parity.draft,
            target,
            name=name,
            files=str(Path(files).resolve()),
            depth=depth,
            max_new_tokens=options.max_new_tokens,
            dtype=str(target.dtype).removeprefix("torch."),
            starts=options.starts,
        )


def run(options: ParityOptions, argv: Sequence[str]) -> None:
    """Run the whole subcommand. Bad input raises ValueError. A difference exits with status 1."""
    quieten()
    with own_checkpoint(options) as folder:
        compare(options, folder)


def compare(options: ParityOptions, checkpoint: str) -> None:
    tasks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    prompts = [prompt for task in tasks.values() for prompt in task]
    name, revision, drafts = read_drafts([checkpoint], options.target, None)
    ((folder, description),) = drafts.items()
    if options.json is not None:
        make_place("--json", options.json, b'{\n  "parity": ')
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device, name, revision)
    tokenizer = load_tokenizer(name, revision=revision)
    source = tokenizer
    if options.trained_tokenizer is not None:
        source = load_tokenizer(options.trained_tokenizer, field="--trained-tokenizer")
        if len(source) != len(tokenizer):
            raise UsageError(
                f"--trained-tokenizer: {options.trained_tokenizer!r} has {len(source)} tokens, the "
                f"target's {len(tokenizer)}; give the one that the training data was made with"
            )
    trained = (description["training"].get("data") or {}).get("chat_template_kwargs")
    for one in (tokenizer, source):
        set_template_variables(one, trained)
    target = load_target(name, revision=revision, dtype=dtype, device=device, may_round=False)
    choose_decoding_threads(target)
    draft = load_head(folder, target)
    depth = trained_depth(draft, options.depth)
    parity = Parity(
        draft=draft,
        decoding=Decoding(
            target, tokenizer, draft, depth=depth, max_new_tokens=options.max_new_tokens
        ),
        depth=depth,
        files=exported_drafts(folder, description["draft_type"], target, name, options.exported),
        renderer=ChatRenderer(source) if source.chat_template else None,
    )
    lines: list[str] = []
    with torch.inference_mode():
        if options.engine is not None:
            kind = description["draft_type"]
            parity.engine = in_engine(options, parity, kind, checkpoint, prompts)
        for prompt in prompts:
            parity.add(prompt)
        if parity.engine is not None:
            parity.checks["engine"] = parity.engine.finish()
            lines = parity.engine.lines()
    parity.compare_with_note(description["training"].get("metrics", {}))
    print(align_columns(parity.table()), LEGEND, *parity.checks.values(), *lines, sep="\n")
    if options.json is not None:
        checks = [asdict(check) for check in parity.checks.values()]
        content = {"parity": {"checks": checks, "positions": parity.positions, "engine": lines}}
        write_atomically(options.json, to_json(content))
    if any(check.first for check in parity.checks.values()):
        sys.exit(1)
