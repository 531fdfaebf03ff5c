"""Text groups: rows are mixed by group, and acceptance is counted by group."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from data_rows import write
from transformers import AutoTokenizer

from pipedraft.data_recipes.config import DataConfig, Source
from pipedraft.data_recipes.groups import (
    balance,
    context_of,
    groups_of,
    language_of,
    segments_of,
)
from pipedraft.data_recipes.recipe import load_data
from pipedraft.eval import groups as eval_groups
from pipedraft.eval.groups import acceptance_by_group, count_groups, text_entropy, token_segments
from pipedraft.eval.record import PromptRecord
from pipedraft.inference.result import DecodeResult

TARGET = Path(__file__).resolve().parents[2] / "assets" / "target"
TEXTS = {
    "en": "The answer to that is in the box, and it was for you.",
    "de": "Die Antwort ist nicht in der Kiste, und ich habe sie auf dem Tisch.",
    "fr": "Les réponses sont dans la boîte, et vous avez une clé pour le coffre.",
    "da": "Svaret er ikke i kassen, og jeg har det på bordet med en nøgle.",
    "zh": "答案不在盒子里",
    "ja": "答えは箱の中にありません",
    "cyrillic": "Ответа нет в коробке",
    "unknown": "def f(x): return x",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_names_its_language(name: str) -> None:
    assert language_of(TEXTS[name]) == name


def test_kinds_of_text_follow_their_marks() -> None:
    text = "<think>a ``` b</think>c```py\nd```e<tool_call>{}</tool_call>f"
    ends = [0, *(end for end, _ in segments_of(text))]
    parts = [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    kinds = [kind for _, kind in segments_of(text)]
    assert kinds == ["thinking", "answer", "code", "answer", "tool call", "answer"]
    assert parts == ["<think>a ``` b</think>", "c", "```py\nd```", "e", text[-26:-1], "f"]
    assert segments_of("so</think>4", "thinking") == [(10, "thinking"), (11, "answer")]
    assert groups_of([{"role": "assistant", "content": f"{TEXTS['de']}```x = 1```"}]) == (
        "de",
        "code",
    )
    assert [context_of(n) for n in (0, 511, 512, 99_999)] == ["0", "0", "512", "16384"]


def test_rows_have_the_shares_that_are_asked_for(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": text}]}
        for name, number in {"en": 60, "de": 12, "fr": 6}.items()
        for i in range(number)
        for text in [f"{TEXTS[name]} {i}"]
    ]
    config = DataConfig(
        sources=[write(tmp_path / "rows.jsonl", rows)],
        cache_dir=str(tmp_path / "cache"),
        valid_fraction=0,
        group_shares={"language/de": 0.5, "language/en": 0.4},
    )
    report = load_data(config, AutoTokenizer.from_pretrained(TARGET)).report
    found = {name: count / report.train_rows for name, count in report.groups.items()}
    assert abs(found["language/de"] - 0.5) < 0.1
    assert abs(found["language/fr"] - 0.1) < 0.05
    assert abs(report.train_rows - len(rows)) < 15
    assert "language/de" in report.summary()


def test_several_dimensions_are_fitted_together() -> None:
    groups = {
        "language": np.array(["en"] * 6 + ["de"] * 2),
        "segment": np.array(["code", "answer"] * 4),
    }
    weights = balance(np.ones(8), groups, {"language/de": 0.5, "segment/code": 0.25})
    assert weights.sum() == pytest.approx(8)
    assert weights[groups["language"] == "de"].sum() == pytest.approx(4)
    assert weights[groups["segment"] == "code"].sum() == pytest.approx(2)
    with pytest.raises(ValueError, match="no good row is of language/fr"):
        balance(np.ones(8), groups, {"language/fr": 0.5})


@pytest.mark.parametrize(
    "shares", [{"speech/de": 0.5}, {"context/7": 0.5}, {"language/de": 0.8, "language/fr": 0.3}]
)
def test_shares_of_no_group_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"data\.group_shares: "):
        DataConfig(sources=[Source(path="rows.jsonl")], group_shares=shares)


@dataclass
class Letters:
    """A tokenizer with one token per character."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


TEXT = "Hi```x```"
RESULT = DecodeResult(
    prompt_ids=[65] * 505,
    token_ids=[ord(letter) for letter in TEXT],
    text=TEXT,
    stop_reason="eos",
    num_stages=2,
    round_lengths=[3, 2, 3],
    round_ends="rua",
    position_tests=[3, 2, 2],
    position_accepts=[3, 2, 1],
)


