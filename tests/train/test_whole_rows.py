"""Training in bfloat16 on a CPU: products with few numbers of rows."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

from pipedraft.models.speed import cpu
from pipedraft.train.batch import Batch
from pipedraft.train.eagle3 import Eagle3Objective
from pipedraft.train.methods import Eagle3TrainConfig, SPDTrainConfig
from pipedraft.train.spd import SPDObjective

KINDS = {
    "spd": (SPDObjective, SPDTrainConfig(num_stages=4, num_layers=2)),
    "eagle3": (Eagle3Objective, Eagle3TrainConfig(num_steps=3)),
}


class Products(TorchDispatchMode):
    """Collect the sizes of the matrix products in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            if left.dtype == torch.bfloat16:
                self.sizes |= {*left.shape, *right.shape}
        return func(*args, **(kwargs or {}))


def make_batch(seed: int, *, packing: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(70, 200, (3,), generator=generator).tolist()
    ids = [torch.randint(1, 30, (n,), generator=generator).tolist() for n in lengths]
    rows = [{"input_ids": row, "loss_mask": [1] * len(row)} for row in ids]
    return Batch.packed(rows) if packing else Batch.padded(rows, 0)


def sizes_with(objective, batches) -> set[int]:
    """Return the products' sizes that are in one of two batches only."""
    found = []
    for batch in batches:
        products = Products()
        with torch.autocast("cpu", torch.bfloat16), products:
            result = objective(batch, torch.Generator().manual_seed(0))
        with products:
            result.loss.backward()
        found.append(products.sizes)
    assert all(found)
    return found[0] ^ found[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", [False, True])
def test_products_of_different_batches_differ_by_whole_rows(kind, packing):
    """Known-bad: layers as torch has them."""
    objective_class, config = KINDS[kind]
    no_data = SimpleNamespace(report=SimpleNamespace(to_dict=dict))
    target = tiny_llama(layers=8)
    objective = objective_class(config, target, target_name="tiny", revision=None, data=no_data)
    batches = [make_batch(seed, packing=packing) for seed in (0, 1)]
    assert any(size % cpu.ROW_MULTIPLE for size in sizes_with(objective, batches))
    cpu.lay_out(target)
    cpu.lay_out(objective)
    found = sizes_with(objective, batches)
    assert not [size for size in found if size % cpu.ROW_MULTIPLE], found
