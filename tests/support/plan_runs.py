"""The plan for a made-up run."""

import tempfile

from transformers import PreTrainedConfig

from pipedraft.train.config import parse_run
from pipedraft.train.methods import methods
from pipedraft.train.plan import Plan
from pipedraft.train.run import registry


def make_plan(
    method: str, target: PreTrainedConfig, tokens: int, batch_tokens: int, options: list[str]
) -> Plan:
    """Plan for these sequence and batch lengths, in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        target.save_pretrained(folder)
        arguments = [f"--method={method}", f"--target={folder}", f"--output_dir={folder}/out"]
        arguments += [f"--data.max_length={tokens}", f"--batch_tokens={batch_tokens}"]
        arguments += ["--precision=bf16", "--data.sources=[{path: none}]", *options]
        run, model, _ = parse_run(arguments, methods(), "")
        return Plan(run, model, registry()[method])
