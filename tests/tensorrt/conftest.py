"""Tests marked `needs_rtx` run where TensorRT-RTX is installed."""

from importlib.util import find_spec

import pytest

MARK = "needs_rtx"


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", f"{MARK}: needs TensorRT-RTX; skipped where it is missing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need the library where it is not installed."""
    if find_spec("tensorrt_rtx") is not None:
        return
    skip = pytest.mark.skip(reason="no tensorrt_rtx: pip install 'irc-compiler[tensorrt-rtx]'")
    for item in items:
        if item.get_closest_marker(MARK):
            item.add_marker(skip)
