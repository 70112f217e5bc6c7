"""Seeds faults into irc and counts those that the tests notice: the mutation score.

    python -m benchmarks.mutation --tree COPY --coverage FILE [--count 100] [--seed N]
                                  [--folders irc/ir irc/ops ...] [--save FILE] [--again FILE]

COPY is a copy of the repository, whose files are changed and restored. Its coverage data name the
tests of each line: `pytest --cov --cov-context=test`. A fault is one changed expression or
statement inside a function. The tests that cover its line run up to the first failure: first one
case of each test function, those that cover least first, then further cases. --save keeps the
faults with their fate, and --again seeds the faults of such a file in another tree, by the text of
their lines.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import resource
import secrets
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDERS = ("irc/ir", "irc/ops", "passes", "backends/onnx", "backends/ranks")
FATES = ("killed", "timed out", "survived", "not covered", "gone")
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass
class Fault:
    """A change of `before` to `after` at a place of a file, and what became of it."""

    file: str
    line: int
    column: int
    text: str  # the line, without indentation
    before: str
    after: str
    fate: str = ""
    test: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before[:60]!r} -> {self.after[:60]!r}"


def changed(node: ast.AST) -> ast.AST | None:
    """A faulty copy of an expression or a statement; None where there is nothing to change."""
    copy: Any = deepcopy(node)
    match node:
        case ast.Compare() if type(node.ops[0]) in OPERATORS:
            copy.ops[0] = OPERATORS[type(node.ops[0])]()
        case ast.BinOp() | ast.BoolOp() if type(node.op) in OPERATORS:
            copy.op = OPERATORS[type(node.op)]()
        case ast.UnaryOp(op=ast.Not()):
            copy = copy.operand
        case ast.Constant(value=bool() as value):
            copy.value = not value
        case ast.Constant(value=int() as number):
            copy.value = number + 1
        case ast.Call(args=[first, second, *_]) if ast.unparse(first) != ast.unparse(second):
            copy.args[:2] = copy.args[1::-1]
        case ast.IfExp():
            copy.body, copy.orelse = copy.orelse, copy.body
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            copy.value = ast.Constant(None)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            copy = ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            copy = ast.Pass()
        case _:
            return None
    return ast.fix_missing_locations(copy)


def inside(tree: ast.AST, in_function: bool = False) -> Iterator[ast.AST]:
    """What runs inside functions, without messages, types and texts."""
    for field, value in ast.iter_fields(tree):
        is_function = isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (is_function and field != "body") or field == "annotation":
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, (ast.Raise, ast.JoinedStr)):
                continue
            if in_function or is_function:
                yield node
            yield from inside(node, in_function or is_function)


def places(tree: Path, folders: list[str]) -> list[tuple[Path, ast.expr | ast.stmt]]:
    """Every expression and statement of some folders that can be changed."""
    files = [file for folder in folders for file in sorted((tree / folder).rglob("*.py"))]
    return [
        (file, node)
        for file in files
        for node in inside(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.expr, ast.stmt)) and changed(node) is not None
    ]


def fault_of(tree: Path, file: Path, node: ast.expr | ast.stmt) -> Fault:
    """The fault of one expression or statement."""
    source = file.read_text(encoding="utf-8")
    before, copy = ast.get_source_segment(source, node), changed(node)
    assert before is not None and copy is not None
    after = f"({ast.unparse(copy)})" if isinstance(node, ast.expr) else ast.unparse(copy)
    text = source.splitlines()[node.lineno - 1].strip()
    name = file.relative_to(tree).as_posix()
    return Fault(name, node.lineno, node.col_offset, text, before, after)


def seeded(source: str, fault: Fault) -> str | None:
    """The source with the fault; None where its line is gone. A line that moved is the nearest."""
    lines = source.splitlines(keepends=True)
    numbers = [n for n, line in enumerate(lines, 1) if line.strip() == fault.text]
    for number in sorted(numbers, key=lambda number: abs(number - fault.line)):
        line, place = lines[number - 1], sum(map(len, lines[: number - 1]))
        indent = len(line) - len(line.lstrip())
        start = place + (fault.column if number == fault.line else indent)
        at = source.find(fault.before, start, place + len(line) + len(fault.before))
        if at >= 0:
            fault.line, fault.column = number, at - place
            return source[:at] + fault.after + source[at + len(fault.before) :]
    return None


class Coverage:
    """Which tests run each line, in the order in which to try them."""

    def __init__(self, tree: Path, file: Path) -> None:
        data: Any = importlib.import_module("coverage").CoverageData(str(file))
        data.read()
        self.lines: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.weight: Counter[str] = Counter()
        for path in data.measured_files():
            # Links make two paths of one file.
            name = Path(path).resolve().relative_to(tree).as_posix()
            for line, contexts in data.contexts_by_lineno(path).items():
                tests = {context.partition("|")[0] for context in contexts if context}
                self.lines[name, line] |= tests
                self.weight.update(tests)

    def tests(self, fault: Fault) -> list[str]:
        """The tests of a fault's statement: one case per function first, small before large."""
        lines = ((fault.file, fault.line - back) for back in range(8))
        names = next((tests for line in lines if (tests := self.lines.get(line))), set[str]())
        order: list[tuple[int, int, str]] = []
        cases: Counter[str] = Counter()
        for name in sorted(names, key=lambda name: (self.weight[name], name)):
            function = name.partition("[")[0]
            order.append((cases[function], self.weight[name], name))
            cases[function] += 1
        return [name for _, _, name in sorted(order)]


