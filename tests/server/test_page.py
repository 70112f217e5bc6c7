"""The page of the server, in a headless Chromium."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.chromium import CHROMIUM, browser
from tests.server.process import Serving, eventually, serving

TEXT = "<img src=x onerror=alert(1)> Beautiful is"
SAID = "[...document.querySelectorAll('#log p')].map(line => [line.className, line.textContent])"


def say(value: Callable[[str], Any]) -> list[Any]:
    """Send TEXT; the kinds and texts of what was said when the answer has ended."""
    value(f"document.getElementById('text').value = {TEXT!r}")
    value("document.getElementById('send').click()")
    assert eventually(lambda: value("document.getElementById('send').textContent") == "Send")
    return value(SAID)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_chats_and_completes_text_without_a_template(
    server: Serving, artifact: Path, tmp_path: Path
) -> None:
    title, key = (f"document.getElementById('{name}')" for name in ("title", "key"))
    body = {"messages": [{"role": "user", "content": TEXT}]}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]
    with browser(tmp_path / "0", server.url) as page:
        value = page.value
        assert eventually(lambda: value(f"{title}?.textContent") == "zen")
        assert say(value) == [["user", TEXT], ["assistant", answer["message"]["content"]]]
    with serving(artifact, "--api-key", "abc") as other:
        headers, body = {"authorization": "Bearer abc"}, {"prompt": TEXT}
        answer = httpx2.post(f"{other.url}/v1/completions", json=body, headers=headers).json()
        with browser(tmp_path / "1", other.url) as page:
            value = page.value
            assert eventually(lambda: value(f"{key}?.hidden") is False)
            value(f"{key}.value = 'abc'")
            assert say(value)[1:] == [["user", TEXT], ["assistant", answer["choices"][0]["text"]]]
