"""A small checkpoint and its artifact, made once for all tests of the command line."""

from pathlib import Path

import pytest

from tests.cli.runner import works
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="session")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint compiled for ONNX."""
    folder = tmp_path_factory.mktemp("artifact") / "llama"
    works("compile", checkpoint, "-o", folder)
    return folder
