"""Starts a process per rank through MPI's launcher, shows what they print, and ends them all."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

import irc
from irc.backends.ranks.frames import ERR, EXIT, MET, OUT, FrameReader
from irc.backends.ranks.supervisor import REPORTED
from irc.errors import Error, installs

# What the irc that starts the ranks tells them: the command, the token of its frames, and which of
# its own streams are terminals. A launcher does not pass every argument on.
_COMMAND, _TOKEN, _TERMINALS = "IRC_RANK_COMMAND", "IRC_RANK_TOKEN", "IRC_RANK_TERMINALS"
_INSTALL = f"{installs('mpi')} brings mpi4py and mpich"
_MEETING = 70.0  # seconds until the ranks have met: longer than their supervisors wait
_ENDING = 3.0  # seconds for each polite way of ending
_LONGEST = 100_000  # characters of a variable in the environment
_KEPT = 2000  # characters of the launcher's own messages
# "[mpiexec@host] main (/mpich/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error ..."
_TRACE = re.compile(rb"\[[\w:.-]+@[^\]]*\] \w+ \([^()\s]*\.[ch]:\d+\): ")


def find_mpiexec() -> str:
    """The launcher beside this Python, whose MPI is the one that mpi4py loads; else one on PATH."""
    if importlib.util.find_spec("mpi4py") is None:
        raise Error(f"the package mpi4py is not installed; {_INSTALL}")
    own = Path(sys.prefix, "bin", "mpiexec")
    found = str(own) if own.is_file() else shutil.which("mpiexec")
    if found is None:
        raise Error(f"there is no mpiexec, neither in {own.parent} nor on PATH; {_INSTALL}")
    return found


def command_line(ranks: int, hosts: Sequence[str] = ()) -> list[str]:
    """What starts the ranks: MPI's launcher, and this Python with this irc."""
    path = find_mpiexec()
    line = [path, "-n", str(ranks)]
    if hosts:
        if "hydra" not in os.path.realpath(path) and not Path(path + ".hydra").is_file():
            raise Error(f"--hosts needs MPICH's mpiexec, and {path} is another; use your mpirun")
        each = -(-ranks // len(hosts))
        line += ["-launcher", "ssh", "-hosts", ",".join(hosts), "-ppn", str(each)]
    here = Path(irc.__file__).resolve().parents[1] == Path.cwd().resolve()
    # -P as for the program irc: a folder called irc in the working directory is not meant
    return [*line, sys.executable, *([] if here else ["-P"]), "-m", "irc"]


def launch(words: list[str], ranks: int, hosts: Sequence[str] = (), data: bytes = b"") -> int:
    """Run an irc command in `ranks` processes; its exit status.

    `hosts`: where they run, this host by default; each takes consecutive ranks. `data` is standard
    input for rank 0.
    """
    command = base64.b64encode(json.dumps(words).encode()).decode()
    if len(command) > _LONGEST:
        raise Error("this command is too long to pass on; give the prompt by standard input: -")
    token = secrets.token_hex(16)
    terminals = [kind for kind, stream in ((OUT, sys.stdout), (ERR, sys.stderr)) if stream.isatty()]
    environment = {_COMMAND: command, _TOKEN: token, _TERMINALS: " ".join(terminals)} | _as_root()
    with subprocess.Popen(
        command_line(ranks, hosts),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, **environment},
        start_new_session=True,  # so that ctrl-C comes here alone
    ) as process:
        try:
            return _Relay(process, token, hosts, data).run()
        finally:
            with suppress(subprocess.TimeoutExpired):
                if process.poll() is None:
                    process.terminate()
                    process.wait(_ENDING)
            process.kill()  # its helpers kill all ranks when it is gone
            process.wait()


def _as_root() -> dict[str, str]:
    """Let Open MPI start ranks as root, as in a container: they get the rights of this process."""
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return dict.fromkeys(names, "1") if os.geteuid() == 0 else {}


