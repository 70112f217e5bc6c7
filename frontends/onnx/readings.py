"""All rules, so that the table of what can be read is complete once this is imported."""

from __future__ import annotations

from irc.frontends.onnx import attention as attention
from irc.frontends.onnx import bags as bags
from irc.frontends.onnx import collectives as collectives
from irc.frontends.onnx import control as control
from irc.frontends.onnx import einsum as einsum
from irc.frontends.onnx import elementwise as elementwise
from irc.frontends.onnx import functions as functions
from irc.frontends.onnx import images as images
from irc.frontends.onnx import lookup as lookup
from irc.frontends.onnx import matrices as matrices
from irc.frontends.onnx import pooling as pooling
from irc.frontends.onnx import quantized as quantized
from irc.frontends.onnx import recurrent as recurrent
from irc.frontends.onnx import reductions as reductions
from irc.frontends.onnx import reshaping as reshaping
from irc.frontends.onnx import sampling as sampling
from irc.frontends.onnx import structure as structure
from irc.frontends.onnx.rules import TABLE as TABLE
from irc.frontends.onnx.rules import Reading, row_rule
from irc.onnx_format.operators import DIRECT, ELEMENTWISE

for _cls, _row in (ELEMENTWISE | DIRECT).items():  # rows whose operator has no rule of its own
    TABLE.setdefault(("", _row.kind), Reading(row_rule(_cls, _row), frozenset(_row.attributes)))
