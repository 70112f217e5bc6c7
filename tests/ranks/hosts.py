"""Two hosts on one machine: connected network namespaces, each with its own processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

# The program that MPI's launcher calls as ssh: it enters the namespace of a host.
SSH = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec {names} unshare --uts --ipc --mount --pid --fork --kill-child sh -c \\
    "mount -t proc none /proc; mount -t tmpfs none /dev/shm; hostname h$host; exec $*"
"""
NEEDED = ("ip", "unshare", "mount", "hostname")


@dataclass(frozen=True)
class Hosts:
    """The addresses of both hosts, the interface of the first, and how to start there."""

    addresses: tuple[str, str]
    interface: str
    enter: list[str]
    ssh: Path

    @property
    def settings(self) -> dict[str, str]:
        """The variables that MPI's launcher needs."""
        return {"HYDRA_LAUNCHER_EXEC": str(self.ssh), "HYDRA_IFACE": self.interface}


def why_not() -> str:
    """Why two hosts are impossible here; empty if they are possible."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a part of Linux"
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no {' and no '.join(missing)}: iproute2 and util-linux have them"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    try:
        with TemporaryDirectory() as folder, two_hosts(Path(folder)):
            return ""
    except subprocess.CalledProcessError as error:
        return f"this machine cannot connect network namespaces: {error.cmd}"


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """The hosts, while they exist."""
    names = tuple(f"irc{os.getpid()}{letter}" for letter in "ab")
    addresses = ("10.213.77.1", "10.213.77.2")
    ends = tuple(f"v{name[3:]}"[:15] for name in names)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, addresses, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        ssh = folder / "ssh"
        choice = f"irc{os.getpid()}$(test $host = {addresses[0]} && echo a || echo b)"
        ssh.write_text(SSH.replace("{names}", choice))
        ssh.chmod(0o755)
        subprocess.run([ssh, addresses[1], "true"], check=True, capture_output=True)
        yield Hosts(addresses, ends[0], ["ip", "netns", "exec", names[0]], ssh)
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    command = [shutil.which("ip", path=_path()) or "ip", *words]
    subprocess.run(command, check=True, capture_output=True)


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
