"""Loads an artifact of engines: finds the GPU of this rank, and tests before it serves."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from irc.backends.base import Program
from irc.backends.communicator import Communicator
from irc.backends.cuda.group import TIMEOUT
from irc.backends.tensorrt.runtime.driver import Drivers
from irc.backends.tensorrt.runtime.plan import RankPlan
from irc.backends.tensorrt.runtime.program import EngineProgram
from irc.backends.tensorrt.runtime.selftest import self_test as run_self_test
from irc.backends.tensorrt.target import Target
from irc.errors import Error, did_you_mean

OPTIONS = ("communicator", "device", "driver", "graphs", "plugins", "self_test", "timeout")


def load(folder: Path, facts: Mapping[str, Any], **options: Any) -> Program:
    """The program of an artifact, of which this process runs one rank.

    Options: `communicator` talks to the processes of the other ranks and says which rank this is;
    `device`: the number of the GPU, by default that of this process among those of its host;
    `graphs=False`: never use CUDA graphs; `self_test=False`: serve without testing; `timeout`: for
    how many seconds a rank waits for others that do not come (7); `plugins`: files that register
    plugins; `driver`: makes what drives a GPU from its number, in place of CUDA.
    """
    for name in options:
        if name not in OPTIONS:
            raise Error(
                f"a program of TensorRT has no option {name}{did_you_mean(name, OPTIONS)}; it has "
                f"{', '.join(OPTIONS)}"
            )
    host: Communicator | None = options.get("communicator")
    ranks = len(facts["ranks"])
    if ranks > 1 and host is None:
        raise Error(
            f"{folder} has {ranks} ranks, and every one needs a process and a GPU of its own: "
            f"irc generate {folder} --ranks {ranks}, or start irc under mpirun, torchrun or srun"
        )
    if ranks == 1:
        host = None
    elif host is not None and host.ranks != ranks:
        raise Error(f"{folder} has {ranks} ranks, and {host.ranks} processes run it")
    _require_plugins(facts, options.get("plugins") or ())
    RankPlan.of_facts(folder, facts, 0 if host is None else host.rank)  # before any GPU is needed
    drivers = options.get("driver") or _gpus(facts, options.get("timeout") or TIMEOUT)
    device = options.get("device")
    driver = drivers(_local(host) if device is None else device)
    try:
        program = EngineProgram(
            folder, facts, driver, host, graphs=options.get("graphs", True), warn=warn
        )
        told = getattr(host, "on_failure", None)
        if told is not None:
            told(program.abort)  # the GPU may wait for a rank that is gone
        if options.get("self_test", True):
            run_self_test(program, facts.get("self_test"), facts.get("dims"))
        return program
    except BaseException:
        driver.close()
        raise


def _require_plugins(facts: Mapping[str, Any], files: Sequence[str | Path]) -> None:
    """An Error where engines were built with plugins, or versions of them, that are not here."""
    from irc.backends.tensorrt import plugins

    plugins.load(files)
    plugins.require(facts.get("plugins") or {})


def _gpus(facts: Mapping[str, Any], timeout: float) -> Drivers:
    flavour = Target.parse(facts["target"]).flavour

    def make(number: int) -> Any:
        from irc.backends.tensorrt.runtime.gpu import GpuDriver

        return GpuDriver(flavour, number, timeout)

    return make


def _local(host: Communicator | None) -> int:
    """The number of this rank among those of its host."""
    if host is None:
        return 0
    homes: Sequence[Any] = getattr(host, "homes", ())
    if not homes:
        return host.rank
    here = homes[host.rank].host
    return sum(home.host == here for home in homes[: host.rank])


def warn(text: str) -> None:
    """Tell the user something that is no error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
