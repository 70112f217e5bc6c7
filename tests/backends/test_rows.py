"""Streams that run some of their rows, copy rows and clear them, on CPU and on fake GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from irc.backends.reference import ReferenceProgram
from irc.errors import Error
from irc.text import parse_module
from tests.backends.decoder import Decoder, call, ids_of
from tests.backends.ranks import loaded
from tests.cuda.fake_cuda import World
from tests.cuda.gpu_rank import rows_conversation
from tests.cuda.test_program import compiled
from tests.fresh import fresh
from tests.sharded.models import MODELS
from tests.tensorrt import runtime_world
from tests.tensorrt.test_runtime import reference, step_of

Decoders: TypeAlias = Callable[..., Decoder]

# a running sum of every row: the state has no place for each token
SUMS = """module @m dims(B=1:2:8) {
  func @forward(%x: f32[B, 3], %s: f32[B, 3]) -> (y: f32[B, 3], s: f32[B, 3] aliases %s) {
    %y = add %s, %x : f32[B, 3]
    return %y, %y } }"""


def test_rows_of_a_fixed_state(tmp_path: Path) -> None:
    module = parse_module(SUMS)
    world = World(module, tmp_path)
    for program in (ReferenceProgram(module), loaded(module, tmp_path), world.programs[0]):
        stream: Any = program.open({"B": 4})
        rng, sums = fresh(), np.zeros((4, 3), np.float32)
        for first, count in ((0, 4), (1, 2), (3, 1), (0, 3), (0, 4)):
            x = rng.standard_normal((count, 3)).astype(np.float32)
            sums[first : first + count] += x
            results = stream.step({"x": x}, first)["y"]
            np.testing.assert_allclose(results, sums[first : first + count], rtol=1e-6)
            stream.copy_rows([2, 0, 3], [0, 2, 1])  # two rows change places
            sums[[0, 2, 1]] = sums[[2, 0, 3]]
            stream.clear_rows([3])
            sums[3] = 0
            kept = results.copy()
            np.testing.assert_allclose(stream.step({"x": 0 * sums}, 0)["y"], sums, rtol=1e-6)
            np.testing.assert_array_equal(results, kept)  # later steps leave results alone


def test_a_step_of_rows_is_repeated_in_place(decoder: Decoders) -> None:
    stream, ids = decoder().open(3, 60)[0], ids_of(3, 20)
    stream.step(call(ids[:, :5], np.zeros(3, int)))
    (own,) = stream.ranks.values()
    memory = dict(own.memory)
    for turn in range(4):
        stream.step(call(ids[:2, 5 + turn : 6 + turn], np.full(2, 5 + turn)), 1)
        views = own._parts[1, 3].read
        assert all(views[name].base is memory[name] for name in memory)
    assert all(own.memory[name] is array for name, array in memory.items())


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    module = parse_module(SUMS)
    for program in (ReferenceProgram(module), loaded(module, tmp_path)):
        stream: Any = program.open({"B": 4})
        for first, count, words in (
            (0, 5, "opened for B=4, but these inputs have B=5"),
            (3, 2, "opened for B=4, but these inputs have B=2 from row 3 on"),
            (-1, 2, "opened for B=4, but these inputs have B=2"),
        ):
            with pytest.raises(Error, match=words):
                stream.step({"x": np.zeros((count, 3), np.float32)}, first)
        with pytest.raises(Error, match="has rows 0 to 3, found row 4"):
            stream.clear_rows([1, 4])
        with pytest.raises(Error, match="has rows 0 to 3, found row -1"):
            stream.copy_rows([0], [-1])


@pytest.mark.parametrize("backend", ["reference", "onnx", "cuda"])
def test_ranks_that_share_the_rows_take_all_of_them(backend: str, tmp_path: Path) -> None:
    module = compiled("tied", "dp=2")
    sizes = {"B_dp": 2, "C": 32}

    def work(program: Any) -> None:
        stream = program.open(sizes)
        for rows, first in ((2, 0), (4, 1)):
            with pytest.raises(Error, match=r"B_dp(=| is )1|takes all rows"):
                stream.step(step_of(rows, 0, 3), first)
        with pytest.raises(Error, match=r"cannot be moved or cleared: .* or ranks share them"):
            stream.clear_rows([0])
        assert stream.step(step_of(4, 0, 3))["logits"].shape[0] == 4

    if backend == "cuda":
        World(module, tmp_path).of_all(work)
    else:
        work(ReferenceProgram(module) if backend == "reference" else loaded(module, tmp_path))


@pytest.mark.parametrize(("name", "mesh"), [("gqa", ""), ("gqa", "tp=3"), ("tied", "tp=2,pp=2")])
def test_rows_on_gpus(name: str, mesh: str, tmp_path: Path) -> None:
    wanted = rows_conversation(ReferenceProgram(compiled(name, "")))
    for results in World(compiled(name, mesh), tmp_path).of_all(rows_conversation):
        np.testing.assert_allclose(results, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", ["", "tp=2", "pp=2"])
def test_rows_with_engines(mesh: str, tmp_path: Path) -> None:
    world = runtime_world.World(tmp_path, runtime_world.write(tmp_path, MODELS["gqa"](), mesh))
    wanted = rows_conversation(reference(tmp_path))
    for results in world.of_all(rows_conversation):
        np.testing.assert_allclose(results, wanted, rtol=1e-4, atol=1e-5)
