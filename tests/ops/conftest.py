"""Random numbers for the operation tests: drawn afresh, the seed in the report of a failure."""

from __future__ import annotations

import os
import secrets

import numpy as np
import pytest

VARIABLE = "IRC_TEST_SEED"


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator seeded anew, or with $IRC_TEST_SEED."""
    seed = int(os.environ.get(VARIABLE) or secrets.randbits(32))
    print(f"to repeat this: {VARIABLE}={seed}")
    return np.random.default_rng(seed)
