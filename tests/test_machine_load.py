"""The load counts work that runs now, not work that has just ended."""

import os
import sys

import pytest

from pipedraft.machine_load import is_busy, load_average


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_high_average_alone_is_not_busy(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 1e6, 1e6))
    load = load_average()
    assert 1 <= load < 1e6 and not is_busy(load, 10**5)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.25, 0.0, 0.0))
    assert load_average() == 0.25
