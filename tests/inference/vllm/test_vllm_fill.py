"""vLLM's scheduler with guesses in flight, over a stand-in: outputs, steps, faults, refusals."""

import inspect
import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm_parent
from scripts import load_script
from tiny_models import REPOSITORY, tiny_llama
from vllm_faults import FAULTS
from vllm_parent import EOS, StandInRequest, StandInRunner, StandInScheduler
from vllm_runs import PLACES, Engine, Guesser, Scheduler, random_load, vllm_config

from pipedraft.inference.followers import Followers
from pipedraft.inference.vllm import __main__ as program
from pipedraft.inference.vllm import gate, interface, ranks
from pipedraft.inference.vllm.drafts import make_draft
from pipedraft.inference.vllm.flight import Counts
from pipedraft.inference.vllm.gate import (
    CANNOT_WORK,
    NOT_TRIED,
    check_config,
    parse_draft,
    read_settings,
)
from pipedraft.inference.vllm.source import import_folder


class Watched(Scheduler):
    """Counts corners that a test must have visited."""

    seen: Counter[str] = Counter()

    def _preempt_request(self, request, timestamp, drop_stale_output=False):
        has_guesses = bool(self._flight(request).guesses)
        self.seen["preempted with guesses", has_guesses, drop_stale_output] += 1
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _drop(self, request, num_tokens):
        self.seen["stale while preempted"] += bool(request.num_stale_output_tokens)
        super()._drop(request, num_tokens)

    def update_from_output(self, scheduler_output, model_runner_output):
        names = scheduler_output.num_scheduled_tokens
        self.seen["output after the end"] += any(name not in self.requests for name in names)
        return super().update_from_output(scheduler_output, model_runner_output)


@pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(n, marks=pytest.mark.all) for n in (2, 4))]
)
def test_outputs_are_those_of_the_definition(num_ranks):
    Watched.seen.clear()
    total = Counts()
    for place in PLACES.values():
        for seed in range(30):
            rate, silence = (0.0, 0.5, 0.9, 1.0)[seed % 4], (0.0, 0.3)[seed % 2]
            engine = Engine(num_ranks, rate=rate, silence=silence, scheduler=Watched, **place)
            engine.scheduler._report = lambda: None  # keeps the counts
            random_load(engine, seed)
            assert not engine.wrong(), (place, seed)
            assert not any(engine.scheduler.kv_cache_manager.held.values())
            for name, count in vars(engine.scheduler.counts).items():
                setattr(total, name, getattr(total, name) + count)
    assert min(total.hits, total.misses, total.stale) > 100
    if num_ranks > 2:  # with two, each output resolves the only guess in flight
        assert Watched.seen["preempted with guesses", True, False] > 0
        assert Watched.seen["preempted with guesses", True, True] > 0
    assert Watched.seen["stale while preempted"] > 0
    assert Watched.seen["output after the end"] > 0


def long_request(engine, name="a", num_tokens=25):
    return engine.add(name, [3, 1, 4], max_tokens=num_tokens, min_tokens=num_tokens)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_a_right_guess_takes_a_step_and_a_wrong_one_a_pass_through_the_pipeline(num_ranks):
    for rate, num_tokens in ((1.0, 25), (0.0, 25), (0.6, 40)):
        engine = Engine(num_ranks, rate=rate)
        engine.scheduler._report = lambda: None
        long_request(engine, num_tokens=num_tokens)
        while engine.scheduler.requests:
            engine.step()
        counts = engine.scheduler.counts
        assert counts.hits + counts.misses >= num_tokens - 2
        # The prefill's output needs a pass through the pipeline. Each other token follows after a
        # step if it was guessed, else after a pass. Nothing is guessed behind the last token.
        others = num_tokens - 1 - counts.hits
        assert engine.num_slots == num_ranks + counts.hits + num_ranks * others


def test_several_requests_fill_the_pipeline_without_guesses():
    """Guesses take only steps that no other request needs."""
    engine = Engine(2, rate=1.0)
    guessed = []
    put = engine.scheduler._put
    engine.scheduler._put = lambda request, tokens: (guessed.append(request), put(request, tokens))
    long_request(engine, "a")
    engine.step()  # the other request needs the other half of the steps
    long_request(engine, "b")
    while all(len(output) < 20 for output in engine.scheduler.outputs.values()):
        engine.step()
    assert not guessed
    engine.run()
    assert not engine.wrong()


