"""Plans: what is stored and where, the order of steps, their text, and what `verify_plan` sees."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from irc.analysis.topology_file import default_topology
from irc.backends.cuda.plan import Argument, Launch, LibraryCall, Plan
from irc.backends.cuda.plan.arena import Lifetime, place
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.described import microseconds
from irc.backends.cuda.plan.regime import Device, Target
from irc.backends.cuda.plan.text import print_plan
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Function, Module
from irc.text import parse_module
from tests.cuda.run_plan import HostProgram
from tests.cuda.verify_plan import verify_plan
from tests.ops.compare import assert_close


def module_of(function: str, header: str = "") -> Module:
    return parse_module(f"module @m dims(B=1:4:9) {{\n{header}\n{function}\n}}")


def body(text: str, args: str = "%x!", results: str = "f32[B, 6]") -> Module:
    """A module of these operations; `!` is the type that most values have."""
    text = f"func @forward({args}) -> ({results}) {{ {text} }}"
    return module_of(text.replace("!", ": f32[B, 6]"))


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
    ("%a = exp %x! %b = neg %a! return %b", 1),
    # used twice at one index of one kernel: computed once
    ("%a = exp %x! %b = mul %a, %a! return %b", 1),
    # used by two kernels: stored
    ("%a = exp %x! %b = softmax %a! %c = cumsum %a {dim=1}! %d = add %b, %c! return %d", 4),
    # one use, in front of a kernel that reads each element once
    ("%a = exp %x! %b = softmax %a! return %b", 1),
    # at another index
    ("%a = exp %x! %b = flip %a {dims=[1]}! return %b", 1),
    ("%a = exp %x! %b = flip %a {dims=[1]}! %c = add %a, %b! return %c", 2),
    # views of stored values share their memory
    (
        "%a = softmax %x! %b = reshape %a {shape=[6*B]} : f32[6*B]"
        "%c = reshape %b {shape=[B, 6]}! return %c",
        1,
    ),
    # a row that is repeated is computed once per element of it
    (
        "%a = reduce_sum %x {dims=[1], keep=true} : f32[B, 1] %b = exp %a : f32[B, 1]"
        "%c = add %x, %b! return %c",
        3,
    ),
]


@pytest.mark.parametrize(("text", "launches"), FUSED)
def test_fused(text: str, launches: int, rng: np.random.Generator) -> None:
    plan = agrees(body(text), rng)
    assert sum(isinstance(step, Launch) for step in plan.steps) == launches
    assert not copies(plan)


# (operations, results, copies)
STATES = [
    # the new state is computed in the memory of the old one
    ("%a = exp %x! return %a", "f32[B, 6] aliases %s", 0),
    # unless that is read by the same kernel, or later
    ("%a = add %x, %s! return %a", "f32[B, 6] aliases %s", 1),
    ("%a = exp %x! %b = softmax %s! %c = add %a, %b! return %a, %c", "s! aliases %s, y!", 1),
    # states that are exchanged, kept, or returned as other results as well
    ("return %s, %t", "f32[B, 6] aliases %t, f32[B, 6] aliases %s", 4),
    ("return %s", "f32[B, 6] aliases %s", 0),
    ("%a = exp %x! return %a, %s", "f32[B, 6] aliases %s, f32[B, 6]", 2),
    ("return %x, %x", "a!, b!", 2),
    ("%a = exp %x! return %a, %a", "a!, b!", 1),
    ("%a = exp %x! %b = reshape %a {shape=[6*B]} : f32[6*B] return %a, %b", "a!, b: f32[6*B]", 1),
]


@pytest.mark.parametrize(("text", "results", "expected"), STATES)
def test_states(text: str, results: str, expected: int, rng: np.random.Generator) -> None:
    plan = agrees(body(text, "%x!, %s!, %t!", results), rng)
    assert copies(plan) == expected


CACHE = "%c: f32[B, 2, 8, 4], %x: f32[B, 1, 8], %n: i32[B]"
UPDATE = "%u = cache_update %c, %x, %n ? "  # `?` is the type of a cache
UPDATES = [
    (UPDATE + "return %u", "u? aliases %c", 0),
    # an input stays as it is
    (UPDATE + "return %u", "u?", 1),
    # the old cache is read before it is updated, wherever that is written
    (UPDATE + "%o = exp %c ? return %u, %o", "u? aliases %c, o?", 0),
    (UPDATE + "%v = sub %u, %c ? return %u, %v", "u? aliases %c, v?", 2),
    # two updates of one cache
    (
        UPDATE + "%y = neg %x : f32[B, 1, 8] %v = cache_update %c, %y, %n ? return %u, %v",
        "u? aliases %c, v?",
        3,
    ),
]


@pytest.mark.parametrize(("text", "results", "most"), UPDATES)
def test_updates_in_place(text: str, results: str, most: int, rng: np.random.Generator) -> None:
    module = body(*(each.replace("?", ": f32[B, 2, 8, 4]") for each in (text, CACHE, results)))
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
    chain = " ".join(f"%a{i + 1} = softmax %a{i}!" for i in range(4))
    text = f"%a0 = softmax %x! {chain} %b = add %a4, %a1! return %b, %b"
    return Planner(body(text, results="a!, b!")).plan({"B": 5})


def test_text() -> None:
    plan = long_plan()
    text = print_plan(plan)
    assert plan.arena == 3 * 256  # of five values in the arena, three are alive at a time
    early = [step.programmatic for step in plan.steps if isinstance(step, Launch)]
    assert early == [False, True, True, True, True, True]
    assert text.count(" pdl\n") == 5
    for each in plan.buffers.values():
        offset = f" +{each.offset}" if each.place == "arena" else ""
        assert f"  buffer {each.name} f32[5, 6] {each.place}{offset}\n" in text
    first = r"launch softmax_\w+ grid 1 1 1 block 256 \(%x, out %a0, 5\)"
    assert re.search(rf"  {first}\n    %a0 bytes 240 flops 30\n", text)
    assert "  call memory.copy (result.a, out result.b) {nbytes=120}\n    bytes 240" in text
    assert text.endswith("  return result.a result.b\n")


def _with(plan: Plan, number: int, **changes: Any) -> Plan:
    steps: list[Any] = list(plan.steps)
    steps[number] = replace(steps[number], **changes)
    return replace(plan, steps=tuple(steps))


def _moved(plan: Plan, name: str, offset: int) -> Plan:
    moved = replace(plan.buffers[name], offset=offset)
    return replace(plan, buffers={**plan.buffers, name: moved})


BOTH = Argument("%x", True), Argument("%a0", True)
DAMAGES: list[tuple[Callable[[Plan], Plan], str]] = [
    (lambda p: _with(p, 1, kernel="other"), "no such kernel"),
    (lambda p: _with(p, 1, grid=(0, 1, 1)), "the grid is"),
    (lambda p: _with(p, 1, block=2048), "2048 threads"),
    (lambda p: _with(p, 1, cluster=7), "not a multiple of 7"),
    (lambda p: _with(p, 1, early=(0,)), "not constant"),
    (lambda p: _with(p, 0, programmatic=True), "start early"),
    (lambda p: _with(p, 0, arguments=(Argument("%z"),)), "no buffer %z"),
    (lambda p: _with(p, 0, arguments=BOTH), "one of the inputs"),
    (lambda p: _moved(p, "%a0", 10), "not aligned"),
    (lambda p: _moved(p, "%a0", p.buffers["%a1"].offset), "overlap"),
    (lambda p: replace(p, steps=p.steps[::-1]), "before it is written"),
    (lambda p: replace(p, results=("%x",)), "neither an output nor a state"),
]


def test_verify_sees_damage() -> None:
    plan = long_plan()
    verify_plan(plan)
    for damage, message in DAMAGES:
        with pytest.raises(Error, match=message):
            verify_plan(damage(plan))


def test_a_larger_plan_shares_kernels() -> None:
    """Sizes are arguments: plans at other sizes have the same kernels."""
    planner = Planner(body("%a = softmax %x! %b = exp %a! return %b"))
    assert planner.plan({"B": 1}).kernels == planner.plan({"B": 9}).kernels


def test_plans_that_are_made_again_leave_nothing() -> None:
    planner = Planner(body("%a = softmax %x : f32[B, 6]\n%b = exp %a : f32[B, 6]\nreturn %b"))
    made: list[weakref.ref[Function]] = []
    for capability in (80, 90):
        planner.device = Device(Target(capability))
        made.append(weakref.ref(planner.regime({"B": 1}).launches.function))
    gc.collect()
    assert [function() is None for function in made] == [True, False]


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
    launches = Planner(module).regime({"B": rows}).launches
    assert any("unpacked" in why for _, why in launches.declined) is not fused
    assert any(value.name == "w" for value in launches.stored) is fused


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
