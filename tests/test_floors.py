"""No import climbs a floor, and no heavy package is imported outside its folder.

The imports are read from the source by ast. Those inside functions and under TYPE_CHECKING
count like any other: a lazy climb is a climb.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.layout import package_files

# What each part of irc may import, by part. The first prefix that fits a module names its part.
PARTS = {
    "top": (
        *("irc.cli", "irc.driver", "irc.generation", "irc.server", "irc.__main__"),
        *(
            "irc.page.data",
            "irc.page.stages",
            "irc.page.write",
            "irc.compare",
            "irc.debug",
            "irc.proof",
            "irc.testing",
            "irc.model_explorer.main",
        ),
        *("irc.quantization.batches", "irc.quantization.calibration"),
        # what compiles and runs artifacts, which no other frontend imports
        *(
            f"irc.frontends.tensorrt_llm.{name}"
            for name in ("__main__", "builder", "engines", "runtime", "script", "trtllm_build")
        ),
    ),
    "backends": ("irc.backends",),
    "passes": ("irc.passes",),
    "frontends": ("irc.frontends",),
    "base": ("irc",),
}
MAY_USE = {
    "base": {"base"},
    "passes": {"base", "passes"},
    "frontends": {"base", "frontends"},
    "backends": {"base", "passes", "backends"},
    "top": {"base", "passes", "frontends", "backends", "top"},
}

# Third-party packages: where each may be imported. Any package not named here is refused.
EVERYWHERE = ("irc",)
HOMES = {
    "numpy": EVERYWHERE,
    "ml_dtypes": EVERYWHERE,
    "cuda": ("irc.backends.cuda", "irc.backends.tensorrt"),
    "model_explorer": ("irc.model_explorer",),
    "mpi4py": ("irc.backends.ranks",),
    "nccl": ("irc.backends.cuda", "irc.backends.tensorrt"),
    "filelock": ("irc.artifact",),
    "jinja2": ("irc.generation",),
    "llguidance": ("irc.generation",),
    "msgspec": ("irc.schema", "irc.server"),
    "google": ("irc.backends.tensorrt", "irc.frontends.onnx"),  # protobuf, which onnx brings
    "onnx": (
        "irc.backends.onnx",
        "irc.backends.onnxruntime",
        "irc.backends.tensorrt",
        "irc.frontends.onnx",
    ),
    "onnx_graphsurgeon": ("irc.backends.onnx", "irc.frontends.onnx"),
    "networkx": ("irc.analysis", "irc.ir"),
    "onnxruntime": ("irc.backends.onnxruntime",),
    "starlette": ("irc.server",),
    "tensorrt": ("irc.backends.tensorrt",),
    "tensorrt_rtx": ("irc.backends.tensorrt",),
    "tokenizers": ("irc.generation",),
    # reads .pth files; lets the tensors of a script lie in main memory
    "torch": (
        *("irc.frontends.checkpoints.meta", "irc.frontends.main_memory"),
        "irc.compare.transformers_side",
    ),
    "transformers": ("irc.compare.transformers_side",),
    "uvicorn": ("irc.server",),
}
# of methods of a module
VIEWS = {"irc.ir.core": {"irc.text.printer", "irc.analysis.graph", "irc.page.notebook"}}


class Import(NamedTuple):
    """One imported module, with its line and whether importing the file leaves it aside."""

    target: str
    line: int
    lazy: bool


def is_below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def part_of(module: str) -> str:
    return next(
        part for part, prefixes in PARTS.items() if any(is_below(module, p) for p in prefixes)
    )


def imports(tree: ast.Module, module: str, is_package: bool, known: set[str]) -> Iterator[Import]:
    """Every import in a file, as absolute module names."""
    package = module if is_package else module.rpartition(".")[0]
    late = {id(inner) for node in ast.walk(tree) if runs_late(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            for target in targets(node, package, known):
                yield Import(target, node.lineno, id(node) in late)


def runs_late(node: ast.AST) -> bool:
    """Whether what stands inside this node does not run when the module is imported."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


