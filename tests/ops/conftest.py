"""Random numbers for the operation tests."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest

from tests.fresh import fresh


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of this session and this test."""
    return fresh(crc32(request.node.nodeid.encode()))
