"""irc, a graph compiler: model scripts and checkpoints become text, ONNX and running programs.

The public names are imported when they are first used, so that `import irc` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backends.reference import evaluate, evaluate_ranks
    from .core import Function, Module, Op, Value, Weight
    from .declare import Operand, Operands, OptionalOperand, operation, optional
    from .driver import Artifact, compile, load, run_passes
    from .errors import Error
    from .frontends.trace import Spec, trace
    from .pipeline import Pass, Stats, register
    from .rewrite import P, apply_rules, rule
    from .text import parse_module as parse

__version__ = "0.1.0"

__all__ = [
    "Artifact",
    "Error",
    "Function",
    "Module",
    "Op",
    "Operand",
    "Operands",
    "OptionalOperand",
    "P",
    "Pass",
    "Spec",
    "Stats",
    "Value",
    "Weight",
    "__version__",
    "apply_rules",
    "compile",
    "evaluate",
    "evaluate_ranks",
    "load",
    "operation",
    "optional",
    "parse",
    "register",
    "rule",
    "run_passes",
    "trace",
]

# Where each public name is defined.
_HOMES = {
    ".backends.reference": ("evaluate", "evaluate_ranks"),
    ".core": ("Function", "Module", "Op", "Value", "Weight"),
    ".declare": ("Operand", "Operands", "OptionalOperand", "operation", "optional"),
    ".driver": ("Artifact", "compile", "load", "run_passes"),
    ".errors": ("Error",),
    ".frontends.trace": ("Spec", "trace"),
    ".pipeline": ("Pass", "Stats", "register"),
    ".rewrite": ("P", "apply_rules", "rule"),
    ".text": ("parse",),
}
_ELSEWHERE = {name: home for home, names in _HOMES.items() for name in names}
_RENAMED = {"parse": "parse_module"}


def __getattr__(name: str) -> object:
    home = _ELSEWHERE.get(name)
    if home is None:
        raise AttributeError(f"module 'irc' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(home, __name__), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
