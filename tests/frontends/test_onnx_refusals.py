"""What cannot be read is refused at the place of its node, all at once and without a traceback."""

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
from tests.fresh import fresh
from tests.frontends.onnx_models import OPSET, compared, i64, model, read, saved

X = {"x": ("f32", ("batch", 8))}
INPUTS: dict[str, Any] = X | {
    "lines": ("f32", ("batch", 3, 8)),
    "image": ("f32", ("batch", 4, 8, 8)),
    "heads": ("f32", (1, 2, 4, 8)),
    "narrow": ("f32", (1, 2, 4, 0)),
    "pair": ("i64", (2,)),
    "steps": ("f32", ("S", 3, 6)),
    "long": ("f32", (2000, 3, 6)),
    "short": ("f32", (4, 3, 6)),
}
SHAPE = np.array([3, -1], np.int64)


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def written(
    folder: Path, node: NodeProto, *constants: np.ndarray[Any, Any], opset: int = OPSET
) -> Path:
    """A file of one node at net.py:12; operands that are not in INPUTS are constants."""
    node.name = "here"
    node.metadata_props.add(key="loc", value="net.py:12")
    names = [name for name in dict.fromkeys(node.input) if name and name not in INPUTS]
    initial = dict(zip(names, map(np.asarray, constants), strict=True))
    inputs = {name: INPUTS[name] for name in node.input if name in INPUTS} or X
    return saved(model([node], inputs, list(node.output), initial, opset), folder)


