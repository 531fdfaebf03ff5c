"""Stand-in for the parts of vLLM 0.32.0 that ``pipedraft.inference.vllm`` extends, in pure Python.

The scheduler and the model runner keep vLLM's order of events and its names: chunked prefill,
blocks, prefix cache, preemption, stop checks, stale output, ranks that only append, a last rank
that keeps the history of its samples. The model is a function of the tokens in a rank's cache,
which holds blocks. So a step with a wrong token, slot or position changes the output.
"""

import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

VOCAB, EOS, BLOCK = 12, 0, 4
NOTHING = SimpleNamespace(req_id_to_index={}, sampled_token_ids=[])


def next_token(tokens, history, noise, *, banned=()):
    """The model: a token drawn by hash from everything that may influence it."""
    draw = random.Random(repr((list(tokens), sorted(history), noise)))
    return draw.choice([token for token in range(VOCAB) if token not in banned])


@dataclass(eq=False)
class Params:
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int | None = None
    penalty: bool = False
    """The model sees the output's tokens, as penalties do."""


@dataclass(eq=False)
class StandInRequest:
    request_id: str
    prompt_token_ids: list[int]
    params: Params
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_stale_output_tokens: int = 0
    num_output_placeholders: int = 0
    drop_stale_output: bool = False
    is_prefill_chunk: bool = False
    status: str = "waiting"
    spec_token_ids: tuple[int, ...] = ()
    structured_output_request: Any = None
    lora_request: Any = None
    pooling_params: Any = None
    prompt_embeds: Any = None
    mm_features: tuple[Any, ...] = ()
    resumable: bool = False
    kv_transfer_params: Any = None
    num_preemptions: int = 0
    block_hashes: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self):
        self._output_token_ids, self._all_token_ids = [], [*self.prompt_token_ids]
        self.sampling_params = SimpleNamespace(thinking_token_budget=None)
        self.max_tokens = self.params.max_tokens
        self.update_block_hashes()

    def append_output_token_ids(self, token):
        self._output_token_ids.append(token)
        self._all_token_ids.append(token)
        self.update_block_hashes()

    def update_block_hashes(self):
        for end in range((len(self.block_hashes) + 1) * BLOCK, self.num_tokens + 1, BLOCK):
            self.block_hashes.append(tuple(self._all_token_ids[:end]))

    @property
    def num_tokens(self):
        return len(self._all_token_ids)

    @property
    def num_tokens_with_spec(self):
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def num_output_tokens(self):
        return len(self._output_token_ids)

    def is_finished(self):
        return self.status in ("stopped", "length", "aborted")


