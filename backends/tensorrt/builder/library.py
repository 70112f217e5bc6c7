"""TensorRT or TensorRT-RTX, found at run time, and the logger and error recorder that it calls.

`TRAITS` holds the differences between the two libraries.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from irc.backends.tensorrt.target import OLDEST, Flavour, release_of
from irc.errors import Error, installs

_DRIVER_MISSING = re.compile(r"cudaError 35\b")  # repeated after other errors without a GPU
_SOURCE = re.compile(r"\s+In \w+ at /_src/\S*")


@dataclass(frozen=True)
class Traits:
    """The properties of one of the two libraries.

    `module` is the Python module, from the extra `extra` of irc-compiler. `shared` is the library
    that the parser opens by its bare name, from the package `{module}_libs`. `cross_compiles`:
    engines are built for a list of compute capabilities, else for the GPU of this machine, with
    measured tactics that a cache of timings keeps.
    """

    name: str
    module: str
    extra: str
    shared: str
    cross_compiles: bool


TRAITS: dict[Flavour, Traits] = {
    "tensorrt": Traits("TensorRT", "tensorrt", "tensorrt", "libnvinfer.so", False),
    "tensorrt-rtx": Traits(
        "TensorRT-RTX", "tensorrt_rtx", "tensorrt-rtx", "libtensorrt_rtx.so", True
    ),
}


@dataclass(frozen=True)
class Library:
    """An imported library; `version` is the full one, `1.7.1.116`."""

    flavour: Flavour
    module: Any
    version: str

    @property
    def traits(self) -> Traits:
        """Its properties."""
        return TRAITS[self.flavour]

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor) version, as in a target."""
        return release_of(self.version)

    def __str__(self) -> str:
        return f"{self.traits.name} {self.version}"


def find(flavour: Flavour) -> Library:
    """Import the library; an Error says how to install it if it is missing, broken or too old."""
    traits = TRAITS[flavour]
    try:
        module = importlib.import_module(traits.module)
        library = Library(flavour, module, module.__version__)
        is_old = library.release < OLDEST[flavour] or not module.Builder
    except Exception as error:  # a damaged installation, or another module of the name, raises any
        _end_if_interrupted(error)
        if isinstance(error, ModuleNotFoundError) and error.name == traits.module:
            raise Error(f"{traits.name} is not installed; {installs(traits.extra)}") from None
        raise Error(
            f"{traits.name} is installed and does not load ({error}); repair the cause, "
            f"or {installs(traits.extra, '--force-reinstall ')}"
        ) from error
    if is_old:
        oldest = ".".join(map(str, OLDEST[flavour]))
        raise Error(
            f"{library} is installed, and irc needs {oldest} or newer; "
            f"{installs(traits.extra, '--upgrade ')}"
        )
    return library


def _end_if_interrupted(error: BaseException | None) -> None:
    """Raise ctrl-C (or an exit) in the causes of an error again: the initialization of an extension
    module turns everything that is raised in it into an ImportError."""
    while error is not None:
        if not isinstance(error, Exception):
            raise error
        error = error.__cause__ or error.__context__


def installed(flavour: Flavour) -> bool:
    """Whether a library can be found, without importing it; it may be too old."""
    return TRAITS[flavour].module in sys.modules or find_spec(TRAITS[flavour].module) is not None


def shared_library(traits: Traits) -> Path | None:
    """The shared library that needs a link under its unversioned name, or None.

    The wheels have it only with its version, `libtensorrt_rtx.so.1`, and a parser that does not
    find the bare name ends the process.
    """
    spec = find_spec(f"{traits.module}_libs")
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        files = sorted(folder.glob(f"{traits.shared}.*"))
        if files and not (folder / traits.shared).exists():
            return files[0]
    return None


def make_logger(trt: Any, listen: Callable[[str], None]) -> Any:
    """An `ILogger` of a module `tensorrt` or `tensorrt_rtx` that calls `listen` with each message,
    from any thread.

    TensorRT uses the first logger of a process for all its objects, so it must stay alive.
    """

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            listen(text)

    return Logger()


@cache
def silent_logger(trt: Any) -> Any:
    """The logger of a process whose objects report their errors to an error recorder."""
    return make_logger(trt, lambda text: None)


def make_error_recorder(trt: Any) -> Any:
    """An `IErrorRecorder` that keeps every error until `clear`; `texts` are their reasons."""

    class ErrorRecorder(trt.IErrorRecorder):
        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)
            self.errors: list[tuple[Any, str]] = []

        @property
        def texts(self) -> list[str]:
            return [*filter(None, (reason(text) for _, text in self.errors))]

        def num_errors(self) -> int:
            return len(self.errors)

        def get_error_code(self, index: int) -> Any:
            return self.errors[index][0]

        def get_error_desc(self, index: int) -> str:
            return self.errors[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            self.errors.clear()

        def report_error(self, code: Any, text: str) -> bool:
            self.errors.append((code, text))
            return False  # the library goes on if it can

    return ErrorRecorder()


def reason(text: str) -> str:
    """An error without positions in TensorRT's source; "" for one about a missing driver."""
    lines = [line for line in text.splitlines() if line.strip()]
    text = "\n".join(line for line in lines if not _DRIVER_MISSING.search(line))
    text = re.sub(r"^\w+::\w+: Error Code \d+: ", "", _SOURCE.sub("", text).strip())
    return text.removeprefix("Assertion failed: ").rstrip(". ")
