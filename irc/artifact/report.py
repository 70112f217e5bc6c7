"""Statistics of a module, and report.html: one page about an artifact in one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..ir.core import Module, Weight
from ..ir.dims import Dim, product
from ..ir.dtypes import dtype
from ..weights import RandomRef, Ref, UnboundRef

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; color: #222; }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: .15em .8em; text-align: left }
th { border-bottom: 1px solid #999 } td.n { text-align: right; font-variant-numeric: tabular-nums }
tr:nth-child(even) { background: #f4f4f4 } code { font: 12px monospace; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd }
tr:nth-child(even) { background: #262626 } }
"""
_NO_FILE: dict[type[Ref], str] = {RandomRef: "(random numbers)", UnboundRef: "(unbound)"}


def statistics(module: Module) -> dict[str, Any]:
    """Counts of operations, weights and parameters, as plain numbers and dicts of numbers."""
    ops = Counter(op.opname for op in module.ops())
    weights = list(module.weights.values())
    return {
        "name": module.name,
        "functions": len(module.functions),
        "operations": ops.total(),
        "weights": len(weights),
        "parameters": sum(_elements(weight) for weight in weights),
        "weight_bytes": weight_bytes(module),
        "by_operation": dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
    }


def weight_bytes(module: Module) -> int:
    """The bytes of all weights; in the local view, of those of one rank."""
    return sum(_bytes(weight) for weight in module.weights.values())


def page(
    module: Module,
    manifest: Mapping[str, Any] | None = None,
    timings: Sequence[tuple[str, str]] = (),
    quantization: Sequence[Sequence[str]] = ((),),
) -> str:
    """The HTML page. `timings` are (pass, its counts) in order, `quantization` a table."""
    stats = statistics(module)
    parts = [f"<h1>{escape(module.name)}</h1>"]
    facts = [(k, str(v)) for k, v in (manifest or {}).items() if isinstance(v, (str, int))]
    parts.append(_section("Compiled", facts, ("", "")))
    dims = [(name, *map(str, bounds)) for name, bounds in module.dims.items()]
    parts.append(_section("Dimensions", dims, ("symbol", "min", "typical", "max")))
    if module.functions:
        main = module.main
        for title, names, values in (
            ("Inputs", [str(arg.name) for arg in main.args], main.args),
            ("Outputs", main.result_names(), main.returned),
        ):
            rows = zip(names, (str(value.type) for value in values), strict=True)
            parts.append(_section(title, rows, ("name", "type")))
    parts.append(_section("Pipeline", timings, ("pass", "changes")))
    header, *quantized = quantization
    parts.append(_section("Quantization", quantized, header))
    totals = [(key, str(value)) for key, value in stats.items() if not isinstance(value, dict)]
    parts.append(_section("Size", totals, ("", "")))
    parts.append(_section("Operations by scope", _by_scope(module), ("scope", "operations", "")))
    parts.append(_section("Weights by file", _by_file(module), ("file", "weights", "bytes")))
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>\n"
        f"<title>{escape(module.name)} · irc</title>\n<style>{_STYLE}</style>\n"
        + "\n".join(filter(None, parts))
        + "\n</html>\n"
    )


def _section(title: str, rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}" for row in rows)
    if not body:
        return ""
    head = f"<tr>{''.join(f'<th>{escape(name)}' for name in header)}\n" if any(header) else ""
    return f"<h2>{escape(title)}</h2>\n<table>\n{head}{body}\n</table>"


def _cell(text: str) -> str:
    number = text.replace(",", "").isdigit()
    return f"<td class=n>{escape(text)}" if number else f"<td><code>{escape(text)}</code>"


def _by_scope(module: Module) -> list[tuple[str, str, str]]:
    """(scope, number of operations, which) in order of appearance."""
    scopes: dict[str, Counter[str]] = {}
    for op in module.ops():
        path = op.loc.scope if op.loc is not None else ""
        scopes.setdefault(path, Counter())[op.opname] += 1
    return [
        (path or "(top)", str(ops.total()), ", ".join(f"{n} {op}" for op, n in ops.items()))
        for path, ops in scopes.items()
    ]


def _by_file(module: Module) -> list[tuple[str, str, str]]:
    sizes_by_place: dict[str, list[int]] = {}
    for weight in module.weights.values():
        names = list(dict.fromkeys(weight.ref.files()))
        kinds = [
            _NO_FILE[type(source)] for source in weight.ref.sources() if type(source) in _NO_FILE
        ]
        place = ", ".join(module.files[name] for name in names) or (*kinds, "(no file)")[0]
        sizes_by_place.setdefault(place, []).append(_bytes(weight))
    return [(place, str(len(sizes)), f"{sum(sizes):,}") for place, sizes in sizes_by_place.items()]


def _elements(weight: Weight) -> int:
    count = product(weight.type.shape)
    return 0 if isinstance(count, Dim) else count


def _bytes(weight: Weight) -> int:
    return dtype(weight.type.dtype).nbytes(_elements(weight))
