"""Several conversations evaluated at once: counts and outputs equal each one's alone."""

import eval_runs
import pytest
from eval_runs import assert_refused, command, make_prompts
from msgspec import UNSET
from msgspec.structs import replace

from pipedraft.eval.evaluation import EvalMethod, Evaluation
from pipedraft.files import to_json
from pipedraft.inference.batch import BatchEngine
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel

tokenizer, target, folders = eval_runs.tokenizer, eval_runs.target, eval_runs.folders
model = eval_runs.model
COSTLY = CostModel(row=0.05, link=0.01, draft_forward=0.05)
METHODS = (
    {"schedule": "spd", "temperature": 0.0},
    {"schedule": "spd", "tree_width": "auto", "temperature": 1.0},
    {"schedule": "flowspec_continued", "step_tokens": "auto", "temperature": 1.0},
    {"schedule": "eagle", "tree": "dynamic:3:2:4", "temperature": 0.0},
)


def evaluate(model, settings, sequences: int) -> list:
    """Evaluate conversations with one and two turns, more than are decoded at once."""
    talks = [["a", "b and"], ["long ago" * 9], ["c"], ["d d", "e", "f"], ["g"]]
    config = DecodeConfig.of(num_stages=2, max_new_tokens=12, cost=COSTLY, **settings)
    comparison = Evaluation(
        target=model.target,
        tokenizer=model.tokenizer,
        benchmarks={"one": make_prompts("one", *talks)},
        reference=model.target,
        sequences=sequences,
    )
    return comparison.run([EvalMethod(name="own", config=config, draft=model.draft)])


def counts(entries) -> list[bytes]:
    """Fields that do not depend on the wall clock."""
    kept = []
    for entry in entries:
        rows = [replace(row, decode_s=UNSET, decode_s_repeats=[]) for row in entry.per_prompt]
        kept.append(to_json(replace(entry, per_prompt=rows, wallclock=None, processes=[])))
    return kept


@pytest.mark.parametrize("settings", METHODS, ids=lambda s: s["schedule"])
def test_counts_and_texts_are_those_of_one_after_the_other(settings, model) -> None:
    alone, together = evaluate(model, settings, 1), evaluate(model, settings, 3)
    assert counts(together) == counts(alone)
    assert together[-1].lossless.mismatches == 0
    assert all(entry.wallclock is None for entry in together)
    assert all(row.decode_s is UNSET for entry in together for row in entry.per_prompt)


def test_a_draft_that_weighs_the_company_counts_otherwise(model, monkeypatch) -> None:
    """The comparison finds steps that depend on the number of conversations."""
    made = BatchEngine.__init__

    def in_company(*given, counts_alone, **named) -> None:
        made(*given, counts_alone=False, **named)

    alone = counts(evaluate(model, METHODS[1], 1))
    monkeypatch.setattr(BatchEngine, "__init__", in_company)
    assert counts(evaluate(model, METHODS[1], 3)) != alone


@pytest.mark.parametrize("words", ["--repeats 2", "--calibrate cost.json", "--backend process"])
def test_what_measures_times_is_refused(words, folders, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--sequences", "4", *words.split()]
    assert_refused(capsys, command(folders, *given), ["--sequences: 4, but", words.split()[0]])
    assert not folders.out.exists()
