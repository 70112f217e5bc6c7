"""A small Llama with a chat template, compiled once, and a server of it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import irc
from tests.layout import ROOT
from tests.server.process import Serving, serving

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of a model that continues the Zen of Python."""
    place = tmp_path_factory.mktemp("served")
    shutil.copytree(ROOT / "examples/tiny_llama", place / "checkpoint")
    (place / "checkpoint/chat_template.jinja").write_text(TEMPLATE)
    irc.compile(place / "checkpoint", place / "zen")
    return place / "zen"


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Serving]:
    """A process that serves it."""
    with serving(folder) as process:
        yield process
