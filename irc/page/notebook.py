"""The graph of a module as SVG, as notebooks show it: that of the page, without a script."""

from __future__ import annotations

from html import escape

from ..ir.core import Module
from .fold import Folder

_STEP, _WIDE, _HIGH, _DOWN = 118, 208, 46, 74  # pixels: half a column, a node, and a level
_HUES = ("#2f6fed", "#e8833a", "#8b5cf6", "#0f9d7a", "#d6336c", "#0891b2")  # of mesh axes
_NODE = """<g fill="currentColor" transform="translate({x},{y})">
<rect width="208" height="46" rx="8" fill="none" stroke="currentColor" stroke-opacity=".3"/>
<text x="10" y="19">{title}</text>
<text x="10" y="36" opacity=".6">{below}</text></g>"""


def drawing(module: Module) -> str:
    """The graph of the main function; of more than 200 operations, that of its scopes."""
    folder = Folder("*")
    functions = {each["name"]: each for each in folder.add(module)["functions"]}
    graph = list(folder.graphs)[int(functions[module.main.name]["graphs"][""])]
    strings, types = list(folder.strings), list(folder.types)
    hues, ops = dict(zip(module.mesh.names, _HUES, strict=False)), list(module.main)
    places = [(20 + x * _STEP, 16 + y * _DOWN) for _, x, y in graph.nodes]
    parts: list[str] = []
    for source, target, number in graph.edges:
        (x1, y1), (x2, y2) = places[source], places[target]
        x1, y1, x2, type = x1 + 104, y1 + _HIGH, x2 + 104, types[number].global_type
        hue = next((hues[axis] for axis in type.spread if axis in hues), "#98a2b3")
        curve = f"M{x1},{y1} C{x1},{y1 + 22} {x2},{y2 - 22} {x2},{y2}"
        dashes = ' stroke-dasharray="5 4"' * bool(type.partial)
        parts.append(f'<path d="{curve}" fill="none" stroke="{hue}"{dashes}/>')
    for (what, *_), (x, y) in zip(graph.nodes, places, strict=True):
        if isinstance(what, int):
            title, below = ops[what].opname, ", ".join(str(r.type) for r in ops[what].results)
        else:
            scope, count, first, last = what
            title, below = strings[int(scope)], f"{count} operations"
            title = title.replace("*", f"{first}-{last}") if first < last else title
        shown = {"title": escape(title[:28]), "below": escape(below[:28])}
        parts.append(_NODE.format(x=x, y=y, **shown))
    width, height = graph.width * _STEP + 40, graph.height * _DOWN + 20
    style = "font: 12px ui-monospace, monospace; max-height: 40em; overflow: auto"
    svg = f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return f'<div style="{style}">{svg}{"".join(parts)}</svg></div>'
