"""`fuse-linear-epilogue` on random products, over ranks too; the steps of the expansion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.ops import FusedLinear, Linear
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import VerifyEach, WhyNot
from irc.rewrite import replace
from tests.fresh import fresh, sprinkled
from tests.sharded.checking import spread

assert irc.passes
K, N = 12, 7
PARTS = ("norm", "gate", "bias", "act", "residual")


def subsets() -> Iterator[tuple[str, ...]]:
    """Every choice of parts around a linear that the pass joins."""
    for words in chain.from_iterable(combinations(PARTS, n) for n in range(1, len(PARTS) + 1)):
        if not {"gate", "act"} <= set(words):
            yield words


def module_of(words: tuple[str, ...], kind: str, down: bool = False) -> Module:
    """A product with these parts, in simple operations; of a hidden layer where `down`."""
    x, weights = "%x", f'weight @w : {kind}[{N}, {K}] = random("w", 1, 0.5)\n'
    for name, shape in {"g": [N, K], "up": [K, K], "n": [K], "b": [N], "gb": [N]}.items():
        weights += f'weight @{name} : {kind}{shape} = random("{name}", 1, 1.0)\n'
    h, y = f"{kind}[B, {K}]", f"{kind}[B, {N}]"
    lines: list[str] = []
    if down:
        lines += [f"%u = linear %x, @up : {h}", f"%e = silu %u : {h}"]
        x = "%e"
    if "norm" in words:
        lines.append(f"%h = rms_norm {x}, @n {{eps=1e-05, offset=1.0}} : {h}")
        x = "%h"
    bias = "bias" in words
    lines.append(f"%a = linear {x}, @w{', bias=@b' * bias} : {y}")
    if "gate" in words:
        lines += [f"%c = linear {x}, @g{', bias=@gb' * bias} : {y}", f"%d = gelu %c : {y}"]
        lines.append(f"%p = mul %d, %a : {y}")
    elif "act" in words:
        lines.append(f"%p = relu %a : {y}")
    else:
        lines[-1] = lines[-1].replace("%a", "%p", 1)
    result = "%p"
    if "residual" in words:
        lines.append(f"%s = add %r, %p : {y}")
        result = "%s"
    body = "\n".join([*lines, f"return {result}"])
    return irc.parse(
        f"module @m dims(B=0:3:9) {{\n{weights}"
        f"func @forward(%x: {h}, %r: {y}) -> (y: {y}) {{\n{body}\n}} }}"
    )


def inputs_of(module: Module, rows: int) -> dict[str, np.ndarray]:
    """Random inputs, with NaN and infinities among them."""
    rng, args = fresh(7), module.main.args
    shapes = {str(arg.name): (rows, arg.type.shape[1]) for arg in args}
    numbers = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    kind = numpy_dtype(args[0].type.dtype)
    return {name: sprinkled(array.astype(kind), rng) for name, array in numbers.items()}


def bits(results: Mapping[str, Any]) -> bytes:
    """The bits of the only result, all NaN alike."""
    (array,) = results.values()
    return np.where(np.isnan(array), np.full_like(array, np.nan), array).tobytes()


@pytest.mark.parametrize("words", [*subsets()], ids=" ".join)
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_the_parts_become_one_operation(words: tuple[str, ...], kind: str) -> None:
    """With the same bits, before and after every step of its expansion."""
    module = module_of(words, kind)
    given = [inputs_of(module, rows) for rows in (0, 1, 5)]
    wanted = [bits(evaluate(module, inputs)) for inputs in given]
    run_pipeline(module, "fuse-gated-mlp, fuse-linear-epilogue, dce", [VerifyEach()])
    (op, _) = module.main
    assert isinstance(op, FusedLinear) == bool({*words} & {"norm", "act", "residual"})
    both = ["gate_bias"] if {"gate", "bias"} <= {*words} else []
    if isinstance(op, FusedLinear):
        assert {*op.present} == {*words, *both} - {"act"}
        assert bool(op.act) == bool({"gate", "act"} & {*words})
    steps = 0
    while True:
        assert [bits(evaluate(module, inputs)) for inputs in given] == wanted
        fused = [op for op in module.main if isinstance(op, FusedLinear)]
        if not fused:
            break
        replace(fused[0], fused[0].expand())
        steps += 1
    assert steps == len({*words} & {"norm", "act", "residual"})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("words", [(), ("bias",), ("residual",), ("norm", "gate", "residual")])
def test_sums_over_ranks(words: tuple[str, ...], ranks: int) -> None:
    module = module_of(words, "f32", down=True)
    rng = fresh(8)
    inputs = {
        "x": rng.standard_normal((3, K)).astype(np.float32),
        "r": rng.standard_normal((3, N)).astype(np.float32),
    }
    local = "fuse-gated-mlp{merged=false}, fuse-linear-epilogue"
    spread(module, inputs, f"tp={ranks}", after=["localize", local, "expand"])


def test_the_global_view_of_a_sum_over_ranks() -> None:
    module = irc.parse("""module @m mesh(tp=3) dims(B=0:3:9) {
      weight @w : f32[7, 12@tp] = random("w", 1, 0.5)
      weight @n : f32[7] = random("n", 1, 0.5)
      func @forward(%x: f32[B, 12], %r: f32[B, 7]) -> (f32[B, 7], f32[B, 7]) {
        %e = shard_slice %x {axis="tp", dim=1} : f32[B, 12@tp]
        %s = fused_linear %e, @w, residual=%r {act="", axis="tp"} : f32[B, 7]
        %t = fused_linear %e, @w {axis="tp"} : f32[B, 7]
        return %s, %t
      } }""")
    rng = fresh(9)
    inputs = {n: rng.standard_normal((4, k)).astype(np.float32) for n, k in (("x", 12), ("r", 7))}
    wanted = evaluate(module, inputs)
    run_pipeline(module, "localize", [VerifyEach()])
    for key, array in evaluate(module, inputs).items():
        np.testing.assert_allclose(array, np.broadcast_to(wanted[key], array.shape), rtol=1e-5)


REASONS = {
    "exp reads the result of rms_norm, too": """
        %h = rms_norm %x, @n : f32[B, 8] %a = linear %h, @w : f32[B, 8] %e = exp %h : f32[B, 8]
        %y = mul %a, %e : f32[B, 8]""",
    "the sum is of f32[1, 8] and f32[B, 8], not of two equal types": """
        %o = full {value=1.0, shape=[1, 8], dtype="f32"} : f32[1, 8]
        %a = linear %o, @w : f32[1, 8] %y = add %a, %x : f32[B, 8]""",
    "add is not the only use of the result": """
        %a = linear %x, @w : f32[B, 8] %s = add %a, %x : f32[B, 8] %y = mul %a, %s : f32[B, 8]""",
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_not(reason: str) -> None:
    module = irc.parse(f"""module @m dims(B=1:2:4) {{
      weight @n : f32[8] = random("n", 1, 0.5)
      weight @w : f32[8, 8] = random("w", 1, 0.5)
      func @forward(%x: f32[B, 8]) -> (f32[B, 8]) {{ {REASONS[reason]} return %y }} }}""")
    why, before = WhyNot("fuse-linear-epilogue"), str(module)
    run_pipeline(module, "fuse-linear-epilogue", [why])
    assert reason in str(why) and any(isinstance(op, Linear) for op in module.main)
    assert str(module) == before
