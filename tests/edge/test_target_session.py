"""The session protocol under every fault by a network or a peer."""

import random

import msgspec
import pytest
import torch
from decode_runs import PlainTokenizer
from grpc_runs import drafted
from hypothesis import given, settings
from hypothesis import strategies as st
from link_runs import (
    LINK,
    PLANS,
    SMALL,
    BernoulliSource,
    TableSource,
    TableTarget,
    config_for,
    greedy_text,
    run_session,
)
from storm_runs import Storm

from pipedraft.inference.edge.channel import LinkEstimate
from pipedraft.inference.edge.draft_length import Estimates
from pipedraft.inference.edge.engine import LinkEngine
from pipedraft.inference.edge.pipeline import LinkedPipeline, RemoteTarget
from pipedraft.inference.edge.session_messages import (
    REPLIES,
    REQUESTS,
    Close,
    More,
    Open,
    Opened,
    Preverify,
    Reject,
    Result,
    Samples,
    Settings,
    Stream,
    Verify,
    prefix_hash,
)
from pipedraft.inference.edge.target_session import SessionRefused, SharedTarget, TargetSession
from pipedraft.inference.ranks.codec import MAGIC, PREFIX
from pipedraft.inference.rules.random import Token
from pipedraft.inference.rules.sampled import Top

ASKED = [
    Open(prompt_ids=[1, 2], settings=Settings(rule="gumbel", temperature=0.5)),
    drafted([1, 2], [], Preverify, certain=[7], next_s=1.0),
    drafted([1, 2], [3], seq=2, q=[0.5]),
    More(epoch=2, seq=3, count=16),
    Stream(epoch=2, seq=4, base=2, prefix_hash=prefix_hash([1, 2]), certain=[]),
    Close(epoch=2, seq=5),
]
REPLY = {"number": 0, "seq": 0, "epoch": 0}
LIMITS = {"vocab_size": 9, "max_positions": 9, "eos_token_ids": [2]}
VERDICT = REPLY | {"length": 3, "held_s": 0.1, "forward_s": 0.1}
TOP = Top(ids=torch.tensor([3, 5]).int(), p=torch.rand(2).double(), num_top=1, tail_mass=0.1)
ANSWERED = [
    Opened(**REPLY, token=1, vocab_size=9, max_positions=9, eos_token_ids=[2], anchor=""),
    Result(**VERDICT, token=None),
    Reject(**VERDICT, payload=Token(id=4)),
    Reject(**VERDICT, payload=TOP),
    Samples(**REPLY, payload=TOP),
]


# -- bytes ----------------------------------------------------------------------------------


CODECS = [
    *((REQUESTS, message) for message in ASKED),
    *((REPLIES, message) for message in ANSWERED),
]


@pytest.mark.parametrize("codec, message", CODECS, ids=lambda it: type(it).__name__)
def test_a_message_survives_and_damaged_bytes_are_refused_or_another_message(codec, message):
    """No exception but ValueError, and no half-read message."""
    data, rng = codec.to_bytes(message), random.Random(0)
    assert codec.to_bytes(codec.decode(data)) == data
    for cut in range(len(data)):
        with pytest.raises(ValueError):
            codec.decode(data[:cut])
    with pytest.raises(ValueError, match="bytes, where"):
        codec.decode(data + b"\0")
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert codec.to_bytes(codec.decode(bytes(damaged)))
        except ValueError as error:
            assert "\n" not in str(error)


def test_a_frame_without_tensors_adds_eighteen_bytes_to_its_message():
    """Prefix 16, and an empty tensor list; a virtual link counts them."""
    for codec, message in CODECS:
        if not isinstance(message, Reject | Samples):
            assert len(codec.to_bytes(message)) == len(msgspec.msgpack.encode(message)) + 18


@pytest.mark.parametrize(
    "fields",
    [
        {"ids": [3] * 300, "q": [0.5] * 300},
        {"ids": [-1]},
        {"ids": [3.5]},
        {"q": [1.5]},
        {"q": [float("nan")]},
        {"next_s": float("inf")},
        {"prefix_hash": b"1234567"},
        {"seq": -1},
        {"certain": "x"},
    ],
)
def test_fields_out_of_their_bounds_are_refused(fields):
    data = REQUESTS.to_bytes(msgspec.structs.replace(ASKED[2], **fields))
    with pytest.raises(ValueError, match="not one of this protocol"):
        REQUESTS.decode(data)


