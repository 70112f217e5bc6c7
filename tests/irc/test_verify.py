"""Every rule of the verifier is broken once; a rule that no case breaks fails the suite."""

import ast
import inspect
import traceback

import pytest

from irc.errors import Error
from irc.ir import verify as verify_module
from irc.ir.core import Function, Module, Result, Value, Weight  # noqa: F401
from irc.ir.dims import symbol  # noqa: F401
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.ops import Add, Call, Concat, Neg, Rank, Return  # noqa: F401
from irc.text import parse_module
from irc.weights import FileRef, Pad, ProductRef, QuantizedRef, Ref, Shard, Slice, ZerosRef  # noqa: F401

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


# statements that break the module; the error
CASES = [
    ("b.set_operands((x, Weight(w.type, 'w', w.ref)))", "@w is not a weight of this module"),
    ("w.name = 'v'", "weight @v is filed under the name 'w'"),
    ("w.ref = FileRef('lost', 'w')", "refers to the file @lost, which is not declared"),
    (
        "w.ref = w.ref.then(Shard(0, ('pp',)))",
        r"weight @w: .shard\(0, pp\) names the axis pp, which the mesh \(tp=2\) lacks",
    ),
    (
        "w.ref = ZerosRef((4, 8), 'f32').then(Slice(((0, 5), None)))",
        r"weight @w: \[0:5, :\] reaches outside a dimension of 4",
    ),
    (
        "w.ref = ZerosRef((4, 8), 'f32').then(Pad(1, 1))",
        r"@w: zeros\(\[4, 8\], f32\).pad\(1, 1\) is f32\[4, 9\], but the weight is f32\[B, 8\]",
    ),
    (
        "w.ref = quantized('scales', 'int4', 0, 3)",
        r"@w: blocks of \[0, 3\] do not divide .*\[4, 8\]",
    ),
    (
        "w.ref = quantized('codes', 'int4', 0, 4)",
        r"@w: quantized.* is i4\[4, 8\], but the weight is f32\[B, 8\]",
    ),
    ("w.ref = quantized('codes', 'int4', 0, 0, 'i8')", "quantizes i8; expected f32, f16, bf16"),
    ("w.ref = quantized('codes', 'int4', 0)", r"\[0\] has not the 2 dimensions of \[4, 8\]"),
    (
        "w.ref = ProductRef(ZerosRef((4, 8), 'f32'), ZerosRef((4,), 'f32'), 1)",
        r"has a factor of \[4\] for \[4, 8\]; expected a number per element of dimension 1",
    ),
    ("w.type = w.type.replace(partial=('tp',))", "stored bytes are never a partial sum"),
    ("f.name = 'other'", "function @other is filed under the name 'forward'"),
    ("x.index = 1", "argument 0 of @forward belongs to another function"),
    ("c.name = 'x'", "two arguments called %x"),
    ("f.unlink(a); f.insert(a, b.next)", "%a is used before it is defined"),
    ("x.users.clear()", r"%x: f32\[B, 8\] records 0 uses by <neg %a: f32\[B, 8\]>, not 1"),
    ("a.result.users[b] = 2", r"%a: .* records 2 uses by <add .*>, not 1"),
    ("x.users[b] = 1", r"%x: .* records 1 uses by <add .*>, not 0"),
    ("a.results = ()", "neg has 0 results, but it makes 1"),
    ("a.result.type = T", r"the result of neg is f32\[8\], but it makes f32\[B, 8\]"),
    ("a.result.owner = b", "a result of neg belongs to another operation"),
    ("f.append(Neg(x))", "operations follow return"),
    ("f.append(Return([x]))", "operations follow return"),
    ("f.last.erase()", "@forward does not end in return"),
    ("f.results = (Result('y'),)", "declares 1 results and returns 2"),
    ("f.results = (Result('y'), Result('y'))", "two results called y"),
    ("f.results = (Result('y'), Result('c', 'cache'))", "aliases %cache, which is not an argument"),
    ("d.set_operands((b.result, b.result)); c.type = T", "both must be the same"),
    ("f.results = (Result('y', 'c'), Result('c', 'c'))", "two results of @forward alias %c"),
    ("x.type = on('pp')", "has no axis 'pp'"),
    ("m.local = True; x.type = on('tp')", "in a local module shapes are one rank's"),
    ("m.name = 'my model'", "'my model' is not a valid name for the module"),
    ("m.dims['S T'] = (1, 1, 1)", "'S T' is not a valid name for a dim"),
    ("m.dims['B\u00b2'] = (1, 1, 1)", "'B\u00b2' is not a valid name for a dim"),  # nor in C++
    ("m.dims['B'] = (4, 2, 8)", "the range of B is min:typical:max in increasing order, not 4:2:8"),
    (
        "f.results = (Result('%y'), Result('c'))",
        "'%y' is not a valid name for a result of @forward",
    ),
    ("f.args[0].name = 'a\\n'", r"'a\\n' is not a valid name for an argument of @forward"),
    (
        "x.type = TensorType('f32', (symbol('B T'), 8))",
        r"f32\[B T, 8\], but 'B T' is not a valid name for a dim",
    ),
    (
        "m.local = True; w.ref = w.ref.then(Shard(1, ('tp',)))",
        r"weight @w is f32\[B, 8\], but .* gives f32\[B, 8\] of f32\[B, 16@tp\]",
    ),
    (
        "m.local = True; d.set_operands((a.result, c));"
        "b.result.type = x.type.part_of(x.type.replace(varying=('tp',)))",
        "the result y of @forward varies over tp",
    ),
    ("x.type = T.part_of(on('tp'))", "one rank's type, but the module is in the global view"),
    (
        "m.local = True; x.type = T.part_of(on('tp'))",
        r"one rank's shard of f32\[B, 8@tp\] is f32\[B, 4\]",
    ),
    (
        "m.local = True; x.type = T.part_of(on('pp'))",
        r"f32\[B, 8@pp\], but the mesh \(tp=2\) has no",
    ),
    ("del m.dims['B']; m.dims['S'] = (1, 1, 1)", r"dims\(\) gives no range for B"),
    ("m.files['a b'] = 'data.bin'", "'a b' is not a valid name for a file; use letters"),
    (
        "m.add_weight(Weight(T, 'a b', w.ref))",
        "'a b' is not a valid name for a weight; use letters",
    ),
    (
        "m.add_function(Function('a b')).append(Return([]))",
        "'a b' is not a valid name for a function; use letters",
    ),
    ("f.insert(Rank(axis='pp'), a)", r"mesh \(tp=2\) has no axis 'pp'"),
    ("o = Value(x.type, None, 0, 'o'); f.insert(Add(o, o), a)", "%o is used before it is defined"),
    ("f.insert(Call([x, c], callee=f), a)", "@forward calls @forward, which is not defined before"),
    ("add_callers(m, 101, 1)", "@f100 has calls nested 101 deep; at most 100"),
    ("add_callers(m, 40, 2)", r"the calls of @f\d+ run \d+ operations; at most 250000"),
    ("f.insert(Concat([x] * 10_001, dim=1), a)", "concat has 10001 operands; at most 10000"),
]


