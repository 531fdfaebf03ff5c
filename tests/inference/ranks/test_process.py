"""Stages as processes: the controller's bookkeeping, and agreement between real ranks."""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from command_processes import run_ranks
from command_runs import call
from decode_runs import (
    NEW_TOKENS,
    PROMPTS,
    SimulatedSource,
    engine_for,
    friendly_module,
    greedy_reference,
    prompts_of,
    way_name,
)
from decode_runs import WAYS as EAGLE_WAYS
from inline_ranks import Wire, connect_in_turns, connect_inline, decode_both
from msgspec.structs import replace
from needs import NEEDS_KERNELS
from tiny_drafts import make_exit, make_head
from tiny_models import tiny_llama, tiny_qwen3

from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.pipelines.process import ProcessPipeline
from pipedraft.inference.ranks.codec import CODEC, StageResult, Step
from pipedraft.inference.ranks.worker import StageWorker
from pipedraft.inference.rules.sampled import RULES
from pipedraft.inference.timeline import Timeline, chrome_trace

ROOT = Path(__file__).resolve().parents[3]
SPD_WAYS = [
    {"schedule": "autoregressive"},
    {"schedule": "spd"},
    {"schedule": "spd", "tree_width": 3},
]


# -- the controller's books ------------------------------------------------------------------


ONE_STAGE_WAYS = EAGLE_WAYS[::5]
"""If the first stage is also the last, the controller's part is the same for all."""


@pytest.mark.parametrize(
    "num_stages, way",
    [
        pytest.param(n, way, id=f"{way_name(way)}-{n}", marks=[pytest.mark.all] * (way not in few))
        for n, few in ((4, EAGLE_WAYS), (1, ONE_STAGE_WAYS), (2, []))
        for way in EAGLE_WAYS
    ],
)
def test_both_backends_agree_with_an_eagle_head(way, num_stages):
    """Two prompts; the other two come below."""
    target = tiny_llama(layers=4, vocab=16)
    prompts = prompts_of(EAGLE_WAYS.index(way))
    decode_both(target, prompts, draft=make_head(target), num_stages=num_stages, **way)


@pytest.mark.parametrize("way", EAGLE_WAYS, ids=way_name)
def test_both_backends_agree_when_segments_are_pruned_on_their_way(way):
    target = tiny_llama(layers=4, vocab=16)

    def make_source(prompt):
        return SimulatedSource(target, prompt, 0.7, length=NEW_TOKENS)

    prompts = prompts_of(EAGLE_WAYS.index(way) + 1)
    if way["schedule"] in ("naive_pp", "pruned_pp", "flowspec"):
        way = way | {"micro_batches": 9}
    decode_both(target, prompts, make_source=make_source, num_stages=4, **way)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", SPD_WAYS, ids=lambda way: f"W{way.get('tree_width', 1)}")
def test_both_backends_agree_with_a_speculation_module(way, temperature):
    target = tiny_qwen3(layers=4, vocab=16)
    cuts = ((4, "newest"), (3, "all"), (1, "newest"))
    for number, (num_stages, query) in enumerate(cuts[:1] if temperature else cuts):
        draft = friendly_module(target, num_stages=num_stages, num_layers=1, query=query)
        options = {"draft": draft, "num_stages": num_stages, "temperature": temperature}
        decode_both(target, prompts_of(number + (temperature > 0)), **options, **way)


@pytest.mark.parametrize("width", [1, 3])
def test_both_backends_agree_with_an_early_exit_head(width):
    target = tiny_llama(layers=4, vocab=16)
    for number, num_stages in enumerate((2, 4)):
        draft = make_exit(target, num_stages=num_stages)
        options = {"num_stages": num_stages, "schedule": "ppsd", "tree_width": width}
        decode_both(target, prompts_of(number), draft=draft, **options)


