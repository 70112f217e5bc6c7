"""The data of a page: every state of a module and every pass between them, as JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..analysis.units import amount
from ..artifact.report import statistics
from ..backends import DEFAULT, get
from ..errors import Error
from ..ir.core import Module
from ..ir.dims import Dim, product
from ..ir.dtypes import dtype
from ..pipeline.instruments.history import History, PassRecord, value_names
from ..text.parser import parse_module
from .fold import Folder, free_mark, scope_of, topology
from .stages import stages

_LINES = 3  # of a script before and after one that is named
_RUNNER_UP = re.compile(r"(?: \(([^()]*would [^()]*)\))?((?: \(\d+ times\))?)$")


def page_data(
    history: History,
    source: str,
    manifest: Mapping[str, Any] | None = None,
    overlays: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The dict that the page reads; `source` is what commands are given."""
    records, manifest = history.records, manifest or {}
    folder = Folder(free_mark([record.text for record in records]))
    states: list[dict[str, Any]] = []
    passes: list[dict[str, Any]] = []
    first = module = parse_module(records[0].text)
    names: dict[str, int] = {}
    for record, before in zip(records, [None, *records], strict=False):
        old = names
        if before is None or record.text != before.text:
            module = parse_module(record.text)
            states.append(folder.add(module))
            names = {name: i for i, name in enumerate(value_names(module).values())}
        origins = _origins(record, folder, old, names)
        passes.append(
            {
                "name": record.name,
                "text": record.pass_,
                "seconds": round(record.seconds, 6),
                "before": (before or record).operations,
                "after": record.operations,
                "state": len(states) - 1,
                "counts": dict(record.counts),
                "notes": list(record.notes),
                "first": record.hits[0].number if record.hits else 1,
                "origins": origins,
                **_hits(record, folder),
            }
        )
    overlays = [each | {"values": _named(each["values"], module)} for each in overlays]
    measured: list[dict[str, float]] = [o["values"] for o in overlays if o.get("measured")]
    note, stage_facts, backend = "", list[dict[str, Any]](), str(manifest.get("backend", DEFAULT))
    try:
        stage_facts = stages(module, backend, folder, *measured[:1])
    except Error as error:
        note = f"no times and no memory: {error.message}"
    facts = _facts(first, module, stage_facts, backend) | {"note": note}
    facts |= {key: str(manifest.get(key, "")) for key in ("backend", "dtype")}
    return {
        "title": module.name,
        "source": source,
        "facts": [[key, text] for key, text in facts.items() if text],
        "mesh": list(module.mesh.axes),
        "sizes": {name: typical for name, (_, typical, _) in module.dims.items()},
        "states": states,
        "passes": passes,
        "stages": stage_facts,
        "decisions": list(_decisions(records, folder)),
        "overlays": overlays,
        "lines": _lines((first, module), source),
        "commands": commands(source, [record.pass_ for record in records[1:]]),
        **folder.tables(),
    }


def _named(values: Mapping[str, Any], module: Module) -> dict[str, Any]:
    """Numbers by scope or value; `scope %name`, as compare has it, becomes the name in the text."""
    names: dict[str, str] = {}
    for value, text in value_names(module).items():
        if value.producer is not None and value.name:
            names[f"{scope_of(value.producer)} %{value.name.removesuffix('_full')}"] = text
    return {names.get(key, key): number for key, number in values.items()}


def _hits(record: PassRecord, folder: Folder) -> dict[str, Any]:
    """Rewrites and match failures, each a number in a table and the number of a layer."""
    hits = [(each.rule, each.rule_where, each.where, each.before) for each in record.hits]
    missed = [(each.rule, str(each.missing), each.where, each.reason) for each in record.failures]
    return {
        "hits": [[folder.hits(texts), n] for texts, n in map(folder.folded, hits)],
        "misses": [[folder.misses(texts), n] for texts, n in map(folder.folded, missed)],
    }


