"""ONNX files as modules: those that irc wrote, and those of exporters."""

from __future__ import annotations

# Every module of rules, so that the table of what can be read is complete.
from irc.frontends.onnx import attention as attention
from irc.frontends.onnx import control_flow as control_flow
from irc.frontends.onnx import elementwise as elementwise
from irc.frontends.onnx import images as images
from irc.frontends.onnx import indexing as indexing
from irc.frontends.onnx import products as products
from irc.frontends.onnx import quantized as quantized
from irc.frontends.onnx import shapes as shapes
from irc.frontends.onnx.importer import from_graphsurgeon as from_graphsurgeon
from irc.frontends.onnx.importer import import_onnx as import_onnx
