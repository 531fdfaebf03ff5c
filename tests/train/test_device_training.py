"""A run's start with several processes, and on other kinds of devices."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from device_runs import train_on_gpu
from tiny_models import tiny_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipedraft.models.heads.draft import Draft
from pipedraft.models.target import capture_hidden, load_target
from pipedraft.models.target_part import load_target_part
from pipedraft.train.launch import FSDP_PRECISION, resolve_dtype, shard_target
from pipedraft.train.methods import methods
from pipedraft.train.objective import LossOutput


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(device=torch.device("cpu"), num_processes=1)
    dist.destroy_process_group()


def test_a_sharded_target_is_sharded_after_a_forward(one_rank):
    """By default an FSDP root keeps its weights gathered after a forward; each layer is a root."""
    target = tiny_llama(layers=2)
    ids_BT = torch.arange(6)[None]
    expected = capture_hidden(target, ids_BT, {2})[2]
    shard_target(target, one_rank)
    for _ in range(2):
        assert torch.equal(capture_hidden(target, ids_BT, {2})[2], expected)
        for layer in target.model.layers:
            assert all(isinstance(weight, DTensor) for weight in layer.parameters())


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        rows = self.linear(x)
        loss = rows.float().sum()
        return LossOutput(loss, torch.tensor(len(x)), {"sum": loss.detach()})


def test_bf16_of_fsdp_computes_in_bf16_and_counts_in_fp32(one_rank):
    module, found = Sums(), []
    module.linear.register_forward_hook(lambda *call: found.append(call[-1].dtype))
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)), mp_policy=FSDP_PRECISION)
    output = module(torch.randn(3, 4))
    assert found == [torch.bfloat16]
    assert output.loss.dtype == output.sums["sum"].dtype == torch.float32
    output.loss.backward()
    assert module.linear.weight.grad.dtype == torch.float32
    assert FSDP_PRECISION.reduce_dtype == torch.float32


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_a_target_without_autocast_is_of_the_dtype_that_it_meets(tmp_path, stored):
    """DeepSpeed casts the draft to bfloat16 and nothing else."""
    tiny_llama(layers=1).to(getattr(torch, stored)).save_pretrained(tmp_path)
    run = SimpleNamespace(target_dtype="auto", target=str(tmp_path), target_revision=None)
    assert resolve_dtype(run, "bf16", has_autocast=False) == torch.bfloat16
    is_half = stored == "bfloat16"
    assert resolve_dtype(run, "bf16") == (torch.bfloat16 if is_half else torch.float32)
    assert resolve_dtype(run, "no", has_autocast=False) == torch.float32


SCHEMES = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "compressed-tensors": {"quant_method": "compressed-tensors"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_weights_without_meaning_are_refused(tmp_path, scheme):
    """Such weights, read as numbers without their scales, decode noise."""
    target = tiny_llama(layers=1)
    target.config.quantization_config = scheme
    target.config.save_pretrained(tmp_path)
    for load in (
        lambda: load_target(str(tmp_path)),
        lambda: load_target_part(str(tmp_path), layers=(0,), has_embedding=True, has_head=True),
    ):
        with pytest.raises(ValueError, match="is stored quantized .* give the unquantized check"):
            load()


MAX_SYNCS = 4
"""One in the target's forward; in a step one each for the gradient norm, the sums over all
processes, and the number of tokens."""


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("method", methods())
def test_no_operation_of_training_sees_two_devices(world, tmp_path, method, packing):
    """The host waits for the device once in a micro-batch, and three times in a step."""
    log, norm = train_on_gpu(world, method, tmp_path, packing=packing)
    assert norm > 0
    assert log.syncs.total() <= MAX_SYNCS, log.syncs


SLOW_TO_TRACE = [pytest.param(name, marks=pytest.mark.all) for name in ("spd", "eagle3")]


@pytest.mark.parametrize("method", ["ppsd", "eagle", "dflash", "flexspec", *SLOW_TO_TRACE])
def test_a_layer_of_a_draft_is_one_graph_to_the_compiler(world, tmp_path, monkeypatch, method):
    """No part, backward included, returns to Python between two launches."""
    AcceleratorState._reset_state()
    trainer = world.trainer(method, tmp_path, batch_tokens=64, data__max_length=64)
    batch, traced, right = trainer.load(trainer.data.train, [0]), [], Draft.compute

    def compute(draft, layer, *inputs):
        if len(traced) > 2:  # the others are the same ones again
            return right(draft, layer, *inputs)
        torch._dynamo.reset()
        traced.append(layer)
        return torch.compile(layer, fullgraph=True, backend="eager")(*inputs)

    loss = trainer.objective(batch, torch.Generator().manual_seed(0)).loss
    monkeypatch.setattr(Draft, "compute", compute)
    assert trainer.objective(batch, torch.Generator().manual_seed(0)).loss == loss
    assert traced


def test_an_evaluation_holds_no_more_tokens_than_a_step(world, tmp_path, monkeypatch):
    AcceleratorState._reset_state()  # from runs on the GPU, with another precision
    trainer = world.trainer("ppsd", tmp_path, batch_tokens=64, data__valid_fraction=0.5)
    sizes, load = [], trainer.load

    def measured(*arguments):
        batch = load(*arguments)
        sizes.append(batch.ids_BT.numel())
        return batch

    monkeypatch.setattr(trainer, "load", measured)
    trainer.evaluate()
    assert len(sizes) > 1 and max(sizes) <= 64
