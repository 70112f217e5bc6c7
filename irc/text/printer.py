"""`print_module`: module to text, one line per operation; equal modules have equal text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import dedent
from typing import Any, cast

from ..ir.core import Function, Module, Op, Value, Weight
from ..ir.string_literals import hint_shown, quote, shown_name


def print_module(module: Module, locs: bool = False, scope: str | None = None) -> str:
    """The text of a module, with `loc(...)` on every operation if `locs`.

    `scope` keeps only the operations of one module path and the paths below it; that text does not
    parse.
    """
    local = " local" * module.local
    mesh = f" mesh({module.mesh})" if module.mesh.axes else ""
    dims = ", ".join(
        f"{n}={low}:{typical}:{high}" for n, (low, typical, high) in module.dims.items()
    )
    out = [f"module @{module.name}{local}{mesh}{f' dims({dims})' if dims else ''} {{"]
    out += [f"  file @{name} = {quote(path)}" for name, path in module.files.items()]
    shown = module.weights.values() if scope is None else _used(module, scope)
    out += [f"  weight @{w.name} : {w.type} = {w.ref}" for w in shown]
    for function in module.functions.values():
        _function(function, out, locs, scope)
    out.append("}\n")
    return "\n".join(out)


def print_function(function: Function) -> str:
    """The text of one function, as in its module."""
    out: list[str] = []
    _function(function, out, locs=False, scope=None)
    return dedent("\n".join(out)) + "\n"


def print_op(op: Op, names: Mapping[Value, str] | None = None) -> str:
    """One operation, with the names of a function's text, or with name hints."""
    known = names or {}
    return _line(op, [known.get(r, f"%{r.name or '_'}") for r in op.results], known)


def _line(op: Op, results: Sequence[str], names: Mapping[Value, str]) -> str:
    """One operation with these names of its results and operands."""
    text = f"{op.opname} {_operands(op, names)}" if op.operands else op.opname
    text += attributes_text(op)
    types = ", ".join([r.type._text for r in op.results])  # pyright: ignore[reportPrivateUsage]
    return f"{', '.join(results)} = {text} : {types}" if results else text


def in_scope(op: Op, scope: str) -> bool:
    """Whether the module path of an operation is `scope`, or below it."""
    path = op.loc.scope if op.loc is not None else ""
    return path == scope or path.startswith(scope + ".")


def _used(module: Module, scope: str) -> list[Weight]:
    chosen = [op for op in module.ops() if in_scope(op, scope)]
    used = {v for op in chosen for v in op.operands if isinstance(v, Weight)}
    return [w for w in module.weights.values() if w in used]


def names_of(function: Function) -> dict[Value, str]:
    """The names of values in the text of a function."""
    names: dict[Value, str] = {}
    counts: dict[str, int] = {}
    for value in (*function.args, *(result for op in function for result in op.results)):
        base = value.name or ""
        base = shown_name(base) if base and value.owner is function else hint_shown(base)
        n = counts.get(base, 0)
        counts[base] = n + 1
        names[value] = f"%{base}" if base and not n else f"%{base}.{n}" if base else f"%{n}"
    return names


def _function(function: Function, out: list[str], locs: bool, scope: str | None) -> None:
    names = names_of(function)
    args = [f"{names[a]}: {a.type}" for a in function.args]
    results = f"({_results(function, names)})"
    if scope is not None:
        used = {v for op in function if in_scope(op, scope) for v in op.operands}
        args = [text for a, text in zip(function.args, args, strict=True) if a in used] + ["..."]
        results = "(...)"
    out.append(f"  func @{function.name}({', '.join(args)}) -> {results} {{")
    for op in function:
        text = _line(op, [names[r] for r in op.results], names)
        if scope is not None and not in_scope(op, scope):
            continue
        out.append(f"    {text} {op.loc!r}" if locs and op.loc is not None else f"    {text}")
    out.append("  }")


def _results(function: Function, names: dict[Value, str]) -> str:
    args = {a.name: names[a] for a in function.args}
    declared = function.results or (None,) * len(function.returned)
    parts: list[str] = []
    for result, value in zip(declared, function.returned, strict=False):
        name = f"{shown_name(result.name)}: " if result is not None and result.name else ""
        alias = result.alias if result is not None else None
        parts.append(
            f"{name}{value.type}" + (f" aliases {args.get(alias, alias)}" if alias else "")
        )
    return ", ".join(parts)


def _operands(op: Op, names: Mapping[Value, str]) -> str:
    operands = op.operands
    texts = [names.get(v) or _name(v) for v in operands]
    if op.present:
        first = len(operands) - len(op.present)
        texts[first:] = [f"{n}={t}" for n, t in zip(op.present, texts[first:], strict=True)]
    return ", ".join(texts)


def _name(value: Value) -> str:
    return f"@{value.name}" if isinstance(value, Weight) else f"%{value.name or '_'}"


def attributes_text(op: Op) -> str:
    """` {eps=1e-05, causal}`, or nothing if every attribute has its default."""
    parts: list[str] = []
    defaults = op.attribute_defaults
    for name in op.attribute_types:
        value = getattr(op, name)
        if name in defaults and same_literal(value, defaults[name]):
            continue
        parts.append(name if value is True else f"{name}={literal(value)}")
    return f" {{{', '.join(parts)}}}" if parts else ""


def same_literal(a: Any, b: Any) -> bool:
    """Whether two attribute values have equal text; 1, 1.0 and True differ, as do 0.0 and -0.0."""
    if a is b:
        return True
    if a.__class__ is not b.__class__ or a != b:
        return False
    return a.__class__ is int or literal(a) == literal(b)


def literal(value: Any) -> str:
    """An attribute value as text."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(literal, cast('Sequence[Any]', value)))}]"
    if isinstance(value, Function):
        return f"@{value.name}"
    return "none" if value is None else str(value)
