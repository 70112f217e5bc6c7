"""What single lowerings must get right beyond the examples of the operations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from irc.backends.onnx import backend
from irc.backends.reference import evaluate
from irc.core import Module
from irc.text import parse_module
from tests.fresh import fresh

RNG = fresh(11)


def module(args: str, body: str, results: str) -> Module:
    lines = "\n    ".join(body.split("; "))
    return parse_module(
        f"module @m dims(B=1:2:4, S=1:3:9, T=1:3:9) {{\n"
        f"  func @forward({args}) -> ({results}) {{\n    {lines}\n  }}\n}}"
    )


def agrees(m: Module, inputs: dict[str, np.ndarray], folder: Path) -> onnx.ModelProto:
    """Compares with the reference; returns the model."""
    facts = backend.emit(m, folder, {"check": True})
    found = backend.load(folder, facts, threads=1).run(inputs)
    for name, want in evaluate(m, inputs).items():
        assert found[name].shape == want.shape
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-5)
    return onnx.load(str(folder / "rank0.onnx"))


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_sizes_are_solved_from_sums_and_multiples(tmp_path: Path) -> None:
    m = module(
        "%x: f32[2*S, 3], %y: f32[T + 2]",
        "%a = full {value=2.0, shape=[S, T]} : f32[S, T]; "
        "%b = reshape %x {shape=[S, 2, 3]} : f32[S, 2, 3]; "
        "%c = full {value=1.0, shape=[S*T + 1]} : f32[S*T + 1]; "
        "%d = iota {size=3*T} : i32[3*T]; return %a, %b, %c, %d",
        "f32[S, T], f32[S, 2, 3], f32[S*T + 1], i32[3*T]",
    )
    agrees(m, {"x": floats(8, 3), "y": floats(7)}, tmp_path)


def test_angles_are_shared_where_they_are_equal(tmp_path: Path) -> None:
    m = module(
        "%x: f32[B, S, 16], %p: i32[B, S]",
        "%1 = rope %x, %p {head_dim=8} : f32[B, S, 16]; "
        "%2 = rope %1, %p {head_dim=8, theta=100.0} : f32[B, S, 16]; "
        "%3 = rope %2, %p {head_dim=8, interleaved} : f32[B, S, 16]; "
        "%4 = rope %3, %p {head_dim=8, rotary_dim=4} : f32[B, S, 16]; return %4",
        "f32[B, S, 16]",
    )
    positions = RNG.integers(0, 50, (2, 3)).astype(np.int32)
    model = agrees(m, {"x": floats(2, 3, 16), "p": positions}, tmp_path)
    assert [node.op_type for node in model.graph.node].count("Cos") == 3


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("longest", [3, 7, 8, 30])
def test_frequencies_follow_the_length(kind: str, longest: int, tmp_path: Path) -> None:
    extra = {
        "dynamic": "factor=2.0, original_positions=8",
        "longrope": "factor=4.0, original_positions=8, short_factors=[1.0, 1.5], "
        "long_factors=[2.0, 9.0]",
    }[kind]
    m = module(
        "%x: f32[B, S, 8], %p: i32[B, S]",
        f'%1 = rope %x, %p {{head_dim=4, kind="{kind}", {extra}}} : f32[B, S, 8]; return %1',
        "f32[B, S, 8]",
    )
    positions = np.array([[0, 1, 2], [0, 1, longest]], np.int32)
    agrees(m, {"x": floats(2, 3, 8), "p": positions}, tmp_path)


@pytest.mark.parametrize(("tokens", "keys"), [(3, 5), (3, 3), (5, 3), (1, 4)])
@pytest.mark.parametrize("attributes", ["causal", "causal, window=2", "window=2", "softcap=1.5"])
@pytest.mark.parametrize("operands", ["", ", lengths=%n", ", mask=%m", ", bias=%c, mask=%m"])
def test_attention_without_a_cache(
    tokens: int, keys: int, attributes: str, operands: str, tmp_path: Path
) -> None:
    m = module(
        "%q: f32[B, S, 16], %k: f32[B, T, 8], %v: f32[B, T, 6], %n: i32[B], "
        "%m: bool[1, 1, S, T], %c: f32[B, 4, 1, T]",
        f"%1 = attention %q, %k, %v{operands} {{head_dim=4, {attributes}}} : f32[B, S, 12]; "
        "return %1",
        "f32[B, S, 12]",
    )
    mask = RNG.random((1, 1, tokens, keys)) < 0.7
    mask[0, 0, 0] = False  # a query that sees nothing gives zeros
    inputs = {
        "q": floats(2, tokens, 16),
        "k": floats(2, keys, 8),
        "v": floats(2, keys, 6),
        "n": np.array([1, keys], np.int32),
        "m": mask,
        "c": floats(2, 4, 1, keys),
    }
    agrees(m, inputs, tmp_path)


@pytest.mark.parametrize("attributes", ["causal", "causal, window=3", "window=3"])
@pytest.mark.parametrize("operands", ["", ", lengths=%n", ", mask=%m"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_attention_over_a_cache(
    attributes: str, operands: str, tokens: int, tmp_path: Path
) -> None:
    named = f"past=%p{operands}" if "mask" not in operands else "mask=%m, past=%p"
    m = module(
        "%q: f32[B, S, 16], %k: f32[B, 2, T, 4], %v: f32[B, 2, T, 4], %p: i32[B], %n: i32[B], "
        "%m: bool[B, 1, 1, T]",
        f"%1 = attention %q, %k, %v, {named} {{head_dim=4, {attributes}}} : f32[B, S, 16]; "
        "return %1",
        "f32[B, S, 16]",
    )
    inputs = {
        "q": floats(2, tokens, 16),
        "k": floats(2, 2, 9, 4),
        "v": floats(2, 2, 9, 4),
        "p": np.array([2, 6], np.int32),
        "n": np.array([4, 7], np.int32),
        "m": RNG.random((2, 1, 1, 9)) < 0.7,
    }
    agrees(m, inputs, tmp_path)


def test_masks_are_shared_where_they_are_equal(tmp_path: Path) -> None:
    seen = "{head_dim=4, causal, window=3} : f32[B, S, 8]"
    filled = "{head_dim=4, causal} : f32[B, S, 8]"
    m = module(
        "%q: f32[B, S, 8], %k: f32[B, 2, T, 4], %p: i32[B], %n: i32[B]",
        f"%1 = attention %q, %k, %k, past=%p {seen}; %2 = attention %1, %k, %k, past=%n {seen}; "
        f"%3 = attention %2, %k, %k, past=%p {seen}; "
        f"%4 = attention %3, %k, %k, past=%p, lengths=%p {filled}; "
        f"%5 = attention %4, %k, %k, past=%p, lengths=%n {filled}; return %5",
        "f32[B, S, 8]",
    )
    past = np.array([2, 6], np.int32)
    inputs = {"q": floats(2, 3, 8), "k": floats(2, 2, 9, 4), "p": past, "n": past[::-1].copy()}
    model = agrees(m, inputs, tmp_path)
    kinds = [node.op_type for node in model.graph.node]
    assert (kinds.count("Greater"), kinds.count("Less")) == (2, 2)


def test_eight_bit_floats_are_rounded_for_real(tmp_path: Path) -> None:
    m = module(
        "%x: f32[S]",
        '%1 = cast %x {dtype="f8e4m3"} : f8e4m3[S]; %2 = cast %1 {dtype="f32"} : f32[S]; '
        '%3 = cast %x {dtype="f8e5m2"} : f8e5m2[S]; %4 = cast %3 {dtype="f32"} : f32[S]; '
        "return %2, %4",
        "f32[S], f32[S]",
    )
    agrees(m, {"x": np.array([0.3, -1.7, 447.0, 1e3, 1e6, -1e6, 0.001], np.float32)}, tmp_path)


def test_division_with_signs_and_zeros(tmp_path: Path) -> None:
    m = module(
        "%x: f32[S], %y: f32[S], %a: i32[S], %b: i32[S]",
        "%1 = floor_div %x, %y : f32[S]; %2 = mod %x, %y : f32[S]; "
        "%3 = floor_div %a, %b : i32[S]; %4 = mod %a, %b : i32[S]; return %1, %2, %3, %4",
        "f32[S], f32[S], i32[S], i32[S]",
    )
    x = np.array([7, -7, 7, -7, 1, -1, 0, 6], np.float32)
    y = np.array([3, 3, -3, -3, 0, 0, 5, -3], np.float32)
    a, b = x.astype(np.int32), np.where(y == 0, 4, y).astype(np.int32)
    agrees(m, {"x": x, "y": y, "a": a, "b": b}, tmp_path)


def test_norm_weights_of_another_dtype(tmp_path: Path) -> None:
    m = module(
        "%x: f64[S, 4], %w: f32[4]",
        "%1 = rms_norm %x, %w : f64[S, 4]; %2 = layer_norm %1, weight=%w, bias=%w : f64[S, 4]; "
        "return %2",
        "f64[S, 4]",
    )
    agrees(m, {"x": floats(3, 4).astype(np.float64), "w": floats(4)}, tmp_path)


def test_ids_outside_the_table_give_zeros(tmp_path: Path) -> None:
    m = module(
        "%i: i32[B, S], %t: f32[5, 4]",
        "%1 = embedding %i, %t : f32[B, S, 4]; return %1",
        "f32[B, S, 4]",
    )
    ids = np.array([[0, 4, 5], [-1, 2, 2**31 - 1]], np.int32)
    agrees(m, {"i": ids, "t": floats(5, 4)}, tmp_path)


def test_empty_and_single_sizes(tmp_path: Path) -> None:
    m = module(
        "%x: f32[S, 0], %y: f32[S, 3]",
        "%1 = reshape %x {shape=[0, S]} : f32[0, S]; "
        "%2 = concat %x, %y {dim=1} : f32[S, 3]; "
        "%3 = split %2 {dim=1, sizes=[3]} : f32[S, 3]; return %1, %3",
        "f32[0, S], f32[S, 3]",
    )
    agrees(m, {"x": floats(2, 0), "y": floats(2, 3)}, tmp_path)


def test_numbers_beyond_a_dtype_are_infinite(tmp_path: Path) -> None:
    m = module(
        "",
        "%1 = full {value=1e300} : f32[]; %2 = full {value=-1e300, shape=[2]} : f32[2]; "
        "%3 = constant {values=[1e300, 3.0], shape=[2]} : f32[2]; return %1, %2, %3",
        "f32[], f32[2], f32[2]",
    )
    agrees(m, {}, tmp_path)
