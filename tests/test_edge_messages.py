"""The protocol under everything a network and a peer can do to it."""

import random
from dataclasses import replace

import msgspec
import pytest
import torch
from edge_runs import (
    PLANS,
    SMALL,
    BernoulliSource,
    TableSource,
    TableTarget,
    greedy_text,
    make_edge,
    run_session,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedraft.inference.edge_cloud import messages
from pipedraft.inference.edge_cloud.cloud import CloudSession, CloudTarget, run_together
from pipedraft.inference.edge_cloud.messages import (
    Close,
    Error,
    More,
    Open,
    Opened,
    Preverify,
    Reject,
    Result,
    Samples,
    Settings,
    Stream,
    Token,
    Top,
    Verify,
    decode_reply,
    decode_request,
    encode,
    prefix_hash,
)
from pipedraft.inference.edge_cloud.plan import Draft, Finished, Send, Wait

HASH = prefix_hash([1, 2])
FIELDS = {"session": 1, "epoch": 0, "base": 2, "prefix_hash": HASH}
REQUESTS = [
    Open(session=1, prompt_ids=[1, 2], settings=Settings(rule="gumbel", temperature=0.5)),
    Preverify(
        session=1, epoch=0, seq=1, base=2, prefix_hash=HASH, certain=[7], ids=[], q=[], next_s=1
    ),
    Verify(
        session=1, epoch=0, seq=2, base=2, prefix_hash=HASH, certain=[], ids=[3], q=[0.5], next_s=0
    ),
    More(session=1, epoch=2, seq=3, count=16),
    Stream(session=1, epoch=2, seq=4, base=2, prefix_hash=HASH, certain=[]),
    Close(session=1, epoch=2, seq=5),
]
REPLY = {"session": 1, "number": 0, "seq": 0, "epoch": 0}
LIMITS = {"vocab_size": 9, "max_positions": 9, "eos_token_ids": [2]}
VERDICT = REPLY | {"length": 3, "held_s": 0.1, "forward_s": 0.1}
TOP = Top(ids=b"\0" * 4, p=b"\0" * 8, tail_mass=0.1, sample_ids=b"", sample_p=b"")
REPLIES = [
    Opened(
        **REPLY, token=1, vocab_size=9, max_positions=9, eos_token_ids=[2], target="", anchor=""
    ),
    Result(**VERDICT, token=None),
    Reject(**VERDICT, payload=Token(id=4)),
    Reject(**VERDICT, payload=TOP),
    Samples(**REPLY, payload=TOP),
    Error(**REPLY, text="no"),
]


# -- bytes ----------------------------------------------------------------------------------


def test_every_message_survives_its_encoding():
    assert [decode_request(encode(message)) for message in REQUESTS] == REQUESTS
    assert [decode_reply(encode(message)) for message in REPLIES] == REPLIES


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=lambda m: type(m).__name__)
def test_damaged_bytes_are_refused_or_are_another_message(message):
    """Never another exception than ValueError, and no half-read message."""
    decode = decode_request if message in REQUESTS else decode_reply
    data, rng = encode(message), random.Random(0)
    for cut in range(len(data)):
        with pytest.raises(ValueError, match="no message of this protocol"):
            decode(data[:cut])
    with pytest.raises(ValueError):
        decode(data + b"\0")
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert encode(decode(bytes(damaged)))
        except ValueError as error:
            assert "\n" not in str(error)


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
    data = encode(msgspec.structs.replace(REQUESTS[2], **fields))
    with pytest.raises(ValueError, match="no message of this protocol"):
        decode_request(data)


def test_a_message_that_is_too_large_is_not_looked_at():
    with pytest.raises(ValueError, match="send at most"):
        decode_request(b"\0" * (messages.MAX_BYTES + 1))


def test_a_side_does_not_read_its_own_messages():
    with pytest.raises(ValueError):
        decode_request(encode(REPLIES[1]))
    with pytest.raises(ValueError):
        decode_reply(encode(REQUESTS[2]))


# -- order ----------------------------------------------------------------------------------


