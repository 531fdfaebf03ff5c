"""Run the frozen target over the data once and store hidden states for training draft heads.

Exit status: 0 for success, 1 for a failure, 2 for bad input. After a kill at any moment, the same
command resumes.
"""

import sys

from ...endings import leave_at_interrupts, leaving_at_interrupts, run_command

if __name__ == "__main__":
    leave_at_interrupts()

from .options import FeatureOptions, read_heads


def main() -> None:
    is_server = sys.argv[1:2] == ["serve"]
    own, rest = FeatureOptions.read_own(sys.argv[1 + is_server :])
    for name in ("host", "port"):
        value = getattr(own, name)
        if not is_server and value != getattr(FeatureOptions, name):
            raise ValueError(f"{name}: {value} without serve; give serve as first word, or drop it")
    heads = read_heads(rest, list(own.also))
    with leaving_at_interrupts():  # torch and transformers
        from ...pretrained import quieten
        from .dump import dump_features, layers_of, serve_states, size_table
        from .partial_target import decoder_config
    quieten()
    if own.shard_mb <= 0:
        raise ValueError(f"shard_mb: {own.shard_mb} is not positive; give for example 512")
    config = decoder_config(heads[0].run)
    layers = layers_of(heads, config)
    # The last entry is the union, or the only head's layers.
    *_, together = layers.values()
    if is_server:
        if own.port is None:
            raise ValueError("port: missing; give for example --port 7500")
        if own.also:
            raise ValueError(f"also: {own.also[0]} with serve; start a server for each head")
        sys.exit(serve_states(own, own.port, heads[0].run, together))
    if own.estimate:
        print(size_table(layers, config.hidden_size))
        return
    if own.out is None:
        raise ValueError("out: missing; give a folder for the dump, or --estimate")
    dump_features(own, own.out, heads, together)


if __name__ == "__main__":
    run_command(main)
