"""A fault of the file itself per case: names that do not fit together, data that is not there."""

from __future__ import annotations

from onnx import ModelProto, TensorProto, helper

from tests.layout import ROOT
from tests.tensorrt.lint_cases_graph import branch
from tests.tensorrt.lint_models import F16, Case, constant, model, node, value

ONE = "x:f16[4,8]"


def outside(location: str, **place: str) -> ModelProto:
    """A weight that lies in a file."""
    weight = TensorProto(name="w", data_type=F16, dims=[4, 8])
    weight.data_location = TensorProto.EXTERNAL
    for key, text in {"location": location, **place}.items():
        weight.external_data.add(key=key, value=text)
    return model(node("Add", "x w"), ONE, constants=[weight])


def stored(location: str) -> ModelProto:
    """The same as a Constant within the graph."""
    weight = outside(location).graph.initializer[0]
    made = helper.make_node("Constant", [], ["w"], value=weight)
    return model([made, node("Add", "x w")], ONE)


def conditional(taken: str) -> ModelProto:
    """A condition whose branches take a value from outside."""
    inner = branch(node("Neg", taken, "t"))
    plain = branch(node("Relu", "x", "r"))
    made = node("If", "c", then_branch=inner, else_branch=plain)
    return model([node("Abs", "x", "around"), made], f"{ONE} c:bool[]")


def chain(*names: str) -> ModelProto:
    """A node from each name to the next, from the input to y."""
    body = [node("Relu", a, b) for a, b in zip(["x", *names], [*names, "y"], strict=True)]
    return model(body, ONE)


def reordered() -> ModelProto:
    """Nodes that are in no order in which they can run, which TensorRT sorts."""
    return model([node("Neg", "a"), node("Relu", "x", "a")], ONE)


def named_twice() -> ModelProto:
    made = chain()
    made.graph.input.append(value(ONE))
    return made


FINE = model(node("Add", "x w"), ONE, constants=[constant("w:f16[4,8]")])
HERE = (ROOT / "tests",)

STRUCTURE = [
    Case("malformed", model(node("Add", "x lost"), ONE), chain(), refused="parse"),
    Case("malformed", model([node("Relu", "x"), node("Neg", "x")], ONE), chain(), refused="parse"),
    Case("malformed", model([node("Relu", "x", "x"), node("Neg", "x")], ONE), refused="parse"),
    Case(
        "malformed",
        model([node("Add", "x b", "a"), node("Neg", "a", "b"), node("Relu", "a")], ONE),
        reordered(),
        refused="parse",
    ),
    Case("malformed", model(node("Add", "x y"), ONE), chain("a"), refused="parse"),
    Case("malformed", model(node("Relu", "x", "z"), ONE), chain("z"), refused="parse"),
    Case("malformed", named_twice(), chain()),
    Case("malformed", conditional("lost"), conditional("around")),
    Case("missing-data", outside("gone.bin"), FINE, refused="parse", folders=HERE),
    Case("missing-data", outside("../README.md"), FINE, refused="parse", folders=HERE),
    Case("missing-data", outside("/etc/passwd"), FINE, refused="parse", folders=HERE),
    Case("missing-data", outside(""), FINE, refused="parse", folders=HERE),
    Case("missing-data", outside("layout.py", offset="1000000"), FINE, folders=HERE),
    Case("missing-data", outside("layout.py", offset="-4"), FINE, folders=HERE),
    Case("missing-data", stored("gone.bin"), FINE, folders=HERE),
    Case("missing-data", outside("gone.bin"), outside("layout.py", length="64"), folders=HERE),
]
