"""Logits of heads in other projects' formats, by the papers' formulas, from their files."""

# R rows of a text but its last token, H hidden, U draft vocabulary

import torch
import torch.nn.functional as F
from peer_files import BLOCK, IDS, LENGTH, MASK, NUMBERS, SIZES, STEPS, VOCABULARY
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


def steps_by_formula(target, config, weights):
    """Logits [R, U] for every draft token in a chain at every row, with dense masks."""
    is_first = "norm.weight" not in weights
    inner = config.get("transformer_layer_config", config)
    prefix = "midlayer." if any("midlayer" in name for name in weights) else "layers.0."
    rows = LENGTH - 1
    sizes = SIZES | {key: value for key, value in inner.items() if key in SIZES}
    if "rope" in config:
        sizes["rope_parameters"] = config["rope"]
    rotary = LlamaRotaryEmbedding(LlamaConfig(**sizes))

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[name + ".weight"], SIZES["rms_norm_eps"])

    def project(x, name):
        return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    def heads(x, part, turn):
        x = project(x, f"{prefix}self_attn.{part}_proj").unflatten(-1, (-1, 8))
        if f"{prefix}self_attn.{part}_norm.weight" in weights:
            x = norm(x, f"{prefix}self_attn.{part}_norm")
        x = x.transpose(0, 1)[None]
        return x if turn is None else apply_rotary_pos_emb(x, x, *turn)[0]

    hidden = target(input_ids=IDS[None], output_hidden_states=True).hidden_states
    if is_first:
        state = hidden[-1][0, :-1]
    else:
        parts = [hidden[layer][0, :-1] for layer in (2, 4, 5)]
        if config.get("fc_norm"):
            parts = [norm(x, f"fc_norm.{index}") for index, x in enumerate(parts)]
        state = torch.cat(parts, -1)
        state = norm(state, "input_norm") if config.get("norm_before_fc") else state
        state = project(state, "fc")
    tokens, keys, values, out = F.pad(IDS, (0, STEPS)), [], [], []
    masks = [torch.ones(rows, rows, dtype=torch.bool).tril()]
    masks += [torch.eye(rows, dtype=torch.bool)] * (STEPS - 1)
    for step in range(STEPS):
        embedded = target.get_input_embeddings()(tokens[step + 1 : step + 1 + rows])
        if is_first:
            residual = joined = project(torch.cat([embedded, state], -1), "fc")
        else:
            normed = norm(state, prefix + "hidden_norm")
            residual = normed if config.get("norm_before_residual") else state
            joined = torch.cat([norm(embedded, prefix + "input_layernorm"), normed], -1)
        turn = rotary(joined, torch.arange(rows)[None] + step)
        keys.append(heads(joined, "k", turn))
        values.append(heads(joined, "v", None))
        attended = F.scaled_dot_product_attention(
            heads(joined, "q", turn),
            torch.cat(keys, 2),
            torch.cat(values, 2),
            attn_mask=torch.cat(masks[: step + 1], 1),
            enable_gqa=True,
        )
        mixed = residual + project(
            attended[0].transpose(0, 1).flatten(1), f"{prefix}self_attn.o_proj"
        )
        y = norm(mixed, prefix + "post_attention_layernorm")
        gate = F.silu(project(y, prefix + "mlp.gate_proj")) * project(y, prefix + "mlp.up_proj")
        state = mixed + project(gate, prefix + "mlp.down_proj")
        if is_first:
            out.append(target.lm_head(state))
        else:
            read = norm(state, "norm")
            state = read if config.get("norm_output") else state
            out.append(project(read, "lm_head"))
    return out


def block_by_formula(target, weights, anchor):
    """Block states from the file's tensors, with transformers' states and rotation."""
    states = target(input_ids=IDS[None], output_hidden_states=True).hidden_states

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[name + ".weight"], SIZES["rms_norm_eps"])

    def heads(x, name):
        return F.linear(x, weights[name + ".weight"]).unflatten(-1, (-1, 8)).transpose(0, 1)[None]

    joined = torch.cat([states[number + 1][0, :anchor] for number in NUMBERS], -1)
    context = norm(F.linear(joined, weights["fc.weight"]), "hidden_norm")
    x = target.get_input_embeddings()(torch.tensor([int(IDS[anchor])] + [MASK] * (BLOCK - 1)))
    positions = torch.arange(anchor + BLOCK)[None]
    cos, sin = LlamaRotaryEmbedding(target.config)(x, positions)
    for index in range(2):
        at = f"layers.{index}.self_attn."
        normed = norm(x, f"layers.{index}.input_layernorm")
        seen = torch.cat([context, normed])
        # All rows are rotated as queries, too, so that one call serves both; the last ones count.
        query, key = norm(heads(seen, at + "q_proj"), at + "q_norm"), heads(seen, at + "k_proj")
        query, key = apply_rotary_pos_emb(query, norm(key, at + "k_norm"), cos, sin)
        attended = F.scaled_dot_product_attention(
            query[:, :, anchor:], key, heads(seen, at + "v_proj"), enable_gqa=True
        )
        x = x + F.linear(attended[0].transpose(0, 1).flatten(1), weights[at + "o_proj.weight"])
        y, mlp = norm(x, f"layers.{index}.post_attention_layernorm"), f"layers.{index}.mlp."
        gate, up = (F.linear(y, weights[f"{mlp}{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, weights[mlp + "down_proj.weight"])
    return norm(x, "norm")


def greedy_by_formula(config, weights, target, anchor):
    """Logits for the block's draft tokens, each after the best one before it."""
    states = block_by_formula(target, weights, anchor)
    if not config.get("sample_from_anchor", "Qwen3DSparkModel" in config["architectures"]):
        states = states[1:]
    ids = torch.arange(VOCABULARY)
    if "d2t" in weights:
        ids = torch.arange(len(weights["d2t"])) + weights["d2t"]
    token, out = int(IDS[anchor]), []
    for row in states:
        logits = target.lm_head.weight[ids] @ row
        if "markov_head.markov_w1.weight" in weights:
            pair = weights["markov_head.markov_w1.weight"][token]
            logits = logits + weights["markov_head.markov_w2.weight"] @ pair
        out.append(logits)
        token = int(ids[logits.argmax()])
    return torch.stack(out)
