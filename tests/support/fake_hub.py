"""A Hub on 127.0.0.1: the requests of huggingface_hub, answered from memory, with faults.

Files up to ``LFS_FROM`` bytes are stored as git blobs, larger ones by Git LFS with one PUT each.
Downloads of large files are redirected, as on the real Hub.
"""

import base64
import hashlib
import itertools
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LFS_FROM = 4096
MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Blob:
    content: bytes
    is_lfs: bool

    @property
    def oid(self) -> str:
        """Digest for the client to compare: SHA-256 if large, git's SHA-1 if small."""
        if self.is_lfs:
            return hashlib.sha256(self.content).hexdigest()
        header = f"blob {len(self.content)}\0".encode()
        return hashlib.sha1(header + self.content).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, Blob]]
    branches: dict[str, str]
    messages: dict[str, str] = field(default_factory=dict)

    def files(self, revision: str = "main") -> dict[str, Blob]:
        return self.commits[self.branches.get(revision, revision)]

    def texts(self, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.content for path, blob in self.files(revision).items()}


@dataclass
class Fault:
    """Fault for requests with this method and this text in the path."""

    method: str
    path: str
    action: int | str
    """HTTP status; "drop" breaks off in the middle; "stall" never answers."""
    times: int = 1


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        """Ignore clients that are killed or give up: a test reads stderr."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*arguments)


@dataclass
class Request:
    method: str
    path: str
    num_bytes: int = 0
    """Bytes read from the body."""


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, **body: Any) -> None:
        self.status, self.message, self.code = status, message, code
        self.body = body or {"error": message}


class FakeHub:
    """Hub state; ``running`` serves it."""

    def __init__(self, tokens: dict[str, str]) -> None:
        """
        Args:
            tokens: token -> user, with write access to repositories user/name.
        """
        self.tokens = tokens
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.released = threading.Event()
        self.num_moments = 0
        """Received requests, and responses about to be sent."""
        self.at_moment: Callable[[int], None] = lambda number: None
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.url = self.cdn_url = ""

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{server.server_port}"
        # Another host by name: huggingface_hub follows redirects of one host to the end.
        self.cdn_url = f"http://localhost:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def sent(self, method: str, path: str = "") -> list[Request]:
        return [r for r in self.requests if r.method == method and path in r.path]

    def pass_moment(self) -> None:
        with self.lock:
            self.num_moments += 1
            self.at_moment(self.num_moments)

    def will_stall(self, method: str, path: str) -> bool:
        stalls = [fault for fault in self.faults if fault.times and fault.action == "stall"]
        return any(fault.method == method and fault.path in path for fault in stalls)

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and fault.path in path:
                    fault.times -= 1
                    return fault
        return None

    # -- repositories -------------------------------------------------------------------

    def create(self, name: str, private: bool = False, **files: bytes) -> Repository:
        first = f"{next(self.numbers):040x}"
        start = {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)}
        start |= {path.replace("__", "."): Blob(text, False) for path, text in files.items()}
        self.repositories[name] = Repository(private, {first: start}, {"main": first})
        return self.repositories[name]

    def visible(self, name: str, user: str | None) -> Repository:
        found = self.repositories.get(name)
        if found is None or (found.private and name.partition("/")[0] != user):
            status = 404 if user else 401
            raise Refused(status, "Repository not found", "RepoNotFound")
        return found

    def writable(self, name: str, user: str | None) -> Repository:
        if user is None:
            raise Refused(401, "Invalid username or password.")
        found = self.visible(name, user)
        if name.partition("/")[0] != user:
            raise Refused(403, "You don't have the rights to write to this repository")
        return found

    def commit_of(self, repository: Repository, revision: str) -> str:
        found = repository.branches.get(revision, revision)
        if found not in repository.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def commit(self, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> str:
        parent = self.commit_of(repository, branch)
        files, message = dict(repository.commits[parent]), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.objects:
                    raise Refused(400, f"LFS pointer of {value['path']} points to no object")
                files[value["path"]] = Blob(self.objects[value["oid"]], True)
            else:
                raise Refused(400, f"unknown operation {line['key']}")
        sha = f"{next(self.numbers):040x}"
        repository.commits[sha] = files
        repository.messages[sha] = message
        repository.branches[branch] = sha
        return sha


def metadata_errors(card: str) -> list[str]:
    """Errors in a model card that make the Hub refuse it, as far as its messages are known."""
    found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    try:
        data = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError as error:
        return [f"YAML: {error}"]
    errors = []
    if "base_model" in data and not MODEL_ID.fullmatch(str(data["base_model"])):
        errors.append(f'"base_model" with value "{data["base_model"]}" is not valid')
    for model in data.get("model-index", []):
        for result in model["results"]:
            named = [result["task"], result["dataset"], *result["metrics"]]
            if not model.get("name") or not all(part.get("type") for part in named):
                errors.append('"model-index" lacks names or types')
    return errors


class Handler(BaseHTTPRequestHandler):
    """One request: routes are methods named by ``ROUTES``."""

    hub: FakeHub
    protocol_version = "HTTP/1.1"
    timeout = 300

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = Request(self.command, path)
        with self.hub.lock:
            self.hub.requests.append(request)
        self.hub.pass_moment()
        fault = self.hub.take_fault(self.command, path)
        length = int(self.headers.get("Content-Length", 0))
        if fault is not None and fault.action == "stall":
            self.hub.released.wait(300)
        if fault is not None and isinstance(fault.action, str):
            request.num_bytes = len(self.rfile.read(length // 2))
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        body = self.rfile.read(length)
        request.num_bytes = len(body)
        try:
            if fault is not None:
                raise Refused(int(fault.action), "made to fail")
            for method, pattern, route in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and self.command in method.split():
                    with self.hub.lock:
                        route(self, body, **found.groupdict())
                    return
            raise Refused(404, f"no route {self.command} {path}")
        except Refused as refused:
            headers = {"X-Error-Message": refused.message}
            headers |= {"X-Error-Code": refused.code} if refused.code else {}
            self.send(json.dumps(refused.body).encode(), refused.status, headers)

    def send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.hub.pass_moment()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, content: Any, status: int = 200) -> None:
        self.send(json.dumps(content).encode(), status)

    @property
    def user(self) -> str | None:
        """Return the user; None without a token.

        Raises:
            Refused: an unknown token.
        """
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given not in self.hub.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(given)

    # -- routes -------------------------------------------------------------------------

    def whoami(self, body: bytes) -> None:
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        self.send_json({"type": "user", "name": self.user, "orgs": []})

    def create_repo(self, body: bytes) -> None:
        asked = json.loads(body)
        owner = asked["organization"] or self.user
        name = f"{owner}/{asked['name']}"
        url = f"{self.hub.url}/{name}"
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        if owner != self.user:
            raise Refused(403, f"You don't have the rights to create a model under {owner}")
        if name in self.hub.repositories:
            raise Refused(409, "exists", error="You already created this model repo", url=url)
        self.hub.create(name, private=asked.get("visibility") == "private")
        self.send_json({"url": url, "name": name})

    def validate_yaml(self, body: bytes) -> None:
        errors = metadata_errors(json.loads(body)["content"])
        if errors:
            listed = [{"message": error} for error in errors]
            raise Refused(400, "; ".join(errors), errors=listed, warnings=[])
        self.send_json({"errors": [], "warnings": []})

    def model_info(self, body: bytes, name: str, revision: str = "main") -> None:
        repository = self.hub.visible(name, self.user)
        sha = self.hub.commit_of(repository, revision)
        siblings = [{"rfilename": path} for path in sorted(repository.commits[sha])]
        facts = {"id": name, "sha": sha, "private": repository.private, "siblings": siblings}
        self.send_json({**facts, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, body: bytes, name: str, revision: str) -> None:
        repository = self.hub.visible(name, self.user)
        entries = []
        for path, blob in repository.commits[self.hub.commit_of(repository, revision)].items():
            size = len(blob.content)
            entry = {"type": "file", "path": path, "size": size, "oid": blob.oid[:40]}
            if blob.is_lfs:
                entry["lfs"] = {"oid": blob.oid, "size": size, "pointerSize": 130}
            entries.append(entry)
        self.send_json(entries)

    def branch(self, body: bytes, name: str, branch: str) -> None:
        repository = self.hub.writable(name, self.user)
        if branch in repository.branches:
            raise Refused(409, "Reference already exists")
        start = json.loads(body).get("startingPoint", "main")
        repository.branches[branch] = self.hub.commit_of(repository, start)
        self.send_json({})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        repository = self.hub.writable(name, self.user)
        there = repository.commits[self.hub.commit_of(repository, revision)]
        modes = []
        for file in json.loads(body)["files"]:
            mode = "lfs" if file["size"] > LFS_FROM else "regular"
            oid = there[file["path"]].oid if file["path"] in there else None
            modes.append(
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
            )
        self.send_json({"files": modes})

    def lfs_batch(self, body: bytes, name: str) -> None:
        self.hub.writable(name, self.user)
        objects = []
        for entry in json.loads(body)["objects"]:
            if entry["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/lfs/{entry['oid']}"
                verify = {"href": f"{self.hub.url}/lfs-verify/{entry['oid']}"}
                entry = {**entry, "actions": {"upload": {"href": href}, "verify": verify}}
            objects.append(entry)
        self.send_json({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "the content has another SHA-256")
        self.hub.objects[oid] = body
        self.send(b"")

    def lfs_verify(self, body: bytes, oid: str) -> None:
        if len(self.hub.objects.get(oid, b"")) != json.loads(body)["size"]:
            raise Refused(404, "no such object")
        self.send_json({})

    def make_commit(self, body: bytes, name: str, revision: str) -> None:
        repository = self.hub.writable(name, self.user)
        lines = [json.loads(line) for line in body.splitlines()]
        sha = self.hub.commit(repository, revision, lines)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        self.send_json({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        repository = self.hub.visible(name, self.user)
        sha = self.hub.commit_of(repository, revision)
        blob = repository.commits[sha].get(path)
        if blob is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.oid}"'}
        if not blob.is_lfs:
            self.send(blob.content, headers=headers)
            return
        linked = {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.content))}
        place = {"Location": f"{self.hub.cdn_url}/cdn/{blob.oid}"}
        self.send(b"", 302, headers | linked | place)

    def cdn(self, body: bytes, oid: str) -> None:
        content = self.hub.objects[oid]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked is None:
            self.send(content)
            return
        first = int(asked[1])
        shown = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
        self.send(content[first:], 206, shown)


REPO = r"(?P<name>[^/]+/[^/]+?)"
ROUTES = [
    ("GET", r"/api/whoami-v2", Handler.whoami),
    ("POST", r"/api/repos/create", Handler.create_repo),
    ("POST", r"/api/validate-yaml", Handler.validate_yaml),
    ("GET", rf"/api/models/{REPO}", Handler.model_info),
    ("GET", rf"/api/models/{REPO}/revision/(?P<revision>.+)", Handler.model_info),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)", Handler.tree),
    ("POST", rf"/api/models/{REPO}/branch/(?P<branch>.+)", Handler.branch),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>.+)", Handler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>\w+)", Handler.lfs_put),
    ("POST", r"/lfs-verify/(?P<oid>\w+)", Handler.lfs_verify),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>.+)", Handler.make_commit),
    ("GET HEAD", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
    ("GET HEAD", r"/cdn/(?P<oid>\w+)", Handler.cdn),
]
