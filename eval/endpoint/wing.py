"""What this folder adds to `pipedraft eval`: a command that is chosen by its option."""

from ...wings import Subcommand, Wing

WING = Wing(
    commands={
        "--endpoint": Subcommand(
            about="acceptance of a running server, by kind of text",
            options=f"{__package__}.arguments:EndpointOptions",
            run=f"{__package__}.command:run",
        )
    }
)
