"""What this folder adds to `pipedraft eval`. ``inference/edge/wing`` says what the wing is."""

from ...wings import Subcommand, Wing

WING = Wing(
    commands={
        "edge": Subcommand(
            about="the draft on one side of a network link, the target on the other",
            options=f"{__package__}.arguments:EdgeOptions",
            run=f"{__package__}.command:run",
        )
    }
)
