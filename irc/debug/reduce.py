"""`reduce_module`: the smallest module found for which a check still fails, by delta debugging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from ..analysis.stages import check_stages
from ..errors import Error
from ..ir.core import Module, Result, Value
from ..ir.verify import verify
from ..passes.shared.edit import named_results, set_results
from ..pipeline import run_pipeline
from ..rewrite import erase_dead
from ..text import parse_module
from ..text.printer import print_module

Places: TypeAlias = dict[str, tuple[int, int]]  # what Candidate.arguments has
Edit: TypeAlias = Callable[[Module, int, int], Places | None]  # of some items, from one to another


@dataclass(frozen=True)
class Candidate:
    """A smaller module, verified, its text, and the places in the module before, (number of the
    operation in the main function, index of its result), of what its new arguments hold."""

    module: Module
    text: str
    arguments: Places


def reduce_module(module: Module, fails: Callable[[Candidate], bool]) -> Module:
    """The smallest module found for which `fails` is true, as it is for `module`."""
    text, before, tried = print_module(module, locs=True), "", set[str]()

    def attempt(edit: Edit, start: int, stop: int) -> bool:
        """Whether the module still fails after an edit, which it then keeps."""
        nonlocal text
        module = parse_module(text)
        try:
            places = edit(module, start, stop)
            _drop_unused(module)
            verify(module)
            check_stages(module)
        except Error:
            return False
        new = print_module(module, locs=True)
        if new == text or new in tried:
            return False
        tried.add(new)
        failed = fails(Candidate(module, new, places or {}))
        text = new if failed else text
        return failed

    for edit in (_return_unused, _inline):  # it may fail in what nothing uses
        attempt(edit, 0, 0)
    while text != before:
        before = text
        for items, edit in STAGES:
            total = items(parse_module(text))
            size = max(1, total // 2)
            while total and size:  # halves, the last one first, then quarters, to single items
                stop = total
                while stop > 0:
                    start = max(0, stop - size)
                    total = items(parse_module(text)) if attempt(edit, start, stop) else total
                    stop = min(start, total)
                size = min(size, total) // 2
    return parse_module(text)


def size_of(module: Module) -> int:
    """The number of operations but `return`."""
    return sum(op.opname != "return" for op in module.ops())


def _return_unused(module: Module, start: int, stop: int) -> None:
    unused = [v for op in module.main for v in op.results if not v.users]
    _set_results(module, lambda i, value: True, unused)


def _inline(module: Module, start: int, stop: int) -> None:
    run_pipeline(module, "inline", ())


def _drop_results(module: Module, start: int, stop: int) -> None:
    _set_results(module, lambda i, value: not start <= i < stop)


def _cut(module: Module, start: int, stop: int) -> Places:
    """Operations become arguments that hold their results; what only they used is returned."""
    main, places = module.main, Places()
    gone = {op: number for number, op in enumerate(main) if start <= number < stop}
    operands = dict.fromkeys(value for op in gone for value in op.operands if value.producer)
    left = [v for v in operands if v.producer not in gone and v.users.keys() <= gone.keys()]
    left = [v for v in left if not v.type.global_type.partial]
    _set_results(module, lambda i, value: value.producer not in gone, left)
    names = _free_names(module)
    for op, number in gone.items():
        for value in op.results:
            if value.users.keys() - gone.keys():
                argument = main.add_argument(next(names), value.type)
                places[str(argument.name)] = (number, value.index)
                value.replace_by(argument)
    for op in reversed(gone):
        op.erase()
    return places


STAGES: tuple[tuple[Callable[[Module], int], Edit], ...] = (
    (lambda module: len(module.main.returned), _drop_results),
    (lambda module: sum(1 for _ in module.main) - 1, _cut),
)


def _set_results(
    module: Module, kept: Callable[[int, Value], bool], more: Sequence[Value] = ()
) -> None:
    """Return the kept results and more values; there has to be one."""
    main, names = module.main, _free_names(module)
    old = zip(main.returned, named_results(main), strict=True)
    pairs = [pair for i, pair in enumerate(old) if kept(i, pair[0])]
    pairs += [(v, Result(next(names), None, bool(v.type.global_type.varying))) for v in more]
    if not pairs:
        raise Error("a module without results")
    set_results(main, [value for value, _ in pairs], [result for _, result in pairs])


def _free_names(module: Module) -> Iterator[str]:
    """Names that neither an argument nor a result of the main function has."""
    taken = {*(str(arg.name) for arg in module.main.args), *module.main.result_names()}
    return (name for n in count() if (name := f"v{n}") not in taken)


def _drop_unused(module: Module) -> None:
    """Remove functions without calls, operations and arguments of the main function, weights and
    files without users."""
    main = module.main
    called = {op.attributes["callee"].name for op in module.ops() if op.opname == "call"}
    for name in module.functions.keys() - {main.name, *called}:
        for op in module.functions.pop(name):
            op.drop_operands()
    for op in reversed(list(main)[:-1]):
        if op.parent is not None and not any(result.users for result in op.results):
            erase_dead(op)
    module.weights = {name: weight for name, weight in module.weights.items() if weight.users}
    used = {file for weight in module.weights.values() for file in weight.ref.files()}
    module.files = {name: path for name, path in module.files.items() if name in used}
    main.args = tuple(arg for arg in main.args if arg.users)
    names = {arg.name for arg in main.args}
    for index, arg in enumerate(main.args):
        arg.index = index
    for result in main.results:
        result.alias = result.alias if result.alias in names else None
