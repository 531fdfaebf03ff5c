"""Serve a target and its draft over HTTP, with OpenAI's API and a chat page."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from ...endings import leave_at_interrupts, run_command

if __name__ == "__main__":
    # Before the slow imports: Ctrl-C inside them would print a traceback.
    leave_at_interrupts()

from ..arguments import backend_of, check_paths
from ..server_options import read_tokens
from .options import KEY_VARIABLE, ServeOptions

build_parser = ServeOptions.parser


def main(words: Sequence[str] | None = None) -> None:
    """Serve with the options in ``words``, or in this process's command line by default."""
    options = ServeOptions.read(sys.argv[1:] if words is None else words)
    keys = read_tokens(options.api_key_file, option="--api-key-file", variable=KEY_VARIABLE)
    check_paths([options.checkpoint], options.target, options.draft_model)
    from . import listen

    with backend_of(options) as cluster:
        if cluster is not None and not cluster.is_controller:
            cluster.watch.on_signal = lambda: None  # the ranks exit after the controller
            cluster.serve()
            return
        # A port in use must fail before the target's long load.
        with listen.open_socket(options) as socket:
            from ..command import load_engine

            # Requests set their own temperature: prepare a rule for sampling.
            settings = options.engine_settings() | {"temperature": 1.0}
            engine = load_engine(options, cluster, settings, says_loading=True)
            if engine.config.schedule.label == "auto":
                # Drafts that gain with one client lose with many: time each number of clients.
                engine.config = replace(engine.config, never_slower=True)
            options.warn_if_open(keys, "--api-key-file")
            listen.run(engine, options, keys, socket, cluster)


if __name__ == "__main__":
    run_command(main)
