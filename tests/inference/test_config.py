"""A decode configuration: both ways to primitive values, and its refusals."""

import json

import pytest

from pipedraft.errors import UsageError
from pipedraft.eval.arguments import EvalOptions
from pipedraft.inference.config import DecodeConfig, setting_owners
from pipedraft.inference.decode_options import DecodeOptions
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.inference.shapes import TreeShape


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_both_ways(name):
    config = DecodeConfig.of(name, num_stages=2, boundaries=(0, 3, 8), temperature=0.7, seed=3)
    plain = json.loads(json.dumps(config.to_dict()))
    assert plain["schedule"]["name"] == name
    assert DecodeConfig.from_dict(plain) == config


def test_specpipe_is_pipedec_under_another_name():
    """Results have one name, so the two are one schedule in a list, too."""
    config = DecodeConfig.of("specpipe", tree_width=4)
    assert config == DecodeConfig.of("pipedec", tree_width=4)
    assert config.to_dict()["schedule"]["name"] == "pipedec"
    assert DecodeOptions.read(["--schedule", "specpipe", "--prompt", "x"]).schedule == "pipedec"
    lists = ["--checkpoint", "x", "--benchmarks", "gsm8k", "--out", "y", "--schedule"]
    assert EvalOptions.read([*lists, "spd,specpipe"]).schedule == ("spd", "pipedec")
    with pytest.raises(UsageError, match="--schedule: 'pipedec,specpipe' names pipedec twice"):
        EvalOptions.read([*lists, "pipedec,specpipe"])


def test_settings_go_both_ways():
    tree = TreeShape.parse("dynamic:4:3:8")
    config = DecodeConfig.of("flowspec", tree=tree, refill_tokens=4, level_order=True)
    assert DecodeConfig.from_dict(config.to_dict()) == config
    written = {"tree": "dynamic:4:3:8", "refill_tokens": 4, "level_order": True}
    written |= {"name": "flowspec"}
    assert DecodeConfig.from_dict({"schedule": written}) == config
    assert DecodeConfig.from_dict({"schedule": "eagle"}) == DecodeConfig.of("eagle")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"schedule": "spdd"}, "schedule: 'spdd' is unknown; did you mean 'spd'"),
        ({"schedule": {"tree_width": 2}}, "schedule: .* names none"),
        ({"schedule": {"name": "spd", "restart": True}}, "restart: schedule 'spd' .*pipeinfer"),
        (
            {"schedule": {"name": "spd", "tree_width": "2"}},
            "tree_width: '2' with .*or auto",
        ),
        ({"schedule": {"name": "spd", "tree_width": 0}}, "tree_width: 0; give at least 1"),
        ({"schedule": {"name": "eagle", "tree": "bush"}}, "tree: 'bush' is no tree"),
        ({"temprature": 1.0}, "'temprature' is unknown; did you mean 'temperature'"),
        ({"temperature": float("nan")}, "temperature: nan is out of range"),
        ({"temperature": 5e-324}, "temperature: 5e-324 is out of range"),
        ({"num_stages": 0}, "num_stages: 0; give at least 1"),
        ({"boundaries": [0, 1]}, "boundaries: .* do not make 4 stages"),
        ({"cost": {"row": -1.0}}, "cost.row: -1.0"),
        ({"verifier": "proposal"}, "verifier: "),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(values, words):
    with pytest.raises(ValueError, match=words) as caught:
        DecodeConfig.from_dict(values)
    assert "\n" not in str(caught.value)


def test_a_setting_of_another_schedule_is_refused():
    owners = setting_owners()
    for name in SCHEDULES:
        settings = ["restart", "tree_width", "tree", "step_tokens", "refill_depth"]
        for setting in [one for one in settings if name not in owners[one]]:
            with pytest.raises(ValueError, match=f"{setting}: schedule '{name}' has no such"):
                DecodeConfig.of(name, **{setting: 1})
