"""Hooks for all tests: seeds, an engine cache, skipped tests; a checkpoint and its artifacts."""

import ctypes
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import VARIABLE, session_seed

ORACLE = ("torch", "transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update` is for tests/passes: see its conftest."""
    parser.addoption("--update", action="store_true", help="rewrite EXPECT in tests/passes/*.irc")


def pytest_configure() -> None:
    """Draw the seed once for all processes; let children be interrupted, also under nohup."""
    session_seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor write the user's engine cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRC_CACHE", str(tmp_path_factory.mktemp("engines")))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a tokenizer."""
    from tests.tiny_checkpoint import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="session")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint compiled for ONNX."""
    return _compiled(checkpoint, tmp_path_factory)


@pytest.fixture(scope="session")
def two_ranks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint compiled for the two ranks of tp=2."""
    return _compiled(checkpoint, tmp_path_factory, mesh="tp=2")


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint compiled into a bundle."""
    return _compiled(checkpoint, tmp_path_factory, bundle=True)


def _compiled(checkpoint: Path, factory: pytest.TempPathFactory, **options: Any) -> Path:
    import irc

    folder = factory.mktemp("artifact") / "llama"
    irc.compile(checkpoint, folder, **options)
    return folder


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """After a failure, print how to repeat the random inputs."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"random inputs: {VARIABLE}={session_seed()}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that this machine cannot run, with the reason."""
    has_rtx = importlib.util.find_spec("tensorrt_rtx") is not None
    no_rtx = None if has_rtx else "no tensorrt_rtx: pip install '.[tensorrt-rtx]'"
    reasons = {"oracle": why_no_oracle(), "gpu": why_no_gpu(), "needs_rtx": no_rtx}
    for marker, reason in reasons.items():
        if reason is None:
            continue
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def why_no_oracle() -> str | None:
    """None if torch and transformers are installed, else the reason to skip."""
    missing = [name for name in ORACLE if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    names = " and ".join(missing)
    return f"no {names}: make setup installs torch only if it is available without CUDA"


def why_no_gpu() -> str | None:
    """None if the NVIDIA driver starts, else the reason to skip."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver on this machine"
    return None if driver.cuInit(0) == 0 else "the NVIDIA driver finds no GPU"