class Storm:
    """A network that holds messages and hands them over in any order, twice, or not at all."""

    def __init__(self, edge, cloud, seed: int, *, loss: float, limit: int = 60_000) -> None:
        self.edge, self.cloud, self.rng, self.loss = edge, cloud, random.Random(seed), loss
        self.limit, self.now_s = limit, 0.0
        self.under_way: list[tuple[str, bytes]] = []
        self.is_computing = self.has_finished = False

    def send(self, side: str, message) -> None:
        if self.rng.random() >= self.loss:
            self.under_way.append((side, encode(message)))

    def run(self):
        for _ in range(self.limit):
            self.now_s += 0.01
            self.rng.choice([self.edge_turn, self.cloud_turn, self.deliver, self.deliver])()
            if self.has_finished:
                return self.edge.text.result
        raise AssertionError("the text does not end")

    def edge_turn(self) -> None:
        match self.edge.act(self.now_s):
            case Send(request=request):
                self.send("cloud", request)
            case Draft():
                self.edge.draft()
                self.now_s += 0.01
                self.edge.drafted(self.now_s)
            case Finished():
                self.has_finished = True
            case Wait():
                pass

    def cloud_turn(self) -> None:
        if self.is_computing:
            run_together([self.cloud])
            self.is_computing = False
            for reply in self.cloud.finish(self.now_s):
                self.send("edge", reply)
        else:
            self.is_computing = bool(self.cloud.start(self.now_s))

    def deliver(self) -> None:
        if not self.under_way:
            return
        index = self.rng.randrange(len(self.under_way))
        side, data = self.under_way[index]
        if self.rng.random() < 0.8:  # else it comes again
            del self.under_way[index]
        if side == "edge":
            self.edge.receive(decode_reply(data), self.now_s)
            return
        for reply in self.cloud.receive(decode_request(data), self.now_s):
            self.send("edge", reply)


def storm_edge(source, plan, **options):
    how, has_bonus, is_fast = PLANS[plan]
    patient = replace(how, timeout_s=0.5), has_bonus, is_fast
    return make_edge(source, [1, 2], plan=patient, policy="survival", max_new_tokens=24, **options)


