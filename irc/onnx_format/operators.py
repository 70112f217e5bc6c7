"""Operators of ONNX and the operations that mean the same: one table for reading and writing.

Only names are here: of the operator, and of its attributes. An operation whose meaning differs from
every operator has a lowering in `backends/onnx`; an operator whose meaning differs from every
operation has a rule in `frontends/onnx`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import ops
from ..ir.core import Op

COLLECTIVE = "DistCollective"  # the operator of TensorRT 11 for all collectives
DOMAIN = "irc"  # of collectives in files for CPUs, until ONNX has operators for them
# The collectives by the value of its attribute `collective_operation`.
COLLECTIVES: dict[str, type[Op]] = {
    "all_reduce": ops.AllReduce,
    "all_gather": ops.AllGather,
    "reduce_scatter": ops.ReduceScatter,
    "all_to_all": ops.AllToAll,
    "broadcast": ops.Broadcast,
    "reduce": ops.Reduce,
    "gather": ops.CollectiveGather,
    "scatter": ops.CollectiveScatter,
}


@dataclass(frozen=True)
class Row:
    """The operator `kind`; `attributes` maps its names to (irc's name, the default in ONNX).

    A default of None means that the attribute is required.
    """

    kind: str
    attributes: Mapping[str, tuple[str, Any]]

    def to_onnx(self, op: Op) -> dict[str, Any]:
        """The attributes of the node that is written for an operation."""
        attributes = {name: getattr(op, own) for name, (own, _) in self.attributes.items()}
        return {name: int(v) if isinstance(v, bool) else v for name, v in attributes.items()}

    def to_irc(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of the operation that is read from a node."""
        of_irc: dict[str, Any] = {}
        for name, (own, default) in self.attributes.items():
            value = attributes.get(name, default)
            of_irc[own] = bool(value) if isinstance(default, bool) else value
        return of_irc


def _row(kind: str, **attributes: tuple[str, Any]) -> Row:
    return Row(kind, attributes)


_AXIS_LAST, _AXIS_FIRST = ("dim", -1), ("dim", 0)
_KEEP = ("keep", True)

# One element at a time: operands in the same order, which broadcast alike.
ELEMENTWISE: dict[type[Op], Row] = {
    ops.Add: _row("Add"),
    ops.Sub: _row("Sub"),
    ops.Mul: _row("Mul"),
    ops.Div: _row("Div"),
    ops.Pow: _row("Pow"),
    ops.Neg: _row("Neg"),
    ops.Abs: _row("Abs"),
    ops.Sign: _row("Sign"),
    ops.Sqrt: _row("Sqrt"),
    ops.Reciprocal: _row("Reciprocal"),
    ops.Exp: _row("Exp"),
    ops.Log: _row("Log"),
    ops.Sin: _row("Sin"),
    ops.Cos: _row("Cos"),
    ops.Erf: _row("Erf"),
    ops.Round: _row("Round"),
    ops.Floor: _row("Floor"),
    ops.Ceil: _row("Ceil"),
    ops.Sigmoid: _row("Sigmoid"),
    ops.Tanh: _row("Tanh"),
    ops.Relu: _row("Relu"),
    ops.Softplus: _row("Softplus"),
    ops.Gelu: _row("Gelu", approximate=("approximate", "none")),
    ops.Eq: _row("Equal"),
    ops.Lt: _row("Less"),
    ops.Le: _row("LessOrEqual"),
    ops.Gt: _row("Greater"),
    ops.Ge: _row("GreaterOrEqual"),
    ops.And: _row("And"),
    ops.Or: _row("Or"),
    ops.Not: _row("Not"),
}

# Operands in the same order and attributes of other names.
DIRECT: dict[type[Op], Row] = {
    ops.Softmax: _row("Softmax", axis=_AXIS_LAST),
    ops.LogSoftmax: _row("LogSoftmax", axis=_AXIS_LAST),
    ops.Concat: _row("Concat", axis=("dim", None)),
    ops.Gather: _row("Gather", axis=_AXIS_FIRST),
    ops.GatherElements: _row("GatherElements", axis=_AXIS_FIRST),
    ops.ScatterElements: _row("ScatterElements", axis=_AXIS_FIRST, reduction=("reduction", "none")),
}

# The axes are an input of the operator.
REDUCTIONS: dict[type[Op], Row] = {
    ops.ReduceSum: _row("ReduceSum", keepdims=_KEEP),
    ops.ReduceMean: _row("ReduceMean", keepdims=_KEEP),
    ops.ReduceMax: _row("ReduceMax", keepdims=_KEEP),
    ops.ReduceMin: _row("ReduceMin", keepdims=_KEEP),
    ops.ReduceProd: _row("ReduceProd", keepdims=_KEEP),
}

# Results or operands differ, which both directions say in code.
PARTIAL: dict[type[Op], Row] = {
    ops.Argmax: _row("ArgMax", axis=_AXIS_FIRST, keepdims=_KEEP),
    ops.Topk: _row("TopK", axis=_AXIS_LAST),
    ops.Cumsum: _row("CumSum", exclusive=("exclusive", False)),
    ops.Split: _row("Split", axis=_AXIS_FIRST),
}
