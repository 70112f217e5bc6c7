"""Compares the first answers of a program with those that the reference stored at compilation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from irc.backends.cuda.driver import Array
from irc.backends.cuda.execute.memory import DeviceArray
from irc.backends.cuda.execute.stream import RankStream, symbols_of
from irc.backends.tensorrt.ranges import smallest
from irc.backends.tensorrt.runtime.program import EngineProgram
from irc.ir.dtypes import numpy_dtype
from irc.ir.result_names import NEXT_TOKENS


def problems(program: EngineProgram, golden: Mapping[str, Any]) -> Iterator[str]:
    """The differences from the golden answers, on this rank alone and on all together."""
    for each in golden.get("prompts", [golden]):
        name, compare = (
            ("logits", _logits_problem) if each is golden else (NEXT_TOKENS, _token_problem)
        )
        for value, who in _answers(program, each["ids"], name):
            if problem := compare(each, value, who):
                yield problem


def _logits_problem(golden: Mapping[str, Any], logits: Array, who: str) -> str:
    wanted = np.asarray(golden["logits"], np.float32)
    differences = np.abs(logits.astype(np.float32)[golden["top"]] - wanted)
    worst, limit = float(differences.max()), float(golden["tolerance"])
    if worst <= limit:  # not true of NaN
        return ""
    return (
        f"the first token's logits of {who} differ from the reference's by {worst:.4g} "
        f"(token {golden['top'][int(differences.argmax())]}), and {limit:.4g} is allowed"
    )


def _token_problem(golden: Mapping[str, Any], token: Array, who: str) -> str:
    if int(token) == golden["token"]:
        return ""
    return f"the first token of {who} is {int(token)}, and the reference's is {golden['token']}"


def _answers(program: EngineProgram, ids: Sequence[int], name: str) -> Iterator[tuple[Array, str]]:
    """(the value of the result `name` after the last token, whose it is): of this rank if it has
    all of it, and the global one."""
    rank = program.rank
    states = {symbol: 1 for port in program.ports.states for symbol in symbols_of(port)}
    stream = RankStream(rank, states)
    try:
        arrays, sizes = program.sharding.plain.bind(_arguments(program, ids))
        shards = program.sharding.shards(rank.rank, rank.taken, arrays)
        found, full = stream.step(shards, sizes)
        own = _own(program, name, found)
        whole = program.gather([port.name for port in program.ports.outputs], found, sizes, full)
        if own is not None:
            yield _last(own, len(ids)), f"rank {rank.rank}"
        yield _last(whole[name], len(ids)), "all ranks together"
    finally:
        stream.close()


def _arguments(program: EngineProgram, ids: Sequence[int]) -> dict[str, Array]:
    """The plain inputs of a first call with these ids in every row, of as few rows as possible."""
    inputs = {port.name: port for port in program.ports.inputs}
    arrays = {
        "input_ids": np.array([ids], np.int32),
        "positions": np.arange(len(ids), dtype=np.int32)[None],
        "past_lengths": np.zeros(1, np.int32),
        "logit_positions": np.array([[len(ids) - 1]], np.int32),
    }
    rows = smallest(inputs["input_ids"].shape[0])
    return {name: array.repeat(rows, 0) for name, array in arrays.items() if name in inputs}


def _own(program: EngineProgram, name: str, found: Mapping[str, DeviceArray]) -> Array | None:
    """The result of this rank, where it has all of it."""
    rank, result = program.rank, program.sharding.results.get(name)
    if result is None or result.is_sharded or name not in found:
        return None
    value = found[name]
    host = rank.shared.host("self-test answer", value.shape, numpy_dtype(value.dtype))
    rank.stream.download(host, value.address)
    rank.stream.wait("the self-test")
    return np.array(host)


def _last(result: Array, tokens: int) -> Array:
    """The value of the last token of a prompt, in the first row; some results have only that."""
    return result[0, min(result.shape[1], tokens) - 1]
