"""Heads as NeMo, modelopt, AngelSlim, SpecForge and speculators' converter write them.

Every import is compared with formulas, for several draft tokens: some settings change nothing
before the second one.
"""

import warnings

import peer_layouts
import pytest
import torch
from command_runs import call
from peer_files import (
    HIDDEN,
    IDS,
    LENGTH,
    STEPS,
    VOCABULARY,
    assert_refused,
    command,
    eagle3_files,
    import_files,
    save_target,
    write,
)
from peer_formulas import greedy_by_formula, steps_by_formula
from tiny_drafts import step_logits

from pipedraft.models import load_draft
from pipedraft.models.exchange.peers import import_head
from pipedraft.models.transformer.layers import KeyValues


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


def imported(folder, target, config, weights):
    """Return the head, and the lines that the import says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head = load_draft(str(import_files(folder, target, config, weights)), target)
    return head, [str(x.message) for x in caught if x.category is UserWarning]


PLAIN = {"rope_type": "default", "rope_theta": peer_layouts.BASE}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
CHAINS = {
    # files, settings of the formula, words in each line that the import says
    "nemo": (peer_layouts.nemo(), {"rope": PLAIN}, ["num_hidden_layers 8"]),
    "nemo, EAGLE-3.1": (
        peer_layouts.nemo(fc_norm=True, norm_output=True),
        {"rope": PLAIN, "fc_norm": True, "norm_output": True},
        ["num_hidden_layers 8"],
    ),
    "nemo's vLLM export, EAGLE-3.1": (
        peer_layouts.nemo(wrapper="", fc_norm=True, norm_output=True),
        {"rope": PLAIN, "fc_norm": True, "norm_output": True},
        ["num_hidden_layers 8"],
    ),
    "modelopt": (
        peer_layouts.modelopt(),
        {"rope": YARN | {"rope_theta": 1e4}},
        ["layers.0.input_layernorm", "rope_scaling yarn", "aux_hidden_state_layer_ids [1, 3, 4]"],
    ),
    "angelslim": (peer_layouts.angelslim(), {"rope": PLAIN}, ["rope_theta 1e+06"]),
    "angelslim, base of its trainer": (peer_layouts.angelslim(rope_theta=1e4), {}, []),
    "specforge": (peer_layouts.specforge(), {"rope": PLAIN}, []),
    "specforge, norm_output": (
        peer_layouts.specforge(norm_output=True),
        {"rope": PLAIN},
        ["norm_output True"],
    ),
    "converted": (peer_layouts.converted(), {}, []),
    "converted, norm_output": (
        peer_layouts.converted(norm_output=True),
        {"norm_output": True},
        ["norm_output True"],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_head_of_each_package_computes_what_its_layout_means(tmp_path, target, name):
    (config, weights), meant, lines = CHAINS[name]
    head, said = imported(tmp_path, target, config, weights)
    assert len(said) == len(lines), said
    assert all(word in line for word, line in zip(lines, said, strict=True))
    bare = {key.removeprefix("model."): value for key, value in weights.items()}
    expected = steps_by_formula(target, dict(meant), bare)
    for step, (theirs, ours) in enumerate(
        zip(expected, step_logits(target, head, IDS, STEPS), strict=True)
    ):
        rows = LENGTH - 1 - step
        difference = (theirs - ours)[:rows].abs().max() / theirs.abs().max()
        assert difference < 1e-5, (step, float(difference))


def test_the_meaning_of_norm_output_shows_from_the_second_draft_token_on(tmp_path, target):
    """The same tensors under the names of two layouts are two heads."""
    first, weights = peer_layouts.specforge(norm_output=True)
    second = first | {"rope_theta": peer_layouts.BASE}
    one, _ = imported(tmp_path / "one", target, first, weights)
    other, _ = imported(
        tmp_path / "other", target, second, peer_layouts.renamed(weights, "layers.0.")
    )
    assert not one.config.norm_output
    assert other.config.norm_output
    pairs = [step_logits(target, head, IDS, 2) for head in (one, other)]
    assert torch.equal(pairs[0][0], pairs[1][0])
    assert (pairs[0][1] - pairs[1][1]).abs().max() > 0.1 * pairs[0][1].abs().max()


BLOCKS = {
    "nemo": (peer_layouts.nemo_dflash, peer_layouts.BASE, []),
    "modelopt": (peer_layouts.modelopt_dflash, peer_layouts.BASE, ["rope_theta 1e+06"]),
    "angelslim": (peer_layouts.angelslim_dflash, 1e4, []),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_dflash_head_of_each_package_computes_what_its_files_say(
    tmp_path, target, name, monkeypatch
):
    make, base, lines = BLOCKS[name]
    config, weights = make(target)
    head, said = imported(tmp_path, target, config, weights)
    assert len(said) == len(lines), said
    assert all(word in line for word, line in zip(lines, said, strict=True))
    states = target(input_ids=IDS[None], output_hidden_states=True).hidden_states
    feature = head.feature({layer: states[layer][0, :7] for layer in head.taps})
    caches, token = [KeyValues() for _ in head.layers], IDS[7, None]
    ours = [
        head.logits(state)
        for state in head.propose(token, head.config.block_size, feature, position=7, caches=caches)
    ]
    rope = {"rope_type": "default", "rope_theta": base}
    monkeypatch.setattr(target.config, "rope_parameters", rope)  # which the formula reads
    theirs = greedy_by_formula(config, weights, target, 7)
    assert (torch.stack(ours) - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_each_line_is_printed_before_the_files(tmp_path, target, monkeypatch, capfd):
    source = write(tmp_path / "head", *peer_layouts.modelopt())
    assert call("models", command(source, target, tmp_path / "out"), monkeypatch) == 0
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["warning"] * 3


def test_a_second_norm_with_equal_weights_changes_nothing(tmp_path, target):
    config, weights = peer_layouts.modelopt(rope_scaling=None)
    del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    weights["layers.0.input_layernorm.weight"] = torch.full((HIDDEN,), 0.5)
    assert imported(tmp_path, target, config, weights)[1] == []


NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
}


def test_a_table_of_layer_types_gives_the_entry_that_speculators_trains_with(tmp_path, target):
    config, weights = eagle3_files("speculators", flags={"inner": {"rope_parameters": NESTED}})
    del config["transformer_layer_config"]["rope_theta"]
    head, said = imported(tmp_path, target, config, weights)
    assert head.layer_config.rope_parameters["rope_theta"] == 5e4
    assert ["per layer type" in line for line in said] == [True]


def edited(**changes):
    return lambda config, _: config.update(changes)


def inner(**changes):
    return lambda config, _: config["transformer_layer_config"].update(changes)


def engine(**changes):
    settings = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]} | changes
    return lambda config, _: config.update(eagle_config=settings)


def both_layers(config, weights):
    for key in [key for key in weights if key.startswith("midlayer.")]:
        weights[key.replace("midlayer.", "layers.1.")] = weights[key]


def indices(config, weights):
    weights["d2t"] = torch.arange(len(weights["d2t"]))


REFUSED = {
    "unknown": ("sglang", edited(surprise=3), ["surprise 3", "unknown here"]),
    "unknown, off": ("sglang", edited(surprise=False), ["surprise False"]),
    "scale": ("sglang", edited(embedding_multiplier=12.0), ["embedding_multiplier 12.0", "1.0"]),
    "logit scale": ("sglang", edited(logit_scale=0.5), ["logit_scale 0.5", "only 1.0"]),
    "parallel": ("sglang", edited(parallel_drafting=True), ["parallel_drafting True"]),
    "partial": ("sglang", edited(partial_rotary_factor=0.5), ["partial_rotary_factor 0.5"]),
    "engine": ("sglang", engine(use_mtp_layernorm=True), ["eagle_config.use_mtp_layernorm True"]),
    "engine, unknown": ("sglang", engine(depth=2), ["eagle_config.depth 2"]),
    "inputs and outputs": (
        "sglang",
        lambda c, w: c.update(
            eagle_aux_hidden_state_layer_ids=[1, 3, 4],
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        ),
        ["eagle_aux_hidden_state_layer_ids [1, 3, 4]", "outputs"],
    ),
    "two layers": ("sglang", both_layers, ["layers.1.", "one layer"]),
    "bases": (
        "sglang",
        edited(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        ["rope_parameters", "1000000.0", "rope_theta is 10000.0 outside"],
    ),
    "nested": ("sglang", edited(rope_parameters=NESTED), ["rope_parameters", "full_attention"]),
    "nested, no entry": (
        "speculators",
        inner(rope_parameters={"full_attention": NESTED["full_attention"]}),
        ["rope_parameters", "sliding_attention"],
    ),
    "yarn": ("sglang", edited(rope_scaling={"rope_type": "yarn"}), ["rope_scaling", "factor"]),
    "rope": ("sglang", edited(rope_parameters=5), ["rope_parameters 5", "table"]),
    "theta": ("sglang", edited(rope_theta="x"), ["rope_theta 'x'", "positive"]),
    "sliding": (
        "sglang",
        edited(layer_types=["sliding_attention"], sliding_window=4),
        ["layer_types ['sliding_attention']", "vLLM"],
    ),
    "residual": ("sglang", edited(norm_before_residual=True), ["norm_before_residual True"]),
    "count": ("sglang", edited(num_aux_hidden_states=4), ["num_aux_hidden_states 4"]),
    "heads": ("sglang", edited(num_attention_heads=2), ["num_attention_heads 2", "32"]),
    "width": ("sglang", lambda c, w: c.pop("hidden_size"), ["hidden_size None", "4096", "32"]),
    "ids": ("sglang", indices, ["t2d", "offsets"]),
    "outer": ("speculators", edited(rope_theta=1e6), ["rope_theta 1000000.0", "unknown"]),
    "kind": ("speculators", edited(speculators_model_type="peagle"), ["speculators_model_type"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_two_readers_would_read_otherwise_is_refused_by_name_and_value(
    tmp_path, target, name, monkeypatch, capfd
):
    layout, change, words = REFUSED[name]
    config, weights = eagle3_files(layout)
    change(config, weights)
    assert_refused(tmp_path, target, config, weights, words, monkeypatch, capfd)


BLOCK_REFUSED = {
    "multiplier": ({"output_multiplier": 2.0}, ["dflash_config.output_multiplier 2.0", "1.0"]),
    "softcap": ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping 30.0"]),
    "scale": ({"input_embedding_scale": 0.5}, ["input_embedding_scale 0.5"]),
    "causal": ({"causal": True}, ["dflash_config.causal True"]),
    "window": ({"use_swa": True, "swa_window_size": 8}, ["dflash_config.use_swa True"]),
    "block": ({"block_size": 8}, ["block_size 4", "8"]),
    "domino": ({"projector_type": "domino"}, ["projector_type 'domino'"]),
}


@pytest.mark.parametrize("name", BLOCK_REFUSED)
def test_a_setting_of_a_block_head_is_refused_by_name_and_value(
    tmp_path, target, name, monkeypatch, capfd
):
    changes, words = BLOCK_REFUSED[name]
    config, weights = peer_layouts.nemo_dflash(target, **changes)
    assert_refused(tmp_path, target, config, weights, words, monkeypatch, capfd)


ODD = (None, -1, 0, "x", [], {}, True, 2.5, {"a": 1}, float("nan"), 10**20)
TRIED = {
    "sglang": ("rope_theta", "rope_scaling", "rope_parameters", "num_attention_heads", "head_dim"),
    "speculators": ("transformer_layer_config", "norm_output", "norm_before_fc"),
}


@pytest.mark.parametrize("layout", TRIED)
def test_no_odd_value_ends_in_another_error(tmp_path, target, layout):
    for key in TRIED[layout]:
        for number, odd in enumerate(ODD):
            config, weights = eagle3_files(layout)
            source = write(tmp_path / f"{key}{number}", config | {key: odd}, weights)
            try:
                import_head(
                    str(source), str(target.folder), tmp_path / f"{key}{number}out", warn=print
                )
            except ValueError as error:
                assert key in str(error)
                assert "\n" not in str(error)


def test_a_tied_head_without_lm_head_needs_a_tied_target(tmp_path, target, monkeypatch, capfd):
    config, weights = eagle3_files("sglang", ids=torch.arange(VOCABULARY))
    del weights["lm_head.weight"]
    config["tie_word_embeddings"] = True
    words = ["tie_word_embeddings True", "SGLang", "vLLM"]
    assert_refused(tmp_path, target, config, weights, words, monkeypatch, capfd)
