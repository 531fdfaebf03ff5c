"""A CUDA device made from CPU memory: finds mixed devices, launches and host synchronizations.

``with pretended_cuda() as log:`` lets tensors be moved to cuda:0 and cuda:1. They compute on the
CPU, to the bit, and refuse what CUDA refuses (an operation on tensors from two devices). The log
counts slow events on a GPU: kernel launches, copies to the device, and waits by the host. Load
modules before and move them inside.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten
CPU = torch.device("cpu")
WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"}
WAITS |= {"_unique2", "unique_dim", "unique_consecutive", "bincount"}
FREE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh"}
FREE |= {"detach", "alias", "_unsafe_view", "_reshape_alias"}
"""Operations without a kernel: memory, or another view of it."""


class MixedDevices(RuntimeError):
    pass


@dataclass
class Log:
    """Log of events: kernels by operation; meetings of host and device also by place."""

    launches: Counter[str] = field(default_factory=Counter)
    """Kernels outside CUDA graphs."""
    replayed: Counter[str] = field(default_factory=Counter)
    """Kernels inside CUDA graphs."""
    uploads: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Copies from the host to the device."""
    syncs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Waits: the host reads values computed by the device."""
    captured: list[Callable[[], None]] | None = None
    """Work in the graph under capture."""
    _as_one: bool = False

    def clear(self) -> None:
        for counter in (self.launches, self.replayed, self.uploads, self.syncs):
            counter.clear()

    def launch(self, name: str) -> None:
        if not self._as_one:
            (self.launches if self.captured is None else self.replayed)[name] += 1

    @contextmanager
    def one_kernel(self, name: str) -> Iterator[None]:
        """Count several CPU operations as one kernel."""
        self.launch(name)
        before, self._as_one = self._as_one, True
        try:
            yield
        finally:
            self._as_one = before

    def record(self, compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Replace the function that captures a CUDA graph.

        A replay runs the captured kernels with the captured memory and host numbers.
        """

        kernels, work = Counter[str](), list[Callable[[], None]]()

        def replay() -> None:
            if not kernels:
                capture()
                return
            self.replayed.update(kernels)
            with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
                for run in work:
                    run()

        def capture() -> None:
            self.captured = work
            waits, before = (self.syncs.total(), self.uploads.total()), self.replayed.copy()
            compute()
            self.captured = None
            kernels.update(self.replayed - before)
            assert kernels, "a graph of nothing"
            assert (self.syncs.total(), self.uploads.total()) == waits, (
                "a graph cannot wait for the host"
            )

        return replay


@cache
def _own_file(name: str) -> str:
    """Path in the repository; "" for a library's or a test's file."""
    path = Path(name)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] in (".venv", "tests"):
        return ""
    return str(path.relative_to(ROOT))


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        if own := _own_file(frame.f_code.co_filename):
            return f"{own}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return "elsewhere"


class Pretended(Tensor):
    """A tensor that claims to be on a GPU; its contents are on the CPU.

    To the library below Python it is a meta tensor. The meta device has no kernels, so none can be
    called by mistake.
    """

    held: Tensor
    place: torch.device
    is_cuda = True  # type: ignore[assignment]  # else properties of what it is to the library
    is_meta = False  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, place: torch.device) -> Pretended:
        own = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device="meta",
        )
        own.held, own.place = held, place
        return own

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    def get_device(self) -> int:
        return self.place.index

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.held!r}, {self.place})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func}: outside of pretended_cuda()")


def _device(given: Any) -> torch.device | None:
    if given is None:
        return None
    device = torch.device(given)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


class _Kind(NamedTuple):
    """Properties shared by every call of an operation."""

    name: str
    is_kernel: bool
    is_reshaped: bool
    is_written: bool
    """The operation writes to its first argument."""
    returns: bool


@cache
def _kind(func) -> _Kind:
    name, arguments = func.__name__.partition(".")[0], func._schema.arguments
    written = arguments and arguments[0].alias_info
    return _Kind(
        name,
        not func.is_view and name not in FREE,
        torch.Tag.inplace_view in func.tags,
        bool(written and written.is_write),
        bool(func._schema.returns),
    )


