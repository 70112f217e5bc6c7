"""`Method`: how the layers of one kind of quantized checkpoint are read."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import ClassVar

from ....weights import Ref
from ...models.config_reader import ConfigReader
from .parts import Layer, Sizes, Tensors


class Method(ABC):
    """A quantization method, made from the object in config.json that describes it.

    A layer is quantized if the checkpoint has one of its tensors called `marks`. `ignored` are the
    names of layers that the config leaves as they were.
    """

    marks: ClassVar[tuple[str, ...]]
    ignored: Sequence[str] = ()

    @abstractmethod
    def __init__(self, config: ConfigReader) -> None: ...

    @abstractmethod
    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        """The tensors of the layer `name`, whose weight is [N, K]."""

    def experts(self, ref: Ref, tensors: Tensors, shape: Sizes) -> Layer | None:
        """The layer of a weight [experts, N, K], where one tensor holds the codes of all experts.

        `ref` is where a checkpoint of floats has the weight. None: it is no such layer.
        """
        return None

    def ignores(self, name: str) -> bool:
        """Whether the config says that a layer is not quantized."""
        return any(names(pattern, name) for pattern in self.ignored)


def names(pattern: str, name: str) -> bool:
    """Whether a pattern of a config names a layer: `re:` a regular expression, `*` a wildcard.

    Else it is the layer's whole name, or the parts at its beginning or end.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    parts = f".{name}."
    return (
        fnmatchcase(name, pattern)
        or parts.startswith(f".{pattern}.")
        or parts.endswith(f".{pattern}.")
    )
