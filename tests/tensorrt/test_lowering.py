"""Every example of every operation, as TensorRT's flavour of ONNX."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from irc.backends.tensorrt.lowering.table import lowerings, refusal
from irc.backends.tensorrt.target import Target
from irc.core import Module
from irc.text import parse_module
from tests.ops.example import Example, module_of
from tests.ops.examples import EXAMPLES
from tests.ops.test_onnx import solvable
from tests.tensorrt.emission import RTX, Network, emitted

# (operation, dtype of an example, or "" for any) -> the reason that users read
REFUSED = {
    ("scatter_elements", ""): "into what is there",
    ("matmul", "i32"): "multiplies i32, and TensorRT only floats",
    ("cast", ""): "is in u8, which TensorRT does not have",
    ("dequantize", ""): "",  # see test_quantized_weights_that_tensorrt_lacks
}
GLOBAL_VIEW = ("shard_slice", "sharded_topk", "cyclic_embedding")


def modules(op: str) -> Iterator[tuple[Example, str, Module]]:
    """The examples of an operation of one rank, or of a rank's view, in every dtype."""
    for example in EXAMPLES[op]:
        if (example.mesh and not example.local) or (op == "return" and not example.args):
            continue
        for dtype in example.dtypes:
            yield (
                example,
                dtype,
                module_of(example if solvable(example) else example.bound(), dtype),
            )


def reason(module: Module) -> str | None:
    """Why a module has no lowering."""
    gaps = lowerings(RTX).unsupported(module)
    return gaps[0].reason if gaps else None


@pytest.mark.parametrize("op", [op for op in EXAMPLES if op not in GLOBAL_VIEW])
def test_what_is_refused_is_known(op: str) -> None:
    for _, dtype, module in modules(op):
        found = reason(module)
        if found is not None:
            expected = REFUSED.get((op, dtype)) or REFUSED[op, ""]
            assert expected in found


@pytest.mark.needs_rtx
@pytest.mark.parametrize("op", [op for op in EXAMPLES if op not in GLOBAL_VIEW])
def test_every_lowering_builds(op: str) -> None:
    network = Network()
    for example, dtype, module in modules(op):
        if reason(module) is None:
            problem = network.problem(emitted(module), module)
            assert not problem, f"{example} in {dtype}: {problem}"


@pytest.mark.parametrize("dtype", ["f64", "i16", "u8", "f8e5m2"])
def test_dtypes_that_tensorrt_lacks_are_refused(dtype: str) -> None:
    module = parse_module(
        f"module @m {{\n  func @forward(%x: {dtype}[3]) -> ({dtype}[3]) {{\n"
        f"    %y = reshape %x {{shape=[3]}} : {dtype}[3]\n    return %y\n  }}\n}}"
    )
    assert reason(module) is not None


@pytest.mark.parametrize(
    ("kind", "scales", "zero", "message"),
    [
        ("i8", "4, 1", True, "has zero points, and TensorRT's scales are symmetric"),
        ("u8", "4, 1", True, "is in u8, which TensorRT does not have between operations"),
        ("u4", "4, 2", False, "is in u4, which TensorRT does not have"),
        ("f8e4m3", "4, 1", False, "is in f8e4m3, which needs sm_89; leave sm_80 out"),
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
    found = reason(module) or ""
    assert found.startswith(message) and "expansion" not in found


def test_turing_has_no_bf16() -> None:
    module = parse_module(
        "module @m {\n  func @forward(%x: bf16[3]) -> (bf16[3]) {\n"
        "    %y = add %x, %x : bf16[3]\n    return %y\n  }\n}"
    )
    old = Target.parse("tensorrt-rtx-1.7/sm_75+sm_89")
    gaps = lowerings(old).unsupported(module)
    assert (
        gaps
        and "is in bf16, which needs sm_80; compile with --dtype f16, or leave sm_75"
        in gaps[0].reason
    )
    assert refusal(gaps[0].op, old) is None  # a dtype says so, no choice of the table
    assert not lowerings(RTX).unsupported(module)


def test_nothing_is_widened() -> None:
    module = parse_module(
        "module @m {\n  func @forward(%x: bf16[3, 4], %w: bf16[5, 4]) -> (bf16[3, 5]) {\n"
        "    %y = linear %x, %w : bf16[3, 5]\n    %z = gelu %y : bf16[3, 5]\n    return %z\n  }\n}"
    )
    model = emitted(module)
    assert "Cast" not in [node.op_type for node in model.graph.node]
    assert {v.type.tensor_type.elem_type for v in model.graph.value_info} == {16}


def test_numbers_are_written_in_the_dtype_they_meet() -> None:
    module = parse_module(
        "module @m {\n  func @forward(%x: bf16[3, 4]) -> (bf16[3, 4]) {\n"
        "    %y = clip %x {low=-1.5, high=2.5} : bf16[3, 4]\n    return %y\n  }\n}"
    )
    constants = emitted(module).graph.initializer
    assert {each.data_type for each in constants} == {16}
    numbers = {float(np.frombuffer(c.raw_data, ml_dtypes.bfloat16)[0]) for c in constants}
    assert numbers == {-1.5, 2.5}
