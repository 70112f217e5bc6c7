"""The page of documentation of a plugin, from its spec."""

from __future__ import annotations

from collections.abc import Sequence

from .fields import Field
from .spec import PluginSpec, Tensor


def describe(spec: PluginSpec) -> str:
    """Markdown: what it does, its node, its fields, its tensors, its versions."""
    about = f"version {spec.version}, namespace `{spec.namespace}`"
    parts = [f"# {spec.name}", about, spec.doc.strip()]
    if spec.fields:
        rows = [(f"`{f.name}`", f.type, _default(f), _about(f)) for f in spec.fields]
        parts.append("## Fields (string attributes of the node)")
        parts.append(_table(("name", "type", "default", "what"), rows))
    parts += ["## Tensors", _tensors(spec)]
    kinds = [(f"`{name}`", " ".join(types)) for name, types in spec.types.items()]
    if kinds:
        parts.append(_table(("dtype", "one of"), kinds))
    if spec.operation:
        parts.append(f"Nodes in ONNX files are read as the operation `{spec.operation}`.")
    if spec.reads:
        parts.append(f"Engines of version {', '.join(spec.reads)} are read too.")
    if spec.collective:
        parts.append("Needs a communicator for its group on every rank.")
    return "\n\n".join(parts) + "\n"


def _tensors(spec: PluginSpec) -> str:
    rows: list[tuple[str, ...]] = []
    for which in ("inputs", "outputs"):
        found: Sequence[Tensor] | object = getattr(spec, which)
        if callable(found):
            rows.append((which[:-1], "", "", "as the fields say, see above"))
        elif isinstance(found, tuple):
            rows += [(which[:-1], f"`{t.name}`", t.dtype, t.doc) for t in found]
    return _table(("", "name", "dtype", "what"), rows)


def _default(field: Field) -> str:
    if field.required:
        return "required"
    text = field.encode(field.default)
    return f"`{text}`" if text else "empty"


def _about(field: Field) -> str:
    choices = f" ({', '.join(field.choices)})" if field.choices else ""
    return field.doc + choices


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
