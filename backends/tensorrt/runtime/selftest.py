"""The self-test at load: collectives that do nothing or use a wrong group, and wrong answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from irc.backends.cuda.driver import Array
from irc.backends.cuda.execute.gpu_rank import symbols_of
from irc.backends.cuda.execute.memory import DeviceArray
from irc.backends.cuda.execute.program import GpuProgram
from irc.backends.cuda.execute.stream import RankStream
from irc.backends.cuda.group import Group
from irc.backends.tensorrt.golden import first_call
from irc.backends.tensorrt.ranges import smallest
from irc.backends.tensorrt.runtime.rank import EngineRank
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype
from irc.ir.result_names import NEXT_TOKENS

EngineProgram: TypeAlias = GpuProgram[EngineRank]


def self_test(program: EngineProgram, golden: Mapping[str, Any] | None) -> None:
    """Raise an Error that names the failed check, the rank and the group.

    `golden` has the reference's answers to prompts, see golden.py of the backend; they are compared
    with those of this rank alone and of all ranks together.
    """
    rank = program.rank
    if rank.world is not None:
        _test_group(rank, "all ranks", rank.world, range(rank.world.ranks))
        for key, group in rank.named.items():
            _test_group(rank, f"group {key}", group, rank.facts.members(rank.stage.groups[key]))
    for prompt in golden.get("prompts", [golden]) if golden is not None else ():
        has_logits = "logits" in prompt
        for value, who in _answers(program, prompt["ids"], "logits" if has_logits else NEXT_TOKENS):
            (_check_logits if has_logits else _check_token)(prompt, value, who)


def _check_logits(golden: Mapping[str, Any], logits: Array, who: str) -> None:
    wanted = np.asarray(golden["logits"], np.float32)
    differences = np.abs(logits.astype(np.float32)[golden["top"]] - wanted)
    worst, limit = float(differences.max()), float(golden["tolerance"])
    if not worst <= limit:  # NaN is not
        _fail(
            f"the first token's logits of {who} differ from the reference's by {worst:.4g} "
            f"(token {golden['top'][int(differences.argmax())]}), and {limit:.4g} is allowed"
        )


def _check_token(golden: Mapping[str, Any], token: Array, who: str) -> None:
    if int(token) != golden["token"]:
        _fail(f"the first token of {who} is {int(token)}, and the reference's is {golden['token']}")


def _answers(program: EngineProgram, ids: Sequence[int], name: str) -> Iterator[tuple[Array, str]]:
    """(the value of the result `name` after the last token, whose it is): of this rank if it has
    all of it, and the global one."""
    states = {symbol: 1 for port in program.ports.states for symbol in symbols_of(port)}
    inputs = {port.name: port for port in program.ports.inputs}
    call = first_call(ids, smallest(inputs["input_ids"].shape[0]))
    stream = RankStream(program.rank, states)
    try:
        shards, sizes = program.plain_shards({key: call[key] for key in call if key in inputs})
        found, full = stream.step(shards, sizes)
        own = _own(program, name, found)
        whole = program.gather([port.name for port in program.ports.outputs], found, sizes, full)
        if own is not None:
            yield _last(own, len(ids)), f"rank {program.rank.rank}"
        yield _last(whole[name], len(ids)), "all ranks together"
    finally:
        stream.close()


def _own(program: EngineProgram, name: str, found: Mapping[str, DeviceArray]) -> Array | None:
    """The result of this rank, where it has all of it."""
    if program.sharding.results[name].is_sharded or name not in found:
        return None
    value, stream = found[name], program.rank.stream
    host = np.empty(value.shape, numpy_dtype(value.dtype))
    stream.download(host, value.address)
    stream.wait("the self-test")
    return host


def _last(result: Array, tokens: int) -> Array:
    """The value of the last token of a prompt, in the first row; some results have only that."""
    return result[0, min(result.shape[1], tokens) - 1]


def _test_group(rank: EngineRank, name: str, group: Group, ranks: Sequence[int]) -> None:
    """Sum vectors with one element per rank; gather the numbers of the ranks."""
    count, handle = rank.facts.mesh.ranks, rank.stream.handle
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
