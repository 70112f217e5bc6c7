"""irc, a graph compiler: from model scripts and checkpoints to text, ONNX and running programs.

The public names are imported when they are first used, so that `import irc` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backends.reference import evaluate, evaluate_ranks
    from .driver import Artifact, compile, load, run_passes
    from .driver.calibration import calibrate
    from .errors import Error
    from .frontends.trace import Spec, trace
    from .ir.core import Function, Module, Op, Value, Weight
    from .ir.declare import Operand, Operands, OptionalOperand, operation, optional
    from .ir.types import TensorType
    from .pipeline import Pass, Stats, option, register
    from .rewrite import P, apply_rules, rule
    from .text import parse_module as parse

__version__ = "0.2.0"

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
    "TensorType",
    "Value",
    "Weight",
    "__version__",
    "apply_rules",
    "calibrate",
    "compile",
    "evaluate",
    "evaluate_ranks",
    "load",
    "operation",
    "option",
    "optional",
    "parse",
    "register",
    "rule",
    "run_passes",
    "trace",
]

# The public names by the module that defines them.
_DEFINED_IN = {
    ".backends.reference": ("evaluate", "evaluate_ranks"),
    ".ir.core": ("Function", "Module", "Op", "Value", "Weight"),
    ".ir.declare": ("Operand", "Operands", "OptionalOperand", "operation", "optional"),
    ".driver": ("Artifact", "compile", "load", "run_passes"),
    ".driver.calibration": ("calibrate",),
    ".errors": ("Error",),
    ".frontends.trace": ("Spec", "trace"),
    ".ir.types": ("TensorType",),
    ".pipeline": ("Pass", "Stats", "option", "register"),
    ".rewrite": ("P", "apply_rules", "rule"),
    ".text": ("parse",),
}
_MODULES = {name: module for module, names in _DEFINED_IN.items() for name in names}
_RENAMED = {"parse": "parse_module"}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'irc' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(module, __name__), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
