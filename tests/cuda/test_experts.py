"""Mixtures of experts by tiles, with all threads of a block emulated, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

import irc
from irc.backends.cuda.codegen import experts
from irc.backends.cuda.codegen.streaming.choices import Target
from irc.backends.cuda.execute.compile import compile_kernel
from irc.backends.cuda.plan import Launch
from irc.backends.cuda.plan.build import Planner
from irc.backends.reference import evaluate
from irc.ir.dtypes import numpy_dtype
from tests.cuda.run_plan import HostProgram
from tests.ops.compare import Array, assert_close

TEXT = """module @m dims(T=1:8:400) {
  weight @gate : DTYPE[5, 72, 40] = random("gate", 1, 0.2)
  weight @up : DTYPE[5, 72, 40] = random("up", 2, 0.2)
  weight @down : DTYPE[5, 40, 72] = random("down", 3, 0.2)
  func @forward(%x: DTYPE[T, 40], %chosen: i32[T, 2], %p: DTYPE[T, 2]MORE) -> (y: DTYPE[T, 40]) {
    %slots = moe_slots %chosen {experts=5OPTIONS} : i32[T, 2]
    %buffer = moe_dispatch %x, %chosen, %slotsFIRST {experts=5OPTIONS} : DTYPE[5, PLACES, 40]
    %g = transpose @gate {order=[0, 2, 1]} : DTYPE[5, 40, 72]
    %gated = matmul %buffer, %g : DTYPE[5, PLACES, 72]
    %act = silu %gated : DTYPE[5, PLACES, 72]
    %u = transpose @up {order=[0, 2, 1]} : DTYPE[5, 40, 72]
    %other = matmul %buffer, %u : DTYPE[5, PLACES, 72]
    %hidden = mul %act, %other : DTYPE[5, PLACES, 72]
    %d = transpose @down {order=[0, 2, 1]} : DTYPE[5, 72, 40]
    %done = matmul %hidden, %d : DTYPE[5, PLACES, 40]
    %y = moe_combine %done, %chosen, %slots, %pFIRST : DTYPE[T, 40]
    return %y
  }
}"""


def text_of(dtype: str, capacity: int = 0, first: bool = False) -> str:
    """A module of five gated experts of which each token chooses two."""
    words = {
        "DTYPE": dtype,
        "PLACES": str(capacity or "T"),
        "OPTIONS": f", capacity={capacity}" if capacity else "",
        "FIRST": ", first=%first" if first else "",
        "MORE": ", %first: i32[]" if first else "",
    }
    text = TEXT
    for word, new in words.items():
        text = text.replace(word, new)
    return text.replace("moe_slots %chosen {experts=5", "moe_slots %chosen {experts=9")


def inputs_of(rng: np.random.Generator, tokens: int, dtype: str, experts: int) -> dict[str, Array]:
    """Random tokens, some with experts that there are not."""
    kind = numpy_dtype(dtype)
    chosen = [rng.permutation(np.arange(-1, experts))[:2] for _ in range(tokens)]
    return {
        "x": rng.standard_normal((tokens, 40)).astype(kind),
        "chosen": np.array(chosen, np.int32).reshape(tokens, 2),
        "p": rng.random((tokens, 2)).astype(kind),
    }


def kernels_of(program: HostProgram, tokens: int) -> list[str]:
    """The kernels of a plan, by the names of their makers."""
    steps = program.planners[0].plan({"T": tokens}).steps
    return [step.kernel.rpartition("_")[0] for step in steps if isinstance(step, Launch)]


ALONE = ["moe_sort", "moe_product", "moe_product", "moe_combine"]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(
    ("tokens", "capacity", "first"),
    [(1, 0, False), (13, 0, True), (70, 0, False), (70, 9, True), (330, 0, False)],
)
def test_tiles_of_experts(
    dtype: str,
    tokens: int,
    capacity: int,
    first: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On GPUs with more and less shared memory."""
    small = Target(shared=int(rng.choice([99, 227])) << 10)
    monkeypatch.setattr(experts, "target", lambda: small)
    module = irc.parse(text_of(dtype, capacity, first))
    program = HostProgram(module, fused=True)
    inputs = inputs_of(rng, tokens, dtype, 9 if first else 5)
    if first:
        inputs["first"] = np.array(rng.integers(0, 5), np.int32)
    assert kernels_of(program, tokens) == ["moe_slots"] * bool(capacity) + ALONE
    got, want = program.run(inputs)["y"], evaluate(module, inputs)["y"]
    assert_close(got, want, "y", factor=3.0)


def test_experts_with_biases(rng: np.random.Generator) -> None:
    text = text_of("bf16").replace("silu %gated", "silu %biased")
    text = text.replace(
        "  weight @up", '  weight @bias : bf16[5, 72] = random("b", 4, 2.0)\n  weight @up'
    )
    text = text.replace(
        "    %act =",
        "    %row = unsqueeze @bias {dims=[1]} : bf16[5, 1, 72]\n"
        "    %biased = add %gated, %row : bf16[5, T, 72]\n    %act =",
    )
    program = HostProgram(irc.parse(text), fused=True)
    inputs = inputs_of(rng, 13, "bf16", 5)
    assert kernels_of(program, 13) == ALONE
    want = evaluate(irc.parse(text), inputs)["y"]
    assert_close(program.run(inputs)["y"], want, "y", factor=3.0)


def test_experts_without_tokens_are_not_read(rng: np.random.Generator) -> None:
    """The weights of experts that no token chose may hold anything."""
    text = text_of("bf16").replace("  weight @up", "  // weight @up").replace("@up {", "%up {")
    text = text.replace("%p: bf16[T, 2]", "%p: bf16[T, 2], %up: bf16[5, 72, 40]")
    module = irc.parse(text)
    inputs = inputs_of(rng, 12, "bf16", 5)
    inputs["up"] = (rng.standard_normal((5, 72, 40)) * 0.2).astype(numpy_dtype("bf16"))
    empty = int(rng.integers(0, 5))
    inputs["chosen"][inputs["chosen"] == empty] = -1
    want = evaluate(module, inputs)["y"]
    inputs["up"][empty] = np.nan
    assert_close(HostProgram(module, fused=True).run(inputs)["y"], want, "y", factor=3.0)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_the_kernels_compile_for_every_gpu(architecture: str) -> None:
    module = irc.parse(text_of("bf16"))
    for tokens in (1, 60, 330):
        for kernel in Planner(module).plan({"T": tokens}).kernels.values():
            compile_kernel(kernel, architecture)