COLLECTIVE = {"operation": "all_reduce_rms_norm", "group": "tp", "group_size": "2"}
MICROSOFT = {"domain": "com.microsoft"}
PADDING = "this Pad has not two numbers for each of its axes"
ONES = np.ones((4, 4), np.float32)
GATES = (np.ones((1, 15, 6), np.float32), np.ones((1, 15, 5), np.float32))
SAME = {"kernel_shape": [2], "auto_pad": "SAME_UPPER", "dilations": [2]}
PACKED = MICROSOFT | {"num_heads": 1, "is_packed_batching": 1}
# kind, operands (with - for none), constants, attributes, message
REFUSED: list[tuple[str, str, tuple[Any, ...], dict[str, Any], str]] = [
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
    ("Reshape", "x pair", (), {}, "the shape of this Reshape depends on the data"),
    ("Unsqueeze", "x a", (i64(0, 0),), {}, "names one of the axes [0, 0] twice"),
    ("Range", "n s s", (i64(0, 1), i64(1)), {}, "of this Range are not one number each"),
    ("Range", "z l d", (f32(0)[0], f32(np.inf)[0], f32(1)[0]), {}, "from 0.0 to inf by 1.0 has no"),
    ("Range", "z l d", (f32(0)[0], f32(1)[0], f32(np.nan)[0]), {}, "from 0.0 to 1.0 by nan has no"),
    ("Add", "n s", (i64(1, 2), i64(1, 2, 3)), {}, "do not broadcast"),
    ("Concat", "n s", (i64(1, 2), i64(1)[None]), {"axis": 0}, "concat"),
    ("ConstantOfShape", "n", (i64(-2),), {}, "-2"),
    ("GatherND", "x n", (1,), {}, "input 1 of GatherND cannot have 0 dimensions"),
    ("LayerNormalization", "n s", (f32(1)[0], f32(1)), {}, "axis -1 of 0"),
    ("OneHot", "n s e", (i64(1), i64(3), i64(0, 1, 1)), {}, "of this OneHot are not two"),
    ("Tile", "x r", (f32(1, 2),), {}, "the repeats of this Tile is not made of integers"),
    ("Constant", "", (), {}, "net.py:12: this Constant has no value"),
    ("Split", "x", (), {"axis": 7, "num_outputs": 1}, "net.py:12: Split along axis 7 of 2 dim"),
    *(("Pad", "x p", (i64(*ends),), {}, PADDING)
      for ends in ((), (1,), (1, 0, 0), (1, 0, 0, 0, 0))),
    *(("Pad", "x p - a", (i64(1, 1), i64(axis)), {}, f"Pad names axis {axis} of 2")
      for axis in (2, -3)),
    ("Pad", "image p - a", (np.ones(4, int), i64(3, -1)), {}, "Pad names one of"),
    *(("IrcCollective", "x x w", (np.ones(8, np.float32),), COLLECTIVE | fields, message)
      for fields, message in (
        ({"group_size": "two"}, "IrcCollective has group_size='two'; expected an integer"),
        ({"operation": "broadcast", "root": "me"}, "has root='me'; expected an integer"),
        ({"eps": "small"}, "IrcCollective has eps='small'; expected a number"),
        ({"offset": "one"}, "IrcCollective has offset='one'; expected a number"),
    )),
    ("Attention", "narrow narrow narrow", (), {}, "heads of 0 features; expected a number of at"),
    ("FusedMatMul", "x x", (), MICROSOFT | {"transB": "yes"}, "transB='yes'; expected"),
    ("FusedMatMul", "x x", (), MICROSOFT | {"transB": 1, "alpha": "half"}, "alpha='half'; exp"),
    ("RotaryEmbedding", "x p c s", (i64(0)[None], ONES, ONES), PACKED, "packed into one"),
    ("MaxPool", "lines", (), SAME, "MaxPool has auto_pad=SAME_UPPER and dilations; expected pads"),
    ("AveragePool", "lines", (), {"kernel_shape": [9]}, "moves a window of 9 over 8 elements"),
    ("LpPool", "lines", (), {"kernel_shape": [2], "auto_pad": "SAME"},
     "auto_pad=SAME is not supported"),
    ("GlobalLpPool", "lines", (), {"p": 0}, "GlobalLpPool has p=0.0; expected a positive number"),
    ("LRN", "lines", (), {"size": 0}, "LRN over 0 channels; expected 1 or more"),
    *(("Resize", "lines", (), {"mode": "linear", word: 1}, f"{word}=1 is not supported")
      for word in ("antialias", "exclude_outside")),
    ("Resize", "image - - s", (i64(2, -1),), {"axes": [5, 2]}, "names axis 5 of 4 dimensions"),
    ("Resize", "image - - s", (i64(2, -1),), {"axes": [3, -1]}, "one of the axes [3, -1] twice"),
    *(("Resize", "image - s", (f32(1, scale),), {"axes": [2, 3]}, f"scales [1.0, {scale}]")
      for scale in (np.nan, np.inf, 0.0)),
    ("Resize", "image - s", (f32(1, 1),), {}, "has 2 scales or 2 sizes of 4 axes"),
    ("BitShift", "x x", (), {"direction": "UP"}, "direction=UP is not supported"),
    ("ConvTranspose", "image w", (np.ones((4, 2, 3, 3), np.float32),), {"group": 0},
     "ConvTranspose needs channels that its groups divide"),
    ("SpaceToDepth", "image", (), {"blocksize": 3}, "needs sizes that 3 divides; found 8, 8"),
    ("DepthToSpace", "image", (), {"blocksize": 3}, "needs sizes that 9 divides; found 4"),
    ("DepthToSpace", "image", (), {"blocksize": 0}, "blocksize=0, mode=DCR; expected 1 or more"),
    *(("GRU", f"{steps} w r", GATES, {"hidden_size": 5} | attributes, message)
      for steps, attributes, message in (
        ("steps", {}, "over S steps: irc unrolls recurrences of 1 to 1024 steps; export"),
        ("long", {}, "over 2000 steps"),
        ("short", {"activations": ["Sigmoid", "Affine"]}, "activations Sigmoid, Affine"),
        ("short", {"clip": 1.0}, "clip=1.0 is unknown"),
        ("short", {"direction": "bidirectional"}, "for 2 directions"),
    )),
    *(("PRelu", "x", (), {"opset": opset}, "PRelu (1): it has 1 inputs, and the operator takes 2")
      for opset in (6, OPSET)),
    ("Add", "x", (), {"opset": 6, "broadcast": 1, "axis": 1}, "cannot convert it to 13"),
    ("Hardmax", "x", (), {"opset": 12}, "Hardmax of opset 12 is along several dimensions"),
    # also where ONNX has a function for the operator, which does not have the attribute either
    *((kind, operands, (), {"opset": 24, "left_window_size": 2},
       "its attribute left_window_size=2 is unknown")
      for kind, operands in (("Relu", "x"), ("Softmax", "x"), ("Gelu", "x"),
                             ("Attention", "heads heads heads"))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "operands", "constants", "attributes", "message"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_node_that_is_refused(
    kind: str,
    operands: str,
    constants: tuple[Any, ...],
    attributes: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    """The message names the operand or attribute, and the place."""
    given = dict(attributes)
    opset = given.pop("opset", OPSET)
    outputs = ["out", "more"][: 2 if kind in ("TopK", "IrcCollective") else 1]
    names = [name.replace("-", "") for name in operands.split()]
    node = helper.make_node(kind, names, outputs, **given)
    with pytest.raises(Error) as caught:
        import_onnx(written(tmp_path, node, *constants, opset=opset))
    assert message in str(caught.value)
    assert "net.py:12" in str(caught.value) or opset < 13


def node(kind: str, operands: str, out: str, line: int, **attributes: Any) -> NodeProto:
    """A node with a place."""
    made = helper.make_node(kind, operands.split(), out.split(), name=f"/{out}", **attributes)
    made.metadata_props.add(key="loc", value=f"net.py:{line}")
    return made


def said(tmp_path: Path, nodes: list[NodeProto], results: str) -> str:
    """What is said about a file of these nodes."""
    path = saved(model(nodes, X, results.split(), {"s": SHAPE}), tmp_path)
    with pytest.raises(Error) as caught:
        import_onnx(path)
    return str(caught.value)


def test_refusals_of_rules_and_of_kinds_are_one_list(tmp_path: Path) -> None:
    nodes = [
        node("Reshape", "x s", "a", 1),
        node("Relu", "a", "b", 2),
        node("Split", "x", "c", 3, axis=7, num_outputs=1),
        node("Split", "x", "d", 4, axis=7, num_outputs=1),
        node("NonZero", "x", "e", 5),
        node("Add", "b e", "f", 6),
        node("Neg", "x", "g", 7),
        node("Det", "x", "h", 8),
        node("Det", "x", "i", 9),
        node("TensorScatter", "x x", "j", 10, mode="circular"),
        node("Strange", "x", "k", 11, domain="com.example"),
        node("Softmax", "x", "l", 12, beta=1.0),
    ]
    text = said(tmp_path, nodes, "c d f g h i j k l")
    assert "has 9 nodes that irc cannot read:\n" in text
    for part in (
        "Reshape (1): reshape: the elements of [batch, 8] do not fill [3, -1] for every size",
        "; /a at net.py:1\n",
        "Split (2): Split along axis 7 of 2 dimensions; /c at net.py:3, /d at net.py:4\n",
        "NonZero (1): irc has no operation for it; /e at net.py:5\n",
        "Det (2): irc has no operation for it; /h at net.py:8, /i at net.py:9\n",
        "TensorScatter (1): its attribute mode=circular is not supported",
        "com.example.Strange (1)",
        "Softmax (1): its attribute beta=1.0 is unknown",
        "2 nodes more need them and were not checked",
    ):
        assert part in text, text


def test_a_single_refusal_names_its_place(tmp_path: Path) -> None:
    nodes = [node("Split", "x", "c", 3, axis=7, num_outputs=1), node("Relu", "c", "d", 4)]
    text = said(tmp_path, nodes, "d")
    assert text.startswith("net.py:3: Split along axis 7 of 2 dimensions")
    assert text.endswith("1 node more needs them and was not checked")


def test_results_that_are_not_computed(tmp_path: Path) -> None:
    norm = helper.make_node("SimplifiedLayerNormalization", ["x", "w"], ["y", "mean"], name="/n")
    initial = {"w": np.ones(8, np.float32)}
    nodes = [norm, node("Relu", "mean", "out", 9)]
    with pytest.raises(Error, match=r"net\.py:9: it takes 'mean', a result of a node that irc"):
        import_onnx(saved(model(nodes, X, ["out", "y"], initial), tmp_path))
    for name, why in (("mean", "irc does not compute"), ("lost", "nothing makes")):
        with pytest.raises(Error, match=f"has the result '{name}', which {why}"):
            import_onnx(saved(model([norm], X, ["y", name], initial), tmp_path))


def test_a_size_of_minus_one_is_any_size(tmp_path: Path) -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], {"x": ("f32", (-1, 8))}, ["y"])
    path = saved(made, tmp_path)
    assert str(read(path).main.args[0].type) == "f32[x_0, 8]"
    compared(path, {"x": fresh(5).standard_normal((3, 8)).astype(np.float32)})


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
