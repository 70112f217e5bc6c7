"""`page`: one HTML file about a module and the passes that made it, for `irc show --html`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import Error
from ..json_files import read_object
from ..pipeline.instruments.history import History
from ..text.parser import parse_module
from .data import page_data
from .tables import module_tables, tables

_PLACE = re.compile(r"<!--(TITLE|TABLES)-->|/\*(CSS|SCRIPT|DATA)\*/")


def page(
    history: History,
    source: str,
    manifest: Mapping[str, Any] | None = None,
    overlays: Sequence[dict[str, Any]] = (),
) -> str:
    """The page about every state of a run of passes. It needs no other file, and has no weights.

    `source` is what commands on the page are given, `manifest` that of an artifact, `overlays`
    those of `read_overlays`.
    """
    data = page_data(history, source, manifest, overlays)
    final = parse_module(history.records[-1].text)
    shown = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    parts = {
        "TITLE": escape(f"{data['title']} · irc"),
        "TABLES": f'<section id="tables">\n{tables(data)}\n{module_tables(final)}\n</section>',
        "CSS": _asset("page.css"),
        "SCRIPT": _asset("page.js"),
        "DATA": shown.replace("<", "\\u003c").replace("\u2028", "\\u2028"),
    }
    return _PLACE.sub(lambda place: parts[place[1] or place[2]], _asset("page.html"))


def read_overlays(path: Path) -> list[dict[str, Any]]:
    """Numbers by scope or value: the JSON of `irc compare` and `irc bench --per-op`, or
    `{"title", "unit", "values": {scope or %value: number}}`."""
    document, overlays = read_object(path, "the overlay"), list[dict[str, Any]]()
    try:
        if "phases" in document:
            overlays += [_measured(phase) for phase in document["phases"]]
        elif "equal_inputs" in document:
            names = [f"{r['scope']} %{r['name']}".removesuffix(" %") for r in document["values"]]
            errors = [row["relative_l2"] for row in document["values"]]
            overlays.append(
                {"title": "relative L2", "values": dict(zip(names, errors, strict=True))}
            )
        else:
            overlays.append({"title": path.stem, **document})
        for each in overlays:
            finite = {name: math.isfinite(n or 0) for name, n in each["values"].items()}
            each["values"] = {
                name: each["values"][name] if finite[name] else None for name in finite
            }
            each |= {key: str(each.get(key, "")) for key in ("title", "unit")}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Error(
            f"{path} is no overlay ({type(error).__name__}: {error}); expected JSON of irc compare "
            'or irc bench --per-op, or {"title": ..., "values": {scope or %value: number}}'
        ) from None
    return overlays


def _measured(phase: Mapping[str, Any]) -> dict[str, Any]:
    """The time of each value; equal operations of equal layers share theirs."""
    times: dict[str, float] = {}
    for row in phase["operations"]:
        names: set[str] = {value.partition("/")[0] for value in row["values"]}  # %x/Part is in %x
        us: float = row["us"] / max(len(names), row["layers"])
        times |= dict.fromkeys(names, us)
    return {"title": f"measured, {phase['phase']}", "unit": "us", "values": times, "measured": True}


def _asset(name: str) -> str:
    return files("irc.page").joinpath(name).read_text(encoding="utf-8")
