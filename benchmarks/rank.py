"""Ranks of GPU benchmarks and tests: processes of MPI's launcher, each with a communicator.

    mpiexec -n 4 python -m benchmarks.rank MODULE ARGUMENTS...

calls `MODULE.run(communicator, arguments)` on every rank.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from irc.backends.ranks.launch import find_launched_rank, find_mpiexec, supervise

ROOT = Path(__file__).resolve().parents[1]


def start_ranks(ranks: int, module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start so many ranks; `options` are those of Popen."""
    rank = [sys.executable, "-m", "benchmarks.rank", module, *arguments]
    return subprocess.Popen([find_mpiexec(), "-n", str(ranks), *rank], cwd=ROOT, **options)


def main() -> None:
    """Be one rank; a failure here ends all ranks."""
    rank = find_launched_rank()
    if rank is None:
        sys.exit(__doc__)
    supervise(rank)
    from irc.backends.ranks.mpi import MpiCommunicator

    communicator = MpiCommunicator()
    try:
        importlib.import_module(sys.argv[1]).run(communicator, sys.argv[2:])
        communicator.close()
    except BaseException as error:
        if communicator.watcher.failure is None:
            traceback.print_exc()
        communicator.watcher.fail_here(str(error))
        communicator.watcher.end_process(1)


if __name__ == "__main__":
    main()
