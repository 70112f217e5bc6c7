"""Replication analysis: its claims against numpy, and a case per rule."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from irc.analysis.frames import Dataflow, Frame
from irc.analysis.layout import WHOLE, Place
from irc.analysis.replication import check_replication, entries, replication
from irc.backends.reference import evaluate_ranks
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.verify import verify
from irc.ops import Return
from irc.text import parse_module
from tests.analysis.layout_cases import WRONG
from tests.analysis.local_modules import local_inputs, local_module
from tests.analysis.replication_cases import ALLOWED, MLP, REFUSED, check_unruled
from tests.analysis.test_mutations import EVERYWHERE, ON_ONE_RANK
from tests.fresh import session_seed


def changed(*changes: tuple[str, str]) -> Module:
    text = MLP
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    module = parse_module(text)
    verify(module)
    return module


def test_values_that_differ() -> None:
    module = changed(("%n = neg %k", '%r = rank {axis="tp"} : i32[]\n    %n = neg %k'))
    found = {value.name: set(axes) for value, axes in replication(module).items()}
    assert {name for name, axes in found.items() if not axes} == {"bias", "x", "ids", "s", "y"}
    assert {name for name, axes in found.items() if axes == {"tp"}} == set("khatnr") | {
        "up",
        "down",
        "table",
    }


@pytest.mark.parametrize("name", REFUSED | WRONG)
def test_rule(name: str) -> None:
    changes, words, line = (REFUSED | WRONG)[name]
    module = changed(*changes)
    with pytest.raises(Error) as caught:
        check_replication(module)
    text, at = str(caught.value), 0
    assert text.startswith(f"model.py:{line}"), text
    for word in words:
        assert word in text[at:], (word, text)
        at = text.index(word, at)


@pytest.mark.parametrize("name", ALLOWED)
def test_valid_changes(name: str) -> None:
    check_replication(changed(*ALLOWED[name].changes))


CALLS = """
module @m local mesh(tp=2) {
  weight @w : f32[4, 2] = random("w", 7, 0.5, [4, 4]).shard(1, tp)
  func @block(%x: f32[4, 2]) -> (f32[4, 4]) {
    %y = linear %x, @w : f32[4, 4] loc("block.py":1)
    return %y
  }
  func @outer(%x: f32[4, 2]) -> (f32[4, 4]) {
    %y = call %x {callee=@block} : f32[4, 4]
    %z = neg %y : f32[4, 4]
    return %z
  }
  func @forward(%x: f32[4, 2], %v: f32[4, 2]) -> (y: f32[4, 4]) layouts(%v: f32[4, 4@tp]) {
    %a = call %v {callee=@outer} : f32[4, 4]
    %b = all_reduce %a {axis="tp", group_size=2} : f32[4, 4] loc("block.py":9)
    return %b
  }
}
"""


def test_calls_are_followed() -> None:
    module = parse_module(CALLS)
    assert [function.name for function in entries(module)] == ["forward"]
    check_replication(module)
    found = {value: set(axes) for value, axes in replication(module).items()}
    assert found[module.functions["block"].args[0]] == {"tp"}
    lost = parse_module(CALLS.replace("return %b", "return %a"))
    with pytest.raises(Error, match=r"the call %a uses %v, which is sharded over tp"):
        check_replication(lost)
    early = parse_module(CALLS.replace("%z = neg %y", "%z = tanh %y"))
    with pytest.raises(Error, match=r"the tanh %z takes as complete the partial sum over tp"):
        check_replication(early)


TAKEN_TWICE = """
module @m local mesh(tp=2) {
  func @take(%x: f32[4, 2], %i: i32[3]) -> (f32[3, 2]) {
    %y = gather %x, %i : f32[3, 2]
    return %y
  }
  func @forward(%x: f32[4, 2], %v: f32[4, 2], %i: i32[3]) -> (a: f32[3, 2], b: f32[3, 2])
    layouts(%v: f32[4, 4@tp], b: f32[3, 4@tp]) {
    %a = call %x, %i {callee=@take} : f32[3, 2]
    %b = call %v, %i {callee=@take} : f32[3, 2]
    return %a, %b
  }
}
"""


def test_a_gather_in_a_function_with_two_calls() -> None:
    check_replication(parse_module(TAKEN_TWICE))
    with pytest.raises(Error, match="the result b of @forward may differ between the ranks of tp"):
        check_replication(parse_module(TAKEN_TWICE.replace(", b: f32[3, 4@tp]", "")))


MERGED = """
module @m local mesh(dp=2, tp=2) {
  func @forward(%x: f32[6, 4]) -> (y: f32[2, 3, 2])
    layouts(%x: f32[12@dp, 4], y: f32[4@dp, 3, 4@tp]) {
    %a = reshape %x {shape=[2, 3, 2, 2]} : f32[2, 3, 2, 2]
    %rank = rank {axis="tp"} : i32[]
    %y = gather %a, %rank {dim=2} : f32[2, 3, 2]
    return %y
  }
}
"""


def test_a_shard_of_what_was_reshaped_before() -> None:
    check_replication(parse_module(MERGED))
    other = MERGED.replace("4@dp, 3, 4@tp", "4@dp, 6@tp, 2")
    with pytest.raises(Error, match="a dimension is replicated instead of sharded over tp"):
        check_replication(parse_module(other))


FOLDED = """
module @m local mesh(tp=2) {
  func @forward(%x: i32[2]) -> (y: bool[2]) layouts(%x: i32[4@tp], y: bool[4@tp]) {
    %spare = constant {values=[2, 3], shape=[2], dtype="i32"} : i32[2]
    %z = maximum %x, %spare : i32[2]
    %y = lt %z, %spare : bool[2]
    return %y
  }
}
"""


def test_a_constant_that_was_an_iota_counts_in_every_shard() -> None:
    check_replication(parse_module(FOLDED))
    with pytest.raises(Error, match="sharded over tp in x and replicated in y"):
        check_replication(parse_module(FOLDED.replace("[2, 3]", "[2, 4]")))


PASSED_ON = """
module @m local mesh(tp=2) {
  func @same(%x: f32[4]) -> (f32[4]) {
    return %x
  }
  func @forward(%v: f32[4]) -> (y: f32[4]) layouts(%v: f32[8@tp]) {
    %a = call %v {callee=@same} : f32[4]
    return %a
  }
}
"""


def test_an_argument_that_a_call_returns() -> None:
    with pytest.raises(
        Error, match=r"the call %a uses %v, .* over tp: put an all_gather over tp behind it"
    ):
        check_replication(parse_module(PASSED_ON))


def test_the_global_view_is_refused() -> None:
    with pytest.raises(Error, match=r"module @m is in the global view.*localize it first"):
        check_replication(parse_module("module @m { func @f() -> () { return } }"))


def test_an_operation_without_a_rule_takes_replicated_values() -> None:
    check_unruled()
    with pytest.raises(Error, match=r"the unruled at f\.py:3 has no sharding rule"):
        check_unruled("%x: f32[8@tp], y: f32[8@tp]")


FUSED = """
module @m local mesh(tp=2) {
  weight @w : f32[4, 2] = random("w", 7, 0.5, [4, 4]).shard(1, tp)
  weight @n : f32[4] = random("n", 7, 0.5)
  func @forward(%x: f32[4, 4], %v: f32[4, 2]) -> (n: f32[4, 4], s: f32[4, 4]) layouts(%v: f32[4, 4@tp]) {
    %t = linear %v, @w : f32[4, 4] loc("f.py":1)
    %n, %s = all_reduce_rms_norm %t, %x, @n {axis="tp", group_size=2} : f32[4, 4], f32[4, 4] loc("f.py":2)
    return %n, %s
  }
}
"""  # noqa: E501


def test_a_norm_fused_with_a_sum() -> None:
    check_replication(parse_module(FUSED))
    twice = parse_module(FUSED.replace("%t, %x", "%x, %x"))
    with pytest.raises(Error, match=r"the all_reduce_rms_norm at f\.py:2 reduces a value .* same"):
        check_replication(twice)
    late = parse_module(FUSED.replace("%n, %s =", "%u = tanh %t : f32[4, 4]\n %n, %s =").replace(
        "all_reduce_rms_norm %t", "all_reduce_rms_norm %u"))  # fmt: skip
    with pytest.raises(Error, match=r"the tanh %u takes as complete .* the linear at f\.py:1"):
        check_replication(late)


LAYOUTS = """
module @m local mesh(dp=2, tp=2) {
  weight @turned : f32[8, 2] = random("a", 7, 0.5, [4, 8]).shard(0, tp).transpose(1, 0)
  weight @stacked : f32[1, 2, 4] = concat(random("b", 7, 0.5, [4, 4]).shard(0, tp).unsqueeze(0); 0)
  func @forward(%x: f32[4, 2], %y: f32[4, 8], %z: f32[4, 2]) -> ()
    layouts(%x: f32[16@dp.tp, 2], %z: f32[4, 4@tp]) {
    %gathered = all_gather %x {axis="tp", dim=0, group_size=2} : f32[8, 2]
    %columns = reshape %x {shape=[4, 1, 2]} : f32[4, 1, 2]
    %flat = reshape %x {shape=[8]} : f32[8]
    %summed = reduce_sum %x {dims=[0]} : f32[2]
    %scattered = reduce_scatter %summed {axis="dp", dim=0, group_size=2} : f32[1]
    %product = linear %z, @turned : f32[4, 8]
    %exchanged = all_to_all %x {axis="tp", split=1, concat=0, group_size=2} : f32[8, 1]
    %cut = collective_scatter %y {axis="tp", dim=1, group_size=2} : f32[4, 4]
    %folded = reshape %cut {shape=[1, 16]} : f32[1, 16]
    %unfolded = reshape %folded {shape=[2, 2, 2, 2]} : f32[2, 2, 2, 2]
    %rooted = collective_gather %cut {axis="tp", dim=1, group_size=2} : f32[4, 8]
    %squared = mul %rooted, %rooted : f32[4, 8]
    %zero = full {value=0.0, shape=[4, 8]} : f32[4, 8]
    return
  }
}
"""
# per value: the places of its dimensions, the axes that it is partial over, and the only root
WANTED: dict[str, tuple[tuple[Place, ...], str, object]] = {
    "turned": ((WHOLE, ("tp",)), "", None),
    "stacked": ((WHOLE, ("tp",), WHOLE), "", None),
    "x": ((("dp", "tp"), WHOLE), "", None),
    "gathered": ((("dp",), WHOLE), "", None),
    "columns": ((("dp", "tp"), WHOLE, WHOLE), "", None),
    "flat": ((("dp", "tp"),), "", None),
    "folded": ((WHOLE, (4, "tp")), "", None),
    "unfolded": ((WHOLE, WHOLE, ("tp",), WHOLE), "", None),
    "summed": ((WHOLE,), "dp tp", None),
    "scattered": ((("dp",),), "tp", None),
    "product": ((WHOLE, WHOLE), "tp", None),
    "exchanged": ((("dp",), ("tp",)), "", None),
    "cut": ((WHOLE, ("tp",)), "", None),
    "rooted": ((WHOLE, WHOLE), "tp", (("tp",), 0)),
    "squared": ((WHOLE, WHOLE), "", (("tp",), 0)),
    "zero": ((WHOLE, WHOLE), "", None),
}


def test_layouts() -> None:
    module = parse_module(LAYOUTS)
    verify(module)
    layouts = Dataflow(module, lambda *_: None).entry(module.main).layouts
    found = {str(value.name): layout for value, layout in layouts.items()}
    for name, (dims, partial, root) in WANTED.items():
        layout = found[name]
        assert (layout.dims, set(layout.partial), layout.root) == (dims, {*partial.split()}, root)
        assert layout.zero == (name == "zero")


def test_reasons_are_found_in_time() -> None:
    """Every value is visited once."""
    lines = [f"%d{i} = add %d{i - 1}, %d{i - 1} : f32[B, 4]" for i in range(1, 60)]
    twice = "\n    ".join(["%d0 = neg %t : f32[B, 4]", *lines])
    module = changed(("return %y", f"{twice}\n    return %d59"))
    with pytest.raises(Error, match=r"because the linear at model\.py:3 in mlp uses @down"):
        check_replication(module)


@pytest.mark.parametrize("seed", [session_seed() * 1000 + i for i in range(30)])
def test_values_claimed_replicated_are_equal(seed: int) -> None:
    """Every value of a valid module, and of one with accepted damage, against the arrays."""
    module = local_module(seed)
    rng = random.Random(seed)
    if rng.random() < 0.7:
        rng.choice([*EVERYWHERE, *ON_ONE_RANK])(module, rng)
    try:
        frame = Dataflow(module, lambda *_: None).entry(module.main)
    except Error:
        return
    for value, ranks in computed(module, seed).items():
        check_claims(module, frame, value, ranks)


def computed(module: Module, seed: int) -> dict[Any, list[np.ndarray]]:
    """All values of the main function, one array per rank."""
    main = module.main
    values = [*main.args, *(result for op in main for result in op.results)]
    assert main.last is not None
    main.last.erase()
    main.append(Return(values))
    main.results = ()
    results = evaluate_ranks(module, local_inputs(module, seed))
    return {v: [found[f"result{i}"] for found in results] for i, v in enumerate(values)}


def check_claims(module: Module, frame: Frame, value: Any, ranks: list[np.ndarray]) -> None:
    layout = frame.layouts[value]
    if layout.zero:
        assert not any(array.any() for array in ranks), value
    for axis in module.mesh.names:
        if axis in layout.axes:
            continue
        for group in module.mesh.groups((axis,)):
            for rank in group[1:]:
                assert ranks[rank].tobytes() == ranks[group[0]].tobytes(), (value, axis, rank)
