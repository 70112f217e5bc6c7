"""Finds the launcher of MPI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from irc.errors import Error

INSTALL = "pip install 'irc-compiler[mpi]' brings mpi4py and mpich"


def mpiexec() -> str:
    """The launcher beside this Python, whose MPI is the one that mpi4py loads; else one on PATH."""
    if importlib.util.find_spec("mpi4py") is None:
        raise Error(f"the package mpi4py is not installed; {INSTALL}")
    own = Path(sys.prefix, "bin", "mpiexec")
    if own.is_file():
        return str(own)
    found = shutil.which("mpiexec")
    if found is None:
        raise Error(f"there is no mpiexec, neither in {own.parent} nor on PATH; {INSTALL}")
    return found


def is_hydra(path: str) -> bool:
    """Whether a launcher is MPICH's, whose options irc uses."""
    return "hydra" in os.path.realpath(path) or Path(path).with_name("hydra_pmi_proxy").is_file()
