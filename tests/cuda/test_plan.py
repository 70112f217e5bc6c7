"""Plans: what is stored and where, the order of steps, their text, and what `verify_plan` sees."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from irc.analysis.topology_file import default_topology
from irc.backends.cuda.codegen.kernels import elementwise
from irc.backends.cuda.plan import FUSIONS, Argument, Fused, Launch, LibraryCall, Plan
from irc.backends.cuda.plan.arena import Lifetime, place
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.cost import microseconds
from irc.backends.cuda.plan.text import print_plan
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module, Op
from irc.ops import Mul
from irc.text import parse_module
from tests.cuda.run_plan import HostProgram
from tests.cuda.verify_plan import verify_plan
from tests.ops.compare import assert_close


def module_of(function: str, header: str = "") -> Module:
    return parse_module(f"module @m dims(B=1:4:9) {{\n{header}\n{function}\n}}")


def body(text: str, args: str = "%x: f32[B, 6]", results: str = "f32[B, 6]") -> Module:
    return module_of(f"func @forward({args}) -> ({results}) {{\n{text}\n}}")


def agrees(module: Module, rng: np.random.Generator, batch: int = 3) -> Plan:
    """The plan at a batch size, which gives the results of the reference on the host."""
    function = module.main
    inputs = {
        str(arg.name): rng.standard_normal(
            [d if isinstance(d, int) else batch for d in shape]
        ).astype(np.float32)
        for arg in function.args
        for shape in [arg.type.shape]
    }
    program = HostProgram(module)
    found, wanted = program.run(inputs), evaluate(module, inputs)
    for name, want in wanted.items():
        assert_close(found[name], want, name, factor=2)
    return program.planners[0].plan({"B": batch})


def copies(plan: Plan) -> int:
    return sum(isinstance(step, LibraryCall) for step in plan.steps)


# (operations, launches): what fuses into how many
FUSED = [
    ("%a = exp %x : f32[B, 6]\n%b = neg %a : f32[B, 6]\nreturn %b", 1),
    # used twice at one index of one kernel: computed once
    ("%a = exp %x : f32[B, 6]\n%b = mul %a, %a : f32[B, 6]\nreturn %b", 1),
    # used by two kernels: stored
    (
        "%a = exp %x : f32[B, 6]\n%b = softmax %a : f32[B, 6]\n%c = cumsum %a {dim=1} : f32[B, 6]\n"
        "%d = add %b, %c : f32[B, 6]\nreturn %d",
        4,
    ),
    # one use, in front of a kernel that reads each element once
    ("%a = exp %x : f32[B, 6]\n%b = softmax %a : f32[B, 6]\nreturn %b", 1),
    # at another index
    ("%a = exp %x : f32[B, 6]\n%b = flip %a {dims=[1]} : f32[B, 6]\nreturn %b", 1),
    (
        "%a = exp %x : f32[B, 6]\n%b = flip %a {dims=[1]} : f32[B, 6]\n"
        "%c = add %a, %b : f32[B, 6]\nreturn %c",
        2,
    ),
    # views of stored values share their memory
    (
        "%a = softmax %x : f32[B, 6]\n%b = reshape %a {shape=[6*B]} : f32[6*B]\n"
        "%c = reshape %b {shape=[B, 6]} : f32[B, 6]\nreturn %c",
        1,
    ),
    # a row that is repeated is computed once per element of it
    (
        "%a = reduce_sum %x {dims=[1], keep=true} : f32[B, 1]\n%b = exp %a : f32[B, 1]\n"
        "%c = add %x, %b : f32[B, 6]\nreturn %c",
        3,
    ),
]


@pytest.mark.parametrize(("text", "launches"), FUSED)
def test_fused(text: str, launches: int, rng: np.random.Generator) -> None:
    plan = agrees(body(text), rng)
    assert sum(isinstance(step, Launch) for step in plan.steps) == launches
    assert not copies(plan)


STATE = "%x: f32[B, 6], %s: f32[B, 6], %t: f32[B, 6]"
# (operations, results, copies)
STATES = [
    # the new state is computed in the memory of the old one
    ("%a = exp %x : f32[B, 6]\nreturn %a", "f32[B, 6] aliases %s", 0),
    # unless that is read by the same kernel, or later
    ("%a = add %x, %s : f32[B, 6]\nreturn %a", "f32[B, 6] aliases %s", 1),
    (
        "%a = exp %x : f32[B, 6]\n%b = softmax %s : f32[B, 6]\n%c = add %a, %b : f32[B, 6]\n"
        "return %a, %c",
        "f32[B, 6] aliases %s, y: f32[B, 6]",
        1,
    ),
    # states that are exchanged, kept, or returned as other results as well
    ("return %s, %t", "f32[B, 6] aliases %t, f32[B, 6] aliases %s", 4),
    ("return %s", "f32[B, 6] aliases %s", 0),
    ("%a = exp %x : f32[B, 6]\nreturn %a, %s", "f32[B, 6] aliases %s, f32[B, 6]", 2),
    ("return %x, %x", "a: f32[B, 6], b: f32[B, 6]", 2),
    ("%a = exp %x : f32[B, 6]\nreturn %a, %a", "a: f32[B, 6], b: f32[B, 6]", 1),
    (
        "%a = exp %x : f32[B, 6]\n%b = reshape %a {shape=[6*B]} : f32[6*B]\nreturn %a, %b",
        "a: f32[B, 6], b: f32[6*B]",
        1,
    ),
]


@pytest.mark.parametrize(("text", "results", "expected"), STATES)
def test_states(text: str, results: str, expected: int, rng: np.random.Generator) -> None:
    plan = agrees(body(text, STATE, results), rng)
    assert copies(plan) == expected


CACHE = "%c: f32[B, 2, 8, 4], %x: f32[B, 1, 8], %n: i32[B]"
UPDATE = "%u = cache_update %c, %x, %n : f32[B, 2, 8, 4]\n"
UPDATES = [
    (UPDATE + "return %u", "f32[B, 2, 8, 4] aliases %c", 0),
    # an input stays as it is
    (UPDATE + "return %u", "u: f32[B, 2, 8, 4]", 1),
    # the old cache is read before it is updated, wherever that is written
    (
        UPDATE + "%o = exp %c : f32[B, 2, 8, 4]\nreturn %u, %o",
        "f32[B, 2, 8, 4] aliases %c, o: f32[B, 2, 8, 4]",
        0,
    ),
    (
        UPDATE + "%v = sub %u, %c : f32[B, 2, 8, 4]\nreturn %u, %v",
        "f32[B, 2, 8, 4] aliases %c, v: f32[B, 2, 8, 4]",
        2,
    ),
    # two updates of one cache
    (
        UPDATE + "%y = neg %x : f32[B, 1, 8]\n%v = cache_update %c, %y, %n : f32[B, 2, 8, 4]\n"
        "return %u, %v",
        "f32[B, 2, 8, 4] aliases %c, v: f32[B, 2, 8, 4]",
        3,
    ),
]


@pytest.mark.parametrize(("text", "results", "most"), UPDATES)
def test_updates_in_place(text: str, results: str, most: int, rng: np.random.Generator) -> None:
    module = body(text, CACHE, results)
    inputs = {
        "c": rng.standard_normal((3, 2, 8, 4)).astype(np.float32),
        "x": rng.standard_normal((3, 1, 8)).astype(np.float32),
        "n": rng.integers(0, 8, 3).astype(np.int32),
    }
    program = HostProgram(module)
    found, wanted = program.run(inputs), evaluate(module, inputs)
    for name, want in wanted.items():
        assert_close(found[name], want, name, factor=2)
    assert copies(program.planners[0].plan({"B": 3})) <= most


def test_empty_results_launch_nothing(rng: np.random.Generator) -> None:
    module = body("%a = exp %x : f32[B, 6]\nreturn %a")
    assert not Planner(module).plan({"B": 0}).steps
    program = HostProgram(module)
    assert program.run({"x": np.zeros((0, 6), np.float32)})["result0"].shape == (0, 6)


def test_places_apart_and_low(rng: np.random.Generator) -> None:
    """Buffers alive together lie apart; the arena is no larger than three times the least."""
    lives: dict[str, Lifetime] = {}
    for i in range(int(rng.integers(1, 120))):
        first = int(rng.integers(0, 40))
        lives[str(i)] = Lifetime(first, first + int(rng.integers(0, 6)), int(rng.integers(0, 5000)))
    offsets = place(lives)
    alive = [[n for n, e in lives.items() if e.first <= step <= e.last] for step in range(50)]
    for names in alive:
        spans = sorted((offsets[n], offsets[n] + lives[n].nbytes) for n in names if lives[n].nbytes)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    least = max(sum(-(-lives[n].nbytes // 256) * 256 for n in names) for names in alive)
    assert max(offsets[n] + e.nbytes for n, e in lives.items()) <= 3 * least + 256


def long_plan() -> Plan:
    """Launches of rows behind each other, with a copy at the end."""
    chain = "".join(f"%a{i + 1} = softmax %a{i} : f32[B, 6]\n" for i in range(4))
    text = f"%a0 = softmax %x : f32[B, 6]\n{chain}%b = add %a4, %a1 : f32[B, 6]\nreturn %b, %b"
    return Planner(body(text, results="a: f32[B, 6], b: f32[B, 6]")).plan({"B": 5})


def test_text() -> None:
    plan = long_plan()
    text = print_plan(plan)
    assert plan.arena == 3 * 256  # of five values in the arena, three are alive at a time
    early = [step.programmatic for step in plan.steps if isinstance(step, Launch)]
    assert early == [False, True, True, True, True, True]
    assert text.count(" early\n") == 5
    for each in plan.buffers.values():
        offset = f" +{each.offset}" if each.place == "arena" else ""
        assert f"  buffer {each.name} f32[5, 6] {each.place}{offset}\n" in text
    first = r"launch softmax_\w+ grid 1 1 1 block 256 \(%x, out %a0, 5\) constant 0"
    assert re.search(rf"  {first}\n    %a0 bytes 240 flops 30\n", text)
    assert "  call memory.copy (result.a, out result.b) {nbytes=120}\n    bytes 240" in text
    assert text.endswith("  return result.a result.b\n")


def _with(plan: Plan, number: int, **changes: object) -> Plan:
    steps = list(plan.steps)
    steps[number] = replace(steps[number], **changes)  # type: ignore[arg-type]
    return replace(plan, steps=tuple(steps))


def _moved(plan: Plan, name: str, offset: int) -> Plan:
    buffers = dict(plan.buffers)
    buffers[name] = replace(buffers[name], offset=offset)
    return replace(plan, buffers=buffers)


def _reversed(plan: Plan) -> Plan:
    return replace(plan, steps=plan.steps[::-1])


BOTH = (Argument("%x", True), Argument("%a0", True))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: _with(p, 1, kernel="other"), "no such kernel"),
        (lambda p: _with(p, 1, grid=(0, 1, 1)), "the grid is"),
        (lambda p: _with(p, 1, block=2048), "2048 threads"),
        (lambda p: _with(p, 1, cluster=7), "not a multiple of 7"),
        (lambda p: _with(p, 1, constant=(0,)), "not constant"),
        (lambda p: _with(p, 0, programmatic=True), "start early"),
        (lambda p: _with(p, 0, arguments=(Argument("%z"),)), "no buffer %z"),
        (lambda p: _with(p, 0, arguments=BOTH, constant=()), "one of the inputs"),
        (lambda p: _moved(p, "%a0", 10), "not aligned"),
        (lambda p: _moved(p, "%a0", p.buffers["%a1"].offset), "overlap"),
        (_reversed, "before it is written"),
        (lambda p: replace(p, results=("%x",)), "neither an output nor a state"),
    ],
)
def test_verify_sees_damage(damage: object, message: str) -> None:
    plan = long_plan()
    verify_plan(plan)
    with pytest.raises(Error, match=message):
        verify_plan(damage(plan))  # type: ignore[operator]


def test_a_larger_plan_shares_kernels(tmp_path: Path) -> None:
    """Sizes are arguments: plans at other sizes have the same kernels."""
    planner = Planner(body("%a = softmax %x : f32[B, 6]\n%b = exp %a : f32[B, 6]\nreturn %b"))
    assert planner.plan({"B": 1}).kernels == planner.plan({"B": 9}).kernels


@pytest.mark.parametrize(("rows", "fused"), [(1, False), (500, True)])
def test_weights_are_unpacked_into_memory_for_many_rows_only(rows: int, fused: bool) -> None:
    header = (
        'weight @w : i8[64, 32] = random("w", 1, 9.0)\nweight @s : f32[64, 1] = random("s", 2, 1.0)'
    )
    module = module_of(
        "func @forward(%x: f32[B, 32]) -> (f32[B, 64]) {\n"
        "%w = dequantize @w, @s : f32[64, 32]\n%y = linear %x, %w : f32[B, 64]\nreturn %y\n}",
        header,
    )
    launches = Planner(module).launches({"B": rows})
    assert any("unpacked" in why for _, why in launches.declined) is not fused
    assert any(value.name == "w" for value in launches.stored) is fused


def test_what_would_need_its_own_result_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """%a and %c cannot be one launch, since %b is made of %a, and %c of %b; %d can be fused."""

    def around(op: Op, sizes: object) -> Fused | None:
        a, last = op.operands[0], op.result
        if op.operands[1].producer is None:
            return Fused((elementwise([last], ()),), (op,))
        first, *_ = op.operands[1].producer.operands
        assert first is a and a.producer is not None
        one, two = elementwise([a], ()), elementwise([last], (a, op.operands[1]))
        return Fused((replace(two, writes=(*two.writes, *one.writes)),), (op, a.producer))

    monkeypatch.setitem(FUSIONS, Mul, [around])
    module = body(
        "%a = exp %x : f32[B, 6]\n%b = softmax %a : f32[B, 6]\n%c = mul %a, %b : f32[B, 6]\n"
        "%d = mul %x, %x : f32[B, 6]\nreturn %c, %d",
        results="c: f32[B, 6], d: f32[B, 6]",
    )
    launches = Planner(module).launches({"B": 2})
    assert [(op.opname, why) for op, why in launches.declined] == [
        ("mul", "a result is needed before an operand")
    ]
    assert {value.name for value in launches.stored} == {"a", "b", "c", "d"}
    assert len(launches.nodes) == 4


def test_expected_times() -> None:
    text = """module @m local mesh(tp=2) {
      func @f(%x: f32[1000, 1000]{varies tp}) -> (f32[2000, 1000]) {
        %0 = neg %x : f32[1000, 1000]{varies tp}
        %1 = all_gather %0 {axis="tp", dim=0, group_size=2} : f32[2000, 1000]
        return %1
      }
    }"""
    module, topology = parse_module(text), default_topology()
    plan = Planner(module, "f").plan({})
    found = [microseconds(plan, step, topology, module.mesh) for step in plan.steps]
    device = topology.device
    kernel = 8e6 / device.hbm_gb_s / 1e3 + device.kernel_us
    assert found == pytest.approx([kernel, topology.time("all_gather", 2, 8_000_000)])
