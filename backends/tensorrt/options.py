"""What may be chosen about engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from irc.backends.tensorrt.lowering.collectives import Collectives
from irc.core import Module
from irc.errors import Error, did_you_mean
from irc.report import weight_bytes

Place: TypeAlias = Literal["inside", "outside"]

REMEMBERED = (
    "weights",
    "collectives",
    "workspace",
    "self_test",
    "weight_streaming",
    "refit",
    "strip",
)
LARGE = 2_000_000_000  # bytes of weights from which on they stay outside


@dataclass(frozen=True)
class EngineOptions:
    """`target`: the text of a Target, that of the installed library unless given. `weights`:
    constants "inside" the engines, or "outside", inputs bound at run time straight from the
    checkpoint; outside unless given where there are several ranks or over 2 GB, and none is in four
    bits. `collectives`:
    "native" or "plugin" in place of the table's choice. `workspace`: most bytes that one kernel may
    use. `cache`: the folder of engines built before. `caching`: whether there is one. `build`:
    False writes ONNX only. `plugins`: files that register plugins. `self_test`: whether to store
    the reference's answer to a prompt, which loading compares; unless given, for weights up to
    256 MB. `weight_streaming`, `refit` and `strip` are flags of the builder. `triton`: a folder
    that gets a model repository for Triton Inference Server; then weights are inside, and
    collectives TensorRT's own unless given.
    """

    target: str = ""
    weights: Place | None = None
    collectives: Collectives = "auto"
    workspace: int | None = None
    cache: Path | None = None
    caching: bool = True
    build: bool = True
    plugins: tuple[str, ...] = ()
    self_test: bool | None = None
    weight_streaming: bool = False
    refit: bool = False
    strip: bool = False
    triton: Path | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EngineOptions:
        """The options of a mapping, where None leaves the choice open; an Error about what is
        unknown, or nothing that the option can be."""
        if not isinstance(given, Mapping):
            raise Error(f"engine is {given!r}; give a mapping, such as {{'weights': 'inside'}}")
        known = [field.name for field in fields(cls)]
        wanted: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise Error(
                    f"engines have no option {name}{did_you_mean(str(name), known)}; there are "
                    f"{', '.join(known)}"
                )
            if value is not None:
                wanted[name] = _checked(name, value)
        if "cache" in wanted and wanted.get("caching") is False:
            raise Error("a cache is named, and caching is off; leave one of the two out")
        return cls(**(_served(wanted) if "triton" in wanted else wanted))

    def remembered(self) -> dict[str, Any]:
        """What was chosen and does not belong to one machine, for building again."""
        default = EngineOptions()
        return {
            name: getattr(self, name)
            for name in REMEMBERED
            if getattr(self, name) != getattr(default, name)
        }

    def outside(self, module: Module) -> bool:
        """Whether weights stay outside the engines of a module."""
        reason = self._inside(module)
        if reason and self.weights == "outside":
            raise Error(f"{reason}; give --weights inside")
        if reason or self.weights is not None:
            return not reason and self.weights == "outside"
        return module.mesh.ranks > 1 or weight_bytes(module) > LARGE

    def _inside(self, module: Module) -> str:
        """Why weights must be constants, if they must."""
        for name in ("weight_streaming", "refit", "strip"):
            if getattr(self, name):
                return f"--{name.replace('_', '-')} is about weights that are part of the engine"
        for weight in module.weights.values():
            if weight.type.dtype == "i4":
                return (
                    f"the weight @{weight.name} is i4, which TensorRT multiplies as it is only "
                    "where it is a constant"
                )
        return ""


_KINDS: dict[str, type] = {
    "target": str,
    "workspace": int,
    "cache": Path,
    "caching": bool,
    "build": bool,
    "self_test": bool,
    "weight_streaming": bool,
    "refit": bool,
    "strip": bool,
    "triton": Path,
}
_WORDS: dict[str, tuple[str, ...]] = {
    "weights": ("inside", "outside"),
    "collectives": ("auto", "native", "plugin"),
}


def _checked(name: str, value: Any) -> Any:
    """What an option becomes; an Error where it can be no such thing."""
    if name == "plugins":
        return _files(value)
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise Error(f"{name} is {value!r}; it can be {' or '.join(_WORDS[name])}")
        return value
    kind = _KINDS[name]
    if kind is Path and isinstance(value, str):
        return Path(value)
    # True is an int to Python, and no number of bytes
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Error(f"{name} is {value!r}, and must be of the type {kind.__name__}")
    if kind is int and value < 1:
        raise Error(f"{name} is {value}; give a number of bytes, 1 or more")
    return value


def _files(value: Any) -> tuple[str | Path, ...]:
    files: Any = (value,) if isinstance(value, (str, Path)) else value
    if not isinstance(files, (list, tuple)) or not all(isinstance(f, (str, Path)) for f in files):
        raise Error(f"plugins is {value!r}; give the path of a file, or a list of paths")
    return tuple(files)


def _served(wanted: dict[str, Any]) -> dict[str, Any]:
    """Options of engines that Triton can serve, as far as they were left open."""
    if wanted.get("build") is False:
        raise Error("Triton serves engines, and --no-build builds none; leave one of the two out")
    if wanted.get("weights") == "outside":
        raise Error("Triton binds no weights that lie outside an engine; leave --weights out")
    return {"collectives": "native"} | wanted | {"weights": "inside"}
