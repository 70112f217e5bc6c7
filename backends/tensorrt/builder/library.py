"""Finds TensorRT or TensorRT-RTX at run time; `TRAITS` holds the differences between the two."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from irc.backends.cuda.runtime import device_count
from irc.backends.tensorrt.target import OLDEST, Flavour, release_of
from irc.errors import Error, installs

NVIDIA_DRIVER = "libcuda.so.1"


@dataclass(frozen=True)
class Traits:
    """The properties of one of the two libraries.

    `module` is the Python module, from the extra `extra` of irc-compiler. `shared` is the library
    that the parser opens by its bare name, from the package `{module}_libs`. `cross_compiles`:
    engines are built for a list of compute capabilities, else for the GPU of this machine.
    `timing_cache`: measured tactics can be kept.
    """

    name: str
    module: str
    extra: str
    shared: str
    cross_compiles: bool
    timing_cache: bool


TRAITS: dict[Flavour, Traits] = {
    "tensorrt": Traits("TensorRT", "tensorrt", "tensorrt", "libnvinfer.so", False, True),
    # A timing cache would make TensorRT-RTX use the GPU, which it needs for nothing else.
    "tensorrt-rtx": Traits(
        "TensorRT-RTX", "tensorrt_rtx", "tensorrt-rtx", "libtensorrt_rtx.so", True, False
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
    module = _imported(traits)
    version = str(getattr(module, "__version__", ""))
    if not re.match(r"\d+\.\d+", version) or not hasattr(module, "Builder"):
        raise Error(
            f"the module {traits.module} at {getattr(module, '__file__', None)} is not "
            f"{traits.name}; remove it, or {installs(traits.extra)}"
        )
    if release_of(version) < OLDEST[flavour]:
        oldest = ".".join(map(str, OLDEST[flavour]))
        raise Error(
            f"{traits.name} {version} is installed, and irc needs {oldest} or newer; "
            f"{installs(traits.extra, '--upgrade ')}"
        )
    return Library(flavour, module, version)


def installed(flavour: Flavour) -> bool:
    """Whether a library can be found, without importing it; it may be too old."""
    return TRAITS[flavour].module in sys.modules or find_spec(TRAITS[flavour].module) is not None


def has_gpu() -> bool:
    """Whether this machine has a GPU and its driver starts."""
    return device_count() > 0


def shared_library(traits: Traits) -> Path | None:
    """The shared library that needs a link under its unversioned name, or None.

    The wheels have it only with its version, `libtensorrt_rtx.so.1`, and a parser that does not
    find the bare name ends the process.
    """
    spec = find_spec(f"{traits.module}_libs")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in map(Path, folders):
        found = sorted(folder.glob(f"{traits.shared}.*"))
        if found and not (folder / traits.shared).exists():
            return found[0]
    return None


def _imported(traits: Traits) -> ModuleType:
    try:
        return importlib.import_module(traits.module)
    except ModuleNotFoundError as error:
        if error.name == traits.module:
            raise Error(f"{traits.name} is not installed; {installs(traits.extra)}") from None
        raise _broken(traits, error) from error
    except Exception as error:  # a damaged installation raises anything
        _end_if_interrupted(error)
        raise _broken(traits, error) from error


def _end_if_interrupted(error: BaseException) -> None:
    """Raise ctrl-C (or an exit) in the causes of an error again: the initialization of an extension
    module turns everything that is raised in it into an ImportError."""
    seen: BaseException | None = error
    while seen is not None:
        if not isinstance(seen, Exception):
            raise seen
        seen = seen.__cause__ or seen.__context__


def _broken(traits: Traits, error: Exception) -> Error:
    return Error(
        f"{traits.name} is installed and does not load ({error}); repair the cause, "
        f"or {installs(traits.extra, '--force-reinstall ')}"
    )
