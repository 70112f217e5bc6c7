"""One rank of sums over real GPUs: a process of its own, which `benchmarks.process` starts.

The first argument is a folder; `sums` compares results with numpy; with SIGSTOP or SIGKILL the last
rank gets this signal in the middle of a run, and what the others raise goes into FOLDER/lost{RANK}.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.cuda.codegen.peer_memory import LARGEST
from irc.backends.cuda.driver import Array
from irc.backends.cuda.execute.load import CudaProgram, program_of
from irc.backends.cuda.execute.stream import RankStream
from irc.backends.ranks.communicator import Communicator, PeerError
from irc.ir.dtypes import numpy_dtype
from tests.cuda.test_peer_memory import ADDED, ALONE, WIDTH, module_of, tree_sum

ROWS = (1, 3, 586, 1000, 2048, 18725, LARGEST // 4 // WIDTH)


def opened(host: Communicator, kind: str, text: str) -> CudaProgram:
    """The program of one sum; it must not use NCCL where it can do without."""
    module = module_of(host.ranks, kind, text)
    program = program_of(module, Path(), communicator=host)
    assert program.rank.tables, "ranks cannot write to each other's memory here"
    return program


def run(host: Communicator, arguments: Sequence[str]) -> None:
    """Do what the second argument says."""
    folder, what = Path(arguments[0]), arguments[1]
    if what == "sums":
        sums(host, folder)
    else:
        lose(host, folder, signal.Signals[what])


def sums(host: Communicator, folder: Path) -> None:
    """All sizes, several times each, so that the last ones are graphs."""
    seed = np.random.default_rng(int((folder / "seed").read_text()))
    for kind, text in (("bf16", ADDED), ("f16", ALONE), ("f32", ADDED)):
        program, dtype = opened(host, kind, text), numpy_dtype(kind)
        for rows in ROWS:
            shape = (4, host.ranks, rows, WIDTH)
            for numbers in seed.standard_normal(shape, np.float32).astype(dtype):
                residual = numbers[0]
                wanted: Any = tree_sum([*numbers.astype("f4")]).astype(dtype)
                if text == ADDED:
                    wanted = (residual.astype("f4") + wanted.astype("f4")).astype(dtype)
                found = result(program, numbers[host.rank], residual)
                np.testing.assert_array_equal(found.astype("f4"), wanted.astype("f4"), str(rows))
        program.close()


def result(program: CudaProgram, x: Array, residual: Array) -> Array:
    """What this rank computes; programs return what the first rank does."""
    rank, sizes = program.rank, {"B": len(x)}
    found, _ = RankStream(rank, sizes).step({"x": x, "r": residual}, sizes)
    y = np.empty_like(x)
    rank.stream.download(y, found["y"].address)
    rank.stream.wait()
    return y


def lose(host: Communicator, folder: Path, how: signal.Signals) -> None:
    """Stop or kill the last rank while the others wait for it on their GPUs."""
    program = opened(host, "bf16", ADDED)
    x = np.ones((5, WIDTH), numpy_dtype("bf16"))
    for _ in range(4):
        program.run({"x": x, "r": x})
    if host.rank == host.ranks - 1:
        os.kill(os.getpid(), how)
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 30:
            program.run({"x": x, "r": x})
    except PeerError as error:
        seconds = time.monotonic() - begin
        (folder / f"lost{host.rank}").write_text(f"{seconds:.1f} {error.message}")
        raise
