"""What this folder adds to `pipedraft inference`: a target on a server.

The wing is ``inference/edge`` and ``eval/edge``, with ``benchmarks/edge`` and ``tests/edge``. No
other code needs these four folders.
"""

from ...wings import Subcommand, Wing
from .arguments import RemoteOptions

EXAMPLE = """
The target on a server, the draft here:
  pipedraft inference serve --target assets/target
  pipedraft inference --server 127.0.0.1:50051 --tokenizer assets/target --prompt "Hi"
  pipedraft inference --server 127.0.0.1:50051 --checkpoint out/flexspec --prompt "Hi"
  pipedraft inference --server cloud.example:50051 --draft-model out/draft_model \\
      --schedule picospec --tls-ca server.pem --token-file token --prompt "Hi"
  pipedraft inference --server 127.0.0.1:50051 --status

Without a draft, --server needs --tokenizer: a folder or Hub id with the target's tokenizer.
"""
WING = Wing(
    commands={
        "serve": Subcommand(
            about="serve a target to edge devices",
            options=f"{__package__}.arguments:SessionServerOptions",
            run=f"{__package__}.grpc_command:run",
        )
    },
    options=RemoteOptions,
    example=EXAMPLE,
    needs_no_prompt=("status",),
    decodes={"server": f"{__package__}.command:decode_remotely"},
)
