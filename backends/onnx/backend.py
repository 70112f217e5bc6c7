"""The ONNX backend: one model per rank, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irc.backends.base import Gap, Port, Program, ports_of, report
from irc.backends.lowering import STRUCTURE
from irc.backends.onnx.emitter import TABLE, Emitter
from irc.backends.onnx.growth import growing, writes_of
from irc.backends.onnx.storage import Storage
from irc.checkpoint import Reader
from irc.core import Module, Op
from irc.errors import Error

MODEL, WEIGHTS = "rank{}.onnx", "rank{}.weights"


class OnnxBackend:
    """Opset 24, IR version 11, weights as external data; the same module gives the same bytes."""

    name = "onnx"
    default_pipeline = "inline, canonicalize, cse, fuse-gated-mlp, fold, dce"

    def unsupported(self, module: Module) -> list[Gap]:
        """Every operation that has neither a lowering nor an expansion that is covered."""
        return TABLE.unsupported(module)

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class has a lowering of its own, or is structure."""
        return cls.opname in STRUCTURE or TABLE.covers(cls)

    def emit(self, module: Module, folder: Path, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write `rank0.onnx`, and `rank0.weights` where bytes had to be converted.

        Options: `base`, the folder that relative paths in `module.files` start from; `progress`
        is told the fraction of the converted weights that is written; `check` runs the ONNX
        checker and shape inference.

        The facts: `models`; `external`, the folder that locations in the model are relative to
        and the checkpoint files below it; `weights`, the files with weights beside the model;
        `states`, which input and output are the same memory; `writes` and `grows`, see growth.py;
        `ports`, in the dtypes to be fed: every float narrower than f64 is f32.
        """
        gaps = self.unsupported(module)
        if gaps:
            raise report(gaps, self.name)
        if module.mesh.ranks > 1:
            raise Error(f"the backend onnx writes one rank, but the mesh is ({module.mesh})")
        if not module.main.returned:
            raise Error(f"@{module.main.name} returns nothing; a model has at least one result")
        reader = Reader(module, options.get("base"))
        storage = Storage(reader, 0, WEIGHTS.format(0))
        emitter = Emitter(module, 0, storage)
        emitter.emit()
        found = storage.write(folder, options.get("progress"))
        model = emitter.graph.model(module.name, {"irc.module": module.name})
        data = model.SerializeToString(deterministic=True)
        path = folder / MODEL.format(0)
        try:
            path.write_bytes(data)
        except OSError as error:
            raise Error(f"cannot write {path}: {error.strerror or error}") from error
        if options.get("check"):
            check(data)
        return {
            "models": [path.name],
            "weights": found.inside,
            "external": {"base": found.base, "files": found.files},
            "states": emitter.states(),
            "writes": writes_of(module.main),
            "grows": growing(module.main),
            "ports": _ports(emitter),
        }

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program on ONNX Runtime; options as OnnxRuntimeProgram has them."""
        from irc.backends.onnxruntime import OnnxRuntimeProgram

        return OnnxRuntimeProgram(folder, manifest, **options)


def check(data: bytes) -> None:
    """Raise what the ONNX checker or its shape inference finds wrong with a model."""
    import onnx

    model = onnx.load_model_from_string(data)
    onnx.checker.check_model(_without_data(model))
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


def _without_data(model: Any) -> Any:
    """A copy whose external initializers are inputs: the checker would open their files."""
    copy = type(model)()
    copy.CopyFrom(model)
    kept = [t for t in copy.graph.initializer if not t.external_data]
    from irc.backends.onnx.graph import value_info_of

    copy.graph.input.extend(value_info_of(t) for t in copy.graph.initializer if t.external_data)
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    return copy


def _ports(emitter: Emitter) -> dict[str, list[dict[str, Any]]]:
    ports = ports_of(emitter.function)

    def fact(port: Port) -> dict[str, Any]:
        shape = [dim if isinstance(dim, int) else str(dim) for dim in port.shape]
        return {"name": port.name, "dtype": emitter.dtype(port.dtype), "shape": shape}

    return {
        "inputs": [fact(p) for p in ports.inputs],
        "states": [fact(p) for p in ports.states],
        "outputs": [fact(p) for p in ports.outputs],
    }
