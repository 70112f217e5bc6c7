"""A process of `irc run` or `irc generate` that is one rank of several.

Only one rank prints: the first one, or, where that has died, the first that lives.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from ..artifact import read_manifest
from ..errors import Error
from .console import error_line
from .frames import BEGIN, ERR, EXIT, OUT, Frames
from .place import ADDRESS, MPI, PARENT, Place, place_in_world

if TYPE_CHECKING:
    from ..backends.mpi.communicator import MpiCommunicator
    from ..backends.processes.communicator import HubCommunicator

    RankCommunicator: TypeAlias = MpiCommunicator | HubCommunicator

# What the irc that starts the ranks tells them: the command, the mark of its frames, which of its
# own streams are terminals.
COMMAND, TOKEN, TERMINALS = "IRC_RANK_COMMAND", "IRC_RANK_TOKEN", "IRC_RANK_TERMINALS"


def encoded(words: list[str]) -> str:
    """A command as a variable of the environment: MPI's launchers do not pass every argument on."""
    return base64.b64encode(json.dumps(words).encode()).decode()


class Process:
    """This process: a rank where a launcher started it, at `place`, else only a command.

    `words` is the command; `launched` whether irc itself started the ranks.
    """

    def __init__(self, words: list[str], place: Place | None = None) -> None:
        self.words, self.place, self.launched = words, place, False
        self._frames: Frames | None = None
        self._terminals: list[str] = []
        self._streams: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
        self._communicator: RankCommunicator | None = None
        self._speaks = False

    @staticmethod
    def of_program(environment: Mapping[str, str] = os.environ) -> Process:
        """The process that runs the program `irc`; a rank goes on in a child of itself."""
        process = Process(sys.argv[1:], place_in_world(environment))
        if process.place is None or process.place.means == ADDRESS:
            return process
        if process.place.means == PARENT:
            process.launched = True
            return process
        if environment.get(TOKEN):
            process._take_command(environment)
        if process.launched or process.place.ranks > 1:
            from ..backends.mpi.guard import guard

            guard(process.place.rank, process.place.ranks)
        return process

    def _take_command(self, environment: Mapping[str, str]) -> None:
        self.launched = True
        self.words = json.loads(base64.b64decode(environment[COMMAND]))
        self._frames = Frames(environment[TOKEN])
        self._terminals = environment[TERMINALS].split()
        for name in (COMMAND, TOKEN, TERMINALS):
            del os.environ[name]

    @contextmanager
    def joined(self, folder: Path) -> Generator[RankCommunicator]:
        """Be a rank of the artifact in a folder; all must run the same command on the same one."""
        communicator = self._communicator = self._met()
        try:
            if self._frames is not None and communicator.rank == 0:
                self._begin(communicator)
            self._check(communicator, folder)
            yield communicator
            communicator.close()
        except BaseException as error:
            raise self._failure(communicator, error) from error

    def _met(self) -> RankCommunicator:
        """The communicator of this rank, once all have met."""
        place = self.place
        if place is None or place.means == MPI:
            from ..backends.mpi.communicator import MpiCommunicator

            return MpiCommunicator(say=self._say)
        if place.means == PARENT:
            from .spawn import joined

            return joined(place.rank, place.ranks, self._say)
        from ..backends.processes.meeting import Address, meet

        return meet(Address.of(), place.rank, place.ranks, self._say)

    def end(self, status: int) -> None:
        """The last call of the program: tell who started it how it ended, and wait for nobody."""
        communicator = self._communicator
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        if self._frames is not None and self._speaks:
            self._frames.write(EXIT, str(status).encode())
        if communicator is not None and communicator.failed:
            communicator.leave(status)

    def _check(self, communicator: RankCommunicator, folder: Path) -> None:
        communicator.agree("the command", shlex.join(self.words))
        manifest = read_manifest(folder)
        ranks, started = ranks_of(manifest), communicator.ranks
        if ranks != started:
            over_mpi = self.place is None or self.place.means == MPI
            number = f"mpirun -n {ranks}" if over_mpi else str(ranks)
            raise Error(
                f"{folder} was compiled for the mesh ({manifest['mesh']}), so start as many "
                f"processes as that has ranks, {number}: there are {started}"
            )
        communicator.agree("the artifact", str(manifest["manifest"]))

    def open_streams(self) -> None:
        """Let this rank print if it is the first one, into frames where irc started it."""
        assert self.place is not None
        if self._frames is not None:
            streams = [self._frames.stream(kind, kind in self._terminals) for kind in (OUT, ERR)]
            self._streams = streams[0], streams[1]
        self._speaks = self.place.rank == 0
        self._choose_streams()

    def _choose_streams(self) -> None:
        if self._speaks:
            sys.stdout, sys.stderr = self._streams
        else:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def _begin(self, communicator: RankCommunicator) -> None:
        """Tell irc which processes the ranks are, take its standard input, watch for its end."""
        assert self._frames is not None
        homes = [(home.kernel, [home.parent, home.process]) for home in communicator.homes]
        self._frames.write(BEGIN, json.dumps(homes).encode())
        with open(0, "rb", buffering=0, closefd=False) as pipe:
            data = _read_message(pipe)
        sys.stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        threading.Thread(target=_watch, args=(communicator.abort,), daemon=True).start()

    def _failure(self, communicator: RankCommunicator, error: BaseException) -> BaseException:
        """Tell the other ranks, find out which one tells the user; what is to be raised."""
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # not the main thread
                signal.signal(number, signal.SIG_IGN)
        if communicator.rank != 0 and isinstance(error, Exception) and _is_ours(error):
            # the report about it is written here, and its place said by the first rank
            error = Error(_apology(error, self.words))
        if not communicator.failed:
            communicator.abort(_reason(error))
        self._speaks = communicator.claim()
        self._choose_streams()
        return error

    def _say(self, text: str) -> None:
        """Tell the user why the run failed, when the main thread cannot."""
        print(error_line(text), file=self._streams[1], flush=True)
        if self._frames is not None:
            self._frames.write(EXIT, b"1")


def _is_ours(error: Exception) -> bool:
    """Whether irc itself is to blame."""
    return not isinstance(error, Error | OSError | ModuleNotFoundError)


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "it was interrupted"
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


def _apology(error: Exception, words: list[str]) -> str:
    from .crash import apology

    return apology(error, words)


def ranks_of(manifest: Mapping[str, Any]) -> int:
    """How many ranks an artifact has."""
    from ..mesh import Mesh

    return Mesh.parse(manifest["mesh"]).ranks


def _read_message(pipe: io.FileIO) -> bytes:
    """What irc sends before anything else: a length, a line break, bytes."""
    head = b""
    while not head.endswith(b"\n"):
        byte = pipe.read(1)
        if not byte:
            return b""
        head += byte
    data = b""
    while len(data) < int(head) and (more := pipe.read(int(head) - len(data))):
        data += more
    return data


def _watch(abort: Callable[[str], None]) -> None:
    """Standard input ends when the irc that started the ranks does."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    abort("the irc that started the ranks is gone")
