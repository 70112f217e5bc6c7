"""Tests at load: what is wrong with collectives or numbers must not reach a user.

Engines have been seen whose collectives silently do nothing, or use another group than they say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np

from irc.backends.tensorrt.probe import MINE, TOTAL
from irc.backends.tensorrt.runtime.driver import Array, Group
from irc.backends.tensorrt.runtime.execution import Execution
from irc.backends.tensorrt.runtime.profiles import size_of
from irc.backends.tensorrt.runtime.program import EngineProgram
from irc.backends.tensorrt.runtime.rank import EngineRank
from irc.backends.tensorrt.runtime.stream import Held, RankStream
from irc.dims import Dim
from irc.dtypes import numpy_dtype
from irc.errors import Error
from irc.results import NEXT_TOKENS

REFUSED = "this program is not served (--no-self-test would serve it all the same)"


def self_test(
    program: EngineProgram,
    golden: Mapping[str, Any] | None,
    dims: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Raise an Error that says which check failed, on which rank, for which group.

    `golden` is what the reference answered to prompts, see golden.py of the backend; `dims` are the
    ranges that the model was compiled for.
    """
    groups = program.rank.groups
    if groups is not None:
        world = tuple(range(groups.world.ranks))
        _test_group(program.rank, "all ranks", groups.world, world)
        for key, group in groups.named.items():
            _test_group(program.rank, f"group {key}", group, groups.ranks[key])
        if groups.of_engine is not None:
            _test_engine(program.rank, groups.of_engine)
    for prompt in _prompts(golden) if golden is not None else ():
        _Answer(program, prompt, dims or {}).test()


def _test_group(rank: EngineRank, name: str, group: Group, ranks: Sequence[int]) -> None:
    """Sum vectors that tell who added them; gather numbers that tell whose they are."""
    count = rank.plan.mesh.ranks
    mine = np.zeros(count, np.float32)
    mine[rank.rank] = rank.rank + 1
    total = _collective(rank, group, "all_reduce", "sum", mine, count)
    where = f"{name} (ranks {_shown(ranks)}), on rank {rank.rank}"
    _check_sum(total, {r: r for r in ranks}, rank.rank, where)
    place = np.array([rank.rank], np.int32)
    order = _collective(rank, group, "all_gather", "none", place, len(ranks))
    if order.tolist() != list(ranks):
        _fail(f"all_gather of {where}, gave the order {order.tolist()}")


def _test_engine(rank: EngineRank, group: Group) -> None:
    """Let an engine of the same library sum vectors that tell who added them."""
    if rank.plan.probe is None:
        _fail(
            "the engines use TensorRT's own collectives, and the folder has none to try them with"
        )
    ranks, memory, stream = rank.plan.stage_ranks(), rank.shared, rank.stream
    engine = rank.driver.engine(rank.plan.probe)
    execution = Execution(rank.driver, engine, 0, stream, False, warn=_unheard)
    try:
        rank.meet("the test of TensorRT's collectives")
        execution.bind(group)
        mine = np.zeros(len(ranks), np.float32)
        mine[group.rank] = rank.rank + 1
        source = memory.upload("test of the engine", mine)
        result = memory.host("test result of the engine", mine.shape, mine.dtype)
        target = memory.device("test result of the engine", result.nbytes)
        stream.zero(target, result.nbytes)
        execution.run({}, {MINE: source, TOTAL: target}, {TOTAL: mine.shape})
        stream.download(result, target)
        stream.wait()
    finally:
        execution.free()
    where = f"TensorRT itself (ranks {_shown(ranks)}), on rank {rank.rank}"
    _check_sum(np.array(result), dict(enumerate(ranks)), rank.rank, where)


def _unheard(text: str) -> None:
    """One run needs no graph."""


def _check_sum(total: Array, places: Mapping[int, int], rank: int, where: str) -> None:
    """Raise unless each rank's number, its own plus 1, was added at its place, and nothing else."""
    wanted = np.zeros_like(total)
    for place, other in places.items():
        wanted[place] = other + 1
    if np.array_equal(total, wanted):
        return
    added = [places.get(int(place), int(place)) for place in np.flatnonzero(total)]
    if added == [rank] or not added:
        _fail(f"all_reduce of {where}, did nothing")
    _fail(
        f"all_reduce of {where}, is wrong: ranks {_shown(added)} were added "
        f"({total.tolist()}, not {wanted.tolist()})"
    )


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _collective(
    rank: EngineRank, group: Group, operation: str, reduce_op: str, operand: Array, count: int
) -> Array:
    memory, stream = rank.shared, rank.stream
    source = memory.upload(f"test of {operation}", operand)
    result = memory.host(f"test result of {operation}", (count,), operand.dtype)
    target = memory.device(f"test result of {operation}", result.nbytes)
    dtype = "f32" if operand.dtype == np.float32 else "i32"
    stream.zero(target, result.nbytes)
    group.bind(operation, dtype, operand.size, reduce_op)(source, target, stream.handle)
    stream.download(result, target)
    stream.wait()
    return np.array(result)


