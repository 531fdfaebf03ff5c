"""`serve` and `edge` as processes: signals, TLS, tokens, output and exit."""

import asyncio
import json
import re
import shutil
import signal
import time
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_processes import LIMIT_S, Process, make_certificate
from decode_runs import greedy_reference
from fork_server import ForkServer
from grpc_runs import Raw, RawConnection, in_loop, opening
from tiny_models import byte_tokenizer, tiny_llama

from pipedraft.inference.__main__ import main
from pipedraft.inference.decode_options import MAX_PROMPT_BYTES, DecodeOptions
from pipedraft.inference.edge.session_messages import REPLIES, Close
from pipedraft.inference.edge.stream import Access, read_description
from pipedraft.inference.edge.wire import SERVICE
from pipedraft.inference.server_options import ListenOptions
from pipedraft.models.heads.configs import FlexSpecConfig
from pipedraft.models.heads.draft import TargetReference
from pipedraft.models.heads.flexspec import FlexSpec
from pipedraft.models.transformer.layers import LayerConfig

TOKEN = "opensesame"


class Place:
    """Folder with a target, a FlexSpec draft for it, a draft for another target, and a token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target, self.draft = folder / "target", folder / "draft"
        model = tiny_llama(layers=3, vocab=300)
        model.save_pretrained(self.target)
        byte_tokenizer().save_pretrained(self.target)
        self.save_draft(model, self.draft)
        other = tiny_llama(layers=3, vocab=300, seed=8)
        self.save_draft(other, folder / "other_draft")
        (folder / "token").write_text(TOKEN + "\n")

    def save_draft(self, model, folder: Path) -> None:
        folder.mkdir()
        reference = TargetReference(name=str(self.target), fingerprint=FlexSpec.fingerprint(model))
        layer = LayerConfig.from_target(model.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            draft = FlexSpec(FlexSpecConfig(), layer, reference)
            draft.initialize(model)
        draft.save(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("serve"))


def serve(parent: ForkServer, place: Place, *arguments: str) -> tuple[Process, str]:
    """Start a server, wait until it listens, and return its address too."""
    target = str(place.target)
    process = Process.start(
        parent, place.folder, "serve", "--target", target, "--port", "0", *arguments
    )
    return process, process.wait_for(r"on (127\.0\.0\.1:\d+) \(.*\n")[1]


def edge(capsys, *arguments: str) -> tuple[str, str]:
    main(arguments)
    captured = capsys.readouterr()
    return captured.out, captured.err


def status_of(capsys, server: str) -> dict:
    return json.loads(edge(capsys, "--server", server, "--status")[0])


@pytest.fixture(scope="module")
def plain_server(parent, place):
    process, address = serve(parent, place, "--idle-s", "8", "--grace-s", "60")
    yield process, address
    if process.status is None:
        process.send(signal.SIGKILL)
        process.finish()


def expected_text(place: Place, prompt: str, new_tokens: int) -> str:
    tokenizer = byte_tokenizer()
    model = tiny_llama(layers=3, vocab=300)
    ids = tokenizer(prompt).input_ids
    generated = greedy_reference(model, ids, new_tokens)
    return tokenizer.decode(generated, skip_special_tokens=True)


def test_a_flexspec_draft_gives_the_targets_text_and_its_figures(plain_server, place, capsys):
    _, address = plain_server
    common = ["--server", address, "--raw", "--prompt", "Hello", "--max-new-tokens", "20"]
    draft = ["--checkpoint", str(place.draft)]
    expected = expected_text(place, "Hello", 20) + "\n"
    for method in ("flexspec", "picospec"):
        out, err = edge(capsys, *common, *draft, "--schedule", method, "--keep-drafting")
        assert out == expected
        figures = rf"\[{method}\] 19 tokens after the first: [\d.]+ ms a token, .* L' [\d.]+, .* "
        assert re.match(figures + r"tau [\d.]+, .* bytes up .* round trip [\d.]+ ms", err)
    out, err = edge(capsys, *common, "--tokenizer", str(place.target))
    assert out == expected and "L' 1.00" in err
    out, err = edge(capsys, *common, "--checkpoint", str(place.folder / "other_draft"))
    assert out == expected and "warning: the draft was trained with another" in err
    about = status_of(capsys, address)
    assert about["target"] == str(place.target) and about["sessions"] == 0


def test_a_client_that_is_killed_leaves_nothing_behind(parent, place, capsys):
    process, address = serve(parent, place)
    draft = ["--draft-model", str(place.target), "--schedule", "flexspec", "--policy", "fixed:1"]
    words = ["--server", address, "--raw", "--prompt", "Hi", *draft, "--keep-drafting"]
    client = Process.start(parent, place.folder, *words, "--max-new-tokens", "500")
    deadline_s = time.monotonic() + LIMIT_S
    while not status_of(capsys, address)["sessions"]:
        assert time.monotonic() < deadline_s and not client.err.read_text(), client.err.read_text()
    client.send(signal.SIGKILL)
    assert client.finish()[0] == -signal.SIGKILL
    while (about := status_of(capsys, address))["sessions"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert about["cache_bytes"] == 0
    process.send(signal.SIGTERM)
    code, out, err = process.finish()
    assert (code, err) == (0, "") and "1 sessions, 0 expired, 0 cut off" in out


@in_loop
async def test_sigterm_lets_the_open_session_end_and_refuses_new_ones(plain_server):
    """The last test with this server."""
    process, address = plain_server
    async with RawConnection(Access(server=address)) as connection:
        describe = connection.channel.unary_unary(f"/{SERVICE}/Describe")

        async def is_serving() -> bool:
            return read_description(await describe(b"")).is_serving

        assert await is_serving()
        raw, late = Raw(connection), Raw(connection)
        await raw.send(opening([1, 2, 3]))
        (first,) = await raw.read(1)
        process.send(signal.SIGTERM)
        while await is_serving():
            await asyncio.sleep(0.05)
        await late.send(opening([1]))
        refused = await late.end()
        replies = [first, *await raw.read(23)]
        await raw.send(Close(epoch=0, seq=1))
        ended = await raw.end()
    assert refused[:2] == ("UNAVAILABLE", "server: shutting down; try again")
    tokens = [REPLIES.decode(data).token for data in replies]
    assert tokens == greedy_reference(tiny_llama(layers=3, vocab=300), [1, 2, 3], 24)
    assert ended[0] == "OK" and int(ended[2]["passes"]) >= 23
    code, out, err = process.finish()
    assert (code, err) == (0, "") and re.search(r"ended: \d+ sessions, 0 expired, 0 cut off", out)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_tls_and_a_token_keep_strangers_out(parent, place, capsys):
    (cert, key), token = make_certificate(place.folder), str(place.folder / "token")
    process, address = serve(
        *(parent, place, "--tls-cert", cert, "--tls-key", key, "--token-file", token),
        *("--grace-s", "1"),
    )
    try:
        common = ["--server", address, "--raw", "--prompt", "Hello", "--tokenizer"]
        common += [str(place.target), "--max-new-tokens", "8", "--give-up-s", "0.5"]
        out, _ = edge(capsys, *common, "--tls-ca", cert, "--token-file", token)
        assert out == expected_text(place, "Hello", 8) + "\n"
        with pytest.raises(ValueError, match="token: missing or wrong"):
            edge(capsys, *common, "--tls-ca", cert)
        # A certificate from an unknown issuer, and no TLS at all.
        for strange in (["--tls"], []):
            with pytest.raises(RuntimeError, match="could not be used for 0.5 s"):
                edge(capsys, *common, *strange, "--token-file", token)
    finally:
        process.send(signal.SIGINT)
        code, out, err = process.finish()
    assert code == 0 and "1 sessions, 0 expired, 0 cut off" in out


SERVE = ["--target", "x"]
EDGE = ["--server", "x:1", "--prompt", "a"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["serve", *SERVE, "--port", "70000"], "--port: 70000 is no port; give"),
        (["serve", *SERVE, "--tls-cert", "c"], "give both or neither"),
        (["serve", *SERVE, "--idle-s", "0"], "--idle-s: 0.0; give at least 0.001"),
        (["serve", *SERVE, "--max-new-tokens", "9" * 19], "--max-new-tokens: 99999999"),
        (["serve", "--target", "/nowhere"], "no folder '/nowhere'"),
        ([*EDGE, "--give-up-s", "soon"], "'soon' is no time; give seconds above 0"),
        (["--server", "x:1"], "--prompt or --status: missing"),
        (["--prompt", "a", "--keep-drafting"], "--keep-drafting: it needs --server"),
        *(
            ([*EDGE, *words], f"{words[0]}: the target is")
            for words in (
                ["--stages", "4"],
                ["--draft", "ngram"],
                ["--bitwise"],
                ["--processes", "3"],
                ["--links", "host"],
                ["--step-timeout", "9"],
                ["--cost", "h100"],
            )
        ),
        (["--server", "nowhere", "--prompt", "a"], "give host:port"),
        (["--server", "x:1", "--prompt", " "], "--prompt: ' ' is empty"),
        (EDGE, "--tokenizer: missing"),
        ([*EDGE, "--schedule", "picospec"], "--schedule: picospec drafts"),
        ([*EDGE, "--answer-s", "-1"], "'-1' is no time"),
        (
            [*EDGE, "--give-up-s", "1e15"],
            "'1e15' is no time; give seconds above 0, at most 1000000",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError) as refused:
        main(arguments)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_draft_that_reads_hidden_states_is_refused(place):
    folder = place.folder / "eagle"
    folder.mkdir()
    description = json.loads((place.draft / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**description, "draft_type": "eagle"}))
    with pytest.raises(ValueError, match="a eagle draft reads hidden states"):
        main(["--server", "x:1", "--prompt", "a", "--checkpoint", str(folder)])


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("tokens", [[], [TOKEN]])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_open_host_without_tls_or_tokens_is_warned_of(host, tokens, has_tls, capsys):
    cert = Path("c") if has_tls else None
    ListenOptions(host=host, port=1, tls_cert=cert, tls_key=cert).warn_if_open(tokens, "--keys")
    is_open = host == "0.0.0.0" and not (has_tls and tokens)
    assert capsys.readouterr().err.startswith("warning: --host 0.0.0.0") == is_open


def test_a_prompt_on_stdin_has_a_limit(monkeypatch, capsys):
    content = SimpleNamespace(buffer=BytesIO("é".encode() * MAX_PROMPT_BYTES))
    monkeypatch.setattr("sys.stdin", content)
    with pytest.raises(ValueError, match="--prompt: more than 16777216 bytes; shorten it"):
        DecodeOptions.read(["--target", "x", "--prompt", "-"]).read_prompt()
