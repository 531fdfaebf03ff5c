"""AIPerf against `pipedraft serve`: its figures equal the engine's own."""

import json
import os
import shutil
import subprocess

import pytest
from http_runs import LENGTH, TEMPLATE, WAIT_S, alone, make_engine, serving
from tiny_models import byte_tokenizer

AIPERF = shutil.which("aiperf")
PROMPTS = ["Hello", "Legs?", "x", "Twelve-cats"]

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed: pip install aiperf"),
]


def values(record, name):
    return record["metrics"][name]["value"]


def test_aiperf_counts_the_tokens_and_acceptance_lengths_that_the_engine_counts(tmp_path):
    byte_tokenizer(TEMPLATE).save_pretrained(tmp_path / "tokenizer")
    lines = [json.dumps({"text": prompt}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    words = (
        "profile --model tiny --endpoint-type chat --streaming --use-server-token-count "
        f"--tokenizer {tmp_path}/tokenizer --input-file {tmp_path}/prompts.jsonl "
        "--custom-dataset-type single_turn --dataset-sampling-strategy sequential "
        f"--request-count {len(PROMPTS)} --concurrency 2 --artifact-dir {tmp_path}/found "
        f"--extra-inputs temperature:0 --extra-inputs max_tokens:{LENGTH} "
        "--max-workers 1 --record-processors 1 --ui none --no-gpu-telemetry --no-server-metrics"
    )
    # In offline mode, AIPerf looks for a folder's tokenizer among downloads.
    with serving(make_engine()) as place:
        ended = subprocess.run(
            [AIPERF, *words.split(), "--url", place.url],
            env={name: value for name, value in os.environ.items() if "OFFLINE" not in name},
            capture_output=True,
            text=True,
            timeout=5 * WAIT_S,
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    (export,) = (tmp_path / "found").rglob("profile_export.jsonl")
    records = [json.loads(line) for line in export.read_text().splitlines()]
    assert len(records) == len(PROMPTS) and not any(record.get("error") for record in records)
    found = sorted(
        (
            values(record, "output_sequence_length"),
            round(values(record, "spec_decode_acceptance_length"), 6),
            values(record, "spec_decode_accepted_draft_tokens"),
            values(record, "spec_decode_draft_tokens"),
            values(record, "spec_decode_steps"),
        )
        for record in records
    )
    reference = make_engine()
    own = [alone(reference, f"user:{prompt};", temperature=0.0) for prompt in PROMPTS]
    assert found == sorted(
        (
            len(result.token_ids),
            round(result.mean_acceptance_length, 6),
            result.num_accepted,
            result.num_tested,
            len(result.round_lengths),
        )
        for result in own
    )
