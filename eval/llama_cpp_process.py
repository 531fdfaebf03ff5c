"""Run llama.cpp's server for pipedraft, without importing anything from the package.

python llama_cpp_process.py decode REQUEST.json ANSWER.json     see eval/engine_parity.py

python llama_cpp_process.py convert SERVER TARGET OUT.gguf      with our Python: torch, transformers

ANSWER.json has the output's tokens. The server's log lists each round's draft tokens.
"""

import importlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

START_S = 600
FLUSH_S = 30
CANDIDATE = re.compile(r"draft candidate +0, pos +\d+: +(\d+) ")
ROUND = re.compile(r"add accepted tokens: sampled=\d+, ids.size=(\d+), n_draft=(\d+)")
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))
ERROR = re.compile(r"^(?:[\d.]+ )?E +(.+)$", re.MULTILINE)


def command(request, port, log):
    """Return the server's command: float32 caches, one sequence, draft tokens in the log."""
    words = [request["program"], "-m", request["target"], "--port", port, "--no-ui", "-np", 1]
    words += ["-c", request["max_model_len"], "--fit", "off", "-fa", "off", "--cache-ram", 0]
    words += ["--log-file", log, "-ctk", "f32", "-ctv", "f32"]
    if "threads" in request:  # a timed run, so without a long log
        words += ["-t", request["threads"], "-tb", request["threads"]]
    else:
        words += ["-lv", 5]
    draft = request["speculative_config"]
    if draft:
        words += ["-md", f"{draft['model']}/draft.gguf", "--spec-type", f"draft-{draft['method']}"]
        words += ["--spec-draft-n-max", draft["num_speculative_tokens"]]
        words += ["-ctkd", "f32", "-ctvd", "f32"]
    return [str(word) for word in words]


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
    with LOCAL.open(request) as answer:
        return json.load(answer)


@contextmanager
def server(request, log):
    """Start the server, wait until it answers, and yield its port; stop it at the end."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(request, port, log), **quiet)
    try:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if process.poll() is not None:
                said = ERROR.findall(log.read_text(errors="replace") if log.exists() else "")
                sys.exit(said[0] if said else f"llama-server ended with {process.returncode}")
            try:
                ask(port, "/health")
                break
            except (urllib.error.URLError, OSError):  # not yet listening, or still loading
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def rounds_of(log, prompt_lengths, drafted):
    """Parse each prompt's rounds and accepted lengths from the server's log.

    Args:
        log: text with one line per candidate, and one per verification.
        drafted: number of draft tokens for each prompt.
    """
    runs, rest = [], iter(re.split(r"\n", log))
    for length, number in zip(prompt_lengths, drafted, strict=True):
        root, rounds, lengths, held = length, [], [], []
        while number > 0:
            line = next(rest)
            if found := CANDIDATE.search(line):
                held.append(int(found[1]))
            elif found := ROUND.search(line):
                size, count = int(found[1]), int(found[2])
                rounds.append({"root": root, "drafted": held[:count]})
                lengths.append(size - 1)
                root, number, held = root + size, number - count, []
        runs.append((rounds, lengths))
    return runs


def whole_log(file, drafted):
    """Wait until the log has every draft token, and return it. A server thread writes it."""
    until = time.monotonic() + FLUSH_S
    while True:
        log = file.read_text(errors="replace")
        if sum(int(count) for _, count in ROUND.findall(log)) >= drafted:
            return log
        if time.monotonic() > until:
            sys.exit("its log lacks draft tokens that its answers count; another version?")
        time.sleep(0.1)


def decode(request):
    """Decode the prompts one after the other, and return the answer for the output file."""
    draft = request["speculative_config"]
    outputs, rendered, seconds, drafted = [], [], [], []
    with tempfile.TemporaryDirectory() as place:
        log = Path(place, "log")
        with server(request, log) as port:
            build = ask(port, "/props")["build_info"]
            for prompt in request["prompts"]:
                start = time.perf_counter()
                body = {"prompt": prompt["prompt_ids"], "n_predict": request["max_new_tokens"]}
                body |= {"temperature": 0, "cache_prompt": False, "return_tokens": True}
                found = ask(port, "/completion", body)
                seconds.append(time.perf_counter() - start)
                outputs.append(found["tokens"])
                is_logged = "threads" not in request
                drafted.append(found["timings"].get("draft_n", 0) if is_logged else 0)
                text = ask(port, "/apply-template", {"messages": prompt["messages"]})["prompt"]
                body = {"content": text, "add_special": True, "parse_special": True}
                rendered.append(ask(port, "/tokenize", body)["tokens"])
            text = whole_log(log, sum(drafted))
    lengths = [len(prompt["prompt_ids"]) for prompt in request["prompts"]]
    found = rounds_of(text, lengths, drafted)
    accepted = [0] * (draft["num_speculative_tokens"] if draft else 0)
    for length in (one for _, lengths in found for one in lengths):
        for position in range(length):
            accepted[position] += 1
    every = zip(outputs, rendered, seconds, found, strict=True)
    return {
        "engine": f"llama.cpp {build}",
        "dtype": "float32",
        "runs": [
            {"token_ids": out, "rendered": own, "seconds": taken, "rounds": rounds}
            for out, own, taken, (rounds, _) in every
        ],
        "num_drafts": sum(len(rounds) for rounds, _ in found),
        "accepted": accepted,
    }


def convert(program, target, out):
    """Write the target as a float32 GGUF file, with the converter next to the server's folder."""
    source = Path(program).absolute().parents[1] / "source"
    packages = source.with_name("python")
    sys.path[:0] = [str(source), str(source / "gguf-py"), str(packages)]
    text = importlib.import_module("conversion.base").TextModel
    known = text.get_vocab_base_pre

    def splitting(model, tokenizer):
        try:
            return known(model, tokenizer)
        except NotImplementedError:
            # The converter only knows published tokenizers. A wrong choice does no harm: prompts
            # are token ids, and the comparison finds tokenizers that split text differently.
            return "smollm"

    text.get_vocab_base_pre = splitting
    sys.argv = ["convert", "--outtype", "f32", "--outfile", out, target]
    importlib.import_module("convert_hf_to_gguf").main()


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
    else:
        Path(sys.argv[3]).write_text(json.dumps(decode(json.loads(Path(sys.argv[2]).read_text()))))
