"""Chat templates with all shapes of turns, random conversations, and the property of their masks.

The property knows nothing of how masks are made. Each text of a conversation has words of its own,
so their places in the rendered text show whose a token is.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

from pipedraft.chats import render_chat
from pipedraft.data_recipes.answers import Dialogue, RowFailed
from pipedraft.data_recipes.chat import ChatRenderer
from pipedraft.data_recipes.conversations import Conversation
from pipedraft.data_recipes.local import stored_answer
from pipedraft.responses import Response

Messages = list[dict[str, Any]]
CALL = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' + c.function|tojson + '\n</tool_call>' }}"
    "{% endfor %}"
)
TEMPLATES = {
    # gpt-oss: channels; earlier turns lose the thinking and end with another token.
    "channels": (
        "{% set ns = namespace(name='') %}{% if tools %}{{ '<|start|>developer<|message|>' }}"
        "{% for t in tools %}{{ t.function|tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|start|>functions.' + ns.name + "
        "' to=assistant<|channel|>commentary<|message|>' + m.content|tojson + '<|end|>' }}"
        "{% elif m.role != 'assistant' %}"
        "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
        "{% else %}{% set end = loop.last and not add_generation_prompt %}"
        "{% if m.thinking and (end or m.tool_calls) %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
        "{% endif %}{{ '<|start|>assistant' }}{% if m.tool_calls %}"
        "{% set f = m.tool_calls[0].function %}{% set ns.name = f.name %}"
        "{{ ' to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
        "{{ f.arguments|tojson + '<|call|>' }}{% else %}"
        "{{ '<|channel|>final<|message|>' + m.content + ('<|return|>' if end else '<|end|>') }}"
        "{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    ),
    # Qwen3: thinking behind the last question only, an empty block where there is none.
    "last thinking": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
        "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
        "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
        "{{ m.content }}" + CALL + "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # Nemotron: the prompt opens the thinking, an earlier turn has an empty block.
    "opened thinking": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% if loop.last and m.reasoning_content %}"
        "{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}"
        "{% else %}{{ '<think></think>' }}{% endif %}{% endif %}{{ m.content }}"
        + CALL
        + "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    # DeepSeek-R1's distilled models: the prompt opens the thinking, no turn keeps it.
    "no thinking": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|im_start|>' + m.content.split('</think>')[-1].strip() + '<|im_end|>' }}"
        "{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|><think>\n' }}{% endif %}"
    ),
    # GLM: the next turn's header ends a turn.
    "no closing": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}"
        "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
        "{{ '<think>' + m.reasoning_content + '</think>\n' }}{% endif %}{{ m.content }}"
        + CALL
        + "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    # Llama 2 and Mistral: no header of the assistant's own.
    "instruct": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content|trim + '</s>' }}"
        "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    # Phi-3: the whole text ends with a token that no turn ends with.
    "end of text": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|return|>' }}"
        "{% endif %}"
    ),
    # Cohere: two tokens close a turn.
    "two closings": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|start|>' + m.content + "
        "'<|end|><|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|start|>' }}{% endif %}"
    ),
    # Only the last turn has a closing token.
    "last closing": (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' and "
        "loop.last %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    ),
    # Generation marks around the header as well.
    "marked": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
MARKS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "</s>"),
    *("<|constrain|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "most": {"type": "integer"}},
        },
    },
}
LINES = (
    "Count: 1, 2, 345.",
    "def f(x):\n    return x\n",
    "\u00e9t\u00e9 \u65e5\u672c \U0001f600",
    "# A title\n\n- a point\n- another",
    "assistant",
    "user: hello",
    "the <b>bold</b> mark",
    "Is 3 < 5?",
    "   two   spaces",
)


def conversations(count: int, *, thinks: bool, tools: bool, seed: int = 0) -> Iterator[Messages]:
    """Yield random conversations of one to four rounds. Every text begins and ends with own words.

    Args:
        thinks: half of the answers have thinking.
        tools: some rounds call the tool first.
    """
    rng = random.Random(seed)
    number = 0

    def text(owner: str) -> str:
        nonlocal number
        number += 1
        middle = "\n".join(rng.sample(LINES, rng.randint(0, 3)))
        return f"{owner}q{number}q {middle} {owner}z{number}z"

    for _ in range(count):
        messages: Messages = []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": text("other")})
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": text("other")})
            is_thinking = thinks and rng.random() < 0.5
            if tools and rng.random() < 0.4:
                arguments = {"word": text("own")} | ({"most": 3} if rng.random() < 0.5 else {})
                call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
                turn = {"role": "assistant", "content": "", "tool_calls": [call]}
                messages.append(turn | ({"reasoning_content": text("own")} if is_thinking else {}))
                messages.append({"role": "tool", "content": text("other"), "name": "look_up"})
            turn = {"role": "assistant", "content": text("own")}
            messages.append(turn | ({"reasoning_content": text("own")} if is_thinking else {}))
        yield messages


def place_of(word: str, text: str) -> int:
    """Return a word's place, which is its only one, or -1."""
    assert text.count(word) <= 1, f"{word} is in the text {text.count(word)} times"
    return text.find(word)


