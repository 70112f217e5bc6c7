"""Lowerings to ONNX on ONNX Runtime, in cases beyond the examples of the operations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from irc.errors import Error
from irc.ir.core import Module
from tests.backends.ranks import agrees, loaded
from tests.backends.text import module as text_module
from tests.fresh import fresh

RNG = fresh(11)


def module(args: str, body: str, results: str) -> Module:
    head = "local dims(B=1:2:4, S=1:3:9, T=1:3:9)"
    return text_module(args, results, body.replace("; ", "\n"), head)


def kinds(folder: Path) -> list[str]:
    """The operators of the model."""
    return [node.op_type for node in onnx.load(str(folder / "out" / "rank0.onnx")).graph.node]


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


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
    agrees(m, {"x": floats(2, 3, 16), "p": positions}, tmp_path)
    assert kinds(tmp_path).count("Cos") == 3


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("longest", [7, 8, 30])
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


@pytest.mark.parametrize("dims", ["", "local dims(B=0:1:4, S=1:3:9)"])
@pytest.mark.parametrize("rows", [0, 2])
def test_an_empty_batch(dims: str, rows: int, tmp_path: Path) -> None:
    m = text_module(
        "%x: f32[B, S, 8], %w: f32[6, 8]",
        "f32[B, S, 6], f32[B, 6], f32[B, 6, S]",
        "%1 = linear %x, %w : f32[B, S, 6]\n%2 = softmax %1 {dim=2} : f32[B, S, 6]\n"
        "%3 = reduce_mean %2 {dims=[1]} : f32[B, 6]\n"
        "%4 = transpose %1 {order=[0, 2, 1]} : f32[B, 6, S]\n"
        "%5 = group_norm %4 {groups=3} : f32[B, 6, S]\nreturn %2, %3, %5",
        dims or "local",
    )
    agrees(m, {"x": floats(rows, 3, 8), "w": floats(6, 8)}, tmp_path)


def test_an_empty_batch_that_the_runtime_refuses(tmp_path: Path) -> None:
    m = module(
        "%q: f32[B, S, 16]",
        "%1 = attention %q, %q, %q {head_dim=4} : f32[B, S, 16]; return %1",
        "f32[B, S, 16]",
    )
    with pytest.raises(Error, match=r"Attention.*; q is empty, .*; give at least one row"):
        loaded(m, tmp_path).run({"q": floats(0, 3, 16)})


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
    agrees(m, inputs, tmp_path)
    assert [kinds(tmp_path).count(kind) for kind in ("Greater", "Less")] == [2, 2]


EIGHT_BITS = (
    "%x: f32[S]",
    '%1 = cast %x {dtype="f8e4m3"} : f8e4m3[S]; %2 = cast %1 {dtype="f32"} : f32[S]; '
    '%3 = cast %x {dtype="f8e5m2"} : f8e5m2[S]; %4 = cast %3 {dtype="f32"} : f32[S]; '
    "return %2, %4",
    "f32[S], f32[S]",
)

PLACES: dict[str, np.ndarray] = {
    "p": np.array([2, 6], np.int32),
    "n": np.array([4, 7], np.int32),
    "m": RNG.random((2, 1, 1, 9)) < 0.7,
}
# (arguments, operations, results, inputs)
SINGLE: dict[str, tuple[str, str, str, dict[str, np.ndarray]]] = {
    "sizes solved from sums and multiples": (
        "%x: f32[2*S, 3], %y: f32[T + 2]",
        "%a = full {value=2.0, shape=[S, T]} : f32[S, T]; "
        "%b = reshape %x {shape=[S, 2, 3]} : f32[S, 2, 3]; "
        "%c = full {value=1.0, shape=[S*T + 1]} : f32[S*T + 1]; "
        "%d = iota {size=3*T} : i32[3*T]; return %a, %b, %c, %d",
        "f32[S, T], f32[S, 2, 3], f32[S*T + 1], i32[3*T]",
        {"x": floats(8, 3), "y": floats(7)},
    ),
    "small numbers in eight bits": (*EIGHT_BITS, {"x": np.array([0.3, -1.7, 0.001], np.float32)}),
    "large numbers in eight bits": (
        *EIGHT_BITS,
        {"x": np.array([447.0, 1e3, 1e6, -1e6], np.float32)},
    ),
    "division with signs and zeros": (
        "%x: f32[S], %y: f32[S], %a: i32[S], %b: i32[S]",
        "%1 = floor_div %x, %y : f32[S]; %2 = mod %x, %y : f32[S]; "
        "%3 = floor_div %a, %b : i32[S]; %4 = mod %a, %b : i32[S]; return %1, %2, %3, %4",
        "f32[S], f32[S], i32[S], i32[S]",
        {
            "x": np.array([7, -7, 7, -7, 1, -1, 0, 6], np.float32),
            "y": np.array([3, 3, -3, -3, 0, 0, 5, -3], np.float32),
            "a": np.array([7, -7, 7, -7, 1, -1, 0, 6], np.int32),
            "b": np.array([3, 3, -3, -3, 4, 4, 5, -3], np.int32),
        },
    ),
    "norm weights of another dtype": (
        "%x: f64[S, 4], %w: f32[4]",
        "%1 = rms_norm %x, %w : f64[S, 4]; %2 = layer_norm %1, weight=%w, bias=%w : f64[S, 4]; "
        "return %2",
        "f64[S, 4]",
        {"x": floats(3, 4).astype(np.float64), "w": floats(4)},
    ),
    "out-of-range indices give zeros": (
        "%i: i32[B, S], %t: f32[5, 4]",
        "%1 = embedding %i, %t : f32[B, S, 4]; return %1",
        "f32[B, S, 4]",
        {"i": np.array([[0, 4, 5], [-1, 2, 2**31 - 1]], np.int32), "t": floats(5, 4)},
    ),
    "empty and single sizes": (
        "%x: f32[S, 0], %y: f32[S, 3]",
        "%1 = reshape %x {shape=[0, S]} : f32[0, S]; %2 = concat %x, %y {dim=1} : f32[S, 3]; "
        "%3 = split %2 {dim=1, sizes=[3]} : f32[S, 3]; return %1, %3",
        "f32[0, S], f32[S, 3]",
        {"x": floats(2, 0), "y": floats(2, 3)},
    ),
    **{
        f"attention over a cache, {attributes}{operands}, {tokens} tokens": (
            "%q: f32[B, S, 16], %k: f32[B, 2, T, 4], %v: f32[B, 2, T, 4], %p: i32[B], %n: i32[B], "
            "%m: bool[B, 1, 1, T]",
            f"%1 = attention %q, %k, %v, {operands} {{head_dim=4, {attributes}}} : f32[B, S, 16]; "
            "return %1",
            "f32[B, S, 16]",
            {"q": floats(2, tokens, 16), "k": floats(2, 2, 9, 4), "v": floats(2, 2, 9, 4)} | PLACES,
        )
        for attributes in ("causal", "causal, window=3", "window=3")
        for operands in ("past=%p", "past=%p, lengths=%n", "mask=%m, past=%p")
        for tokens in (1, 3)
    },
    **{
        f"attention over projections, {scores}, then {op}": (
            "%x: f32[B, S, 8], %w: f32[12, 8], %t: bool[B, S, 1], %c: f32[B, 1, 1, S]",
            f"%q = linear %x, %w : f32[B, S, 12]; %2 = attention %q, %q, %q{scores} : f32[B, S, 12]"
            f"; {names} = {op} : {types}; return %2, {names}",
            f"f32[B, S, 12], {types}",
            {"x": floats(2, 5, 8), "w": floats(12, 8), "c": floats(2, 1, 1, 5)}
            | {"t": floats(2, 5, 1) > 0},
        )
        for scores in (" {head_dim=4, window=2}", ", bias=%c {head_dim=4}")
        for names, op, types in (
            ("%3", "where %t, %2, %q", "f32[B, S, 12]"),
            ("%3, %4", "split %2 {sizes=[5, 7], dim=2}", "f32[B, S, 5], f32[B, S, 7]"),
        )
    },
    "numbers beyond a dtype are infinite": (
        "",
        "%1 = full {value=1e300} : f32[]; %2 = full {value=-1e300, shape=[2]} : f32[2]; "
        "%3 = constant {values=[1e300, 3.0], shape=[2]} : f32[2]; return %1, %2, %3",
        "f32[], f32[2], f32[2]",
        {},
    ),
}


@pytest.mark.parametrize("case", SINGLE)
def test_a_single_operation_agrees(case: str, tmp_path: Path) -> None:
    args, body, results, inputs = SINGLE[case]
    agrees(module(args, body, results), inputs, tmp_path)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(
    "line",
    [
        "maximum %x, %y : i64[B, 5]",
        "minimum %x, %y : i64[B, 5]",
        "clip %x {low=-2147483649, high=2147483650} : i64[B, 5]",
        "clip %x {low=4294967296} : i64[B, 5]",
        "reduce_max %x {dims=[1]} : i64[B]",
        "reduce_min %x {dims=[0, 1], keep} : i64[1, 1]",
        "reduce_max %x {dims=[-2]} : i64[5]",
    ],
)
def test_all_64_bits_of_integers_count(line: str, rows: int, tmp_path: Path) -> None:
    """Some kernels of ONNX Runtime read only the low 32 bits."""
    result = line.rpartition(" : ")[2]
    m = module("%x: i64[B, 5], %y: i64[B, 5]", f"%r = {line}; return %r", result)
    near = np.array([-(2**32), -(2**31), 0, 2**31, 2**32, 2**40, -(2**62)])
    drawn = [RNG.choice(near, (rows, 5)) + RNG.integers(-2, 3, (rows, 5)) for _ in "xy"]
    agrees(m, dict(zip("xy", drawn, strict=True)), tmp_path)


def test_a_cast_to_powers_of_two_is_rounded(tmp_path: Path) -> None:
    """f8e8m0 has powers of two only: the nearest, halves up."""
    powers = np.ldexp(np.float32(1), np.arange(-126, 126))
    half = powers * np.float32(1.5)
    below = np.nextafter(half, np.float32(0))
    x = np.concatenate([powers, half, below])
    m = module(
        f"%x: f32[{len(x)}]",
        f'%1 = cast %x {{dtype="f8e8m0"}} : f8e8m0[{len(x)}]; '
        f'%2 = cast %1 {{dtype="f32"}} : f32[{len(x)}]; return %2',
        f"f32[{len(x)}]",
    )
    (found,) = loaded(m, tmp_path).run({"x": x}).values()
    np.testing.assert_array_equal(found, np.concatenate([powers, powers * 2, powers]))


@pytest.mark.parametrize("op", ["reduce_sum", "reduce_prod"])
@pytest.mark.parametrize("kind", ["u8", "i32", "i64"])
@pytest.mark.parametrize(("dims", "keep"), [("[0]", ""), ("[-1]", ", keep"), ("[1, 0]", "")])
def test_large_integers_are_exact(op: str, dims: str, keep: str, kind: str, tmp_path: Path) -> None:
    """ONNX Runtime's ReduceSum of i64 rounds to 53 bits, that of i32 stops at the largest. Also of
    none, whose sum is 0 and product 1."""
    shape = {"[0]": "S", "[-1]": "B, 1", "[1, 0]": ""}[dims]
    body = f"%1 = {op} %x {{dims={dims}{keep}}} : {kind}[{shape}]; return %1"
    m = module(f"%x: {kind}[B, S]", body, f"{kind}[{shape}]")
    for size in (7, 1, 0):
        x = RNG.integers(1 << 60, 1 << 62, (2, size)) | 1
        x = x >> {"u8": 55, "i32": 31, "i64": 0}[kind] if op == "reduce_sum" else x
        agrees(m, {"x": x.astype({"u8": "B", "i32": "i", "i64": "q"}[kind])}, tmp_path)
