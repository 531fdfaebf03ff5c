"""Answer `pipedraft train --help` before torch is imported."""

from collections.abc import Sequence

from ..endings import show_help

METHODS = ("spd", "ppsd", "eagle", "eagle3", "mtp", "dflash", "dspark", "flexspec")
SHORT_HELP = f"""\
usage: pipedraft train --config FILE [--config FILE ...] [--a.b VALUE ...]

Train a draft head. More than one process: accelerate launch -m pipedraft.train --config FILE

  --config FILE             YAML file; later ones override earlier, options override both
  --plan FILE               estimate parameters, memory and speed for this configuration, and end
  --wish-tau X              with --plan, for spd and ppsd: tokens and conversations for this
                            acceptance length, by our measured runs or by yours, --curve FOLDER
  --overfit-one [N]         first on a new target: learn one conversation by heart in N steps
                            (400); status 0 if decoding then accepts all of its answer
  --method NAME             {", ".join(METHODS)}
  --target NAME             folder or Hub id of the frozen target
  --out DIR                 folder for metrics.jsonl, best/ and checkpoints/; a run resumes there
  --data FILE               conversations: a file, a folder or a Hub id, or several with commas
  --data.max_length N       tokens per row
  --max_steps N             optimizer steps; or --epochs X
  --max_minutes X           end after X minutes; run the same command again to resume
  --batch_tokens N          tokens per forward pass and process
  --optim.name NAME         adamw or muon
  --optim.lr X              peak learning rate
  --precision NAME          auto, bf16 or fp32
  --evaluation.every_steps N    steps between validations
  --save_every_steps N      steps between checkpoints
  --trackers LIST           for example [wandb]
  --help-all                every option; add --method NAME for another method's

Hyphens and underscores are the same: --max-steps is --max_steps, and --out is --output_dir.

example:
  pipedraft train --config configs/spd/tiny.yaml --optim.lr 3e-4
  pipedraft train --plan configs/spd/tiny.yaml --wish-tau 3.5
  pipedraft train --config configs/spd/tiny.yaml --overfit-one

SIGTERM and Ctrl-C finish the step, save and end with status 143 and 130; run the same command again
to resume."""
EXAMPLE = (
    "example:\n"
    "  pipedraft train --config configs/spd/tiny.yaml --optim.lr 3e-4\n"
    "  pipedraft train --plan configs/spd/tiny.yaml\n"
    "  pipedraft train --config configs/spd/tiny.yaml --overfit-one\n"
    "  accelerate launch -m pipedraft.train --config configs/spd/tiny.yaml   # many processes\n\n"
    "--plan estimates what a run needs: parameters, memory, speed; with --wish-tau X also tokens\n"
    "and conversations for this acceptance length, by the runs that ship or by --curve FOLDER.\n"
    "--overfit-one [N] trains on one conversation for up to N steps (400), and ends with status 0\n"
    "if decoding accepts all of its answer. SIGTERM and Ctrl-C finish the step, save and end with\n"
    "status 143 and 130; run the same command again to resume."
)


def answer_early(words: Sequence[str]) -> None:
    """Print the help and exit if ``words`` ask for it."""
    if "--help-all" not in words and any(word in ("-h", "--help") for word in words):
        show_help(SHORT_HELP)
