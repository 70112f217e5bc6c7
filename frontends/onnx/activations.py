"""Activations: the operators of ONNX and those of ONNX Runtime."""

from __future__ import annotations

from typing import Any

from irc import ops
from irc.core import Op, Value
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.elementwise import apply, mapped
from irc.frontends.onnx.entry import Node
from irc.frontends.onnx.rules import MICROSOFT, Made, reads


@reads("Gelu", known="approximate")
def gelu(b: Builder, node: Node) -> Made:
    how: Any = node.text("approximate", "none")
    return mapped(b, lambda v: ops.Gelu(v, approximate=how), node.input(0))


@reads("Gelu", domain=MICROSOFT)
def gelu_of_microsoft(b: Builder, node: Node) -> Made:
    return apply(b, ops.Gelu, node.input(0))


@reads("FastGelu", domain=MICROSOFT)
def fast_gelu(b: Builder, node: Node) -> Made:
    x = node.input(0)
    x = apply(b, ops.Add, x, node.input(1)) if node.has(1) else x
    return mapped(b, lambda v: ops.Gelu(v, approximate="tanh"), x)


@reads("BiasGelu", domain=MICROSOFT)
def bias_gelu(b: Builder, node: Node) -> Made:
    return apply(b, ops.Gelu, apply(b, ops.Add, node.input(0), node.input(1)))


@reads("QuickGelu", domain=MICROSOFT, known="alpha")
def quick_gelu(b: Builder, node: Node) -> Made:
    x, alpha = node.input(0), node.real("alpha", 1.702)
    if alpha == 1.702:
        return apply(b, ops.QuickGelu, x)
    return mapped(b, lambda v: _swish(b, v, alpha), x)


@reads("Swish", known="alpha")
def swish(b: Builder, node: Node) -> Made:
    alpha = node.real("alpha", 1.0)
    return mapped(b, lambda v: _swish(b, v, alpha), node.input(0))


def _swish(b: Builder, x: Value, alpha: float) -> Op:
    if alpha == 1:
        return ops.Silu(x)
    turned = b.value(ops.Mul(x, b.number(alpha, x.type.dtype)))
    return ops.Mul(x, b.value(ops.Sigmoid(turned)))


@reads("LeakyRelu", known="alpha")
def leaky_relu(b: Builder, node: Node) -> Made:
    x = node.input(0)
    slope = b.entry(b.number(node.real("alpha", 0.01), x.dtype))
    negative = apply(b, ops.Minimum, x, b.entry(b.number(0, x.dtype)))
    return apply(b, ops.Add, apply(b, ops.Relu, x), apply(b, ops.Mul, negative, slope))


@reads("Mish")
def mish(b: Builder, node: Node) -> Made:
    x = node.input(0)
    return apply(b, ops.Mul, x, mapped(b, ops.Tanh, mapped(b, ops.Softplus, x)))
