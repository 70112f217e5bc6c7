"""All rules, so that the table of what can be read is complete once this is imported."""

from __future__ import annotations

from irc.frontends.onnx import activations as activations
from irc.frontends.onnx import attention as attention
from irc.frontends.onnx import caches as caches
from irc.frontends.onnx import collectives as collectives
from irc.frontends.onnx import elementwise as elementwise
from irc.frontends.onnx import lookup as lookup
from irc.frontends.onnx import matrices as matrices
from irc.frontends.onnx import quantized as quantized
from irc.frontends.onnx import reductions as reductions
from irc.frontends.onnx import reshaping as reshaping
from irc.frontends.onnx import rope as rope
from irc.frontends.onnx import structure as structure
from irc.frontends.onnx.rules import TABLE as TABLE
