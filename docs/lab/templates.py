"""Check masks and parsed answers with TRL's chat templates. Run `python docs/lab/templates.py TRL`.

TRL is the folder of the package trl 1.16.0 (`pip download --no-deps trl==1.16.0`, then unzip). Each
template is tried with 200 random conversations, with tools and thinking where it reads them, with
TRL's response template if there is one (answers only: masks do not read it), and without it. Print
a line per template and the faults.
The tokenizer is the shipped one, with the special tokens that the template names.
"""

import argparse
import contextlib
import re
import sys
from collections import Counter
from pathlib import Path

from transformers import AutoTokenizer

import pipedraft

ROOT = Path(pipedraft.__file__).parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from template_runs import TOOL, Property, conversations, with_marks  # noqa: E402

from pipedraft.chats import ChatRefused  # noqa: E402

SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<\|\"\|>|</?s>|<(?:bos|eos)>|"
    r"<(?:start|end)_of_[a-z]+>|\[/?INST\]"
)
NO_TOOLS = "deepseek_r1_distill"
"""A template that drops calls; TRL says so, too."""
NO_TEXT = ("idefics3", "llava_next", "smolvlm")
"""Templates of vision models that read contents as parts, and no text."""
SIZES = ("conversations", "turns", "texts of others", "closing tokens", "answers")
LEFT_OUT = (
    "turns that are not rendered",
    "turns that differ from the prompt",
    "answers that do not begin with their prompt",
    "answers that no template explains",
    "refused by the template",
)


def properties(name: str, template: str, schema: object) -> Property:
    """Return a template's property, with a tokenizer that has its special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "target")
    with_marks(tokenizer, template, [*dict.fromkeys(SPECIAL.findall(template))])
    ends = [x for x in ("<|return|>", "<|im_end|>", "<|eot_id|>", "</s>") if x in template]
    if ends:
        tokenizer.eos_token = ends[0]
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    if schema is not None:
        tokenizer.response_template = schema
    reads_tools = "tool_calls" in template and not name.startswith(NO_TOOLS)
    return Property(tokenizer, [TOOL] if reads_tools else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trl", type=Path, help="folder of the package trl 1.16.0")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--only", default="", help="part of a template's name")
    given = parser.parse_args()
    sys.path.insert(0, str(given.trl.parent))
    from trl.chat_template_utils import add_response_schema  # type: ignore[import-not-found]

    total: Counter[str] = Counter()
    print("| template | schema |", " | ".join([*SIZES, *LEFT_OUT, "faults"]), "|")
    print("|---" * (len(SIZES) + len(LEFT_OUT) + 3) + "|")
    for path in sorted((given.trl / "chat_templates").glob("*.jinja")):
        if given.only not in path.name or path.name.startswith(NO_TEXT):
            continue
        template = path.read_text()
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "target")
        tokenizer.chat_template = template
        schemas: list[object] = [None]
        with contextlib.suppress(ValueError):  # TRL has none for this template
            schemas.append(add_response_schema(tokenizer).response_template)
        for schema in schemas:
            found = properties(path.stem, template, schema)
            thinks = re.search(r"thinking|reasoning|</think>", template) is not None
            for messages in conversations(
                given.conversations, thinks=thinks, tools=found.tools is not None
            ):
                try:
                    found.check(messages, masks=schema is None)
                except ChatRefused:
                    found.counts["refused by the template"] += 1
            total += found.counts + Counter(faults=len(found.faults), templates=1)
            row = [found.counts[x] for x in (*SIZES, *LEFT_OUT)] + [len(found.faults)]
            print(f"| {path.stem} | {'TRL' if schema else 'own'} |", " | ".join(map(str, row)), "|")
            for fault in found.faults[:3]:
                print(f"    {fault}")
            sys.stdout.flush()
    print(dict(total))


if __name__ == "__main__":
    main()