def _origins(
    record: PassRecord, folder: Folder, old: Mapping[str, int], new: Mapping[str, int]
) -> list[list[Any]]:
    """Runs [new, old, count, how] of values that come from one value each, and all others."""
    runs: list[list[int]] = []
    others: list[list[Any]] = []
    for name, origin in record.origins.items():
        value, how = new[name], folder.strings(origin.how)
        sources = [old[each] for each in origin.values if each in old]
        if len(sources) != 1 or origin.hit is not None or origin.how == "new":
            others.append([value, how, -1 if origin.hit is None else origin.hit, sources])
            continue
        last = runs[-1] if runs else [-1, -1, 0, -1]
        if [value - last[2], sources[0] - last[2], how] == [last[0], last[1], last[3]]:
            last[2] += 1
        else:
            runs.append([value, sources[0], 1, how])
    return [runs, others]


def _decisions(records: Sequence[PassRecord], folder: Folder) -> Iterator[list[int]]:
    """Pass, what it is about, what was chosen and why, and the runner-up, of every explanation."""
    for record in records:
        for note in record.notes:
            end = _RUNNER_UP.search(note)
            other, times = (end[1] or "", end[2]) if end else ("", "")
            what, _, why = note[: end.start() if end else None].partition(": ")
            parts = (what + times, why, other) if why else ("", what + times, other)
            yield [record.index, *map(folder.strings, parts)]


def _facts(
    first: Module, module: Module, stages: Sequence[dict[str, Any]], backend: str
) -> dict[str, str]:
    """The figures of the header."""
    types = [weight.type.global_type for weight in module.weights.values()]
    sizes = [
        0 if isinstance(n := product(t.shape), Dim) else dtype(t.dtype).nbytes(n) for t in types
    ]
    sharded = sum(size for type, size in zip(types, sizes, strict=True) if type.sharded)
    facts = {"mesh": str(module.mesh), "parameters": f"{statistics(first)['parameters']:,}"}
    if module.mesh.ranks > 1 and sum(sizes):
        facts["sharded"] = f"{sharded / sum(sizes):.1%} of {amount(sum(sizes))}"
    if stages:
        most = max(sum(stage["memory"].values()) for stage in stages)
        us = sum(step[2] for stage in stages for step in stage["steps"])
        facts["memory per rank"] = amount(most)
        where = "on an" if get(backend).rank_is_process else "if it ran on"
        facts["expected"] = f"{us:,.1f} µs {where} {topology().device.name}"
    return facts


def _lines(modules: Sequence[Module], source: str) -> dict[str, list[Any]]:
    """The lines around those that operations name, of scripts that are found.

    Only files of Python are read, by their base name: beside the source, in the working folder,
    and the models of irc.
    """
    named: dict[str, set[int]] = {}
    for loc in (op.loc for module in modules for op in module.ops()):
        if loc is not None and re.fullmatch(r"[\w-]+\.py", loc.file):
            named.setdefault(loc.file, set()).update(
                range(loc.line - _LINES, loc.line + _LINES + 1)
            )
    place, shown = Path(source.partition(":")[0]), dict[str, list[Any]]()
    places = place, place.parent, Path(), Path(str(files("irc.frontends"))) / "models"
    for name, near in named.items():
        path = next((folder / name for folder in places if (folder / name).is_file()), None)
        if path is not None:
            text = path.read_text(encoding="utf-8", errors="replace").splitlines()
            shown[name] = [[n, text[n - 1]] for n in sorted(near) if 0 < n <= len(text)]
    return shown


def commands(source: str, passes: Sequence[str]) -> dict[str, list[str]]:
    """Commands that show the same in a terminal; words in braces are filled in, quoted."""
    place, scope = shlex.quote(source), "--scope {scope}"
    given = f"{place}/input.irc" if Path(source).is_dir() else place
    pipeline = shlex.quote(", ".join(passes))
    run = f"irc opt {given} --passes {pipeline}"
    return {
        "op": [f"irc why {place} {{name}}", f"irc show {place} {scope} --locs"],
        "scope": [f"irc show {place} {scope}", f"irc compare {place} OTHER {scope}"],
        "pass": [f"{run} --why-not {{pass}} --stats", f"{run} --limit {{pass}}={{number}} --diff"],
        "diff": [f"{run} --diff"],
        "memory": [f"irc forecast {given} --pipeline {pipeline}"],
        "kernels": [f"irc bench {place} --per-op"],
        "page": [f"irc show {place} --html FILE"],
    }
