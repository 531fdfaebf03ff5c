"""What is faster on a CPU than torch's own way, and gives the same up to rounding.

``with tuned(device):`` is entered once around training's steps and evaluations, ``lay_out(module)``
is called once for what decodes; formulas are written in torch's functions and know nothing of
either. Other devices are left alone.
"""

# ... any leading axes, H and G columns, M rows, C rows of a chunk, V vocabulary
# W entries of a block, K blocks of one row

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import gcd

import torch
import torch.nn.functional as F
from psutil import virtual_memory
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.optim import _muon
from torch.optim._muon import _zeropower_via_newtonschulz as torch_orthogonalize

ROW_MULTIPLE = 32


@contextmanager
def tuned(device: torch.device) -> Iterator[None]:
    """Replace torch's functions, where ``device`` is a CPU; also inside transformers models.

    Replaced for all threads and for the backward pass, too, so that what checkpointing computes
    again is what was computed: torch leaves a ``TorchFunctionMode`` there.
    """
    faster = FASTER if device.type == "cpu" else ()
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in faster]
    try:
        for owner, name, function in faster:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


# -- products -------------------------------------------------------------------------------


def linear(x_H: Tensor, weight_GH: Tensor, bias_G: Tensor | None = None) -> Tensor:
    """Multiply as ``F.linear``, by oneDNN where torch gives float32 to MKL on AVX-512 CPUs.

    On AMD processors MKL runs its AVX2 kernels: 93 GFLOP/s on one Zen 5 core, oneDNN 200.
    """
    if not _is_for_onednn(x_H):
        return torch_linear(x_H, weight_GH, bias_G)
    return _OneDNNProduct.apply(bias_G, x_H, weight_GH)


class _OneDNNProduct(torch.autograd.Function):
    """Inputs in the order of ``addmm``, in which autograd adds their gradients up: the processes of
    ZeRO-2 reduce gradients in the order of their coming, whatever a process's number of rows."""

    @staticmethod
    def forward(ctx, bias_G, x_H, weight_GH):
        ctx.save_for_backward(x_H, weight_GH)
        return _multiply(x_H, weight_GH, bias_G)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_G):
        x_H, weight_GH = ctx.saved_tensors
        needs_bias, needs_x, needs_weight = ctx.needs_input_grad
        grad_MG, dweight_GH = grad_G.flatten(0, -2), None
        dx_H = _multiply(grad_G, weight_GH.t()) if needs_x else None
        if needs_weight:
            dweight_GH = linear(grad_MG.t(), x_H.flatten(0, -2).t()).contiguous()
        return grad_MG.sum(0) if needs_bias else None, dx_H, dweight_GH


def _multiply(x_H: Tensor, weight_GH: Tensor, bias_G: Tensor | None = None) -> Tensor:
    """The operator through which torch's own compiler reaches oneDNN's float32 product.

    It takes matrices and their transposes as they lie in memory; other strides would send it to a
    reference loop, 100 times slower. It is faster with few rows and a large weight, so that the
    gradient of a weight, a product of two transposes, is computed transposed if that has fewer.
    """
    x_H, weight_GH = (x if x.mT.is_contiguous() else x.contiguous() for x in (x_H, weight_GH))
    if _is_transpose(x_H) and len(x_H) >= len(weight_GH) and bias_G is None:
        return _multiply_rows(weight_GH, x_H, None).t()
    return _multiply_rows(x_H, weight_GH, bias_G)


def _multiply_rows(x_H: Tensor, weight_GH: Tensor, bias_G: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_H, weight_GH, bias_G, "none", [], "")


def _is_transpose(x: Tensor) -> bool:
    return x.ndim == 2 and not x.is_contiguous() and x.mT.is_contiguous()


def _is_for_onednn(x_H: Tensor) -> bool:
    """Below 128 rows, and under autocast, ``F.linear`` is as fast."""
    num_rows = x_H.shape[1] if _is_transpose(x_H) else x_H.numel() // max(x_H.shape[-1], 1)
    return num_rows >= 128 and _has_onednn_product(x_H)


