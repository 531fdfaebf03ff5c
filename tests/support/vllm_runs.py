"""Run the filling scheduler and runners over the stand-in for vLLM, in one process."""

import random
from collections import deque
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm_parent import (
    EOS,
    VOCAB,
    Params,
    StandInRequest,
    StandInRunner,
    StandInScheduler,
    next_token,
)

from pipedraft.inference.vllm import gate
from pipedraft.inference.vllm.filling import FillingScheduler
from pipedraft.inference.vllm.gate import WORKER
from pipedraft.inference.vllm.ranks import fill

MAX_LENGTH = 60


class Scheduler(FillingScheduler, StandInScheduler):
    pass


def expected(prompt, params):
    """The output by definition, one token at a time."""
    generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
    tokens, output = [*prompt], []
    while not output or not (
        output[-1] == EOS or len(output) >= params.max_tokens or len(tokens) >= MAX_LENGTH
    ):
        noise = 0.0 if generator is None else float(torch.rand(1, generator=generator))
        banned = [EOS] if len(output) < params.min_tokens else []
        history = output if params.penalty else ()
        output.append(next_token(tokens, history, noise, banned=banned))
        tokens.append(output[-1])
    return output


class Guesser:
    """Right with probability ``rate``, silent with probability ``silence``. Knows the outputs."""

    def __init__(self, rate, silence=0.0):
        self.rate, self.silence, self.outputs, self.random = rate, silence, {}, random.Random(0)

    def guess(self, name, text, path):
        assert text == self.outputs[name][: len(text)], "unverified tokens were taken for text"
        if self.random.random() < self.silence:
            return None
        place = len(text) + len(path)
        right = self.outputs[name][place] if place < len(self.outputs[name]) else 1
        return right if self.random.random() < self.rate else (right + 1) % VOCAB

    def forget(self, name):
        pass


def vllm_config(**changes):
    """A VllmConfig that passes the gate, with attributes changed by dotted names."""
    space = SimpleNamespace
    config = space(
        additional_config={"pipedraft": {"untested": True}},
        parallel_config=space(
            pipeline_parallel_size=2,
            tensor_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            distributed_executor_backend="mp",
            enable_eplb=False,
            worker_cls=WORKER,
        ),
        scheduler_config=space(async_scheduling=False),
        model_config=space(
            max_model_len=MAX_LENGTH,
            is_hybrid=False,
            is_encoder_decoder=False,
            is_diffusion=False,
            is_multimodal_model=False,
            runner_type="generate",
            logits_processors=None,
            enable_prompt_embeds=False,
            get_vocab_size=lambda: VOCAB,
        ),
        device_config=space(device_type="cpu"),
        use_v2_model_runner=False,
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        reasoning_config=None,
    )
    for name, value in changes.items():
        *path, last = name.split(".")
        place = config
        for part in path:
            place = getattr(place, part)
        assert hasattr(place, last), name
        setattr(place, last, value)
    return config


class Engine:
    """vLLM's ``step_with_batch_queue`` over ``num_ranks`` stages."""

    def __init__(
        self,
        num_ranks=2,
        *,
        rate=0.7,
        silence=0.0,
        token_budget=32,
        num_blocks=64,
        max_requests=4,
        has_prefix_cache=True,
        trace=None,
        scheduler=Scheduler,
        has_filling_ranks=True,
    ):
        place = SimpleNamespace(
            token_budget=token_budget,
            num_blocks=num_blocks,
            max_requests=max_requests,
            has_prefix_cache=has_prefix_cache,
        )
        cache = SimpleNamespace(has_mamba_layers=False, kv_cache_groups=[], place=place)
        settings = {"untested": True, "trace": trace}
        config = vllm_config(additional_config={"pipedraft": settings})
        with patch.object(gate, "installed_version", lambda: gate.TESTED):
            self.scheduler = scheduler(config, cache)
        self.runners = [StandInRunner(rank, num_ranks, MAX_LENGTH + 1) for rank in range(num_ranks)]
        for runner in self.runners if has_filling_ranks else ():
            fill(runner, f"{trace}.rank0" if trace and not runner.rank else None)
            runner.is_last_rank = lambda is_last=runner.is_last: is_last
        self.draft = self.scheduler._draft = Guesser(rate, silence)
        self.queue, self.num_steps, self.num_slots = deque(), 0, 0
        self.expected = {}

    def add(self, name, prompt, **params):
        request = StandInRequest(name, [*prompt], Params(**params))
        self.expected[name] = expected(prompt, request.params)
        self.draft.outputs[name] = [*prompt, *self.expected[name]]
        self.scheduler.add_request(request)
        return request

    def step(self):
        """Schedule a step, and process the oldest one if the pipeline is full."""
        self.num_slots += 1
        scheduled = self.scheduler.schedule()
        self.num_steps += bool(scheduled.num_scheduled_tokens)
        passed = None
        for runner in self.runners:
            passed = runner.execute_model(deepcopy(scheduled), passed)  # each rank gets its own
        self.queue.append((scheduled, passed))
        if len(self.queue) == len(self.runners):
            self.scheduler.update_from_output(*self.queue.popleft())

    def run(self, limit=4000):
        while self.scheduler.requests or any(s.num_scheduled_tokens for s, _ in self.queue):
            self.step()
            limit -= 1
            assert limit, "the engine hangs"
        return self.scheduler.outputs

    def wrong(self):
        """Names of requests whose output is not the expected one, and hashes of no text."""
        outputs = self.scheduler.outputs.items()
        texts = self.draft.outputs.values()
        hashed = self.scheduler.kv_cache_manager.block_of
        bad = [key for key in hashed if not any(text[: len(key)] == [*key] for text in texts)]
        return [name for name, output in outputs if output != self.expected[name]] + bad

    def close(self):
        """Close the trace's files."""
        for trace in (self.scheduler._trace, *(runner.trace for runner in self.runners)):
            trace.close()


PLACES = {
    "roomy": {},
    "chunks": {"token_budget": 3},
    "few blocks": {"num_blocks": 15, "token_budget": 8},
    "few blocks, no prefix cache": {"num_blocks": 15, "has_prefix_cache": False},
    "one at a time": {"max_requests": 1},
}


def random_load(engine, seed, *, num_requests=5, aborts=True):
    """Add requests while the engine runs, abort and preempt some, and empty the prefix cache.

    Emptying it drops samples, in vLLM, too. So a load with seeds leaves it.
    """
    draw = random.Random(seed)
    has_seeds = draw.random() < 0.5
    shared = [draw.randrange(1, VOCAB) for _ in range(9)]
    for index in range(num_requests):
        own = [draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 9))]
        request = engine.add(
            f"r{index}",
            [*(shared if draw.random() < 0.5 else []), *own],
            max_tokens=draw.randint(1, 40),
            min_tokens=draw.choice([0, 9, 30]),
            seed=index if has_seeds else None,
            penalty=draw.random() < 0.5,
        )
        for _ in range(draw.randint(0, 6)):
            engine.step()
        if aborts and draw.random() < 0.15 and not request.is_finished():
            engine.scheduler.finish(request, "aborted")
            done = engine.scheduler.outputs[request.request_id]
            engine.expected[request.request_id] = engine.expected[request.request_id][: len(done)]
        running = engine.scheduler.running
        if draw.random() < 0.2 and running:  # as a request with a higher priority does
            engine.scheduler._preempt_request(running.pop(draw.randrange(len(running))), 0.0)
        if draw.random() < 0.1 and not has_seeds:
            engine.scheduler.reset_prefix_cache()
    return engine.run()