@pytest.mark.parametrize("way", [{"schedule": "autoregressive"}, *EAGLE_WAYS], ids=way_name)
def test_a_step_sends_one_message_over_each_link(way, monkeypatch):
    """A step's segment and the KeepRows before it travel together, so no link gets two messages."""
    target = tiny_llama(layers=4, vocab=16)
    sent = defaultdict(Counter)
    send = Wire.send

    def watched(wire, message):
        sent[type(message).__name__][wire] += 1
        send(wire, message)

    monkeypatch.setattr(Wire, "send", watched)
    draft = None if way["schedule"] == "autoregressive" else make_head(target)
    options = {"num_stages": 4, "max_new_tokens": NEW_TOKENS, "connect": connect_inline}
    result = engine_for(target, draft=draft, **options, **way).decode(PROMPTS[2])
    assert sent.keys() <= {"Prefill", "Step", "StageResult", "Cancel"}
    assert len(sent["Step"]) == 4
    (num_segments,) = set(sent["Step"].values())
    # One more may be under way when the output ends.
    assert num_segments <= result.num_steps + 1
    if draft is None:
        assert num_segments == result.num_tokens
    chunks = max(sent["Prefill"].values())
    assert max(sent["StageResult"].values()) <= num_segments + chunks
    assert max(sent["Cancel"].values(), default=0) <= num_segments


@pytest.mark.parametrize("verifier, is_token", [("auto", True), ("rejection", False)])
def test_plain_decoding_above_temperature_0_sends_a_token_a_step(verifier, is_token, monkeypatch):
    """If a rule weighs logits, here with SPD's chain, logits travel instead of tokens."""
    target = tiny_llama(layers=4, vocab=500)
    verdicts = []
    send = Wire.send

    def watched(wire, message):
        if isinstance(message, StageResult) and message.verdicts is not None:
            verdicts.append((message.verdicts, len(CODEC.encode(message).data)))
        send(wire, message)

    monkeypatch.setattr(Wire, "send", watched)
    module = friendly_module(target, num_stages=4, num_layers=1, query="newest")
    schedule, draft = ("autoregressive", None) if is_token else ("spd", module)
    options = {"temperature": 1.0, "num_stages": 4, "max_new_tokens": NEW_TOKENS}
    options |= {"schedule": schedule, "verifier": verifier}
    engine_for(target, draft=draft, connect=connect_inline, **options).decode(PROMPTS[0])
    _, *steps = verdicts  # the prompt's result is a token under every rule
    assert len(steps) > 3
    for verdict, num_bytes in steps:
        assert (verdict.dtype == torch.int64 and verdict.ndim == 1) == is_token
        assert (num_bytes < 200) == is_token


@pytest.mark.parametrize("schedule", ["pipeinfer", "ssd"])
def test_the_text_is_the_same_where_waiting_verdicts_cut_drafting_short(schedule, monkeypatch):
    """Here every verdict waits at once: micro-batches shrink, nothing is prepared, K differs."""
    target = tiny_llama(layers=4, vocab=16)
    waited = []
    waits = ProcessPipeline.verdict_waits

    def watched(pipeline):
        waited.append(waits(pipeline))
        return waited[-1]

    monkeypatch.setattr(ProcessPipeline, "verdict_waits", watched)
    options = {"schedule": schedule, "num_stages": 4, "max_new_tokens": NEW_TOKENS}
    engine = engine_for(target, draft=make_head(target), connect=connect_inline, **options)
    for prompt in PROMPTS:
        assert engine.decode(prompt).token_ids == greedy_reference(target, prompt)
    assert any(waited)


def test_cancelled_segments_are_not_computed(monkeypatch):
    target = tiny_llama(layers=4, vocab=16)
    skipped = []
    skip = StageWorker._answer

    def watched(worker, message, cause):
        if isinstance(cause, Step) and message.verdicts is None and worker.following is None:
            skipped.append(cause.segment.num_rows)
        skip(worker, message, cause)

    monkeypatch.setattr(StageWorker, "_answer", watched)
    result, local = (
        engine_for(
            target,
            source=SimulatedSource(target, PROMPTS[2], 0.3, length=NEW_TOKENS),
            connect=connect,
            num_stages=4,
            max_new_tokens=NEW_TOKENS,
        ).decode(PROMPTS[2])
        for connect in (connect_in_turns, LocalPipeline)
    )
    assert result.token_ids == local.token_ids and result.num_steps == local.num_steps
    assert len(skipped) > 3


