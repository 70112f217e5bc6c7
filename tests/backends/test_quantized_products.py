"""Products with quantized weights on ONNX Runtime: which nodes they become, and their results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.frontends.onnx import import_onnx
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.passes.quantize import QuantizeModule
from irc.pipeline import run_pipeline
from irc.weights import RandomRef
from tests.fresh import fresh
from tests.rows import ROWS, row_error

assert irc.passes
N, K = 24, 160
CLOSE = 1e-3  # activations are multiplied in two parts of 8 bits; one would be off by 0.006
LARGEST = {"i4": 8.0, "u4": 16.0, "i8": 128.0, "u8": 256.0, "f4e2m1": 7.0, "f8e4m3": 50.0}


def module(
    kind: str,
    scales: tuple[int, int],
    zero: bool = False,
    *,
    folder: Path | None = None,
    body: str = "%y = linear %x, %w, bias=@b",
) -> Module:
    """x [B, 2, K] times a quantized weight [N, K], plus a bias.

    In a `folder`, scales are powers of two, f8e8m0.
    """
    stored, count = ("f32", 'random("s", 1, 0.01)'), scales[0] * scales[1]
    file = ""
    if folder is not None:
        path = folder / "scales"
        path.write_bytes(fresh(1).integers(120, 126, count).astype(np.uint8).tobytes())
        stored = "f8e8m0", f"bytes(@f, 0, f8e8m0{list(scales)})"
        file = f'file @f = "{path}"'
    given = ", zero=@z" if zero else ""
    zeros = f'weight @z : {kind}{list(scales)} = random("z", 1, 7.0)' if zero else ""
    return irc.parse(f"""module @m dims(B=1:2:{ROWS}) {{
      {file}
      weight @w : {kind}[{N}, {K}] = random("w", 1, {LARGEST[kind]})
      weight @s : {stored[0]}{list(scales)} = {stored[1]}
      weight @b : f32[{N}] = random("b", 1, 1.0)
      {zeros}
      func @forward(%x: f32[B, 2, {K}]) -> (y: f32[B, 2, {N}]) {{
        %w = dequantize @w, @s{given} {{dtype="f32"}} : f32[{N}, {K}]
        {body} : f32[B, 2, {N}]
        return %y
      }}
    }}""")


def run(
    program: Module, folder: Path, pipeline: str | None = None, rounded: bool = False
) -> tuple[list[str], float]:
    """(the operators of the model, the largest error relative to the largest result of a row)."""
    x = fresh(3).standard_normal((ROWS, 2, K)).astype(np.float32)
    x[..., 3] *= 50  # an outlier channel
    wanted = evaluate(program, {"x": x})["y"]
    products = irc.compile(program, folder, pipeline=pipeline).run({"x": x})["y"]
    graph = onnx.load(folder / "rank0.onnx", load_external_data=False).graph
    return [node.op_type for node in graph.node], row_error(products, wanted, rounded)


CASES = [
    ("i4", (N, K // 32), False),
    ("i4", (N, 1), True),
    ("u4", (N, K // 32), True),
    ("u4", (1, 1), False),
    ("i8", (N, 1), False),
    ("i8", (N // 3, K // 80), True),
    ("u8", (N, K // 16), True),
    ("f4e2m1", (N, K // 32), False),
    ("f4e2m1", (1, K // 16), False),
]


# A matmul has no form for codes; the linear beside it still reads them.
BESIDE = f"""%t = transpose %w {{order=[1, 0]}} : f32[{K}, {N}]
        %m = matmul %x, %t : f32[B, 2, {N}]
        %l = linear %x, %w, bias=@b : f32[B, 2, {N}]
        %y = add %m, %l"""


@pytest.mark.parametrize("body", ["%y = linear %x, %w, bias=@b", BESIDE], ids=["alone", "beside"])
@pytest.mark.parametrize(("kind", "scales", "zero"), CASES)
def test_a_product_reads_the_codes(
    kind: str, scales: tuple[int, int], zero: bool, body: str, tmp_path: Path
) -> None:
    program = module(kind, scales, zero, folder=tmp_path if kind == "f4e2m1" else None, body=body)
    nodes, error = run(program, tmp_path / "out", pipeline="inline" if body == BESIDE else None)
    assert nodes.count("MatMulNBits") == 1
    assert "MatMul" in nodes if body == BESIDE else "DequantizeLinear" not in nodes
    assert error < CLOSE


@pytest.mark.parametrize(
    ("kind", "scales"), [("i4", (N, K)), ("i8", (N, K // 20)), ("f8e4m3", (N // 3, K // 80))]
)
def test_blocks_that_matmulnbits_lacks(kind: str, scales: tuple[int, int], tmp_path: Path) -> None:
    nodes, error = run(module(kind, scales), tmp_path)
    assert "MatMulNBits" not in nodes
    assert error < 1e-5


@pytest.mark.parametrize("kind", ["i4", "i8"])
def test_scales_that_are_computed(kind: str, tmp_path: Path) -> None:
    program = irc.parse(f"""module @m {{
      weight @w : {kind}[{N}, {K}] = random("w", 1, {LARGEST[kind]})
      func @forward(%x: f32[5, {K}], %s: f32[{N}, 1]) -> (y: f32[5, {N}]) {{
        %w = dequantize @w, %s : f32[{N}, {K}]
        %y = linear %x, %w : f32[5, {N}]
        return %y }} }}""")
    shapes = {"x": (5, K), "s": (N, 1)}
    inputs = {key: fresh(9).standard_normal(shape, np.float32) for key, shape in shapes.items()}
    (y,) = irc.compile(program, tmp_path / "out").run(inputs).values()
    np.testing.assert_allclose(y, evaluate(program, inputs)["y"], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w4a16_asym"])
def test_computed_codes_are_written_unsigned(scheme: str, tmp_path: Path) -> None:
    """So no node inverts their signs when the model is loaded; it is read back as it was."""
    program = irc.parse(f"""module @m dims(B=1:2:{ROWS}) {{
      weight @w : f32[{N}, {K}] = random("w", 1, 0.1)
      func @forward(%x: f32[B, 2, {K}]) -> (y: f32[B, 2, {N}]) {{
        %y = linear %x, @w : f32[B, 2, {N}]
        return %y }} }}""")
    run_pipeline(program, [QuantizeModule(scheme=scheme)])
    nodes, error = run(program, tmp_path)
    assert "MatMulNBits" in nodes and "BitwiseXor" not in nodes
    assert error < CLOSE
    again, x = import_onnx(tmp_path / "rank0.onnx"), {"x": np.ones((1, 2, K), np.float32)}
    assert [op.opname for op in again.ops()] == [op.opname for op in program.ops()]
    np.testing.assert_array_equal(evaluate(again, x)["y"], evaluate(program, x)["y"])


@pytest.mark.parametrize(
    ("kind", "block", "scales", "alone", "rounds"),
    [
        ("i4", 32, (N, K // 32), True, False),
        ("u4", 16, (1, K // 16), True, False),
        ("i8", 32, (N, 1), True, False),
        ("i4", 16, (N, K // 32), True, True),  # other blocks than those of the product
        ("i4", 80, (N, K // 80), True, True),
        ("i4", 32, (N, K // 32), False, True),  # the rounded numbers have another user
    ],
)
def test_a_product_rounds_its_inputs(
    kind: str, block: int, scales: tuple[int, int], alone: bool, rounds: bool, tmp_path: Path
) -> None:
    """MatMulNBits rounds to 8 bits in blocks, so no other node has to."""
    body = f"""%s = dynamic_scale %x {{dtype="i8", block={block}}} : f32[B, 2, {K // block}]
        %c = quantize %x, %s {{dtype="i8"}} : i8[B, 2, {K}]
        %d = dequantize %c, %s : f32[B, 2, {K}]
        %y = linear %d, %w, bias=@b"""
    if not alone:
        body = f"""{body.replace("%y", "%l")} : f32[B, 2, {N}]
        %m = reduce_max %d {{dims=[-1], keep}} : f32[B, 2, 1]
        %y = add %l, %m"""
    nodes, error = run(module(kind, scales, body=body), tmp_path, "inline", rounded=True)
    assert nodes.count("MatMulNBits") == 1
    assert ("Round" in nodes) is rounds and ("Split" in nodes) is (rounds and alone)
    assert error < CLOSE


def narrow(kind: str, dtype: str, other: str = "i8") -> Module:
    """x [B, K] in `dtype` times a weight with blocks of 32, and that weight w in f32; and another
    weight of the dtype `other`."""
    return irc.parse(f"""module @m dims(B=1:2:{ROWS}) {{
      weight @o : {other}[2, 2] = random("o", 1, {LARGEST[other]})
      weight @w : {kind}[{N}, {K}] = random("w", 1, {LARGEST[kind]})
      weight @s : f32[{N}, {K // 32}] = random("s", 1, 0.01)
      func @forward(%x: {dtype}[B, {K}]) -> (y: f32[B, {N}], w: f32[{N}, {K}], o: {other}[2, 2]) {{
        %w = dequantize @w, @s {{dtype="{dtype}"}} : {dtype}[{N}, {K}]
        %wide = dequantize @w, @s {{dtype="f32"}} : f32[{N}, {K}]
        %l = linear %x, %w : {dtype}[B, {N}]
        %y = cast %l {{dtype="f32"}} : f32[B, {N}]
        return %y, %wide, @o
      }} }}""")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("kind", "other"), [("i4", "i8"), ("i8", "i8"), ("i8", "i4")])
def test_inputs_in_bf16_have_8_bits_beside_weights_of_4(
    kind: str, other: str, dtype: str, tmp_path: Path
) -> None:
    """An element is off by half a step of 1/127 of the largest one of its block, where it is one
    part; by 1/127 of that where it is two."""
    x = fresh(3).standard_normal((ROWS, K))
    x[:, 3] *= 50  # an outlier channel
    x = x.astype(numpy_dtype(dtype)).astype(np.float32)
    found = irc.compile(narrow(kind, dtype, other), tmp_path, pipeline="inline").run({"x": x})
    w = found["w"].astype(np.float64)
    largest = np.abs(x).reshape(ROWS, -1, 32).max(-1).repeat(32, axis=-1)
    error = np.abs(found["y"] - x @ w.T) / (largest / 254 @ np.abs(w).T)
    if "i4" in (kind, other) and dtype == "bf16":
        assert 0.05 < error.max() < 1.001
    else:
        assert error.max() < 0.01


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["i4", "i8"])
def test_rows_that_are_not_finite_give_nan(
    kind: str, dtype: str, number: float, tmp_path: Path
) -> None:
    """MatMulNBits itself takes NaN for a finite number."""
    x = fresh(3).standard_normal((4, K)).astype(numpy_dtype(dtype))
    program = irc.compile(narrow(kind, dtype), tmp_path, pipeline="inline")
    wanted = program.run({"x": x})["y"]
    x[2, 7] = number
    wanted[2] = np.nan
    np.testing.assert_array_equal(program.run({"x": x})["y"], wanted)


@pytest.mark.parametrize("computed", [True, False])
def test_products_of_one_input_are_one_where_codes_are_computed(
    computed: bool, tmp_path: Path
) -> None:
    """Codes of a checkpoint would have to be copied for that."""
    program = irc.parse(f"""module @m dims(B=1:2:{ROWS}) {{
      weight @one : f32[{N}, {K}] = random("w", 1, 0.1)
      weight @two : f32[8, {K}] = random("v", 1, 0.1)
      func @forward(%x: f32[B, {K}]) -> (y: f32[B, {N}], z: f32[B, 8]) {{
        %y = linear %x, @one : f32[B, {N}]
        %z = linear %x, @two : f32[B, 8]
        return %y, %z
      }} }}""")
    run_pipeline(program, [QuantizeModule(scheme="w4a16")])
    if not computed:  # as from a file: the same types, and bytes that are only read
        for weight in program.weights.values():
            weight.ref = RandomRef(weight.name, 1, 2.0)
    x = {"x": fresh(3).standard_normal((ROWS, K)).astype(np.float32)}
    found, wanted = irc.compile(program, tmp_path).run(x), evaluate(program, x)
    nodes = onnx.load(tmp_path / "rank0.onnx", load_external_data=False).graph.node
    assert [node.op_type for node in nodes].count("MatMulNBits") == (1 if computed else 2)
    assert max(row_error(found[name], wanted[name], rounded=False) for name in "yz") < CLOSE