def test_a_waiting_request_is_served_before_a_guess():
    engine = Engine(4, rate=1.0)
    long_request(engine, "a")
    for _ in range(3):
        engine.step()
    before = engine.scheduler.counts.guesses
    assert before > 0
    long_request(engine, "b")
    engine.step()
    assert engine.scheduler.counts.guesses == before
    assert "b" in {r.request_id for r in engine.scheduler.running}


def test_a_guess_preempts_nothing():
    for seed in range(60):
        engine = Engine(3, rate=0.5, num_blocks=15)
        preempted = engine.scheduler.preempted_for
        guesses = []
        append = engine.scheduler._append_guesses

        def watched(append=append, guesses=guesses, preempted=preempted):
            found = append()
            guesses.append((len(preempted), found))
            return found

        engine.scheduler._append_guesses = watched
        random_load(engine, seed, aborts=False)
        for (before, found), (after, _) in zip(guesses, guesses[1:], strict=False):
            assert not found or before == after


def test_a_request_that_cannot_be_guessed_is_decoded_without():
    engine = Engine(2, rate=1.0)
    request = long_request(engine)
    request.structured_output_request = object()
    engine.run()
    assert engine.scheduler.counts.guesses == 0 and not engine.wrong()


@pytest.mark.parametrize(
    "field, word",
    [
        ("structured_output_request", "structured output"),
        ("lora_request", "LoRA"),
        ("pooling_params", "pooling"),
        ("prompt_embeds", "embeddings"),
        ("mm_features", "multimodal"),
        ("resumable", "streamed"),
        ("kv_transfer_params", "transfer"),
    ],
)
def test_the_reason_for_no_guesses_is_named(field, word):
    request = StandInRequest("a", [1], vllm_parent.Params())
    assert gate.plain_reason(request) is None
    setattr(request, field, [1])
    assert word in gate.plain_reason(request)
    request = StandInRequest("a", [1], vllm_parent.Params())
    request.sampling_params.thinking_token_budget = 8
    assert "thinking" in gate.plain_reason(request)


# -- faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, monkeypatch):
    for owner, attribute, fault in FAULTS[name]:
        monkeypatch.setattr(owner, attribute, fault)
    found = []
    for seed in range(120):
        place = [*PLACES.values()][seed % len(PLACES)]
        engine = Engine(2 + seed % 3, rate=(0.5, 0.9)[seed % 2], **place)
        try:
            random_load(engine, seed)
            found += ["wrong output"] * bool(engine.wrong())
        except (AssertionError, RuntimeError, IndexError, KeyError) as error:
            found.append(type(error).__name__)
        if found:
            return
    raise AssertionError("not found")


# -- the gate -------------------------------------------------------------------------------

SETTINGS = {
    "--pipeline-parallel-size 1": ("parallel_config.pipeline_parallel_size", 1),
    "--worker-cls": ("parallel_config.worker_cls", "auto"),
    "VLLM_USE_V2_MODEL_RUNNER": ("use_v2_model_runner", True),
    "--async-scheduling": ("scheduler_config.async_scheduling", True),
    "--speculative-config": ("speculative_config", object()),
    "a model with recurrent layers": ("model_config.is_hybrid", True),
    "an encoder-decoder model": ("model_config.is_encoder_decoder", True),
    "a pooling model": ("model_config.runner_type", "pooling"),
    "a diffusion model": ("model_config.is_diffusion", True),
    "--logits-processors": ("model_config.logits_processors", ["module:Processor"]),
    "--tensor-parallel-size": ("parallel_config.tensor_parallel_size", 2),
    "--data-parallel-size": ("parallel_config.data_parallel_size", 2),
    "--decode-context-parallel-size": ("parallel_config.decode_context_parallel_size", 2),
    "--distributed-executor-backend": ("parallel_config.distributed_executor_backend", "ray"),
    "--enable-eplb": ("parallel_config.enable_eplb", True),
    "--enable-lora": ("lora_config", object()),
    "a multimodal model": ("model_config.is_multimodal_model", True),
    "--enable-prompt-embeds": ("model_config.enable_prompt_embeds", True),
    "--kv-transfer-config": ("kv_transfer_config", object()),
    "--ec-transfer-config": ("ec_transfer_config", object()),
    "--reasoning-config": ("reasoning_config", object()),
    "a device other than the CPU": ("device_config.device_type", "cuda"),
}


