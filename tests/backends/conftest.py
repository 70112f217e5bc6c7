"""Compiled models that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.backends.decoder import Decoder


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decoder]:
    """Compiles each decoder once, by its name and mesh."""

    @cache
    def compiled(name: str = "gqa", mesh: str = "", **options: Any) -> Decoder:
        return Decoder.of(tmp_path_factory.mktemp("decoder"), name, mesh, **options)

    return compiled
