"""Ranks capture CUDA graphs at their own steps, while their transfers wait for each other."""

import json

import pytest
from command_processes import run_ranks

SCRIPT = "tests/process_rendezvous.py"


@pytest.mark.parametrize("num_processes", [3, pytest.param(4, marks=pytest.mark.all)])
def test_every_schedule_ends_with_plain_decodings_text(num_processes, parent, tmp_path):
    output = run_ranks(parent, SCRIPT, [str(tmp_path), "guarded"], num_processes)
    found = {line["rank"]: line for line in map(json.loads, output.splitlines())}
    assert found[0]["unlike plain"] == []
    assert len(found) == num_processes and all(rank["recorded"] > 9 for rank in found.values())
    # NCCL connects two ranks when a link is first used: else in a step, which has a time limit.
    assert all(rank["never used"] == 0 for rank in found.values())


@pytest.mark.all  # waits 20 s in vain
def test_ranks_that_record_while_they_send_wait_for_ever(parent, tmp_path):
    """Known-bad variant: a rank does not check for a send in flight before it records."""
    with pytest.raises(AssertionError, match="recording waits for a peer that records, too"):
        run_ranks(parent, SCRIPT, [str(tmp_path), "unguarded"], 3)
