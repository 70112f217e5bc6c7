"""Random numbers for the tests of the CUDA backend, and the compiler of kernels."""

import pytest

from irc.backends.cuda.execute.compile import nvrtc_version
from irc.errors import Error
from tests.ops.conftest import rng as rng


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """Skip the test where NVRTC is not installed."""
    try:
        nvrtc_version()
    except Error as error:
        pytest.skip(error.message)
