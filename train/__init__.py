"""Training draft heads; ``pipedraft.train("eagle3", ...)`` calls ``pipedraft.api.train``."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipedraft.api import TrainedHead


class _CallableModule(ModuleType):
    """Callable module: ``pipedraft.train`` is both package and function."""

    def __call__(self, method: str, **settings: object) -> "TrainedHead":
        """Train a draft head; see ``pipedraft.api.train`` for the arguments."""
        return import_module("pipedraft.api").train(method, **settings)


sys.modules[__name__].__class__ = _CallableModule
