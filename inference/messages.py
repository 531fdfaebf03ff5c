"""Base class and checks for messages, whichever wire format encodes them."""

from collections.abc import Collection
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

Count = Annotated[int, Meta(ge=0, lt=2**31)]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base class for messages, encoded as the tag and the fields in declaration order.

    A subclass checks field combinations in ``__post_init__``, and raises ``ValueError`` there.
    """


def check_tensor(
    name: str, tensor: Tensor, dtypes: Collection[torch.dtype], *shape: int | None
) -> None:
    """Raise ValueError for a wrong dtype or shape. In ``shape``, None allows any size."""
    fits = len(shape) == tensor.ndim and all(
        size is None or size == found for size, found in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype not in dtypes or not fits:
        wanted = ["any" if size is None else size for size in shape]
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name}: {tensor.dtype} {list(tensor.shape)}; want {kinds} of shape {wanted}"
        )
