"""The edge with a real cloud: it drives an ``EdgeSession`` over a stream, and carries the text on
where a session ends before it does.

A session that its server has forgotten is opened again with the text so far. Random numbers belong
to positions of the text, so a greedy text, and a sampled one by the rules ``match`` and ``gumbel``,
is the one that an unbroken session would have given.
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pipedraft.errors import Failure
from pipedraft.inference.channel import LinkEstimate, LinkState
from pipedraft.inference.edge_cloud import wire
from pipedraft.inference.edge_cloud.connection import Bytes, Connection, EdgeStream, SessionLost
from pipedraft.inference.edge_cloud.drafter import ChainDrafter
from pipedraft.inference.edge_cloud.edge import EdgeSession
from pipedraft.inference.edge_cloud.messages import Open
from pipedraft.inference.edge_cloud.methods import Method, Wishes
from pipedraft.inference.edge_cloud.plan import Beliefs, Draft, Finished, Send, Wait
from pipedraft.inference.result import DecodeResult

MAX_EMPTY_SESSIONS = 5
"""In a row that were lost before their first token."""
TRIAL_TOKENS = 32
"""After so many, and over as many, drafting is compared with what the cloud alone would take."""
TOLERANCE = 1.25
"""How much slower drafting may look: the estimate of the cloud leaves out its other sessions."""


@dataclass(frozen=True, kw_only=True)
class EdgeDraft:
    """A draft on this machine."""

    make: Callable[[], ChainDrafter]
    """For each text."""
    target: str = ""
    """Hash of the embedding, final norm and LM head that it was trained with; "": any."""
    anchor: str = ""
    """Hash of the target's last block that it holds; "": none."""

    def mismatch(self, about: wire.Description) -> str:
        """Why it does not belong to a server's target; "": it does."""
        pairs = {
            "embedding, final norm or LM head": (self.target, about.fingerprint),
            "last block": (self.anchor, about.anchor),
        }
        for name, (own, theirs) in pairs.items():
            if own not in ("", theirs):
                return (
                    f"the draft was trained with another {name} ({own[:12]}) than the server's "
                    f"{about.target} has ({theirs[:12]})"
                )
        return ""

    def measure(self, prompt_ids: list[int]) -> float:
        """Seconds of a draft token; the first one, which loads kernels, is left out."""
        drafter, times_s = self.make(), list[float]()
        drafter.begin(prompt_ids[-8:])
        for _ in range(4):
            started_s = time.perf_counter()
            drafter.add(int(drafter.draft_ids[drafter.logits().argmax()]))
            times_s.append(time.perf_counter() - started_s)
        return min(times_s[1:])


@dataclass(kw_only=True)
class EdgeOutcome:
    """A text and what it took."""

    result: DecodeResult
    """Times count from the call; ``num_steps`` are passes over the target, 0: not known."""
    bytes: Bytes
    fallback: str = ""
    """Why the cloud decoded alone, from the beginning or from some token on; "": it did not."""
    num_breaks: int = 0
    """Connections that ended too early."""
    num_reopened: int = 0
    """Sessions that the server had forgotten."""
    round_trip_s: float = 0.0
    """As last believed."""


@dataclass
class _Progress:
    """What the sessions so far have decoded."""

    result: DecodeResult
    knows_steps: bool = True
    fallback: str = ""
    num_reopened: int = 0

    def add(self, part: DecodeResult, num_passes: int | None) -> None:
        """A session's part; the first token of each comes from a prompt's pass."""
        whole = self.result
        is_first = not whole.token_ids
        whole.token_ids += part.token_ids
        whole.token_times_s += part.token_times_s
        whole.round_lengths += part.round_lengths
        unfinished = whole.num_tokens - sum(whole.round_lengths)
        if unfinished > 0:  # also the first token of a later session
            whole.round_lengths.append(unfinished)
        for name in ("position_tests", "position_accepts"):
            pairs = zip_longest(vars(whole)[name], vars(part)[name], fillvalue=0)
            vars(whole)[name][:] = [a + b for a, b in pairs]
        whole.num_drafted += part.num_drafted
        whole.num_draft_forwards += part.num_draft_forwards
        whole.stop_reason = part.stop_reason
        self.knows_steps &= num_passes is not None
        whole.num_steps += (num_passes or 0) + (not is_first)


