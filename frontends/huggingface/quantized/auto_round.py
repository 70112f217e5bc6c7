"""auto-round (https://github.com/intel/auto-round): the bytes of GPTQ or AWQ with another config.

`packing_format` names the layout; `extra_config` has the layers that differ from the others.
"""

from __future__ import annotations

from ...models.config_reader import ConfigReader
from .awq import Awq
from .gptq import Gptq
from .method import Method
from .parts import Layer, Sizes, Tensors

_LAYOUTS: dict[str, type[Method]] = {"awq": Awq, "auto_awq": Awq, "gptq": Gptq, "auto_gptq": Gptq}


class AutoRound(Method):
    marks = ("qweight",)

    def __init__(self, config: ConfigReader) -> None:
        packing = config.word("packing_format", "auto_round:auto_gptq")
        layout = packing.removeprefix("auto_round:")
        if layout not in _LAYOUTS or config.word("data_type", "int") != "int":
            raise config.error("packing_format", f"irc reads {', '.join(_LAYOUTS)}, of integers")
        if config.integer("act_bits", 16) < 16:
            raise config.error("act_bits", "irc reads codes of weights alone")
        self._layout = _LAYOUTS[layout](config)
        bits, group = config.integer("bits"), config.integer("group_size")
        symmetric = config.flag("sym", True)
        ignored: list[str] = []
        extra = ConfigReader(config.inner("extra_config"), "extra_config")
        for name in config.inner("extra_config"):
            own = ConfigReader(extra.inner(name), f"extra_config of {name}")
            if own.integer("bits", bits) >= 16:
                ignored.append(name)
                continue
            kind = own.integer("bits", bits), own.integer("group_size", group)
            if (*kind, own.flag("sym", symmetric)) != (bits, group, symmetric):
                raise config.error("extra_config", f"{name} has other bits, groups or zero points")
        self.ignored = ignored

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        return self._layout.layer(name, tensors, shape)
