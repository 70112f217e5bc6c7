"""Runs a command on every rank of an artifact: threads of this process, or processes over MPI."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..backends.ranks.launch import (
    LaunchedRank,
    find_launched_rank,
    launch,
    supervise,
    take_command,
)
from ..errors import Error
from .arguments import load_settings, whole_number, with_comma, word_of

if TYPE_CHECKING:
    import numpy as np

    from ..artifact.folder import ArtifactFolder
    from ..backends.ranks.communicator import Communicator
    from ..backends.ranks.mpi import MpiCommunicator
    from ..backends.ranks.watcher import Watcher

    Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]

THREADS, MPI = "threads", "mpi"
_REFERENCE = "reference"


class Process:
    """This process: `rank` where a launcher started it, else only a command.

    `argv` is the command; `launched`: whether irc itself started the ranks. Only rank 0 prints, or,
    where that has died, the first that lives.
    """

    def __init__(
        self, argv: list[str], rank: LaunchedRank | None = None, launched: bool = False
    ) -> None:
        self.argv, self.rank, self.launched = argv, rank, launched
        self._watcher: Watcher | None = None

    @staticmethod
    def of_program() -> Process:
        """The process that runs the program `irc`; a rank goes on in a child of itself."""
        rank, command = find_launched_rank(), take_command()
        launched = command is not None
        if rank is not None and not rank.refusal and (launched or rank.ranks > 1):
            supervise(rank)
        return Process(sys.argv[1:] if command is None else command, rank, launched)

    @contextmanager
    def communicator(self) -> Generator[MpiCommunicator]:
        """Be a rank; a failure here ends all ranks, and a failure of theirs ends this one."""
        from ..backends.ranks.mpi import MpiCommunicator

        try:
            communicator = MpiCommunicator()
        except Error:
            _print_here(True)  # the other ranks do not learn of it
            raise
        self._watcher = communicator.watcher
        try:
            communicator.agree("the command", shlex.join(self.argv))
            yield communicator
            communicator.close()
        except BaseException as error:
            raise self._reported(communicator.watcher, error) from error

    def silence(self) -> None:
        """Let only rank 0 print, where this process is a rank."""
        if self.rank is not None and self.rank.rank != 0:
            _print_here(False)

    def end(self, status: int) -> None:
        """The last call of the program: after a failure end the ranks, without waiting for them."""
        if self._watcher is not None and self._watcher.failure is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            self._watcher.end_process(status)

    def _reported(self, watcher: Watcher, error: BaseException) -> BaseException:
        """Tell the other ranks, find out which one tells the user; what is to be raised."""
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # not the main thread
                signal.signal(number, signal.SIG_IGN)
        expected = isinstance(error, Error | OSError | ModuleNotFoundError)
        if watcher.rank != 0 and isinstance(error, Exception) and not expected:
            # the report is written here, and its place printed by the first rank
            from .crash import crash_report

            error = Error(crash_report(error, self.argv))
        watcher.fail_here(_reason(error))
        _print_here(watcher.claim_report())
        return error


def _print_here(prints: bool) -> None:
    """Let this process print, or let its output go nowhere."""
    if prints:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    else:
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "it was interrupted"
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


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
    args: Namespace,
    work: Callable[[Namespace, Communicator | None], int],
    reads: bool = False,
    grace_seconds: float = 0.0,
) -> int:
    """Do a command's work here, or in a process per rank; its exit status.

    `work` gets the communicator where this process is a rank. `reads`: whether rank 0 needs
    standard input. `grace_seconds`: how long ranks go on when the command is told to end.
    """
    from ..artifact.folder import ArtifactFolder

    process: Process = args.process
    hosts = [host for host in args.hosts.split(",") if host]
    args.artifact = ArtifactFolder.find(Path(args.source))  # read once
    _check_flags(args)
    _check_count(args)
    if _launcher_of(args, process) == THREADS:
        if hosts:
            raise Error("--hosts needs processes: --launcher mpi")
        return work(args, None)
    if process.rank is not None and process.rank.refusal:
        raise Error(process.rank.refusal)
    process.silence()
    if args.backend == _REFERENCE:
        raise Error("the reference backend runs all ranks itself; leave --launcher mpi out")
    if process.rank is None:
        ranks = ranks_of(_artifact(args).manifest)
        data = sys.stdin.buffer.read() if reads else b""
        return launch(process.argv, ranks, hosts, data, grace_seconds)
    if hosts and not process.launched:
        raise Error("mpirun has chosen the hosts already; leave --hosts out")
    with process.communicator() as communicator:
        _check_artifact(communicator, _artifact(args))
        return work(args, communicator)


def _artifact(args: Namespace) -> ArtifactFolder:
    """The artifact of a command; an Error where its source is none."""
    from ..artifact.folder import ArtifactFolder

    return args.artifact or ArtifactFolder.open(Path(args.source))


def ranks_of(manifest: Mapping[str, Any]) -> int:
    """How many ranks an artifact has."""
    from ..ir.mesh import Mesh

    return Mesh.parse(manifest["mesh"]).ranks


def _check_artifact(communicator: MpiCommunicator, artifact: ArtifactFolder) -> None:
    """An Error where an artifact has another number of ranks, or differs between ranks."""
    manifest = artifact.manifest
    ranks, started = ranks_of(manifest), communicator.ranks
    if ranks != started:
        raise Error(
            f"{artifact.path} was compiled for the mesh ({manifest['mesh']}), so start as many "
            f"processes as that has ranks, mpirun -n {ranks}: there are {started}"
        )
    communicator.agree("the artifact", str(manifest["manifest"]))


def _check_flags(args: Namespace) -> None:
    """An Error about a flag that is for programs of another backend than runs here."""
    if args.backend is None and args.artifact is None:
        return
    from ..backends import OWN

    backend = args.backend or args.artifact.backend
    if backend not in OWN:
        return  # a backend of another package, which knows its options itself
    for keyword, (setting, backends) in load_settings().items():
        flag = setting.flag
        if getattr(args, keyword) is not None and backend not in backends:
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
    from ..backends import get

    if args.launcher is not None:
        return args.launcher
    several = process.rank is not None and process.rank.ranks > 1
    artifact: ArtifactFolder | None = None if args.backend else args.artifact
    if artifact is not None and get(artifact.backend).rank_is_process:
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
