"""Run products, attention and decoder layers by compiled kernels on a CPU.

``kernels.cpp`` is compiled for this machine on first use, and cached in ``HF_HOME``. With torch's
variable ``ATEN_CPU_CAPABILITY=avx2``, it is compiled for AVX2. Weights are float32 or rounded. A
row's result has the same bits alone and next to any other rows.
"""

# M rows, H inputs, G output channels, N query heads, J key heads, D head size, C cache columns

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from itertools import product as product_of
from pathlib import Path

import torch
from huggingface_hub import constants
from torch import Tensor

from ...files import write_atomically

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-w")
AVX2_FLAGS = ("-mno-avx512f",)  # and with it, all later parts of AVX-512
COMPILERS = ("g++", "clang++", "c++")
COMPILE_SECONDS = 120
int4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # not in torch's stubs
BLOCK = 32
"""Weights per int4 block. Weights' inputs and layers' head sizes must be multiples of it."""
MOST_HEAD_SIZE = 512
"""Maximum head size of a layer."""

logger = logging.getLogger(__name__)


class Weight(ctypes.Structure):
    """Addresses and sizes of packed weights for kernels.cpp. The tensors must stay alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("kind", "channels", "inputs")),
    )


class Layer(ctypes.Structure):
    """Addresses and sizes of a layer's weights for kernels.cpp. The tensors must stay alive."""

    _fields_ = (
        *((name, Weight) for name in ("query_key_value", "output", "gate_up", "down")),
        *((f"{name}_norm", ctypes.c_void_p) for name in ("input", "attention", "query", "key")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "head_size")),
    )


KINDS = {
    dtype: kind
    for kind, dtype in enumerate(
        (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8)
    )
}
"""Kinds in kernels.cpp by packed dtype; int4 blocks are bytes."""


@cache
def library() -> ctypes.CDLL | None:
    """Compile and load the kernels, or log the failures and return None."""
    compilers = [found for name in COMPILERS if (found := shutil.which(name))]
    if not compilers:
        logger.info("no C++ compiler (%s): CPU decoding is slower", ", ".join(COMPILERS))
    for compiler, threads in product_of(compilers, (("-fopenmp",), ())):
        try:
            return _typed(_load((compiler, *FLAGS, *_limits(), *threads)))
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            name = " ".join((compiler, *threads))
            logger.warning("%s cannot compile %s: %s", name, SOURCE.name, said.strip()[-500:])
    return None


def _limits() -> tuple[str, ...]:
    """Return the flags for AVX2 if torch was limited to it."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    is_limited = os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
    return AVX2_FLAGS if is_x86 and is_limited else ()


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    arguments = {
        "product": [pointer] * 3 + [size],
        "before_attention": [pointer] * 5 + [size],
        "attend": [pointer] * 5 + [size] * 7 + [ctypes.c_double],
        "after_attention": [pointer] * 4 + [size],
    }
    for name, types in arguments.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, None
    return found


def _load(command: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library from the cache, or compile it.

    Raises:
        OSError, subprocess.SubprocessError: the compiler failed, or its library cannot be loaded.
    """
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, timeout=20, check=True
    ).stdout
    key = hashlib.sha256()
    for part in (SOURCE.read_bytes(), version, _cpu_features(), *map(str.encode, command)):
        key.update(part)
    folder = Path(constants.HF_HOME, "pipedraft", "kernels")
    path = folder / f"{key.hexdigest()[:32]}.so"
    if _is_ours(path):
        with suppress(OSError):  # damaged, or on a file system without programs
            return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory() as private:
        built = Path(private, path.name)
        subprocess.run(
            [*command, "-o", str(built), str(SOURCE)],
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
            check=True,
        )
        with suppress(OSError):  # read-only: compiled again next time
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, built.read_bytes())
            path.chmod(0o600)
        return ctypes.CDLL(str(built))  # stays loaded without the file


def _is_ours(path: Path) -> bool:
    """Return True if only this user can write the file and its folder, and neither is a link."""
    try:
        found = [path.lstat(), path.parent.lstat()]
    except OSError:
        return False
    is_plain = stat.S_ISREG(found[0].st_mode) and stat.S_ISDIR(found[1].st_mode)
    return is_plain and all(x.st_uid == os.getuid() and not x.st_mode & 0o022 for x in found)


