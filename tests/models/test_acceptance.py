"""The trial of a target's family: it decodes like transformers, and planted faults are found."""

import pytest
import torch
import transformers as hf
from staged_targets import continue_the_row_before
from transformers.models.llama import modeling_llama

from pipedraft.models import families
from pipedraft.models.families import check_target
from pipedraft.models.speed.plain_layers import PlainLayer
from pipedraft.models.stages import acceptance, stage_layers
from pipedraft.models.stages.acceptance import trial
from pipedraft.models.stages.stage import Stage
from pipedraft.models.transformer import decoder, stage_cache
from pipedraft.models.transformer.decoder import LayerPositions
from pipedraft.models.transformer.rotary_lengths import FollowingTable
from pipedraft.models.transformer.small_copy import NUM_LAYERS, small_copy
from pipedraft.models.transformer.stage_cache import StageCache

HYBRID = ["linear_attention"] * 3 + ["full_attention"]
GRANITE = dict(
    layer_types=HYBRID * 10,
    num_local_experts=8,
    mamba_n_heads=128,
    mamba_d_head=64,
    shared_intermediate_size=512,
)
LATENT = dict(kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [1.0 + x for x in range(48)]}
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64),
    "llama_of_one_layer": lambda: hf.LlamaConfig(num_hidden_layers=1),
    "qwen3": hf.Qwen3Config,
    "gemma2": hf.Gemma2Config,
    "gemma3": hf.Gemma3Config,
    "gpt_oss": hf.GptOssConfig,
    "deepseek_v3": hf.DeepseekV3Config,
    "phi3_long": lambda: hf.Phi3Config(rope_parameters=LONG | FACTORS),
    "qwen3_dynamic": lambda: hf.Qwen3Config(rope_parameters=DYNAMIC),
    "qwen3_5": hf.Qwen3_5Config,
    "granite_hybrid": lambda: hf.GraniteMoeHybridConfig(num_hidden_layers=40, **GRANITE),
    "kimi_linear": lambda: hf.KimiLinearConfig(layer_types=HYBRID * 7, num_hidden_layers=28),
    "bailing_hybrid": hf.BailingHybridConfig,
}


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(acceptance, "_results", {})
    monkeypatch.setattr(families, "_lacks", {})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_passes_its_trial_at_any_size(name):
    config = CONFIGS[name]()
    before = config.to_json_string(use_diff=False)
    check_target(config, name)
    assert config.to_json_string(use_diff=False) == before
    small = small_copy(config).get_text_config()
    kinds = decoder.layer_kinds(config.get_text_config())
    assert set(decoder.layer_kinds(small)) == set(kinds)
    is_one = config.get_text_config().num_hidden_layers == 1
    assert small.num_hidden_layers == (2 if is_one else NUM_LAYERS) and small.hidden_size == 32


# -- planted faults: (family, what is replaced, the replacement) -------------------------------


def hands_out_a_copy(self, name, place):
    """The state is handed out and forgotten, also when a layer changes it in place."""
    known = [getattr(state, name) for state in self._before]
    if any(place not in states for states in known):
        return None
    return torch.cat([states[place] for states in known])


def keeps_the_last_state(self, keep, move=None):
    last = self._states[-1]
    KEEP(self, keep, move)
    self._states = [last] * len(self._states)


def saves_under_another_name(self, state, layer_idx, state_idx=0):
    self._remember("recurrent", (layer_idx + 100, state_idx), state)
    return state


def drops_the_second_part(self, keys, values, layer_idx):
    """A latent cache that keeps the latents, and zeros for the rotary part."""
    keys_1NCD, values_1NCD = UPDATE(self, keys, values, layer_idx)
    return keys_1NCD, values_1NCD * 0


def stays_at_the_start(self, hidden, positions, kinds, length=None):
    return CALL(self, hidden, positions * 0, kinds, length)


def turns_by_the_longest(self, rows, ids, kind, length):
    return self._turn(rows, ids, kind, int(ids.max()) + 1)


def sees_everything(self, visible_lS, positions_C, dtype):
    self.window = None
    return MASKS(self, visible_lS, positions_C, dtype)


def sees_its_siblings(visible_lS, *others, **more):
    num_rows, lo = len(visible_lS), visible_lS.shape[1] - len(visible_lS)
    return MASK(torch.ones_like(visible_lS).tril(lo) if num_rows else visible_lS, *others, **more)


def forgets_a_norm(self, *given, **more):
    self.has_head_norms, self._kernels = False, None
    return PLAIN(self, *given, **more)


def remembers_in_the_module(self, x):
    """A layer with a state outside of the cache."""
    out = MLP(self, x)
    before = getattr(self, "memory", torch.zeros_like(out[:, -1:]))
    self.memory = out[:, -1:]
    return out + before


KEEP, UPDATE, CALL = StageCache.keep, StageCache.update, LayerPositions.__call__
MASKS, MASK, PLAIN = Stage.masks, stage_cache.additive_mask, PlainLayer.__call__
MLP = modeling_llama.LlamaMLP.forward
RECURRENT = ("qwen3_5", "granite_hybrid", "kimi_linear", "bailing_hybrid")
FAULTS = [
    ("granite_hybrid", StageCache, "_hand_out", hands_out_a_copy),
    *((name, StageCache, "keep", keeps_the_last_state) for name in RECURRENT),
    *((name, StageCache, "get_conv_state", lambda *_, **more: None) for name in RECURRENT),
    ("qwen3_5", StageCache, "get_recurrent_state", lambda *_, **more: None),
    ("qwen3_5", StageCache, "update_recurrent_state", saves_under_another_name),
    ("deepseek_v3", StageCache, "update", drops_the_second_part),
    *((x, LayerPositions, "__call__", stays_at_the_start) for x in ("llama", "gemma3", "gpt_oss")),
    ("phi3_long", FollowingTable, "__call__", turns_by_the_longest),
    ("qwen3_dynamic", FollowingTable, "__call__", turns_by_the_longest),
    *((name, Stage, "masks", sees_everything) for name in ("gemma2", "gemma3", "gpt_oss")),
    ("llama", stage_layers, "additive_mask", sees_its_siblings),
    ("qwen3", PlainLayer, "__call__", forgets_a_norm),
    ("llama", modeling_llama.LlamaMLP, "forward", remembers_in_the_module),
]


@pytest.mark.parametrize(("name", "place", "part", "mutant"), FAULTS)
def test_a_planted_fault_is_found(name, place, part, mutant, monkeypatch):
    config = CONFIGS[name]()
    monkeypatch.setattr(place, part, mutant)
    assert "has other logits than in transformers" in (trial(config) or "")


@pytest.mark.parametrize("name", RECURRENT)
def test_a_row_that_continues_another_branch_is_found(name, monkeypatch):
    config = CONFIGS[name]()
    continue_the_row_before(monkeypatch)
    with pytest.raises(ValueError, match="cannot be cut into stages: .* of a small copy has other"):
        check_target(config, name)
