"""Reduces a failing case: operations become arguments, results and rows of the plan go."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

import irc
from irc.backends.reference import evaluate
from irc.debug.reduce import Candidate, reduce_module
from irc.ir.core import Module, Result
from irc.ops import Return

from .checking import Case, without

Check = Callable[[Case], object]


def reduced(case: Case, check: Check) -> Case:
    """The smallest case found that still fails a check in the same way."""
    kind = failure(case, check)

    def fails(candidate: Candidate) -> bool:
        nonlocal case
        smaller = without(case, text=str(candidate.module), inputs=inputs_of(candidate, case))
        if failure(smaller, check) != kind:
            return False
        case = smaller
        return True

    reduce_module(case.module(), fails)
    for row in case.plan:
        smaller = without(case, plan=tuple(each for each in case.plan if each != row))
        case = smaller if failure(smaller, check) == kind else case
    return case


def inputs_of(candidate: Candidate, before: Case) -> dict[str, np.ndarray]:
    """The inputs of a smaller module: those of before, and the results that became arguments."""
    inputs = dict(before.inputs)
    if candidate.arguments:
        module = before.module()
        ops = list(module.main)[:-1]
        kept = [ops[number].results[index] for number, index in candidate.arguments.values()]
        give_back(module, kept)
        arrays = evaluate(module, before.inputs).values()
        inputs |= dict(zip(candidate.arguments, arrays, strict=True))
    return {str(arg.name): inputs[str(arg.name)] for arg in candidate.module.main.args}


def give_back(module: Module, values: list[irc.Value]) -> None:
    """Return other values."""
    last = module.main.last
    assert last is not None
    last.erase()
    module.main.append(Return(values))
    module.main.results = tuple(Result(f"r{i}") for i in range(len(values)))


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
