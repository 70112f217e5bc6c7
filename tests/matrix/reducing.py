"""Reduces a failing module: operations become arguments, results and rows of the batch go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module, Result, Value
from irc.ir.verify import verify
from irc.ops import Return
from irc.rewrite import erase_dead

from .checking import Case, without

Check = Callable[[Case], object]


def reduced(case: Case, check: Check) -> Case:
    """The smallest case that still fails a check in the same way."""
    kind = failure(case, check)
    smaller: Case | None = case
    while smaller is not None:
        case = smaller
        smaller = next((c for c in candidates(case) if failure(c, check) == kind), None)
    return case


def failure(case: Case, check: Check) -> str:
    """The exception that a check of the case raises, up to the first colon and without numbers."""
    try:
        check(case)
    except Exception as error:  # any: the caller compares the kinds
        return re.sub(r"\d", "", f"{type(error).__name__} {error}".partition(":")[0])
    return ""


def report(case: Case, check: Check, folder: Path, done: str) -> None:
    """Run a check; where it fails, reduce the case, save it, and say where it is."""
    try:
        check(case)
    except Exception as error:
        small = reduced(case, check)
        path = small.save(folder, done)
        lines = f"{done}\nreduced to {path}:\n{path.read_text(encoding='utf-8')}"
        raise AssertionError(f"{type(error).__name__}: {error}\n{lines}") from error


def candidates(case: Case) -> Iterator[Case]:
    """The case with one thing less, most of all first."""
    yield from fewer_results(case)
    yield from fewer_operations(case)
    for i in range(len(case.plan)):
        yield without(case, plan=(*case.plan[:i], *case.plan[i + 1 :]))


def fewer_results(case: Case) -> Iterator[Case]:
    """One result alone, or all but one."""
    count = len(case.module().main.returned)
    chosen = [[i] for i in range(count)] + [
        [j for j in range(count) if j != i] for i in range(count)
    ]
    for kept in chosen if count > 1 else []:
        module = case.module()
        values = [module.main.returned[i] for i in kept]
        give_back(module, values)
        yield from cleaned(case, module)


def fewer_operations(case: Case) -> Iterator[Case]:
    """An operation, of the last ones first, becomes arguments that hold its results."""
    arrays = every_value(case)
    for number in reversed(range(len(arrays))):
        module = case.module()
        op = list(module.main)[number]
        inputs = dict(case.inputs)
        for result, array in zip(op.results, arrays[number], strict=True):
            name = next(f"v{i}" for i in range(1000) if f"v{i}" not in inputs)
            result.replace_by(module.main.add_argument(name, result.type))
            inputs[name] = array
        yield from cleaned(without(case, inputs=inputs), module)


def every_value(case: Case) -> list[list[np.ndarray]]:
    """The arrays of the results of every operation but the last, the return."""
    module = case.module()
    ops = list(module.main)[:-1]
    give_back(module, [result for op in ops for result in op.results])
    arrays = iter(evaluate(module, case.inputs).values())
    return [[next(arrays) for _ in op.results] for op in ops]


def give_back(module: Module, values: list[Value]) -> None:
    """Return other values."""
    last = module.main.last
    assert last is not None
    last.erase()
    module.main.append(Return(values))
    module.main.results = tuple(Result(f"r{i}") for i in range(len(values)))


def cleaned(case: Case, module: Module) -> Iterator[Case]:
    """A case of the module without what nothing uses, if it is a module still."""
    main = module.main
    for op in reversed(list(main)[:-1]):
        if op.parent is not None and not any(result.users for result in op.results):
            erase_dead(op)
    for name in [name for name, weight in module.weights.items() if not weight.users]:
        del module.weights[name]
    main.args = tuple(arg for arg in main.args if arg.users)
    for index, arg in enumerate(main.args):
        arg.index = index
    with suppress(Error):
        verify(module)
        inputs = {str(arg.name): case.inputs[str(arg.name)] for arg in main.args}
        yield without(case, text=str(module), inputs=inputs)
