"""What cannot be read is listed all at once: kinds of nodes, and what their rules refuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx.defs
import pytest
from onnx import AttributeProto, NodeProto, helper, numpy_helper

from irc.errors import Error
from irc.frontends.onnx import import_onnx
from irc.frontends.onnx.rules import TABLE
from tests.fresh import fresh
from tests.frontends.onnx_models import compared, model, read, saved

X = {"x": ("f32", ("batch", 8))}
SHAPE = np.array([3, -1], np.int64)


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


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        ("MaxPool", {"kernel_shape": [2], "auto_pad": "SAME_UPPER", "dilations": [2]},
         "MaxPool has auto_pad=SAME_UPPER and dilations; expected pads"),
        ("AveragePool", {"kernel_shape": [9]}, "moves a window of 9 over 8 elements"),
        ("LpPool", {"kernel_shape": [2], "auto_pad": "SAME"}, "auto_pad=SAME is not supported"),
        ("GlobalLpPool", {"p": 0}, "GlobalLpPool has p=0.0; expected a positive number"),
        ("Resize", {"mode": "linear", "antialias": 1}, "antialias=1 is not supported"),
        ("Resize", {"mode": "linear", "exclude_outside": 1}, "exclude_outside=1 is not supported"),
        ("LRN", {"size": 0}, "LRN over 0 channels; expected 1 or more"),
    ],
)  # fmt: skip
def test_windows_that_are_refused(
    kind: str, attributes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pool = helper.make_node(kind, ["x"], ["y"], **attributes)
    with pytest.raises(Error) as caught:
        import_onnx(saved(model([pool], {"x": ("f32", ("batch", 3, 8))}, ["y"]), tmp_path))
    assert message in str(caught.value)


FAR, NO, ONE = np.float32(np.inf), np.float32(np.nan), np.float32(1)
TWICE = np.array([2, -1], np.int64)


@pytest.mark.parametrize(
    ("kind", "operands", "initial", "attributes", "message"),
    [
        ("Resize", "x   s", {"s": TWICE}, {"axes": [5, 2]}, "names axis 5 of 4 dimensions"),
        ("Resize", "x   s", {"s": TWICE}, {"axes": [3, -1]}, "one of the axes [3, -1] twice"),
        ("Resize", "x  s", {"s": np.array([1, NO])}, {"axes": [2, 3]}, "scales [1.0, nan]; exp"),
        ("Resize", "x  s", {"s": np.array([1, FAR])}, {"axes": [2, 3]}, "scales [1.0, inf]; exp"),
        ("Resize", "x  s", {"s": np.array([1, 0 * ONE])}, {"axes": [2, 3]}, "scales [1.0, 0.0]"),
        ("Resize", "x  s", {"s": np.array([1, ONE])}, {}, "has 2 scales or 2 sizes of 4 axes"),
        ("Pad", "x p  a", {"p": np.ones(4, int), "a": np.array([3, -1])}, {}, "Pad names one of"),
        ("Range", "z l d", {"z": 0 * ONE, "l": FAR, "d": ONE}, {}, "from 0.0 to inf by 1.0 has no"),
        ("Range", "z l d", {"z": 0 * ONE, "l": ONE, "d": NO}, {}, "from 0.0 to 1.0 by nan has no"),
        ("BitShift", "x x", {}, {"direction": "UP"}, "direction=UP is not supported"),
        ("SpaceToDepth", "x", {}, {"blocksize": 3}, "needs sizes that 3 divides; found 8, 8"),
        ("DepthToSpace", "x", {}, {"blocksize": 3}, "needs sizes that 9 divides; found 4"),
        ("DepthToSpace", "x", {}, {"blocksize": 0}, "blocksize=0, mode=DCR; expected 1 or more"),
    ],
)  # fmt: skip
def test_operands_that_are_refused(
    kind: str,
    operands: str,
    initial: dict[str, Any],
    attributes: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    refused = helper.make_node(kind, operands.split(" "), ["y"], **attributes)
    inputs = {"x": ("f32", ("batch", 4, 8, 8))}
    with pytest.raises(Error) as caught:
        import_onnx(saved(model([refused], inputs, ["y"], initial), tmp_path))
    assert message in str(caught.value)


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


# ------------------------------------------------------------------ random nodes

WORDS = ("none", "linear", "ab,bc->ac", ",->", "tp", "all_reduce", "two", "-1", "add", "constant")
SIZES = (1, 2, 3, 4, "batch", "seq")


class Drawn:
    """One node of a kind that is read, with operands and attributes as they may come."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {}
        self.initial: dict[str, np.ndarray[Any, Any]] = {}
        self.opset = int(self.one((13, 18, 23)))
        self.base = self.shape()
        domain, kind = self.one(sorted(TABLE))
        known = not domain and onnx.defs.has(kind)
        schema = onnx.defs.get_schema(kind, onnx.defs.onnx_opset_version(), "") if known else None
        least, most = (schema.min_input, min(schema.max_input, 9)) if schema else (0, 9)
        operands = [self.operand(i) for i in range(int(rng.integers(least, most + 1)))]
        attributes = {
            name: self.attribute(None) for name in sorted(TABLE[domain, kind].attributes or ())
        }
        outputs = ["o0", "o1"][: 1 if schema is None else schema.min_output or 1]
        if schema is not None:
            attributes = {name: self.attribute(a) for name, a in schema.attributes.items()
                          if a.required or rng.random() < 0.4}  # fmt: skip
        given = {name: value for name, value in attributes.items() if value is not None}
        self.node = helper.make_node(kind, operands, outputs, domain=domain, **given)

    def one(self, many: Sequence[Any]) -> Any:
        return many[int(self.rng.integers(len(many)))]

    def shape(self) -> tuple[int | str, ...]:
        return tuple(self.one(SIZES) for _ in range(int(self.rng.integers(6))))

    def operand(self, i: int) -> str:
        choice = self.rng.random()
        if choice < 0.1 and i:
            return ""
        if choice < 0.5:
            self.initial[f"c{i}"] = self.constant()
            return f"c{i}"
        shape = self.base if choice < 0.8 else self.shape()
        self.inputs[f"x{i}"] = self.one(("f32", "f32", "i64", "bool", "f16")), shape
        return f"x{i}"

    def constant(self) -> np.ndarray[Any, Any]:
        shape = self.rng.integers(0, 4, int(self.rng.integers(3)))
        numbers = self.rng.integers(-3, 6, shape)
        return np.asarray(numbers if self.rng.random() < 0.8 else numbers.astype(np.float32))

    def attribute(self, schema: Any) -> Any:
        kinds = [
            AttributeProto.INT,
            AttributeProto.INTS,
            AttributeProto.FLOAT,
            AttributeProto.STRING,
        ]
        match int(schema.type.value) if schema is not None else self.one(kinds):
            case AttributeProto.INT:
                return int(self.rng.integers(-3, 8))
            case AttributeProto.INTS:
                return self.rng.integers(-3, 6, int(self.rng.integers(1, 4))).tolist()
            case AttributeProto.FLOAT:
                return float(self.rng.normal())
            case AttributeProto.STRING:
                return self.one(WORDS)
            case AttributeProto.TENSOR:
                return numpy_helper.from_array(self.constant())
            case _:
                return None


def test_random_nodes_give_a_module_or_an_error(tmp_path: Path) -> None:
    rng, known = fresh(91), 0
    for _ in range(400):
        drawn = Drawn(rng)
        made = model([drawn.node], drawn.inputs, ["o0"], drawn.initial, drawn.opset)
        try:
            import_onnx(saved(made, tmp_path))
            known += 1
        except Error:
            continue
    assert known > 20  # not all is nonsense
