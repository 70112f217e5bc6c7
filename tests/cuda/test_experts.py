"""Mixtures of experts by tiles, with all threads of a block emulated, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

import irc
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Launch
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.regime import Target
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from tests.cuda.run_plan import HostProgram
from tests.ops.compare import Array, assert_close

TEXT = """module @m dims(T=1:8:400) {
  weight @gate : DTYPE[5, 72, 40] = random("gate", 1, 0.3)
  weight @up : DTYPE[5, 72, 40] = random("up", 2, 0.3)
  weight @down : DTYPE[5, 40, 72] = random("down", 3, 0.2)
  weight @inner : DTYPE[5, 72] = random("inner", 4, 2.0)
  weight @outer : DTYPE[5, 1, 40] = random("outer", 5, 2.0)
  func @forward(%x: DTYPE[T, 40], %chosen: i32[T, 2], %p: DTYPE[T, 2], %first: i32[])
      -> (y: DTYPE[T, 40]) {
    %b = unsqueeze @inner {dims=[1]} : DTYPE[5, 1, 72]
    %slots = moe_slots %chosen {experts=9, capacity=CAPACITY} : i32[T, 2]
    %y = experts %x, %chosen, %slots, %p, @up, @down, first=%first, OPTIONS : DTYPE[T, 40]
    return %y
  }
}"""
CLAMPED = 'act="quick_gelu", limit=3.0, offset=1.0'


def module_of(dtype: str = "bf16", capacity: int = 0, options: str = "gate=@gate {}") -> Module:
    """Five experts of nine, of which each token chooses two."""
    options = options.replace("{", f"{{capacity={capacity}, ").replace(", }", "}")
    text = TEXT.replace("DTYPE", dtype).replace("CAPACITY", str(capacity))
    return irc.parse(text.replace("OPTIONS", options))


def inputs_of(rng: np.random.Generator, tokens: int, dtype: str = "bf16") -> dict[str, Array]:
    """Random tokens, some with experts of other ranks or that there are not."""
    kind = numpy_dtype(dtype)
    chosen = [rng.permutation(np.arange(-1, 9))[:2] for _ in range(tokens)]
    return {
        "x": rng.standard_normal((tokens, 40)).astype(kind),
        "chosen": np.array(chosen, np.int32).reshape(tokens, 2),
        "p": rng.random((tokens, 2)).astype(kind),
        "first": np.array(rng.integers(0, 5), np.int32),
    }


ALONE = ["moe_sort", "moe_product", "moe_product", "moe_combine"]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(
    ("tokens", "capacity", "options"),
    [
        (1, 0, "gate=@gate {}"),
        (13, 0, "gate=@gate, gate_bias=%b {}"),
        (20, 0, f"gate=@gate, up_bias=%b {{{CLAMPED}}}"),
        (70, 0, 'up_bias=%b, down_bias=@outer {act="relu"}'),
        (70, 9, "gate=@gate {}"),
        (330, 0, "gate=@gate {}"),
    ],
)
def test_tiles_of_experts(
    dtype: str, tokens: int, capacity: int, options: str, rng: np.random.Generator
) -> None:
    """On GPUs with more and less shared memory."""
    small = Target(shared=int(rng.choice([99, 227])) << 10)
    module = module_of(dtype, capacity, options)
    program = HostProgram(module, fused=True, target=small)
    inputs = inputs_of(rng, tokens, dtype)
    steps = program.planners[0].plan({"T": tokens}).steps
    makers = [step.kernel.rpartition("_")[0] for step in steps if isinstance(step, Launch)]
    assert makers == ["moe_slots"] * bool(capacity) + ALONE
    assert_close(program.run(inputs)["y"], evaluate(module, inputs)["y"], "y", factor=3.0)


def test_experts_without_tokens_are_not_read(rng: np.random.Generator) -> None:
    """The weights of experts that no token chose may hold anything."""
    text = str(module_of()).replace("@up,", "%up,")
    module = irc.parse(text.replace("%first: i32[]", "%first: i32[], %up: bf16[5, 72, 40]"))
    inputs = inputs_of(rng, 12)
    inputs["up"] = (rng.standard_normal((5, 72, 40)) * 0.2).astype(numpy_dtype("bf16"))
    empty = int(rng.integers(0, 5))
    inputs["chosen"][inputs["chosen"] == empty + inputs["first"]] = -1
    want = evaluate(module, inputs)["y"]
    inputs["up"][empty] = np.nan
    assert_close(HostProgram(module, fused=True).run(inputs)["y"], want, "y", factor=3.0)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_the_kernels_compile_for_every_gpu(architecture: str) -> None:
    planner = Planner(module_of())
    for tokens in (1, 60, 330):
        for kernel in planner.plan({"T": tokens}).kernels.values():
            compile_kernel(kernel, architecture)
