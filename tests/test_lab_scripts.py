"""Scripts of docs/lab: fates of segments, and many users on one link."""

import runpy

import pytest
from conftest import REPOSITORY

from pipedraft.eval.edge_methods import TIMES
from pipedraft.inference.result import DecodeResult


def script(name: str) -> dict:
    return runpy.run_path(str(REPOSITORY / "docs" / "lab" / name))


def test_a_segment_is_invalidated_where_no_row_of_it_is_left():
    # [repeats, draft forwards, overlap, rows per stage]; the second segment is empty at stage 1.
    log = [[1, 1, 1, 1, 0], [1, 4], [1, 1, 1, 3, 1], [1, 1, 1, 1, 0], [1, 0, 1, 0, 1]]
    result = DecodeResult([], [], "", "", num_stages=2, step_log=log)
    assert script("runs.py")["fates"](result) == (3, 1, 5, 1)


def test_users_share_passes_for_free_only_if_a_row_is_free():
    ms_per_token = script("shared_link.py")["ms_per_token"]
    alone_ms = 1e3 * TIMES["flexspec"].forward_s(1, alone=True)
    for users in (1, 50):
        assert ms_per_token("5g", users, 0, 0.0, 30.0) == pytest.approx(alone_ms, rel=0.05)
    dear = ms_per_token("5g", 50, 0, 0.02, 30.0)
    assert dear == pytest.approx(alone_ms * (1 + 0.02 * 49), rel=0.1)
    assert ms_per_token("5g", 1, 5, 0.0, 30.0) < 2 * alone_ms
