"""Marks for tests that a machine may be unable to run."""

import pytest

from pipedraft.models.speed import kernels

NEEDS_KERNELS = pytest.mark.skipif(kernels.library() is None, reason="no C++ compiler")
