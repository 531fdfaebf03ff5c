"""Logits that overflow stop decoding, with the module's name, whatever the draft proposes."""

import pytest
import torch
from decode_runs import PlainTokenizer, SimulatedSource
from inline_ranks import connect_inline
from several_runs import decode_several
from tiny_models import tiny_llama

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.rules.base import GumbelVerifier, MatchVerifier
from pipedraft.inference.rules.random import KeyedRandom, greedy_tokens
from pipedraft.inference.tree import TokenTree
from pipedraft.inference.verdict import NO_TOKEN, NotFinite

PROMPT = [5, 9, 2]


def test_a_greedy_token_is_none_for_nan_and_infinity_and_the_first_largest_else():
    nan, inf = float("nan"), float("inf")
    rows = [[1, 3, 3], [1, nan, 3], [1, inf, 3], [-inf, -inf, 2], [-inf, -inf, -inf]]
    assert greedy_tokens(torch.tensor(rows)).tolist() == [1, NO_TOKEN, NO_TOKEN, 2, NO_TOKEN]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", [MatchVerifier, GumbelVerifier])
def test_only_a_row_of_the_output_needs_a_token(rule, temperature):
    logits_RV = torch.full((2, 8), -30.0)
    logits_RV[0, 3], logits_RV[1, 0] = 30, float("nan")
    for token, is_on_path in ((4, False), (3, True)):
        tree = TokenTree(1, 5)
        tree.add(0, token, 0.0)
        verifier = rule(temperature, KeyedRandom(0, 0))
        verdicts = verifier.judge(logits_RV, torch.tensor([5, 6]))
        assert verdicts.tolist() == [3, NO_TOKEN]
        if is_on_path:
            with pytest.raises(NotFinite) as caught:
                verifier.walk(tree, verdicts)
            assert caught.value.path == [0, 1]
        else:
            assert verifier.walk(tree, verdicts).next_token == 3


@pytest.fixture(scope="module")
def overflowing():
    """A target whose 4th token overflows, and the tokens up to it."""
    model = tiny_llama(layers=4)
    config = DecodeConfig.of("autoregressive", num_stages=1, max_new_tokens=12)
    tokens = Engine(model, PlainTokenizer(), config).decode(PROMPT).token_ids
    last = next(i for i, x in enumerate(tokens) if i > 2 and x not in PROMPT + tokens[:i])
    with torch.no_grad():
        model.model.embed_tokens.weight[tokens[last]] = float("inf")
    return model, tokens[: last + 1]


SCHEDULES = {
    "autoregressive": {},
    "eagle": {"tree": "chain:3"},
    "naive_pp": {"tree": "dynamic:3:3:8"},
    "pruned_pp": {"tree": "dynamic:3:3:8"},
    "pipedec": {"tree_width": 4},
    "flowspec": {"tree": "dynamic:3:3:8"},
    "flowspec_continued": {},
    "ssd": {"draft_tokens": 3},
    "pipeinfer": {},
}


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_stops_at_the_same_token_and_names_the_module(
    schedule, acceptance, temperature, overflowing
):
    target, tokens = overflowing
    connects = {LocalPipeline: "model.embed_tokens is the first module that gives such a number"}
    connects[connect_inline] = "the first such number is in keys or values of layer 0"
    for connect, place in connects.items():
        options = {"schedule": schedule, "num_stages": 2, "max_new_tokens": 12, "verifier": "match"}
        config = DecodeConfig.of(**options, **SCHEDULES[schedule], temperature=temperature)
        text = [*PROMPT, *tokens, *[1] * 20]
        source = SimulatedSource(target, PROMPT, acceptance, text=text)
        engine = Engine(
            target,
            PlainTokenizer(),
            config,
            source=None if schedule == "autoregressive" else source,
            connect=connect,
        )
        emitted: list[int] = []
        with pytest.raises(NotFinite, match="^target: its logits after") as caught:
            engine.decode(PROMPT, on_token=emitted.append)
        assert emitted == tokens[: len(emitted)]  # a longer path is not emitted with its end
        assert place in str(caught.value)
        # A draft token that overflows makes the rows beside it NaN, too.
        number = int(str(caught.value).split(" tokens are NaN")[0].rpartition(" ")[2])
        assert 0 <= len(PROMPT) + len(tokens) - number <= 3 * (acceptance > 0)


def test_a_prompt_that_overflows_is_told_at_its_end(overflowing):
    target, tokens = overflowing
    config = DecodeConfig.of("autoregressive", num_stages=2, max_new_tokens=4)
    for connect in (LocalPipeline, connect_inline):
        engine = Engine(target, PlainTokenizer(), config, connect=connect)
        with pytest.raises(NotFinite, match="its logits after 2 tokens are NaN"):
            engine.decode([5, tokens[-1]])


def test_one_of_several_sequences_fails_alone(overflowing):
    target, tokens = overflowing
    config = DecodeConfig.of("autoregressive", num_stages=3, max_new_tokens=4)
    asked = [([5, tokens[-1]], config, 0), ([5, 9], config, 1)]
    _, (wrong, right) = decode_several(target, None, 3, asked)
    with pytest.raises(NotFinite, match="model.embed_tokens is the first module"):
        wrong.future.result(0)
    assert len(right.future.result(0).token_ids) == 4
