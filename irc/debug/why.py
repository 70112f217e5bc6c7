"""`why`: where a value or a weight of an artifact comes from, pass by pass, back to the script."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import Error, did_you_mean
from ..pipeline.instruments.history import History, PassRecord, value_names
from ..text import parse_module
from ..text.printer import print_op


class Line(NamedTuple):
    """A value of a text, and its place in the script, "" for none. `inputs` are the operands of its
    operation, or the tensors that a weight is read from."""

    text: str
    where: str
    inputs: tuple[str, ...]


def why(history: History, name: str) -> dict[str, Any]:
    """Facts about a value of the final text: what the passes did to it, the last one first, and the
    values before all passes that it comes from, with their places in the script.

    `name` is `%value`, `value`, `@weight` or `@function %value`. Of each change `how` is that of
    Origin, or `changed` for a weight, and `rewrite` tells the rewrite and its rule, "" for none.
    """
    final = _read(history.records[-1].text)
    shown = next((each for each in (name, f"%{name}", f"@{name}") if each in final), None)
    if shown is None:
        near = did_you_mean(name.lstrip("%@"), (each.lstrip("%@") for each in final))
        raise Error(f"the final text has no value {name!r}{near}")
    changes, names = list[dict[str, Any]](), [shown]
    for record, before in pairwise(reversed(history.records)):
        steps = [_change(before, record, each) for each in names]
        changes += [step for step in steps if step["how"] not in ("kept", "renamed")]
        names = list(dict.fromkeys(source for step in steps for source in step["sources"]))
    first = [(each, line) for each, line in _read(history.input.text).items() if each in names]
    origins = [{"value": each, "text": line.text, "where": line.where} for each, line in first]
    return {"value": shown, "text": final[shown].text, "changes": changes, "input": origins}


def _change(before: PassRecord, record: PassRecord, name: str) -> dict[str, Any]:
    line, old, origin = _read(record.text)[name], _read(before.text), record.origins.get(name)
    if origin is not None:
        how, sources = str(origin.how), list(origin.values)
    elif name in old:  # a weight
        how, sources = "kept" if old[name] == line else "changed", [name]
    else:
        how, sources = "new", [each for each in old if {*old[each].inputs} & {*line.inputs}]
    rewrite, number = "", origin.hit if origin is not None else None
    for hit in record.hits:
        if hit.number == number:
            rule = f"{hit.rule} ({hit.rule_where})" if hit.rule_where else hit.rule
            rewrite = f"rewrite {hit.number}, rule {rule}, at {hit.where}"
    if rewrite:  # what the roots were computed from and is not there any more belongs to it
        kept = {source for each in record.origins.values() for source in each.values}
        for each in sources:
            sources += [v for v in old[each].inputs if v not in kept and v not in sources]
    facts = {"index": record.index, "pass": record.pass_, "value": name, "how": how}
    return {**facts, "sources": sources, "rewrite": rewrite, "text": line.text}


@lru_cache(maxsize=4)
def _read(text: str) -> dict[str, Line]:
    """The values and weights of a text by name."""
    module = parse_module(text)
    names, lines = value_names(module), dict[str, Line]()
    for name, weight in module.weights.items():
        keys = [str(getattr(source, "key", source)) for source in weight.ref.sources()]
        text = f"@{name} : {weight.type} = {weight.ref}"
        lines[f"@{name}"] = Line(text, "", tuple(keys))
    for value, name in names.items():
        op = value.producer
        operands = [names[each] for each in op.operands if each in names] if op else []
        text = print_op(op, names) if op else f"argument {name} : {value.type}"
        lines[name] = Line(text, op.loc.where() if op and op.loc else "", tuple(operands))
    return lines