def cache_config(*block_sizes, has_mamba_layers=False):
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=s)) for s in block_sizes]
    return SimpleNamespace(has_mamba_layers=has_mamba_layers, kv_cache_groups=groups)


@pytest.fixture
def tested_version(monkeypatch):
    monkeypatch.setattr(gate, "installed_version", lambda: gate.TESTED)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_refused_by_its_name(name, tested_version):
    attribute, value = SETTINGS[name]
    check_config(vllm_config(), cache_config(16), untested=False)
    config = vllm_config(**{attribute: value})
    with pytest.raises(ValueError) as refused:
        check_config(config, cache_config(16), untested=False)
    assert str(refused.value).startswith(f"{name}: ") and "\n" not in str(refused.value)
    if name in {refusal.name for refusal in CANNOT_WORK}:
        with pytest.raises(ValueError):
            check_config(config, cache_config(16), untested=True)
    else:
        check_config(config, cache_config(16), untested=True)


def test_a_class_made_from_the_worker_is_accepted(tested_version):
    own = type("Own", (type("FillWorker", (), {}),), {})
    config = vllm_config(**{"parallel_config.worker_cls": own})
    check_config(config, cache_config(16), untested=False)
    config = vllm_config(**{"parallel_config.worker_cls": "collections.OrderedDict"})
    with pytest.raises(ValueError, match="--worker-cls: cannot fill"):
        check_config(config, cache_config(16), untested=False)


def test_caches_are_refused_by_name(tested_version):
    with pytest.raises(ValueError, match="recurrent layers"):
        check_config(vllm_config(), cache_config(16, has_mamba_layers=True), untested=True)
    with pytest.raises(ValueError, match="several sizes"):
        check_config(vllm_config(), cache_config(16, 32), untested=False)


def test_every_refusal_is_tested():
    names = {refusal.name for refusal in (*CANNOT_WORK, *NOT_TRIED)}
    assert names - SETTINGS.keys() == {"a cache whose blocks have several sizes"}


@pytest.mark.parametrize("found", [None, "0.31.0", "0.33.0"])
def test_another_version_is_refused_unless_asked_for(found, monkeypatch):
    with pytest.raises(ValueError, match=f"vllm: {found or 'not found'}.*0.32.0.*--untested"):
        gate.check_version(found, untested=False)
    monkeypatch.setattr(gate, "differences", lambda: [])
    gate.check_version(found, untested=True)
    monkeypatch.setattr(gate, "differences", lambda: ["Scheduler.schedule"])
    with pytest.raises(ValueError, match="other private parts than 0.32.0: Scheduler.schedule"):
        gate.check_version(found, untested=True)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"drafts": "ngram"}, "drafts: unknown; give one of draft, trace, untested"),
        ({"draft": 3}, "draft: 3; give text"),
        ({"untested": "yes"}, "untested: 'yes'; give true or false"),
        ({"trace": True}, "trace: True; give a file's name"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=f"additional_config.pipedraft.{message}"):
        read_settings(SimpleNamespace(additional_config={"pipedraft": settings}))
    assert read_settings(SimpleNamespace(additional_config=None)) == gate.FillSettings()


def test_the_stand_in_has_the_recorded_interface():
    for name, recorded in interface.METHODS.items():
        kind, method = name.rpartition(":")[2].split(".")
        stand_in = {"Scheduler": StandInScheduler, "GPUModelRunner": StandInRunner}.get(kind)
        if stand_in is None or method in ("execute_model", "_sample", "_bookkeeping_sync"):
            continue  # the runner's stand-in passes less
        assert interface.parameters(getattr(stand_in, method)) == recorded, name
    source = inspect.getsource(vllm_parent)
    for name in (
        "vllm.v1.request:Request",
        interface.SCHEDULER,
        "vllm.v1.outputs:ModelRunnerOutput",
    ):
        missing = [w for w in interface.ATTRIBUTES[name].split() if w not in source]
        assert not missing, missing


