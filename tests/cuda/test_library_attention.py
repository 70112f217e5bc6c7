"""Which attention becomes a call of cuDNN, and that the call computes what the operation does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import irc
from irc import ops
from irc.backends.cuda.codegen import library_attention as codegen
from irc.backends.cuda.execute.cudnn import Cudnn
from irc.backends.cuda.plan.core import LibraryCall
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype
from irc.text import parse_module
from tests.cuda.run_plan import HostProgram
from tests.fresh import fresh

TOKENS = "%k: {0}[B, T, 16], %v: {0}[B, T, 16]"
WIDE = "%k: {0}[B, 2, T, 8], %v: {0}[B, 2, T, 16]"
CACHES = "%k: {0}[B, 2, T, 8], %v: {0}[B, 2, T, 8]"
# name: (keys and values, further arguments, operands, attributes)
CASES = {
    "cross": (TOKENS, "", "", "head_dim=8"),
    "caches": (CACHES, "", "", "head_dim=8, scale=0.3"),
    "causal": (TOKENS, "", "", "head_dim=8, causal"),
    "past": (CACHES, ", %past: i32[B]", ", past=%past", "head_dim=8, causal"),
    "past of tokens": (TOKENS, ", %past: i32[B]", ", past=%past", "head_dim=8, causal"),
    "unused past": (CACHES, ", %past: i32[B]", ", past=%past", "head_dim=8"),
    "wide values": (WIDE, "", "", "head_dim=8, causal"),
}
SIZES = {"B": 3, "S": 5, "T": 9}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "is_installed", lambda: True)
    monkeypatch.setattr(codegen, "QUERIES", 2)


def module_of(dtype: str, keys: str, more: str, operands: str, attributes: str) -> Any:
    arguments = f"%q: {{0}}[B, S, 32], {keys}{more}".format(dtype)
    width = 64 if keys == WIDE else 32
    return parse_module(
        f"module @m {{\n  func @f({arguments}) -> ({dtype}[B, S, {width}]) {{\n"
        f"    %y = attention %q, %k, %v{operands} {{{attributes}}} : {dtype}[B, S, {width}]\n"
        "    return %y\n  }\n}"
    )


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_call_computes_the_attention(name: str, dtype: str) -> None:
    module = module_of(dtype, *CASES[name])
    rng = fresh()
    inputs: dict[str, Any] = {}
    for arg in module.main.args:
        shape = [n if isinstance(n, int) else SIZES[str(n)] for n in arg.type.shape]
        inputs[arg.name] = rng.uniform(-1, 1, shape).astype(numpy_dtype(dtype))
    if "past" in inputs:
        inputs["past"] = rng.integers(0, SIZES["T"] - SIZES["S"] + 1, SIZES["B"]).astype(np.int32)
    program = HostProgram(module, fused=True)
    calls = [s for s in program.planners[0].plan(SIZES).steps if isinstance(s, LibraryCall)]
    assert [call.library for call in calls] == ["cudnn"]
    assert len(calls[0].arguments) == (6 if name.startswith("past") else 4)
    (found,), (expected,) = program.run(inputs).values(), irc.evaluate(module, inputs).values()
    np.testing.assert_allclose(
        found.astype(np.float32), expected.astype(np.float32), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize(
    ("dtype", "case", "reason"),
    [
        ("f32", (TOKENS, "", "", "head_dim=8"), "it takes f16, bf16, not f32"),
        ("f16", (TOKENS, "", "", "head_dim=8, causal, window=3"), "not asked for window"),
        ("f16", (TOKENS, ", %m: bool[1, 1, S, T]", ", mask=%m", "head_dim=8"), "for mask"),
        ("f16", (TOKENS, "", "", "head_dim=4"), "multiples of 8 up to 128, not 4"),
    ],
)
def test_why_not(dtype: str, case: tuple[str, str, str, str], reason: str) -> None:
    (op,) = (op for op in module_of(dtype, *case).main if isinstance(op, ops.Attention))
    found = codegen.library_attention(op, SIZES)
    assert isinstance(found, str)
    assert reason in found


def test_queries_without_keys_are_left_to_kernels() -> None:
    (op,) = (o for o in module_of("f16", *CASES["causal"]).main if isinstance(o, ops.Attention))
    assert "some queries see no keys" in str(codegen.library_attention(op, SIZES | {"S": 10}))
    assert codegen.library_attention(op, SIZES | {"S": 1}) is None


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "is_installed", lambda: False)
    (op,) = (o for o in module_of("f16", *CASES["causal"]).main if isinstance(o, ops.Attention))
    assert "irc-compiler[cudnn]" in str(codegen.library_attention(op, SIZES))


class FakeGraph:
    """What is told to a graph of cudnn, and what it is run with."""

    def __init__(self, fails: str = "") -> None:
        self.tensors: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.ran: list[Any] = []
        self.fails = fails

    def tensor(self, **words: Any) -> Any:
        self.tensors[words["name"]] = words
        return words["name"]

    def sdpa(self, **words: Any) -> Any:
        self.options = words
        return self, None

    def get_workspace_size(self) -> int:
        return 1024

    def execute(self, tensors: Any, workspace: int, handle: Any) -> None:
        self.ran.append((tensors, workspace))

    def __getattr__(self, name: str) -> Any:
        def told(*arguments: Any) -> FakeGraph:
            if name == self.fails:
                raise RuntimeError("not supported")
            return self

        return told


def fake_library(graph: FakeGraph) -> Any:
    return SimpleNamespace(
        create_handle=lambda: "handle",
        destroy_handle=lambda handle: None,
        set_stream=lambda handle, stream: graph.ran.append(stream),
        pygraph=lambda **words: graph,
        data_type=SimpleNamespace(BFLOAT16="bf16", HALF="f16", FLOAT="f32", INT32="i32"),
        diagonal_alignment=SimpleNamespace(BOTTOM_RIGHT="bottom right"),
        heur_mode=SimpleNamespace(A="a"),
    )


class FakeDriver:
    def allocate(self, size: int) -> int:
        return 4096

    def free(self, address: int) -> None: ...


def call_of(name: str) -> LibraryCall:
    program = HostProgram(module_of("bf16", *CASES[name]), fused=True)
    (call,) = (s for s in program.planners[0].plan(SIZES).steps if isinstance(s, LibraryCall))
    return call


def test_lengths_are_told_to_cudnn() -> None:
    graph, driver = FakeGraph(), FakeDriver()
    given: Any = driver
    cudnn = Cudnn(given, fake_library(graph))
    call = call_of("past")
    cudnn.prepare([call, call])
    cudnn.bind(call, [10, 20, 30, 40, 50, 60])(7)
    assert graph.ran == [7, ({1: 10, 2: 20, 3: 30, 4: 40, 5: 50, 6: 60}, 4096)]
    assert graph.options["use_padding_mask"]
    assert graph.options["seq_len_kv"] == "key_lengths"
    assert graph.options["diagonal_alignment"] == "bottom right"
    assert graph.tensors["q"]["stride"] == [160, 8, 32, 1]
    assert graph.tensors["k"]["stride"] == [144, 72, 8, 1]
    cudnn.close()


def test_a_refusal_of_cudnn_is_an_error() -> None:
    driver: Any = FakeDriver()
    with pytest.raises(Error, match=r"cuDNN has no plan for attention .*not supported"):
        Cudnn(driver, fake_library(FakeGraph("check_support"))).prepare([call_of("cross")])
