"""Runs a command on every rank of an artifact: threads of this process, or processes over MPI."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..artifact.folder import ArtifactFolder
from ..errors import Error
from .arguments import whole_number, with_comma, word_of
from .rank import Process, check_artifact, ranks_of

if TYPE_CHECKING:
    import numpy as np

    from ..backends.ranks.communicator import Communicator

    Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]

THREADS, MPI = "threads", "mpi"
_ENGINES = ("tensorrt", "tensorrt-rtx")
_ON_GPUS = (*_ENGINES, "cuda")  # backends of which every rank needs a process
_ON_CPU = ("onnx",)
_REFERENCE = "reference"
_FLAGS = {  # those of `add_runtime`, and the backends that they are for
    "--threads": _ON_CPU,
    "--low-memory": _ON_CPU,
    "--no-self-test": _ENGINES,
    "--plugin": _ENGINES,
}


def add_launcher(
    parser: ArgumentParser, ranks: str = "start N processes over MPI, one per rank of the artifact"
) -> None:
    """What decides how the ranks of an artifact run; `ranks` is the help of `--ranks`."""
    add = parser.add_argument
    what = (
        "threads: ranks are threads of this process (the default on CPU); mpi: processes that "
        "MPI's launcher starts (the default on GPUs, and under mpirun or srun --mpi=pmi2)"
    )
    add("--launcher", metavar="KIND", type=word_of(THREADS, MPI), help=what)
    add("--ranks", metavar="N", type=whole_number(1), help=ranks)
    what = "start them on these hosts, over ssh; the artifact and Python need the same paths there"
    add("--hosts", metavar="A,B", default="", join=with_comma, help=what)


def over_ranks(
    args: Namespace, work: Callable[[Namespace, Communicator | None], int], reads: bool = False
) -> int:
    """Do a command's work here, or in a process per rank; its exit status.

    `work` gets the communicator where this process is a rank. `reads`: whether rank 0 needs
    standard input.
    """
    process: Process = args.process
    hosts = [host for host in args.hosts.split(",") if host]
    args.artifact = ArtifactFolder.find(Path(args.source))  # read once
    place = process.place
    _check_flags(args)
    _check_count(args)
    if _launcher_of(args, process) == THREADS:
        if hosts:
            raise Error("--hosts needs processes: --launcher mpi")
        return work(args, None)
    if place is not None and place.refusal:
        raise Error(place.refusal)
    if place is not None:
        process.open_streams()
    if args.backend == _REFERENCE:
        raise Error("the reference backend runs all ranks itself; leave --launcher mpi out")
    if place is None:
        from ..backends.ranks.launch import launch

        ranks = ranks_of(_artifact(args).manifest)
        return launch(process.words, ranks, hosts, sys.stdin.buffer.read() if reads else b"")
    if hosts and not process.launched:
        raise Error("mpirun has chosen the hosts already; leave --hosts out")
    with process.joined() as communicator:
        check_artifact(communicator, _artifact(args))
        return work(args, communicator)


def _artifact(args: Namespace) -> ArtifactFolder:
    """The artifact of a command; an Error where its source is none."""
    return args.artifact or ArtifactFolder.open(Path(args.source))


def _check_flags(args: Namespace) -> None:
    """An Error about a flag that is for programs of another backend than runs here."""
    if args.backend is None and args.artifact is None:
        return
    backend = args.backend or args.artifact.backend
    if backend not in (*_ON_CPU, *_ON_GPUS, _REFERENCE):
        return  # a backend of another package, which knows its options itself
    for flag, backends in _FLAGS.items():
        if getattr(args, flag.removeprefix("--").replace("-", "_")) and backend not in backends:
            instead = "a file that declares operations is given with --load"
            raise Error(
                f"{flag} is for artifacts of {' or '.join(backends)}, and {args.source} "
                f"runs on {backend}; {instead if flag == '--plugin' else 'leave it out'}"
            )


def _check_count(args: Namespace) -> None:
    if args.ranks is None:
        return
    artifact = _artifact(args)
    ranks = ranks_of(artifact.manifest)
    if ranks != args.ranks:
        raise Error(
            f"--ranks is {args.ranks}, but {artifact.path} was compiled for {ranks}; give --ranks "
            f"{ranks}, or compile for another --mesh"
        )


def _launcher_of(args: Namespace, process: Process) -> str:
    """How the ranks run; a process that a launcher started with others is a rank."""
    if args.launcher is not None:
        return args.launcher
    several = process.place is not None and process.place.ranks > 1
    artifact: ArtifactFolder | None = None if args.backend else args.artifact
    if artifact is not None and artifact.backend in _ON_GPUS:
        several = several or ranks_of(artifact.manifest) > 1
    return MPI if args.hosts or several or (args.ranks or 1) > 1 else THREADS


def shared(communicator: Communicator | None, read: Callable[[], Arrays]) -> Arrays:
    """What only rank 0 reads, such as a file, on every rank."""
    if communicator is None:
        return read()
    if communicator.rank != 0:
        return communicator.receive(0)
    with communicator.paused():  # a person may be typing it
        arrays = read()
    for rank in range(1, communicator.ranks):
        communicator.send(rank, arrays)
    return arrays


def of_rank(communicator: Communicator | None) -> dict[str, Any]:
    """The options of `load` that let this process run one rank."""
    return {} if communicator is None else {"communicator": communicator}
