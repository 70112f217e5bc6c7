"""Every example of every operation in TensorRT's version of ONNX, built and read back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from irc.analysis.fused import communicates
from irc.backends.reference import evaluate
from irc.backends.tensorrt.lowering.table import lowerings
from irc.backends.tensorrt.target import Target
from irc.frontends.onnx import import_onnx
from irc.ir.core import Module
from irc.text import parse_module
from tests.fresh import fresh
from tests.ops.example import Example, inputs_of, module_of
from tests.ops.examples import EXAMPLES
from tests.ops.test_onnx import solvable
from tests.tensorrt.emission import RTX, emitted, problem

# (operation, dtype of an example, or "" for any) -> the reason that users read
REFUSED = {
    ("matmul", "i32"): "multiplies i32, and TensorRT only floats",
    ("cast", ""): "is in u8, which TensorRT does not have",
    ("bitcast", ""): " TensorRT ",
    ("quantize", ""): "",
    ("dynamic_scale", ""): "",
    ("quantize_rows", ""): "",
    ("sample", ""): "",
    ("dequantize", ""): "",  # see test_quantized_weights_that_tensorrt_lacks
}
RNG = fresh(70)
OLD = Target.parse("tensorrt-rtx-1.7/sm_75+sm_89")
GLOBAL_VIEW = ("shard_slice", "sharded_topk", "sharded_max", "cyclic_embedding")


def modules(op: str) -> Iterator[tuple[Example, str, Module]]:
    """The examples of an operation of one rank, or of a rank's view, in every dtype."""
    for example in EXAMPLES[op]:
        if (example.mesh and not example.local) or (op == "return" and not example.args):
            continue
        for dtype in example.dtypes:
            solved = example if solvable(example) else example.bound()
            yield example, dtype, module_of(solved, dtype)


def reason(module: Module) -> str | None:
    """The reason why a module is unsupported, or None."""
    unsupported = lowerings(RTX).unsupported(module)
    return unsupported[0].reason if unsupported else None


@pytest.mark.parametrize("op", [op for op in EXAMPLES if op not in GLOBAL_VIEW])
def test_lowerings_compute_the_operation(op: str, tmp_path: Path) -> None:
    """Read back from ONNX, or unsupported for a known reason."""
    for example, dtype, module in modules(op):
        if (why := reason(module)) is not None:
            assert (REFUSED.get((op, dtype)) or REFUSED[op, ""]) in why
        elif not example.local:
            inputs = inputs_of(example, dtype, RNG)
            (tmp_path / "m.onnx").write_bytes(emitted(module).SerializeToString())
            results = evaluate(import_onnx(tmp_path / "m.onnx", use_text=False), inputs, tmp_path)
            for name, wanted in evaluate(module, inputs).items():
                assert_near(results[name], wanted, f"{example} in {dtype}: {name}", narrow(module))


def narrow(module: Module) -> bool:
    """Whether anything is computed in f16 or bf16, in which the order of sums shows."""
    kinds = {value.type.dtype for op in module.main for value in (*op.operands, *op.results)}
    return bool(kinds & {"f16", "bf16"})


def assert_near(found: np.ndarray, wanted: np.ndarray, what: str, narrow: bool) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, what
    if wanted.dtype.kind in "iub":
        np.testing.assert_array_equal(found, wanted, what)
        return
    got, want = (each.astype(np.float64) for each in (found, wanted))
    scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
    tolerance = 3e-2 if narrow else 2e-5
    np.testing.assert_allclose(got, want, tolerance, tolerance * scale, err_msg=what)


@pytest.mark.needs_rtx
@pytest.mark.parametrize("op", [op for op in EXAMPLES if op not in GLOBAL_VIEW])
def test_every_lowering_builds(op: str) -> None:
    """Collectives are a plugin, which needs the process of the builder: see test_engines.py."""
    for example, dtype, module in modules(op):
        if reason(module) is None and not any(map(communicates, module.ops())):
            assert not (why := problem(module)), f"{example} in {dtype}: {why}"


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        *((f"reshape %x {{shape=[3]}} : {dtype}[3]", RTX, f"is in {dtype}, which TensorRT")
          for dtype in ("f64", "i16", "u8", "u16", "u32", "u64", "f8e5m2")),
        ("add %x, %x : bf16[3]", OLD, "is in bf16, which needs sm_80; compile with --dtype f16, or "
         "give --target tensorrt-rtx-1.7/sm_89"),
        ("add %x, %x : bf16[3]", RTX, None),
    ],
)  # fmt: skip
def test_dtypes_that_a_target_lacks(text: str, target: Target, message: str | None) -> None:
    kind = text.partition(" : ")[2]
    module = parse_module(
        f"module @m {{ func @f(%x: {kind}) -> (y: {kind}) {{ %y = {text} return %y }} }}"
    )
    reasons = [op.reason for op in lowerings(target).unsupported(module)]
    assert not reasons if message is None else reasons[0].startswith(message)


@pytest.mark.parametrize(
    ("kind", "scales", "zero", "message"),
    [
        ("i8", "4, 1", True, "has zero points, and TensorRT's scales are symmetric"),
        ("u8", "4, 1", True, "is in u8, which TensorRT does not have between operations"),
        ("u4", "4, 2", False, "is in u4, which TensorRT does not have"),
        ("f8e4m3", "4, 1", False, "is in f8e4m3, which needs sm_89; give --target tensorrt-rtx-"),
        ("i8", "2, 3", False, "has blocks along several dimensions"),
    ],
)
def test_quantized_weights_that_tensorrt_lacks(
    kind: str, scales: str, zero: bool, message: str
) -> None:
    zeros = f'weight @z : {kind}[{scales}] = random("z", 1, 2.0)' if zero else ""
    module = parse_module(f"""module @m {{
      weight @w : {kind}[4, 6] = random("w", 1, 2.0)
      weight @s : f16[{scales}] = random("s", 1, 2.0)
      {zeros}
      func @forward() -> (f16[4, 6]) {{
        %y = dequantize @w, @s{", zero=@z" if zero else ""} : f16[4, 6]
        return %y }} }}""")
    why = reason(module) or ""
    assert why.startswith(message) and "expansion" not in why


def test_no_operation_is_widened() -> None:
    """Constants have the dtype of their operands too."""
    model = emitted(
        parse_module("""module @m {
      func @f(%x: bf16[3, 4], %w: bf16[5, 4]) -> (bf16[3, 5]) {
        %y = linear %x, %w : bf16[3, 5]
        %z = gelu %y : bf16[3, 5]
        %c = clip %z {low=-1.5, high=2.5} : bf16[3, 5]
        return %c } }""")
    )
    assert "Cast" not in [node.op_type for node in model.graph.node]
    assert {v.type.tensor_type.elem_type for v in model.graph.value_info} == {16}
    constants = [x for x in model.graph.initializer if x.data_type == 16]
    numbers = {float(np.frombuffer(c.raw_data, ml_dtypes.bfloat16)[0]) for c in constants}
    assert {-1.5, 2.5} <= numbers
