"""Random numbers for tests: different in every session, and repeatable.

A failing session prints its seed; IRC_TEST_SEED=<seed> repeats it.
"""

from __future__ import annotations

import os
import secrets

import numpy as np

VARIABLE = "IRC_TEST_SEED"


def session_seed() -> int:
    """The seed of this session, the same in all its processes."""
    return int(os.environ.setdefault(VARIABLE, str(secrets.randbits(32))))


def fresh(stream: int = 0) -> np.random.Generator:
    """A generator for this session; other streams give other numbers."""
    return np.random.default_rng([session_seed(), stream])
