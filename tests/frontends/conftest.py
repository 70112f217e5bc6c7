"""Fixtures of the tests of frontends."""

from tests.ops.conftest import rng as rng
