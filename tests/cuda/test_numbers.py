"""Numbers at the edges of dtypes, and chains of operations in one kernel, against the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pytest

from irc.backends.cuda.codegen.kernels import elementwise
from irc.backends.cuda.plan import Template
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.prepare import load_tables
from irc.backends.reference import evaluate
from irc.ir.core import Module, Value
from irc.ir.dtypes import DTYPES, dtype, dtype_of, is_float, numpy_dtype
from irc.text import parse_module
from tests.cuda.emulate import prepare, run_templates
from tests.ops.compare import assert_close
from tests.ops.edges import fits, numbers

Array: TypeAlias = np.ndarray[Any, Any]
load_tables()
INTEGERS = [name for name, kind in DTYPES.items() if kind.is_integer]


def module_of(body: str, results: str, **arguments: str) -> Module:
    """A module with some statements, from the types of its arguments."""
    given = ", ".join(f"%{name}: {type}" for name, type in arguments.items())
    return parse_module(f"module @m {{ func @forward({given}) -> ({results}) {{ {body} }} }}")


def one_kernel(module: Module) -> list[Template]:
    """A kernel for each result of a module, with everything before it inside."""
    return [elementwise([value], module.main.args) for value in module.main.returned]


def computed(
    module: Module, inputs: Mapping[str, Array], sizes: Mapping[str, int] | None = None
) -> list[Array]:
    """The results of a module, each by one kernel."""
    values: dict[Value, Array] = {arg: inputs[str(arg.name)] for arg in module.main.args}
    found = run_templates(one_kernel(module), values, sizes)
    return [found[value] for value in module.main.returned]


@pytest.mark.parametrize("old", DTYPES)
@np.errstate(all="ignore")
def test_casts_of_all_numbers(old: str, rng: np.random.Generator) -> None:
    """Bit by bit, but where a number has no meaning in the integer."""
    x = numbers(old, rng)
    modules = {
        new: module_of(f'%y = cast %x {{dtype="{new}"}} : {new}[{x.size}] return %y',
                       f"{new}[{x.size}]", x=f"{old}[{x.size}]")
        for new in DTYPES
    }  # fmt: skip
    prepare(each.kernel for module in modules.values() for each in one_kernel(module))
    for new, module in modules.items():
        (got,) = computed(module, {"x": x})
        want = evaluate(module, {"x": x})["result0"]
        same = got == want
        if is_float(new):
            same |= np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64))
        elif is_float(old) and dtype(new).is_integer:
            same |= ~fits(x.astype(np.float64), new)
        assert same.all(), (
            f"{old} to {new}: {x[~same][:5]} is {got[~same][:5]}, not {want[~same][:5]}"
        )


BOTH = ("add", "sub", "mul", "floor_div", "mod", "minimum", "maximum")
ONE = ("neg", "abs", "sign")


def check_each(
    x: Array, y: Array, one: Iterable[str], both: Iterable[str], compared: Iterable[str] = ()
) -> None:
    """Compare operations on x alone and on both with the reference."""
    type, bools = f"{dtype_of(x)}[{x.size}]", f"bool[{x.size}]"
    kinds = {**dict.fromkeys((*both, *one), type), **dict.fromkeys(compared, bools)}
    rest = dict.fromkeys(one, "") | {"clip": " {low=-1, high=2}"}
    lines = [f"%{op} = {op} %x{rest.get(op, ', %y')} : {kind}" for op, kind in kinds.items()]
    body = f"{' '.join(lines)} return {', '.join('%' + op for op in kinds)}"
    module, inputs = module_of(body, ", ".join(kinds.values()), x=type, y=type), {"x": x, "y": y}
    wanted = evaluate(module, inputs).values()
    for op, got, want in zip(kinds, computed(module, inputs), wanted, strict=True):
        assert_close(got, want, f"{op} of {dtype_of(x)}")


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_around(name: str, rng: np.random.Generator) -> None:
    numbers_of = numbers(name, rng)
    x, y = (rng.choice(numbers_of, 3000) for _ in "xy")
    x[:8], y[:4] = numbers_of.min(), numbers_of.max()
    y[4:8] = np.array(-1).astype(numpy_dtype(name))
    check_each(x, np.where(y == 0, np.ones_like(y), y), ONE, BOTH)


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16"])
def test_infinities_and_nan(name: str) -> None:
    edges = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0]
    x, y = (a.reshape(-1).astype(numpy_dtype(name)) for a in np.meshgrid(edges, edges))
    one = "sqrt rsqrt reciprocal exp log erf round floor ceil sigmoid tanh relu softplus silu"
    one += " quick_gelu squared_relu gelu clip"
    check_each(x, y, (*ONE, *one.split()), (*BOTH, "div", "pow"), ("eq", "ne", "lt", "ge"))


CHAIN = """
%a = reshape %x {shape=[B, S, 3, 4]} : T[B, S, 3, 4]
%b = transpose %a {order=[0, 2, 1, 3]} : T[B, 3, S, 4]
%c = mul %b, %b : T[B, 3, S, 4]
%d = add %c, %scale : T[B, 3, S, 4]
%e = concat %d, %b {dim=2} : T[B, 3, 2*S, 4]
%f = pad %e {before=[0, 0, 1, 0], after=[0, 0, 0, 2], value=2} : T[B, 3, 2*S + 1, 6]
%g = flip %f {dims=[3]} : T[B, 3, 2*S + 1, 6]
%h, %rest = split %g {dim=2, sizes=[S, S + 1]} : T[B, 3, S, 6], T[B, 3, S + 1, 6]
%j = transpose %h {order=[0, 2, 3, 1]} : T[B, S, 6, 3]
%k = reshape %j {shape=[B, S, 18]} : T[B, S, 18]
%rows = embedding %ids, %k2 : T[B, S, 18]
%l = sub %k, %rows : T[B, S, 18]
return %l, %rest
"""


@pytest.mark.parametrize("name", ["f32", "bf16", "i32", "i4"])
def test_a_chain_in_one_kernel(name: str, rng: np.random.Generator) -> None:
    """Bit by bit: each value is rounded as if it were stored."""
    text = CHAIN.replace("T[", f"{name}[").replace("%k2", "%table")
    arguments = {"x": f"{name}[B, S, 12]", "scale": f"{name}[4]", "ids": "i32[B, S]"}
    arguments["table"] = f"{name}[5, 18]"
    results = f"{name}[B, S, 18], {name}[B, 3, S + 1, 6]"
    given = ", ".join(f"%{each}: {type}" for each, type in arguments.items())
    module = parse_module(
        "module @m dims (B=0:2:8, S=1:2:8) { "
        f"func @forward({given}) -> ({results}) {{ {text} }} }}"
    )
    for sizes in ({"B": 3, "S": 5}, {"B": 1, "S": 1}, {"B": 0, "S": 3}):
        b, s = sizes["B"], sizes["S"]
        drawn = [rng.normal(0, 3, shape) for shape in ((b, s, 12), (4,), (5, 18))]
        x, scale, table = (each.astype(numpy_dtype(name)) for each in drawn)
        ids = rng.integers(-2, 8, (b, s)).astype(np.int32)
        inputs = {"x": x, "scale": scale, "ids": ids, "table": table}
        wanted = evaluate(module, inputs).values()
        for got, want in zip(computed(module, inputs, sizes), wanted, strict=True):
            assert np.array_equal(got, want)


def test_an_index_beyond_a_dimension_reads_nothing(rng: np.random.Generator) -> None:
    """The reference refuses it; a kernel gives 0, and reads no address that is not its own."""
    body = """%a = gather %x, %i {dim=0} : f32[5, 3]
    %b = gather_elements %x, %j {dim=1} : f32[4, 2]
    return %a, %b"""
    module = module_of(body, "f32[5, 3], f32[4, 2]", x="f32[4, 3]", i="i64[5]", j="i32[4, 2]")
    x = rng.normal(size=(4, 3)).astype(np.float32)
    far = 2**40
    i = np.array([0, -1, 4, -5, far])
    j = np.array([[0, 3], [-3, -4], [2, 2**31 - 1], [1, -(2**31)]], np.int32)
    a, b = computed(module, {"x": x, "i": i, "j": j})
    zero = np.zeros(3, np.float32)
    assert np.array_equal(a, np.stack([x[0], x[3], zero, zero, zero]))
    assert np.array_equal(b, [[x[0, 0], 0], [x[1, 0], 0], [x[2, 2], 0], [x[3, 1], 0]])


@pytest.mark.parametrize(("rows", "wide"), [(2**26 - 1, False), (2**26, True)])
def test_indices_of_many_elements_have_64_bits(rows: int, wide: bool) -> None:
    body = "%a = embedding %ids, %table : f32[5, 16] return %a"
    module = module_of(body, "f32[5, 16]", ids="i32[5]", table=f"f32[{rows}, 16]")
    (kernel,) = Planner(module).plan({}).kernels.values()
    assert ("ix" in kernel.macros) is wide
