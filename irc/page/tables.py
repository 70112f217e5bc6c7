"""Tables of a page, which need no script; and report.html, a page of tables about an artifact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, TypeAlias

from ..analysis.places import general
from ..analysis.units import amount
from ..artifact.report import bytes_of, statistics
from ..ir.core import Module
from .fold import scope_of

Rows: TypeAlias = Iterable[Sequence[object]]

_STYLE = """
:root { color-scheme: light dark } body { font: 14px/1.5 system-ui; margin: 2em auto; width: 70em }
td, th { padding: .15em .8em; text-align: left } td.n { text-align: right }
code { font: 12px monospace; overflow-wrap: anywhere }
"""


def report(
    module: Module,
    manifest: Mapping[str, Any],
    timings: Rows,
    quantization: Sequence[Sequence[str]],
) -> str:
    """The page report.html. `timings` are (pass, its counts) in order, `quantization` a table."""
    facts = [(key, value) for key, value in manifest.items() if isinstance(value, (str, int))]
    parts = [
        _section("Compiled", facts),
        _section("Pipeline", timings, "pass", "changes"),
        _section("Quantization", quantization[1:], *quantization[0]),
        module_tables(module),
    ]
    title = escape(module.name)
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>\n"
        f"<title>{title} · irc</title>\n<style>{_STYLE}</style>\n<h1>{title}</h1>\n"
        f"{''.join(parts)}</html>\n"
    )


def module_tables(module: Module) -> str:
    """Dimensions, inputs and outputs, size, operations and weights of a module."""
    dims = [(name, *bounds) for name, bounds in module.dims.items()]
    sizes = [item for item in statistics(module).items() if not isinstance(item[1], dict)]
    ops = Counter((general(scope_of(op)) or "(top)", op.opname) for op in module.ops())
    files: dict[str, list[int]] = {}
    for weight in module.weights.values():
        names = dict.fromkeys(module.files[name] for name in weight.ref.files())
        files.setdefault(", ".join(names) or "(no file)", []).append(bytes_of(weight))
    ports: list[Sequence[object]] = []
    if module.functions:
        results = zip(module.main.result_names(), module.main.returned, strict=True)
        ports += [("input", arg.name, arg.type) for arg in module.main.args]
        ports += [("output", name, value.type) for name, value in results]
    parts = [
        _section("Dimensions", dims, "symbol", "min", "typical", "max"),
        _section("Inputs and outputs", ports, "", "name", "type"),
        _section("Size", sizes),
        _section("Operations by scope", ((*k, n) for k, n in ops.items()), "scope", "", "number"),
        _section(
            "Weights by file",
            ((place, len(each), f"{sum(each):,}") for place, each in files.items()),
            *("file", "weights", "bytes"),
        ),
    ]
    return "".join(parts)


def tables(data: Mapping[str, Any]) -> str:
    """Passes, rewrites, match failures, decisions, memory and steps, as sections."""
    passes, strings = data["passes"], [s.replace(data["mark"], "*") for s in data["strings"]]
    decisions = (
        (passes[at]["name"], *(strings[i] for i in rest)) for at, *rest in data["decisions"]
    )
    ran = [
        (each["text"], f"{each['before']} -> {each['after']}", f"{each['seconds'] * 1e3:.1f}")
        for each in passes[1:]
    ]
    parts = [
        _section("Figures", data["facts"]),
        _section("Passes", ran, "pass", "operations", "ms"),
        _section("Rewrites", _grouped(data, "hits", strings), *_HIT, "operation"),
        _section("Rules that did not match", _grouped(data, "misses", strings), *_MISS, "why"),
        _section("Decisions", decisions, "pass", "what", "chosen", "runner-up"),
    ]
    for stage in data["stages"]:
        ranks = ", ".join(map(str, stage["ranks"]))
        sizes = [(kind, amount(size)) for kind, size in stage["memory"].items()]
        steps = _steps(stage, strings)
        parts.append(_section(f"Memory of a rank of {ranks}", sizes))
        parts.append(_section(f"Steps of a rank of {ranks}", steps, "step", "times", "µs", "bytes"))
    return "".join(parts)


_HIT = ("pass", "times", "rule", "line of the rule", "where")
_MISS = ("pass", "times", "rule", "missing", "where")


def _section(title: str, rows: Rows, *header: str) -> str:
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}" for row in rows)
    head = f"<tr>{''.join(f'<th>{escape(name)}' for name in header)}\n" if header else ""
    return f"<h2>{escape(title)}</h2>\n<table>\n{head}{body}\n</table>\n" if body else ""


def _cell(content: object) -> str:
    text = str(content)
    number = text.replace(",", "").isdigit()
    return f"<td class=n>{escape(text)}" if number else f"<td><code>{escape(text)}</code>"


def _grouped(
    data: Mapping[str, Any], key: str, strings: Sequence[str]
) -> Iterator[Sequence[object]]:
    """Equal hits or failures of a pass as one row, with their number."""
    for each in data["passes"]:
        for number, times in Counter(at for at, _ in each[key]).items():
            yield each["name"], times, *(strings[i] for i in data[key][number])


def _steps(stage: Mapping[str, Any], strings: Sequence[str]) -> list[Sequence[object]]:
    """Name, number, time and bytes of equal steps, those that take longest first."""
    sums: dict[str, list[float]] = {}
    for label, _, us, size, *_ in stage["steps"]:
        times, before, moved = sums.get(strings[int(label)], (0, 0, 0))
        sums[strings[int(label)]] = [times + 1, before + us, moved + size]
    rows = sorted(sums.items(), key=lambda item: -item[1][1])
    return [(name, times, f"{us:.1f}", amount(size)) for name, (times, us, size) in rows]