def test_a_keep_that_stays_behind_is_noticed(monkeypatch):
    """Mutant behind these comparisons: a stage forgets to apply a KeepRows message."""
    target = tiny_llama(layers=4, vocab=16)
    begin = StageWorker.begin

    def mutant(worker, step):
        return begin(worker, replace(step, kept=step.kept[:1] if step.sequence % 5 else ()))

    monkeypatch.setattr(StageWorker, "begin", mutant)
    with pytest.raises(AssertionError):
        decode_both(target, PROMPTS, draft=make_head(target), num_stages=4, **EAGLE_WAYS[7])


def test_a_trace_has_a_track_for_every_process():
    timeline = Timeline("stage 0", traces=True)
    with timeline.span("stage", 3):
        pass
    trace = chrome_trace([timeline.report(), Timeline("stage 1").report()])
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert names == ["stage 0", "stage 1"]
    assert [(e["name"], e["args"]["rows"], e["ts"]) for e in spans] == [("stage", 3, 0.0)]


# -- real processes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_processes", "links", "half"),
    [
        (2, "auto", "0"),
        (3, "device", "1"),
        pytest.param(3, "device", "whole", marks=pytest.mark.all),
    ],
)
def test_ranks_decode_what_one_process_decodes(num_processes, links, half, parent, tmp_path):
    """Two stages, the first one beside the controller and on its own rank. Hidden states travel
    inside their frames and separately. Every acceptance rule runs at temperature 1 in one case.
    Every schedule runs at temperature 0 in one case and at 1 in the other, and gives the baseline's
    output. Device links are opened first, because NCCL connects when a link is first used.
    """
    words = [str(tmp_path), links, half]
    output = run_ranks(parent, "tests/support/process_agreement.py", words, num_processes)
    outcome = json.loads(output.splitlines()[-1])
    rules = list(RULES) if half == "whole" else list(RULES)[int(half) :: 2]
    at_least = 34 if half == "whole" else 10
    assert outcome["different"] == [] and outcome["compared"]["greedy"] >= at_least
    assert outcome["unlike_plain"] == [], "text is not plain decoding's"
    assert set(outcome["compared"]) == {"greedy", *rules}
    names = [report["name"] for report in outcome["reports"]]
    assert len(names) == num_processes and "stage 1" in names[-1]
    assert all(report["seconds"]["stage"] > 0 for report in outcome["reports"][-2:])
    held = outcome["parameters"]
    assert held[-1] < 0.8 * held[-2] + held[-1]
    assert outcome["device_links"] == (3 if links == "device" else 0)


def test_two_ranks_decode_in_bfloat16_what_plain_decoding_does(parent, tmp_path):
    output = run_ranks(
        parent, "tests/support/process_agreement.py", [str(tmp_path), "host", "bitwise"], 2
    )
    outcome = json.loads(output.splitlines()[-1])
    assert outcome["different"] == [] and outcome["compared"]["greedy"] == 6


@NEEDS_KERNELS
@pytest.mark.all
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_ranks_round_their_own_layers(dtype):
    """Known-bad: ranks knew only dtypes for sending hidden states, and int4 is none."""
    command = [sys.executable, "-m", "pipedraft.inference", "--target", "assets/target"]
    command += ["--schedule", "autoregressive", "--stages", "2", "--dtype", dtype]
    command += ["--prompt", "What is 3 + 4?", "--max-new-tokens", "12"]
    texts = []
    for more in ([], ["--backend", "process", "--processes", "2"]):
        done = subprocess.run(
            [*command, *more], check=True, capture_output=True, text=True, cwd=ROOT, timeout=300
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1] and texts[0].strip()


def test_without_a_launcher_the_process_backend_says_how_to_start(monkeypatch, capsys):
    words = ["--backend", "process", "--target", "assets/target", "--prompt", "Hi"]
    monkeypatch.delenv("RANK", raising=False)
    assert call("inference", words, monkeypatch) == 2
    assert "give --processes N" in capsys.readouterr().err