# -- drafts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_a_lookup_draft_is_the_most_probable_follower(kind):
    draft, text, path = make_draft(kind, vocab_size=9), [1, 2, 3, 1, 2, 4, 1, 2], []
    for _ in range(3):
        followers = Followers(kind, 9)
        for token in text:
            followers.extend(token)
        assert draft.guess("a", text, path) == int(followers.estimate(path).argmax())
        text, path = [*text, 4], [1]
    draft.forget("a")
    assert draft.guess("a", [5, 6, 5], []) == 6  # another request of this name


def test_an_oracle_is_right_at_its_rate(tmp_path):
    file = tmp_path / "runs.json"
    file.write_text('{"runs": [{"prompt_ids": [7, 8], "out": [1, 2, 3]}]}')
    draft = make_draft(f"oracle:{file}:0.75", vocab_size=9)
    right = [draft.guess("a", [7, 8, 1], [2]) == 3 for _ in range(400)]
    assert 0.68 < sum(right) / 400 < 0.82
    assert draft.guess("a", [7, 8, 1, 2, 3], []) is None
    assert draft.guess("b", [8, 8], []) is None


@pytest.mark.parametrize(
    "text", ["ngrams", "ngram:3", "oracle:file", "oracle:file:2", "model:", ""]
)
def test_an_unknown_draft_is_refused(text):
    with pytest.raises(ValueError, match="draft: .* is unknown; give ngram, suffix"):
        parse_draft(text)


