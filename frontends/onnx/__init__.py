"""ONNX files as modules: our own emission, and what exporters of transformers write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from irc.core import Module
    from irc.dims import Dims
    from irc.frontends.onnx.plugins import Plugins
    from irc.mesh import Mesh


def import_onnx(
    path: str | Path,
    dims: Dims | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | str | None = None,
    base: str | Path | None = None,
    equal: Mapping[str, str] | None = None,
    plugins: Plugins | None = None,
) -> Module:
    """The module that an ONNX file of opset 13 to 24 describes; see importer.py."""
    from irc.frontends.onnx.importer import import_onnx as read

    return read(path, dims, mesh=mesh, base=base, equal=equal, plugins=plugins)
