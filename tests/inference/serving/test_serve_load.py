"""`pipedraft serve` under load, a small version of the runs in benchmarks/."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.all
LIMIT_S = 900


def run(repository, script, *words):
    """Run a script and return its last line."""
    ended = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", *words, "--json"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_storm_of_clients_gets_its_own_texts_or_none(repository):
    words = ["--clients", "20", "--seconds", "20", "--requests", "5"]
    found = run(repository, "serve_storm", *words)
    assert (found["wrong"], found["failed"]) == (0, []), found
    assert sum(count for what, count in found["found"].items() if "right" in what) > 20
    assert found["killed"]["status"] == 1 and found["ended"]["status"] == 0
    assert found["killed"]["said"][-1].startswith("error: rank 0 (controller and stage 0): ")
    assert found["ended"]["said"][0].startswith("ended: ")
