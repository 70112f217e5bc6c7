"""`to_graphsurgeon`: a module as a graph of onnx-graphsurgeon, to be edited."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from irc.backends.onnx.backend import backend
from irc.errors import Error
from irc.ir.core import Module

if TYPE_CHECKING:
    import onnx_graphsurgeon


def to_graphsurgeon(module: Module, base: str | Path | None = None) -> onnx_graphsurgeon.Graph:
    """The graph of the ONNX model that is written for a module of one rank, weights in memory.

    `base` is the folder that the relative paths of its files start from.
    irc.frontends.onnx.from_graphsurgeon reads the edited graph.
    """
    try:
        import onnx
        import onnx_graphsurgeon
    except ImportError as error:
        raise Error(
            f"graphs need onnx-graphsurgeon ({error}): pip install onnx-graphsurgeon"
        ) from None
    if module.mesh.ranks > 1:
        raise Error(
            f"a graph is the program of one rank, and the mesh ({module.mesh}) has "
            f"{module.mesh.ranks}; edit the module before it is sharded"
        )
    with TemporaryDirectory(prefix="irc-graph-") as folder:
        emitted = backend.emit(module, Path(folder), base=Path(base) if base is not None else None)
        (rank,) = emitted.facts["ranks"]
        model: Any = onnx.load(Path(folder) / rank["model"], load_external_data=False)
        onnx.load_external_data_for_model(model, str(folder))
    return onnx_graphsurgeon.import_onnx(model)
