"""The options of TensorRT engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from irc.argument_checks import whole_number_in
from irc.artifact.report import weight_bytes
from irc.errors import Error, did_you_mean
from irc.ir.core import Module, Weight
from irc.pipeline.options import PATHS, option, target_option

_FLAGS = ("weight_streaming", "refit", "strip")
# Independent of the machine, so recompiling an artifact keeps them.
REMEMBERED = ("weights", "workspace", "self_test", *_FLAGS)
LARGE = 2_000_000_000  # bytes of weights above which they are outside by default


def _mebibytes(text: str) -> int:
    number = whole_number_in(text)
    if number is None:
        raise Error(f"{text!r} is not a whole number")
    return number << 20


def _when(text: str) -> bool:
    if text not in ("always", "never"):
        raise Error(f"{text!r} is none of always, never{did_you_mean(text, ('always', 'never'))}")
    return text == "always"


def _plugins() -> Any:
    return option(
        (),
        "a Python file that registers plugins of engines; may be repeated",
        flag="--plugin",
        metavar="F",
        takes=PATHS,
        expects="the path of a file, or a list of paths",
    )


@dataclass(frozen=True)
class LoadOptions:
    """The options with which a program of engines is loaded."""

    self_test: bool = option(True, "do not test engines when they are loaded")
    plugins: tuple[str | Path, ...] = _plugins()


@dataclass(frozen=True)
class EngineOptions:
    """The options of `irc compile` for engines.

    `build`: False writes ONNX only. `caching` False uses no cache. By default `weights` are outside
    for several ranks or over 2 GB, unless some are quantized, `self_test` is stored for weights up
    to 256 MB, and `target` is that of the installed library. `workspace` is in bytes.
    """

    target: str = target_option()
    weights: Literal["inside", "outside"] | None = option(
        None,
        "inside: constants of the engine; outside: bound when it runs, straight from the "
        "checkpoint (the default over 2 GB, and of several ranks, which then share an engine)",
        metavar="PLACE",
    )
    workspace: int | None = option(
        None, "most memory of one kernel", metavar="MIB", least=1, parse=_mebibytes
    )
    cache: Path | None = option(
        None,
        "the folder of engines for later compilations ($IRC_CACHE or ~/.cache/irc/engines)",
        metavar="DIR",
    )
    caching: bool = option(True, "build anew, and keep nothing", flag="--no-cache")
    build: bool = option(True, "write ONNX, and build engines another time")
    plugins: tuple[str | Path, ...] = _plugins()
    self_test: bool | None = option(
        None,
        "store the reference's answer, which loading compares (default: if weights are small)",
        metavar="WHEN",
        parse=_when,
    )
    weight_streaming: bool = option(
        False, "let weights inside exceed the GPU's memory", both_forms=True
    )
    refit: bool = option(False, "weights can be changed later; needs a GPU", both_forms=True)
    strip: bool = option(False, "leave weights out, to be refitted; needs a GPU", both_forms=True)

    def __post_init__(self) -> None:
        if self.cache is not None and not self.caching:
            raise Error("a cache is named, and caching is off; leave one of the two out")

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
