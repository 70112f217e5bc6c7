"""Runs a command's work on every rank: threads of this process, or processes over MPI."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..artifact import read_manifest
from ..errors import Error
from .arguments import word_of
from .rank import Process, ranks_of

if TYPE_CHECKING:
    import numpy as np

    from ..backends.mpi.communicator import MpiCommunicator

    Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]

THREADS, MPI = "threads", "mpi"


def add_launcher(parser: ArgumentParser) -> None:
    """What decides how the ranks of an artifact run."""
    parser.add_argument(
        "--launcher",
        metavar="KIND",
        type=word_of(THREADS, MPI),
        help="ranks are threads of this process (the default), or mpi: processes that MPI's "
        "launcher starts; started by mpirun, this process is one of them",
    )
    parser.add_argument(
        "--hosts",
        metavar="A,B",
        default="",
        help="start the processes on these hosts, over ssh; the artifact and this Python must be "
        "at the same paths there",
    )


def over_ranks(
    args: Namespace, work: Callable[[Namespace, MpiCommunicator | None], int], reads: bool = False
) -> int:
    """Do a command's work here, or in a process per rank; its exit status.

    `work` gets the communicator where this process is a rank. `reads`: whether the first rank
    needs standard input.
    """
    process: Process = args.process
    hosts = [host for host in args.hosts.split(",") if host]
    if _kind(args, process) == THREADS:
        if hosts:
            raise Error("--hosts needs processes: --launcher mpi")
        return work(args, None)
    if process.place is not None:
        process.open_streams()
    if args.backend == "reference":
        raise Error("the reference backend runs all ranks itself; leave --launcher mpi out")
    folder = Path(args.source)
    if process.place is None:
        from .launch import launch

        ranks = ranks_of(read_manifest(folder))
        return launch(process.words, ranks, hosts, sys.stdin.buffer.read() if reads else b"")
    if hosts and not process.launched:
        raise Error("mpirun has chosen the hosts already; leave --hosts out")
    with process.joined(folder) as communicator:
        return work(args, communicator)


def _kind(args: Namespace, process: Process) -> str:
    if args.launcher is not None:
        return args.launcher
    several = process.place is not None and process.place.ranks > 1
    return MPI if several or args.hosts else THREADS


def shared(communicator: MpiCommunicator | None, read: Callable[[], Arrays]) -> Arrays:
    """What only the first rank reads, such as a file, on every rank."""
    if communicator is None:
        return read()
    if communicator.rank != 0:
        return communicator.receive(0)
    with communicator.paused():  # the user may be typing it
        arrays = read()
    for rank in range(1, communicator.ranks):
        communicator.send(rank, arrays)
    return arrays


def of_rank(communicator: MpiCommunicator | None) -> dict[str, Any]:
    """The options of `load` that let this process run one rank."""
    return {} if communicator is None else {"communicator": communicator}
