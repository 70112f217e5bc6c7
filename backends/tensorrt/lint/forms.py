"""Rules about operators that the parser knows, in forms that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onnx.onnx_ml_pb2 import TensorProto as T

from irc.backends.tensorrt.lint.graph import Node, dtype_name
from irc.backends.tensorrt.lint.rules import BUILDER, IMPORTERS, node_rule
from irc.backends.tensorrt.target import Target

_HALVES = (T.FLOAT16, T.BFLOAT16)
_FLOATS = (T.FLOAT, T.DOUBLE, *_HALVES)
# The operand of which the numbers are needed when the model is parsed.
_CONSTANT = {
    **dict.fromkeys(
        [f"Reduce{kind}" for kind in ("Max", "Min", "Sum", "Mean", "Prod", "L1", "L2")], 1
    ),
    **dict.fromkeys(("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"), 1),
    **dict.fromkeys(("Squeeze", "Unsqueeze", "STFT"), 1),
    "Dropout": 2,
}


@node_rule(*_CONSTANT, source=f"{BUILDER}: must resolve to a build-time constant")
def constant_operand(node: Node, target: Target) -> Iterator[str]:
    """Axes and the like are known when the model is parsed, not computed from its inputs."""
    which = _CONSTANT[node.kind]
    if node.has(which) and _depends_on_inputs(node, node.input(which)):
        yield f"operand {which} of {node.kind} is computed from inputs; make it a constant"


@node_rule(source=f"{IMPORTERS}; {BUILDER}")
def operator_form(node: Node, target: Target) -> Iterator[str]:
    """Variants of an operator that its importer refuses."""
    if node.kind in _FORMS:
        yield from _FORMS[node.kind](node)


@node_rule("NonMaxSuppression", source=f"{BUILDER}: no runners", flavours=("tensorrt-rtx",))
def missing_kernel(node: Node, target: Target) -> Iterator[str]:
    """Layers that parse, and for which TensorRT-RTX has no kernel."""
    yield f"{node.kind} has no kernel in TensorRT-RTX; do it outside the engine"


def _pool(node: Node) -> Iterator[str]:
    if any(each != 1 for each in node.numbers("dilations")):
        yield f"{node.kind} with dilations is refused; leave them out"


def _lp_pool(node: Node) -> Iterator[str]:
    yield from _pool(node)
    if node.number("p", 2) not in (1, 2):
        yield f"LpPool has p = {node.number('p', 2)}; only 1 and 2 are accepted"


def _max_pool(node: Node) -> Iterator[str]:
    yield from _pool(node)
    if len([name for name in node.outputs if name]) > 1:
        yield "MaxPool has one output here; compute the indices in another way"


def _batch_normalization(node: Node) -> Iterator[str]:
    if node.number("training_mode", 0):
        yield "BatchNormalization is in training mode; export the model for inference"


def _mod(node: Node) -> Iterator[str]:
    if node.dtype(0) in (*_FLOATS, T.INT8) and not node.number("fmod", 0):
        yield f"Mod of {dtype_name(node.dtype(0))} is refused; write fmod = 1, or use int32"


def _range(node: Node) -> Iterator[str]:
    if node.dtype(0) in _HALVES:
        yield f"Range of {dtype_name(node.dtype(0))} is refused; count in int32, and cast after it"


def _celu(node: Node) -> Iterator[str]:
    if node.dtype(0) in _HALVES:
        yield f"Celu of {dtype_name(node.dtype(0))} is refused; use Elu with a scaled operand"


def _resize(node: Node) -> Iterator[str]:
    if node.number("antialias", 0):
        yield "Resize with antialias is refused; leave it out, or average with a convolution"
    if node.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        yield "Resize has a keep_aspect_ratio_policy; compute the sizes, and leave it out"
    mode = node.text("coordinate_transformation_mode", "half_pixel")
    if mode in ("tf_crop_and_resize", "half_pixel_symmetric"):
        yield f"Resize with {mode} is refused; use half_pixel, after a Slice if it is to crop"


_FORMS: dict[str, Callable[[Node], Iterator[str]]] = {
    "AveragePool": _pool,
    "BatchNormalization": _batch_normalization,
    "Celu": _celu,
    "LpPool": _lp_pool,
    "MaxPool": _max_pool,
    "Mod": _mod,
    "Range": _range,
    "Resize": _resize,
}


def _depends_on_inputs(node: Node, name: str) -> bool:
    """Whether a value is computed, in some way, from an input of the graph."""
    graph, todo, seen = node.graph, [name], set[str]()
    while todo:
        name = todo.pop()
        if name in seen or not name:
            continue
        seen.add(name)
        if name in graph.inputs:
            return True
        if name in graph.producers:
            todo += graph.producers[name].inputs
    return False
