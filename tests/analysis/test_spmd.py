"""verify_spmd: after every pass, of pipeline stages, its time; and a failing case per rule."""

from __future__ import annotations

import ast
import inspect
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from irc.analysis import local_collectives, local_operations, local_rules, replication, stages
from irc.analysis.spmd import verify_spmd
from irc.errors import Error
from irc.frontends.models.llama import LLAMA
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.ops import AllReduce
from irc.pipeline import PASSES, Pass, Stats, register, run_pipeline
from irc.text import parse_module
from tests.analysis.layout_cases import WRONG
from tests.analysis.replication_cases import MLP, REFUSED, check_unruled
from tests.analysis.test_replication import changed
from tests.backends.test_onnx_stages import NO_STAGES, TEXT
from tests.sharded.test_speed import LLAMA_70B


@pytest.fixture
def lossy() -> Iterator[None]:
    """A pass `lossy` that removes every all_reduce, and a pass `idle` that does nothing."""
    known = dict(PASSES)

    @register("idle")
    class Idle(Pass):
        def run(self, module: Module, stats: Stats) -> None:
            stats.count("ran")

    @register("lossy")
    class Lossy(Pass):
        def run(self, module: Module, stats: Stats) -> None:
            for op in module.ops():
                if isinstance(op, AllReduce):
                    op.result.replace_by(op.x)
                    op.erase()

    assert Lossy.name, Idle.name
    yield
    PASSES.clear()
    PASSES.update(known)


@pytest.mark.usefixtures("lossy")
def test_a_pass_that_loses_a_collective_is_named() -> None:
    with pytest.raises(Error) as caught:
        run_pipeline(parse_module(MLP), "idle, lossy, idle")
    text = str(caught.value)
    assert text.startswith("model.py:5: the add at model.py:5 adds x to the partial sum over tp")
    assert "the module was valid before the pass lossy" in text
    assert "in the pass lossy, number 2 of 3" in text


@pytest.mark.usefixtures("lossy")
def test_a_module_is_checked_before_the_first_pass() -> None:
    module = changed(("add %x, %s", "add %x, %t"))
    with pytest.raises(Error, match="adds x to the partial sum over tp") as caught:
        run_pipeline(module, "idle")
    assert "in the pass" not in str(caught.value)


STAGES = """
module @m {view}mesh(pp=2, tp=2) {
  func @inner(%x: f32[4]) -> (f32[4]) {
    %a = neg %x : f32[4] loc("s.py":1)
    return %a
  }
  func @stage0(%x: f32[4]) -> (f32[4]) {
    %a = call %x {callee=@inner} : f32[4] loc("s.py":2)
    return %a
  }
  func @forward(%x: f32[4]) -> (y: f32[4]) {
    %a = call %x {callee=@stage0, stage=0} : f32[4] loc("s.py":3)
    %b = call %a {callee=@inner, stage=1} : f32[4] loc("s.py":4)
    return %b
  }
}
"""
SUMMED = '%a = all_reduce %x {axis="AXIS", op="max", group_size=SIZE} : f32[4]'
NEG = "%a = neg %x : f32[4]"
STAGED: dict[str, tuple[tuple[str, str], str]] = {
    "communication between stages": (
        (NEG, SUMMED.replace("AXIS", "pp.tp").replace("SIZE", "4")),
        r"the all_reduce at s\.py:1 communicates over pp\.tp, but only the ranks of stage 0 run "
        "@stage0, and the other ranks never take part; leave pp out",
    ),
    "stages in a stage": (
        ("{callee=@inner} :", "{callee=@inner, stage=0} :"),
        r"the call at s\.py:2 has a stage of its own, but stage 0 runs it, in @stage0",
    ),
    "beside the stages": (
        ("return %b", '%c = exp %b : f32[4] loc("s.py":5)\n    return %c'),
        r"the exp at s\.py:5 runs on every rank, but only those of stage 1 have %b",
    ),
}


def staged(view: str, change: tuple[str, str] = ("", "")) -> Module:
    module = parse_module(STAGES.replace("{view}", view).replace(*change, 1))
    verify(module)
    return module


def test_stages_may_communicate_among_themselves() -> None:
    for view in ("", "local "):
        verify_spmd(staged(view))
    verify_spmd(staged("local ", (NEG, SUMMED.replace("AXIS", "tp").replace("SIZE", "2"))))


@pytest.mark.parametrize("name", STAGED)
def test_invalid_stages_are_refused(name: str) -> None:
    change, words = STAGED[name]
    with pytest.raises(Error, match=words):
        verify_spmd(staged("local ", change))


def test_a_value_of_one_stage_is_the_same_on_its_ranks() -> None:
    """The index over pp is the same number on all ranks of one stage."""
    rank = '%r = rank {axis="pp"} : i32[]\n    %f = cast %r {dtype="f32"} : f32[]\n    '
    verify_spmd(staged("local ", (NEG, f"{rank}%a = mul %x, %f : f32[4]")))


def test_eighty_layers_take_no_time() -> None:
    """The check runs after every pass: 5 ms for a sharded Llama of 80 layers."""
    module = LLAMA.trace(LLAMA_70B, "bf16", name="llama")
    run_pipeline(module, 'inline, shard{mesh="tp=8"}, localize')
    times: list[float] = []
    for _ in range(5):
        start = time.thread_time()
        verify_spmd(module)
        times.append(time.thread_time() - start)
    assert min(times) < 0.05
    lost = [op for op in module.ops() if isinstance(op, AllReduce)][2 * 69]
    lost.result.replace_by(lost.x)
    lost.erase()
    with pytest.raises(Error, match=r"layers\.\d+\..* uses @model\.layers\.\d+\."):
        verify_spmd(module)


def failures() -> Iterator[Callable[[], object]]:
    """Every failing case of this folder."""
    for changes, _, _ in (REFUSED | WRONG).values():
        yield lambda changes=changes: replication.check_replication(changed(*changes))
    for change, _ in STAGED.values():
        yield lambda change=change: verify_spmd(staged("local ", change))
    for old, new, _ in NO_STAGES:
        yield lambda old=old, new=new: stages.stages_of(parse_module(TEXT.replace(old, new)))
    whole = parse_module("module @g mesh(tp=2) { func @f() -> () { return } }")
    yield lambda: replication.check_replication(whole)
    yield lambda: check_unruled("%x: f32[8@tp], y: f32[8@tp]")


@pytest.mark.parametrize(
    "module", [replication, local_operations, local_rules, local_collectives, stages]
)
def test_every_rule_has_a_failing_case(module: ModuleType) -> None:
    rules = {
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Raise)
    }
    broken: set[int] = set()
    for failure in failures():
        with pytest.raises(Error) as caught:
            failure()
        error: BaseException | None = caught.value
        while error is not None:
            frames = traceback.extract_tb(error.__traceback__)
            broken |= {f.lineno or 0 for f in frames if f.filename == module.__file__}
            error = error.__context__
    assert len(rules) > 1
    unseen = [lines.start for lines in rules if not broken.intersection(lines)]
    assert not unseen, f"no case fails at {unseen} of {module.__name__}"