def take_command(environment: Mapping[str, str]) -> tuple[list[str], str, list[str]] | None:
    """(command, token of frames, terminals) from the irc that started this rank, if one did."""
    if not environment.get(_TOKEN):
        return None
    words = json.loads(base64.b64decode(environment[_COMMAND]))
    found = words, environment[_TOKEN], environment[_TERMINALS].split()
    for name in (_COMMAND, _TOKEN, _TERMINALS):
        del os.environ[name]
    return found


def read_launch_data() -> bytes:
    """The standard input that `launch` passes on: a length, a line break, bytes; then it stays
    open as long as the irc that started the ranks lives."""
    with open(0, "rb", closefd=False) as pipe:
        return pipe.read(int(pipe.readline() or 0))


class _Relay:
    """Prints what the ranks and the launcher say until they end."""

    def __init__(
        self, process: subprocess.Popen[bytes], token: str, hosts: Sequence[str], data: bytes
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._pipe, self._hosts = process, process.stdout.fileno(), hosts
        self._reader = FrameReader(token)
        self._said = ""  # by the launcher, on standard output
        self._warnings: list[str] = []  # the lines on standard error
        self._met = False
        self._status: int | None = None
        self._errors = threading.Thread(target=self._pass_errors_on, daemon=True)
        self._errors.start()
        feed = (process.stdin.fileno(), b"%d\n" % len(data) + data)
        threading.Thread(target=_write, args=feed, daemon=True).start()

    def run(self) -> int:
        """The exit status of the command."""
        until = time.monotonic() + _MEETING
        while self._read(until):
            if self._status is not None:
                until = min(until, time.monotonic() + _ENDING)
            elif self._met:
                until = inf
        if self._status is not None:
            return self._status
        if not self._met and time.monotonic() >= until:
            raise self._error(f"the ranks have not met within {_MEETING:g} s")
        return self._status_of_launcher()

    def _read(self, until: float) -> bool:
        """Show what comes; False once nothing more will, or it takes too long."""
        left = None if until == inf else max(0.0, until - time.monotonic())
        if not select.select([self._pipe], [], [], left)[0]:
            return False
        data = os.read(self._pipe, 1 << 16)
        for kind, text in self._reader.feed(data):
            self._take(kind, text)
        return bool(data)

    def _take(self, kind: str, text: str) -> None:
        if kind in (OUT, ERR):
            print(text, end="", file=sys.stdout if kind == OUT else sys.stderr, flush=True)
        elif kind == MET:
            self._met = True
        elif kind == EXIT:
            self._status = int(text)
        else:
            self._said = (self._said + text)[-_KEPT:]

    def _status_of_launcher(self) -> int:
        """The exit status where the ranks ended, and none of them reported one."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING)
        code = self._process.poll()
        if code in (0, REPORTED):
            return min(code, 1)
        if self._hosts and not self._met:
            self._errors.join(_ENDING)
            why = [line for line in self._warnings if any(host in line for host in self._hosts)]
            what = f"no ranks could be started on {', '.join(self._hosts)}"
            raise self._error(f"{what}: {why[-1]}" if why else what)
        raise self._error(f"the ranks ended, and mpiexec with the exit status {code}")

    def _error(self, what: str) -> Error:
        words = " ".join(self._said.replace("=", "").split())
        return Error(f"{what}; mpiexec says: {words}" if words else what)

    def _pass_errors_on(self) -> None:
        """Print the launcher's errors, without the traces of its own source."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if not _TRACE.match(line):
                self._warnings.append(line.decode(errors="replace").strip())
                with suppress(OSError):  # the reader has closed it
                    os.write(2, line)


def _write(pipe: int, data: bytes) -> None:
    """Write to a pipe, which stays open as long as this process lives."""
    left = memoryview(data)
    with suppress(OSError):  # the ranks have ended
        while left:
            left = left[os.write(pipe, left) :]
