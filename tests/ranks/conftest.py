"""Artifacts of several ranks, compiled once for all tests over MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runner import works
from tests.layout import ROOT
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama of the repository for tp=2."""
    return compiled(tmp_path_factory.mktemp("artifacts") / "two", "tp=2")


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for pp=2, tp=2."""
    return compiled(tmp_path_factory.mktemp("artifacts") / "four", "pp=2,tp=2")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model for tp=2 that writes until it is ended."""
    folder = tmp_path_factory.mktemp("endless")
    changes = {"max_position_embeddings": 1 << 20, "eos_token_id": None}
    checkpoint = write_checkpoint(folder / "checkpoint", **changes)
    works("compile", checkpoint, "--mesh", "tp=2", "-o", folder / "two")
    return folder / "two"


def compiled(folder: Path, mesh: str) -> Path:
    """The tiny Llama for a mesh."""
    examples = ROOT / "examples"
    words = ["--checkpoint", examples / "tiny_llama", "--mesh", mesh, "-o", folder]
    works("compile", examples / "llama.py", *words)
    return folder
