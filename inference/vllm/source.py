"""Where another environment's Python finds this checkout as ``pipedraft``."""

import os
from pathlib import Path

PACKAGE = Path(__file__).parents[2]


def import_folder(package: Path = PACKAGE) -> Path:
    """Return the folder to put on ``PYTHONPATH``: the parent of a folder called pipedraft.

    A checkout with another name gets a link of that name in its build folder.

    Raises:
        OSError: the link cannot be made.
    """
    if package.name == "pipedraft":
        return package.parent
    folder = package / "build" / "import"
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"pipedraft.{os.getpid()}"
    new.symlink_to(package)
    new.replace(folder / "pipedraft")
    return folder
