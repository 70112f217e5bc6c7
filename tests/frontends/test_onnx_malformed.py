"""Nodes that ONNX forbids: an Error each at the place of the node, and never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, helper

from irc import ops
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.frontends.onnx import import_onnx
from irc.frontends.onnx.builder import Node
from irc.frontends.onnx.rules import TABLE, ImportRule, mesh_of
from tests.frontends.onnx_models import model, read, saved

X = {"x": ("f32", ("batch", 8))}
COLLECTIVE = {"operation": "all_reduce_rms_norm", "group": "tp", "group_size": "2"}

FIELDS = [
    ({"group_size": "two"}, "IrcCollective has group_size='two'; expected an integer"),
    ({"operation": "broadcast", "root": "me"}, "has root='me'; expected an integer"),
    ({"eps": "small"}, "IrcCollective has eps='small'; expected a number"),
    ({"offset": "one"}, "IrcCollective has offset='one'; expected a number"),
]
PADDING = "this Pad has not two numbers for each of its axes"
MICROSOFT = {"domain": "com.microsoft"}
TABLE_OF_ONES = np.ones((4, 4), np.float32)


def i64(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def written(tmp_path: Path, node: NodeProto, *more: np.ndarray[Any, Any]) -> Path:
    """A file of one node, whose operands after x are constants."""
    node.name = "here"
    node.metadata_props.add(key="loc", value="net.py:12")
    names = [name for name in node.input if name not in ("", "x")]
    initial = dict(zip(dict.fromkeys(names), more, strict=True))
    return saved(model([node], X, list(node.output), initial), tmp_path)


def refused(tmp_path: Path, kind: str, operands: str, *more: Any, **attributes: Any) -> str:
    """What is said about a node; the operands are names, with - for none."""
    names = [name.replace("-", "") for name in operands.split()]
    two = kind == "TopK" or "w" in names
    outputs = ["out", "more"] if two else ["out"]
    node = helper.make_node(kind, names, outputs, **attributes)
    with pytest.raises(Error) as caught:
        import_onnx(written(tmp_path, node, *more))
    assert "net.py:12" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "operands", "more", "attributes", "message"),
    [
        ("Slice", "x s e", (i64(1), i64(2, 3)), {}, "are not equally many"),
        ("Slice", "n s e", (i64(1, 2), i64(1), i64(2, 3)), {}, "are not equally many"),
        ("Slice", "x s e", (f32(1), i64(2)), {}, "the start of this Slice is not made of integers"),
        ("Transpose", "x", (), {"perm": [0, 7]}, "Transpose by [0, 7] of 2 dimensions"),
        ("Transpose", "x", (), {"perm": [0, 0]}, "Transpose by [0, 0] of 2 dimensions"),
        ("TopK", "x k", (i64(1, 2),), {}, "the k of this TopK is 2 numbers, not one"),
        ("Trilu", "x k", (i64(1, 2),), {}, "the diagonal of this Trilu is 2 numbers, not one"),
        ("Trilu", "n", (i64(1, 2),), {}, "input 0 of Trilu cannot have 1 dimensions"),
        ("Reshape", "n s", (i64(1, 2, 3), i64(2, 2)), {}, "[3] to [2, 2] does not fit"),
        ("Reshape", "n s", (i64(1, 2, 3), i64(-1, -1)), {}, "only one size may be -1, not 2"),
        ("Unsqueeze", "x a", (i64(0, 0),), {}, "names one of the axes [0, 0] twice"),
        ("Range", "n s s", (i64(0, 1), i64(1)), {}, "of this Range are not one number each"),
        ("Add", "n s", (i64(1, 2), i64(1, 2, 3)), {}, "do not broadcast"),
        ("Concat", "n s", (i64(1, 2), np.ones((1, 1), np.int64)), {"axis": 0}, "concat"),
        ("ConstantOfShape", "n", (i64(-2),), {}, "-2"),
        ("GatherND", "x n", (np.array(1),), {}, "input 1 of GatherND cannot have 0 dimensions"),
        ("LayerNormalization", "n s", (np.array(1.0, np.float32), f32(1)), {}, "axis -1 of 0"),
        ("OneHot", "n s e", (i64(1), i64(3), i64(0, 1, 1)), {}, "of this OneHot are not two"),
        ("Tile", "x r", (f32(1, 2),), {}, "the repeats of this Tile is not made of integers"),
        ("Constant", "", (), {}, "net.py:12: this Constant has no value"),
        ("Split", "x", (), {"axis": 7, "num_outputs": 1}, "net.py:12: Split along axis 7 of 2 dim"),
        *(("Pad", "x p", (i64(*ends),), {}, PADDING)
          for ends in ((), (1,), (1, 0, 0), (1, 0, 0, 0, 0))),
        *(("Pad", "x p - a", (i64(1, 1), i64(axis)), {}, f"Pad names axis {axis} of 2")
          for axis in (2, -3)),
        *(("IrcCollective", "x x w", (np.ones(8, np.float32),), COLLECTIVE | fields, message)
          for fields, message in FIELDS),
        ("FusedMatMul", "x x", (), MICROSOFT | {"transB": "yes"}, "transB='yes'; expected"),
        ("FusedMatMul", "x x", (), MICROSOFT | {"transB": 1, "alpha": "half"}, "alpha='half'; exp"),
        ("RotaryEmbedding", "x p c s", (np.zeros((1, 1), np.int64), TABLE_OF_ONES, TABLE_OF_ONES),
         MICROSOFT | {"num_heads": 1, "is_packed_batching": 1}, "packed into one"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)  # fmt: skip
def test_errors_name_the_operand_or_attribute(
    kind: str, operands: str, more: Any, attributes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in refused(tmp_path, kind, operands, *more, **attributes)


@pytest.mark.parametrize("fault", [KeyError, ValueError, TypeError, IndexError])
def test_a_bug_in_a_reader_is_no_fault_of_the_file(
    fault: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(b: object, node: object) -> Any:
        raise fault("oops")

    monkeypatch.setitem(TABLE, ("", "Relu"), ImportRule(broken, frozenset()))
    with pytest.raises(fault, match="oops"):
        import_onnx(written(tmp_path, helper.make_node("Relu", ["x"], ["out"])))


def test_groups_that_are_no_list() -> None:
    """ONNX itself sees it only once something has registered the operator."""
    node = Node("DistCollective", "", "", 0, 23, [None], ["a"], {"nb_rank": 2, "groups": 7})
    with pytest.raises(Error, match="groups=7; expected a list of integers"):
        mesh_of([node], None, None)


@pytest.mark.parametrize("offset", [None, 1.0, 0.1])
def test_the_offset_of_the_collective_of_the_plugin(offset: float | None, tmp_path: Path) -> None:
    fields = COLLECTIVE if offset is None else COLLECTIVE | {"offset": repr(offset)}
    node = helper.make_node("IrcCollective", ["x", "x", "w"], ["a", "b"], **fields)
    module = read(written(tmp_path, node, np.ones(8, np.float32)))
    (found,) = [op for op in module.ops() if isinstance(op, ops.AllReduceRmsNorm)]
    assert found.offset == (offset or 0.0)


@pytest.mark.parametrize(
    ("kind", "x", "y"),
    [
        ("Mul", i64(1 << 62), i64(1 << 62)),
        ("Sub", i64(-(1 << 63)), i64(1)),
        ("Pow", np.full(1, 1e30, np.float32), np.full(1, 1e30, np.float32)),
    ],
    ids=["Mul", "Sub", "Pow"],
)
def test_constants_that_overflow_do_so_when_the_model_runs(
    kind: str, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    node = helper.make_node(kind, ["n", "s"], ["a"])
    module = read(written(tmp_path, node, x, y))
    with np.errstate(all="ignore"):
        (found,) = evaluate(module, {"x": np.zeros((1, 8), np.float32)}).values()
        want = {"Mul": np.multiply, "Sub": np.subtract, "Pow": np.power}[kind](x, y)
    np.testing.assert_array_equal(found, want)
