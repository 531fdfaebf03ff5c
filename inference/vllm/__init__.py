"""Fill vLLM's pipeline with one request's draft tokens: a scheduler, a worker and a command.

vLLM imports ``FillScheduler`` and ``FillWorker`` by name, in its own environment. So nothing here
needs more than torch, except drafting with a language model and the command. Nothing else in the
package imports this folder.
"""

from importlib import import_module

PLACES = {"FillScheduler": "scheduler", "FillWorker": "worker"}


def __getattr__(name: str) -> object:
    """Import vllm on the first use of a class, not before."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{PLACES[name]}", __name__), name)
