"""Guesses enter at every step while older ones travel: SPD, PipeDec, PPSD, and FlowSpec's flow."""

from collections.abc import Callable
from typing import Any


def layered(session: Any) -> None:
    """SPD, and PipeDec with its width: one layer of guesses below the deepest ones per step."""
    if session.config.timing == "output_states":
        ppsd(session)
    else:
        drafting_beside(session, session.grow_layer)


def drafting_beside(session: Any, grow: Callable[[], None]) -> None:
    """The draft reads the states BEFORE the step and runs beside it.

    A round starts with the pending root alone in the pipeline, so its first verdict takes n steps;
    from then on every step returns verified tokens while guesses are right. Every branch that
    agrees with the text is kept.
    """
    while not session.done:
        session.inject()
        hit = True
        while hit and not session.done:
            grow()
            returned = session.step(overlap=True, ahead=True)
            hit = returned is None or session.resolve(returned)
            if hit:
                session.inject()


def ppsd(session: Any) -> None:
    """The draft reads the states AFTER the step, and every stage waits for it.

    Also SPD's with the timing ``output_states``.

    Rounds are those of ``drafting_beside``. A head behind the first stage starts before the verdict
    is known, so its time counts at every step, as in the paper: S = L' L / (Ls n + L). A step whose
    verdict leaves nothing to continue pays for a guess that is not made.
    """
    while not session.done:
        session.inject()
        hit = True
        while hit and not session.done:
            returned = session.step()
            hit = returned is None or session.resolve(returned)
            if hit and not session.done:
                session.grow_layer()
            session.draft_alone(at_least=1)
            if hit:
                session.inject()
