"""Symbolic tensors against numpy, the functions derived from the registry, and errors."""

import ast
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import Tensor, stubs
from irc.frontends import functional as F
from irc.frontends.wrappers import NOT_WRAPPED, function_name
from irc.ir.declare import REGISTRY
from irc.source import shown_path

from .helpers import computed, ops, traced

A = np.array([[1.5, -2.0, 3.0], [0.5, 4.0, -1.0]], np.float32)
B = np.array([[2.0, 3.0, -1.5], [1.0, 0.5, 2.0]], np.float32)
I = np.array([[7, -3, 5], [2, 9, -8]], np.int32)  # noqa: E741

ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floor_div": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "numbers right": lambda x, y: ((x + 2 - 0.5) * 3 / 2) // 1 % 5,
    "numbers left": lambda x, y: (1 + (2 - (3 * (4 / y)))) % 7,
    "powers": lambda x, y: abs(x) ** 2 + 2**y,
    "signs": lambda x, y: -abs(x) + abs(-y),
    "logic": lambda x, y: ((x > 0) & (y > 0)) | ~(x < y) | (False & (x > y)),
    "left // and %": lambda x, y: 7 // y + 7 % y,
    "matrix product": lambda x, y: x[:, :2] @ y,
    "numpy numbers": lambda x, y: np.float32(2) * x + np.float32(1),
    "numpy comparison": lambda x, y: np.float32(2) < x,
}


def agrees(got: np.ndarray, wanted: Any) -> None:
    assert got.shape == np.shape(wanted) and got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_operators_are_those_of_numpy(name: str) -> None:
    function = ARITHMETIC[name]
    agrees(computed(lambda x, y: function(x, y), x=A, y=B), function(A, B))


def test_numbers_take_the_dtype_they_meet() -> None:
    assert computed(lambda x: x + 1, x=I).dtype == np.int32
    module = traced(lambda x: x * 2, x=("bf16", ("B",)))
    assert '%0 = full {value=2.0, dtype="bf16"} : bf16[]' in str(module)
    assert computed(lambda x: F.where(x > 2, x, 0), x=I).tolist() == np.where(I > 2, I, 0).tolist()


