"""Command-line arguments that every command across a link turns into ``Wishes``."""

import argparse
from collections.abc import Callable
from typing import Any

from pipedraft.inference.arguments import positive
from pipedraft.inference.edge_cloud.methods import Wishes


def add_wish_arguments(add: Callable[..., Any]) -> None:
    """``add``: ``add_argument`` of a parser or group."""
    wishes = Wishes()
    add(
        "--policy",
        default=wishes.policy,
        help="draft length, except of stop_and_wait, dssd and pearl, which have their own: "
        f"fixed:K, eq11, alg2, geometric or survival (default: {wishes.policy})",
    )
    add(
        "--top-k",
        type=positive,
        default=wishes.top_k,
        metavar="K",
        help="tokens of a rejection, by topk and tail_escape (default: %(default)s)",
    )
    add(
        "--tail-samples",
        type=positive,
        default=wishes.tail_samples,
        metavar="M",
        help="tokens of a rejection, by tail_escape (default: %(default)s)",
    )
    add(
        "--max-new-tokens",
        type=positive,
        default=wishes.max_new_tokens,
        metavar="M",
        help="of each answer (default: %(default)s)",
    )
    add(
        "--seed", type=int, default=wishes.seed, help="of all that is random (default: %(default)s)"
    )


def wish_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of ``Wishes`` from these arguments, and from ``--rule``."""
    names = ("policy", "top_k", "tail_samples", "max_new_tokens", "seed", "rule")
    return {name: vars(options)[name] for name in names}
