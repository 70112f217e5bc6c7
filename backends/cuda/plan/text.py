"""Plans as text: a line per buffer, kernel and step; `parse_plan(print_plan(plan), ...)` is `plan`.

    plan @forward {B=1, S=1}
      buffer %q bf16[1, 1, 4096] arena +8192
      kernel linear_5a1c {ROWS=4}
      launch linear_5a1c grid 132 1 1 block 256 (%x, @w, out %q, 1) constant 1 early
        %q bytes 33554432 flops 33554432 at llama.py:33
      call nccl.all_reduce (%q, out %sum) {axis="tp", elements=4096}
      return %sum

Sources of kernels are apart, in a file each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from irc.errors import Error

from .core import PLACES, Argument, Buffer, Kernel, Launch, LibraryCall, Plan, Step

_SHAPE = r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]"
_BUFFER = re.compile(rf"buffer (?P<name>\S+) {_SHAPE} (?P<place>\w+)(?: \+(?P<offset>\d+))?")
_COSTS = r"(?P<ops>(?:[^\s(){}]+ )*)bytes (?P<bytes>\d+) flops (?P<flops>\d+)(?: at (?P<at>.*))?"
_LAUNCH = re.compile(
    r"launch (?P<kernel>\S+) grid (?P<grid>\d+ \d+ \d+) block (?P<block>\d+)"
    r"(?: shared (?P<shared>\d+))?(?: cluster (?P<cluster>\d+))? \((?P<args>[^)]*)\)"
    rf"(?: constant (?P<constant>\d+(?: \d+)*))?(?P<early> early)?\n\s*{_COSTS}"
)
_CALL = re.compile(
    r"call (?P<library>\w+)\.(?P<function>\w+) \((?P<args>[^)]*)\) (?P<settings>{.*})"
    rf"\n\s*{_COSTS}"
)


def print_plan(plan: Plan) -> str:
    """The text of a plan, without the sources of its kernels."""
    out = [f"plan @{plan.function} {_literals(plan.sizes)}"]
    for each in plan.buffers.values():
        offset = f" +{each.offset}" if each.place == "arena" else ""
        shape = ", ".join(map(str, each.shape))
        out.append(f"  buffer {each.name} {each.dtype}[{shape}] {each.place}{offset}")
    out += [f"  kernel {name} {_literals(each.macros)}" for name, each in plan.kernels.items()]
    out += map(_step, plan.steps)
    out.append(f"  return {' '.join(plan.results)}".rstrip())
    return "\n".join(out) + "\n"


def _step(step: Step) -> str:
    args = ", ".join(map(_argument, step.arguments))
    if isinstance(step, LibraryCall):
        head = f"  call {step.library}.{step.function} ({args}) {_literals(step.settings)}"
    else:
        grid = " ".join(map(str, step.grid))
        head = f"  launch {step.kernel} grid {grid} block {step.block}"
        head += f" shared {step.shared}" if step.shared else ""
        head += f" cluster {step.cluster}" if step.cluster != 1 else ""
        head += f" ({args})"
        head += f" constant {' '.join(map(str, step.constant))}" if step.constant else ""
        head += " early" if step.programmatic else ""
    names = "".join(f"{name} " for name in step.operations)
    at = f" at {step.source}" if step.source else ""
    return f"{head}\n    {names}bytes {step.nbytes} flops {step.flops}{at}"


def _argument(argument: Argument | int | float) -> str:
    if not isinstance(argument, Argument):
        return repr(argument)
    offset = f"+{argument.offset}" if argument.offset else ""
    return f"{'out ' if argument.written else ''}{argument.buffer}{offset}"


def _literals(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items()) + "}"


def parse_plan(text: str, kernels: Mapping[str, Kernel]) -> Plan:
    """The plan of a text, with the sources of its kernels by name; an Error names a bad line."""
    head, *items = list(_items(text))
    found = re.fullmatch(r"plan @(\S+) ({.*})", head)
    if found is None:
        raise Error(f"expected a plan such as plan @forward {{B=1}}, found {head!r}")
    buffers: dict[str, Buffer] = {}
    used: dict[str, Kernel] = {}
    steps: list[Step] = []
    results: tuple[str, ...] = ()
    for item in items:
        kind = item.split(maxsplit=1)[0]
        if kind == "buffer":
            buffer = _parsed_buffer(item)
            buffers[buffer.name] = buffer
        elif kind == "kernel":
            kernel = _parsed_kernel(item, kernels)
            used[kernel[0]] = kernel[1]
        elif kind == "return":
            results = tuple(item.split()[1:])
        else:
            steps.append(_parsed_step(item))
    return Plan(found[1], _parsed(found[2]), buffers, used, tuple(steps), results)


def _items(text: str) -> Iterator[str]:
    """The lines, those of a step joined."""
    lines = [line for line in text.splitlines() if line.strip()]
    while lines:
        line = lines.pop(0).strip()
        if line.startswith(("launch ", "call ")) and lines:
            line += "\n" + lines.pop(0).strip()
        yield line


def _match(pattern: re.Pattern[str], item: str) -> re.Match[str]:
    found = pattern.fullmatch(item)
    if found is None:
        raise Error(f"this line of a plan has another form than print_plan gives it: {item!r}")
    return found


def _parsed_buffer(item: str) -> Buffer:
    found = _match(_BUFFER, item)
    if found["place"] not in PLACES:
        raise Error(f"a buffer has no place {found['place']!r}; there are {', '.join(PLACES)}")
    shape = tuple(int(each) for each in found["shape"].split(",") if each.strip())
    place = cast("Any", found["place"])
    return Buffer(found["name"], found["dtype"], shape, place, int(found["offset"] or 0))


def _parsed_kernel(item: str, kernels: Mapping[str, Kernel]) -> tuple[str, Kernel]:
    found = _match(re.compile(r"kernel (\S+) ({.*})"), item)
    kernel = kernels.get(found[1])
    if kernel is None or dict(kernel.macros) != _parsed(found[2]):
        raise Error(f"there is no source of the kernel {found[1]} with the macros {found[2]}")
    return found[1], kernel


def _parsed_step(item: str) -> Step:
    if item.startswith("call "):
        found = _match(_CALL, item)
        arguments = cast("tuple[Argument, ...]", _parsed_arguments(found["args"]))
        settings = {
            name: tuple(cast("list[int]", value)) if isinstance(value, list) else value
            for name, value in _parsed(found["settings"]).items()
        }
        library = cast("Any", found["library"])
        return LibraryCall(library, found["function"], arguments, settings, *_costs(found))
    found = _match(_LAUNCH, item)
    x, y, z = map(int, found["grid"].split())
    return Launch(
        *(found["kernel"], (x, y, z), int(found["block"]), _parsed_arguments(found["args"])),
        *(int(found["shared"] or 0), int(found["cluster"] or 1)),
        *(tuple(map(int, (found["constant"] or "").split())), bool(found["early"])),
        *_costs(found),
    )


def _costs(found: re.Match[str]) -> tuple[Any, ...]:
    operations = tuple(found["ops"].split())
    return operations, found["at"] or "", int(found["bytes"]), int(found["flops"])


def _parsed_arguments(text: str) -> tuple[Argument | int | float, ...]:
    return tuple(_parsed_argument(each.strip()) for each in text.split(",") if each.strip())


def _parsed_argument(text: str) -> Argument | int | float:
    name = text.removeprefix("out ")
    if name[0] not in "%@r":
        return json.loads(text)
    buffer, _, offset = name.partition("+")
    return Argument(buffer, int(offset or 0), name != text)


def _parsed(text: str) -> dict[str, Any]:
    """`{a=1, b="x"}` as a dictionary."""
    decode, at, found = json.JSONDecoder().raw_decode, 1, dict[str, Any]()
    while text[at] != "}":
        name, _, _ = text[at:].partition("=")
        found[name], at = decode(text, at + len(name) + 1)
        at += 2 if text[at : at + 2] == ", " else 0
    return found
