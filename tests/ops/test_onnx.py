"""Every example of every operation, as ONNX on ONNX Runtime, against the reference."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.mark import ParameterSet

import irc
from irc.backends.onnx import backend
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.declare import REGISTRY
from irc.ir.dtypes import DTYPES
from tests.backends.checked_models import emit_checked
from tests.backends.ranks import agrees
from tests.ops.compare import assert_close
from tests.ops.edges import numbers
from tests.ops.example import Example, dtypes_taken, inputs_of, module_of
from tests.ops.examples import EXAMPLES
from tests.ops.examples_elementwise import distinct

GLOBAL_VIEW = {
    "shard_slice",
    "sharded_topk",
    "sharded_max",
    "cyclic_embedding",
}  # localize writes them in other operations
WITHOUT_LOWERING = GLOBAL_VIEW | {"sample"}  # which multiplies integers of 64 bits to 128


def cases(
    ranks: bool, without: Collection[str] = (), only: Collection[str] = DTYPES
) -> list[ParameterSet]:
    """Every example in every dtype, of one rank or of several."""
    return [
        pytest.param(example, dtype, id=f"{example}-{dtype}")
        for op, examples in EXAMPLES.items()
        for example in examples
        if (op != "return" or example.args) and ranks == example.local
        if example.local or not example.mesh
        if op not in WITHOUT_LOWERING
        if op not in without
        for dtype in example.dtypes
        if dtype in only
    ]


def test_operations_without_a_lowering() -> None:
    missing = {
        op
        for op, examples in EXAMPLES.items()
        if op in REGISTRY and backend.unsupported(module_of(examples[0], examples[0].dtypes[0]))
    }
    assert missing == WITHOUT_LOWERING & EXAMPLES.keys()


@pytest.mark.parametrize(("example", "dtype"), cases(ranks=True))
def test_ranks_agree(
    example: Example, dtype: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    module = module_of(example, dtype)
    drawn = [inputs_of(example, dtype, rng) for _ in range(module.mesh.ranks)]
    agrees(module, {name: [arrays[name] for arrays in drawn] for name in drawn[0]}, tmp_path)


@pytest.mark.parametrize(("example", "dtype"), cases(ranks=False))
def test_onnx_runtime_agrees(
    example: Example, dtype: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    module = module_of(example if solvable(example) else example.bound(), dtype)
    inputs = inputs_of(example, dtype, rng)
    wanted = evaluate(module, inputs)
    facts = emit_checked(module, tmp_path)
    outputs = backend.load(tmp_path, facts, threads=1).run(inputs)
    assert list(outputs) == list(wanted)
    for name, want in wanted.items():
        assert_close(outputs[name], want, f"{example.op} {name}", factor=2)


@pytest.mark.parametrize("dtype", [name for name, kind in DTYPES.items() if kind.is_integer])
def test_integers_up_to_their_limits_agree(
    dtype: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    values = [case.values[0] for case in cases(False)]
    examples = {str(value): value for value in values if isinstance(value, Example)}
    taken = [example for example in examples.values() if dtype in dtypes_taken(example.bound())]
    assert len(taken) > 50
    for example in taken:
        test_onnx_runtime_agrees(up_to_limits(example, dtype), dtype, rng, tmp_path)


def up_to_limits(example: Example, dtype: str) -> Example:
    """The example on any numbers of an integer dtype, where its operands are not special ones."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return rng.choice(numbers(dtype, rng), shape)

    args = [
        replace(arg, draw=draw)
        if arg.dtype == "T" and arg.low is None and arg.draw in (None, distinct)
        else arg
        for arg in example.args
    ]
    return replace(example, args=tuple(args))


# Codes of NaN are undefined; masked values are multiplied by 0, so NaN stays.
UNDEFINED = {"quantize", "quantize_rows", "attention", "fused_attention", "rope_and_cache"}
UNDEFINED |= {"selective_scan", "gated_delta"}


@pytest.mark.parametrize(("example", "dtype"), cases(ranks=False, without=UNDEFINED, only=["f32"]))
def test_nan_and_infinities_agree(
    example: Example, dtype: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    module = module_of(example if solvable(example) else example.bound(), dtype)
    drawn = inputs_of(example, dtype, rng)
    if example.op == "gated_mlp":  # ONNX Runtime's sigmoid is 0 below -18, and 0 times inf is NaN
        drawn = {name: x / np.float32(4) for name, x in drawn.items()}
    inputs = {name: sprinkled(x, rng) for name, x in drawn.items()}
    wanted = evaluate(module, inputs)
    facts = emit_checked(module, tmp_path)
    outputs = backend.load(tmp_path, facts, threads=1).run(inputs)
    for name, want in wanted.items():
        assert_close(outputs[name], want, f"{example.op} {name}", factor=2)


def sprinkled(x: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Floats of which an eighth is NaN, infinite, or a zero of either sign."""
    if x.dtype != np.float32:
        return x
    special = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 0.0], np.float32), x.shape)
    return np.where(rng.random(x.shape) < 1 / 8, special, x)


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("dims", ["[0]", "[0, 1]"])
@pytest.mark.parametrize("least", [0, 2])
def test_the_mean_of_nothing_is_nan(size: int, dims: str, least: int, tmp_path: Path) -> None:
    shape = "f32[3]" if dims == "[0]" else "f32[]"
    module = irc.parse(
        f"""module @m dims(N={least}:4:9) {{
        func @forward(%x: f32[N, 3]) -> (y: {shape}) {{
        %rest = slice %x {{dim=0, start={least}, stop=N}} : f32[N-{least}, 3]
        %y = reduce_mean %rest {{dims={dims}}} : {shape}
        return %y }} }}""".replace("N-0", "N")
    )
    x = np.ones((least + size, 3), np.float32)
    facts = emit_checked(module, tmp_path)
    y = backend.load(tmp_path, facts, threads=1).run({"x": x})["y"]
    np.testing.assert_array_equal(y, np.full((3,) if dims == "[0]" else (), 1 if size else np.nan))


def test_a_looked_up_feature_keeps_its_sign(tmp_path: Path) -> None:
    module = irc.parse("""module @m { func @forward(%ids: i32[4], %t: f32[3, 1]) -> (y: f32[4, 1]) {
        %y = embedding %ids, %t : f32[4, 1]
        return %y } }""")
    table, ids = np.array([[-0.0], [1], [-np.inf]], np.float32), np.array([0, 2, 7, -1], np.int32)
    facts = emit_checked(module, tmp_path)
    y = backend.load(tmp_path, facts, threads=1).run({"ids": ids, "t": table})["y"]
    assert [str(v) for v in y[:, 0]] == ["-0.0", "-inf", "0.0", "0.0"]


def solvable(example: Example) -> bool:
    """Whether the sizes of all symbols follow from the shapes of the inputs."""
    dims = [str(dim) for arg in example.args for dim in arg.shape]
    return all(name in dims for name in example.sizes if any(name in dim for dim in dims))


def test_a_function_needs_a_result(tmp_path: Path) -> None:
    with pytest.raises(Error, match="@forward returns nothing"):
        backend.emit(module_of(Example("return")), tmp_path)
