"""`--dtype` for ONNX files: other floats inside, the same arguments and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import irc
from irc.backends.reference import evaluate
from irc.driver.sources import find_source
from irc.ir.verify import verify
from irc.text import parse_module
from tests.cli.runner import refused, works
from tests.frontends.onnx_models import model, on_ort, saved

LOWEST = np.finfo(np.float32).min
CLOSE = {"f16": 1e-2, "bf16": 6e-2}
node = helper.make_node


def converted(path: Path, dtype: str) -> irc.Module:
    """The module of a file in a dtype, verified, whose text reads back as itself."""
    module = find_source(path, dtype=dtype).module
    verify(module)
    assert str(parse_module(str(module))) == str(module)
    return module


def close(path: Path, dtype: str, inputs: dict[str, Any]) -> irc.Module:
    """The converted module of a file, which gives about what ONNX Runtime gives for the file."""
    module = converted(path, dtype)
    for got, want in zip(evaluate(module, inputs).values(), on_ort(path, inputs), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got, want, atol=CLOSE[dtype] * scale)
    return module


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_block_with_a_mask(dtype: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """A row that is masked whole by the lowest f32 has the mean of the values, not NaN."""
    nodes = [
        node("MatMul", ["x", "w"], ["y"]),
        node("MatMul", ["y", "z"], ["scores"]),
        node("Cast", ["mask"], ["ones"], to=1),
        node("Sub", ["one", "ones"], ["hidden"]),
        node("Mul", ["hidden", "lowest"], ["added"]),
        node("Add", ["scores", "added"], ["masked"]),
        node("Softmax", ["masked"], ["weights"]),
        node("MatMul", ["weights", "x"], ["out"]),
    ]
    small = (rng.standard_normal((8, 8)) / 8).astype(np.float32)
    initial = {"w": small, "z": small.T.copy(), "one": np.float32(1), "lowest": LOWEST}
    initial = {name: np.asarray(array) for name, array in initial.items()}
    inputs = {"x": ("f32", (8, 8)), "mask": ("i64", (8, 8))}
    path = saved(model(nodes, inputs, ["out", "y"], initial), tmp_path)
    mask = rng.integers(0, 2, (8, 8))
    mask[3] = 0
    given = {"x": rng.standard_normal((8, 8)).astype(np.float32), "mask": mask}
    module = close(path, dtype, given)
    assert {weight.type.dtype for weight in module.weights.values()} == {dtype}
    products = [op for op in module.main if op.opname == "matmul"]
    assert {op.result.type.dtype for op in products} == {dtype}


def test_norms_of_large_numbers(rng: np.random.Generator, tmp_path: Path) -> None:
    """The square of 1000 is no f16, and 1e-8 is 0 in f16."""
    nodes = [
        node("Mul", ["x", "x"], ["squares"]),
        node("ReduceMean", ["squares", "last"], ["mean"]),
        node("Add", ["mean", "eps"], ["sum"]),
        node("Sqrt", ["sum"], ["root"]),
        node("Div", ["x", "root"], ["normed"]),
        node("Mul", ["normed", "w"], ["out"]),
    ]
    initial = {"last": np.array([-1]), "eps": np.array(1e-8, np.float32)}
    initial["w"] = np.ones(32, np.float32)
    path = saved(model(nodes, {"x": ("f32", ("n", 32))}, ["out"], initial), tmp_path)
    x = rng.uniform(0.5, 1, (3, 32)).astype(np.float32) * np.array([[1e3], [1], [1e-3]], np.float32)
    close(path, "f16", {"x": x})


def test_angles_of_late_positions(rng: np.random.Generator, tmp_path: Path) -> None:
    """Position 5001 is no f16, and its angle is more than a turn off in bf16."""
    nodes = [
        node("Cast", ["positions"], ["floats"], to=1),
        node("Mul", ["floats", "turns"], ["angles"]),
        node("Cos", ["angles"], ["cos"]),
        node("Mul", ["x", "cos"], ["turned"]),
        node("MatMul", ["turned", "w"], ["out"]),
    ]
    initial = {"turns": rng.uniform(0.1, 1, 32).astype(np.float32)}
    initial["w"] = np.eye(32, dtype=np.float32)
    inputs = {"x": ("f32", ("n", 32)), "positions": ("i64", ("n", 1))}
    path = saved(model(nodes, inputs, ["out"], initial), tmp_path)
    x = rng.standard_normal((2, 32)).astype(np.float32)
    close(path, "bf16", {"x": x, "positions": np.array([[5001], [4003]])})


def test_the_command_takes_a_dtype(rng: np.random.Generator, tmp_path: Path) -> None:
    weight = rng.standard_normal((8, 8)).astype(np.float32)
    made = model(
        [node("MatMul", ["x", "w"], ["out"])], {"x": ("f32", ("n", 8))}, ["out"], {"w": weight}
    )
    path, out = saved(made, tmp_path), tmp_path / "built"
    works("compile", path, "-o", out, "--dtype", "f16")
    x = rng.standard_normal((3, 8)).astype(np.float32)
    (found,) = irc.load(out).run({"x": x}).values()
    assert found.dtype == np.float32
    halves = x.astype(np.float16).astype(np.float32) @ weight.astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(found, halves, atol=2e-2)
    assert (np.abs(found - x @ weight) > 0).any()
    assert "an artifact states its dtypes" in refused("compile", out, "-o", out, "--dtype", "f16")
