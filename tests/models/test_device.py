"""The pretended GPU finds the operations that a real GPU refuses or waits for."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from pretended_device import MixedDevices, pretended_cuda
from tiny_models import tiny_llama
from torch import nn

from pipedraft.devices import place_draft, resolve_device, resolve_dtype
from pipedraft.inference.timeline import WAIT, Timeline
from pipedraft.models.transformer.layers import LayerConfig, RotaryEmbedding

CUDA = "cuda:0"
MIXED = {
    "two devices": lambda x: x + torch.ones(4),
    "two GPUs": lambda x: x + torch.ones(4, device="cuda:1"),
    "a matrix of the host": lambda x: F.linear(x[None], torch.ones(4, 4)),
    "ids of the host": lambda x: F.embedding(torch.tensor([1]), x[:, None]),
    "cat": lambda x: torch.cat([x, torch.ones(1)]),
    "written values": lambda x: x.index_put_((torch.tensor([1]),), torch.ones(1)),
    "picked by the device": lambda x: torch.ones(4)[x.long()],
}
SYNCS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(force=True),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "boolean write": lambda x: x.__setitem__(x > 0, 1.0),
    "unique": lambda x: x.unique_consecutive(),
    "copied into the host": lambda x: torch.zeros(4).copy_(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
UPLOADS = {
    "to": lambda x: torch.ones(2).to(CUDA),
    "tensor": lambda x: torch.tensor([1, 2], device="cuda"),
    "list": lambda x: x[[0, 2]],
    "copy_": lambda x: x.copy_(torch.ones(4)),
}
LAUNCHES = {
    "add": (1, lambda x: x + 1),
    "in place": (1, lambda x: x.add_(x)),
    "views": (0, lambda x: x[1:].view(3, 1).expand(3, 2).transpose(0, 1)),
    "where it is already": (0, lambda x: x.to("cuda:0")),
    "a number of the host": (1, lambda x: x * torch.tensor(2.0)),
    "linear": (1, lambda x: F.linear(x[None], torch.ones(4, 4, device=CUDA))),
    "norm": (1, lambda x: F.rms_norm(x, (4,))),
}


@pytest.mark.parametrize("compute", MIXED.values(), ids=MIXED)
def test_mixed_devices_are_refused(compute):
    with pretended_cuda(), pytest.raises(MixedDevices, match="tensors on c"):
        compute(torch.arange(4.0).to(CUDA))


@pytest.mark.parametrize("compute", SYNCS.values(), ids=SYNCS)
def test_a_wait_of_the_host_is_counted(compute):
    with pretended_cuda() as log:
        x = torch.arange(4.0).to(CUDA)
        log.clear()
        compute(x)
    assert log.syncs.total() == 1, log


def test_a_replayed_graph_reads_memory_anew_and_numbers_of_the_host_never():
    """As in a CUDA graph: code that needs a new host number each time decodes wrongly here too."""
    with pretended_cuda() as log:
        x, out, factor = torch.ones(2, device=CUDA), torch.zeros(2, device=CUDA), [2.0]
        replay = log.record(lambda: out.copy_(x * factor[0] + 1), CUDA)
        replay()
        first = out.tolist()
        log.clear()
        x.fill_(5.0)
        factor[0] = 100.0
        replay()
        assert (first, out.tolist()) == ([3.0, 3.0], [11.0, 11.0])
        assert log.replayed == {"mul": 1, "add": 1, "copy_": 1}


@pytest.mark.parametrize("compute", UPLOADS.values(), ids=UPLOADS)
def test_a_copy_to_the_device_is_counted(compute):
    with pretended_cuda() as log:
        x = torch.arange(4.0).to(CUDA)
        log.clear()
        compute(x)
    assert (log.uploads.total(), log.syncs.total()) == (1, 0), log


@pytest.mark.parametrize(("number", "compute"), LAUNCHES.values(), ids=LAUNCHES)
def test_kernels_are_counted(number, compute):
    with pretended_cuda() as log:
        x = torch.arange(4.0).to(CUDA)
        ones = log.launches["ones"]
        log.clear()
        compute(x)
    assert log.launches.total() - log.launches["ones"] == number + ones, log


def test_values_and_gradients_are_the_cpus():
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    layer(x).square().sum().backward()
    expected = layer.weight.grad.clone()
    with pretended_cuda():
        layer.zero_grad()
        layer.to(CUDA)
        assert str(layer.weight.device) == CUDA and layer.weight.is_cuda
        layer(x.to(CUDA)).square().sum().backward()
        assert torch.equal(layer.weight.grad.cpu(), expected)


# -- placement --------------------------------------------------------------------------------


def rotary(**changes) -> RotaryEmbedding:
    return RotaryEmbedding(LayerConfig.from_target(tiny_llama(layers=1, **changes).config))


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half()])
def test_rotary_tables_do_not_depend_on_the_dtype_of_the_module(cast):
    positions = torch.tensor([100, 500, 30_000])
    expected, found = rotary()(positions, torch.float32), cast(rotary())
    for table, other in zip(expected, found(positions, torch.float32), strict=True):
        assert torch.equal(table, other)
    with pretended_cuda():
        assert str(found.to(CUDA, torch.bfloat16).frequencies.device) == CUDA


def test_a_draft_goes_to_its_target_in_its_dtype():
    target = tiny_llama(layers=1).to(torch.bfloat16)
    draft = nn.ModuleDict({"linear": nn.Linear(2, 2), "rotary": rotary()})
    with pretended_cuda():
        target.to(CUDA)
        place_draft(draft, target)
        assert str(draft["linear"].weight.device) == CUDA
        assert draft["linear"].weight.dtype == torch.bfloat16
        assert draft["rotary"].frequencies.dtype == torch.float32


@pytest.mark.parametrize(
    ("stored", "device", "is_native", "expected"),
    [
        ("bfloat16", "cpu", True, "float32"),
        ("bfloat16", "cuda", True, "bfloat16"),
        ("bfloat16", "cuda", False, "float16"),
        ("float16", "cuda", False, "float16"),
        ("float32", "cuda", True, "float32"),
    ],
)
def test_the_dtype_is_the_stored_one_where_it_is_native(
    tmp_path, monkeypatch, stored, device, is_native, expected
):
    tiny_llama(layers=1).to(getattr(torch, stored)).save_pretrained(tmp_path)
    # An emulated bfloat16 counts as supported unless it is left out.
    supported = lambda including_emulation=True: including_emulation or is_native  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    found = resolve_dtype("auto", torch.device(device), str(tmp_path))
    assert found == getattr(torch, expected)
    assert resolve_dtype("float16", torch.device(device), str(tmp_path)) == torch.float16


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="--device: 'cuda:7' cannot be used .* give cpu or leave"):
        resolve_device("cuda:7")
    assert resolve_device("cpu") == torch.device("cpu")


def test_a_torch_built_for_gpus_takes_the_cpu_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


# -- times ------------------------------------------------------------------------------------


class FakeEvent:
    """A clock that advances with launched work, not with host time."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at_ms - self.at_ms

    def synchronize(self) -> None:
        pass


def test_spans_of_a_gpu_add_up_to_its_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "now_ms", 0.0)
    monkeypatch.setattr("pipedraft.inference.timeline.MAX_PENDING", 3)
    host = SimpleNamespace(monotonic=lambda: 0.0)  # a busy machine's own would go on between spans
    monkeypatch.setattr("pipedraft.inference.timeline.time", host)
    timeline = Timeline("stage 0", device=torch.device("cuda", 0))

    def work(ms: float) -> None:
        FakeEvent.now_ms += ms

    for _ in range(5):
        with timeline.span("stage", 2):
            work(30)
            with timeline.span("verify"):
                work(5)
            work(1)
        with timeline.span("draft"):
            work(4)
        with timeline.span(WAIT):
            pass
    found = timeline.report()
    expected = {"stage": 5 * 0.031, "verify": 5 * 0.005, "draft": 5 * 0.004, WAIT: 0.0}
    assert found["seconds"] == pytest.approx(expected)
    assert found["rows"]["stage"] == 10 and found["counts"]["verify"] == 5
