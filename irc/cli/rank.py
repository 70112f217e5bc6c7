"""This process as one rank of several: its communicator, and which rank prints.

Only one rank prints: rank 0, or, where that has died, the first that lives.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from ..backends.ranks.environment import Place, find_place
from ..errors import Error
from .console import error_line

if TYPE_CHECKING:
    from ..artifact.folder import ArtifactFolder
    from ..backends.ranks.frames import FrameWriter
    from ..backends.ranks.mpi import MpiCommunicator


class Process:
    """This process: a rank where a launcher started it, at `place`, else only a command.

    `words` is the command; `launched`: whether irc itself started the ranks.
    """

    def __init__(self, words: list[str], place: Place | None = None) -> None:
        self.words, self.place, self.launched = words, place, False
        self._frames: FrameWriter | None = None
        self._terminals: list[str] = []
        self._streams: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
        self._communicator: MpiCommunicator | None = None
        self._prints = False

    @staticmethod
    def of_program(environment: Mapping[str, str] = os.environ) -> Process:
        """The process that runs the program `irc`; a rank goes on in a child of itself."""
        place = find_place(environment)
        process = Process(sys.argv[1:], place)
        if place is None or place.refusal:
            return process
        from ..backends.ranks.launch import take_command
        from ..backends.ranks.supervisor import supervise

        command = take_command(environment)
        if command is not None:
            from ..backends.ranks.frames import FrameWriter

            process.words, token, process._terminals = command
            process.launched, process._frames = True, FrameWriter(token)
        if process.launched or place.ranks > 1:
            supervise(place)
        return process

    @contextmanager
    def joined(self) -> Generator[MpiCommunicator]:
        """Be a rank; a failure here ends all ranks, and a failure of theirs ends this one."""
        from ..backends.ranks.mpi import MpiCommunicator

        communicator = MpiCommunicator(report=self._report)
        self._communicator = communicator
        try:
            if self._frames is not None and communicator.rank == 0:
                self._begin(communicator, self._frames)
            communicator.agree("the command", shlex.join(self.words))
            yield communicator
            communicator.close()
        except BaseException as error:
            raise self._failure(communicator, error) from error

    def end(self, status: int) -> None:
        """The last call of the program: report the exit status, without waiting for other ranks."""
        communicator = self._communicator
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        if self._frames is not None and self._prints:
            self._frames.write("exit", str(status))
        if communicator is not None and communicator.failure is not None:
            communicator.leave(status)

    def open_streams(self) -> None:
        """Let this rank print if it is rank 0, into frames where irc started it."""
        assert self.place is not None
        if self._frames is not None:
            out, err = (self._frames.stream(k, k in self._terminals) for k in ("out", "err"))
            self._streams = out, err
        self._prints = self.place.rank == 0
        self._choose_streams()

    def _choose_streams(self) -> None:
        if self._prints:
            sys.stdout, sys.stderr = self._streams
        else:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def _begin(self, communicator: MpiCommunicator, frames: FrameWriter) -> None:
        """Tell irc that the ranks have met, take its standard input, watch for its end."""
        from ..backends.ranks.launch import read_launch_data

        frames.write("met")
        sys.stdin = io.TextIOWrapper(io.BytesIO(read_launch_data()), encoding="utf-8")
        threading.Thread(target=_watch_stdin, args=(communicator.abort,), daemon=True).start()

    def _failure(self, communicator: MpiCommunicator, error: BaseException) -> BaseException:
        """Tell the other ranks, find out which one tells the user; what is to be raised."""
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # not the main thread
                signal.signal(number, signal.SIG_IGN)
        known = isinstance(error, Error | OSError | ModuleNotFoundError)
        if communicator.rank != 0 and isinstance(error, Exception) and not known:
            # the report is written here, and its place printed by the first rank
            from .crash import crash_report

            error = Error(crash_report(error, self.words))
        if communicator.failure is None:
            communicator.abort(_reason(error))
        self._prints = communicator.reports_failure()
        self._choose_streams()
        return error

    def _report(self, text: str) -> None:
        """Tell the user why the run failed, when the main thread cannot."""
        print(error_line(text), file=self._streams[1], flush=True)
        if self._frames is not None:
            self._frames.write("exit", "1")


def check_artifact(communicator: MpiCommunicator, artifact: ArtifactFolder) -> None:
    """An Error where an artifact has another number of ranks, or differs between ranks."""
    manifest = artifact.manifest
    ranks, started = ranks_of(manifest), communicator.ranks
    if ranks != started:
        raise Error(
            f"{artifact.path} was compiled for the mesh ({manifest['mesh']}), so start as many "
            f"processes as that has ranks, mpirun -n {ranks}: there are {started}"
        )
    communicator.agree("the artifact", str(manifest["manifest"]))


def ranks_of(manifest: Mapping[str, Any]) -> int:
    """How many ranks an artifact has."""
    from ..ir.mesh import Mesh

    return Mesh.parse(manifest["mesh"]).ranks


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "it was interrupted"
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


def _watch_stdin(abort: Callable[[str], None]) -> None:
    """Standard input ends when the irc that started the ranks does."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    abort("the irc that started the ranks is gone")
