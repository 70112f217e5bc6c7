"""The self-test at load: collectives that do nothing or use a wrong group, and wrong numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from irc.backends.cuda.driver import Array
from irc.backends.cuda.group import Group
from irc.backends.tensorrt.runtime.answers import problems
from irc.backends.tensorrt.runtime.program import EngineProgram
from irc.backends.tensorrt.runtime.rank import EngineRank
from irc.errors import Error


def self_test(program: EngineProgram, golden: Mapping[str, Any] | None) -> None:
    """Raise an Error that names the failed check, the rank and the group.

    `golden` has the reference's answers to prompts, see golden.py of the backend.
    """
    rank, groups = program.rank, program.rank.groups
    if groups is not None:
        _test_group(rank, "all ranks", groups.world, range(groups.world.ranks))
        for key, group in groups.named.items():
            _test_group(rank, f"group {key}", group, groups.ranks[key])
    for problem in problems(program, golden) if golden is not None else ():
        _fail(problem)


def _test_group(rank: EngineRank, name: str, group: Group, ranks: Sequence[int]) -> None:
    """Sum vectors with one element per rank; gather the numbers of the ranks."""
    count, handle = rank.plan.mesh.ranks, rank.stream.handle
    where = f"{name} (ranks {_listed(ranks)}), on rank {rank.rank}"
    own = np.zeros(count, np.float32)
    own[rank.rank] = rank.rank + 1
    reduce = group.bind("all_reduce", "f32", count, "sum")
    total = _computed(rank, own, count, lambda x, y: reduce(x, y, handle))
    _check_sum(total, ranks, rank.rank, where)
    gather = group.bind("all_gather", "i32", 1)
    number = np.array([rank.rank], np.int32)
    order = _computed(rank, number, len(ranks), lambda x, y: gather(x, y, handle)).tolist()
    if order != list(ranks):
        _fail(f"all_gather of {where}, returned the order {order}")


def _check_sum(total: Array, ranks: Sequence[int], rank: int, where: str) -> None:
    """Raise unless each rank's number, plus 1, was added at its place, and nothing else."""
    expected = np.zeros_like(total)
    expected[list(ranks)] = np.asarray(ranks) + 1
    if np.array_equal(total, expected):
        return
    added = np.flatnonzero(total).tolist()
    if added in ([rank], []):
        _fail(f"all_reduce of {where}, did nothing")
    _fail(
        f"all_reduce of {where}, is wrong: expected {expected.tolist()}, found {total.tolist()}, "
        f"the sum over ranks {_listed(added)}"
    )


def _computed(rank: EngineRank, operand: Array, count: int, enqueue: Any) -> Array:
    """What `enqueue(source address, target address)` makes of an operand, [count]."""
    memory, stream = rank.shared, rank.stream
    source = memory.upload("self-test operand", operand)
    result = memory.host("self-test result", (count,), operand.dtype)
    target = memory.device("self-test result", result.nbytes)
    rank.driver.zero(target, result.nbytes, stream.handle)
    enqueue(source, target)
    stream.download(result, target)
    stream.wait("the self-test")
    return np.array(result)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _fail(text: str) -> NoReturn:
    raise Error(
        f"self-test: {text}; refusing to load this program (--no-self-test would load it all the "
        "same)"
    )
