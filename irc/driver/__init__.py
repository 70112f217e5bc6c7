"""From a source to an artifact folder, and from an artifact folder to a running program."""

from .build import Prepared, check, compile, prepare, run_passes, write
from .load import Artifact, load, open_model
from .sources import Source, find_source, read_module

__all__ = [
    "Artifact",
    "Prepared",
    "Source",
    "check",
    "compile",
    "find_source",
    "load",
    "open_model",
    "prepare",
    "read_module",
    "run_passes",
    "write",
]
