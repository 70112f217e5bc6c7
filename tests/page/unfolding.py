"""The text of a state from the tables of a page, as the script of the page makes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from irc.ir.string_literals import quote

Data = dict[str, Any]


def text_of(data: Data, state: Data, header: str) -> str:
    """The module's text with locations, without weights; `header` is all before them."""
    out = [header]
    for function in state["functions"]:
        out += _function(data, function)
    return "\n".join([*out, "}\n"])


def put(data: Data, string: int, number: int) -> str:
    """A string with the layer's number; two marks are another thing."""
    mark, text = data["mark"], data["strings"][string].replace(data["mark"] * 2, "\0")
    return (text if number < 0 else text.replace(mark, str(number))).replace("\0", mark * 2)


def _function(data: Data, function: Data) -> Iterator[str]:
    strings, types, counts = data["strings"], data["types"], dict[str, int]()
    args, results = data["signatures"][function["signature"]]
    names = [_fresh(strings[hint], counts) for hint, _ in args]
    shown = ", ".join(f"{n}: {types[t][0]}" for n, (_, t) in zip(names, args, strict=True))
    parts = [
        (f"{strings[name]}: " if name >= 0 else "")
        + types[type][0]
        + (f" aliases %{strings[alias]}" if alias >= 0 else "")
        for name, type, alias in results
    ]
    yield f"  func @{function['name']}({shown}) -> ({', '.join(parts)}) {{"
    for block, _, number, inputs, changed in function["runs"]:
        other = {(r, s): name for r, s, name in zip(*[iter(changed)] * 3, strict=True)}
        for at, row in enumerate(data["blocks"][block]["rows"]):
            op, scope, file, line, made, operands, present, attributes = data["rows"][row]
            hints = [other.get((at, i), hint) for i, hint in enumerate(made[::2])]
            used = [f"{strings[name]}=" for name in present]
            used = [""] * (len(operands) - len(used)) + used
            for slot, each in enumerate(operands):
                if isinstance(each, list):
                    used[slot] += "@" + put(data, other.get((at, -1 - slot), each[0]), number)
                else:
                    used[slot] += names[inputs[-1 - each] if each < 0 else len(names) - each]
            new = [_fresh(put(data, hint, number), counts) for hint in hints]
            names += new
            text = f"{', '.join(new)} = {strings[op]}" if new else strings[op]
            text += f" {', '.join(used)}" * bool(used) + f" {strings[attributes]}".rstrip()
            text += f" : {', '.join(types[type][0] for type in made[1::2])}" * bool(new)
            path = f" {quote(put(data, scope, number))}" * bool(strings[scope])
            yield f"    {text}" + f" loc({quote(strings[file])}:{line}{path})" * (file >= 0)
    yield "  }"


def _fresh(hint: str, counts: dict[str, int]) -> str:
    n = counts[hint] = counts.get(hint, -1) + 1
    return f"%{hint}" if hint and not n else f"%{hint}.{n}" if hint else f"%{n}"
