"""pipedraft: train draft heads that keep a pipelined language model busy, and decode with them."""

import os

__version__ = "0.1.0"

if "OMP_WAIT_POLICY" not in os.environ:
    # How long torch's threads (on Linux libgomp's) look for each other before they sleep, read when
    # torch is imported. With its own 300,000 looks a step of a small model lasts forty times as
    # long beside one busy program; with these three times, and alone as long as ever: docs/log.md.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