@pytest.mark.parametrize("mutant", ["", "token_tests", "sum_groups"])
def test_every_dimension_adds_up_to_the_totals(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant that loses one test or one round is caught."""
    if mutant:
        whole = getattr(eval_groups, mutant)
        loses = {
            "token_tests": lambda result: list(whole(result))[:-1],
            "sum_groups": lambda parts: whole(list(parts)[:-1]),
        }
        monkeypatch.setattr(eval_groups, mutant, loses[mutant])
    counts = count_groups(RESULT, "Hi", TEXTS["de"], Letters())  # type: ignore[arg-type]
    totals = [RESULT.num_tested, RESULT.num_accepted, len(RESULT.round_lengths), RESULT.num_tokens]
    for dimension in ("context", "language", "place", "segment", "text entropy"):
        own = [values for name, values in counts.items() if name.startswith(f"{dimension}/")]
        assert (list(map(sum, zip(*own, strict=True))) == totals) is not bool(mutant)


def test_tests_and_rounds_are_counted_by_group() -> None:
    tokenizer: object = Letters()
    kinds = list(token_segments(RESULT, tokenizer))  # type: ignore[arg-type]
    assert kinds == ["answer"] * 2 + ["code"] * 7
    counts = count_groups(RESULT, "Hi", TEXTS["de"], tokenizer)  # type: ignore[arg-type]
    # Tested: i ` ` (rejected), x, ` ` ` (accepted): the second round's last token was not.
    assert counts["segment/answer"] == [1, 1, 1, 3]
    assert counts["segment/code"] == [6, 5, 2, 5]
    assert counts["language/de"] == [7, 6, 3, 8]
    assert counts["context/0"][0] + counts["context/512"][0] == 7
    assert counts["place/0"] == [7, 6, 3, 8]
    # 64 equal tokens before the answer.
    assert counts["text entropy/0"] == [7, 6, 3, 8]
    row = PromptRecord(benchmark="b", id="1", tokens=8, steps=8, groups=counts)
    code = next(x for x in acceptance_by_group([row, row]) if x.group == "segment/code")
    assert (code.tests, code.accepts, code.mean_acceptance_length) == (12, 10, 2.5)


def test_a_text_entropy_is_that_of_the_tokens_before() -> None:
    """The formula, then the edges: 2, 8, 32 and 64 different tokens, and too few of them."""
    assert text_entropy([7] * 64) == pytest.approx(0)
    assert text_entropy([1, 1, 2, 3]) == pytest.approx(1.5 * math.log(2))
    assert text_entropy(range(64)) == pytest.approx(math.log(64))
    for kinds, group in ((2, "0"), (8, "2"), (16, "2.5"), (32, "3"), (64, "3.5")):
        result = replace(RESULT, prompt_ids=[65 + i % kinds for i in range(64)])
        counts = count_groups(result, "Hi", TEXTS["de"], Letters())  # type: ignore[arg-type]
        assert f"text entropy/{group}" in counts, kinds
    short = replace(RESULT, prompt_ids=[65] * 50)
    counts = count_groups(short, "Hi", TEXTS["de"], Letters())  # type: ignore[arg-type]
    assert counts["text entropy/start"] == [7, 6, 3, 8]


def test_rounds_without_places_count_for_the_whole_turn() -> None:
    unplaced = replace(RESULT, round_ends="")
    counts = count_groups(unplaced, "Hi", TEXTS["de"], Letters())  # type: ignore[arg-type]
    whole = [7, 6, 3, 8]
    assert counts == {"context/0": whole, "segment/several": whole, "language/de": whole}
    plain = replace(unplaced, token_ids=[ord(x) for x in "Hi there."])
    assert "segment/answer" in count_groups(plain, "Hi", TEXTS["de"], Letters())  # type: ignore[arg-type]


def test_groups_are_listed_in_the_order_of_their_numbers() -> None:
    names = ["text entropy/3", "text entropy/2.5", "text entropy/start", "place/128", "place/32"]
    row = PromptRecord(
        benchmark="b", id="1", tokens=8, steps=8, groups={name: [2, 1, 1, 2] for name in names}
    )
    listed = [one.group for one in acceptance_by_group([row])]
    assert listed == [
        "place/32",
        "place/128",
        *("text entropy/" + x for x in ("start", "2.5", "3")),
    ]
