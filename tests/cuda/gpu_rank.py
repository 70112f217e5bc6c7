"""One rank of a tiny model on a real GPU: a process of its own, which `benchmarks.process` starts.

The arguments are a folder, the name of a model and its mesh; the logits of a conversation go into
FOLDER/logits{RANK}.npy, and those of rows into FOLDER/rows{RANK}.npy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Program
from irc.backends.cuda.execute.load import program_of
from irc.backends.ranks.communicator import Communicator
from irc.generation.rows import Rows
from tests.cuda.test_program import compiled
from tests.models.runners import talks
from tests.tensorrt.test_runtime import step_of

ROWS, STEPS = 2, 4


def conversation(program: Program) -> Any:
    """The logits of some steps, of which the last are run as a graph."""
    stream = program.open({"B": ROWS, "B_dp": ROWS // 2, "C": 32})
    return np.stack([stream.step(step_of(ROWS, n, 1 + n))["logits"] for n in range(STEPS)])


def rows_conversation(program: Program) -> Any:
    """The logits of rows that are stepped apart, moved and cleared."""
    rows = Rows.empty(program, {}, 4, 32)
    return np.concatenate([logits for logits, _ in talks(rows, 37)])


def tokens_of(program: Any) -> tuple[list[int], list[int]]:
    """The tokens that a program feeds back on the GPU, and those that it is given one by one."""
    sizes, token, count = {"B": 1, "C": 32}, 5, 9
    fed, advanced = {"input_ids": "next_tokens"}, ("positions", "past_lengths")
    followed = program.open(sizes).follow(step_of(1, 0, token), fed, advanced, count)
    own = [step["next_tokens"].item() for step in followed]
    stream, given = program.open(sizes), list[int]()
    for turn in range(count):
        token = stream.step(step_of(1, turn, token))["next_tokens"].item()
        given.append(token)
    return own, given


def run(host: Communicator, arguments: Sequence[str]) -> None:
    """Compute the logits on one rank."""
    folder, name, mesh = Path(arguments[0]), arguments[1], arguments[2]
    module = compiled(name, mesh)
    program = program_of(module, folder, communicator=host)
    np.save(folder / f"logits{host.rank}.npy", conversation(program))
    if "dp" not in mesh:
        np.save(folder / f"rows{host.rank}.npy", rows_conversation(program))
    program.close()
    if "dp" not in mesh:
        program = program_of(compiled(name, mesh, "next-tokens"), folder, communicator=host)
        own, given = tokens_of(program)
        assert own == given
        program.close()
