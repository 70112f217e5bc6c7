"""Mixtures of experts by tiles, with all threads of a block emulated, against the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import irc
from benchmarks.cubin import facts_of
from irc.backends.cuda.execute.compile import architecture_of, compile_kernel
from irc.backends.cuda.execute.load import program_of
from irc.backends.cuda.plan import Launch
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.regime import Target
from irc.backends.cuda.tuning import device_of
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from tests.cuda.run_plan import HostProgram
from tests.gpu_ranks import needs_gpus
from tests.ops.compare import Array, assert_close

TEXT = """module @m dims(T=1:8:1600) {
  weight @gate : DTYPE[5, INNER, WIDTH] = random("gate", 1, 0.3)
  weight @up : DTYPE[5, INNER, WIDTH] = random("up", 2, 0.3)
  weight @down : DTYPE[5, WIDTH, INNER] = random("down", 3, 0.2)
  weight @inner : DTYPE[5, INNER] = random("inner", 4, 2.0)
  weight @outer : DTYPE[5, 1, WIDTH] = random("outer", 5, 2.0)
  func @forward(%x: DTYPE[T, WIDTH], %chosen: i32[T, 2], %p: DTYPE[T, 2], %first: i32[])
      -> (y: DTYPE[T, WIDTH]) {
    %b = unsqueeze @inner {dims=[1]} : DTYPE[5, 1, INNER]
    %slots = moe_slots %chosen {experts=9, capacity=CAPACITY} : i32[T, 2]
    %y = experts %x, %chosen, %slots, %p, @up, @down, first=%first, OPTIONS : DTYPE[T, WIDTH]
    return %y
  }
}"""
CLAMPED = 'act="quick_gelu", limit=3.0, offset=1.0'


def module_of(
    dtype: str = "bf16",
    capacity: int = 0,
    options: str = "gate=@gate {}",
    width: int = 40,
    inner: int = 72,
) -> Module:
    """Five experts of nine, of which each token chooses two."""
    options = options.replace("{", f"{{capacity={capacity}, ").replace(", }", "}")
    words = {"DTYPE": dtype, "CAPACITY": str(capacity), "OPTIONS": options}
    text = TEXT
    for word, value in {**words, "WIDTH": str(width), "INNER": str(inner)}.items():
        text = text.replace(word, value)
    return irc.parse(text)


def inputs_of(
    rng: np.random.Generator, tokens: int, dtype: str = "bf16", width: int = 40
) -> dict[str, Array]:
    """Random tokens, some with experts of other ranks or that there are not."""
    kind = numpy_dtype(dtype)
    chosen = [rng.permutation(np.arange(-1, 9))[:2] for _ in range(tokens)]
    return {
        "x": rng.standard_normal((tokens, width)).astype(kind),
        "chosen": np.array(chosen, np.int32).reshape(tokens, 2),
        "p": rng.random((tokens, 2)).astype(kind),
        "first": np.array(rng.integers(0, 5), np.int32),
    }


ALONE = ["moe_sort", "moe_product", "moe_product", "moe_combine"]
GATHERED = ["moe_sort", "moe_gather", "moe_product", "moe_product", "moe_combine"]


@pytest.mark.parametrize("groups", [False, True])
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
    groups: bool, tokens: int, capacity: int, options: str, rng: np.random.Generator
) -> None:
    """On GPUs with more and less shared memory; `groups` of warps multiply together, or do not."""
    target = Target() if groups else Target(89, 142, int(rng.choice([99, 163])) << 10)
    target = replace(target, multiprocessors=int(rng.integers(1, 5)))
    dtype = str(rng.choice(["bf16", "f16"]))
    width = 40 if tokens < 300 else 104  # numbers of one stage, or of two
    module = module_of(dtype, capacity, options, width)
    program = HostProgram(module, fused=True, target=target)
    inputs = inputs_of(rng, tokens, dtype, width)
    if tokens > 300:  # an expert with many tokens
        inputs["chosen"][::2, 0] = inputs["first"] + rng.integers(0, 5)
    steps = program.planners[0].plan({"T": tokens}).steps
    makers = [step.kernel.rpartition("_")[0] for step in steps if isinstance(step, Launch)]
    assert makers == ["moe_slots"] * bool(capacity) + (GATHERED if groups else ALONE)
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
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_the_kernels_compile_for_every_gpu(capability: int) -> None:
    planner = Planner(module_of(), device=device_of(Target(capability)))
    for tokens in (1, 60, 330):
        for kernel in planner.plan({"T": tokens}).kernels.values():
            cubin = compile_kernel(kernel, architecture_of(capability))
            assert not facts_of(cubin, kernel.name).stack


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 13, 100, 399, 1500])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_tiles_on_a_gpu(dtype: str, tokens: int, rng: np.random.Generator, tmp_path: Path) -> None:
    """Also with rows of NaN, which are those of one token."""
    needs_gpus(1)
    width, inner = (int(n) for n in 8 * rng.integers(1, 90, 2))
    options = str(rng.choice(["gate=@gate, gate_bias=%b {}", 'down_bias=@outer {act="relu"}']))
    capacity = int(rng.choice([0, 9]))
    module = module_of(dtype, capacity, options, width, inner)
    program = program_of(module, tmp_path)
    for _ in range(3):
        inputs = inputs_of(rng, tokens, dtype, width)
        inputs["x"][rng.integers(0, tokens)] = np.nan
        want, found = evaluate(module, inputs)["y"], program.run(inputs)["y"]
        assert_close(found, want, f"{width} x {inner}, {options}", factor=3.0)
    program.close()
