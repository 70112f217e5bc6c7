"""Random numbers for the tests of the CUDA backend."""

from tests.ops.conftest import rng as rng