def _cpu_features() -> bytes:
    """Return the CPU features, on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((x for x in lines if x.startswith((b"flags", b"Features"))), b"")


def can_multiply(weight_GH: Tensor) -> bool:
    """Return True if the kernels can read this float32 weight in place."""
    fits = weight_GH.shape[1] % BLOCK == 0 and weight_GH.is_contiguous()
    return fits and library() is not None


# -- weights -----------------------------------------------------------------------------------


def pack(weight_GH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return rounded weights in the kernels' layout, and a scale [G] for int8.

    Inputs are padded with zeros. int4 is stored as bytes, in blocks as in GGUF's Q4_1:
    w = scale q + least with q = 0 .. 15, both in float16.

    Args:
        dtype: float16, bfloat16, int8 or int4.
    """
    weight_GH = torch.nn.functional.pad(weight_GH.float(), (0, -weight_GH.shape[1] % BLOCK))
    if dtype.is_floating_point:
        return weight_GH.to(dtype), None
    if dtype == torch.int8:
        scale_G = (weight_GH.abs().amax(1) / 127).clamp(min=1e-30)
        return (weight_GH / scale_G[:, None]).round().to(torch.int8), scale_G
    blocks_GKB = weight_GH.unflatten(1, (-1, BLOCK))
    least_GK1, most_GK1 = (x[..., None] for x in blocks_GKB.aminmax(dim=-1))
    scale_GK1 = ((most_GK1 - least_GK1) / 15).half()
    least_GK1 = least_GK1.half()
    steps = (blocks_GKB - least_GK1) / scale_GK1.float().clamp(min=1e-30)
    low, high = steps.round().clamp(0, 15).to(torch.uint8).chunk(2, -1)
    parts = scale_GK1.view(torch.uint8), least_GK1.view(torch.uint8), low | high << 4
    return torch.cat(parts, -1).flatten(1), None


