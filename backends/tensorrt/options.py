"""The options of TensorRT engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from irc.artifact.report import weight_bytes
from irc.backends.tensorrt.lowering.collectives import Collectives
from irc.errors import Error, did_you_mean
from irc.ir.core import Module, Weight

_FLAGS = ("weight_streaming", "refit", "strip")
# Independent of the machine, so recompiling an artifact keeps them.
REMEMBERED = ("weights", "collectives", "workspace", "self_test", *_FLAGS)
LARGE = 2_000_000_000  # bytes of weights above which they are outside by default


@dataclass(frozen=True)
class EngineOptions:
    """`target`: the text of a Target; default: that of the installed library. `weights`: constants
    "inside" the engines, or "outside": inputs bound at run time straight from the checkpoint;
    default: outside for several ranks or over 2 GB, unless some are quantized. `collectives`:
    "native" or "plugin" in place of the table's choice. `workspace`: the largest memory of one
    kernel in bytes. `cache`: the folder of cached engines; `caching` False uses none. `build`:
    False writes ONNX only. `plugins`: files that register plugins. `self_test`: whether to store
    the reference's answer to a prompt, to compare when loading; default: for weights up to 256 MB.
    `weight_streaming`, `refit` and `strip` are flags of the builder.
    """

    target: str = ""
    weights: Literal["inside", "outside"] | None = None
    collectives: Collectives = "auto"
    workspace: int | None = None
    cache: Path | None = None
    caching: bool = True
    build: bool = True
    plugins: tuple[str | Path, ...] = ()
    self_test: bool | None = None
    weight_streaming: bool = False
    refit: bool = False
    strip: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineOptions:
        """The options of a mapping, where None means the default; an Error about an unknown option
        or value."""
        if not isinstance(options, Mapping):
            raise Error(f"engine is {options!r}; give a mapping, such as {{'weights': 'inside'}}")
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise Error(
                    f"engines have no option {name}{did_you_mean(str(name), known)}; there are "
                    f"{', '.join(known)}"
                )
        found = {name: _checked(name, x) for name, x in options.items() if x is not None}
        if "cache" in found and found.get("caching") is False:
            raise Error("a cache is named, and caching is off; leave one of the two out")
        return cls(**found)

    def remembered(self) -> dict[str, Any]:
        """The options that an artifact keeps for compiling it again, as far as not the default."""
        chosen = {name: getattr(self, name) for name in REMEMBERED}
        return {name: x for name, x in chosen.items() if x != getattr(EngineOptions, name)}

    def outside(self, module: Module) -> bool:
        """Whether the weights of a module stay outside the engines."""
        reason = self._inside(module)
        if reason and self.weights == "outside":
            raise Error(f"{reason}; give --weights inside")
        if reason or self.weights is not None:
            return not reason and self.weights == "outside"
        if any(
            op.opname == "dequantize" and isinstance(op.operands[0], Weight) for op in module.ops()
        ):
            return False  # products of codes need constant scales
        return module.mesh.ranks > 1 or weight_bytes(module) > LARGE

    def _inside(self, module: Module) -> str:
        """Why weights must be constants, or ""."""
        for name in _FLAGS:
            if getattr(self, name):
                return f"--{name.replace('_', '-')} applies to weights inside the engine"
        for weight in module.weights.values():
            if (kind := weight.type.dtype) in ("i4", "f4e2m1", "f8e8m0"):
                return (
                    f"the weight @{weight.name} is {kind}, which TensorRT takes as a constant only"
                )
        return ""


_WORDS: dict[str, tuple[str, ...]] = {
    "weights": ("inside", "outside"),
    "collectives": ("auto", "native", "plugin"),
}
_TYPES: dict[str, type] = {"target": str, "workspace": int, "cache": Path}  # others: bool


def _checked(name: str, value: Any) -> Any:
    """The value of an option; an Error if it has the wrong type."""
    if name == "plugins":
        files: Any = (value,) if isinstance(value, (str, Path)) else value
        if isinstance(files, (list, tuple)) and all(isinstance(f, (str, Path)) for f in files):
            return tuple(files)
        raise Error(f"plugins is {value!r}; give the path of a file, or a list of paths")
    if name in _WORDS:
        if value in _WORDS[name]:
            return value
        raise Error(f"{name} is {value!r}; it can be {' or '.join(_WORDS[name])}")
    wanted = _TYPES.get(name, bool)
    if wanted is Path and isinstance(value, str):
        return Path(value)
    # True is an int to Python, but no number of bytes
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise Error(f"{name} is {value!r}, and must be of the type {wanted.__name__}")
    if wanted is int and value < 1:
        raise Error(f"{name} is {value}; give a number of bytes, 1 or more")
    return value