class _Kernels(TorchDispatchMode):
    """Runs every operation on the contents, and counts the events on a GPU."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.place = torch.device("cuda", 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return True: nothing is compiled here, and the default check takes as long as the rest of
        a call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = _kind(func)
        tensors: list[Tensor] = []
        inputs = _held(args, tensors)
        options = dict(zip(kwargs, _held(kwargs.values(), tensors), strict=True))
        pretended = [x for x in tensors if type(x) is Pretended]
        wanted = _device(kwargs.get("device"))
        if wanted is not None and wanted.type == "meta":  # the library's own idea of a Pretended
            wanted = pretended[0].place if pretended else self.place
        if not pretended and (wanted is None or wanted.type != "cuda"):
            return func(*args, **kwargs)
        place = wanted or (None if kind.name == "copy_" else pretended[0].place)
        self.place = pretended[0].place if pretended else self.place
        if kind.is_reshaped:
            raise NotImplementedError(f"{func} on {place}: its shape would not be seen")
        self._check(func, kind.name, args, tensors, pretended)
        is_kernel = self._count(kind, args, kwargs, pretended, place)
        if options.get("device") is not None:
            options["device"] = CPU
        options.pop("pin_memory", None)
        out = _run(func, inputs, options)
        if is_kernel:
            if self.log.captured is not None:
                self.log.captured.append(_again(func, inputs, options, out))
            if any(x.numel() for x in _tensors([out]) or tensors):
                self.log.launch(kind.name)
        if isinstance(kwargs.get("out"), Pretended):
            return kwargs["out"]
        if kind.is_written:
            return args[0] if kind.returns else None
        if place is None or place.type != "cuda":
            return out
        return _placed(out, place)

    def _check(self, func, name, args, tensors, pretended) -> None:
        if name in ("copy_", "_to_copy", "_copy_from") or not pretended:
            return
        place = pretended[0].place
        others = [x for x in tensors if getattr(x, "place", CPU) != place and x.ndim]
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            # The host's index tensors may pick from a tensor on the device.
            indices = {id(x) for x in _tensors(args[1])}
            others = [x for x in others if id(x) not in indices or x.device.type == "cuda"]
            if not isinstance(args[0], Pretended):
                others = [args[0]]
        if others:
            devices = sorted({str(x.device) for x in tensors})
            raise MixedDevices(f"{func}: tensors on {' and '.join(devices)} at {_place()}")

    def _count(self, kind, args, kwargs, pretended, place) -> bool:
        """Count copies and waits; return True for an operation that launches a kernel."""
        log, name = self.log, kind.name
        if name == "_to_copy" and not (pretended and pretended[0].place == place):
            copies = log.syncs if place.type == "cpu" else log.uploads
            copies["copy", _place()] += 1
            return False
        if name == "copy_" and len(pretended) == 1:
            copies = log.uploads if isinstance(args[0], Pretended) else log.syncs
            copies["copy", _place()] += 1
            return False
        if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            log.syncs[name, _place()] += 1
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            for x in _tensors(args[1]):
                if x.dtype == torch.bool:
                    log.syncs[f"{name} by bool", _place()] += 1
                if not isinstance(x, Pretended):
                    log.uploads[f"{name} by the host's", _place()] += 1
        return kind.is_kernel


def _placed(x: Any, place: torch.device) -> Any:
    if isinstance(x, Tensor):
        return Pretended(x, place)
    return type(x)(_placed(part, place) for part in x) if isinstance(x, list | tuple) else x


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += _tensors(x)
    return found


def _held(values: Iterable[Any], tensors: list[Tensor]) -> list[Any]:
    """Contents to run operations on; add the tensors among the values to a list."""
    held = []
    for x in values:
        if type(x) is Pretended:
            tensors.append(x)
            x = x.held
        elif isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, list | tuple):
            x = type(x)(_held(x, tensors))
        held.append(x)
    return held


def _run(func, args, kwargs) -> Any:
    """Run the CPU's kernel. Its flash attention takes fewer arguments, and its products cannot have
    another dtype than their factors."""
    if func in (aten.mm.dtype, aten.addmm.dtype_out) and args[0].device == CPU:
        *factors, dtype = args
        own = getattr(aten, func.__name__.partition(".")[0])
        return own(*(x.to(dtype) for x in factors), **kwargs)
    if func is aten._scaled_dot_product_flash_attention.default:
        query, keys, values = (x.contiguous() for x in args[:3])
        is_causal, scale = args[4], kwargs.get("scale")
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, is_causal, scale=scale
        )
        sizes = (query.shape[2], keys.shape[2])
        return (out, logsumexp, None, None, *sizes, None, None, None)
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        gradient, query, keys, values, out, logsumexp = (x.contiguous() for x in args[:6])
        is_causal = args[11]
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, keys, values, out, logsumexp, 0.0, is_causal, scale=kwargs.get("scale")
        )
    return func(*args, **kwargs)


def _again(func, args, kwargs, out) -> Callable[[], None]:
    """Return a graph's kernel: reads and writes the same memory on every call."""
    own = {x.untyped_storage()._cdata for x in _tensors(args) + _tensors(kwargs.values())}
    fresh = [x for x in _tensors([out]) if x.untyped_storage()._cdata not in own]

    def run() -> None:
        made = _run(func, args, kwargs)
        if fresh:
            for old, new in zip(fresh, _tensors([made]), strict=True):
                old.copy_(new)

    return run


