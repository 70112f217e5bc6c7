"""Starts a process per rank through MPI's launcher, and tells a process which rank it is.

A launcher kills every rank when one has died, and tells the user no more than a process id. So what
it started forks: the child is the rank, and when that dies, its parent, the supervisor, waits until
the other ranks have named it.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import irc
from irc.argument_checks import whole_number_in
from irc.errors import Error, installs

# (rank, world size) as the launchers of MPICH and Intel MPI, Open MPI, and Slurm's PMIx set them
_RANK_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
# launchers that are none of MPI's: their variables (the same two first), and what to do
_OTHERS = (
    (
        ("RANK", "WORLD_SIZE", "MASTER_PORT"),
        "torchrun started this process, and irc's ranks use MPI: mpirun -n {ranks} irc ..., "
        "or irc ... --ranks {ranks}",
    ),
    (
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"),
        "srun started this process without MPI; start it with srun --mpi=pmi2",
    ),
)
# The irc command of the ranks, from the irc that starts them: a launcher does not pass every
# argument on.
_COMMAND = "IRC_RANK_COMMAND"
_PIPE = "IRC_SUPERVISOR_PIPE"
_INSTALL = f"{installs('mpi')} brings mpi4py and mpich"
_OPEN_MPI_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_LONGEST = 100_000  # characters of a variable in the environment
_STATUSES = (0, 1, 2, 70, 130, 143)  # of irc; others are the launcher's own
# "[mpiexec@host] main (/mpich/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error ..."
_TRACE = re.compile(rb"\[[\w:.-]+@[^\]]*\] \w+ \([^()\s]*\.[ch]:\d+\): ")
_FOR_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_START = 60.0  # seconds until MPI has started on all ranks
_NAMING = 12.0  # seconds that the other ranks have after one died
_ENDING = 3.0  # seconds for the launcher to end the ranks


@dataclass(frozen=True)
class LaunchedRank:
    """This process as one of `ranks` of an MPI run.

    `refusal`: why it is no rank, where a launcher started it that is none of MPI's.
    """

    rank: int
    ranks: int
    refusal: str = ""


def find_launched_rank(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """The rank that mpiexec, mpirun or srun gave this process; None where none of them did."""
    for names in _RANK_VARIABLES:
        if numbers := _numbers(environment, names):
            return LaunchedRank(numbers[0], numbers[1])
    for names, refusal in _OTHERS:
        numbers = _numbers(environment, names)
        if numbers and numbers[1] > 1:
            return LaunchedRank(numbers[0], numbers[1], refusal.format(ranks=numbers[1]))
    return None


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    """The values of all these variables as numbers; empty where one is missing."""
    values = [whole_number_in(environment.get(name, "")) for name in names]
    numbers = [number for number in values if number is not None]
    return numbers if len(numbers) == len(values) else []


def find_mpiexec() -> str:
    """The launcher beside this Python, whose MPI is the one that mpi4py loads; else one on PATH."""
    if importlib.util.find_spec("mpi4py") is None:
        raise Error(f"the package mpi4py is not installed; {_INSTALL}")
    own = Path(sys.prefix, "bin", "mpiexec")
    path = str(own) if own.is_file() else shutil.which("mpiexec")
    if path is None:
        raise Error(f"there is no mpiexec, neither in {own.parent} nor on PATH; {_INSTALL}")
    return path


def launch(
    argv: list[str],
    ranks: int,
    hosts: Sequence[str] = (),
    data: bytes = b"",
    grace_seconds: float = 0.0,
) -> int:
    """Run an irc command in `ranks` processes; its exit status.

    `hosts`: where they run, this host by default; each takes consecutive ranks. `data` is standard
    input for rank 0. Signals to end are left to the ranks where they have `grace_seconds` for it.
    """
    command = base64.b64encode(json.dumps(argv).encode()).decode()
    if len(command) > _LONGEST:
        raise Error("this command is too long to pass on; give the prompt by standard input: -")
    environment = {_COMMAND: command}
    if sys.stdout.isatty() and sys.stderr.isatty():
        environment["FORCE_COLOR"] = "1"  # the ranks write to pipes
    if os.geteuid() == 0:  # as in a container: the ranks get the rights of this process
        environment |= dict.fromkeys(_OPEN_MPI_AS_ROOT, "1")
    with subprocess.Popen(
        _command_line(ranks, hosts),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,  # so that ctrl-C comes here alone
        preexec_fn=_die_with_parent,
    ) as process:
        try:
            if grace_seconds:
                _pass_signals_on(process, grace_seconds)
            return _status(process, hosts, data)
        finally:
            with suppress(subprocess.TimeoutExpired):
                if process.poll() is None:
                    process.terminate()
                    process.wait(_ENDING)
            process.kill()  # its helpers kill all ranks when it is gone


def _pass_signals_on(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Let signals to end go to the ranks, which are killed after the grace."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.terminate()
        timer = threading.Timer(grace_seconds + _ENDING, process.kill)
        timer.daemon = True
        timer.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)


def _status(process: subprocess.Popen[bytes], hosts: Sequence[str], data: bytes) -> int:
    """The exit status of the ranks; their errors are shown without traces of the launcher."""
    assert process.stdin is not None and process.stderr is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # the ranks may have ended
        pipe.write(data)
    for line in process.stderr:
        if not _TRACE.match(line):
            with suppress(OSError):  # the reader has closed it
                os.write(2, line)
    status = process.wait()
    if status in _STATUSES:
        return status
    where = f" on {', '.join(hosts)}" if hosts else ""
    raise Error(f"the ranks{where} did not start, or ended; mpiexec has the exit status {status}")


def _command_line(ranks: int, hosts: Sequence[str]) -> list[str]:
    """What starts the ranks: MPI's launcher, and this Python with this irc."""
    path = find_mpiexec()
    line = [path, "-n", str(ranks)]
    if hosts:
        if "hydra" not in os.path.realpath(path) and not Path(path + ".hydra").is_file():
            raise Error(f"--hosts needs MPICH's mpiexec, and {path} is another; use your mpirun")
        per_host = -(-ranks // len(hosts))
        line += ["-launcher", "ssh", "-hosts", ",".join(hosts), "-ppn", str(per_host)]
    here = Path(irc.__file__).resolve().parents[1] == Path.cwd().resolve()
    # -P as for the program irc: a folder called irc in the working directory is not meant
    return [*line, sys.executable, *([] if here else ["-P"]), "-m", "irc"]


def take_command() -> list[str] | None:
    """The irc command from the irc that started this rank; None where none did."""
    command = os.environ.pop(_COMMAND, None)
    return None if command is None else json.loads(base64.b64decode(command))


def supervise(launched: LaunchedRank) -> None:
    """Go on in a child process; called before anything large is imported or any thread begins."""
    reading, writing = os.pipe()
    _die_with_parent()
    parent, process = os.getpid(), os.fork()
    if process == 0:
        _die_with_parent()
        if os.getppid() != parent:  # it was killed meanwhile
            os._exit(1)
        os.close(reading)
        os.environ[_PIPE] = str(writing)
        return
    os.close(writing)
    for number in _FOR_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    _watch_start(launched.rank, process, reading)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code < 0 and -code not in _FOR_THE_RANK:
        time.sleep(_NAMING)
    os._exit(code if code >= 0 else 128 - code)


def tell_supervisor() -> None:
    """Tell the supervisor of this rank, where it has one, that MPI has started on all ranks."""
    pipe = os.environ.get(_PIPE, "")
    if pipe:
        os.write(int(pipe), b"m")


def _watch_start(rank: int, process: int, pipe: int) -> None:
    """Wait until MPI has started on all ranks, or this one has ended; MPI would wait for ever.

    Ranks with a reason of their own to end print it.
    """
    # rank 0 tells the user, if it has come this far
    if not select.select([pipe], [], [], _START + _ENDING * (rank > 0))[0]:
        _end_all(
            f"MPI has not started on all ranks within {_START:g} s of its start on rank {rank}"
        )
    if os.read(pipe, 1):
        return
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    number = 0 if ended.si_code == os.CLD_EXITED else ended.si_status
    if number and number not in _FOR_THE_RANK:
        _end_all(
            f"rank {rank} died before MPI had started on all ranks: {signal.strsignal(number)}"
        )


def _end_all(text: str) -> NoReturn:
    """Tell the user why, and end this rank in a way that makes the launcher end all others."""
    os.write(2, f"error: {text}\n".encode())
    time.sleep(_ENDING / 6)  # for the launcher to pass it on
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
