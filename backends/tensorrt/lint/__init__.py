"""The contract linter: what TensorRT refuses, drops or miscomputes, told from the ONNX file alone.

`lint` runs every rule that holds for a target. Rules live in the modules of this package, one
small function each; `RULES` has them by name, with the reason and where it can be looked up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from onnx.onnx_ml_pb2 import ModelProto, NodeProto

from irc.artifact import is_artifact, read_manifest
from irc.backends.tensorrt.lint import (  # noqa: F401  (their rules register themselves)
    attention,
    cache,
    collectives,
    dtypes,
    forms,
    fusion,
    network,
    operators,
    plugins,
    quantization,
    structure,
)
from irc.backends.tensorrt.lint.graph import Graph, inner_graphs
from irc.backends.tensorrt.lint.inference import skeleton, types_of
from irc.backends.tensorrt.lint.rules import RULES, Finding, Rule
from irc.backends.tensorrt.target import Target
from irc.errors import Error, did_you_mean
from irc.interchange import is_text

__all__ = ["RULES", "Finding", "Rule", "Unreadable", "lint", "lint_file"]


class Unreadable(Error):
    """The bytes of a file are those of no ONNX model."""


def lint(
    model: ModelProto,
    target: Target,
    folders: Sequence[Path] = (),
    ignore: Collection[str] = (),
) -> list[Finding]:
    """The findings of all rules that hold for `target`, errors first.

    Where `folders` are given, data outside the model must lie in one of them, and rules read it.
    `ignore` has the names of rules to leave out.
    """
    for name in ignore:
        if name not in RULES:
            raise Error(f"no rule is called {name!r}{did_you_mean(name, RULES)}")
    rules = [rule for rule in RULES.values() if rule.name not in ignore and rule.holds(target)]
    graphs = list(_graphs(model, tuple(folders)))
    found = [each for rule in rules for graph in graphs for each in rule.findings(graph, target)]
    distinct = dict.fromkeys(found)  # a node that stands in two calls of a function says it once
    return sorted(distinct, key=lambda each: each.severity)


def lint_file(path: Path, target: Target, ignore: Collection[str] = ()) -> list[Finding]:
    """The findings about a file; an Error where it is no ONNX model."""
    model = read_model(path)
    try:
        return lint(model, target, _folders(path), ignore)
    except Error as error:
        error.add_note(f"in {path}")
        raise


def _folders(path: Path) -> list[Path]:
    """Where the data of a model may lie: beside it, and where its artifact refers to."""
    if not is_artifact(path.parent):
        return [path.parent]
    base = read_manifest(path.parent)["program"].get("base")
    return [path.parent, *([path.parent / base] if isinstance(base, str) else [])]


def read_model(path: Path) -> ModelProto:
    """The model in a file, external data left where it is."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError:
        raise Unreadable(
            f"{path} is not an ONNX model, or it is damaged; export it again"
        ) from None
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror}") from None
    if not model.HasField("graph"):
        raise Error(f"{path} is not an ONNX model: it has no graph; export it again")
    if not is_text(model):
        raise Error(f"{path} is damaged: a name in it is no text in UTF-8; export it again")
    return model


def _graphs(model: ModelProto, folders: tuple[Path, ...]) -> Iterator[Graph]:
    """The main graph and those inside its nodes."""
    bare = skeleton(model)
    initializers = {each.name: each for each in model.graph.initializer}
    types, trouble = types_of(bare, initializers.values())
    main = Graph(
        bare.graph,
        types,
        initializers,
        frozenset((each.domain, each.name) for each in model.functions),
        _called(model),
        trouble,
        model.producer_name,
        folders,
    )
    todo = [main]
    while todo:
        graph = todo.pop(0)
        yield graph
        for node in graph.proto.node:
            for inner in inner_graphs(node):
                todo.append(graph.inside(inner))


def _called(model: ModelProto) -> tuple[NodeProto, ...]:
    """The nodes that call local functions: inlining takes them away."""
    names = {(each.domain, each.name) for each in model.functions}
    bodies = (model.graph.node, *(function.node for function in model.functions))
    return tuple(n for body in bodies for n in body if (n.domain, n.op_type) in names)
