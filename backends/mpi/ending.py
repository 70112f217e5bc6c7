"""How a rank ends after a failure: when the user knows of it, and with nobody left behind."""

from __future__ import annotations

import fcntl
import os
import sys
import termios
import time
from typing import TYPE_CHECKING, Any, NoReturn

from irc.backends.mpi.board import Board, speaker
from irc.backends.mpi.sign import ENDED

if TYPE_CHECKING:
    from irc.backends.mpi.pulse import Pulse

_OTHERS = 1.5  # seconds that the speaking rank gives the others to end as well
_SPEAKER = 4.0  # seconds that the others give the speaking rank
_TURN = 0.02


def farewell(pulse: Pulse, board: Board, mpi: Any, status: int) -> NoReturn:
    """End this process. The rank that told the user ends every other one too, stopped or not."""
    failure = board.failure
    assert failure is not None
    board.leaving = status
    others = [rank for rank in pulse.seen if rank not in (board.rank, *failure.silent)]
    first = speaker(failure, len(pulse.seen))
    if board.rank == first:
        _keep_up(pulse, _OTHERS, lambda: all(_ended(pulse, rank) for rank in others))
        _keep_up(pulse, _OTHERS, _relayed)
        time.sleep(_TURN)
        _abort(mpi, status)
    _keep_up(pulse, _SPEAKER, lambda: pulse.seen[first].sign.said)
    _keep_up(pulse, _OTHERS, lambda: False)
    os._exit(status)


def orphaned(pulse: Pulse) -> NoReturn:
    """End this process, which the launcher would not find any more."""
    _keep_up(pulse, 5 * _TURN, lambda: False)
    os._exit(1)


def _relayed() -> bool:
    """Whether the launcher has read all that was printed, which it drops when it ends the ranks."""
    return not any(_unread(file) for file in (1, 2))


def _unread(file: int) -> int:
    count = bytearray(4)
    try:
        fcntl.ioctl(file, termios.FIONREAD, count)
    except OSError:  # no pipe
        return 0
    return int.from_bytes(count, sys.byteorder)


def _ended(pulse: Pulse, rank: int) -> bool:
    return pulse.seen[rank].sign.state == ENDED


def _keep_up(pulse: Pulse, seconds: float, done: Any) -> None:
    """Tell and listen until something is done, or for so long."""
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        pulse.tell()
        pulse.listen()
        time.sleep(_TURN)


def _abort(mpi: Any, status: int) -> NoReturn:
    """Let the launcher kill all ranks; MPI's own words about it would only hide ours."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    mpi.COMM_WORLD.Abort(status)  # of another communicator it would end this rank alone
    os._exit(status)
