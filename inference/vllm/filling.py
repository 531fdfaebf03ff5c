"""Schedule draft tokens of a request before earlier ones are verified. Does not import vllm.

vLLM makes a request runnable again when a token of it is known but not yet scheduled. So a guess is
appended to the request as if it were an output token, and the parent class schedules it as ordinary
decoding. When a step's output arrives, the guesses are taken off again. The parent handles the
sampled token, which is the target's own, and the guesses behind it are put back if the sampled
token equals the first guess. Otherwise the request restarts at the sampled token, in a new epoch,
and outputs of steps from older epochs are dropped.

A guess only takes a step that would be empty otherwise. Key-value entries of rejected guesses lie
behind the accepted tokens. Every rank runs the steps in order, so the right tokens overwrite them.
"""

import logging
from collections.abc import Sequence
from typing import Any

from .drafts import Draft, HeadDraft, make_draft
from .flight import Counts, EngineRequest, Flight, Sent
from .gate import check_config, plain_reason, read_settings
from .trace import Trace

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows loggers below its own


class FillingScheduler:
    """Mixin for vLLM's synchronous ``Scheduler``. ``FillScheduler`` puts it in front."""

    requests: dict[str, Any]
    running: list[Any]
    waiting: Sequence[Any]
    kv_holding_waiting: Sequence[Any]
    max_num_active_reqs: int
    max_model_len: int
    kv_cache_manager: Any

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            ValueError: a setting cannot work, or was not tried, with guesses in flight.
        """
        settings = read_settings(vllm_config)
        check_config(vllm_config, kv_cache_config, untested=settings.untested)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)  # type: ignore[call-arg]
        self._num_stages = vllm_config.parallel_config.pipeline_parallel_size
        self._flights: dict[str, Flight] = {}
        self._steps: dict[int, tuple[object, dict[str, Sent]]] = {}
        """id of a step's SchedulerOutput -> the output, which keeps its id, and the parts."""
        self._plain_reasons: set[str] = set()
        self.counts = Counts()
        vocab_size = vllm_config.model_config.get_vocab_size()
        self._draft: Draft = make_draft(settings.draft, vocab_size=vocab_size)
        self._trace = Trace(settings.trace)
        self._cap_cached_blocks()

    def _cap_cached_blocks(self) -> None:
        """Let the prefix cache hash verified tokens only."""
        coordinator = self.kv_cache_manager.coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_verified(request: EngineRequest, num_computed_tokens: int) -> None:
            num_cached = min(num_computed_tokens, self._num_verified(request))
            self._flight(request).num_cached = num_cached
            cache_blocks(request, num_cached)

        coordinator.cache_blocks = cache_verified

    # -- guesses ------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        guessed = self._append_guesses()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for request in guessed:
            if request.request_id not in output.num_scheduled_tokens:
                self._take_back(request, 1)
        for name in output.finished_req_ids:
            self._flights.pop(name, None)
            self._draft.forget(name)
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            self._flight(self.requests[name]).epoch += 1  # it computes its tokens again
        names = {request.request_id for request in guessed}
        parts = {name: self._sent(name, n, name in names) for name, n in self._scheduled(output)}
        self._steps[id(output)] = output, parts
        # More requests than stages leave no step free.
        output.pipedraft_drafts = len(self.requests) <= self._num_stages
        self.counts.steps += bool(parts)
        self.counts.guesses += sum(part.is_guess for part in parts.values())
        return output

    def _scheduled(self, output: Any) -> list[tuple[str, int]]:
        return list(output.num_scheduled_tokens.items())

    def _sent(self, name: str, num_tokens: int, is_guess: bool) -> Sent:
        request = self.requests[name]
        end = request.num_computed_tokens  # the parent has advanced it
        return Sent(
            request=request,
            epoch=self._flight(request).epoch,
            start=end - num_tokens,
            tokens=tuple(request._all_token_ids[end - num_tokens : end]),
            is_guess=is_guess,
        )

    def _flight(self, request: EngineRequest) -> Flight:
        flight = self._flights.get(request.request_id)
        if flight is None:
            reason = plain_reason(request)
            if reason and reason not in self._plain_reasons:
                self._plain_reasons.add(reason)
                logger.warning("pipedraft: a request with %s is decoded without guesses", reason)
            flight = self._flights[request.request_id] = Flight(is_plain=bool(reason))
        return flight

    def _append_guesses(self) -> list[EngineRequest]:
        """Append a guess to each request that waits for its own output, if the step is free."""
        if self._is_step_needed():
            return []
        found = [request for request in self.running if self._may_guess(request)]
        manager = self.kv_cache_manager
        num_groups = len(manager.coordinator.single_type_managers)
        if manager.block_pool.get_num_free_blocks() < len(found) * num_groups:
            return []  # a guess must not preempt anything
        guessed = []
        for request in found:
            flight = self._flight(request)
            text = request._all_token_ids[: self._num_verified(request)]
            guess = self._draft.guess(request.request_id, text, flight.guesses)
            if guess is not None:
                self._put(request, [guess])
                guessed.append(request)
        return guessed

    def _is_step_needed(self) -> bool:
        """Return True if a request has a known token to compute, or could start."""
        if any(r.num_tokens_with_spec > r.num_computed_tokens for r in self.running):
            return True
        could_start = bool(self.waiting) or bool(self.kv_holding_waiting)
        return could_start and len(self.running) < self.max_num_active_reqs

    def _may_guess(self, request: EngineRequest) -> bool:
        return (
            not self._flight(request).is_plain
            and not request.num_stale_output_tokens
            # The token behind the guess must be allowed: the step samples it.
            and request.num_output_tokens + 2 <= request.max_tokens
            and request.num_tokens + 2 <= self.max_model_len
        )

    def _put(self, request: EngineRequest, guesses: Sequence[int]) -> None:
        """Append guesses, without the parent's ``append``, which would hash them."""
        request._output_token_ids.extend(guesses)
        request._all_token_ids.extend(guesses)
        self._flight(request).guesses.extend(guesses)

    def _take_back(self, request: EngineRequest, count: int) -> list[int]:
        """Remove the last ``count`` guesses from the request, and return them."""
        if not count:
            return []
        taken = self._flight(request).guesses[-count:]
        for tokens in (
            request._output_token_ids,
            request._all_token_ids,
            self._flight(request).guesses,
        ):
            del tokens[-count:]
        return taken

    # -- verification -------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        _, parts = self._steps.pop(id(scheduler_output))
        if parts and isinstance(self._draft, HeadDraft):
            self._draft.receive(model_runner_output.pipedraft_chains)
        behind: list[tuple[EngineRequest, list[int]]] = []
        for name, num_tokens in self._scheduled(scheduler_output):
            sent, request = parts[name], self.requests.get(name)
            if request is not sent.request:  # finished in flight
                if request is not None:  # its name was given to another
                    del scheduler_output.num_scheduled_tokens[name]
                continue
            if request.is_finished():
                continue
            token = self._sampled(name, model_runner_output)
            is_stale = sent.epoch != self._flight(request).epoch
            cached = self._flight(request).num_cached
            self._trace.add(name, sent, accepted=not is_stale, following=token, cached=cached)
            if is_stale:
                self._drop(request, num_tokens)
                del scheduler_output.num_scheduled_tokens[name]
            elif token is not None or sent.end >= self._num_verified(request):
                behind.append((request, self._verify(request, sent, token)))
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for request, guesses in behind:
            if guesses and not request.is_finished():
                self._put(request, guesses)
        if not self.requests:
            self._report()
        return outputs

    def _sampled(self, name: str, model_runner_output: Any) -> int | None:
        """Return a step's sampled token, or None if the step does not end at a last token."""
        if not model_runner_output.sampled_token_ids:
            return None
        index = model_runner_output.req_id_to_index[name]
        tokens = model_runner_output.sampled_token_ids[index]
        assert len(tokens) <= 1, "speculative_config is refused"
        return tokens[0] if tokens else None

    def _drop(self, request: EngineRequest, num_tokens: int) -> None:
        """Count a step as processed, as the parent does, without using its output."""
        self.counts.stale += 1
        request.num_in_flight_tokens -= num_tokens
        if request.num_stale_output_tokens:  # preempted in flight
            request.num_stale_output_tokens -= num_tokens

    def _num_verified(self, request: EngineRequest) -> int:
        return request.num_tokens - len(self._flight(request).guesses)

    def _verify(self, request: EngineRequest, sent: Sent, token: int | None) -> list[int]:
        """Take all guesses off a request, and return those that its sampled token confirms.

        Raises:
            RuntimeError: the sampled token is not for the request's next position, or missing.
        """
        guesses = self._take_back(request, len(self._flight(request).guesses))
        if token is None or sent.end != request.num_tokens:
            raise RuntimeError(
                f"pipedraft: request {request.request_id!r} got token {token} for position "
                f"{sent.end} but has {request.num_tokens} tokens; a fault of inference/vllm"
            )
        if not guesses:
            return []
        if guesses[0] == token:
            self.counts.hits += 1
            return guesses[1:]
        self.counts.misses += 1
        self._restart(request)
        return []

    def _restart(self, request: EngineRequest) -> None:
        """Let the request continue behind its verified tokens, and outdate steps in flight."""
        self._flight(request).epoch += 1
        # 0 if it was preempted.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)

    def _preempt_request(
        self, request: EngineRequest, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)  # type: ignore[misc]
        if request.drop_stale_output:  # nothing in flight is delivered, so nothing verifies guesses
            self._take_back(request, len(self._flight(request).guesses))
            self._flight(request).epoch += 1

    def _report(self) -> None:
        counts, self.counts = self.counts, Counts()
        if counts.guesses:
            logger.info("pipedraft: %s", counts)

    def shutdown(self) -> None:
        self._trace.close()
        super().shutdown()  # type: ignore[misc]
