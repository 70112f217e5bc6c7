"""The linter: finds what TensorRT refuses, drops or miscomputes in an ONNX file, without TensorRT.

`RULES` is the table, one row per fault; `lint` applies the rows that are about a target.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from onnx.onnx_ml_pb2 import ModelProto

from irc.artifact.folder import ArtifactFolder
from irc.backends.tensorrt.builder.model import Unreadable, parse
from irc.backends.tensorrt.lint import attention, caches, dtypes, operators, plugins, quantization
from irc.backends.tensorrt.lint.graph import Graph
from irc.backends.tensorrt.lint.inference import skeleton, types_of
from irc.backends.tensorrt.lint.rules import Finding, Rule
from irc.backends.tensorrt.target import Target
from irc.errors import Error, did_you_mean
from irc.onnx_format.files import is_text

__all__ = ["RULES", "Finding", "Rule", "Unreadable", "lint", "lint_file"]

_TOPICS = (attention, caches, dtypes, operators, plugins, quantization)
RULES: dict[str, Rule] = {rule.name: rule for topic in _TOPICS for rule in topic.RULES}


def lint(
    model: ModelProto, target: Target, folders: Sequence[Path] = (), ignore: Collection[str] = ()
) -> list[Finding]:
    """The findings of all rules about `target` that are not named in `ignore`, errors first.

    Where `folders` are listed, external data must be in one of them, and rules read it.
    """
    for name in ignore:
        if name not in RULES:
            raise Error(f"no rule is called {name!r}{did_you_mean(name, RULES)}")
    rules = [
        rule for rule in RULES.values() if rule.name not in ignore and rule.where.includes(target)
    ]
    bare = skeleton(model)
    initializers = {each.name: each for each in model.graph.initializer}
    (types, *inner), trouble = types_of(bare, initializers.values())
    main = Graph(bare.graph, types, initializers, trouble, tuple(folders))
    graphs = list(main.all(iter(inner)))
    found = [each for rule in rules for graph in graphs for each in rule.findings(graph, target)]
    distinct = dict.fromkeys(found)  # a function that is called twice is inlined twice
    return sorted(distinct, key=lambda each: each.severity)


def lint_file(path: Path, target: Target, ignore: Collection[str] = ()) -> list[Finding]:
    """The findings about a file; an Error where it is not an ONNX model."""
    model = _read_model(path)
    try:
        return lint(model, target, _data_folders(path), ignore)
    except Error as error:
        error.add_note(f"in {path}")
        raise


def _data_folders(path: Path) -> list[Path]:
    """Where external data may be: beside the model, and in the base folder of its artifact."""
    artifact = ArtifactFolder.find(path.parent)
    base = artifact.engines.get("base") if artifact else None
    return [path.parent, *([path.parent / base] if isinstance(base, str) else [])]


def _read_model(path: Path) -> ModelProto:
    """The model in a file, without its external data."""
    _, model = parse(path)
    if not is_text(model):
        raise Error(f"{path} is damaged: a name in it is not UTF-8 text; export it again")
    return model
