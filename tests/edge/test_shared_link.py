"""benchmarks/edge/shared_link.py: many users on one link."""

import pytest
from scripts import load_script

from pipedraft.eval.edge.methods import TIMES


def test_users_share_passes_for_free_only_if_a_row_is_free():
    ms_per_token = load_script("benchmarks/edge/shared_link.py").ms_per_token
    alone_ms = 1e3 * TIMES["flexspec"].forward_s(1, alone=True)
    for users in (1, 50):
        assert ms_per_token("5g", users, 0, 0.0, 30.0) == pytest.approx(alone_ms, rel=0.05)
    dear = ms_per_token("5g", 50, 0, 0.02, 30.0)
    assert dear == pytest.approx(alone_ms * (1 + 0.02 * 49), rel=0.1)
    assert ms_per_token("5g", 1, 5, 0.0, 30.0) < 2 * alone_ms
