"""Networks for the target model, cut into stages, and for its heads and draft models."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .heads.draft import load_draft, load_untied

__all__ = ["load_draft", "load_untied"]


def __getattr__(name: str) -> object:
    """Import torch only when a draft is loaded, so a command's --help starts without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".heads.draft", __name__), name)