def test_a_model_draft_is_greedy_whatever_it_has_cached(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    draft = make_draft(f"model:{tmp_path}", vocab_size=64)
    for text, path in [([1, 2, 3], []), ([1, 2, 3], [9]), ([1, 2, 3, 4], []), ([1, 2, 3, 4], [])]:
        ids = torch.tensor([[*text, *path]])
        with torch.inference_mode():
            assert draft.guess("a", text, path) == int(model(ids).logits[0, -1].argmax())
    draft.forget("a")
    assert draft.guess("a", [5], []) == draft.guess("b", [5], [])
    with pytest.raises(ValueError, match="vocabulary"):
        make_draft(f"model:{tmp_path}", vocab_size=65)


# -- the command ----------------------------------------------------------------------------


def command(*words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pipedraft vllm", *words])
    program.main()


def test_the_command_prints_a_launch_line(tmp_path, monkeypatch, capsys):
    trace = str(tmp_path / "t")
    words = ["out/smollm2", "--draft", "suffix", "--trace", trace, "--max-model-len", "512"]
    command(*words, monkeypatch=monkeypatch)
    setting, *line = shlex.split(capsys.readouterr().out)
    assert setting == "VLLM_USE_V2_MODEL_RUNNER=0"
    assert line[:5] == ["vllm", "serve", "out/smollm2", "--pipeline-parallel-size", "2"]
    assert line[-2:] == ["--max-model-len", "512"] and "--no-async-scheduling" in line
    for flag, name in (("--scheduler-cls", "FillScheduler"), ("--worker-cls", "FillWorker")):
        assert line[line.index(flag) + 1] == f"pipedraft.inference.vllm.{name}"
    settings = json.loads(line[line.index("--additional-config") + 1])
    read = read_settings(SimpleNamespace(additional_config=settings))
    assert read == gate.FillSettings(draft="suffix", trace=trace)


def fake_python(folder, version):
    """A program that answers as the probe does in an environment with this vLLM."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\necho '[{version}, false]'\n")
    file.chmod(0o755)
    return str(file)


def test_a_checkout_of_any_name_is_imported_as_pipedraft(tmp_path):
    checkout = tmp_path / "main"
    checkout.mkdir()
    for _ in range(2):
        assert (import_folder(checkout) / "pipedraft").samefile(checkout)
    (tmp_path / "pipedraft").mkdir()
    assert import_folder(tmp_path / "pipedraft") == tmp_path


def test_another_environment_imports_the_checkout(tmp_path, monkeypatch, capsys):
    python = fake_python(tmp_path, '"0.32.0"')
    command("m", "--engine-python", python, monkeypatch=monkeypatch)
    line = shlex.split(capsys.readouterr().out)
    name, _, path = line[1].partition("=")
    assert line[0] == "VLLM_USE_V2_MODEL_RUNNER=0" and name == "PYTHONPATH"
    assert (Path(path) / "pipedraft").samefile(REPOSITORY)
    assert line[2:6] == [python, "-m", "vllm.entrypoints.cli.main", "serve"]
    python = fake_python(tmp_path, '"0.31.0"')
    with pytest.raises(ValueError, match=r"vllm: 0\.31\.0.*install 0\.32\.0, or give --untested"):
        command("m", "--engine-python", python, monkeypatch=monkeypatch)
    command("m", "--engine-python", python, "--untested", monkeypatch=monkeypatch)
    assert '"untested": true' in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--model: missing"),
        (["m", "--draft", "best"], "draft: 'best' is unknown"),
        (["m", "--pipeline-parallel-size", "1"], "--pipeline-parallel-size: 1; give at least 2"),
        (["m", "--speculative-config", "{}"], "--speculative-config: cannot fill"),
        (["m", "--async-scheduling"], "--async-scheduling: cannot fill"),
        (["m", "--enable-lora"], "--enable-lora: not tried"),
        (["m", "--tensor-parallel-size=2"], "--tensor-parallel-size: not tried; give 1"),
        (["m", "--scheduler-cls", "X"], "--scheduler-cls: this command sets it"),
        (["m", "--engine-python", "/none"], "--engine-python: '/none' is no program"),
        (["m", "--run"], "--run: no 'vllm' on the PATH"),
    ],
)
def test_the_command_refuses_in_one_line(words, message, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError) as refused:
        command(*words, monkeypatch=monkeypatch)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_the_benchmark_runs_up_to_the_engine(tmp_path, monkeypatch, capsys):
    script = load_script("benchmarks/vllm_fill.py")
    for words, message in (
        (["--engine-python", "nowhere"], "--engine-python: 'nowhere' is no program"),
        (["--only", "speeed"], "--only: 'speeed' is unknown; give some of outputs,corners"),
    ):
        monkeypatch.setattr(sys, "argv", ["vllm_fill.py", *words, "--out", str(tmp_path)])
        with pytest.raises(ValueError, match=message):
            script.main()


def test_harmless_values_pass(monkeypatch, capsys):
    command("m", "--tensor-parallel-size", "1", monkeypatch=monkeypatch)
    command("m", "--enable-lora", "--untested", monkeypatch=monkeypatch)
    assert capsys.readouterr().out.count("vllm serve m") == 2


# -- stale steps ----------------------------------------------------------------------------


def test_steps_behind_a_wrong_guess_are_stale_until_its_place_is_corrected():
    steps = ranks.StaleSteps()
    assert not steps.is_stale("a", 0, [5, 6], [5, 6])  # the prompt; 7 is sampled
    assert steps.is_stale("a", 2, [8], [7])
    assert steps.is_stale("a", 3, [9], [])
    assert not steps.is_stale("b", 3, [9], [])
    assert not steps.is_stale("a", 2, [7], [7])
    assert not steps.is_stale("a", 3, [1], [1])
    assert steps.is_stale("a", 4, [1], [2])
    steps.forget("a")
    assert not steps.is_stale("a", 5, [1], [])


def test_the_end_of_an_output_is_reached_in_flight():
    """The load above contains every way to end."""
    ends = Counter()
    for seed in range(60):
        engine = Engine(3, rate=0.9)
        for name, output in random_load(engine, seed, aborts=False).items():
            limit = len(engine.draft.outputs[name]) == 60
            ends["eos" if output[-1] == EOS else "limit" if limit else "max_tokens"] += 1
        assert isinstance(engine.draft, Guesser)
    assert min(ends["eos"], ends["max_tokens"]) > 10, ends
