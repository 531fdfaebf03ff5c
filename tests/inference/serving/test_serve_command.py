"""`pipedraft serve` as a command: until a signal, on ranks, with TLS, with bad options."""

import json
import re
import runpy
import signal
import ssl
import sys
import urllib.request

import httpx
import openai
import pytest
from command_processes import Process, make_certificate
from command_runs import assert_one_line, call
from fork_server import rank_environments
from http_runs import WAIT_S
from torch.distributed import TCPStore


@pytest.fixture
def command(parent, tmp_path):
    """Starts `pipedraft serve` as a process, ended with the test."""
    started = []

    def start(*arguments: str, **environment: str) -> tuple[Process, str]:
        module = "pipedraft.inference.serving"
        words = ("--port", "0", *arguments)
        process = Process.start(parent, tmp_path, *words, module=module, environment=environment)
        started.append(process)
        return process, process.wait_for(r"on https?://127\.0\.0\.1:(\d+) \(.*\n")[1]

    yield start
    end(started)


def end(processes: list[Process]) -> None:
    for process in processes:
        if process.status is None:
            process.send(signal.SIGKILL)
            process.finish()


@pytest.fixture
def ranks(parent, repository, tmp_path):
    """The embedded target on two ranks, as torchrun starts them, and the port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = f"--target {repository}/assets/target --port 0 --schedule autoregressive"
    words += f" --backend process --step-timeout 60 --request-s {WAIT_S}"
    started = [
        Process.start(
            *(parent, tmp_path, *words.split()),
            module="pipedraft.inference.serving",
            environment=rank,
        )
        for rank in rank_environments(2, store.port)
    ]
    try:
        yield started, started[0].wait_for(r"on http://127\.0\.0\.1:(\d+) \(.*\n")[1]
    finally:
        end(started)


def ask_at(port: str, **fields):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sesame", max_retries=0)
    said = [{"role": "user", "content": "How many legs do 12 cats have?"}]
    options = {"max_tokens": 8, "temperature": 0, **fields}
    options = {"model": "spd_n4", "messages": said, **options}
    return client.chat.completions.create(**options)


def test_the_command_serves_a_checkpoint_until_a_signal(command, repository):
    assets = repository / "assets"
    words = ("--checkpoint", str(assets / "heads" / "spd_n4"), "--target", str(assets / "target"))
    process, port = command(*words, "--tree-width", "4", PIPEDRAFT_API_KEY="sesame")
    assert ask_at(port).choices[0].message.content == "There are 12 cats and "
    stream = ask_at(port, max_tokens=64, stream=True)
    next(iter(stream))
    process.send(signal.SIGTERM)  # running requests are finished
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    status, out, err = process.finish()
    loading, serving, ready, *_ = out.splitlines()
    assert (status, err) == (0, "") and loading == f"loading {assets / 'target'} ..."
    assert serving.startswith("serving spd_n4 on ") and "spd, n = 4, with API key" in serving
    assert ready.startswith(f"ready: open http://127.0.0.1:{port} in a browser")
    assert f"base_url http://127.0.0.1:{port}/v1 and model spd_n4" in ready
    assert out.endswith("ended: 2 requests answered\n")


def test_ranks_answer_together_and_end_it_at_a_signal(ranks):
    """All ranks get the signal, as from torchrun."""
    processes, port = ranks
    on = {"model": "target", "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [ask_at(port, max_tokens=240 + i, temperature=i % 2, **on) for i in range(4)]
    firsts = [next(iter(stream)) for stream in streams]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as told:
        assert re.search(rb"num_requests_running.* [234]\.0", told.read())
    for process in processes:
        process.send(signal.SIGTERM)
    lasts = [list(stream)[-1] for stream in streams]
    assert all(firsts) and [last.choices[0].finish_reason for last in lasts] == ["length"] * 4
    ends = [process.finish() for process in processes]
    assert [(status, "error" in err) for status, _, err in ends] == [(0, False)] * 2
    assert ends[0][1].endswith("ended: 4 requests answered\n")


def test_a_killed_rank_ends_it_with_one_line(ranks):
    (controller, stage), port = ranks
    streams = [ask_at(port, model="target", max_tokens=900, stream=True) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    stage.send(signal.SIGKILL)
    for stream in streams:
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
    stage.finish()
    status, _, err = controller.finish()
    (line,) = err.splitlines()
    assert (status, line.startswith("error: rank 0 (controller and stage 0): ")) == (1, True)
    assert "rank 1 (stage 1)" in line


@pytest.mark.all
def test_streams_that_load_a_server_are_timed(command, repository, capsys, monkeypatch):
    target = str(repository / "assets" / "target")
    process, port = command("--target", target, "--schedule", "autoregressive")
    words = [str(process.pid), f"http://127.0.0.1:{port}", "--tokens", "4"]
    script = runpy.run_path(str(repository / "docs" / "lab" / "servers.py"))
    words += ["--data-dir", str(repository / "assets" / "eval")]
    monkeypatch.setattr(sys, "argv", ["servers.py", *words])
    script["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" tokens/s")[0].split(", ")[0] for line in lines] == [
        f"{streams} streams: {4 * count} tokens" for streams, count in script["REQUESTS"].items()
    ]


def test_with_a_certificate_it_speaks_tls(command, repository, tmp_path):
    make_certificate(tmp_path)
    target = str(repository / "assets" / "target")
    _, port = command("--target", target, "--tls-cert", "cert.pem", "--tls-key", "key.pem")
    trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    with urllib.request.urlopen(
        f"https://127.0.0.1:{port}/v1/models", context=trusted, timeout=WAIT_S
    ) as answer:
        assert json.load(answer)["data"][0]["id"] == "target"


BAD = [
    ([], ["--checkpoint", "missing", "--target"]),
    (["--port", "70000"], ["--port", "70000", "0 to 65535"]),
    (["--host", "192.0.2.1"], ["--port", "192.0.2.1:0", "give another"]),
    (["--tls-cert", "a.pem"], ["--tls-cert", "--tls-key", "both"]),
    (["--tls-cert", "a.pem", "--tls-key", "a.pem"], ["--tls-cert", "a.pem", "PEM"]),
    (["--api-key-file", "a.pem"], ["--api-key-file", "a.pem", "write one"]),
    (["--api-key-file", "none"], ["--api-key-file", "none", "another file"]),
    (["--max-waiting", "0"], ["--max-waiting", "0", "at least 1"]),
    (["--request-s", "nan"], ["--request-s", "nan", "is not a number"]),
    (["--temperature", "1"], ["--temperature", "unknown"]),
    (["--target", "nowhere"], ["target", "nowhere", "existing folder"]),
    (["--target", ".", "--schedule", "spdd"], ["schedule", "'spdd'"]),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: " ".join(case[0]))
def test_bad_options_are_one_line_with_option_value_and_fix(case, tmp_path, monkeypatch, capfd):
    words, expected = case
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pem").write_text("no key, no certificate\n")
    status = call("serve", ["--port", "0", *words], monkeypatch)
    assert_one_line(status, *capfd.readouterr(), expected)