class WithoutTypes(ast.NodeTransformer):
    """Drops what only type checkers read."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if runs_late(node) else self.generic_visit(node)


def circle(sources: Mapping[str, str], packages: set[str]) -> list[str]:
    """Modules that import each other in a circle, also inside functions; empty if there is none."""
    known, graph = set(sources), dict[str, set[str]]()
    for module, source in sources.items():
        tree = WithoutTypes().visit(ast.parse(source))
        found = {each.target for each in imports(tree, module, module in packages, known)}
        graph[module] = found & known - {module, *VIEWS.get(module, ())}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def targets(node: ast.AST, package: str, known: set[str]) -> list[str]:
    """The modules that one node imports; `from irc import passes` imports irc.passes."""
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            origin = absolute(module, level, package)
            inner = [f"{origin}.{name.name}" for name in names]
            return [name if name in known or origin == "irc" else origin for name in inner]
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            dynamic = ast.unparse(function).rpartition(".")[2] in ("import_module", "__import__")
            return [package + name if name.startswith(".") else name] if dynamic else []
        case _:
            return []


def absolute(module: str | None, level: int, package: str) -> str:
    if level == 0:
        return module or ""
    parts = package.split(".")
    base = parts[: len(parts) - level + 1]
    return ".".join([*base, *([module] if module else [])])


def complaint(module: str, found: Import, known: set[str]) -> str | None:
    """Why this import is not allowed, or None."""
    root = found.target.partition(".")[0]
    if root == "irc":
        return climb(module, found, known)
    if root in sys.stdlib_module_names:
        return None
    if root not in HOMES:
        return f"{root} is neither in the standard library nor in HOMES"
    if any(is_below(module, home) for home in HOMES[root]):
        return None
    return f"{root} may be imported only in {', '.join(HOMES[root]) or 'tests'}"


def climb(module: str, found: Import, known: set[str]) -> str | None:
    """Why an import of a part of irc is not allowed, or None."""
    if module == "irc" and found.lazy:
        return None  # the lazy public names of irc/__init__.py
    here = part_of(module)
    if found.target not in known and here != "top":
        # `from irc import compile`: a public name may live on any floor.
        return f"import from the module that defines it, not {found.target}"
    there = part_of(found.target)
    return None if there in MAY_USE[here] else f"{here} may not use {there} ({found.target})"


def complaints(module: str, source: str, is_package: bool, known: set[str]) -> list[str]:
    """What is wrong with the imports of one file, a line each."""
    found = imports(ast.parse(source), module, is_package, known)
    checked = [(each.line, complaint(module, each, known)) for each in found]
    return [f"{module}:{line}: {reason}" for line, reason in checked if reason]


def of_file(module: str, file: Path, known: set[str]) -> list[str]:
    return complaints(module, file.read_text(encoding="utf-8"), file.name == "__init__.py", known)


def test_no_import_climbs_or_leaves_its_folder() -> None:
    files = package_files()
    assert len(files) > 20, "the test has lost sight of the source files"
    wrong = [line for module, file in files.items() for line in of_file(module, file, set(files))]
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    files = package_files()
    packages = {module for module, file in files.items() if file.name == "__init__.py"}
    assert not circle({m: f.read_text(encoding="utf-8") for m, f in files.items()}, packages)


def test_a_circle_is_found() -> None:
    late = {"irc.a": "from .b import x", "irc.b": "def f():\n    from irc.a import y"}
    assert sorted(set(circle(late, set()))) == ["irc.a", "irc.b"]
    assert not circle({**late, "irc.b": "if TYPE_CHECKING:\n    from irc.a import y"}, set())


KNOWN = {"irc", "irc.ir.core", "irc.driver", "irc.passes", "irc.passes.cse", "irc.frontends"}
KNOWN |= {"irc.frontends.trace", "irc.backends", "irc.generation", "irc.generation.loop"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("irc.ir.core", "import irc.passes.cse"),
        ("irc.ir.core", "from irc import passes"),
        ("irc.ir.core", "from .passes import cse"),
        ("irc.ir.core", "def late():\n    from irc.passes.cse import run"),
        ("irc.ir.core", "if TYPE_CHECKING:\n    from irc.backends import get"),
        ("irc.ir.core", "import importlib\nimportlib.import_module('irc.passes')"),
        ("irc.ir.core", "from irc.driver import compile"),
        ("irc.ir.core", "from irc import compile"),
        ("irc", "from irc.driver import compile"),
        ("irc.passes.cse", "from irc.frontends import trace"),
        ("irc.frontends.trace", "from irc.passes import cse"),
        ("irc.backends", "import irc.frontends"),
        ("irc.ir.core", "def late():\n    import filelock"),
        ("irc.passes.cse", "import onnx"),
        ("irc.generation.loop", "import torch"),
        ("irc.ir.core", "import requests"),
    ],
)
def test_a_climb_is_found(module: str, source: str) -> None:
    assert complaints(module, source, module == "irc", KNOWN)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("irc", "def __getattr__(name):\n    import irc.driver"),
        ("irc", "from irc.ir.core import Module"),
        ("irc", "if TYPE_CHECKING:\n    from .driver import compile"),
        ("irc.driver", "import irc.passes.cse, irc.frontends.trace, irc.backends"),
        ("irc.passes.cse", "import numpy as np\nfrom irc.ir.core import Module"),
        ("irc.generation.loop", "def late():\n    from tokenizers import Tokenizer"),
        ("irc.backends", "from irc.passes import cse"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert complaints(module, source, module == "irc", KNOWN) == []
