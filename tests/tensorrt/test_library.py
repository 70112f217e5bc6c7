"""Finding the library: an error for each way in which it cannot be used; recorded errors."""

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from irc.backends.tensorrt.builder import library
from irc.backends.tensorrt.builder.library import (
    TRAITS,
    find,
    installed,
    make_error_recorder,
    shared_library,
)
from irc.errors import Error
from tests.cli.runner import shell
from tests.layout import ROOT


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules, found before all others and without the real libraries."""
    kept = [path for path in sys.path if not (Path(path) / "tensorrt_rtx").exists()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *kept])
    names = [traits.module for traits in TRAITS.values()]
    real = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield tmp_path
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(real)


@pytest.mark.parametrize(
    ("flavour", "text", "message"),
    [
        ("tensorrt", None, "TensorRT is not installed; pip install '.[tensorrt]' in the checkout"),
        ("tensorrt-rtx", None, "TensorRT-RTX is not installed; pip install '.[tensorrt-rtx]' in"),
        ("tensorrt", "__version__ = '10.16.1.2'; Builder = int", "10.16.1.2 is installed, and irc"),
        ("tensorrt-rtx", "__version__ = '1.6.1.120'; Builder = int", "irc needs 1.7 or newer; pip"),
        ("tensorrt", "raise OSError('libcudart.so.13: no file')", "not load (libcudart.so.13: no"),
        ("tensorrt", "import tensorrt_no_bindings", "not load (No module named 'tensorrt_no_bindi"),
        ("tensorrt", "", "pip install --force-reinstall '.[tensorrt]'"),
        ("tensorrt", "__version__ = '11.4.0'", "has no attribute 'Builder'); repair the cause"),
    ],
)
def test_a_library_that_cannot_be_used(
    flavour: Any, text: str | None, message: str, modules: Path
) -> None:
    if text is not None:
        (modules / f"{TRAITS[flavour].module}.py").write_text(text)
        importlib.invalidate_caches()
    assert installed(flavour) == (text is not None)
    with pytest.raises(Error, match=re.escape(message)):
        find(flavour)


# pybind11 turns an exception in the start of a module into this.
INTERRUPTED = """
import signal
try:
    signal.raise_signal(signal.{})
except BaseException as error:
    raise ImportError("initialization failed") from error
"""


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("command", [["doctor"], ["compile", "m.irc", "-o", "out"]])
def test_a_signal_while_the_library_starts_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: int, command: list[str]
) -> None:
    (tmp_path / "tensorrt_rtx.py").write_text(INTERRUPTED.format(name))
    (tmp_path / "m.irc").write_text(
        "module @m { func @f(%x: f32[2]) -> (f32[2]) { %y = exp %x : f32[2] return %y } }"
    )
    words = [*command, "--backend", "tensorrt-rtx"] if command != ["doctor"] else command
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    done = shell(*words, cwd=tmp_path)
    assert (done.status, done.out) == (status, ""), done
    assert "".join(done.reports).strip() == ("interrupted" if status == 130 else "")
    assert not (tmp_path / "out").exists()


def test_shared_libraries_without_their_bare_name(tmp_path: Path, monkeypatch: Any) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(library, "find_spec", lambda name: spec)
    traits = TRAITS["tensorrt-rtx"]
    assert shared_library(traits) is None
    (tmp_path / "libtensorrt_rtx.so.1").touch()
    assert shared_library(traits) == tmp_path / "libtensorrt_rtx.so.1"
    (tmp_path / "libtensorrt_rtx.so").touch()
    assert shared_library(traits) is None


def test_an_error_recorder_keeps_reasons() -> None:
    recorder = make_error_recorder(SimpleNamespace(IErrorRecorder=type("Base", (), {})))
    text = (
        "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (it is wrong. "
        "In validate at /_src/optimizer/api/network.cpp:4023)\n"
        "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (cudaError 35: no)"
    )
    assert recorder.report_error("code", text) is False
    recorder.report_error("code", "Error Code 1: Cuda Runtime (cudaError 35: no driver)")
    assert recorder.num_errors() == 2 and recorder.get_error_code(0) == "code"
    assert recorder.get_error_desc(0) == text
    assert recorder.texts == ["API Usage Error (it is wrong"]
    recorder.clear()
    assert (recorder.num_errors(), recorder.texts) == (0, [])
