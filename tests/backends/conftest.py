"""Compiled models and checkpoints that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.backends.decoder import Decoder
from tests.backends.emission import checkpoint


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decoder]:
    """Compiles each decoder once, by its name and mesh."""

    @cache
    def compiled(name: str = "gqa", mesh: str = "", **options: Any) -> Decoder:
        return Decoder.of(tmp_path_factory.mktemp("decoder"), name, mesh, **options)

    return compiled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with an empty folder for the artifact."""
    return checkpoint(tmp_path)
