"""Scripts of the checkout as modules. They are no part of the package."""

import importlib
import sys
from pathlib import Path
from typing import Any

from tiny_models import REPOSITORY


def load_script(path: str) -> Any:
    """Import a script by its path. Like ``python``, find the files beside it."""
    file = REPOSITORY / path
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.import_module(file.stem)
    assert Path(str(module.__file__)) == file, "another module has this name"
    return module