@dataclass(kw_only=True)
class EdgeClient:
    """Decodes texts over one connection."""

    connection: Connection
    method: Method
    wishes: Wishes
    draft: EdgeDraft | None
    """None: only the method ``cloud`` can decode."""
    keeps_drafting: bool = False
    """Also where the cloud alone would be faster."""
    tokenizer: str = ""
    """Hash of the vocabulary, as the server's must be; "": not compared."""
    warn: Callable[[str], None] = field(default=lambda text: None)

    async def decode(
        self,
        prompt_ids: list[int],
        *,
        prompt_index: int = 0,
        on_token: Callable[[int], None] | None = None,
    ) -> EdgeOutcome:
        """
        Raises:
            ValueError: the server refuses, or is not the one for this tokenizer.
            Failure: it cannot be reached.
        """
        started_s = time.monotonic()
        progress = _Progress(DecodeResult(list(prompt_ids), [], "", "", num_stages=1))
        about, round_trip_s = await self.connection.describe()
        self._check(about)
        first_about, num_empty = about, 0
        with ThreadPoolExecutor(1, thread_name_prefix="draft") as drafting:
            while True:
                edge = self._open(about, round_trip_s, progress, prompt_index)
                run = _Run(self, edge, drafting, on_token)
                try:
                    num_passes = await run.run()
                except SessionLost as lost:
                    self.warn(f"{lost}: opening a new one")
                    progress.add(edge.text.result, None)
                    progress.num_reopened += 1
                    num_empty = 0 if edge.text.result.token_ids else num_empty + 1
                    if num_empty == MAX_EMPTY_SESSIONS:
                        raise Failure(
                            f"server: {num_empty} sessions ended before their first token ({lost})"
                        ) from lost
                    about, round_trip_s = await self.connection.describe()
                    if about.weights != first_about.weights:
                        raise ValueError(
                            f"server: it came back with another target than {first_about.target} "
                            "as it was; begin the text again"
                        ) from lost
                    continue
                finally:
                    progress.fallback = progress.fallback or edge.fallback
                progress.add(edge.text.result, num_passes)
                break
        result = progress.result
        result.token_times_s[:] = [when_s - started_s for when_s in result.token_times_s]
        result.prefill_s = result.token_times_s[0]
        result.num_steps *= progress.knows_steps
        return EdgeOutcome(
            result=result,
            bytes=self.connection.bytes,
            fallback=progress.fallback,
            num_breaks=self.connection.num_breaks,
            num_reopened=progress.num_reopened,
            round_trip_s=edge.beliefs.link.state.round_trip_s,
        )

    def _check(self, about: wire.Description) -> None:
        if self.tokenizer not in ("", about.tokenizer):
            raise ValueError(
                f"server: its target {about.target} has another tokenizer than this edge; give the "
                "draft, or --tokenizer, of that target"
            )

    def _open(
        self,
        about: wire.Description,
        round_trip_s: float,
        progress: _Progress,
        prompt_index: int,
    ) -> EdgeSession:
        """A session for what is still missing of the text."""
        result, draft = progress.result, self.draft if self.method.drafts_in else None
        text = result.prompt_ids + result.token_ids
        if self.method.drafts_in is not None and draft is None:
            raise ValueError("draft: none is given; give --checkpoint or --draft-model")
        if draft is not None and not progress.fallback:
            progress.fallback = draft.mismatch(about)
            if progress.fallback:
                self.warn(f"{progress.fallback}; the cloud decodes alone")
        if progress.fallback:
            draft = None
        draft_s = 0.0 if draft is None else draft.measure(text)
        beliefs = Beliefs(
            draft_s=draft_s,
            verify_s=about.forward_s,
            verify_row_s=about.row_s,
            # The bandwidth is not known: what it costs shows in the round trips.
            link=LinkEstimate(
                LinkState(
                    up_bytes_per_s=math.inf, down_bytes_per_s=math.inf, round_trip_s=round_trip_s
                )
            ),
        )
        left = self.wishes.max_new_tokens - len(result.token_ids)
        settings = replace(self.wishes, max_new_tokens=left).settings(self.method, prompt_index)
        opening = Open(
            session=1,
            prompt_ids=text,
            settings=settings,
            anchor="" if draft is None else draft.anchor,
            streams=draft is None,
        )
        if draft is None:
            return EdgeSession(opening, None, self.method.plan, None, beliefs)
        policy = self.wishes.policy_for(self.method, draft_s=draft_s, verify_s=about.forward_s)
        return EdgeSession(opening, draft.make(), self.method.plan, policy, beliefs)


class _Run:
    """One session over its stream."""

    def __init__(
        self,
        client: EdgeClient,
        edge: EdgeSession,
        drafting: ThreadPoolExecutor,
        on_token: Callable[[int], None] | None,
    ) -> None:
        self.client, self.edge, self.drafting, self.on_token = client, edge, drafting, on_token
        # A reply that comes while a token is being drafted is only put aside.
        self.stream = EdgeStream(
            client.connection, lambda reply: edge.receive(reply, time.monotonic())
        )
        self.num_told = 0

    async def run(self) -> int | None:
        """
        Returns:
            Passes over the target, if the server has said it.
        """
        edge, stream, loop = self.edge, self.stream, asyncio.get_running_loop()
        try:
            while True:
                action = edge.act(time.monotonic())
                self._tell()
                match action:
                    case Send(request=request):
                        await stream.send(request)
                    case Draft():
                        if not self._falls_back():
                            await loop.run_in_executor(self.drafting, edge.draft)
                            edge.drafted(time.monotonic())
                    case Wait(until_s=until_s):
                        await stream.wait(until_s)
                    case Finished():
                        return await stream.close()
                if not stream.is_up and not edge.text.has_ended:
                    await stream.mend()
        finally:
            await stream.hang_up()

    def _tell(self) -> None:
        result = self.edge.text.result
        for token in result.token_ids[self.num_told :]:
            if self.on_token is not None:
                self.on_token(token)
        self.num_told = len(result.token_ids)

    def _falls_back(self) -> bool:
        """Drafting is slower than the cloud alone, which sends a token a pass: no more of it."""
        edge, times_s = self.edge, self.edge.text.result.token_times_s
        if self.client.keeps_drafting or len(times_s) <= TRIAL_TOKENS:
            return False
        token_s = (times_s[-1] - times_s[-1 - TRIAL_TOKENS]) / TRIAL_TOKENS
        alone_s = edge.beliefs.verify_s
        if token_s <= TOLERANCE * alone_s:
            return False
        edge.fall_back(
            f"drafting takes {token_s * 1e3:.1f} ms a token, the cloud alone about "
            f"{alone_s * 1e3:.1f}"
        )
        self.client.warn(f"{edge.fallback}; the cloud decodes alone from here on")
        return True
