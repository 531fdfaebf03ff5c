"""One layer of guesses enters per step while older ones travel: SPD, and PipeDec with its width."""

from typing import Any


def layered(session: Any) -> None:
    """The draft reads the states BEFORE the step and runs beside the stages.

    A round starts with the pending root alone in the pipeline, so its first verdict takes n steps;
    from then on every step returns one verified token until a guess is wrong. Every branch that
    agrees with the text is kept.
    """
    while not session.done:
        session.inject()
        hit = True
        while hit and not session.done:
            session.grow_layer()
            returned = session.step(overlap=True)
            hit = returned is None or session.resolve(returned)
            if hit:
                session.inject()
