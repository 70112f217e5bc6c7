"""Ranks on two hosts of one machine: connected network namespaces, each with its own processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runner import works
from tests.ranks.worlds import irc, needs_mpi, started

pytestmark = needs_mpi
# The program that MPI's launcher calls as ssh: it enters the namespace of a host.
SSH = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec {names} unshare --uts --ipc --mount --pid --fork --kill-child sh -c \\
    "mount -t proc none /proc; mount -t tmpfs none /dev/shm; hostname h$host; exec $*"
"""
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
NAMES = tuple(f"irc{os.getpid()}{letter}" for letter in "ab")
ENDS = tuple(f"v{name[3:]}"[:15] for name in NAMES)
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words: str, check: bool = True) -> None:
    command = [shutil.which("ip", path=PATH) or "ip", *words]
    subprocess.run(command, check=check, capture_output=True)


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Path]:
    """The program that enters a host, while the hosts exist."""
    tools = ("ip", "unshare", "mount", "hostname")
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root makes network namespaces, on Linux")
    if missing := [name for name in tools if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"no {' and no '.join(missing)}: iproute2 and util-linux have them")
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", ENDS[0], "type", "veth", "peer", "name", ENDS[1])
        for name, end, address in zip(NAMES, ENDS, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        program = tmp_path / "ssh"
        choice = f"irc{os.getpid()}$(test $host = {ADDRESSES[0]} && echo a || echo b)"
        program.write_text(SSH.replace("{names}", choice))
        program.chmod(0o755)
        subprocess.run([program, ADDRESSES[1], "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine cannot connect network namespaces: {error.cmd}")
    else:
        yield program
    finally:
        for name in NAMES:
            ip("netns", "del", name, check=False)


def test_irc_generates_on_two_hosts(ssh: Path, four_ranks: Path) -> None:
    words = ["generate", four_ranks, "--prompt", "The Python", "--max-new-tokens", "8"]
    settings = [f"HYDRA_LAUNCHER_EXEC={ssh}", f"HYDRA_IFACE={ENDS[0]}"]
    enter = ["ip", "netns", "exec", NAMES[0], "env", *settings]
    with started([*enter, *irc(*words, "--hosts", ",".join(ADDRESSES))]) as world:
        status, out, err = world.end()
    assert (status, out) == (0, works(*words).out), err
