"""A headless Chromium driven by tests over a pipe, with the DevTools protocol."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WAIT_S = 60


class Browser:
    """One tab; ``evaluate`` runs JavaScript in it."""

    def __init__(self, read_end: int, write_end: int) -> None:
        self._read, self._write, self._buffer = read_end, write_end, b""
        self._number, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message | session).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 2**16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_until(self, expression: str) -> None:
        until_s = time.monotonic() + WAIT_S
        while not self.evaluate(expression):
            assert time.monotonic() < until_s, self.evaluate("document.body.innerText")
            time.sleep(0.02)

    def open(self, url: str, *, width: int, height: int, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=url)
        self.wait_until(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        )

    def type(self, text: str) -> None:
        """Type into the focused element, then press Enter."""
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self.call("Input.dispatchKeyEvent", type=kind, **key)


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Start a browser; ``folder`` holds its profile."""
    down_read, down_write = os.pipe()
    up_read, up_write = os.pipe()
    words = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
        *("--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={folder / 'profile'}"),
    ]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{down_read} 4>&{up_write}', "bash", *words],
        pass_fds=(down_read, up_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(down_read)
    os.close(up_write)
    try:
        yield Browser(up_read, down_write)
    finally:
        process.kill()
        process.wait(WAIT_S)
        os.close(up_read)
        os.close(down_write)
