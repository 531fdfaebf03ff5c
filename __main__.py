"""Run the console script, where ``pipedraft <command>`` is ``python -m pipedraft.<folder>``."""

import runpy
import sys

from .version import __version__

# Command -> folder or file to run, its description, an example.
COMMANDS = {
    "new": (
        "train/new",
        "write a recipe for your own target, and print the three commands that use it",
        "pipedraft new assets/target --data chats.jsonl --out out/mine.yaml",
    ),
    "train": (
        "train",
        "train a draft head; launch with accelerate for more than one process",
        "pipedraft train --config configs/spd/tiny.yaml --optim.lr 3e-4",
    ),
    "eval": (
        "eval",
        "decode benchmarks: acceptance length, speed-up, losslessness",
        "pipedraft eval --checkpoint assets/heads/eagle3 --benchmarks gsm8k --out out/eval",
    ),
    "inference": (
        "inference",
        "decode one prompt and stream the text",
        'pipedraft inference --checkpoint assets/heads/eagle3 --prompt "Write a haiku."',
    ),
    "demo": (
        "inference/demo",
        "decode one prompt without and with a draft, side by side",
        'pipedraft demo --prompt "What kinds of tea do you have today?"',
    ),
    "serve": (
        "inference/serving",
        "serve an OpenAI-compatible HTTP API, metrics and a chat page",
        "pipedraft serve --checkpoint assets/heads/spd_n4 --port 8000",
    ),
    "vllm": (
        "inference/vllm",
        "print or run vLLM's launch line to fill its pipeline with one request's drafts",
        "pipedraft vllm out/smollm2 --pipeline-parallel-size 2 --draft ngram",
    ),
    "audit": (
        "eval/audit",
        "compare a server with speculative decoding to the same model without it",
        "pipedraft audit --endpoint URL --baseline URL --model NAME",
    ),
    "data": (
        "data_recipes",
        "turn conversations or texts into token ids and loss masks",
        "pipedraft data --config configs/data/chat_mix.yaml --out out/chat_mix",
    ),
    "models": (
        "models",
        "import, export or push a checkpoint",
        "pipedraft models push --checkpoint assets/heads/eagle3 --repo user/name --dry-run",
    ),
    "doctor": (
        "doctor",
        "check this machine: versions, GPU, embedded target, Hub",
        "pipedraft doctor --json",
    ),
}


SUBCOMMANDS = {
    ("train", "features"): "train/features",
    ("data", "regenerate"): "data_recipes/regenerate",
}
"""Two-word commands with their own module; all other commands parse their second word."""


NESTED = {
    "models": ("import", "export", "push", "from-gguf"),
    "eval": ("compare", "parity", "replay", "report"),
    **{first: (second,) for first, second in SUBCOMMANDS},
}
"""Command -> second words, for a hint where one is typed alone."""


def usage() -> str:
    """Return the text for --help, which lists every command with a summary and an example."""
    lines = ["usage: pipedraft [--help] [--version] <command> ...", ""]
    for name, (_, summary, example) in COMMANDS.items():
        lines += [f"  {name:<12}{summary}", f"              {example}"]
        own = [f"`pipedraft {a} {b}`" for a, b in SUBCOMMANDS if a == name]
        lines += [f"              also {', '.join(own)}"] * bool(own)
    return "\n".join([*lines, "", "`pipedraft <command> --help` lists the options of a command."])


def main() -> None:
    """Run the command named in ``sys.argv``, or exit with status 2 if it is missing or unknown."""
    if len(sys.argv) < 2:
        print(usage(), file=sys.stderr)
        sys.exit(2)
    name, *arguments = sys.argv[1:]
    if name in ("-h", "--help", "--help-all"):
        from .endings import show_help

        show_help(usage())
    if name == "--version":
        print(f"pipedraft {__version__}")
        return
    if arguments and (name, arguments[0]) in SUBCOMMANDS:
        folder = SUBCOMMANDS[name, arguments[0]]
        name = f"{name} {arguments.pop(0)}"
    elif name in COMMANDS:
        folder, _, _ = COMMANDS[name]
    else:
        from .errors import nearest

        owner = next((first for first, words in NESTED.items() if name in words), None)
        hint = nearest(name, COMMANDS) if owner is None else f"did you mean '{owner} {name}'?"
        print(f"error: command: {name!r} is unknown; {hint}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"pipedraft {name}", *arguments]
    module = folder.replace("/", ".")
    runpy.run_module(f"{__package__}.{module}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
