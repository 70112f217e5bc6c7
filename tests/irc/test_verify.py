"""Every rule of the verifier is broken once; a rule that no case breaks fails the suite."""

from __future__ import annotations

import ast
import inspect
import traceback
from collections.abc import Callable

import pytest

from irc import verify as verify_module
from irc.core import Function, Module, Result, Value, Weight
from irc.dims import symbol
from irc.errors import Error
from irc.ops import Add, Neg, Return
from irc.text import parse_module
from irc.types import TensorType
from irc.verify import verify
from irc.weights import FileRef, Pad, Shard, Slice, ZerosRef

TEXT = """
module @m mesh(tp=2) dims(B=1:2:4) {
  file @ckpt = "model.safetensors"
  weight @w : f32[B, 8] = @ckpt["w"]
  func @forward(%x: f32[B, 8], %c: f32[B, 8]) -> (y: f32[B, 8], c: f32[B, 8] aliases %c) {
    %a = neg %x : f32[B, 8]
    %b = add %a, @w : f32[B, 8]
    %d = add %b, %c : f32[B, 8]
    return %b, %d
  }
}
"""
T = TensorType("f32", (8,))


def fresh() -> tuple[Module, Function]:
    module = parse_module(TEXT)
    return module, module.main


def foreign_weight(m: Module, f: Function) -> None:
    other = Weight(m.weights["w"].type, "w", m.weights["w"].ref)
    op = list(f)[1]
    op.set_operands((op.operands[0], other))


def misfiled_weight(m: Module, f: Function) -> None:
    m.weights["w"].name = "v"


def undeclared_file(m: Module, f: Function) -> None:
    m.weights["w"].ref = FileRef("lost", "w")


def shard_off_the_mesh(m: Module, f: Function) -> None:
    m.weights["w"].ref = m.weights["w"].ref.then(Shard(0, ("pp",)))


def cut_off_the_zeros(m: Module, f: Function) -> None:
    m.weights["w"].ref = ZerosRef((4, 8), "f32").then(Slice(((0, 5), None)))


def unlike_zeros(m: Module, f: Function) -> None:
    m.weights["w"].ref = ZerosRef((4, 8), "f32").then(Pad(1, 1))


def pending_weight(m: Module, f: Function) -> None:
    m.weights["w"].type = m.weights["w"].type.replace(partial=("tp",))


def misfiled_function(m: Module, f: Function) -> None:
    f.name = "other"


def foreign_argument(m: Module, f: Function) -> None:
    f.args[0].index = 1


def twin_arguments(m: Module, f: Function) -> None:
    f.args[1].name = "x"


def used_before_defined(m: Module, f: Function) -> None:
    first, second = list(f)[:2]
    f.unlink(first)
    f.insert(first, second.next)


def unrecorded_use(m: Module, f: Function) -> None:
    f.args[0].users.clear()


def miscounted_use(m: Module, f: Function) -> None:
    op = list(f)[1]
    op.operands[0].users[op] = 2


def stale_use(m: Module, f: Function) -> None:
    f.args[0].users[list(f)[1]] = 1


def lost_result(m: Module, f: Function) -> None:
    first = next(iter(f))
    first.results = ()


def wrong_type(m: Module, f: Function) -> None:
    next(iter(f)).result.type = T


def foreign_result(m: Module, f: Function) -> None:
    next(iter(f)).result.owner = list(f)[1]


def bad_name(m: Module, f: Function) -> None:
    next(iter(f)).result.name = "a.b"


def after_return(m: Module, f: Function) -> None:
    f.append(Neg(f.args[0]))


def two_returns(m: Module, f: Function) -> None:
    f.append(Return([f.args[0]]))


def no_return(m: Module, f: Function) -> None:
    assert f.last is not None
    f.last.erase()


def too_few_declared(m: Module, f: Function) -> None:
    f.results = (Result("y"),)


def twin_results(m: Module, f: Function) -> None:
    f.results = (Result("y"), Result("y"))


def unknown_alias(m: Module, f: Function) -> None:
    f.results = (Result("y"), Result("c", "cache"))


def unlike_alias(m: Module, f: Function) -> None:
    f.args[1].users.clear()
    f.args[1].type = T
    op = list(f)[2]
    op.operands = (op.operands[0], op.operands[0])
    op.operands[0].users[op] = 2


def double_alias(m: Module, f: Function) -> None:
    f.results = (Result("y", "c"), Result("c", "c"))


def unknown_axis(m: Module, f: Function) -> None:
    f.args[0].type = f.args[0].type.replace(axes=((), ("pp",)))


def sharded_in_local_view(m: Module, f: Function) -> None:
    m.local = True
    f.args[0].type = f.args[0].type.replace(axes=((), ("tp",)))


def undeclared_symbol(m: Module, f: Function) -> None:
    del m.dims["B"]
    m.dims["S"] = (1, 1, 1)


def unwritable_module(m: Module, f: Function) -> None:
    m.name = "my model"


def unwritable_dim(m: Module, f: Function) -> None:
    m.dims["S T"] = (1, 1, 1)


def falling_range(m: Module, f: Function) -> None:
    m.dims["B"] = (4, 2, 8)


def unwritable_result(m: Module, f: Function) -> None:
    f.results = (Result("y.0"), Result("c"))


def unwritable_symbol(m: Module, f: Function) -> None:
    f.args[0].type = TensorType("f32", (symbol("B T"), 8))


