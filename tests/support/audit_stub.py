"""A small server with a known law, which offers as much of OpenAI's and vLLM's API as told."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np

VOCABULARY = [" a", " b", " c", " d", " e", "<|end|>"]
END = len(VOCABULARY) - 1
TIE_PLACE = 2
TIE = 5e-5
"""Gap in nats between the two best tokens at ``TIE_PLACE``; all other gaps are above 0.3."""
GAP = 0.3


def law(prompt: str, tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities of the next token."""
    return law_at(len(prompt), len(tokens), tokens[-1] if tokens else len(VOCABULARY))


@cache
def law_at(prompt: int, place: int, last: int) -> np.ndarray:
    logits = np.random.default_rng([prompt, place, last]).normal(0, 1.2, END + 1)
    logits[END] += -9.0 if place < 6 else 1.0
    best = logits.argsort()[::-1]
    if place == TIE_PLACE:
        logits[best[1]] = logits[best[0]] - TIE
    elif logits[best[0]] - logits[best[1]] < GAP:
        logits[best[0]] += GAP
    return logits - np.log(np.exp(logits).sum())


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(f" {word}") for word in text.split()]


@dataclass
class Stub:
    """One server's abilities and faults."""

    offers: str = ""
    """Ways to judge given tokens: prompt_logprobs, completions, continue or pretends."""
    logprobs: str = "20"
    """Most top_logprobs; "none": none in the answer, "raw": raw BPE names, "less": one, "refuses"
    more than ten."""
    seeds: str = "honored"
    """Or ignored, fixed, greedy (no sampling at all)."""
    picks_second: tuple[int, ...] = ()
    """Places where a greedy answer has the second best token."""
    temperature: float = 1.0
    """Factor of the temperature: other than 1 is a biased sampler."""
    random: ClassVar[np.random.Generator] = np.random.default_rng(0)

    def generate(self, prompt: str, tokens: list[int], body: dict) -> list[int]:
        """Return the new tokens, with the end if there is one."""
        temperature, out = body["temperature"], list(tokens)
        seed = {"fixed": 1}.get(self.seeds, body.get("seed", 0))
        rng = self.random if self.seeds == "ignored" else np.random.default_rng(seed)
        while len(out) - len(tokens) < body["max_tokens"] and END not in out:
            known = law(prompt, out)
            if not temperature or self.seeds == "greedy":
                out.append(int(known.argsort()[-2 if len(out) in self.picks_second else -1]))
                continue
            weights = np.exp(known / (temperature * self.temperature))
            out.append(int(rng.choice(END + 1, p=weights / weights.sum())))
        return out[len(tokens) :]

    def reply(self, path: str, body: dict) -> dict | None:
        """Return the answer's JSON value, or None for a refusal."""
        if path == "/tokenize" and self.offers in ("prompt_logprobs", "completions"):
            said = body["messages"][-1]["content"] if "messages" in body else None
            # A prompt is one token per character behind the vocabulary.
            ids = encode(body["prompt"]) if said is None else [END + 1] * len(said)
            return {"tokens": ids, "count": len(ids)}
        if path == "/detokenize" and self.offers in ("prompt_logprobs", "completions"):
            return {"prompt": VOCABULARY[body["tokens"][0]]}
        if path == "/v1/completions" and self.offers in ("prompt_logprobs", "completions"):
            return self.complete(body)
        return self.chat(body) if path == "/v1/chat/completions" else None

    def complete(self, body: dict) -> dict | None:
        ids = body["prompt"]
        prompt, tokens = "x" * ids.count(END + 1), [one for one in ids if one <= END]
        if "prompt_logprobs" in body and self.offers != "prompt_logprobs":
            return None
        new, known = self.generate(prompt, tokens, body)[0], law(prompt, tokens)
        found = dict(zip(VOCABULARY, known.tolist(), strict=True))
        choice = {"logprobs": {"top_logprobs": [found]}, "finish_reason": "length"}
        if new == END:
            choice["finish_reason"] = "stop"
        if "prompt_logprobs" in body:
            entries = []
            for place, token in enumerate(tokens):
                known = law(prompt, tokens[:place])
                # The best two and the token itself, as a server with a short list would do.
                listed = {*known.argsort()[-2:].tolist(), token}
                entries.append(
                    {
                        str(one): {"logprob": known[one], "decoded_token": VOCABULARY[one]}
                        for one in listed
                    }
                )
            choice["prompt_logprobs"] = [None] * len(prompt) + entries
        return {"choices": [choice]}

    def chat(self, body: dict) -> dict | None:
        messages = body["messages"]
        if self.logprobs == "refuses" and body.get("top_logprobs", 0) > 10:
            return None
        tokens = []
        if body.get("continue_final_message"):
            if self.offers not in ("continue", "pretends"):
                return None
            tokens = encode(messages[-1]["content"]) if self.offers == "continue" else []
            messages = messages[:-1]
        prompt = messages[-1]["content"]
        new = self.generate(prompt, tokens, body)
        text = "".join(VOCABULARY[one] for one in new if one != END)
        choice = {"message": {"content": text}, "finish_reason": "stop" if END in new else "length"}
        if body.get("logprobs") and self.logprobs != "none":
            size = {"less": 1}.get(self.logprobs, body["top_logprobs"])
            choice["logprobs"] = {
                "content": [
                    self.entry(law(prompt, [*tokens, *new[:place]]), token, size)
                    for place, token in enumerate(new)
                ]
            }
        return {"choices": [choice]}

    def entry(self, known: np.ndarray, token: int, size: int) -> dict:
        def named(one: int) -> dict:
            name = VOCABULARY[one]
            name = name.replace(" ", "\u0120") if self.logprobs == "raw" else name
            return {"token": name, "logprob": float(known[one])}

        return {
            **named(token),
            "top_logprobs": [*map(named, known.argsort()[::-1][:size].tolist())],
        }


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """Yield the stub's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = stub.reply(self.path, body)
            data = json.dumps(answer or {"error": "not supported"}).encode()
            self.send_response(200 if answer is not None else 400)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
