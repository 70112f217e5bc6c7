"""Memory of a rank: liveness against a count at every operation, weights against their bytes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import irc.passes  # noqa: F401  (registers the passes)
from irc.analysis.memory import memory, peak_bytes, state_bytes, weight_bytes, weights_of
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.analysis.topology_file import default_topology
from irc.backends.reference.weights import Weights
from irc.frontends.huggingface import load
from irc.ir.core import Function, Op, Value
from irc.pipeline import run_pipeline
from irc.testing.draw import random_graph
from irc.text import parse_module
from tests.tiny_checkpoint import write_checkpoint


def only_products_read(op: Op) -> bool:
    """Whether products alone read the result, as it is, transposed, or dequantized further."""
    users = op.result.users
    return bool(users) and all(
        user.opname in ("linear", "matmul", "gated_mlp")
        or (user.opname in ("transpose", "dequantize") and only_products_read(user))
        for user in users
    )


def is_same_memory(op: Op, sizes: LocalSizes) -> bool:
    """Whether the result is a view of the operand; products read a transposed matrix, and codes, in
    place."""
    if op.opname == "dequantize":
        return only_products_read(op)
    if op.opname != "transpose":
        return op.opname in ("reshape", "squeeze", "unsqueeze")
    shape = sizes.shape(op.operands[0].type)
    swapped = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    if op.attributes["order"] == swapped and all(u.opname == "matmul" for u in op.result.users):
        return True
    places = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return bool((np.transpose(places, op.attributes["order"]).ravel() == places.ravel()).all())


def buffers(function: Function, sizes: LocalSizes) -> Iterator[tuple[Value, int, int]]:
    """(value, index of its operation, index of its last use) of all values that are not views.

    The uses of a view count as uses of its operand.
    """
    ops = [op for op in function if op.opname != "return"]
    for made, op in enumerate(ops):
        if is_same_memory(op, sizes):
            continue
        for value in op.results:
            last = made
            for shown in views(value, sizes):
                needed = [ops.index(user) for user in shown.users if user in ops]
                last = max([last, *needed])
                last = len(ops) if shown in function.returned else last
            yield value, made, last


def views(value: Value, sizes: LocalSizes) -> Iterator[Value]:
    yield value
    for user in value.users:
        if is_same_memory(user, sizes):
            yield from views(user.result, sizes)


def counted(function: Function, sizes: LocalSizes) -> int:
    """The peak bytes, by adding up the live values at every operation."""
    inputs = sum(sizes.bytes(arg.type) for arg in function.args)
    all_of_them = list(buffers(function, sizes))
    moments = range(sum(1 for _ in function))
    alive = [
        sum(sizes.bytes(value.type) for value, made, last in all_of_them if made <= now <= last)
        for now in moments
    ]
    return inputs + max(alive, default=0)


@pytest.mark.parametrize("seed", range(40))
def test_liveness_agrees_with_a_count(seed: int) -> None:
    module = random_graph(seed)
    module.main.results = ()  # no states
    sizes = LocalSizes(module.mesh, {"B": 1 + seed % 3})
    assert peak_bytes(module.main, sizes) == counted(module.main, sizes)


CACHE = """module @cache dims(B=1:2:4, C=1:8:64) {
  weight @w : f32[12, 12] = unbound("w")
  weight @spare : f32[99, 99] = unbound("spare")
  func @forward(%x: f32[B, 1, 12], %k: f32[B, 3, C, 4], %past: i32[B]) -> (y: f32[B, 1, 12], k: f32[B, 3, C, 4] aliases %k) {
    %new = linear %x, @w : f32[B, 1, 12]
    %k.1 = cache_update %k, %new, %past : f32[B, 3, C, 4]
    %y = attention %new, %k.1, %k.1, past=%past {head_dim=4, causal} : f32[B, 1, 12]
    return %y, %k.1
  }
}"""  # noqa: E501


def test_states_and_weights_are_not_activations() -> None:
    module = parse_module(CACHE)
    sizes = LocalSizes(module.mesh, typical_sizes(module))
    found = memory([module.main], sizes, default_topology().device)
    assert found.weights == 12 * 12 * 4  # unused weights do not count
    assert found.states == 2 * 3 * 8 * 4 * 4
    row = 2 * 12 * 4
    assert found.activations == (row + 2 * 4) + 2 * row
    assert found.workspace == default_topology().device.workspace_bytes
    assert found.total == found.weights + found.states + found.activations + found.workspace


def test_other_ranks_need_workspace_too() -> None:
    module = parse_module("module @m mesh(tp=2) { func @f() -> () { return } }")
    device = default_topology().device
    found = memory([module.main], LocalSizes(module.mesh, {}), device)
    assert found.workspace == device.workspace_bytes + device.communication_bytes


def test_a_call_needs_the_memory_of_its_function() -> None:
    module = parse_module(
        """module @m {
  func @inner(%x: f32[10]) -> (f32[10]) {
    %a = silu %x : f32[10]
    %wide = concat %a, %a, %a {dim=0} : f32[30]
    %b = slice %wide {dim=0, start=0, stop=10} : f32[10]
    return %b
  }
  func @forward(%x: f32[10]) -> (f32[10]) {
    %y = call %x {callee=@inner} : f32[10]
    return %y
  }
}"""
    )
    assert peak_bytes(module.main, LocalSizes(module.mesh, {})) == 40 + (40 + 120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("odd") / "llama", vocab_size=301)


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "tp=3", "tp=4", "ep=2, tp=2"])
def test_weights_have_the_bytes_that_are_read(folder: Path, mesh: str) -> None:
    """Odd sizes: padding counts, on every rank, in both views."""
    module = load(folder)
    sizes = LocalSizes(module.mesh, typical_sizes(module))
    whole = weight_bytes([module.main], sizes)
    found: list[tuple[int, int]] = []
    for passes in (f'inline, cse, shard{{mesh="{mesh}"}}', "localize, dce", "fold, dce"):
        run_pipeline(module, passes)
        sizes = LocalSizes(module.mesh, typical_sizes(module))
        found.append((weight_bytes([module.main], sizes), state_bytes(module.main, sizes)))
    assert found[0] == found[1] == found[2]
    ranks, (expected, states) = module.mesh.ranks, found[0]
    read = Weights(module, folder)
    for rank in range(ranks):
        held = sum(read.get(weight, rank).nbytes for weight in weights_of([module.main]))
        assert held == expected
    assert whole / ranks <= expected <= whole * (1 if ranks == 1 else 0.99)
    assert states > 0
