"""A fake chat server and conversations, for tests of regeneration."""

import json
import signal
import sys
import threading
import time
import zlib
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipedraft.data_recipes import chat_client as chat_server
from pipedraft.data_recipes import regenerate
from pipedraft.endings import run_command

FAULTS = ("error", "busy", "closed", "not_json", "slow", "empty")
DEADLINE_S = 5.0
"""Deadline for an answer; a machine under load may stand still for seconds."""
LIMIT_S = 60.0
"""Time limit for awaited events."""


def reply_to(messages: list[dict]) -> str:
    """Return the server's reply: a function of all messages read."""
    return f"{messages[-1]['content']} / {zlib.crc32(json.dumps(messages).encode()):08x}"


def fault_of(question: str) -> str:
    """Fault for a question: 20 % fail, the first time they are asked."""
    code = zlib.crc32(question.encode())
    return FAULTS[code // 5 % len(FAULTS)] if code % 5 == 0 else ""


class FakeServer(ThreadingHTTPServer):
    """OpenAI's chat completions on a free port; every attribute may be changed while it runs."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.lock = threading.Lock()
        self.times: dict[str, list[float]] = {}
        self.bodies: list[dict] = []
        self.in_flight = self.most_in_flight = 0
        self.delay_s = 0.0
        self.least_in_flight = 0
        """Hold answers until this many requests are in flight."""
        self.held: set[str] = set()
        self.num_unheld = sys.maxsize
        """Hold further requests, and the questions in ``held``, until ``release``."""
        self.released = threading.Event()
        self.is_faulty = False
        self.refused: set[str] = set()
        self.cut: set[str] = set()
        """Questions whose answers end at the token limit."""
        self.answer_all_with: bytes | None = None
        self.key: str | None = None
        self.models = ["tiny"]

    @property
    def counts(self) -> Counter[str]:
        """Count the requests by their last message."""
        with self.lock:
            return Counter({question: len(times) for question, times in self.times.items()})

    def release(self) -> None:
        """Answer every held request, and hold nothing from now on."""
        self.held, self.num_unheld = set(), sys.maxsize
        self.released.set()

    def handle_error(self, request, client_address) -> None:
        """Ignore clients that are killed or give up."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.send(401, b"no key")
        elif self.path == "/v1/models":
            served = [{"id": name} for name in self.server.models]
            self.send(200, json.dumps({"data": served}).encode())
        else:
            self.send(404, b"nothing here")

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with server.lock:
            times = server.times.setdefault(question, [])
            times.append(time.monotonic())
            is_first = len(times) == 1
            server.bodies.append(body)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            is_held = question in server.held or len(server.bodies) > server.num_unheld
        if is_held:
            server.released.wait(LIMIT_S)
        until_s = time.monotonic() + LIMIT_S
        while server.most_in_flight < server.least_in_flight and time.monotonic() < until_s:
            time.sleep(0.005)
        time.sleep(server.delay_s)
        fault = fault_of(question) if server.is_faulty and is_first else ""
        if fault == "slow":
            time.sleep(DEADLINE_S + 0.5)
        with server.lock:
            server.in_flight -= 1
        if self.server.answer_all_with is not None:
            self.send(200, self.server.answer_all_with)
        elif question in server.refused:
            self.send(400, b'{"error": "too long"}')
        elif fault == "error":
            self.send(500, b"out of order")
        elif fault == "busy":
            self.send(429, b"too many", Retry_After="1")
        elif fault == "closed":
            self.close_connection = True
        elif fault == "not_json":
            self.send(200, b'{"choices": [')
        else:
            content = "" if fault == "empty" else reply_to(body["messages"])
            message = {"role": "assistant", "content": content}
            reason = "length" if question in server.cut else "stop"
            choice = {"index": 0, "message": message, "finish_reason": reason}
            self.send(200, json.dumps({"choices": [choice]}).encode())


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(chat_server, "FIRST_WAIT_S", 0.02)
    with FakeServer() as fake:
        threading.Thread(target=fake.serve_forever, args=(0.02,), daemon=True).start()
        yield fake
        fake.shutdown()


@pytest.fixture(autouse=True)
def signals():
    """Restore the signal handlers: the command sets its own for SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def conversation(number: int, turns: int) -> dict:
    said = [
        {"role": role, "content": f"{role} {number}.{turn}"}
        for turn in range(turns)
        for role in ("user", "assistant")
    ]
    return {"conversations": said, "id": number}


def expected_messages(number: int, turns: int) -> list[dict]:
    messages: list[dict] = []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": f"user {number}.{turn}"}]
        messages = [*messages, {"role": "assistant", "content": reply_to(messages)}]
    return messages


def make_data(folder: Path, num_rows: int) -> tuple[Path, list[list[dict]]]:
    """Make conversations with one to three turns, and the server's replies to them."""
    turns = [1 + number % 3 for number in range(num_rows)]
    rows = [conversation(number, count) for number, count in enumerate(turns)]
    data = write_rows(folder / "chats.jsonl", rows)
    return data, [expected_messages(number, count) for number, count in enumerate(turns)]


def call(given: list[str], monkeypatch) -> int:
    """Run the command in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["regenerate", *map(str, given)])
    try:
        run_command(regenerate.main)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    return 0
