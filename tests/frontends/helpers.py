"""Tracing a function in one line, and evaluating it on arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np

import irc
from irc.ir.dtypes import dtype_of


def traced(function: Callable[..., Any], **inputs: tuple[str, tuple[Any, ...]]) -> irc.Module:
    """The module of a function; inputs are given as (dtype, shape)."""
    return irc.trace(function, {name: irc.Spec(*spec) for name, spec in inputs.items()})


def computed(function: Callable[..., Any], **arrays: np.ndarray) -> np.ndarray:
    """What a function computes from arrays, through the reference."""
    specs = {name: (dtype_of(a), a.shape) for name, a in arrays.items()}
    return irc.evaluate(traced(function, **specs), arrays)["result0"]


def ops(module: irc.Module) -> list[str]:
    """The names of a module's operations, without the last `return`."""
    return [op.opname for op in module.ops()][:-1]