FUSED = ("scaled_dot_product_attention", "rms_norm")
"""Several operations on a CPU, one kernel on a GPU."""
MATRIX_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "__matmul__")


class _Calls(TorchFunctionMode):
    """Decisions that the library below makes by device before an operation is dispatched."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "to":
            return self._move(func, args, kwargs)
        if name in ("tolist", "numpy") and isinstance(args[0], Pretended):
            return func(args[0].detach().cpu())
        if name in ("tensor", "as_tensor", "new_tensor"):
            given = _device(kwargs.pop("device", None))
            if name == "new_tensor":
                func, given = torch.tensor, given or args[0].device
                kwargs.setdefault("dtype", args[0].dtype)
                args = args[1:]
            made = func(*args, **kwargs)
            return made if given is None else made.to(given)
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], Pretended):
            args = (args[0], _listed(args[1], args[0].place), *args[2:])
        if kwargs.get("device") is not None:
            kwargs["device"] = _device(kwargs["device"])
        is_cast = name in MATRIX_PRODUCTS and "out_dtype" not in kwargs
        is_cast |= func is F.scaled_dot_product_attention
        if is_cast and torch.is_autocast_enabled("cuda"):
            args, kwargs = tree_map(_autocast, (args, kwargs))
        if name in FUSED and any(isinstance(x, Pretended) for x in args) and args[0].numel():
            with self.log.one_kernel(name):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _move(func, args, kwargs) -> Any:
        """Move a tensor; do nothing if it is already in place."""
        own, *rest = args
        words = [*rest, *kwargs.values()]
        like = [x for x in words if isinstance(x, Tensor)]
        dtypes = [x.dtype for x in like] + [x for x in words if isinstance(x, torch.dtype)]
        devices = [x.device for x in like]
        devices += [_device(x) for x in words if isinstance(x, str | torch.device)]
        changes: dict[str, Any] = {"dtype": dtypes[0]} if dtypes else {}
        if devices and devices[0] != own.device:
            changes["device"] = devices[0]
        return func(own, **changes) if changes else own


def _listed(index: Any, place: torch.device) -> Any:
    """Turn lists in an index into tensors copied to the device."""
    if isinstance(index, list):
        return torch.tensor(index, dtype=None if index else torch.long).to(place)
    return tuple(_listed(x, place) for x in index) if isinstance(index, tuple) else index


def _autocast(x: Any) -> Any:
    if isinstance(x, Pretended) and x.is_floating_point():
        return x.to(torch.get_autocast_dtype("cuda"))
    return x


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


class _Event:
    """Event on the host's clock: kernels take no other time here."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


@contextmanager
def pretended_cuda(*, num_devices: int = 2) -> Iterator[Log]:
    """Allow tensors on cuda:0, cuda:1, ..; yield the log of their events."""
    log, cuda = Log(), torch.cuda
    library = torch.__future__
    before = library.get_overwrite_module_params_on_conversion()
    stands_for = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "graph_pool_handle": lambda: (0, 0),
        "get_device_name": lambda device=0: "pretended",
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "Event": _Event,
        "synchronize": lambda device=None: log.syncs.update([("synchronize", _place())]),
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    with ExitStack() as stack:
        library.set_overwrite_module_params_on_conversion(True)
        stack.callback(library.set_overwrite_module_params_on_conversion, before)
        for name, other in stands_for.items():
            stack.enter_context(mock.patch.object(cuda, name, other))
        no_autocast = "torch.cuda.amp.common.amp_definitely_not_available"
        stack.enter_context(mock.patch(no_autocast, lambda: False))
        stack.enter_context(
            mock.patch(
                "pipedraft.models.speed.cuda_graphs._capture", lambda c, d, _: log.record(c, d)
            )
        )
        # Tensors of inference mode cannot be wrapped; without gradients they compute the same.
        for name in ("__enter__", "__exit__"):
            other = getattr(torch.no_grad, name)
            stack.enter_context(mock.patch.object(torch.inference_mode, name, other))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda x: x))
        stack.enter_context(mock.patch("torch.Generator", _Generator))
        stack.enter_context(_Kernels(log))
        stack.enter_context(_Calls(log))
        yield log
