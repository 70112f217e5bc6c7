"""Ranks that are threads of a test must not end its process when they fail; ports to meet at."""

from collections.abc import Iterator

import pytest

from irc.backends.processes import communicator
from tests.ports import held_port


@pytest.fixture(autouse=True, scope="session")
def patient() -> Iterator[None]:
    """For the whole session: a thread may outlive its test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "GRACE", 3600.0)
        yield


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this host for rank 0."""
    with held_port() as found:
        yield found
