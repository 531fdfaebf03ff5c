"""Settings and options that a link or its server refuses, and filters that both sides apply."""

import itertools
import math

import msgspec
import pytest
import torch
from link_runs import TableSource, TableTarget, run_session

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.edge.arguments import SessionServerOptions
from pipedraft.inference.edge.session_messages import Settings
from pipedraft.inference.rules import ROUND_RULES
from pipedraft.inference.rules.filters import TokenFilters
from pipedraft.inference.rules.random import probabilities

BAD = [
    ("top_k", -1),
    *(("top_p", value) for value in (0.0, 1.5, math.nan)),
    *(("min_p", value) for value in (-0.1, 1.01, math.nan)),
    *(("typical_p", value) for value in (0.0, math.nan)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_filters_out_of_range_are_refused_in_messages(name, value):
    plain = msgspec.to_builtins(Settings(temperature=1.0))
    plain[Settings.__struct_fields__.index("filters")] = {name: value}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, Settings)


def test_a_filter_of_greedy_decoding_is_refused():
    with pytest.raises(ValueError, match="^top_k: 50 filters samples, but temperature 0 is greedy"):
        Settings(filters=TokenFilters(top_k=50))


@pytest.mark.parametrize("value", [-1.0, 5e-324, 9.9e-5, 1.1e6, float("inf"), float("nan")])
def test_temperatures_out_of_range_are_refused(value):
    message = "temperature: .* out of range; give 0 .greedy. or 0.0001 to 1e"
    with pytest.raises(ValueError, match=message):
        Settings(temperature=value)


@pytest.mark.parametrize("value", [0.0, 1e-4, 0.7, 1.0, 1e6])
def test_temperatures_in_range_are_taken(value):
    assert Settings(temperature=value).temperature == value


def test_a_link_refuses_rules_of_whole_rounds():
    for rule in ROUND_RULES:
        with pytest.raises(ValueError, match=f"rule: '{rule}' tests whole rounds"):
            Settings(rule=rule, temperature=1.0)


def test_a_schedule_of_a_link_has_no_meter_no_whole_rounds_and_no_setting_of_a_pipeline():
    with pytest.raises(ValueError, match="never_slower: True with schedule 'flexspec'"):
        DecodeConfig.of("flexspec", never_slower=True)
    with pytest.raises(ValueError, match="draft_tokens: schedule 'flexspec' has no such setting"):
        DecodeConfig.of("flexspec", draft_tokens=10**9)
    with pytest.raises(ValueError, match="max_length: 0; give at least 1"):
        DecodeConfig.from_dict({"schedule": {"name": "pearl", "max_length": 0}})
    with pytest.raises(ValueError, match="verifier: 'block' tests whole"):
        DecodeConfig.of("stop_and_wait", temperature=1.0, verifier="block")


@pytest.mark.parametrize("name", ["--max-sequences", "--max-message-kb"])
def test_no_limit_is_beyond_what_grpc_counts(name):
    with pytest.raises(ValueError, match=f"{name}: 9+; give at most"):
        SessionServerOptions.read(["--target", "x", name, "9" * 12])


@pytest.mark.parametrize("rule", ["gumbel", "rejection", "tail_escape"])
def test_a_target_behind_a_link_filters_as_the_draft_does(rule):
    logits_VV = torch.randn(6, 6, generator=torch.Generator().manual_seed(6)) * 1.5
    kept_VV = probabilities(logits_VV, 1.0, TokenFilters(top_k=4, top_p=0.8)) > 0
    options = {"temperature": 1.0, "top_k": 4, "top_p": 0.8, "max_new_tokens": 200}
    target, draft = TableTarget(logits_VV), TableSource(logits_VV + 0.3)
    options |= {"rule": rule, "plan": "picospec"}
    found, _ = run_session(target, draft, [1], payload_tokens=1, tail_samples=1, **options)
    text = found.token_ids
    assert found.num_accepted == found.num_tested > 100  # both are the same distribution
    assert all(kept_VV[before, token] for before, token in itertools.pairwise([1, *text]))
    if rule == "gumbel":
        plain, _ = run_session(target, None, [1], **options)
        assert plain.token_ids == text
