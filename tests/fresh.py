"""Random numbers for tests: different in every session, and repeatable.

A failing session prints its seed; IRC_TEST_SEED=<seed> repeats it.
"""

from __future__ import annotations

import os
import secrets

import numpy as np

from irc.ir.dtypes import dtype_of, is_float

VARIABLE = "IRC_TEST_SEED"


def session_seed() -> int:
    """The seed of this session, the same in all its processes."""
    return int(os.environ.setdefault(VARIABLE, str(secrets.randbits(32))))


def fresh(stream: int = 0) -> np.random.Generator:
    """A generator for this session; other streams give other numbers."""
    return np.random.default_rng([session_seed(), stream])


def sprinkled(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Floats of which a twentieth is NaN, infinite, or a zero of either sign."""
    if not is_float(dtype_of(x)):
        return x
    special = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], x.shape).astype(x.dtype)
    return np.where(rng.random(x.shape) < 1 / 20, special, x)
