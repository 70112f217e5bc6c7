"""Ranks that are threads of a test must not end its process when they fail."""

from collections.abc import Iterator

import pytest

from irc.backends.processes import communicator


@pytest.fixture(autouse=True, scope="session")
def patient() -> Iterator[None]:
    """For the whole session: a thread may outlive its test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "GRACE", 3600.0)
        yield
