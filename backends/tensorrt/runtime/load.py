"""Loads an artifact of engines: chooses the GPU of this rank, and tests it before it is used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irc.backends.base import Program
from irc.backends.cuda.execute.gpu import check_ranks
from irc.backends.cuda.group import TIMEOUT
from irc.backends.tensorrt import plugins
from irc.backends.tensorrt.runtime.gpu import open_gpu
from irc.backends.tensorrt.runtime.plan import RankPlan
from irc.backends.tensorrt.runtime.program import EngineProgram
from irc.backends.tensorrt.runtime.selftest import self_test as run_self_test
from irc.backends.tensorrt.target import Target
from irc.errors import Error, did_you_mean, printable

OPTIONS = ("communicator", "device", "gpu", "graphs", "plugins", "self_test", "timeout")


def load(folder: Path, facts: Mapping[str, Any], **options: Any) -> Program:
    """The program of an artifact, of which this process runs one rank.

    Options: `communicator`, of the ranks of the run, required for several; `device`, the number of
    the GPU (default: the local rank); `graphs=False` uses no CUDA graphs; `self_test=False` skips
    the self-test; `timeout`, the seconds that work with collectives may take (7); `plugins`, files
    that register plugins; `gpu`, a function from a local rank to an EngineGpu.
    """
    for name in options:
        if name not in OPTIONS:
            raise Error(
                f"a program of TensorRT has no option {name}{did_you_mean(name, OPTIONS)}; it has "
                f"{', '.join(OPTIONS)}"
            )
    host = check_ranks(folder, len(facts["ranks"]), options.get("communicator"))
    plugins.load(options.get("plugins") or ())
    plugins.require(facts.get("plugins") or {})
    RankPlan.of_facts(folder, facts, 0 if host is None else host.rank)  # before a GPU is needed
    device: int | None = options.get("device")
    if device is None:
        device = 0 if host is None else host.local_rank
    if "gpu" in options:
        gpu = options["gpu"](device)
    else:
        timeout = options.get("timeout") or TIMEOUT
        gpu = open_gpu(Target.parse(facts["target"]).flavour, device, timeout)
    try:
        program = EngineProgram(
            folder, facts, gpu, host, graphs=options.get("graphs", True), warn=warn
        )
        if options.get("self_test", True):
            run_self_test(program, facts.get("self_test"))
        return program
    except BaseException:
        gpu.close()
        raise


def warn(text: str) -> None:
    """Print a warning for the user."""
    print(f"warning: {printable(text)}", file=sys.stderr, flush=True)
