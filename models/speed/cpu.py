"""Speed up torch functions on a CPU with the same results, and leave other devices alone.

Call ``lay_out(module)`` once before decoding or training, and ``keep_freed_memory`` once before
training. Enter ``muon_in_float32`` around optimizer steps.
"""

# ... any leading axes, H and G columns, M and N rows, V vocabulary
# W entries per block, K blocks per row

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import _muon
from torch.optim._muon import _zeropower_via_newtonschulz as torch_orthogonalize

from . import kernels

# -- products with whole rows -----------------------------------------------------------------

ROW_MULTIPLE = 64
"""oneDNN prepares a program for each new number of rows in bfloat16, and keeps it (about 1 MB).
With padded rows there are few numbers."""


def whole_rows(count: int) -> int:
    """Round a row count up to a multiple of ``ROW_MULTIPLE``."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def padded(x: Tensor, axis: int = 0) -> Tensor:
    """Append zeros until the axis has whole rows; on a CPU in bfloat16, else return ``x``."""
    extra = whole_rows(x.shape[axis]) - x.shape[axis]
    if not extra or x.dtype != torch.bfloat16 or not is_cpu(x.device):
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:axis], extra, *x.shape[axis + 1 :])], axis)


def linear(input: Tensor, weight_GH: Tensor, bias_G: Tensor | None = None) -> Tensor:
    """Return ``F.linear``, computed with whole rows under a CPU's bfloat16 autocast."""
    if not torch.is_autocast_enabled("cpu") or not is_cpu(input.device):
        return F.linear(input, weight_GH, bias_G)
    rows_MH = input.reshape(-1, input.shape[-1])
    whole_MH = padded(rows_MH.to(torch.get_autocast_dtype("cpu")))
    out_MG = F.linear(whole_MH, weight_GH, bias_G)[: len(rows_MH)]
    return out_MG.view(*input.shape[:-1], out_MG.shape[-1])


# -- products with few rows ------------------------------------------------------------------

LEAST_WEIGHTS = 1 << 18
"""Minimum weights in a laid-out layer; with fewer, the call's overhead dominates."""
MOST_ROWS = 64


def lay_out(module: nn.Module) -> None:
    """Switch a module's linear layers to the fastest matrix products.

    Few rows in large layers: a compiled kernel (``kernels.py``), or without a compiler, torch's
    product of the weight with several rows as columns. Under autocast: ``linear``.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.device.type in ("cpu", "meta"):
            layer.__class__ = LaidOutLinear  # the same object, so names and references stay


class LaidOutLinear(nn.Linear):
    """Linear layer with the products of ``lay_out``, for few rows only in inference mode.

    Decoding uses inference mode. The reference, transformers' ``generate``, does not.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight_GH = self.weight
        num_rows = input.numel() // input.shape[-1]
        if torch.is_autocast_enabled("cpu"):
            return linear(input, weight_GH, self.bias)
        if (
            not 1 <= num_rows <= MOST_ROWS
            or weight_GH.numel() < LEAST_WEIGHTS
            or not torch.is_inference_mode_enabled()
            or weight_GH.dtype != torch.float32
            or type(weight_GH) not in (nn.Parameter, Tensor)  # sharded or quantized
            or input.dtype != torch.float32
            or input.device.type != "cpu"
        ):
            return super().forward(input)
        rows_MH = input.reshape(num_rows, -1)
        if weight_GH.device == input.device and kernels.can_multiply(weight_GH):
            out_MG = kernels.product(kernels.weight(weight_GH, None, self.bias), rows_MH)
        elif num_rows == 1:
            return super().forward(input)
        else:
            # MKL multiplies a large matrix by few columns faster than few rows by the matrix.
            out_MG = (weight_GH @ rows_MH.T).T.contiguous()
            if self.bias is not None:
                out_MG += self.bias
        return out_MG.view(*input.shape[:-1], out_MG.shape[-1])


# -- logits --------------------------------------------------------------------------------

_is_planning = False


@contextmanager
def planned_accelerator() -> Iterator[None]:
    """Choose as on an accelerator inside the block, whose fake CPU tensors stand for its own."""
    global _is_planning
    _is_planning = True
    try:
        yield
    finally:
        _is_planning = False


def is_cpu(device: torch.device) -> bool:
    return device.type == "cpu" and not _is_planning


def argmax(x_NV: Tensor) -> Tensor:
    """Return each row's argmax [N], on a CPU 5 times as fast as torch, which does not vectorize.

    Find the first block with the largest maximum, then the first maximum within this block.
    """
    width = gcd(x_NV.shape[-1], 128)  # blocks must divide the row
    if width < 8 or not is_cpu(x_NV.device):
        return x_NV.argmax(-1)
    blocks_NKW = x_NV.unflatten(1, (-1, width))
    block_N = blocks_NKW.amax(-1).argmax(-1)
    own_N1W = blocks_NKW.take_along_dim(block_N[:, None, None], 1)
    return block_N * width + own_N1W[:, 0].argmax(-1)


CACHED_BYTES = 1 << 24


def chunk_bytes(most: int, device: torch.device) -> int:
    """Return the chunk size in bytes, at most ``most``, for logits processed in chunks.

    On a CPU a chunk fits the caches. So 3,040 rows of 16,384 logits take 1.1 s, not 1.7 s.
    """
    return min(most, CACHED_BYTES) if is_cpu(device) else most


# -- memory ----------------------------------------------------------------------------------

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers from glibc's malloc.h
LARGEST_IN_HEAP = 1 << 25  # bytes; glibc takes no more


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next tensors. Without glibc, change nothing.

    By default glibc returns large freed tensors to the system. The next step gets them back page by
    page, zeroed: up to a fifth of a small head's training time. The peak stays the same.
    """
    # musl and macOS have no mallopt
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # bytes; the largest int


# -- Muon -----------------------------------------------------------------------------------


def orthogonalize(
    grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """Run Muon's quintic Newton-Schulz iteration, X <- a X + (b A + c A^2) X with A = X X^T.

    torch iterates in bfloat16. On a CPU that emulates bfloat16, a 1,536 x 576 matrix takes 4.5 s,
    but 0.14 s here. A head with such matrices spent 90 % of its training time in torch's iteration.
    """
    if grad.device.type != "cpu" or torch.cpu._is_avx512_bf16_supported():
        return torch_orthogonalize(grad, ns_coefficients, ns_steps, eps)
    a, b, c = ns_coefficients
    is_tall = grad.shape[0] > grad.shape[1]  # the smaller Gram matrix is cheaper
    x_GH = (grad.T if is_tall else grad).float()
    x_GH = x_GH / x_GH.norm().clamp(min=eps)  # the spectral norm is at most the Frobenius norm
    for _ in range(ns_steps):
        gram_GG = x_GH @ x_GH.T
        x_GH = torch.addmm(
            x_GH, torch.addmm(gram_GG, gram_GG, gram_GG, beta=b, alpha=c), x_GH, beta=a
        )
    return x_GH.T if is_tall else x_GH


@contextmanager
def muon_in_float32(device: torch.device) -> Iterator[None]:
    """Let torch.optim.Muon iterate in float32 in this context, if ``device`` is a CPU."""
    if device.type == "cpu":
        _muon._zeropower_via_newtonschulz = orthogonalize  # type: ignore[assignment]
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = torch_orthogonalize