def _fail(text: str) -> NoReturn:
    raise Error(f"self-test: {text}; {REFUSED}")


@dataclass(frozen=True)
class _Prompt:
    """Token ids, and what compares the value of the result `name` after them with the reference's;
    its second argument says whose value it is."""

    ids: Sequence[int]
    name: str
    compare: Callable[[Array, str], None]


def _prompts(golden: Mapping[str, Any]) -> list[_Prompt]:
    if "prompts" not in golden:
        return [_Prompt(golden["ids"], "logits", partial(_compare_logits, golden))]
    return [
        _Prompt(each["ids"], NEXT_TOKENS, partial(_compare_token, each["token"]))
        for each in golden["prompts"]
    ]


def _compare_logits(golden: Mapping[str, Any], logits: Array, who: str) -> None:
    wanted = np.asarray(golden["logits"], np.float32)
    apart = np.abs(logits.astype(np.float32)[golden["top"]] - wanted)
    worst, limit = float(apart.max()), float(golden["tolerance"])
    if not worst <= limit:  # a NaN is not
        _fail(
            f"the first token's logits of {who} differ from the reference's by {worst:.4g} "
            f"(token {golden['top'][int(apart.argmax())]}), and {limit:.4g} is allowed"
        )


def _compare_token(wanted: int, token: Array, who: str) -> None:
    if int(token) != wanted:
        _fail(f"the first token of {who} is {int(token)}, and the reference's is {wanted}")


class _Answer:
    """What a program answers to a prompt."""

    def __init__(
        self, program: EngineProgram, prompt: _Prompt, dims: Mapping[str, Sequence[int]]
    ) -> None:
        self._program, self._prompt, self._dims = program, prompt, dims
        self._inputs = {port.name: port for port in program.ports.inputs}

    def test(self) -> None:
        """Feed the prompt, and look at what comes after its last token."""
        stream = RankStream(self._program.rank, self._sizes())
        try:
            self._feed(stream)
        finally:
            stream.close()

    def _feed(self, stream: RankStream) -> None:
        program, ids = self._program, self._prompt.ids
        chunk = self._longest()
        names = [port.name for port in program.ports.outputs]
        for start in range(0, len(ids), chunk):
            arrays, sizes = program.spread.plain.bind(self._arrays(ids, start, chunk))
            part = program.spread.part(program.rank, arrays)
            full = stream.whole_sizes(sizes)
            stream.check(part, full)
            held = stream.advance(part, full)
            last = start + chunk >= len(ids)
            if last:
                self._check_own(held)
            found = program.whole(names, held, sizes, full)
            if last:
                self._check(found[self._prompt.name], "all ranks together")

    def _check_own(self, held: Mapping[str, Held]) -> None:
        """The result of this rank itself, where it has it whole."""
        rank, name = self._program.rank, self._prompt.name
        result = self._program.spread.results.get(name)
        if result is None or result.split or name not in held:
            return
        value = held[name]
        host = rank.shared.host(f"test {name}", value.shape, numpy_dtype(value.dtype))
        rank.stream.download(host, value.address)
        rank.stream.wait()
        self._check(np.array(host), f"rank {rank.rank}")

    def _check(self, result: Array, who: str) -> None:
        self._prompt.compare(result[0, self._last(result.shape[1])], who)

    def _last(self, count: int) -> int:
        """The row of the last token of the prompt."""
        return 0 if "logit_positions" in self._inputs else self._count(count) - 1

    def _count(self, count: int) -> int:
        left = len(self._prompt.ids) % self._longest()
        return min(count, left or self._longest())

    def _sizes(self) -> dict[str, int]:
        """One row."""
        return {
            name: 1
            for port in self._program.ports.states
            for dim in port.shape
            if isinstance(dim, Dim)
            for name in dim.symbols()
        }

    def _longest(self) -> int:
        """How many tokens one call takes at most."""
        dim, multiple = self._inputs["input_ids"].shape[1], self._multiple(1)
        if not isinstance(dim, Dim):
            return dim
        (name,) = dim.symbols()
        if name in self._dims:
            return multiple * int(self._dims[name][2])
        return -(-len(self._prompt.ids) // multiple) * multiple

    def _multiple(self, at: int) -> int:
        """Of what number the rows (0) or tokens (1) of a call are a multiple."""
        dim = self._inputs["input_ids"].shape[at]
        return size_of(dim, dict.fromkeys(dim.symbols(), 1)) if isinstance(dim, Dim) else dim

    def _arrays(self, ids: Sequence[int], start: int, chunk: int) -> dict[str, Array]:
        part = list(ids[start : start + chunk])
        padded = -(-len(part) // self._multiple(1)) * self._multiple(1)
        offered = {
            "input_ids": np.array([[*part, *[0] * (padded - len(part))]], np.int32),
            "positions": np.arange(start, start + padded, dtype=np.int32)[None],
            "past_lengths": np.array([start], np.int32),
            "logit_positions": np.array([[len(part) - 1]], np.int32),
        }
        rows = self._multiple(0)
        return {n: a.repeat(rows, 0) for n, a in offered.items() if n in self._inputs}
