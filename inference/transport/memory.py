"""Whether an error means that memory is exhausted, whoever was to allocate it."""

import torch

SIGNS = (
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",  # the same on Windows
    "bad_alloc",  # any other C++ code under torch
    "ALLOC_FAILED",  # cuBLAS and cuDNN workspaces
    "CUDA error: out of memory",  # CUDA itself, past torch's allocator
)


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's allocator and Python's raise types of their own, all others a ``RuntimeError``."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
