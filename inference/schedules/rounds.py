"""Draft a tree, verify it, start again: EAGLE on a pipelined target, in one batch or in several."""

from typing import Any


def eagle(session: Any) -> None:
    """One segment per round: n steps, and the draft works while the stages wait."""
    _in_micro_batches(session, 1)


def naive_pp(session: Any) -> None:
    """The tree in M micro-batches, verified once all of them are back: n + M - 1 steps a round.

    FlowSpec's baseline (M = n + 1). The same tree in one batch takes n steps: see ``eagle``.
    """
    _in_micro_batches(session, session.config.micro_batches or session.config.num_stages + 1)


def _in_micro_batches(session: Any, count: int) -> None:
    import torch  # not above: --help names the schedules without it

    from pipedraft.inference.pipelines.local import Returned

    while not session.done:
        session.grow_tree(session.config.tree, by_score=False)
        session.draft_alone()
        session.inject(count)
        parts: list[Any] = []
        while sum(part.num_rows for part in parts) < len(session.tree):
            returned = session.step()
            if returned is not None:
                parts.append(returned)
        verdicts = torch.cat([part.verdicts for part in parts])
        session.resolve(Returned(len(verdicts), verdicts))
