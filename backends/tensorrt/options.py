"""What may be chosen about engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from irc.backends.tensorrt.lowering.collectives import Collectives
from irc.errors import Error, did_you_mean

Place: TypeAlias = Literal["inside", "outside"]

LARGE = 2_000_000_000  # bytes of weights from which on they stay outside


@dataclass(frozen=True)
class EngineOptions:
    """`target`: the text of a Target, that of the installed library unless given. `weights`:
    constants "inside" the engines, or "outside", inputs bound at run time straight from the
    checkpoint; outside unless given where there are several ranks or over 2 GB. `collectives`:
    "native" or "plugin" in place of the table's choice. `workspace`: most bytes that one kernel may
    use. `cache`: the folder of engines built before. `caching`: whether there is one. `build`:
    False writes ONNX only. `plugins`: files that register plugins. `self_test`: whether to store
    the reference's answer to a prompt, which loading compares; unless given, for weights up to
    256 MB. `weight_streaming`, `refit` and `strip` are flags of the builder.
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

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EngineOptions:
        """The options of a mapping; an Error where one is unknown."""
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise Error(
                    f"engines have no option {name}{did_you_mean(name, known)}; there are "
                    f"{', '.join(known)}"
                )
            if name in _WORDS and value not in _WORDS[name]:
                shown = " or ".join(str(word) for word in _WORDS[name] if word is not None)
                raise Error(f"{name} is {value!r}; it can be {shown}")
        wanted = dict(given)
        wanted["target"] = wanted.get("target") or ""
        if isinstance(wanted.get("cache"), str):
            wanted["cache"] = Path(wanted["cache"])
        files: Any = wanted.get("plugins") or ()
        wanted["plugins"] = (files,) if isinstance(files, (str, Path)) else tuple(files)
        for name, kinds in _KINDS.items():
            if name in wanted and not isinstance(wanted[name], kinds):
                shown = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
                raise Error(f"{name} is {wanted[name]!r}, and must be of the type {shown}")
        if wanted.get("cache") is not None and wanted.get("caching") is False:
            raise Error("a cache is named, and caching is off; leave one of the two out")
        return cls(**wanted)

    def outside(self, ranks: int, weight_bytes: int) -> bool:
        """Whether weights stay outside the engines of a module."""
        if self.weights is not None:
            return self.weights == "outside"
        return ranks > 1 or weight_bytes > LARGE


_KINDS: dict[str, tuple[type, ...]] = {
    "target": (str,),
    "workspace": (int, type(None)),
    "cache": (Path, type(None)),
    "caching": (bool,),
    "build": (bool,),
    "self_test": (bool, type(None)),
    "weight_streaming": (bool,),
    "refit": (bool,),
    "strip": (bool,),
}
_WORDS: dict[str, tuple[str | None, ...]] = {
    "weights": (None, "inside", "outside"),
    "collectives": ("auto", "native", "plugin"),
}
