"""Points: the named activations of a module, and the keys under which another model has them.

A key is the path of a component whose output a value is (`model.layers.0.mlp`); `tensor:` and the
path of a weight in its checkpoint, for the value that is computed from that weight; or the scope of
an inner value and its name (`model.layers.0.self_attn %mixed`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..frontends.module import result_hint
from ..ir.core import Module, Op, Value, Weight, reached
from ..ir.dtypes import is_float
from ..ops import FusedLinear
from ..weights import FileRef

_NUMBERED = re.compile(r"(_full)?(\.\d+)?$")  # what `shard` and the printer add to a name
_LAYER = re.compile(r"(.*?\.)?\d+(?=\.|$)")
_TRANSFORMS = re.compile("linear|matmul|embedding|norm|conv")  # operations that own weights
_COMPLETE = ("all_reduce", "all_gather")  # which follow an operation whose ranks share the weight
_Values: TypeAlias = Sequence[tuple[Op, Value]]


@dataclass(frozen=True, eq=False)
class Point:
    """One activation or result: its keys (innermost first), where it is computed, and its value.

    `name` is that of a value that is no output of its scope, `result` that of a result of the main
    function. One without keys has no partner.
    """

    keys: tuple[str, ...]
    scope: str
    name: str = ""
    line: str = ""
    value: Value | None = None
    result: str = ""

    @property
    def label(self) -> str:
        """`result logits`, or the scope and the name of an inner value."""
        inner = f"{self.scope} %{self.name}" if self.name else self.scope
        return f"result {self.result}" if self.result else inner


def points_of(module: Module) -> list[Point]:
    """The float values of a module in program order, and the results of its main function.

    Values that vary by rank have none; partial sums have no keys.
    """
    fixed, every = set[Value](), list[tuple[Op, Value]]()  # fixed: what depends on weights only
    for op in reached(module.main, set()):
        of_weights = op.operands and all(isinstance(o, Weight) or o in fixed for o in op.operands)
        if op.opname in ("call", "return"):
            continue
        if of_weights or op.repeated() is not None:
            fixed.update(op.results)
        else:
            types = [value.type.global_type for value in op.results]
            plain = [is_float(type.dtype) and not type.varying for type in types]
            every += [(op, value) for value, ok in zip(op.results, plain, strict=True) if ok]
    used = {op: _weights(op, fixed) for op, _ in every}
    keys, layers = _tensor_keys(every, used), _layer_names(used)
    in_scopes = [(op, v) for op, v in every if _scope(op) and not v.type.global_type.partial]
    outputs = _outputs(in_scopes)
    inner = {f"{_scope(op)} %{_base(v)}": v for op, v in in_scopes if _base(v)}  # the last each
    points: list[Point] = []
    for op, value in every:
        scope, name, paths = _scope(op), _base(value), outputs.get(value, [])
        if paths and not f"{scope}.".startswith(f"{paths[0]}."):
            scope = paths[0]  # of a fused operation, which has the scope of another result
        own = [*keys.get(value, ()), *paths, *(layers[path] for path in paths if path in layers)]
        key = f"{_scope(op)} %{name}"
        own += [key] * (inner.get(key) is value)
        labels = () if value.type.global_type.partial else tuple(own)
        points.append(Point(labels, scope, "" if paths else name, _line(op), value))
    return [*points, *_results(module)]


def _results(module: Module) -> Iterator[Point]:
    """The results of the main function, states among them, matched by name and kind of dtype."""
    for name, value in zip(module.main.result_names(), module.main.returned, strict=True):
        type = value.type.global_type
        while (op := value.producer) is not None and op.opname == "call":
            value = op.attributes["callee"].returned[value.index]
        if not type.varying and not type.partial:
            key = f"result {name}{'' if is_float(type.dtype) else ' of whole numbers'}"
            scope, line = (_scope(op), _line(op)) if op is not None else ("", "")
            yield Point((key,), scope, "", line, value, name)


def _line(op: Op) -> str:
    return f"{op.loc.file}:{op.loc.line}" if op.loc else ""


def _scope(op: Op) -> str:
    return op.loc.scope if op.loc is not None else ""


def _base(value: Value) -> str:
    """The name of a value without what makes it unique."""
    return _NUMBERED.sub("", value.name or "")


def _paths(scope: str) -> list[str]:
    """A scope and the scopes around it, innermost first."""
    parts = scope.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _outputs(in_scopes: _Values) -> dict[Value, list[str]]:
    """Per value, the components of which it is the output, innermost first.

    A value has the name of the outermost such component. Where no value is named so, as in an ONNX
    file, the output of a component is the last value inside it.
    """
    by_hint: dict[str, list[str]] = {}
    for path in {path: None for op, _ in in_scopes for path in _paths(_scope(op))}:
        by_hint.setdefault(result_hint(path), []).append(path)
    exact, passed = dict[str, Value](), dict[str, Value]()
    for op, value in in_scopes:
        paths, name = _paths(_scope(op)), _base(value)
        named = [path for path in paths if result_hint(path) == name]
        if named:
            exact[named[0]] = value
            passed |= dict.fromkeys(paths[: paths.index(named[0])], value)
        elif len(by_hint.get(name, ())) == 1:  # a fused operation has another scope
            exact[by_hint[name][0]] = value
    if not exact:
        passed = {path: value for op, value in in_scopes for path in _paths(_scope(op))}
    outputs: dict[Value, list[str]] = {}
    for path, value in sorted((passed | exact).items(), key=lambda item: -len(item[0])):
        outputs.setdefault(value, []).append(path)
    return outputs


def _weights(op: Op, fixed: Collection[Value]) -> list[Weight]:
    """The weights that an operation uses, also those that are transposed or dequantized first."""
    ahead, weights = [*op.operands], list[Weight]()
    while ahead:
        value = ahead.pop()
        if isinstance(value, Weight):
            weights.append(value)
        elif value in fixed and value.producer is not None:
            ahead.extend(value.producer.operands)
    return weights


def _stored(weight: Weight) -> list[str]:
    """The path of the component that a weight belongs to in its checkpoint, if there is one."""
    names = dict.fromkeys(ref.key for ref in weight.ref.sources() if isinstance(ref, FileRef))
    paths = [name.rpartition(".")[0] for name in names or [weight.name]]
    return paths if len(paths) == 1 and paths[0] else []


def _tensor_keys(in_scopes: _Values, used: Mapping[Op, Sequence[Weight]]) -> dict[Value, list[str]]:
    """Per value, the key of the component whose weights it is computed with, by its checkpoint.

    A component that several scopes use, as where a tensor is sliced or tied, gives none.
    """
    users: dict[str, dict[Op, Value]] = {}
    for op, value in in_scopes:
        names = {path for weight in used[op] for path in _stored(weight)}
        if len(names) == 1:
            users.setdefault(names.pop(), {}).setdefault(op, value)
    keys: dict[Value, list[str]] = {}
    for path, uses in users.items():
        first, output = next(iter(uses.items()))
        if not _is_transform(first) or len({*map(_scope, uses)}) > 1:
            continue
        while len(output.users) == 1:
            (user,) = output.users
            follows = (user in uses and user.opname == "add") or user.opname in _COMPLETE
            if not follows or _scope(user) != _scope(first):
                break
            output = user.result
        keys.setdefault(output, []).append(f"tensor:{path}")
    return keys


def _is_transform(op: Op) -> bool:
    """Whether an operation computes the output of the component that its weights belong to."""
    if isinstance(op, FusedLinear) and (op.act or op.norm or op.residual):
        return False
    return _TRANSFORMS.search(op.opname) is not None


def _layer_names(used: Mapping[Op, Sequence[Weight]]) -> dict[str, str]:
    """Paths of layers in the checkpoint of a module, such as `bert.encoder.layer.0`, by their
    scopes in the module; if there is one for each."""
    stored = [(_scope(op), path) for op in used for w in used[op] for path in _stored(w)]
    found = [(_LAYER.match(scope), _LAYER.match(path)) for scope, path in stored]
    pairs = {(own[0], other[0]) for own, other in found if own and other}
    names = dict(pairs)
    return names if len(pairs) == len(names) == len({*names.values()}) else {}


def dtypes_before(point: Point, others: Collection[Value | None]) -> set[str]:
    """The dtypes of what a value is computed from, as far as `others` and the arguments."""
    ahead, seen = [point.value] if point.value is not None else [], set[Value]()
    while ahead:
        value = ahead.pop()
        if value not in seen and value.producer is not None:
            inner = value is point.value or value not in others
            ahead.extend(value.producer.operands if inner else ())
        seen.add(value)
    return {value.type.dtype for value in seen} or {"f32"}
