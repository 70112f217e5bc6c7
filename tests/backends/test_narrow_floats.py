"""Dtypes narrower than f32 through artifacts: casts that round, and the dtypes of all ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irc
import irc.passes
from irc.backends.base import Program
from irc.backends.reference.program import ReferenceProgram
from irc.backends.tensorrt.backend import TensorRTBackend
from irc.frontends import Module, Tensor, random_weights
from irc.frontends import functional as F
from irc.frontends.layers import Linear, RmsNorm
from irc.ir.dtypes import DTYPES, dtype, is_float, numpy_dtype, widened
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.backends.ranks import loaded
from tests.cuda.fake_cuda import World
from tests.fresh import fresh
from tests.ops.edges import fits, numbers
from tests.tensorrt.emission import emitted

assert irc.passes
Array = np.ndarray[Any, Any]
NARROW = [name for name, kind in DTYPES.items() if kind.wider]


def same(got: Array, want: Array) -> Array:
    """Which numbers are the same, with the sign of zero, or both NaN."""
    equal = (got == want) & (np.signbit(got) == np.signbit(want))
    return equal | (np.isnan(got) & np.isnan(want))


@pytest.mark.parametrize("old", DTYPES)
@np.errstate(all="ignore")
def test_casts_round_where_they_are_written(old: str, tmp_path: Path) -> None:
    """Cast and widened again, so that no result is rounded after the graph."""
    x = numbers(old, fresh())
    lines = [
        f'%{n} = cast %x {{dtype="{n}"}} : {n}[N] %{n}_w = cast %{n} {{dtype="f64"}} : f64[N]'
        for n in NARROW
    ]
    module = parse_module(
        f"module @m {{ func @forward(%x: {old}[N]) -> ({', '.join(f'{n}: f64[N]' for n in NARROW)})"
        f" {{ {' '.join(lines)} return {', '.join(f'%{n}_w' for n in NARROW)} }} }}"
    )
    found = loaded(module, tmp_path).run({"x": x})
    for new in NARROW:
        # ONNX Runtime converts f64 to f16 through f32
        given = x.astype(np.float32) if (old, new) == ("f64", "f16") else widened(x)
        want = given.astype(numpy_dtype(new)).astype(np.float64)
        right = same(found[new], want)
        if new == "f8e8m0":  # ml_dtypes rounds numbers below the second power up
            tiny = (x.astype(np.float64) > 2.0**-127) & (x.astype(np.float64) < 2.0**-126)
            right |= tiny & np.isin(found[new], (2.0**-127, 2.0**-126))
        if is_float(old) and not is_float(new):
            right |= ~fits(x.astype(np.float64), new)
        if new == "f4e2m1":
            right |= np.isnan(x.astype(np.float64)) & (found[new] == 0)
        assert right.all(), f"{old} to {new}: {x[~right][:5]} is {found[new][~right][:5]}"


def twice(kind: str, mesh: str = "") -> irc.Module:
    """A module that returns its argument, the double of it, and itself in a wider dtype."""
    shape, wide = f"[2*B{'@dp' if mesh else ''}, 4]", dtype(kind).wider
    results = f"two: {kind}{shape}, same: {kind}{shape}, wide: {wide}{shape}"
    module = parse_module(f"""module @m {mesh} dims(B=1:2:9) {{
      func @forward(%x: {kind}{shape}) -> ({results}) {{
        %two = add %x, %x : {kind}{shape}
        %wide = cast %x {{dtype="{wide}"}} : {wide}{shape}
        return %two, %x, %wide }} }}""")
    run_pipeline(module, "localize" if mesh else "canonicalize")
    return module


@pytest.mark.parametrize("kind", NARROW)
@np.errstate(all="ignore")
def test_ports_have_the_dtypes_of_the_module(kind: str, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    programs: dict[str, Program] = {
        "reference": ReferenceProgram(twice(kind)),
        "onnx": loaded(twice(kind), tmp_path),
        "two ranks": loaded(twice(kind, "mesh(dp=2)"), tmp_path / "ranks"),
        "cuda": World(twice(kind), tmp_path).programs[0],
    }
    # not the least f8e8m0: ml_dtypes rounds its neighbours up
    x = fresh(1).choice(numbers(kind, fresh(2))[1:], (6, 4))
    wide = widened(x)
    wanted = {"two": (wide + wide).astype(x.dtype), "same": x, "wide": wide}
    for name, program in programs.items():
        assert [port.dtype for port in (*program.ports.inputs, *program.ports.outputs)] == [
            *(kind, kind, kind, dtype(kind).wider)
        ]
        # an array of numpy's own dtypes is taken too, and rounded
        inexact = np.nextafter(wide, np.copysign(np.inf, wide)) if is_float(kind) else wide
        for given in [x] if name == "reference" else [x, wide, inexact.astype(wide.dtype)]:
            found = program.run({"x": given})
            assert list(found) == list(wanted)
            for result, want in wanted.items():
                assert found[result].dtype == want.dtype, f"{result} of {name}"
                assert same(*(widened(each) for each in (found[result], want))).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_tensorrt_gets_the_dtypes_of_the_module(kind: str) -> None:
    module = parse_module(f"""module @m {{ func @forward(%x: f32[2, 4], %h: {kind}[2, 4])
      -> (y: f32[2, 4], z: {kind}[2, 4]) {{
        %narrow = cast %x {{dtype="{kind}"}} : {kind}[2, 4]
        %wide = cast %narrow {{dtype="f32"}} : f32[2, 4]
        %z = add %narrow, %h : {kind}[2, 4]
        return %wide, %z }} }}""")
    run_pipeline(module, TensorRTBackend.default_pipeline)
    graph = emitted(module).graph
    kinds = [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
    assert kinds == [DTYPES[name].onnx for name in ("f32", kind, "f32", kind)]
    assert [node.attribute[0].i for node in graph.node if node.op_type == "Cast"] == [
        DTYPES[name].onnx for name in (kind, "f32")
    ]


class Written(Module):
    """What a user writes: casts, numbers of a narrow dtype, and layers in bf16."""

    def __init__(self) -> None:
        self.norm = RmsNorm(4, dtype="bf16")
        self.linear = Linear(4, 4, dtype="bf16")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        half, narrow = x.cast("f16"), x.cast("bf16")
        scale = F.full(0.5, shape=(1, 1), dtype="bf16")
        codes = F.quantize(narrow, scale, dtype="f8e4m3")
        return {
            "half": half.cast("f32"),
            "again": half.cast("bf16").cast("f16").cast("f64").cast("f32"),
            "double": (half * 2.0).cast("f32"),
            "tenth": F.full(0.1, shape=(4,), dtype="bf16").cast("f32"),
            "many": F.cast(F.iota(4099), "f16").cast("f32"),
            "layers": self.linear(self.norm(narrow)) + F.dequantize(codes, scale),
        }


def test_what_users_write_is_rounded_and_layers_are_not(tmp_path: Path) -> None:
    module = irc.trace(Written(), {"x": irc.Spec("f32", ("B", 4))}, {"B": (1, 2, 4)})
    random_weights(module, 1)
    x = np.array([[0.12573022, 1e5, 40000, -0.0], [65519.9, 65520, np.nan, 3e-8]], np.float32)
    wanted = irc.evaluate(module, {"x": x})
    artifact = irc.compile(module, tmp_path / "out")
    found = artifact.run({"x": x})
    for name in ("half", "again", "tenth", "many"):
        assert same(found[name], wanted[name]).all(), name
    # arithmetic between casts is in f32: the double of 40000 is no f16, as on a GPU
    assert found["double"][0, 2] == 80000 and wanted["double"][0, 2] == np.inf
    graph = onnx.load(artifact.folder / "rank0.onnx", load_external_data=False).graph
    casts = [node for node in graph.node if node.op_type == "Cast"]
    assert sum(node.attribute[0].i == DTYPES["bf16"].onnx for node in casts) == 2