INDICES: list[Any] = [
    *(0, -1, np.s_[1:], np.s_[:, 1], np.s_[:, -1], np.s_[..., 0:2], np.s_[:, ::2], np.s_[:, -2:]),
    *(np.s_[:, :99], np.s_[:, 2:1], np.s_[None], np.s_[:, None, 1:3], np.s_[..., None]),
    *(np.s_[None, :, None], np.s_[1, None, -1], np.s_[0, ...], np.s_[:]),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indices_are_those_of_numpy(index: Any) -> None:
    agrees(computed(lambda x: x[index], x=A), A[index])


SHAPES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "reshape": (lambda x: x.reshape(3, 2), lambda a: a.reshape(3, 2)),
    "view": (lambda x: x.view((6,)), lambda a: a.reshape(6)),
    "inferred": (lambda x: x.reshape(-1, 2), lambda a: a.reshape(-1, 2)),
    "function": (lambda x: F.reshape(x, (2, -1, 1)), lambda a: a.reshape(2, 3, 1)),
    "permute": (lambda x: x.permute(1, 0), lambda a: a.T),
    "permute from the end": (lambda x: x.permute(-1, 0), lambda a: a.T),
    "transpose": (lambda x: x.transpose(0, -1), lambda a: a.T),
    "transpose by order": (
        lambda x: x.transpose((1, 0)) + F.transpose(x, [1, 0]),
        lambda a: 2 * a.T,
    ),
    "transpose of F": (lambda x: F.transpose(x, 0, 1), lambda a: a.T),
    "transpose of three": (
        lambda x: x.unsqueeze(2).transpose(2, 0, 1) + F.transpose(x.unsqueeze(2), (-1, 0, 1)),
        lambda a: 2 * a[None],
    ),
    "unsqueeze": (lambda x: x.unsqueeze(1), lambda a: a[:, None]),
    "squeeze": (lambda x: x[:1].squeeze(0), lambda a: a[0]),
    "expand": (lambda x: x[:, :1].expand(2, 5), lambda a: np.repeat(a[:, :1], 5, 1)),
    "split": (lambda x: x.split(1)[2], lambda a: a[:, 2:]),
    "split sizes": (lambda x: x.split((1, 2), dim=1)[1], lambda a: a[:, 1:]),
    "sum": (lambda x: x.sum(), lambda a: a.sum()),
    "mean": (lambda x: x.mean(-1, keep=True), lambda a: a.mean(-1, keepdims=True)),
    "max": (lambda x: x.max(0), lambda a: a.max(0)),
    "min": (lambda x: x.min((0, 1)), lambda a: a.min()),
    "cast": (lambda x: x.cast("i32"), lambda a: a.astype(np.int32)),
    "to": (lambda x: x.to("f64"), lambda a: a.astype(np.float64)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_methods_are_those_of_numpy(name: str) -> None:
    ours, theirs = SHAPES[name]
    agrees(computed(lambda x: ours(x), x=A), theirs(A))


def test_symbolic_sizes() -> None:
    def function(x: Tensor) -> object:
        return x[:, -1], x[:, 1:], x[:, :-1], x.reshape("B", -1, 8)

    module = traced(function, x=("f32", ("B", "S", 32)))
    types = [str(value.type) for value in module.main.returned]
    assert types == ["f32[B, 32]", "f32[B, S - 1, 32]", "f32[B, S - 1, 32]", "f32[B, 4*S, 8]"]


def test_equality_is_identity_and_tensors_are_hashable() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        assert x == x and x != y and (x == y) is False
        assert {x: 1, y: 2}[y] == 2 and len({x, y, x}) == 2
        assert y in [x, y] and [x, y].index(y) == 1
        assert x != None  # noqa: E711
        assert x.cast("f32") is x
        return F.eq(x, y)

    assert ops(traced(function, x=("f32", (2,)), y=("f32", (2,)))) == ["eq"]


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "x == 0": (lambda x, i: x == 0, "write F.eq(x, 0) or F.ne(x, 0)"),
    "x != 1.5": (lambda x, i: x != 1.5, "write F.eq(x, 1.5)"),
    "x == array": (lambda x, i: x == np.zeros(2), "to compare their elements write F.eq"),
    "where(x == y)": (lambda x, i: F.where(x == i, x, x), "write F.eq or F.ne"),
    "if x": (lambda x, i: x if x else i, "no truth value"),
    "for _ in x": (lambda x, i: list(x), "cannot be iterated over"),
    "len(x)": (lambda x, i: len(x), "sizes are in .shape"),
    "float(x)": (lambda x, i: float(x), "no value while a model is traced"),
    "int(x)": (lambda x, i: int(x), "no value while a model is traced"),
    "range(x)": (lambda x, i: range(i), "no value while a model is traced"),
    "np.asarray(x)": (lambda x, i: np.asarray(x), "no value while a model is traced"),
    "np.exp(x)": (lambda x, i: np.exp(x), "no value while a model is traced"),
    "np.mean(x)": (lambda x, i: np.mean(x), "no value while a model is traced"),
    "np.concatenate": (lambda x, i: np.concatenate([x, x]), "no value while a model is traced"),
    "x[i]": (lambda x, i: x[i], "use F.gather"),
    "x[:, i]": (lambda x, i: x[:, i], "use F.gather"),
    "x[5]": (lambda x, i: x[5], "index 5 is outside dimension 0, which has 2"),
    "x[0, 0, 0]": (lambda x, i: x[0, 0, 0], "3 indices for the 2 dimensions of [2, 3]"),
    "x[..., ...]": (lambda x, i: x[..., ...], "at most one ..."),
    "x[::-1]": (lambda x, i: x[::-1], "use F.flip"),
    "x[1.5]": (lambda x, i: x[1.5], "not 1.5"),
    "reshape": (lambda x, i: x.reshape(4, -1), "the elements of [2, 3] do not fill [4, -1]"),
    "reshape twice": (lambda x, i: x.reshape(-1, -1), "only one size may be -1"),
    "reshape text": (lambda x, i: x.reshape("%"), "cannot read the dimension '%'"),
    "transpose": (lambda x, i: x.transpose(0, 2), "no dimensions 0 and 2"),
    "permute": (lambda x, i: x.permute(1, 2), "there is no dimension 2 in a tensor of 2"),
    "split": (lambda x, i: x.split(2), "3 is not a multiple of 2"),
    "split dim": (lambda x, i: x.split(2, dim=5), "no dimension 5"),
    "i + 0.5": (lambda x, i: i + 0.5, "0.5 is used with a tensor of i32; cast the tensor"),
    "x + True": (lambda x, i: x + True, "the Python value True"),
    "x + None": (lambda x, i: x + None, "an operand is None, not a tensor of irc"),
    "x + 'a'": (lambda x, i: x + "a", "an operand is a str, not a tensor"),
    "x + array": (lambda x, i: x + np.zeros(3), "a numpy array (use F.constant"),
    "array @ x": (lambda x, i: np.zeros((2, 2)) @ x, "a numpy array (use F.constant"),
    "x + i": (lambda x, i: x + i, "the operands are f32 and i32; cast one"),
    "where": (lambda x, i: F.where(x > 0, 1.0, 0.0), "1.0 has no dtype here"),
    "concat": (lambda x, i: F.concat(x, 0), "concat takes a list of tensors"),
    "name": (lambda x, i: (x + 1).named("a b"), "not a valid name for a tensor"),
    "cast": (lambda x, i: x.cast("fp32"), "no dtype called 'fp32'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_state_what_to_do(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(irc.Error) as caught:
        traced(lambda x, i: function(x, i), x=("f32", (2, 3)), i=("i32", (2, 3)))
    assert message in caught.value.message
    assert str(caught.value).startswith(shown_path(__file__) + ":")


def test_names_show_in_dumps() -> None:
    text = str(traced(lambda x: (x + x).named("twice") * x.named("y"), x=("f32", (2,))))
    assert "%twice = add %x, %x" in text and "mul %twice, %x" in text


def test_a_tensor_outside_its_trace() -> None:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x)
        return kept[0] + 1

    traced(function, x=("f32", (2,)))
    with pytest.raises(irc.Error, match=r"only inside irc\.trace"):
        _ = kept[0] + 1
    with pytest.raises(irc.Error, match="belongs to another trace"):
        traced(function, x=("f32", (2,)))


@pytest.mark.parametrize("op", sorted(REGISTRY))
def test_every_operation_is_reachable(op: str) -> None:
    if op in NOT_WRAPPED:
        with pytest.raises(irc.Error, match=f"no F.{op}: "):
            getattr(F, op)
        return
    function = getattr(F, function_name(op))
    cls = REGISTRY[op]
    names = {*cls.operand_names, *cls.optional_names, *cls.attribute_types}
    assert set(inspect.signature(function).parameters) == names
    assert function.__doc__ and function_name(op) in dir(F)


def test_the_stub_is_up_to_date() -> None:
    written = stubs.STUB.read_text(encoding="utf-8")
    assert written == stubs.stub(), "run python -m irc.frontends.stubs"


def test_the_stub_declares_what_the_functions_take() -> None:
    body = ast.parse(stubs.STUB.read_text(encoding="utf-8")).body
    declared = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
    for name, args in declared.items():
        parameters = inspect.signature(getattr(F, name)).parameters.values()
        plain = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        late = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert [a.arg for a in args.args] == plain, name
        assert [a.arg for a in args.kwonlyargs] == late, name


def test_results_and_shapes() -> None:
    def function(x: Tensor, y: Tensor) -> object:
        values, indices = F.topk(x, 2)
        (whole,) = F.split(x, -1, (4,))
        sum = F.reshape(y, ("B*S", 4)) + F.full(1.0, shape=("B*S", 1))
        return values, indices, F.softmax(whole, dim=-1), sum

    module = traced(function, x=("f32", (3, 4)), y=("f32", ("B", "S", 4)))
    kinds = [str(value.type) for value in module.main.returned]
    assert kinds == ["f32[3, 2]", "i32[3, 2]", "f32[3, 4]", "f32[B*S, 4]"]


def test_operations_with_an_expansion_of_two_results_return_both() -> None:
    module = traced(lambda x, w: F.add_rms_norm(x, x, w), x=("f32", (2, 4)), w=("f32", (4,)))
    assert [str(value.type) for value in module.main.returned] == ["f32[2, 4]"] * 2


def test_an_unknown_function_and_one_outside_a_trace() -> None:
    with pytest.raises(irc.Error, match=r"test_tensor\.py.*no F\.sillu; did you mean 'silu'"):
        F.sillu  # noqa: B018  # pyright: ignore
    assert not hasattr(F, "sillu")
    message = r"F\.full builds a graph, so it works only inside irc\.trace"
    with pytest.raises(irc.Error, match=message):
        F.full(1.0)


def test_python_checks_the_arguments() -> None:
    function: Any = F.linear
    with pytest.raises(TypeError, match=r"linear\(\) got an unexpected keyword argument 'bais'"):
        traced(lambda x: function(x, x, bais=x), x=("f32", (2, 2)))
    with pytest.raises(TypeError, match=r"linear\(\) missing 1 required positional argument"):
        traced(lambda x: function(x), x=("f32", (2, 2)))


def test_operations_are_located_at_the_users_line() -> None:
    line = inspect.currentframe().f_lineno + 1  # pyright: ignore
    module = traced(lambda x: F.silu(x) + 1, x=("f32", (2,)))
    assert {(op.loc.file, op.loc.line) for op in module.main if op.opname != "return"} == {  # pyright: ignore
        ("test_tensor.py", line)
    }