class Blocks:
    """The cache's blocks: free ones keep their hash until they are used again."""

    def __init__(self, num_blocks, has_prefix_cache):
        self.free = OrderedDict.fromkeys(range(num_blocks))
        self.has_prefix_cache = has_prefix_cache
        self.held, self.refs = {}, {}
        self.hash_of, self.block_of = {}, {}
        self.coordinator = self.block_pool = self
        self.single_type_managers = [None]

    def get_num_free_blocks(self):
        return len(self.free)

    def cache_blocks(self, request, num_computed_tokens):
        for index in range(num_computed_tokens // BLOCK) if self.has_prefix_cache else ():
            block, key = self.held[request.request_id][index], request.block_hashes[index]
            if block not in self.hash_of and key not in self.block_of:
                self.hash_of[block], self.block_of[key] = key, block

    def hit(self, request):
        found = []
        for key in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if key not in self.block_of or not self.has_prefix_cache:
                break
            found.append(self.block_of[key])
        return found

    def allocate(self, request, num_new, hit=()):
        """Return the new blocks, or None if there are too few."""
        held = self.held.get(request.request_id, list(hit))
        missing = -(-(request.num_computed_tokens + num_new) // BLOCK) - len(held)
        if missing > len(self.free.keys() - set(hit)):
            return None
        for block in hit:
            self.free.pop(block, None)
            self.refs[block] = self.refs.get(block, 0) + 1
        new = []
        for _ in range(missing):
            block, _ = self.free.popitem(last=False)
            self.block_of.pop(self.hash_of.pop(block, None), None)
            self.refs[block] = 1
            new.append(block)
        self.held[request.request_id] = [*held, *new]
        known = min(request.num_computed_tokens + num_new, request.num_tokens)
        self.coordinator.cache_blocks(request, known)
        return new

    def release(self, request):
        for block in reversed(self.held.pop(request.request_id, [])):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None


class StandInScheduler:
    """``vllm.v1.core.sched.scheduler.Scheduler``, synchronous, for a pipeline."""

    def __init__(self, vllm_config, kv_cache_config, *args, **kwargs):
        place = kv_cache_config.place
        self.max_model_len = vllm_config.model_config.max_model_len
        self.token_budget, self.max_num_active_reqs = place.token_budget, place.max_requests
        self.kv_cache_manager = Blocks(place.num_blocks, place.has_prefix_cache)
        self.requests, self.running, self.waiting = {}, [], deque()
        self.kv_holding_waiting = ()
        self.finished_req_ids, self.outputs, self.preempted_for = set(), {}, []

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.waiting.append(request)

    def schedule(self, throttle_prefills=False):
        budget, new, resumed, ran, blocks = self.token_budget, [], [], [], {}
        scheduled = {}
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            num_new = min(request.num_tokens_with_spec - request.num_computed_tokens, budget)
            num_new = min(num_new, self.max_model_len - request.num_computed_tokens - 1)
            index += 1
            if not num_new:
                continue
            while (found := self.kv_cache_manager.allocate(request, num_new)) is None:
                preempted, victim = True, self.running.pop()
                self._preempt_request(victim, 0.0)
                self.preempted_for.append(request)
                if victim is request:
                    break
            if found is None:
                break
            scheduled[request.request_id], blocks[request.request_id] = num_new, found
            ran.append(request)
            budget -= num_new
        while self.waiting and not preempted and budget:
            request = self.waiting[0]
            if len(self.running) >= self.max_num_active_reqs:
                break
            if request.num_stale_output_tokens and not request.drop_stale_output:
                break
            hit = self.kv_cache_manager.hit(request)
            request.num_computed_tokens = len(hit) * BLOCK
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            if self.kv_cache_manager.allocate(request, num_new, hit) is None:
                request.num_computed_tokens = 0
                break
            self.running.append(self.waiting.popleft())
            (resumed if request.status == "preempted" else new).append(request)
            request.status = "running"
            scheduled[request.request_id] = num_new
            blocks[request.request_id] = self.kv_cache_manager.held[request.request_id]
            budget -= num_new
        cached = [*ran, *resumed]
        data = SimpleNamespace(
            req_ids=[r.request_id for r in cached],
            resumed_req_ids={r.request_id for r in resumed},
            new_token_ids=[
                r._all_token_ids[r.num_computed_tokens :][: scheduled[r.request_id]] for r in cached
            ],
            new_block_ids=[[*blocks[r.request_id]] for r in cached],
            num_computed_tokens=[r.num_computed_tokens for r in cached],
            num_output_tokens=[r.num_output_tokens for r in cached],
        )
        output = SimpleNamespace(
            scheduled_new_reqs=[
                (r.request_id, [*r.prompt_token_ids], [*blocks[r.request_id]], r.params)
                + (r.num_computed_tokens,)
                for r in new
            ],
            scheduled_cached_reqs=data,
            num_scheduled_tokens=scheduled,
            finished_req_ids=self.finished_req_ids,
        )
        self.finished_req_ids = set()
        for name, num in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += num
            request.num_in_flight_tokens += num
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        return output

    def _preempt_request(self, request, timestamp, drop_stale_output=False):
        self.kv_cache_manager.release(request)
        request.status, request.num_computed_tokens = "preempted", 0
        request.drop_stale_output = drop_stale_output or (
            request.drop_stale_output and request.num_stale_output_tokens > 0
        )
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def update_from_output(self, scheduler_output, model_runner_output):
        for name, num in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            is_stale = False
            if request is not None:
                request.num_in_flight_tokens -= num
                if request.num_stale_output_tokens:
                    is_stale = True
                    request.num_stale_output_tokens -= num
                    assert request.num_stale_output_tokens >= 0
            if request is None or (is_stale and request.drop_stale_output):
                continue
            row = model_runner_output.req_id_to_index[name]
            for token in model_runner_output.sampled_token_ids[row]:
                request.append_output_token_ids(token)
                self.outputs[name].append(token)
                self._check_stop(request, token)
        return {}

    def _check_stop(self, request, token):
        if token == EOS:
            assert request.num_output_tokens >= request.params.min_tokens
            self.finish(request, "stopped")
        elif (
            request.num_output_tokens >= request.max_tokens
            or request.num_tokens >= self.max_model_len
        ):
            self.finish(request, "length")

    def finish(self, request, status):
        """Stop a request, or abort it."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = status
        self.kv_cache_manager.release(request)
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]

    def reset_prefix_cache(self):
        """Preempt everything, drop outputs in flight, and forget cached blocks."""
        while self.running:
            self._preempt_request(self.running.pop(), 0.0, drop_stale_output=True)
        self.kv_cache_manager.hash_of.clear()
        self.kv_cache_manager.block_of.clear()

    def shutdown(self):
        pass


class Batch:
    """``InputBatch``: rows of the requests in a step."""

    def __init__(self, width):
        self.token_ids_cpu = torch.zeros(8, width, dtype=torch.int64)
        self.num_tokens_no_spec = [0] * 8
        self.req_id_to_index, self.generators, self.min_tokens = {}, {}, {}

    @property
    def req_ids(self):
        return sorted(self.req_id_to_index, key=self.req_id_to_index.__getitem__)

    def remove(self, name):
        row = self.req_id_to_index.pop(name, None)
        self.generators.pop(row, None)
        self.min_tokens.pop(row, None)

    def add(self, state):
        row = min(set(range(8)) - set(self.req_id_to_index.values()))
        self.req_id_to_index[state.name] = row
        tokens = [*state.prompt_token_ids, *state.output_token_ids]
        self.token_ids_cpu[row, : len(tokens)] = torch.tensor(tokens)
        self.num_tokens_no_spec[row] = len(tokens)
        if state.generator is not None:
            self.generators[row] = state.generator
        if len(state.output_token_ids) < state.params.min_tokens:
            self.min_tokens[row] = (state.params.min_tokens, state.output_token_ids)

    def condense(self):
        """Move rows into the gaps, as vLLM does."""
        names = self.req_ids
        for row, name in enumerate(names):
            was = self.req_id_to_index[name]
            if was != row:
                self.req_id_to_index[name] = row
                self.token_ids_cpu[row] = self.token_ids_cpu[was].clone()
                self.num_tokens_no_spec[row] = self.num_tokens_no_spec[was]
                for held in (self.generators, self.min_tokens):
                    if was in held:
                        held[row] = held.pop(was)
        # A minimum that was reached is forgotten for good.
        for row, (least, history) in [*self.min_tokens.items()]:
            if len(history) >= least:
                del self.min_tokens[row]


class StandInRunner:
    """``GPUModelRunner`` of one rank, version 1."""

    def __init__(self, rank, num_ranks, width):
        self.rank, self.is_last = rank, rank == num_ranks - 1
        self.requests, self.input_batch = {}, Batch(width)
        self.cache = {}
        """Slot -> token whose entry it holds."""
        self.intermediate_tensors, self.max_num_tokens = SimpleNamespace(tensors={}), 1
        self.discard_request_mask = SimpleNamespace(np=[False] * 8)

    def _update_states(self, scheduler_output):
        for name in scheduler_output.finished_req_ids:
            self.requests.pop(name, None)
            self.input_batch.remove(name)
        data = scheduler_output.scheduled_cached_reqs
        scheduled = scheduler_output.num_scheduled_tokens.keys() - data.resumed_req_ids
        for name in self.input_batch.req_id_to_index.keys() - scheduled:
            self.input_batch.remove(name)
        added = []
        for name, prompt, blocks, params, computed in scheduler_output.scheduled_new_reqs:
            generator = None
            if params.seed is not None:
                generator = torch.Generator().manual_seed(params.seed)
            self.requests[name] = state = SimpleNamespace(
                name=name, prompt_token_ids=prompt, output_token_ids=[], blocks=blocks
            )
            state.params, state.generator, state.num_computed_tokens = params, generator, computed
            added.append(state)
        for i, name in enumerate(data.req_ids):
            self._update_state(name, i, data, added)
        for state in added:
            self.input_batch.add(state)
        self.input_batch.condense()

    def _update_state(self, name, i, data, added):
        state, batch = self.requests[name], self.input_batch
        row = batch.req_id_to_index.get(name)
        computed, tokens = data.num_computed_tokens[i], data.new_token_ids[i]
        state.num_computed_tokens = computed
        if not self.is_last:
            known = len(state.prompt_token_ids) + len(state.output_token_ids)
            num_new = computed + len(tokens) - known
            state.output_token_ids += tokens[-num_new:] if num_new > 0 else []
        elif data.num_output_tokens[i] < len(state.output_token_ids):
            del state.output_token_ids[data.num_output_tokens[i] :]
            if row is not None:
                end = len(state.prompt_token_ids) + data.num_output_tokens[i]
                batch.num_tokens_no_spec[row] = end
        if name in data.resumed_req_ids:
            state.blocks = data.new_block_ids[i]
        else:
            state.blocks += data.new_block_ids[i]
        if row is None:
            added.append(state)
        elif not self.is_last:
            start = batch.num_tokens_no_spec[row]
            end = max(start, computed + len(tokens))
            if end > start:
                batch.token_ids_cpu[row, start:end] = torch.tensor(tokens[start - end :])
                batch.num_tokens_no_spec[row] = end

    def execute_model(self, scheduler_output, hidden=None):
        """Return the hidden states, or the samples on the last rank."""
        self._update_states(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return (
                SimpleNamespace(req_id_to_index={}, sampled_token_ids=[]) if self.is_last else None
            )
        passed, read = {}, []
        names = self.input_batch.req_ids
        for row, name in enumerate(names):
            state, num = self.requests[name], scheduler_output.num_scheduled_tokens[name]
            end = state.num_computed_tokens + num
            if hidden is None:
                ids = self.input_batch.token_ids_cpu[row, state.num_computed_tokens : end].tolist()
            else:
                ids = hidden.tensors[name].tolist()
            slots = [state.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(end)]
            self.cache.update(zip(slots[state.num_computed_tokens :], ids, strict=True))
            passed[name] = torch.tensor(ids)
            read.append(slots)
            known = len(state.prompt_token_ids) + len(state.output_token_ids)
            self.discard_request_mask.np[row] = end < known
        if not self.is_last:
            return SimpleNamespace(tensors=passed)
        # All rows have written by now: a request may share blocks with another of the same step.
        seen = [[self.cache[slot] for slot in slots] for slots in read]
        return SimpleNamespace(
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=self._bookkeeping_sync(self._sample(seen))[3],
        )

    def _sample(self, seen):
        sampled = []
        for row, name in enumerate(self.input_batch.req_ids):
            state, generator = self.requests[name], self.input_batch.generators.get(row)
            noise = 0.0 if generator is None else float(torch.rand(1, generator=generator))
            history = state.output_token_ids if state.params.penalty else ()
            banned = [EOS] if row in self.input_batch.min_tokens else []
            sampled.append([next_token(seen[row], history, noise, banned=banned)])
        return sampled

    def _bookkeeping_sync(self, sampled):
        for row, name in enumerate(self.input_batch.req_ids):
            if self.discard_request_mask.np[row]:
                assert row not in self.input_batch.generators, "a CPU generator has no offset"
                sampled[row] = []
            if sampled[row]:
                self.requests[name].output_token_ids += sampled[row]
                self.input_batch.num_tokens_no_spec[row] += 1
        return None, None, None, sampled