def run_tests(tree: Path, tests: list[str], seconds: int) -> tuple[str, str]:
    """(fate, the test that failed) of some tests, up to the first failure.

    The limit is of processor time, and ten times as much of the clock.
    """
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
    process = subprocess.Popen(
        [sys.executable, "-B", "-m", "pytest", *options, *tests],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5)),
    )
    try:
        output, _ = process.communicate(timeout=10 * seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return "timed out", ""
    if process.returncode == -signal.SIGXCPU:
        return "timed out", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return ("survived" if process.returncode == 0 else "killed"), "".join(failed[:1])


def judge(fault: Fault, tree: Path, coverage: Coverage, args: argparse.Namespace) -> None:
    """Seed a fault, run the tests of its line, and restore the file."""
    file = tree / fault.file
    source = file.read_text(encoding="utf-8") if file.exists() else ""
    faulty = seeded(source, fault)
    fault.fate, fault.test = "gone" if faulty is None else "not covered", ""
    if faulty is None:
        return
    tests = coverage.tests(fault)
    try:
        file.write_text(faulty, encoding="utf-8")
        for some in filter(None, (tests[: args.first], tests[args.first : args.most])):
            fault.fate, fault.test = run_tests(tree, some, args.seconds)
            if fault.fate != "survived":
                return
    finally:
        file.write_text(source, encoding="utf-8")


def report(faults: list[Fault], folders: list[str]) -> None:
    """A table of fates per folder, and what survived."""
    print(f"{'folder':16}" + "".join(f"{fate:>13}" for fate in FATES))
    for folder in [*folders, ""]:
        fates = Counter(fault.fate for fault in faults if fault.file.startswith(folder))
        print(f"{folder or 'all':16}" + "".join(f"{fates[fate]:13}" for fate in FATES))
    for fault in faults:
        if fault.fate not in ("killed", "timed out"):
            print(f"{fault.fate}: {fault}")


def main() -> None:
    """Draw or read the faults, judge one after the other, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--coverage", type=Path, required=True)
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--first", type=int, default=40, help="tests of the first round")
    parser.add_argument("--most", type=int, default=200, help="tests of both rounds")
    parser.add_argument("--seconds", type=int, default=60, help="of the processor, for a round")
    args = parser.parse_args()
    tree: Path = args.tree.resolve()
    coverage = Coverage(tree, args.coverage)
    if args.again:
        faults = [Fault(**row) for row in json.loads(args.again.read_text(encoding="utf-8"))]
    else:
        print(f"--seed {args.seed}")
        drawn = random.Random(args.seed).sample(places(tree, args.folders), args.count)
        faults = [fault_of(tree, file, node) for file, node in drawn]
    for fault in faults:
        judge(fault, tree, coverage, args)
        print(f"{fault.fate}: {fault} {fault.test}", flush=True)
        if args.save:
            rows = [asdict(each) for each in faults]
            args.save.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    report(faults, args.folders)


if __name__ == "__main__":
    main()
