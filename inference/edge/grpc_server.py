"""Target as a gRPC server, with one session per stream and shared forward passes.

One thread computes. Everything else runs on the event loop. When a pass ends, all sessions with
rows to compute share the next pass, so no session waits for a batch to fill.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch

from ...models.target import KeepRows, Segment
from ...models.transformer.fingerprint import vocabulary_hash, weights_hash
from ..server_options import address_of, find_token
from . import SessionLimits, wire
from . import session_messages as messages
from .session_messages import REQUESTS
from .session_table import HeldSession, MessageRate, SessionTable
from .target_session import (
    SessionRefused,
    SharedTarget,
    TargetSession,
    run_together,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SWEEP_S = 0.25


class Server:
    """Server for one target. It serves from ``start`` to ``stop``."""

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        name: str,
        tokenizer: "PreTrainedTokenizerBase",
        limits: SessionLimits,
        tls: tuple[bytes, bytes] | None = None,
        tokens: Sequence[str] = (),
    ) -> None:
        """
        Args:
            tls: private key and certificate chain (PEM), or None for connections in plain text.
            tokens: access tokens. Every client must send one of them, unless there are none.
        """
        self._grpc = wire.import_grpc()
        self.target, self.limits, self.name = SharedTarget(model), limits, name
        self.tls, self.tokens = tls, tokens
        forward_s, row_s, row_bytes = measure(self.target)
        self.table = SessionTable(self.target, limits, row_bytes)
        self._about = messages.Description(
            protocol=messages.PROTOCOL,
            target=name,
            fingerprint=self.target.fingerprint,
            anchor=self.target.anchor,
            # A part of each weight shows any fine-tuning; hashing all would delay the start.
            weights=weights_hash([weight.reshape(-1)[:4096] for weight in model.parameters()]),
            tokenizer=vocabulary_hash(tokenizer),
            vocab_size=model.config.get_text_config().vocab_size,
            max_prompt_tokens=limits.max_prompt_tokens,
            max_new_tokens=limits.max_new_tokens,
            forward_s=forward_s,
            row_s=row_s,
            sessions=0,
            cache_bytes=0,
            is_serving=True,
        )
        self.num_passes = self.num_session_passes = 0
        """Number of target passes, and the sum over passes of the sessions in each pass."""
        self._due = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="target")
        self._tasks: list[asyncio.Task] = []

    # -- life -------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> int:
        """Listen for clients, and return the port. If ``port`` is 0, choose a free one.

        Raises:
            ValueError: the port is unavailable, or the certificate is unusable.
        """
        grpc = self._grpc
        message_bytes = self.limits.max_message_kb * 2**10
        # More streams than sessions: Describe and refused calls need streams, too.
        options = wire.server_options(message_bytes, 2 * self.limits.max_sequences + 16)
        self._server = grpc.aio.server(options=options)
        methods = {
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
        }
        handlers = grpc.method_handlers_generic_handler(wire.SERVICE, methods)
        self._server.add_generic_rpc_handlers((handlers,))
        address = address_of(host, port)
        try:
            if self.tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials([self.tls])
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ValueError(
                f"--port: {address} cannot be listened on (in use, no such address, or a damaged "
                "certificate); give another --host or --port, or 0 for any free port"
            ) from error
        await self._server.start()
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._sweep())]
        return self.port

    async def wait(self, ended: asyncio.Event) -> None:
        """Wait until ``ended`` is set, or raise the error that stopped the forward passes."""
        waiting = asyncio.create_task(ended.wait())
        done, _ = await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in done - {waiting}:
            # These tasks never end by themselves: this raises their error.
            task.result()

    async def stop(self, grace_s: float, hurry: asyncio.Event) -> int:
        """Accept no new sessions, let open ones finish for ``grace_s`` seconds, then stop.

        If ``hurry`` is set, stop at once. Return the number of sessions cut off.
        """
        self.table.is_draining = True
        until_s = time.monotonic() + grace_s
        # Without forward passes no session can finish: do not wait for one.
        while self.table.held and not hurry.is_set() and time.monotonic() < until_s:
            if any(task.done() for task in self._tasks):
                break
            await asyncio.sleep(0.02)
        num_cut = len(self.table.held)
        for session in self.table.held.values():
            # UNAVAILABLE makes an edge try again, here or at a successor.
            text = "server: shut down; open a new session with the output so far"
            session.finish(SessionRefused(text, "UNAVAILABLE"))
        await self._server.stop(1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A pass under way cannot be cancelled.
        self._thread.shutdown(wait=True)
        return num_cut

    # -- computing --------------------------------------------------------------------------

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Before looking for work: a later request sets it again.
            self._due.clear()
            batch = self._next_batch()
            if not batch:
                await self._due.wait()
                continue
            cores = [session.core for session in batch]
            failures = await loop.run_in_executor(self._thread, run_batch, cores)
            self.num_passes += 1
            self.num_session_passes += len(batch)
            for session in batch:
                # The edge was not silent during its pass; ``_next_batch`` now takes others first.
                session.seen_s = time.monotonic()
                # Before ``finish`` ends the prefill.
                session.num_passes += not session.core.wants_prefill
                if session.core in failures:
                    self._end_failed(session, failures[session.core])
                    continue
                with self._ending_alone(session):
                    self._send(session, session.core.finish(time.monotonic()))

    @contextmanager
    def _ending_alone(self, session: HeldSession) -> Iterator[None]:
        """If the ``with`` block raises an exception, end only this session."""
        try:
            yield
        except SessionRefused as refusal:
            self.table.drop(session)
            session.finish(refusal)
        except Exception as error:
            self._end_failed(session, describe_failure(error))

    def _end_failed(self, session: HeldSession, what: str) -> None:
        # Details go to the log alone: they may show paths or other clients' data.
        log.error("session ended: %s", what)
        self.table.drop(session)
        text = "session: the server failed to compute it; its log says why"
        session.finish(SessionRefused(text, "INTERNAL"))

    def _next_batch(self) -> list[HeldSession]:
        """Start passes for all sessions with rows and one with a prompt. Return these sessions.

        Starting one prompt at a time limits the delay that new sessions cause to the others.
        """
        batch, has_prompt = [], False
        # Longest waiting first.
        for session in sorted(self.table.held.values(), key=lambda held: held.seen_s):
            is_prompt = session.core.wants_prefill
            if is_prompt and has_prompt:
                continue
            with self._ending_alone(session):
                if session.core.start(time.monotonic()):
                    batch.append(session)
                    has_prompt |= is_prompt
        return batch

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.table.expire(time.monotonic())

    def _send(self, session: HeldSession, replies: list[messages.Reply]) -> None:
        session.put(replies)
        if session.core.is_closed:
            self.table.drop(session)
            session.finish(SessionRefused("", "OK"))

    # -- calls ------------------------------------------------------------------------------

    async def _describe(self, request: bytes, context: wire.Untyped) -> bytes:
        await self._authenticate(context)
        return msgspec.msgpack.encode(
            msgspec.structs.replace(
                self._about,
                sessions=len(self.table.held),
                cache_bytes=self.table.cache_bytes,
                is_serving=not self.table.is_draining,
            )
        )

    async def _session(
        self, requests: AsyncIterator[bytes], context: wire.Untyped
    ) -> AsyncIterator[bytes]:
        await self._authenticate(context)
        try:
            session = await self._open(requests)
        except SessionRefused as refusal:
            await self._refuse(context, refusal)
        reading = asyncio.create_task(self._read(requests, session))
        try:
            async for reply in session.replies():
                yield reply
        finally:
            # Also if the edge vanished: its memory must be free at once.
            reading.cancel()
            self.table.drop(session)
        assert session.end is not None
        if session.end.code != "OK":
            await self._refuse(context, session.end)
        context.set_trailing_metadata(((wire.NUM_PASSES, str(session.num_passes)),))

    async def _open(self, requests: AsyncIterator[bytes]) -> HeldSession:
        try:
            # A silent stream would occupy a place among the server's streams.
            async with asyncio.timeout(self.limits.idle_s):
                opening = REQUESTS.decode(await anext(requests))
        except (TimeoutError, StopAsyncIteration) as error:
            raise SessionRefused("session: nothing was opened", "DEADLINE_EXCEEDED") from error
        except ValueError as error:  # not a message
            raise SessionRefused(str(error)) from error
        if not isinstance(opening, messages.Open):
            raise SessionRefused("session: not open; send Open first")
        session = self.table.open(opening, time.monotonic())
        self._due.set()
        return session

    async def _read(self, requests: AsyncIterator[bytes], session: HeldSession) -> None:
        """Read requests until the stream ends. An error becomes the stream's status."""
        pace = MessageRate(self.limits.max_messages_s)
        try:
            async for data in requests:
                self._receive(session, REQUESTS.decode(data))
                # Bounds memory: an edge that reads no replies may not send either.
                await session.drained.wait()
                # Delayed, not refused: gRPC's flow control slows the edge down.
                await asyncio.sleep(pace.wait_s(time.monotonic()))
        except ValueError as error:  # not a message
            session.finish(SessionRefused(str(error)))
        except Exception as error:
            log.error("stream ended: %s", describe_failure(error))
            text = "stream: the server failed; its log says why"
            session.finish(SessionRefused(text, "INTERNAL"))
        else:
            # The edge has sent everything, as after a Close.
            session.finish(SessionRefused("", "OK"))

    def _receive(self, session: HeldSession, request: messages.Request) -> None:
        if session.number not in self.table.held:
            return  # expired or closed: its stream is about to end
        session.seen_s = now_s = time.monotonic()
        with self._ending_alone(session):
            self._send(session, session.core.receive(request, now_s))
        self._due.set()

    # -- refusals ---------------------------------------------------------------------------

    async def _authenticate(self, context: wire.Untyped) -> None:
        """Refuse a caller without a valid token, if the server has tokens."""
        if not self.tokens:
            return
        given = str(dict(context.invocation_metadata()).get("authorization", "")).encode()
        if find_token(given, self.tokens) is None:
            text = "token: missing or wrong; set PIPEDRAFT_TOKEN to the server's"
            await self._refuse(context, SessionRefused(text, "UNAUTHENTICATED"))

    async def _refuse(self, context: wire.Untyped, refusal: SessionRefused) -> NoReturn:
        await context.abort(self._grpc.StatusCode[refusal.code], str(refusal))
        raise AssertionError("abort ends the call")


