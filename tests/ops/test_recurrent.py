"""Recurrences against the functions of transformers, and over a sequence in several calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Function, Module
from irc.ir.declare import op_class
from irc.ir.dtypes import dtype_of
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.ops import Return
from irc.passes.expand import Expand
from irc.pipeline import run_pipeline
from tests.ops.compare import assert_close
from tests.ops.example import module_of
from tests.ops.examples import EXAMPLES

BATCH, HEADS, SIZE, WIDTH, TOKENS = 2, 6, 4, 5, 70  # more tokens than a chunk of transformers
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def delta_inputs(rng: np.random.Generator, key_heads: int) -> Arrays:
    rows = (BATCH, TOKENS)

    def unit() -> Array:
        x = rng.standard_normal((*rows, key_heads, SIZE))
        x[:, 5:9] = x[:, 4:5]  # equal keys: the system is far from the unit matrix
        x /= np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        return x

    arrays = {
        "x": rng.standard_normal((*rows, HEADS, WIDTH)),
        "q": unit(),
        "k": unit(),
        "g": -rng.exponential(0.5, (*rows, HEADS)),
        "beta": rng.uniform(0, 1, (*rows, HEADS)),
        "state": rng.standard_normal((BATCH, HEADS, SIZE, WIDTH)),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def scan_inputs(rng: np.random.Generator, groups: int) -> Arrays:
    rows = (BATCH, TOKENS)
    arrays = {
        "x": rng.standard_normal((*rows, HEADS, SIZE)),
        "dt": rng.uniform(0.001, 0.4, (*rows, HEADS)),
        "a": -np.arange(1, HEADS + 1),
        "b": rng.standard_normal((*rows, groups, WIDTH)),
        "c": rng.standard_normal((*rows, groups, WIDTH)),
        "state": rng.standard_normal((BATCH, HEADS, SIZE, WIDTH)),
        "d": rng.standard_normal(HEADS),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def conv_inputs(rng: np.random.Generator, groups: int = 1) -> Arrays:
    shapes = {"x": (BATCH, TOKENS, 6), "weight": (6, 4), "state": (BATCH, 3, 6), "bias": (6,)}
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}


def call(name: str, arrays: Arrays, expand: bool = False, **attributes: Any) -> tuple[Array, Array]:
    """The two results of an operation on arrays by the names of its operands."""
    cls = op_class(name)
    types = [(n, TensorType(dtype_of(a), a.shape)) for n, a in arrays.items()]
    module = Module("m")
    function = module.add_function(Function("forward", types))
    named = {n: function.arg(n) for n in arrays if n in cls.optional_names}
    op = cls(*[function.arg(n) for n in cls.operand_names], **named, **attributes)
    function.append(op)
    function.append(Return(op.results))
    if expand:
        run_pipeline(module, str(Expand()))
    y, state = evaluate(module, arrays).values()
    return y, state


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("key_heads", [1, 3, 6])
def test_gated_delta_agrees_with_transformers(
    key_heads: int, expand: bool, rng: np.random.Generator
) -> None:
    torch = pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    arrays = delta_inputs(rng, key_heads)
    t = {name: torch.tensor(array) for name, array in arrays.items()}
    for function in ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"):
        wanted = getattr(oracle, function)(
            t["q"] * SIZE**0.5,  # these divide queries by that
            t["k"],
            t["x"],
            g=t["g"],
            beta=t["beta"],
            initial_state=t["state"],
            output_final_state=True,
        )
        got = call("gated_delta", arrays, expand)
        for mine, theirs in zip(got, wanted, strict=True):
            assert_close(mine, theirs.numpy(), function, factor=10)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_selective_scan_agrees_with_transformers(
    groups: int, expand: bool, rng: np.random.Generator
) -> None:
    torch = pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    arrays = scan_inputs(rng, groups)
    t = {name: torch.tensor(array) for name, array in arrays.items()}
    wanted = oracle.mamba2_chunk_scan(
        t["x"],
        t["dt"],
        t["a"],
        t["b"],
        t["c"],
        chunk_size=16,
        D=t["d"],
        initial_states=t["state"],
        return_final_states=True,
    )
    got = call("selective_scan", arrays, expand)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_close(mine, theirs.numpy(), "mamba2", factor=10)


@pytest.mark.parametrize("expand", [False, True])
def test_short_conv_agrees_with_torch(expand: bool, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    arrays = conv_inputs(rng)
    inputs = np.concatenate([arrays["state"], arrays["x"]], axis=1)
    wanted = torch.nn.functional.conv1d(
        torch.tensor(inputs.swapaxes(1, 2)),
        torch.tensor(arrays["weight"][:, None]),
        torch.tensor(arrays["bias"]),
        groups=6,
    )
    y, state = call("short_conv", arrays, expand)
    assert_close(y, np.ascontiguousarray(wanted.numpy().swapaxes(1, 2)), "conv1d")
    np.testing.assert_array_equal(state, inputs[:, -3:])


DRAWN = {"gated_delta": delta_inputs, "selective_scan": scan_inputs, "short_conv": conv_inputs}


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", DRAWN)
def test_rows_of_different_lengths_in_several_calls(
    name: str, expand: bool, rng: np.random.Generator
) -> None:
    """Each row is what it is alone, in one call; padding and empty pieces leave its state."""
    arrays = DRAWN[name](rng, 3)
    counts = np.array([TOKENS, 33], np.int32)
    alone = [
        call(name, {k: cut(a, row, int(count)) for k, a in arrays.items()})
        for row, count in enumerate(counts)
    ]
    state, parts = arrays["state"], []
    for begin in range(0, TOKENS, 16):
        piece = {k: a[:, begin : begin + 16] if is_row(a) else a for k, a in arrays.items()}
        lengths = np.clip(counts - begin, 0, piece["x"].shape[1]).astype(np.int32)
        y, state = call(name, {**piece, "state": state, "lengths": lengths}, expand)
        parts.append(y)
    joined = np.concatenate(parts, axis=1)
    for row, (y, last) in enumerate(alone):
        assert_close(joined[row : row + 1, : counts[row]], y, name, factor=10)
        assert_close(state[row : row + 1], last, name, factor=10)


def is_row(array: Array) -> bool:
    return array.shape[:2] == (BATCH, TOKENS)


def cut(array: Array, row: int, count: int) -> Array:
    if not is_row(array) and len(array) != BATCH:
        return array
    return array[row : row + 1, :count] if is_row(array) else array[row : row + 1]


def test_strong_decays_do_not_overflow(rng: np.random.Generator) -> None:
    arrays = delta_inputs(rng, 3)
    arrays["g"] = np.full_like(arrays["g"], -50.0)
    with np.errstate(over="raise", invalid="raise"):
        for mine, wanted in zip(
            call("gated_delta", arrays, True), call("gated_delta", arrays), strict=True
        ):
            assert_close(mine, wanted, "decays of e^-50", factor=10)


def test_calls_that_are_too_long_are_refused(rng: np.random.Generator) -> None:
    with pytest.raises(Error, match="gated_delta computes 64 tokens in a call, not 70"):
        call("gated_delta", delta_inputs(rng, 3), longest=64)
    example = next(e for e in EXAMPLES["gated_delta"] if e.sizes["S"] == 19)
    module = module_of(example)
    verify(module)
    module.dims["S"] = (1, 1, 257)
    with pytest.raises(Error, match=r"may have S=257; compile with --dims S=min:typical:256"):
        verify(module)


@pytest.mark.parametrize("name", DRAWN)
def test_lengths_lie_within_a_call(name: str, rng: np.random.Generator) -> None:
    arrays = DRAWN[name](rng, 3)
    with pytest.raises(Error, match="lengths has 3 to 71, outside 0 to 70"):
        call(name, {**arrays, "lengths": np.array([71, 3], np.int32)})
