"""Tests at load: what is wrong with collectives or numbers must not reach a user.

Engines have been seen whose collectives silently do nothing, or use another group than they say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np

from irc.backends.tensorrt.runtime.driver import Array, Group
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
    for prompt in _prompts(golden) if golden is not None else ():
        _Answer(program, prompt, dims or {}).test()


def _test_group(rank: EngineRank, name: str, group: Group, ranks: Sequence[int]) -> None:
    """Sum vectors that tell who added them; gather numbers that tell whose they are."""
    count = rank.plan.mesh.ranks
    mine = np.zeros(count, np.float32)
    mine[rank.rank] = rank.rank + 1
    total = _collective(rank, group, "all_reduce", "sum", mine, count)
    wanted = np.array([r + 1 if r in ranks else 0 for r in range(count)], np.float32)
    shown = ", ".join(map(str, ranks))
    where = f"{name} (ranks {shown}), on rank {rank.rank}"
    if not np.array_equal(total, wanted):
        added = [r for r in range(count) if total[r]]
        if added == [rank.rank] or not added:
            _fail(f"all_reduce of {where}, did nothing")
        _fail(
            f"all_reduce of {where}, is wrong: ranks {', '.join(map(str, added))} were added "
            f"({total.tolist()}, not {wanted.tolist()})"
        )
    place = np.array([rank.rank], np.int32)
    order = _collective(rank, group, "all_gather", "none", place, len(ranks))
    if order.tolist() != list(ranks):
        _fail(f"all_gather of {where}, gave the order {order.tolist()}")


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