def test_a_message_that_is_too_large_is_not_looked_at():
    for codec, header_bytes, tensor_bytes in (
        (REQUESTS, 2**24 + 1, 0),
        (REQUESTS, 9, 8),
        (REPLIES, 9, 2**24 + 8),
    ):
        with pytest.raises(ValueError, match="this side takes"):
            codec.decode(PREFIX.pack(MAGIC, header_bytes, tensor_bytes) + bytes(64))


# -- order ----------------------------------------------------------------------------------


STORMY = {"policy": "geometric", "max_new_tokens": 24}
PLAIN = greedy_text(SMALL, (1, 2), 200)[:24]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    plan=st.sampled_from([*PLANS]),
    acceptance=st.sampled_from([0.3, 0.8, 1.0]),
    loss=st.sampled_from([0.0, 0.2]),
)
def test_late_requests_and_broken_streams_change_nothing(seed, plan, acceptance, loss):
    source = BernoulliSource([1, 2], acceptance, seed=seed)
    storm = Storm(SharedTarget(SMALL), seed, loss=loss)
    assert storm.decode(source, [1, 2], plan=plan, **STORMY).token_ids == PLAIN


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), plan=st.sampled_from([*PLANS]))
def test_a_storm_does_not_touch_sampled_output_either(seed, plan):
    """tail_escape asks for samples across the storm; gumbel's output must equal the baseline's."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.randn(2, 6, 6, generator=generator)
    options = {"temperature": 1.0, "seed": seed}
    plain, _ = run_session(
        TableTarget(target), None, [1, 2], max_new_tokens=24, rule="gumbel", **options
    )
    for rule in ("gumbel", "tail_escape"):
        storm = Storm(TableTarget(target), seed, loss=0.1)
        options |= {"rule": rule, "payload_tokens": 1, "tail_samples": 1}
        result = storm.decode(TableSource(draft), [1, 2], plan=plan, **STORMY, **options)
        assert len(result.token_ids) == 24
        assert rule != "gumbel" or result.token_ids == plain.token_ids


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), plan=st.sampled_from([*PLANS]), after=st.integers(1, 90))
def test_falling_back_at_any_moment_changes_nothing(seed, plan, after):
    """If corrections are drawn here, the target may not know the root when it continues alone."""
    source = BernoulliSource([1, 2], 0.7, seed=seed)
    storm = Storm(SharedTarget(SMALL), seed, loss=0.1, falls_back_after=after)
    assert storm.decode(source, [1, 2], plan=plan, **STORMY).token_ids == PLAIN
    target, draft = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(seed))
    storm = Storm(TableTarget(target), seed, loss=0.1, falls_back_after=after)
    options = {"temperature": 1.0, "seed": seed, "rule": "tail_escape", "payload_tokens": 2}
    result = storm.decode(TableSource(draft), [1, 2], plan=plan, **STORMY, **options)
    assert len(result.token_ids) == 24 and sum(result.round_lengths) == 23


# -- a peer that errs -----------------------------------------------------------------------


def opened(**options) -> tuple[TargetSession, list]:
    opening = Open(prompt_ids=[1, 2], settings=Settings(**options))
    cloud = TargetSession(TableTarget(torch.eye(8)), opening)
    assert cloud.start(0.0) == 2
    cloud.run()
    return cloud, cloud.finish(0.1)


def verify(ids=(2,), **fields) -> Verify:
    """Verify ``ids`` after the table's text; the first id repeats the text's last token."""
    return drafted([1, 2, 2], list(ids), **fields)


def test_draft_tokens_of_an_ended_epoch_are_dropped():
    cloud, _ = opened()
    cloud.receive(verify(ids=[5]), 0.2)  # wrong: the epoch ends
    more = verify(seq=2, base=4, prefix_hash=prefix_hash([1, 2, 2, 5]), ids=[5, 5])
    assert cloud.receive(more, 0.2) == []
    cloud.start(0.2)
    cloud.run()
    (reject,) = cloud.finish(0.3)
    assert isinstance(reject, Reject) and reject.payload == Token(id=2)
    assert cloud.receive(verify(seq=3, base=5), 0.4) == [] and cloud.start(0.5) == 0


@pytest.mark.parametrize(
    "request_, message",
    [
        (verify(base=2), "base: 2 tokens, but this session has 3"),
        (verify(prefix_hash=b"12345678"), "base: 3 tokens, but this session has 3 or others"),
        (verify(ids=[9]), "ids: 9 is outside the target's vocabulary of 8"),
        (verify(certain=[2]), "certain: 1 tokens"),
        (verify(q=[0.5]), "q: 1 of 1 draft tokens by rule 'match'"),
        (verify(epoch=3), "epoch: 3 has not begun"),
        (verify(seq=2), "seq: 2 where 1 is due"),
        (Open(prompt_ids=[1, 2], settings=Settings()), "seq: 0 where 1 is due"),
        (More(epoch=0, seq=1, count=4), "more: no correction is owed"),
    ],
)
def test_a_request_that_cannot_be_ends_the_session_with_a_line(request_, message):
    cloud, _ = opened()
    with pytest.raises(SessionRefused, match=message):
        cloud.receive(request_, 0.2)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompt_ids": [8]}, "prompt_ids: 8 is outside 8 tokens"),
        ({"prompt_ids": [1] * 1000}, "leave no room in the target's 1000 positions"),
    ],
)
def test_an_opening_that_cannot_be_is_refused(fields, message):
    opening = Open(**{"prompt_ids": [1], "settings": Settings(), **fields})
    with pytest.raises(SessionRefused, match=message):
        TargetSession(TableTarget(torch.eye(8)), opening)


class Scripted(LinkedPipeline):
    """A peer that sends arbitrary replies, whatever the request."""

    def __init__(self, *replies) -> None:
        super().__init__(RemoteTarget())
        self.replies = list(replies)

    def _begin(self) -> Estimates:
        link = LinkEstimate(LINK.state(0.0))
        return Estimates(draft_s=0.02, verify_s=0.09, verify_row_s=0.001, link=link)

    def _send(self, request) -> None:
        pass

    def _wait(self) -> None:
        self._inbox.append((self.replies.pop(0), 0.0))

    def decode(self, source, prompt, **options):
        config = config_for(source, **options)
        engine = LinkEngine(self, PlainTokenizer(), config, source=source)
        return engine.decode(prompt)


def test_a_retrained_anchor_lets_the_target_decode_alone():
    storm = Storm(TableTarget(torch.eye(6)), 0, loss=0.0)
    storm.pipeline.anchor = "the draft's"
    result = storm.decode(TableSource(torch.eye(6)), [1, 2], max_new_tokens=6)
    assert result.token_ids == [2] * 6 and result.num_drafted == 0
    assert "the draft's" in storm.pipeline.fallback and "table" in storm.pipeline.fallback


@pytest.mark.parametrize(
    "reply, message",
    [
        (Result(**VERDICT | {"length": 40}, token=None), "a verdict on 40 tokens, but there are 3"),
        (Result(**VERDICT, token=None), "a verdict on 3 tokens that says nothing new"),
        (Reject(**VERDICT | {"length": 6}, payload=Token(id=4)), "that was never drafted"),
        (Reject(**VERDICT | {"epoch": 1}, payload=Token(id=4)), "a reply of epoch 1 in epoch 0"),
        (Reject(**VERDICT, payload=TOP), "payload: Top after a rejection by rule 'match'"),
        (Samples(**REPLY, payload=TOP), "server: Samples where Result or Reject is due"),
        (ANSWERED[0], "server: Opened where Result or Reject is due"),
    ],
)
def test_a_server_that_errs_is_found_out(reply, message):
    server = Scripted(ANSWERED[0], msgspec.structs.replace(reply, number=1))
    with pytest.raises(ValueError, match=message):
        server.decode(TableSource(torch.eye(6)), [1, 2], policy="fixed:3", max_new_tokens=9)


def test_a_verdict_before_the_session_is_open_is_found_out():
    with pytest.raises(ValueError, match="server: Result where Opened is due"):
        Scripted(ANSWERED[1]).decode(TableSource(torch.eye(6)), [1, 2])
