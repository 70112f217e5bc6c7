"""Capacity overflow: the function without a capacity is written, loaded when needed, and run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irc
from irc.backends.fallback import FallbackProgram, FallbackStream, fallback_of
from irc.backends.onnx import backend
from irc.backends.onnx.emitter import TABLE
from irc.backends.onnx.growth import repeatable
from irc.backends.onnxruntime import OnnxRuntimeProgram, OnnxRuntimeStream
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.threads import ThreadWorld
from irc.backends.reference import evaluate
from irc.driver import Artifact
from irc.errors import Error
from irc.ir.core import Function, Module
from irc.ops import Exp
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.fresh import fresh
from tests.passes.embedding_lab import CYCLIC, Lab, assert_same, distinct, localized, looked_up
from tests.sharded.models import MODELS, Conversation, prompt_of

ROWS, SHAPE = 13, (5, 7)


def lookup(
    folder: Path, wanted: str, scheme: str, group_size: int, mesh: str = ""
) -> tuple[Lab, Module]:
    """A lookup with a capacity of two rows per pair of ranks, which 35 ids always exceed."""
    lab = Lab(folder, distinct(ROWS, 3), SHAPE, wanted, group_size, mesh=mesh)
    module, _ = lab.rewritten(scheme, ", capacity=2")
    return lab, module


def compiled(folder: Path, module: Module) -> Artifact:
    irc.compile(module, folder / "out")
    return irc.load(folder / "out", threads=1, timeout=20)


def crowded(rng: np.random.Generator) -> np.ndarray:
    """Ids in range, more than two for every pair of ranks."""
    return rng.integers(0, ROWS, SHAPE).astype(np.int32)


def lone(rng: np.random.Generator) -> np.ndarray:
    """One id in range."""
    ids = np.full(SHAPE, -1, np.int32)
    ids.flat[rng.integers(ids.size)] = rng.integers(ROWS)
    return ids


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize(("wanted", "scheme"), CYCLIC)
def test_overflowing_rows_are_looked_up_again(
    wanted: str, scheme: str, group_size: int, tmp_path: Path
) -> None:
    lab, module = lookup(tmp_path, wanted, scheme, group_size)
    text = localized(module)
    artifact, rng = compiled(tmp_path, text), fresh(1)
    for ids in (lone(rng), crowded(rng), lone(rng), crowded(rng)):
        found, fast = artifact.run({"ids": ids}), evaluate(text, {"ids": ids})
        assert list(found) == ["y", "capacity_overflow"]
        assert found["capacity_overflow"] == fast["capacity_overflow"]
        assert (fast["capacity_overflow"] > 0) == (np.count_nonzero(ids >= 0) > 1)
        assert_same(found["y"], looked_up(lab.table, ids), ids)
        assert_same(found["y"], evaluate(text, {"ids": ids}, function="exact")["y"], ids)


def test_the_fallback_is_loaded_once_and_only_when_needed(tmp_path: Path) -> None:
    lab, module = lookup(tmp_path, "sharded", "KD", 2)
    program = compiled(tmp_path, localized(module)).program
    assert isinstance(program, FallbackProgram)
    load, loads = program._load, list[int]()
    program._load = lambda: (loads.append(1), load())[1]
    program.run({"ids": lone(fresh(2))})
    assert not program.loaded
    ids, found = [crowded(fresh(i)) for i in range(3)], dict[int, Any]()
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: program.run({"ids": ids[i]})}))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1 and program.loaded
    for i in range(3):
        assert_same(found[i]["y"], looked_up(lab.table, ids[i]), i)


def test_every_process_decides_the_same(tmp_path: Path) -> None:
    lab, module = lookup(tmp_path, "sharded", "KD", 3)
    compiled(tmp_path, localized(module))
    ids, few = crowded(fresh(3)), lone(fresh(3))

    def one(communicator: Communicator) -> list[dict[str, np.ndarray]]:
        artifact = irc.load(tmp_path / "out", threads=1, communicator=communicator)
        program = artifact.program
        assert isinstance(program, FallbackProgram)
        results = [artifact.run({"ids": few})]
        assert not program.loaded
        results.append(program.open({}).step({"ids": ids}))
        assert isinstance(program.exact, OnnxRuntimeProgram)
        return [*results, artifact.run({"ids": few}), artifact.run({"ids": ids})]

    every = ThreadWorld(3, 20).run(one)
    for results in every:
        for result, given in zip(results, (few, ids, few, ids), strict=True):
            assert_same(result["y"], looked_up(lab.table, given), given)
        counts = [int(result["capacity_overflow"]) for result in results]
        assert counts[::2] == [0, 0] and counts[1] == counts[3] > 0


def test_both_functions_read_the_same_weight_files(tmp_path: Path) -> None:
    """No weight is written twice, and the manifest lists all files."""
    _, module = lookup(tmp_path, "sharded", "KD", 2)
    artifact = compiled(tmp_path, localized(module))

    def places(name: str) -> dict[str, dict[str, str]]:
        model = onnx.load(str(tmp_path / "out" / name), load_external_data=False)
        onnx.checker.check_model(str(tmp_path / "out" / name), full_check=False)
        tensors = [tensor for tensor in model.graph.initializer if tensor.external_data]
        return {t.name: {e.key: e.value for e in t.external_data} for t in tensors}

    for rank in range(2):
        main = places(f"rank{rank}.onnx")
        assert main and places(f"rank{rank}.exact.onnx") == main
    facts = artifact.manifest["program"]
    for key in ("weights", "files"):
        assert [r[key] for r in facts["fallback"]["ranks"]] == [r[key] for r in facts["ranks"]]
    assert {"rank0.exact.onnx", "rank1.exact.onnx"} <= set(artifact.manifest["files"])
    without = localized(Lab(tmp_path, distinct(ROWS, 3), SHAPE, "sharded", 2).rewritten("KD")[0])
    irc.compile(without, tmp_path / "without")

    def sizes(folder: str) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (tmp_path / folder).glob("*.weights")}

    assert sizes("out") == sizes("without")
    assert irc.load(tmp_path / "without").manifest["program"]["fallback"] is None


def test_ranks_of_pipeline_stages_run_the_same_fallback(tmp_path: Path) -> None:
    text = """module @m mesh(pp=2, tp=2) {
      weight @t : f32[13@tp, 4] = random("t", 1, 0.5, [13, 4])
      weight @w : f32[4, 4] = random("w", 1, 0.5, [4, 4])
      func @forward(%ids: i32[2*B@tp, 3]) -> (y: f32[2*B@tp, 3, 4]) {
        %all = all_gather %ids {axis="tp", dim=0} : i32[2*B, 3]
        %e = embedding %all, @t : f32[2*B, 3, 4]{sum tp}
        %x = reduce_scatter %e {axis="tp", dim=0} : f32[2*B@tp, 3, 4]
        %z = linear %x, @w : f32[2*B@tp, 3, 4]
        %y = linear %z, @w : f32[2*B@tp, 3, 4]
        return %y
      }
    }"""
    module, whole = parse_module(text), parse_module(text)
    stages = 'rewrite-embeddings{scheme="KD", capacity=1}, pipeline{stages=2}, localize, fold, dce'
    run_pipeline(module, stages)
    artifact, rng = compiled(tmp_path, module), fresh(4)
    for rows in (2, 6):
        ids = rng.integers(0, 13, (rows, 3)).astype(np.int32)
        ids[0, 1] = ids[0, 0]  # so that one overflows
        found = artifact.run({"ids": ids})
        assert found["capacity_overflow"] > 0
        wanted = evaluate(whole, {"ids": ids})["y"]
        np.testing.assert_allclose(found["y"], wanted, rtol=1e-5, atol=1e-6)


# -- states


def test_a_step_runs_again_over_the_same_caches(tmp_path: Path) -> None:
    """A language model whose token lookup has a capacity of one row per rank."""
    module, rng = MODELS["even"](), fresh(5)
    passes = (
        'inline, canonicalize, cse, shard{mesh="tp=2"}, rewrite-embeddings{scheme="KA", '
        "capacity=1}, fuse-collectives, localize, cse, fold, dce"
    )
    irc.compile(MODELS["even"](), tmp_path / "out", mesh="tp=2", pipeline=passes)
    program = irc.load(tmp_path / "out", threads=2, timeout=20).program
    assert isinstance(program, FallbackProgram)
    stream, oracle = program.open({"B": 2, "C": 70}), Conversation(module)
    oracle.stream = type(oracle.stream)(oracle.stream.program, {"B": 2, "C": 70})
    overflows: list[bool] = []
    for tokens in (1, 6, 1, 59, 3):  # the caches grow on the way
        ids = np.concatenate([prompt_of(module, rng)] * 10, axis=1)[:, :tokens]
        past, steps = oracle.past, np.arange(tokens, dtype=np.int32)
        if tokens == 1:
            ids[:, 0] = (4, 9)  # of different owners
        found = stream.step(
            {
                "input_ids": ids,
                "positions": past[:, None] + steps,
                "past_lengths": past,
                "logit_positions": np.tile(steps, (2, 1)),
            }
        )
        wanted = oracle.step(ids)["logits"]
        overflows.append(bool(found["capacity_overflow"]))
        np.testing.assert_allclose(found["logits"], wanted, atol=1e-5 * np.abs(wanted).max())
    assert overflows == [False, True, False, True, True]
    assert isinstance(stream, FallbackStream)
    fast, exact = stream._fast, stream._exact
    assert isinstance(fast, OnnxRuntimeStream) and isinstance(exact, OnnxRuntimeStream)
    for rank, own in fast.ranks.items():
        for name, memory in own._memory.items():
            assert exact.ranks[rank].held(name) is memory, "no cache is held twice"


SUM = """module @m mesh(tp=2) {
  weight @t : f32[13@tp, 4] = random("t", 1, 0.5, [13, 4])
  func @forward(%ids: i32[6], %total: f32[6, 4]) -> (y: f32[6, 4], new: f32[6, 4] aliases %total) {
    %e = embedding %ids, @t : f32[6, 4]{sum tp}
    %y = all_reduce %e {axis="tp"} : f32[6, 4]
    %new = add %total, %y : f32[6, 4]
    return %y, %new
  }
}"""


def test_a_sum_over_steps_cannot_run_again(tmp_path: Path) -> None:
    module, whole = parse_module(SUM), parse_module(SUM)
    run_pipeline(module, 'rewrite-embeddings{scheme="KA", capacity=1}, localize, cse, dce')
    artifact, rng = compiled(tmp_path, module), fresh(8)
    ids, total = rng.integers(0, 13, 6), rng.standard_normal((6, 4))
    given = {"ids": ids.astype(np.int32), "total": total.astype(np.float32)}
    found, wanted = artifact.run(given), evaluate(whole, given)
    assert found["capacity_overflow"] > 0
    np.testing.assert_allclose(found["new"], wanted["new"], rtol=1e-5, atol=1e-6)
    with pytest.raises(Error, match="its state total; compile it without capacity in rewrite-emb"):
        artifact.program.open({})


STEP = """module @m dims(C=1:2:8) {
  func @step(%x: f32[B, S, 4], %n: i32[B], %m: i32[B], %c: f32[B, 1, C, 4], %k: i32[B])
      -> (y: f32[B, 1, C, 4], c: f32[B, 1, C, 4] aliases %c, k: i32[B] aliases %k) {
    %new = cache_update %c, %x, %PAST : f32[B, 1, C, 4]
    %y = exp %READ : f32[B, 1, C, 4]
    return %y, %NEW, %COUNT
  }
}"""
PLAIN = {"PAST": "n", "READ": "new", "NEW": "new", "COUNT": "k"}


def step(**changes: str) -> Function:
    text = STEP.replace("\n      ->", " ->")
    for word, name in (PLAIN | changes).items():
        text = text.replace(f"%{word}", f"%{name}")
    return parse_module(text).main


@pytest.mark.parametrize(
    ("first", "second", "can"),
    [
        ({}, {}, True),
        ({"PAST": "m"}, {"PAST": "m"}, True),
        ({}, {"PAST": "m"}, False),  # the second writes elsewhere
        ({"READ": "c"}, {"READ": "c"}, False),  # the first call has overwritten it
        ({"PAST": "k"}, {"PAST": "k"}, False),  # a count that a step may change
        ({"COUNT": "n"}, {"COUNT": "n"}, False),  # and this one does
        ({"NEW": "y"}, {"NEW": "y"}, False),
    ],
)
def test_which_steps_can_run_again(
    first: dict[str, str], second: dict[str, str], can: bool
) -> None:
    assert repeatable(step(**first), step(**second)) is can


# -- errors


def test_both_functions_need_equal_inputs_and_outputs(tmp_path: Path) -> None:
    _, module = lookup(tmp_path, "replicated", "KA", 2)
    text = str(localized(module))
    assert fallback_of(parse_module(text)) is not None
    renamed = parse_module(text.replace("(y: f32[5, 7, 3], cap", "(rows: f32[5, 7, 3], cap"))
    with pytest.raises(
        Error, match="@exact, which runs where that is not 0, has other arguments or"
    ):
        irc.compile(renamed, tmp_path / "renamed")
    alone = parse_module(text)
    for op in reversed(alone.functions.pop("exact")):
        op.erase()
    artifact = compiled(tmp_path, alone)
    with pytest.raises(Error, match="embedding lookups were dropped"):
        artifact.run({"ids": crowded(fresh(9))})


def test_unsupported_operations_of_the_fallback_count(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """module @m {
      func @exact(%x: f32[3]) -> (y: f32[3]) {
        %y = exp %x : f32[3]
        return %y
      }
      func @forward(%x: f32[3]) -> (y: f32[3], capacity_overflow: i32[]) {
        %y = add %x, %x : f32[3]
        %n = constant {values=[1], dtype="i32"} : i32[]
        return %y, %n
      }
    }"""
    module = parse_module(text)
    assert backend.unsupported(module) == []
    monkeypatch.delitem(TABLE._table, Exp)
    assert [each.op.opname for each in backend.unsupported(module)] == ["exp"]