def quantized(part: str, format: str, *block: int | str) -> Ref:
    """A part of quantized zeros [4, 8]; behind the block there may be the dtype of the zeros."""
    sizes = tuple(size for size in block if isinstance(size, int))
    kind = next((each for each in block if isinstance(each, str)), "f32")
    return QuantizedRef(ZerosRef((4, 8), kind), part, format, sizes)


def add_callers(module: Module, count: int, calls: int) -> None:
    """Functions of which each calls the one before it `calls` times."""
    callee = module.main
    for i in range(count):
        function = Function(f"f{i}", [(str(arg.name), arg.type) for arg in callee.args])
        for _ in range(calls):
            function.append(Call(function.args, callee=callee))
        function.append(Return(function.args))
        callee = module.add_function(function)


def broken(statements: str) -> Module:
    """The module after the statements; they see its parts and everything imported here."""
    module = parse_module(TEXT)
    function = module.main
    a, b, d, _ = function
    x, c = function.args
    local = {"m": module, "f": function, "w": module.weights["w"], "x": x, "c": c}
    local |= {"a": a, "b": b, "d": d, "on": lambda axis: x.type.replace(axes=((), (axis,)))}
    exec(statements, globals() | local)
    return module


def test_the_module_is_valid_before_it_is_broken() -> None:
    verify(broken(""))


def test_every_rule_is_broken_by_a_case() -> None:
    tree = ast.parse(inspect.getsource(verify_module))
    rules = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    lines: set[int] = set()
    for statements, message in CASES:
        with pytest.raises(Error, match=message) as caught:
            verify(broken(statements))
        frames = traceback.extract_tb(caught.value.__traceback__)
        lines.add([f.lineno or 0 for f in frames if f.filename == verify_module.__file__][-1])
    assert len(rules) > 20
    assert rules == {rule for rule in rules if any(rule <= line <= rule + 4 for line in lines)}
