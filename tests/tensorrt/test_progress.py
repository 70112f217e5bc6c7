"""The steps and fractions that a compilation reports to its progress callback."""

from __future__ import annotations

from pathlib import Path

import pytest

import irc
from irc.artifact.manifest import Progress
from irc.backends.tensorrt.builder import build as builder
from irc.backends.tensorrt.builder.request import BuildRequest, Built
from irc.errors import Error
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.needs_rtx


def test_steps_and_fractions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[str, float]] = []

    def build(request: BuildRequest, tell: Progress) -> Built:
        name = request.engine.name
        tell(f"waiting for another process that builds {name}", 0.0)
        tell(f"building {name}", 0.0)
        tell(f"building {name}", 1.0)
        request.engine.write_bytes(b"")
        if name == "stage1.engine":
            raise Error("stop here")
        return Built(request.engine, builder.Report("", "", (), (), ()), cached=False)

    monkeypatch.setattr(builder, "build", build)
    with pytest.raises(Error, match="stop here"):
        irc.compile(
            write_checkpoint(tmp_path / "checkpoint", dtype="float32"),
            tmp_path / "out",
            backend="tensorrt-rtx",
            mesh="pp=2",
            dtype="bf16",
            progress=lambda *each: reported.append(each),
        )
    stages = list(dict.fromkeys(stage for stage, _ in reported))
    assert stages == [
        "reading the model",
        "running passes",
        "writing the program",
        "writing the weights",
        "checking the graphs",
        "running the reference for the self-test",
        "waiting for another process that builds stage0.engine",
        "building stage0.engine",
        "waiting for another process that builds stage1.engine",
        "building stage1.engine",
    ]
    for each in stages:
        fractions = [fraction for stage, fraction in reported if stage == each]
        assert fractions == sorted(fractions)
