"""What the irc that starts ranks does about a rank 0 that does not end after a failure."""

from __future__ import annotations

import subprocess
import sys

import pytest

from irc.backends.mpi.process import own_home
from irc.backends.processes.hub import Hub, pair
from irc.backends.processes.letters import Letter
from irc.cli import spawn
from irc.errors import Error


@pytest.mark.parametrize("says", [True, False])
def test_a_failure_is_told_once(says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0 if it could, though it hangs then; else by irc."""
    monkeypatch.setattr(spawn, "ENDING", 0.0)
    monkeypatch.setattr(spawn, "_POLITE", 120.0 if says else 0.1)
    hub, (ours, theirs) = Hub(1), pair()
    hub.add(0, theirs, own_home())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        if says:
            ours.send_bytes(Letter("end", 0).encoded())
        hub.fail("the disk is gone")
        watch = spawn._Watch(hub, [process], [])
        try:
            assert watch.run() == 1
            told = True
        except Error as error:
            assert str(error) == "the disk is gone"
            told = False
    assert told == says
    assert process.returncode == -9
    hub.close(0.0)
    ours.close()
