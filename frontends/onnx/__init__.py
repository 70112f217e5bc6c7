"""ONNX files as modules: those that irc wrote, and those of exporters."""

from __future__ import annotations

from irc.frontends.onnx.importer import import_onnx as import_onnx
