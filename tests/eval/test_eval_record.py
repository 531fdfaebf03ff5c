"""results.json as types: written entries are read back, errors are one line with their place."""

import json
import re

import msgspec
import pytest
from eval_runs import make_runs, read_back

from pipedraft.errors import UsageError
from pipedraft.eval import compare
from pipedraft.eval.compare import Evaluated
from pipedraft.eval.record import Results, RunRecord, parse
from pipedraft.files import to_json


def change(path: str, value: object) -> dict:
    """An entry with another value at a.b.0.c."""
    (entry,) = read_back(make_runs(("gsm8k",), stages=(4,)))[1:]
    *places, last = (int(part) if part.isdigit() else part for part in path.split("."))
    inner = entry
    for place in places:
        inner = inner[place]
    inner[last] = value
    return entry


def test_what_is_written_is_what_is_read(tmp_path) -> None:
    runs = make_runs(("gsm8k",), stages=(4,))
    content = to_json(Results(runs=runs, overall=[]))
    found = parse(content, Results, tmp_path)
    assert to_json(found) == content
    assert [run.method for run in found.entries] == [run.method for run in runs]
    # An undefined rate is NaN in memory and null in the file; unset fields are left out.
    assert found.entries[0].draft_acceptance_rate is None
    assert not {"score", "repeats", "run"} & json.loads(content)["runs"][0].keys()


def test_keys_of_other_versions_are_skipped_and_theirs_may_lack(tmp_path) -> None:
    entry = change("a_new_key", {"of": ["any", {"depth": 1}]})
    for field in ("turns", "processes", "acceptance_by_entropy", "per_prompt", "verifier"):
        del entry[field]
    (found,) = parse(json.dumps({"runs": [entry]}).encode(), Results, tmp_path).entries
    assert (found.turns, found.per_prompt, found.verifier) == (0, [], "match")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("stages", "<b>", ["runs[0].stages", "Expected `int`, got `str`"]),
        ("stages", 0, ["runs[0].stages", ">= 1"]),
        ("tokens", 2**60, ["runs[0].tokens"]),
        ("benchmark", "x" * 200_000, ["runs[0].benchmark", "length"]),
        ("position_accepts", [1], ["runs[0]", "position_accepts has 1 entries"]),
        ("lossless.mismatches", 99, ["runs[0].lossless", "mismatches 99 of 16 checked"]),
        ("per_prompt.3.steps", None, ["runs[0].per_prompt[3].steps"]),
        ("acceptance_by_category", {"a": 3}, ["acceptance_by_category[...]", "Expected `object`"]),
    ],
)
def test_a_wrong_value_is_named_with_its_place(tmp_path, path, value, words) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"runs": [change(path, value)]}))
    with pytest.raises(UsageError) as caught:
        Evaluated.read(tmp_path)
    line = str(caught.value)
    for word in ["RUN", "results.json", *words, "run the evaluation again"]:
        assert word in line
    assert "\n" not in line and len(line) < 400


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\xfa{}", ["not JSON"]),
        (b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", ["nested too deeply"]),
        (b"[]", ["Expected `object`"]),
        (b'{"latency": [{"method": "a"}]}', ["latency[0]", "`temperature`"]),
    ],
    ids=range(4),
)
def test_what_is_no_results_file_is_refused(tmp_path, content, words) -> None:
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        Evaluated.read(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_a_file_is_of_bounded_size(tmp_path, monkeypatch) -> None:
    (tmp_path / "results.json").write_text("{}")
    monkeypatch.setattr(compare, "MAX_BYTES", 1)
    with pytest.raises(UsageError, match="more than"):
        Evaluated.read(tmp_path)


def test_every_number_of_a_record_is_bounded() -> None:
    """A new count without a lower end would be read unchecked."""
    schema = msgspec.json.schema(RunRecord)
    free = re.findall(r'"(\w+)": \{"type": "integer"\}', json.dumps(schema))
    assert free == []
