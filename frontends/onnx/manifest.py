"""What the manifest of an artifact says about a model: mesh, folder of weights, bound inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from irc.argument_checks import check_path
from irc.artifact.folder import ArtifactFolder
from irc.artifact.manifest import MANIFEST
from irc.errors import Error
from irc.frontends.onnx.tensors import Data
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.mesh import Mesh
from irc.json_files import read_object


class _Rank(TypedDict, total=False):
    model: str
    bindings: str | None


class _Program(TypedDict, total=False):
    """What is read here of the facts of the ONNX and TensorRT backends."""

    axes: list[tuple[str, int]]
    base: str | None
    ranks: list[_Rank]


@dataclass(frozen=True)
class Manifest:
    """Empty where a model is not part of an artifact.

    `rank` is the first that runs the model. `bound` are the inputs that are weights.
    """

    mesh: Mesh | None = None
    base: str | None = None
    rank: int | None = None
    bound: dict[str, Data] = field(default_factory=dict[str, Data])


def manifest_of(path: Path) -> Manifest:
    """What the manifest beside the model `path` says."""
    folder = path.parent
    artifact = ArtifactFolder.find(folder)
    if artifact is None:
        return Manifest()
    program = artifact.facts(_Program)
    axes, base = tuple(program.get("axes", ())), program.get("base")
    mesh = Mesh(axes) if axes else None
    if base is not None:
        check_path(f"the base of the program in {folder / MANIFEST}", base)
        base = folder / base
    place = None if base is None else str(base)
    for rank, entry in enumerate(program.get("ranks", ())):
        if entry.get("model") == path.name:
            file = entry.get("bindings")
            return Manifest(
                mesh, place, rank, _bound(folder / file, base or folder) if file else {}
            )
    return Manifest(mesh, place)


def _bound(path: Path, base: Path) -> dict[str, Data]:
    try:
        entries = read_object(path)
        found = {name: _data(name, each, path.parent, base) for name, each in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Error(f"{path} does not say where the weights are ({error}); compile again") from None
    for name, data in found.items():
        if data.offset < 0 or not Path(data.path).is_file():
            raise Error(f"the weight {name!r} should be in {data.path}, which does not exist")
    return found


def _data(name: str, entry: Any, folder: Path, base: Path) -> Data:
    under = base if entry["under"] == "base" else folder
    kind, shape = dtype_called(str(entry["dtype"])).name, tuple(int(n) for n in entry["shape"])
    name = name.removesuffix(".rows")  # the second input of a weight that is also looked up in
    return Data(name, kind, shape, path=str(under / entry["file"]), offset=int(entry["offset"]))
