"""The reference's answers to prompts, with which a runtime compares what its engines compute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from irc.artifact import Progress
from irc.backends.reference import evaluate
from irc.backends.reference.evaluate import Run
from irc.backends.reference.weights import Weights
from irc.backends.tensorrt.choosing import Choice, choice_of
from irc.backends.tensorrt.ranges import number
from irc.core import Module
from irc.dims import Dim, DimLike
from irc.dtypes import numpy_dtype
from irc.errors import Error
from irc.report import weight_bytes
from irc.results import NEXT_TOKENS

SMALL = 256_000_000  # bytes of weights up to which the answer is computed unless asked otherwise
COUNT = 16  # of the largest logits that are stored
# Of the largest logit: what engines may differ by, which sum in another order and a narrower dtype.
TOLERANCE = {"f32": 1e-3, "f16": 2e-2, "bf16": 5e-2}
_PROMPT = 8  # tokens
_ENOUGH, _TRIES = 3, 12  # prompts with a clear answer, where only tokens can be compared


def is_left_out(module: Module, wanted: bool | None) -> bool:
    """Whether there could be an answer, and it is not computed because that takes long."""
    return wanted is None and weight_bytes(module) > SMALL and _is_generator(module)


def self_test(
    module: Module, base: Path | str | None, wanted: bool | None, progress: Progress
) -> dict[str, Any] | None:
    """The largest logits after a prompt, {ids, top, logits, tolerance}; of a module that gives
    tokens in their place, prompts with the token after each, {prompts: [{ids, token}]}.

    A token can be compared only where it is the likeliest by more than rounding changes; prompts
    for which it is not are left out. None where it is not wanted, or there is nothing to compare.
    `wanted` None: where weights are small.
    """
    if wanted is False or (wanted is None and weight_bytes(module) > SMALL):
        return None
    found = None
    if _is_generator(module):
        progress("running the reference for the self-test", 0.0)
        found = _answers(module, base)
    if wanted and found is None:
        raise Error(
            "there is nothing to test: the module gives no logits after input_ids, and no tokens "
            "that are clearly likelier than others; leave --self-test out"
        )
    return found


def _is_generator(module: Module) -> bool:
    """Whether it goes on with token ids, from caches that hold some already."""
    inputs = {str(arg.name) for arg in module.main.args}
    results = {"logits", NEXT_TOKENS} & {*module.main.result_names()}
    return {"input_ids", "past_lengths"} <= inputs and bool(results)


def _answers(module: Module, base: Path | str | None) -> dict[str, Any] | None:
    if "logits" in module.main.result_names():
        return _logits(module, base)
    choice = choice_of(module)
    if choice is None:
        return None
    prompts = _clear(choice, base)
    return {"prompts": prompts} if prompts else None


def _logits(module: Module, base: Path | str | None) -> dict[str, Any] | None:
    at = module.main.result_names().index("logits")
    type = module.main.result_layouts()[at]
    vocabulary = type.shape[-1]
    if not isinstance(vocabulary, int):
        return None
    ids = next(_prompts(module, vocabulary))
    logits = evaluate(module, _inputs(module, ids), base)["logits"]
    last = np.asarray(logits[0, -1], np.float32)
    top = np.argsort(-last, kind="stable")[:COUNT]
    return {
        "ids": ids,
        "top": top.tolist(),
        "logits": [float(each) for each in last[top]],
        "tolerance": _tolerance(type.dtype, float(np.abs(last).max())),
    }


def _clear(choice: Choice, base: Path | str | None) -> list[dict[str, Any]]:
    """Prompts with the tokens after them; no rounding makes another one the likeliest."""
    module, weights = choice.module, Weights(choice.module, base)
    found: list[dict[str, Any]] = []
    for ids in map(list, dict.fromkeys(map(tuple, _prompts(module, choice.vocabulary)))):
        run = Run(module, _inputs(module, ids), weights=weights, watched=(choice.logits,))
        token, lead, largest = choice.lead(run)
        told = run.whole()[NEXT_TOKENS][-1, -1]
        if told == token and lead > 2 * _tolerance(choice.logits.type.dtype, largest):
            found.append({"ids": ids, "token": token})
        if len(found) == _ENOUGH:
            break
    return found


def _tolerance(dtype: str, largest: float) -> float:
    """What an engine's logits may differ by, where the largest is that large."""
    return TOLERANCE.get(dtype, TOLERANCE["bf16"]) * max(1.0, largest)


def _prompts(module: Module, vocabulary: int) -> Iterator[list[int]]:
    """Prompts, from the longest that fits the caches to the shortest, and again."""
    (arg,) = [arg for arg in module.main.args if arg.name == "input_ids"]
    least = _least(module.main.argument_layout(arg).shape[1])  # what ranks share is a multiple
    caches = [op.operands[0].type.shape[2] for op in module.ops() if op.opname == "cache_update"]
    most = min((dim for dim in caches if isinstance(dim, int)), default=_PROMPT)
    longest = max(min(_PROMPT, most) // least, 1)
    for turn in range(_TRIES):
        count = (longest - turn % longest) * least
        yield [((7 + 2 * turn) * i + 3) % vocabulary for i in range(count)]


def _inputs(module: Module, ids: list[int]) -> dict[str, np.ndarray]:
    """The arguments of a first call of one row, or of as few rows as ranks share."""
    args = {str(arg.name): module.main.argument_layout(arg) for arg in module.main.args}
    batch = args["input_ids"].shape[0]
    rows = _least(batch)
    known = {
        "input_ids": np.tile(np.array(ids, np.int32), (rows, 1)),
        "positions": np.tile(np.arange(len(ids), dtype=np.int32), (rows, 1)),
        "past_lengths": np.zeros(rows, np.int32),
        "logit_positions": np.full((rows, 1), len(ids) - 1, np.int32),
    }
    found: dict[str, np.ndarray] = {}
    for name, type in args.items():
        if name in known:
            found[name] = known[name]
            continue
        shape = tuple(_least(dim) for dim in type.shape)
        found[name] = np.zeros(shape, numpy_dtype(type.dtype))
    return found


def _least(dim: DimLike) -> int:
    """A dimension where every symbol is 1."""
    return number(dim, dict.fromkeys(dim.symbols(), 1)) if isinstance(dim, Dim) else dim