def _has_onednn_product(x_H: Tensor) -> bool:
    return (
        x_H.dtype == torch.float32
        and x_H.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def whole_rows(count: int) -> int:
    """Rows from ``count`` up: oneDNN compiles a kernel for every number of rows that it meets."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


# -- products with few rows ------------------------------------------------------------------

LEAST_WEIGHTS = 1 << 18
"""Of a layer that is laid out: below, what the operator itself takes (11 microseconds) is more."""
LEAST_ROWS, MOST_ROWS = 4, 64


def lay_out(module: nn.Module) -> None:
    """Let a module's large linear layers keep a copy of their weights in oneDNN's own layout.

    382 MB of weights, one Zen 4 core: one row takes 24 ms instead of
    31, four 24 instead of 42, eight 31 instead of 49, sixty 117 instead of 144, so that verifying
    three draft tokens costs what decoding one token does. The copy is made by the first product
    of at most ``MOST_ROWS`` rows and takes as much memory as the weights; where they are more than
    half of what is free, nothing is laid out.
    """
    large = [x for x in module.modules() if type(x) is nn.Linear and _is_large(x.weight)]
    if 2 * sum(layer.weight.nbytes for layer in large) <= virtual_memory().available:
        for layer in large:
            layer.__class__ = LaidOutLinear


def _is_large(weight_GH: Tensor) -> bool:
    return weight_GH.device.type in ("cpu", "meta") and weight_GH.numel() >= LEAST_WEIGHTS


class LaidOutLinear(nn.Linear):
    """A linear layer whose products of few rows read a copy of its weight in inference mode.

    Decoding is in that mode; transformers' ``generate``, which it is compared with, is not.
    """

    _copy: tuple[tuple[int, int], Tensor] | None = None
    """Which weight was copied, and the copy."""

    def __getstate__(self) -> dict[str, object]:
        """State for deepcopy and pickle; oneDNN's layout can be neither."""
        return {name: value for name, value in self.__dict__.items() if name != "_copy"}

    def forward(self, input: Tensor) -> Tensor:
        weight_GH = self.weight
        num_rows = input.numel() // input.shape[-1]
        if (
            not 1 <= num_rows <= MOST_ROWS
            or not torch.is_inference_mode_enabled()
            or weight_GH.dtype != torch.float32
            or type(weight_GH) not in (nn.Parameter, Tensor)
            or not _has_onednn_product(input)
        ):
            return super().forward(input)
        # Training, merging or moving the weight makes the copy another one's.
        version = 0 if weight_GH.is_inference() else weight_GH._version
        identity = (weight_GH.data_ptr(), version)
        if self._copy is None or self._copy[0] != identity:
            copy = torch.ops.mkldnn._reorder_linear_weight(weight_GH.detach(), 8)
            self._copy = (identity, copy)
        # Fewer rows than four are slower than four are; so one row has the numbers of many.
        missing = max(LEAST_ROWS - num_rows, 0)
        rows_MH = F.pad(input.reshape(num_rows, -1), (0, 0, 0, missing)).contiguous()
        out_MG = _multiply_rows(rows_MH, self._copy[1], self.bias)[:num_rows]
        return out_MG.view(*input.shape[:-1], -1)


# -- norms ----------------------------------------------------------------------------------


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Normalize as ``F.rms_norm``, which has no kernel for CPUs."""
    exact = (torch.float32, torch.float64)
    if x.device.type != "cpu" or weight is None or eps is None or weight.ndim != 1:
        return torch_rms_norm(x, shape, weight, eps)
    if x.dtype not in exact or weight.dtype != x.dtype:
        return torch_rms_norm(x, shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """3 passes forward and 7 backward; torch's takes 8 and 4 times as long.

    With n = x rstd: dx = rstd (g w - n mean(g w n)).
    """

    @staticmethod
    def forward(ctx, x_H, weight_H, eps):
        mean_square_1 = torch.linalg.vecdot(x_H, x_H)[..., None].div_(x_H.shape[-1])
        rstd_1 = mean_square_1.add_(eps).rsqrt_()
        ctx.save_for_backward(x_H, weight_H, rstd_1)
        return (x_H * rstd_1).mul_(weight_H)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_H):
        x_H, weight_H, rstd_1 = ctx.saved_tensors
        normed_H = x_H * rstd_1
        product_H = grad_H * normed_H
        dweight_H = product_H.flatten(0, -2).sum(0)
        mean_1 = (product_H @ weight_H)[..., None].div_(x_H.shape[-1])
        dx_H = torch.mul(grad_H, weight_H, out=product_H).addcmul_(normed_H, mean_1, value=-1)
        return dx_H.mul_(rstd_1), dweight_H, None


# -- logits ---------------------------------------------------------------------------------


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """``Tensor.argmax`` of the rows of a matrix, which is not vectorized on CPUs.

    Maxima of blocks, the first block that has the largest, and its first entry: 7 times faster.
    """
    width = gcd(x.shape[-1], 128) if x.ndim == 2 and dim in (-1, 1) and not keepdim else 0
    if width < 8 or x.device.type != "cpu" or x.requires_grad:
        return torch.argmax(x) if dim is None else torch.argmax(x, dim, keepdim)
    blocks_CKW = x.unflatten(1, (-1, width))
    block_C = torch.argmax(blocks_CKW.amax(-1), -1)
    own_C1W = blocks_CKW.take_along_dim(block_C[:, None, None], 1)
    return block_C * width + torch.argmax(own_C1W[:, 0], -1)


CACHED_BYTES = 1 << 24


def chunk_bytes(most: int) -> int:
    """Bytes of logits that are made, compared and dropped together, as the caller can afford."""
    return most


def cached_chunk_bytes(most: int) -> int:
    """Bytes that stay in the caches: 3,040 rows of 16,384 tokens take 1.1 instead of 1.7 s."""
    return min(most, CACHED_BYTES)


# -- Muon -----------------------------------------------------------------------------------


def orthogonalize(
    gradient_GH: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """Muon's quintic Newton-Schulz iteration, X <- a X + (b A + c A^2) X with A = X X^T.

    torch's runs in bfloat16. Where a CPU has to emulate it, 1,536 x 576 take 4.5 s, here 0.14 s,
    and a head of that size spent nine tenths of its training in it.
    """
    if gradient_GH.device.type != "cpu" or torch.cpu._is_avx512_bf16_supported():
        return torch_orthogonalize(gradient_GH, coefficients, num_steps, eps)
    a, b, c = coefficients
    is_tall = gradient_GH.shape[0] > gradient_GH.shape[1]
    x_GH = (gradient_GH.T if is_tall else gradient_GH).float()
    x_GH = x_GH / x_GH.norm().clamp(min=eps)  # the spectral norm is at most the Frobenius norm
    for _ in range(num_steps):
        gram_GG = x_GH @ x_GH.T
        x_GH = torch.addmm(
            x_GH, torch.addmm(gram_GG, gram_GG, gram_GG, beta=b, alpha=c), x_GH, beta=a
        )
    return x_GH.T if is_tall else x_GH


FASTER: tuple[tuple[object, str, Callable[..., object]], ...] = (
    (F, "linear", linear),
    (F, "rms_norm", rms_norm),
    (Tensor, "argmax", argmax),
    (sys.modules[__name__], "chunk_bytes", cached_chunk_bytes),
    (_muon, "_zeropower_via_newtonschulz", orthogonalize),
)