WORD = re.compile(r"(?:own|other)[qz]\d+[qz]")
Mask = Callable[[Messages], tuple[str, list[tuple[int, int, int]]]]
"""Messages -> rendered text, and (start, end, loss) per token."""


@dataclass
class Property:
    """Counts of one template's tokens and answers, and its faults."""

    tokenizer: Any
    tools: list[dict[str, Any]] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    store: Callable[..., Response] = stored_answer

    def __post_init__(self) -> None:
        self.renderer = ChatRenderer(self.tokenizer, keeps_thinking=True)
        self.special = [*self.tokenizer.get_added_vocab()]
        found = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        self.ending = re.compile(rf"(?s)^.*?((?:{found}))(?:\s|{found})*\Z")
        self.closing = re.compile(rf"[^\S\n]*(?:{found})")

    def mask(self, messages: Messages) -> tuple[str, list[tuple[int, int, int]]]:
        chat = self.renderer.render(Conversation(messages, self.tools))
        encoding = self.tokenizer(
            chat.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ((ids, mask),) = self.renderer.tokenize([chat])
        assert ids == encoding["input_ids"]
        places = zip(encoding["offset_mapping"], mask, strict=True)
        return chat.text, [(start, end, loss) for (start, end), loss in places]

    def prompt(self, messages: Messages, *, prompt: bool = True) -> str:
        return render_chat(self.tokenizer, messages, prompt=prompt, tools=self.tools)

    def check(self, messages: Messages, *, masks: bool = True) -> None:
        """Check a conversation as a whole, and each of its turns as the last one.

        Args:
            masks: False to check answers only.
        """
        self.counts["conversations"] += 1
        if masks:
            self._check_mask(messages)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                if masks and index + 1 < len(messages):
                    self._check_mask(messages[: index + 1])
                self._check_answer(messages[: index + 1])

    def _fail(self, what: str, text: str, at: int) -> None:
        self.faults.append(f"{what}: {text[max(0, at - 60) : at]!r} HERE {text[at : at + 60]!r}")

    def _check_mask(self, messages: Messages) -> None:
        text, tokens = self.mask(messages)
        marked = [False] * len(text)
        for start, end, loss in tokens:
            if loss:
                marked[start:end] = [True] * (end - start)
        for message in messages:
            if message["role"] == "assistant":
                continue
            first, last = WORD.findall(message["content"])
            begin, end = place_of(first, text), place_of(last, text) + len(last)
            self.counts["texts of others"] += begin >= 0
            if begin >= 0 and any(marked[begin:end]):
                self._fail(
                    "another's token is supervised", text, begin + marked[begin:].index(True)
                )
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                self._check_turn(messages, index, text, tokens, marked)

    def _check_turn(
        self,
        messages: Messages,
        index: int,
        text: str,
        tokens: list[tuple[int, int, int]],
        marked: list[bool],
    ) -> None:
        """The turn is supervised from the prompt's end to the closing token."""
        message = messages[index]
        calls = [c["function"]["arguments"]["word"] for c in message.get("tool_calls", ())]
        own = [message.get("reasoning_content", ""), message["content"], *calls]
        words = [word for part in own for word in WORD.findall(part) if word in text]
        if not words:
            self.counts["turns that are not rendered"] += 1
            return
        begin = min(place_of(word, text) for word in words)
        end = max(place_of(word, text) + len(word) for word in words)
        prompt, before = (self.prompt(messages[:index], prompt=x) for x in (True, False))
        header = prompt[len(commonprefix([prompt, before])) :]
        if text.startswith(prompt):
            start = len(prompt)
        else:  # an earlier turn differs, or the prompt opens the thinking
            bare = header.rstrip().removesuffix("<think>") if "<think>" in header else header
            others = [m.end() for m in re.finditer(r"otherz\d+z", text[:begin])]
            at = text.rfind(bare, max(others, default=0), begin)
            start = at + len(bare) if at >= 0 and bare else begin
            if bare != header and text.startswith("<think>", start):
                start += len("<think>")
            self.counts["turns that differ from the prompt"] += 1
        first = start - len(header)
        # A token that ends within the turn is the target's.
        inside = any(loss and first <= a and b <= start for a, b, loss in tokens)
        if header and inside and text.startswith(header, first):
            self._fail("the prompt is supervised", text, first)
        alone = self.prompt(messages[: index + 1], prompt=False)
        last = max(words, key=lambda word: text.index(word))
        tail = alone[alone.index(last) + len(last) :] if last in alone else ""
        ends = self.ending.search(tail)
        if self.renderer.marks_generation:
            start = begin  # marks may take a header away
        if ends is not None:
            same = text.startswith(tail[: ends.end(1)], end)
            other = self.closing.match(text, end)
            if same:
                end += ends.end(1)
            elif other is not None and not text[other.end() :].lstrip().startswith("other"):
                end = other.end()
            self.counts["closing tokens"] += 1
        elif tail and text.startswith(tail.rstrip(), end):
            end += len(tail.rstrip())
        self.counts["turns"] += 1
        self.counts["characters"] += end - start
        if not all(marked[start:end]):
            self._fail(
                "the target's token is not supervised", text, start + marked[start:end].index(False)
            )
        following = text[end:]
        if following and marked[end] and self.closing.match(text, end) is None:
            self._fail("a token behind the turn is supervised", text, end)

    def _check_answer(self, messages: Messages) -> None:
        """A parsed answer has its fields, and renders into the tokens that the target wrote."""
        question, message = messages[:-1], messages[-1]
        prompt = self.prompt(question)
        text, tokens = self.mask(messages)
        if not text.startswith(prompt):
            self.counts["answers that do not begin with their prompt"] += 1
            return
        end = max((b for _, b, loss in tokens if loss), default=len(prompt))
        # A token may join a space of the prompt with the answer: the target writes the latter.
        written = text[len(prompt) : end]
        own = self.tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]
        ends = {*self.tokenizer.convert_tokens_to_ids(self.special)}
        last = own[-1] if own and own[-1] in ends else None
        own = own if last is None else own[:-1]
        dialogue = Dialogue(0, "", {}, [question], self.tools)
        try:
            answer = self.store(self.tokenizer, dialogue, prompt, own, thinking="keep", end=last)
            again, places = self.mask([*question, answer.message()])
        except RowFailed as error:
            if "special tokens" not in str(error):
                self._fail(str(error), text, len(prompt))
            self.counts["answers that no template explains"] += 1
            return
        except ValueError as error:
            self.faults.append(f"no answer: {error}: {text[len(prompt) :]!r}")
            return
        self.counts["answers"] += 1
        thought = WORD.findall(message.get("reasoning_content", ""))
        if any(word in answer.content for word in thought):
            self.faults.append(f"thinking in the content: {answer}")
        if again != text or places != tokens:
            at = len(commonprefix([again, text]))
            self._fail(f"another text than written ({answer})", again, at)


def with_marks(tokenizer: Any, template: str, marks: Sequence[str] = MARKS) -> Any:
    """Give a tokenizer a template and its special tokens."""
    tokenizer.add_special_tokens({"extra_special_tokens": [*marks]})
    tokenizer.chat_template = template
    return tokenizer