@torch.inference_mode()
def measure(target: SharedTarget) -> tuple[float, float, int]:
    """Return seconds for a one-row pass, seconds per further row, and key-value bytes per token.

    The measured passes also load the kernels before the first client.
    """
    staged = target.staged()
    (stage,) = staged.stages
    staged.prefill(torch.zeros(8, dtype=torch.long))

    def pass_s(num_rows: int) -> float:
        started_s = time.perf_counter()
        segment = Segment(
            positions=torch.arange(8, 8 + num_rows),
            visible=torch.ones(num_rows, num_rows, dtype=torch.bool).tril(),
            ids=torch.zeros(num_rows, dtype=torch.long),
        )
        hidden_RH = stage.forward(segment).hidden
        assert hidden_RH is not None
        # Copy to the host, as for a result: before that, a GPU may still be computing.
        staged.logits(hidden_RH).cpu()
        stage.keep(KeepRows((), 0))
        return time.perf_counter() - started_s

    # Warm up; then take minima, since other processes only add time.
    pass_s(1)
    one_s, nine_s = (min(pass_s(num_rows) for _ in range(3)) for num_rows in (1, 9))
    # Noise can make nine rows faster than one.
    return one_s, max(0.0, nine_s - one_s) / 8, stage.cache.num_bytes // stage.cache.capacity


def describe_failure(error: Exception) -> str:
    """Return one line for the operator with the error and its place in the code."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


def run_batch(sessions: Sequence[TargetSession]) -> dict[TargetSession, str]:
    """Run the sessions' passes together. After a failure, run the remaining passes one by one.

    Return the sessions that failed alone, with reasons. If any did, the target also computes a row
    outside the sessions. If that fails, no session is at fault, and the error is raised.
    """
    try:
        # One bad row must not end all sessions in its pass.
        run_together(sessions)
        return {}
    except Exception:
        failures: dict[TargetSession, str] = {}
    for session in sessions:
        if session.is_computed:
            continue
        try:
            session.run()
        except Exception as error:
            # Keep the line alone: the traceback would keep the pass's tensors alive.
            failures[session] = describe_failure(error)
    if failures:
        sessions[0].target.staged().prefill(torch.zeros(1, dtype=torch.long))
    return failures
