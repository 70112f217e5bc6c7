"""Generation through the runtime, on fake GPUs, against the reference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.base import Arrays, Program
from irc.backends.reference import ReferenceProgram
from irc.errors import Error
from irc.generation.greedy import Summary, greedy
from irc.generation.inputs import complete
from irc.text import parse_module
from tests.fresh import fresh
from tests.sharded.models import MODELS
from tests.tensorrt.fake_gpu import FakeStream
from tests.tensorrt.runtime_world import FakeRank, World, write

PROMPT = [3, 5, 7, 1, 2]
NEW = 8
CASES = {
    "one rank, weights inside": ("gqa", "", {}),
    "one rank, weights outside, tied": ("tied", "", {"weights": "outside"}),
    "two ranks": ("gqa", "tp=2", {}),
    "two ranks, weights inside": ("tied", "tp=2", {"weights": "inside"}),
    "two ranks, biases": ("qkv_bias", "tp=2", {}),
    "three ranks": ("gqa", "tp=3", {}),
    "four ranks": ("tied_prime", "tp=4", {}),
    "two stages": ("gqa", "pp=2", {}),
    "three stages": ("tied", "pp=3", {}),
    "two stages of two ranks": ("tied", "tp=2,pp=2", {}),
    "rows over ranks": ("gqa", "dp=2", {}),
    "rows and heads over ranks": ("gqa", "dp=2,tp=2", {}),
}


def reference(folder: Path) -> ReferenceProgram:
    """The compiled module on the reference backend."""
    path = folder / "module.irc"
    return ReferenceProgram(parse_module(path.read_text(), str(path)), folder)


def continued(program: Program, facts: dict[str, Any]) -> Summary:
    return greedy(program, PROMPT, NEW, (), facts["dims"])


def same(got: Arrays, wanted: Arrays) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_generation_agrees_with_the_reference(case: str, tmp_path: Path) -> None:
    name, mesh, options = CASES[case]
    facts = write(tmp_path, MODELS[name](), mesh, **options)
    wanted = continued(reference(tmp_path), facts).tokens
    world = World(tmp_path, facts)
    assert [each.tokens for each in world.of_all(lambda p: continued(p, facts))] == (
        [wanted] * world.ranks
    )
    for gpu in world.gpus.values():
        counts = Counter(call[0] for call in gpu.calls)
        assert counts["capture"] == 1  # of the decode step, once
        assert counts["launch"] == NEW - 2  # the first step is not captured
    world.close()
    assert [gpu.driver.memory.used for gpu in world.gpus.values()] == [0] * world.ranks
    assert not any(gpu.driver.groups for gpu in world.gpus.values())


@pytest.mark.parametrize("mesh", ["", "tp=2", "tp=2,pp=2"])
def test_a_run_with_states_agrees_with_the_reference(mesh: str, tmp_path: Path) -> None:
    rng = fresh()
    facts = write(tmp_path, MODELS["gqa"](), mesh)
    program = reference(tmp_path)
    ids = rng.integers(0, 37, (2, 6)).astype(np.int32)
    first = complete(program.ports, {"input_ids": ids})
    wanted = program.run(first)
    world = World(tmp_path, facts)
    for got in world.of_all(lambda p: p.run(first)):
        same(got, wanted)
    again = first | {name: wanted[name] for name in wanted if name in first}
    again["past_lengths"] = np.full(2, 6, np.int32)
    again["positions"] = again["positions"] + 6
    for got in world.of_all(lambda p: p.run(again)):
        same(got, program.run(again))
    world.close()


def step_of(rows: int, turn: int, token: int) -> Arrays:
    """The inputs of a decode step."""
    return {
        "input_ids": np.full((rows, 1), token, np.int32),
        "positions": np.full((rows, 1), turn, np.int32),
        "past_lengths": np.full(rows, turn, np.int32),
        "logit_positions": np.zeros((rows, 1), np.int32),
    }


@pytest.mark.parametrize("mesh", ["", "tp=2", "pp=2"])
def test_switching_conversations_captures_again(mesh: str, tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["gqa"](), mesh)

    def interleaved(p: Program) -> list[Arrays]:
        streams = [p.open({"B": 1}), p.open({"B": 2}), p.open({"B": 1})]
        turns = [0, 0, 0]
        found: list[Arrays] = []
        for at in (0, 1, 2, 0):
            for _ in range(4):
                found.append(streams[at].step(step_of(1 + at % 2, turns[at], 3 + at)))
                turns[at] += 1
        return found

    world = World(tmp_path, facts, self_test=False)
    wanted = interleaved(reference(tmp_path))
    for found in world.of_all(interleaved):
        for got, right in zip(found, wanted, strict=True):
            same(got, right)
    counts = Counter(call[0] for call in world.gpus[0].calls)
    assert (counts["capture"], counts["drop"], counts["launch"]) == (4, 3, 12)
    world.close()


def test_caches_begin_as_zeros(tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["gqa"]())
    world = World(tmp_path, facts, self_test=False)
    stream = world.programs[0].open({"B": 2})
    stream.step(step_of(2, 0, 3))
    (decode, _), driver = world.gpus[0].contexts, world.gpus[0].driver
    cache = driver.memory.array(decode.addresses["k0"], (2, 3, 32, 4), "f32")
    assert cache[:, :, 0].all() and not cache[:, :, 1:].any()
    stream.close()
    world.close()


def test_every_range_of_bytes_is_uploaded_once(tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["tied"](), "", weights="outside")
    world = World(tmp_path, facts, self_test=False)
    rank = world.programs[0].rank
    tables = [name for name in rank.weights.addresses if name.endswith(".rows")]
    assert len(tables) == 1  # the embedding, which is the head too
    addresses = rank.weights.addresses
    assert addresses[tables[0]] == addresses[tables[0].removesuffix(".rows")]
    assert len(set(addresses.values())) == len(addresses) - 1
    uploads = [size for call, _, size in world.gpus[0].calls if call == "upload"]
    assert len(uploads) == len(addresses) - 1
    memory = world.gpus[0].driver.memory.block(min(addresses.values()))
    assert sum(-(-size // 256) * 256 for size in uploads) == memory.size
    world.close()


def test_caches_are_bound_in_place(tmp_path: Path) -> None:
    facts = write(tmp_path, MODELS["gqa"]())
    world = World(tmp_path, facts, self_test=False)
    continued(world.programs[0], facts)
    decode, prefill = world.gpus[0].contexts
    for name in ("k0", "v2"):
        assert decode.addresses[name] == decode.addresses[f"{name}.out"]
        assert decode.addresses[name] == prefill.addresses[name]
    assert (decode.enqueued, prefill.enqueued) == (2, 1)  # a step, and the capture of one
    world.close()


def test_a_state_that_is_not_updated_in_place_is_copied_back(tmp_path: Path) -> None:
    module = parse_module("""module @m dims(B=1:2:4) {
      func @forward(%x: f32[B, 4], %h: f32[B, 4]) -> (y: f32[B, 4], h: f32[B, 4] aliases %h) {
        %new = add %h, %x : f32[B, 4]
        %y = mul %new, %h : f32[B, 4]
        return %y, %new } }""")
    facts = write(tmp_path, module)
    assert facts["stages"][0]["copied"] == ["h"]
    world, rng = World(tmp_path, facts, self_test=False), fresh(8)
    stream, wanted = world.programs[0].open({"B": 3}), reference(tmp_path).open({"B": 3})
    for _ in range(4):
        x = rng.standard_normal((3, 4)).astype(np.float32)
        same(stream.step({"x": x}), wanted.step({"x": x}))
    assert Counter(call[0] for call in world.gpus[0].calls)["copy"] == 4
    world.close()


def refuse(gpu: FakeRank) -> None:
    gpu.trt.can_capture = False


def fail(self: FakeStream, work: Any) -> None:
    raise Error("cudaStreamEndCapture failed: operation not permitted")


@pytest.mark.parametrize(
    ("prepare", "capture", "options", "message"),
    [
        (refuse, None, {}, "cannot be captured"),
        (None, fail, {}, "without a CUDA graph, which takes longer: cudaStreamEndCapture failed"),
        (None, None, {"graphs": False}, ""),
    ],
)
def test_without_graphs(
    prepare: Any,
    capture: Any,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = write(tmp_path, MODELS["gqa"]())
    if capture is not None:
        monkeypatch.setattr(FakeStream, "capture", capture)
    world = World(tmp_path, facts, prepare or (lambda gpu: None), self_test=False, **options)
    wanted = continued(reference(tmp_path), facts).tokens
    assert continued(world.programs[0], facts).tokens == wanted
    assert not any(call[0] == "capture" for call in world.gpus[0].calls)
    warning = capsys.readouterr().err
    assert message in warning and warning.count("\n") == bool(message)
    world.close()


def test_few_tokens_are_padded(tmp_path: Path) -> None:
    module = MODELS["gqa"]()
    module.dims["S"] = (4, 8, 32)
    facts = write(tmp_path, module)
    decode = facts["stages"][0]["profiles"].pop(0)  # prefill alone, of four tokens or more
    assert decode["name"] == "decode"
    world = World(tmp_path, facts, self_test=False)
    wanted = continued(reference(tmp_path), facts)
    assert continued(world.programs[0], facts).tokens == wanted.tokens
    (context,) = world.gpus[0].contexts
    assert context.shapes["input_ids"] == (1, 4)
    ids = world.gpus[0].driver.memory.array(context.addresses["input_ids"], (1, 4), "i32")
    assert ids.tolist() == [[wanted.tokens[-2], 0, 0, 0]]
    world.close()
