"""The optimizers of a run, and its learning rate at every step."""

import math
from typing import Any

import torch
from torch import nn

from pipedraft.train.config import OptimConfig


def make_optimizers(parameters: list[tuple[str, nn.Parameter]], optim: OptimConfig) -> list[Any]:
    """AdamW; or Muon for the matrices inside decoder layers and AdamW for the rest."""
    parameters = [(name, p) for name, p in parameters if p.requires_grad]
    is_hidden = {n: optim.name == "muon" and p.ndim == 2 and "layer" in n for n, p in parameters}
    hidden = [p for n, p in parameters if is_hidden[n]]
    matrices = [p for n, p in parameters if p.ndim >= 2 and not is_hidden[n]]
    vectors = [p for n, p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[Any] = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True))
    if hidden:
        muon = torch.optim.Muon(
            hidden, lr=optim.lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    return optimizers


def rate_factor(step: int, num_steps: int, optim: OptimConfig) -> float:
    """Learning rate of optimizer step ``step`` (0-based) as a share of the peak."""
    warmup = round(optim.warmup_fraction * num_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optim.schedule == "constant":
        return 1.0
    done = (step - warmup) / max(num_steps - warmup, 1)
    shape = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return optim.final_fraction + (1 - optim.final_fraction) * shape