PLAIN = greedy_text(SMALL, (1, 2), 200)[:24]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    plan=st.sampled_from([*PLANS]),
    acceptance=st.sampled_from([0.3, 0.8, 1.0]),
    loss=st.sampled_from([0.0, 0.2]),
)
def test_late_repeated_and_lost_messages_change_nothing(seed, plan, acceptance, loss):
    source = BernoulliSource([1, 2], acceptance, seed=seed)
    storm = Storm(storm_edge(source, plan), CloudSession(CloudTarget(SMALL)), seed, loss=loss)
    assert storm.run().token_ids == PLAIN


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), plan=st.sampled_from([*PLANS]))
def test_a_storm_does_not_touch_sampled_text_either(seed, plan):
    """tail_escape asks for samples across it; gumbel's text must be plain decoding's."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.randn(2, 6, 6, generator=generator)
    options = {"temperature": 1.0, "seed": seed}
    plain, _ = run_session(
        TableTarget(target), None, [1, 2], max_new_tokens=24, rule="gumbel", **options
    )
    for rule in ("gumbel", "tail_escape"):
        edge = storm_edge(TableSource(draft), plan, rule=rule, top_k=1, tail_samples=1, **options)
        result = Storm(edge, CloudSession(TableTarget(target)), seed, loss=0.1).run()
        assert len(result.token_ids) == 24
        assert rule != "gumbel" or result.token_ids == plain.text.result.token_ids


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), plan=st.sampled_from([*PLANS]), after=st.integers(0, 60))
def test_falling_back_at_any_moment_changes_nothing(seed, plan, after):
    source = BernoulliSource([1, 2], 0.7, seed=seed)
    edge = storm_edge(source, plan)
    storm = Storm(edge, CloudSession(CloudTarget(SMALL)), seed, loss=0.1)
    for _ in range(after):
        storm.now_s += 0.01
        storm.rng.choice([storm.edge_turn, storm.cloud_turn, storm.deliver])()
    edge.fall_back("the test says so")
    assert storm.run().token_ids == PLAIN


# -- a peer that errs -----------------------------------------------------------------------


def opened(**options) -> tuple[CloudSession, list]:
    cloud = CloudSession(TableTarget(torch.eye(8)))
    cloud.receive(Open(session=1, prompt_ids=[1, 2], settings=Settings(**options)), 0.0)
    assert cloud.start(0.0) == 2
    cloud.run()
    return cloud, cloud.finish(0.1)


def verify(seq=1, **fields) -> Verify:
    text = [1, 2, 2]  # of the table that repeats its last token
    known = {
        "session": 1,
        "epoch": 0,
        "seq": seq,
        "base": 3,
        "prefix_hash": prefix_hash(text),
        "certain": [],
        "ids": [2],
        "q": [],
        "next_s": 0.0,
    }
    return Verify(**known | fields)


def test_a_repeated_request_has_the_same_answer_and_no_other_effect():
    cloud, (first,) = opened()
    assert first.token == 2 and cloud.receive(verify(), 0.2) == []
    assert cloud.start(0.2) == 2
    cloud.run()
    (result,) = cloud.finish(0.3)
    assert (result.length, result.token) == (4, 2)
    assert cloud.receive(verify(), 0.4) == [result]
    opening = Open(session=1, prompt_ids=[1, 2], settings=Settings())
    assert cloud.receive(opening, 0.5) == [first]
    assert cloud.start(0.6) == 0


def test_guesses_of_an_ended_epoch_are_dropped():
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
        (verify(q=[0.5]), "q: 1 of 1 guesses by rule 'match'"),
        (verify(epoch=3), "epoch: 3 has not begun"),
        (verify(session=2), "session: 2 is not open"),
        (More(session=1, epoch=0, seq=1, count=4), "more: no correction is owed"),
    ],
)
def test_a_request_that_cannot_be_ends_the_session_with_a_line(request_, message):
    cloud, _ = opened()
    (error,) = cloud.receive(request_, 0.2)
    assert isinstance(error, Error) and message in error.text and "\n" not in error.text
    assert cloud.is_closed and cloud.receive(verify(seq=2), 0.3) == []


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompt_ids": [8]}, "prompt_ids: 8 is outside 8 tokens"),
        ({"prompt_ids": [1] * 1000}, "leave no room in the target's 1000 positions"),
        ({"target": "another"}, "the draft was made for another, this is table"),
    ],
)
def test_an_opening_that_cannot_be_is_refused(fields, message):
    cloud = CloudSession(TableTarget(torch.eye(8)))
    opening = Open(**{"session": 1, "prompt_ids": [1], "settings": Settings(), **fields})
    (error,) = cloud.receive(opening, 0.0)
    assert message in error.text
    edge = make_edge(TableSource(torch.eye(8)), [1])
    edge.receive(error, 0.0)
    with pytest.raises(ValueError, match="cloud: "):
        edge.act(0.0)


def test_a_retrained_anchor_lets_the_cloud_decode_alone():
    edge = make_edge(TableSource(torch.eye(6)), [1, 2], max_new_tokens=6)
    edge.opening = msgspec.structs.replace(edge.opening, anchor="the draft's")
    edge._outbox[0] = edge.opening
    result = Storm(edge, CloudSession(TableTarget(torch.eye(6))), 0, loss=0.0).run()
    assert result.token_ids == [2] * 6 and result.num_drafted == 0
    assert "the draft's" in edge.fallback and "table" in edge.fallback


def test_a_cloud_that_errs_is_found_out():
    edge = make_edge(TableSource(torch.eye(6)), [1, 2])
    assert isinstance(edge.act(0.0), Send)
    edge.receive(REPLIES[0], 0.1)
    edge.act(0.1)
    edge.receive(msgspec.structs.replace(REPLIES[1], number=1, length=40), 0.2)
    with pytest.raises(ValueError, match="a verdict on 40 tokens, but there are 3"):
        edge.act(0.3)