def layouts_of_the_global_view(m: Module, f: Function) -> None:
    f.layouts["%x"] = f.args[0].type.replace(axes=((), ("tp",)))


def layout_of_a_stranger(m: Module, f: Function) -> None:
    m.local = True
    f.layouts["z"] = T


def layout_of_a_state_that_a_result_keeps(m: Module, f: Function) -> None:
    m.local = True
    f.layouts["c"] = f.args[1].type


def layout_of_other_parts(m: Module, f: Function) -> None:
    m.local = True
    f.layouts["y"] = f.args[0].type.replace(axes=((), ("tp",)))


def layout_off_the_mesh(m: Module, f: Function) -> None:
    m.local = True
    f.layouts["%x"] = f.args[0].type.replace(axes=((), ("pp",)))


CASES: dict[Callable[[Module, Function], None], str] = {
    foreign_weight: "@w is not a weight of this module",
    misfiled_weight: "weight @v is filed under the name 'w'",
    undeclared_file: "refers to the file @lost, which is not declared",
    shard_off_the_mesh: r"weight @w has .shard\(0, pp\), but the mesh \(tp=2\) lacks pp",
    cut_off_the_zeros: r"weight @w: \[0:5, :\] reaches outside a dimension of 4",
    unlike_zeros: r"@w is f32\[B, 8\], but zeros\(\[4, 8\], f32\).pad\(1, 1\) is f32\[4, 9\]",
    pending_weight: "stored bytes are never a pending sum",
    misfiled_function: "function @other is filed under the name 'forward'",
    foreign_argument: "argument 0 of @forward belongs to another function",
    twin_arguments: "two arguments called %x",
    used_before_defined: "%a is used before it is defined",
    unrecorded_use: "the use of %x is not recorded",
    miscounted_use: "the uses of %a are counted wrongly",
    stale_use: "%x records a use by an operation that does not use it",
    lost_result: "neg has 0 results, but it makes 1",
    wrong_type: r"the result of neg is f32\[8\], but it makes f32\[B, 8\]",
    foreign_result: "a result of neg belongs to another operation",
    bad_name: "'a.b' is no name for a value",
    after_return: "operations follow return",
    two_returns: "operations follow return",
    no_return: "@forward does not end in return",
    too_few_declared: "declares 1 results and returns 2",
    twin_results: "two results called y",
    unknown_alias: "aliases %cache, which is no argument",
    unlike_alias: "both must be the same",
    double_alias: "two results of @forward alias %c",
    unknown_axis: "has no axis 'pp'",
    sharded_in_local_view: "in a local module shapes are one rank's",
    unwritable_module: "'my model' is no name for the module",
    unwritable_dim: "'S T' is no name for a dim",
    falling_range: "the range of B is min:typical:max in rising order, not 4:2:8",
    unwritable_result: "'y.0' is no name for a result of @forward",
    unwritable_symbol: r"f32\[B T, 8\], but 'B T' is no name for a dim",
    layouts_of_the_global_view: "@forward has layouts, which are for the local view only",
    layout_of_a_stranger: "has a layout of z, which it neither takes nor gives",
    layout_of_a_state_that_a_result_keeps: "has a layout of c, which it neither takes nor gives",
    layout_of_other_parts: r"the layout of y in @forward is f32\[B, 8@tp\], of which one rank",
    layout_off_the_mesh: r"the layout of %x is f32\[B, 8@pp\], but the mesh \(tp=2\) has no",
    undeclared_symbol: r"dims\(\) gives no range for B",
}


def test_the_module_is_sound_before_it_is_broken() -> None:
    verify(fresh()[0])


@pytest.mark.parametrize("damage", CASES, ids=lambda damage: damage.__name__)
def test_rule(damage: Callable[[Module, Function], None]) -> None:
    module, function = fresh()
    damage(module, function)
    with pytest.raises(Error, match=CASES[damage]):
        verify(module)


def test_every_rule_is_broken_by_a_case() -> None:
    tree = ast.parse(inspect.getsource(verify_module))
    rules = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    broken: set[int] = set()
    for damage in CASES:
        module, function = fresh()
        damage(module, function)
        with pytest.raises(Error) as caught:
            verify(module)
        frames = traceback.extract_tb(caught.value.__traceback__)
        broken.add([f.lineno or 0 for f in frames if f.filename == verify_module.__file__][-1])
    assert len(rules) > 20
    assert rules == {line for line in rules if any(line <= b <= line + 4 for b in broken)}


@pytest.mark.parametrize("kind", ["file", "weight", "function"])
def test_names_that_cannot_be_written(kind: str) -> None:
    module = fresh()[0]
    name = "a b"
    if kind == "file":
        module.files[name] = "model.safetensors"
    elif kind == "weight":
        module.add_weight(Weight(T, name, FileRef("ckpt", "w")))
    else:
        module.add_function(Function(name)).append(Return([]))
    with pytest.raises(Error, match=f"'a b' is no name for a {kind}; use letters"):
        verify(module)


def test_values_of_other_functions_are_refused() -> None:
    module, function = fresh()
    stranger = Value(function.args[0].type, None, 0, "x")
    assert function.first is not None
    function.insert(Add(stranger, stranger), function.first)
    with pytest.raises(Error, match="%x is used before it is defined"):
        verify(module)