def unpack_int4(blocks_GB: Tensor) -> Tensor:
    """Return the float32 weights [G, H] of ``pack``'s int4 blocks."""
    parts_GKB = blocks_GB.unflatten(1, (-1, 4 + BLOCK // 2))
    scale, least = (x.contiguous().view(torch.float16) for x in parts_GKB[..., :4].chunk(2, -1))
    nibbles = parts_GKB[..., 4:]
    steps = torch.cat([nibbles & 15, nibbles >> 4], -1)
    return (steps * scale.float() + least.float()).flatten(1)


def weight(rows: Tensor, scale_G: Tensor | None = None, bias_G: Tensor | None = None) -> Weight:
    """Describe packed weights to the kernels. The caller must keep the tensors alive."""
    num_inputs = rows.shape[1]
    if rows.dtype == torch.uint8:
        num_inputs = num_inputs // (4 + BLOCK // 2) * BLOCK
    addresses = (x.data_ptr() if x is not None else None for x in (rows, scale_G, bias_G))
    return Weight(*addresses, KINDS[rows.dtype], len(rows), num_inputs)


def _check(x: Tensor, size: int) -> None:
    """Raise ValueError for rows that the kernels cannot read, such as a faulty peer's."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[-1] != size:
        raise ValueError(f"{x.dtype} rows {list(x.shape)} on {x.device}: want float32, {size} wide")


def product(own: Weight, rows_MH: Tensor) -> Tensor:
    """Return x W^T + b as float32 [M, G]. Inputs are padded like the weights in ``pack``."""
    lacking = own.inputs - rows_MH.shape[1]
    if 0 < lacking < BLOCK:
        rows_MH = torch.nn.functional.pad(rows_MH, (0, lacking))
    _check(rows_MH, own.inputs)
    rows_MH = rows_MH.contiguous()
    out_MG = rows_MH.new_empty(len(rows_MH), own.channels)
    kernels = library()
    assert kernels is not None, "no kernels"
    kernels.product(ctypes.byref(own), rows_MH.data_ptr(), out_MG.data_ptr(), len(rows_MH))
    return out_MG


# -- layers ------------------------------------------------------------------------------------


def before_attention(layer: Layer, hidden_1MH: Tensor, cos_M1D: Tensor, sin_M1D: Tensor) -> Tensor:
    """Return rotated queries, rotated keys, and values, joined to float32 [1, N + 2 J, M, D].

    ``sin_M1D`` has a minus sign in its first half, as in ``plain_layers``.
    """
    _check(hidden_1MH, layer.hidden)
    kernels, num_rows = library(), hidden_1MH.shape[1]
    assert kernels is not None, "no kernels"
    shape = 1, layer.heads + 2 * layer.kv_heads, num_rows, layer.head_size
    out = hidden_1MH.new_empty(shape)
    # In a list, so that copies live until the call has ended.
    tensors = [x.contiguous() for x in (hidden_1MH, cos_M1D, sin_M1D)] + [out]
    addresses = [x.data_ptr() for x in tensors]
    kernels.before_attention(ctypes.byref(layer), *addresses, num_rows)
    return out


def can_attend(query_1NMD: Tensor, keys_1JCD: Tensor, values_1JCD: Tensor) -> bool:
    """Return True if there are kernels, a float32 query on a CPU, and only one head size."""
    is_float32 = query_1NMD.dtype == torch.float32 and query_1NMD.device.type == "cpu"
    has_one_size = query_1NMD.shape[3] == keys_1JCD.shape[3] == values_1JCD.shape[3]
    return is_float32 and has_one_size and library() is not None


def attend(
    query_1NMD: Tensor, keys_1JCD: Tensor, values_1JCD: Tensor, mask_11MC: Tensor, scale: float
) -> Tensor:
    """Return softmax(scale q k^T) v over visible columns as float32 [1, N, M, D].

    Args:
        mask_11MC: 0 for visible columns. Hidden columns change no bits.

    Raises:
        ValueError: a mask or values of another shape.
    """
    shape = (1, 1, query_1NMD.shape[2], keys_1JCD.shape[2])
    if mask_11MC.shape != shape or mask_11MC.dtype != torch.float32:
        raise ValueError(f"{mask_11MC.dtype} mask {list(mask_11MC.shape)}; want float32 {shape}")
    if keys_1JCD.shape != values_1JCD.shape:
        raise ValueError(f"values {list(values_1JCD.shape)}: keys have {list(keys_1JCD.shape)}")
    _check(keys_1JCD, query_1NMD.shape[3])
    mask_11MC = mask_11MC if mask_11MC.stride(3) == 1 else mask_11MC.contiguous()
    kernels, (_, N, M, D) = library(), query_1NMD.shape
    assert kernels is not None, "no kernels"
    num_columns, stride = keys_1JCD.shape[2], keys_1JCD.stride(1)
    # Rows of a buffer with room for more: only the distance of two heads may differ.
    is_buffer = keys_1JCD.stride()[1:] == values_1JCD.stride()[1:] == (stride, D, 1)
    if not is_buffer:
        keys_1JCD, values_1JCD = keys_1JCD.contiguous(), values_1JCD.contiguous()
        stride = num_columns * D
    query_1NMD = query_1NMD.contiguous()
    out_1MND = query_1NMD.new_empty(1, M, N, D)
    tensors = query_1NMD, keys_1JCD, values_1JCD, mask_11MC, out_1MND
    sizes = M, num_columns, N, N // keys_1JCD.shape[1], D, stride, mask_11MC.stride(2)
    kernels.attend(*(x.data_ptr() for x in tensors), *sizes, scale)
    return out_1MND.transpose(1, 2)


def after_attention(layer: Layer, hidden_1MH: Tensor, attended_1MND: Tensor) -> Tensor:
    """Return the layer's output [1, M, H], with both residuals."""
    _check(hidden_1MH, layer.hidden)
    _check(attended_1MND, layer.head_size)
    kernels, num_rows = library(), hidden_1MH.shape[1]
    assert kernels is not None, "no kernels"
    hidden_1MH, attended_1MND = hidden_1MH.contiguous(), attended_1MND.contiguous()
    out_1MH = torch.empty_like(hidden_1MH)
    addresses = [x.data_ptr() for x in (hidden_1MH, attended_1MND, out_1MH)]
    kernels.after_attention(ctypes.byref(layer), *addresses, num_rows)
    return out_1MH
