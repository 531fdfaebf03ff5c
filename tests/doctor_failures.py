"""What ranks do in place of the doctor's sum, in a file that takes no time to import: each rank is
a new process."""

import sys
import time

HANG_S = 900


def fails(rank: int, *_: object) -> None:
    raise OSError("no way to the other one")


def leaves(rank: int, *_: object) -> None:
    """One rank leaves and the other waits."""
    time.sleep(HANG_S) if rank == 0 else sys.exit(3)


def waits(*_: object) -> None:
    time.sleep(HANG_S)
