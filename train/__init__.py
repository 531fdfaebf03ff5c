"""Train draft heads. ``pipedraft.train("eagle3", ...)`` calls ``pipedraft.api.train``."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..api import TrainedHead


class _CallableModule(ModuleType):
    """Module type that lets the package ``pipedraft.train`` be called like a function."""

    def __call__(self, method: str, **settings: object) -> "TrainedHead":
        """Train a draft head. For the arguments see ``pipedraft.api.train``."""
        return import_module("..api", __name__).train(method, **settings)


sys.modules[__name__].__class__ = _CallableModule
