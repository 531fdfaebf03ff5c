"""Running networks without their numbers, to see how many bytes and FLOPs a step takes."""

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``with LiveBytes() as memory:`` counts the storages that operations inside make.

    Networks of ``without_numbers`` run inside, too. Numbers that decide about shapes (ids, masks,
    lengths) stay real, so that what depends on them is computed as in a run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes of the storages that exist now."""
        self.peak = 0
        """Most of them at a time."""
        self._shapes_alone = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: set[int] = set()

    def without_numbers(self, network: nn.Module) -> None:
        """Turn a network on the meta device into one that this runs as if it were on a CPU."""
        with self._shapes_alone:
            network.to_empty(device="cpu")

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor without numbers."""
        with self._shapes_alone:
            made = torch.empty(shape, dtype=dtype)
        self._note(made, made.untyped_storage().nbytes())
        return made

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = (args, kwargs or {})
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        for tensor in tensors:  # what was there before does not count, nor do views of it
            self._note(tensor, 0)
        if any(isinstance(x, FakeTensor) for x in tensors):
            if func is torch.ops.aten.index.Tensor:
                given = ((args[0], _places(args[1])), {})
            with self._shapes_alone:
                made = func(*given[0], **given[1])
        else:
            made = func(*args, **given[1])
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor, tensor.untyped_storage().nbytes())
        return made

    def _note(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _places(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Masks as the places where they are true, of which a shape can be known."""
    found: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool
        found += index.nonzero().unbind(1) if is_mask else [index]  # type: ignore[union-attr]
    return found
