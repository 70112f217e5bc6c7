"""Runs a command's work on every rank: threads of this process, or processes over MPI."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..artifact import is_artifact, read_manifest
from ..errors import Error
from .arguments import whole_number, word_of
from .place import MPI as OVER_MPI
from .rank import Process, ranks_of

if TYPE_CHECKING:
    import numpy as np

    from .rank import RankCommunicator

    Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]

THREADS, PROCESSES, MPI = "threads", "processes", "mpi"
_ON_GPUS = ("tensorrt", "tensorrt-rtx")  # backends whose ranks are processes
_ON_CPU = ("onnx",)
_REFERENCE = "reference"
_FLAGS = {  # those of `add_runtime`, and the backends that they are for
    "--threads": _ON_CPU,
    "--low-memory": _ON_CPU,
    "--no-self-test": _ON_GPUS,
    "--plugin": _ON_GPUS,
}


def add_launcher(parser: ArgumentParser) -> None:
    """What decides how the ranks of an artifact run."""
    parser.add_argument(
        "--launcher",
        metavar="KIND",
        type=word_of(THREADS, PROCESSES, MPI),
        help="ranks are threads of this process (the default on CPU), processes (the default on "
        "GPUs) that irc starts, or mpi: processes that MPI's launcher starts; started by mpirun, "
        "torchrun or srun, this process is one of them",
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=whole_number(1),
        help="start N processes, as many as the artifact has ranks",
    )
    parser.add_argument(
        "--hosts",
        metavar="A,B",
        default="",
        help="start the processes on these hosts, over ssh; the artifact and this Python must be "
        "at the same paths there",
    )


def over_ranks(
    args: Namespace, work: Callable[[Namespace, RankCommunicator | None], int], reads: bool = False
) -> int:
    """Do a command's work here, or in a process per rank; its exit status.

    `work` gets the communicator where this process is a rank. `reads`: whether the first rank
    needs standard input.
    """
    process: Process = args.process
    hosts = [host for host in args.hosts.split(",") if host]
    kind = _kind(args, process)
    _check_flags(args)
    _check_count(args)
    if kind == THREADS:
        if hosts:
            raise Error("--hosts needs processes: --launcher mpi")
        return work(args, None)
    if process.place is not None:
        process.open_streams()
    if args.backend == _REFERENCE:
        raise Error(f"the reference backend runs all ranks itself; leave --launcher {kind} out")
    folder = Path(args.source)
    if process.place is None:
        return _started(kind, process, folder, hosts, reads)
    if hosts and not process.launched:
        raise Error("mpirun has chosen the hosts already; leave --hosts out")
    with process.joined(folder) as communicator:
        return work(args, communicator)


def _started(kind: str, process: Process, folder: Path, hosts: list[str], reads: bool) -> int:
    """Start the ranks; the exit status of the command."""
    ranks = ranks_of(read_manifest(folder))
    if kind == MPI:
        from .launch import launch

        return launch(process.words, ranks, hosts, sys.stdin.buffer.read() if reads else b"")
    if hosts:
        raise Error("irc starts processes on this host; with --hosts it is --launcher mpi")
    from .spawn import spawn

    return spawn(process.words, ranks)


def _check_flags(args: Namespace) -> None:
    """An Error about a flag that is for programs of another backend than runs here."""
    folder = Path(args.source)
    if args.backend is None and not is_artifact(folder):
        return
    backend = args.backend or read_manifest(folder)["backend"]
    if backend not in (*_ON_CPU, *_ON_GPUS, _REFERENCE):
        return  # a backend of another package, which knows its options itself
    for flag, backends in _FLAGS.items():
        if getattr(args, flag.removeprefix("--").replace("-", "_")) and backend not in backends:
            instead = "a file that declares operations is given with --load"
            raise Error(
                f"{flag} is for artifacts of the backend {' or '.join(backends)}, and {folder} "
                f"runs on {backend}; {instead if flag == '--plugin' else 'leave it out'}"
            )


def _check_count(args: Namespace) -> None:
    if args.ranks is None:
        return
    folder = Path(args.source)
    manifest = read_manifest(folder)
    ranks = ranks_of(manifest)
    if ranks == 1 != args.ranks:
        raise Error(
            f"{folder} was compiled for one rank, which is one process; leave --ranks out, or "
            "compile for several, as with --mesh tp=2"
        )
    if ranks != args.ranks:
        raise Error(
            f"{folder} was compiled for {ranks} ranks (the mesh is ({manifest['mesh']})), not for "
            f"{args.ranks}; give --ranks {ranks}, or compile for another --mesh"
        )


def _kind(args: Namespace, process: Process) -> str:
    """How the ranks run; in a process that a launcher started, how that one talks to the others."""
    place = process.place
    several = place is not None and place.ranks > 1
    if place is not None and args.launcher in (None, PROCESSES) and (several or args.ranks):
        return MPI if place.means == OVER_MPI else PROCESSES
    if args.launcher is not None:
        return args.launcher
    if args.hosts:
        return MPI
    return PROCESSES if (args.ranks or 1) > 1 or _on_gpus(args) else THREADS


def _on_gpus(args: Namespace) -> bool:
    """Whether this runs on several GPUs, of which each has a process."""
    folder = Path(args.source)
    if args.backend is not None or not is_artifact(folder):
        return False
    manifest = read_manifest(folder)
    return manifest["backend"] in _ON_GPUS and ranks_of(manifest) > 1


def shared(communicator: RankCommunicator | None, read: Callable[[], Arrays]) -> Arrays:
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


def of_rank(communicator: RankCommunicator | None) -> dict[str, Any]:
    """The options of `load` that let this process run one rank."""
    return {} if communicator is None else {"communicator": communicator}
