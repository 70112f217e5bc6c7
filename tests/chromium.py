"""A headless Chromium for tests of pages: values of JavaScript, keys, sizes, screenshots."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"


class Browser:
    """A tab, driven by the DevTools protocol on two pipes; `events` are what it reported."""

    def __init__(self, reads: int, writes: int) -> None:
        self.events: list[Any] = []
        self._reads, self._writes, self._rest = reads, writes, b""
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, **params: Any) -> Any:
        """The result of a method of the protocol."""
        message = {"id": 1, "method": method, "params": params, **self._session}
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while "id" not in (answer := self._receive()):
            self.events.append(answer)
        return answer["result"]

    def value(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is, as JSON."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release a key, named as in KeyboardEvent.key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        for kind in "keyDown", "keyUp":
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                modifiers=8 * shift,
                windowsVirtualKeyCode=codes.get(key, 0),
                **(text if kind == "keyDown" else {}),
            )

    def resize(self, width: int, height: int) -> None:
        """Give the page this size in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> None:
        """Write what is visible as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _receive(self) -> Any:
        while b"\0" not in self._rest:
            part = os.read(self._reads, 1 << 20)
            assert part, "Chromium ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(profile: Path, url: str = "") -> Generator[Browser]:
    """A browser whose files are in the folder `profile`, showing `url` if there is one."""
    (reads, commands), (answers, writes) = os.pipe(), os.pipe()
    command = f"exec {CHROMIUM} {FLAGS} --remote-debugging-pipe --user-data-dir={profile}"
    words = ["bash", "-c", f"{command} 3<&{reads} 4>&{writes} 2>/dev/null"]
    with subprocess.Popen(words, pass_fds=(reads, writes)) as process:
        os.close(reads)
        os.close(writes)
        try:
            shown = Browser(answers, commands)
            if url:
                shown.call("Page.navigate", url=url)
            yield shown
        finally:
            process.kill()
            os.close(answers)
            os.close(commands)
