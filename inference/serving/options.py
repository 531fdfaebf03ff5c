"""Options of `pipedraft serve`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...options import option
from ..arguments import EngineOptions
from ..server_options import ListenOptions, ServerLimits

KEY_VARIABLE = "PIPEDRAFT_API_KEY"
EXAMPLE = """example:
  pipedraft serve --checkpoint assets/heads/spd_n4 --tree-width 4
  curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
      -d '{"messages": [{"role": "user", "content": "How many legs do 12 cats have?"}]}'

  pipedraft serve --target assets/target --schedule autoregressive --port 0
  PIPEDRAFT_API_KEY=... pipedraft serve --checkpoint assets/heads/spd_n4 --host 0.0.0.0 \\
      --tls-cert server.pem --tls-key server.key
  pipedraft serve --checkpoint assets/heads/spd_n4 --backend process --processes 4

Once it can answer, the server prints its address and how to use it; open the address in a browser
to chat. After SIGTERM or Ctrl-C, open requests get --grace-s seconds to finish; a second signal
ends them at once. docs/serve.md has the rest.
"""


@dataclass(frozen=True, kw_only=True)
class HttpLimits(ServerLimits):
    """request limits"""

    max_waiting: int = option(64, metavar="N", least=1)
    """maximum sequences in the queue; further requests get status 429"""
    max_client_sequences: int = option(32, metavar="N", least=1)
    """maximum open sequences per client; clients are told apart by API key if --api-key-file has
    several keys, else by address"""
    max_choices: int = option(8, metavar="N", least=1)
    """maximum sequences per request"""


@dataclass(frozen=True, kw_only=True)
class HttpOptions(ListenOptions):
    """who may connect"""

    port: int = 8000
    """port; 0: any free port"""
    api_key_file: Path | None = option(None, metavar="FILE")
    """file with API keys, one per line; every client must send one of them; default:
    $PIPEDRAFT_API_KEY, or no key"""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(HttpOptions, HttpLimits, EngineOptions):
    """Serve a target and its draft over HTTP, for OpenAI clients."""

    PROG: ClassVar[str] = "pipedraft serve"
    EXAMPLE: ClassVar[str] = EXAMPLE
    ENDS_GENTLY: ClassVar[bool] = True
    RARE: ClassVar[Sequence[str]] = (
        *("verifier", "payload_tokens", "tail_samples", "boundaries", "bitwise", "cost"),
        *("draft_dtype", "chat_template_kwargs", "grace_s", "tls_cert", "tls_key", "vllm_metrics"),
    )

    served_model_name: str | None = option(None, metavar="NAME,..")
    """comma-separated model names for clients, as in vLLM; answers give the first one; default: the
    last part of the checkpoint's name, else the draft model's, else the target's"""
    vllm_metrics: bool = False
    """also export metrics under vLLM's names (vllm:num_requests_running)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.names):
            raise ValueError(
                f"--served-model-name: {self.served_model_name!r} has an empty name; give NAME,.."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the accepted model names."""
        if self.served_model_name:
            return tuple(name.strip() for name in self.served_model_name.split(","))
        parts = (self.checkpoint, self.draft_model, self.target)
        # Resolved: a checkpoint given as "." has a name, too.
        return (Path(next(filter(None, parts), "")).resolve().name,)
