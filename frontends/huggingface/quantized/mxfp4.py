"""MXFP4 as gpt-oss stores experts: tensors of all experts at once, in blocks of 32 inputs.

`<weight>_blocks` u8 [experts, outputs, inputs/32, 16] holds two codes a byte, the first in the low
half; `<weight>_scales` u8 [experts, outputs, inputs/32] are exponents of 2 plus 127 (OCP
Microscaling Formats v1.0). All other weights are floats.
"""

from __future__ import annotations

from dataclasses import replace

from ....errors import Error
from ....weights import Ref, StridedRef, UnboundRef
from ...models.config_reader import ConfigReader
from .method import Method
from .parts import Layer, Part, Sizes, Tensors

_BLOCK = 32


class Mxfp4(Method):
    marks = ()

    def __init__(self, config: ConfigReader) -> None:
        self.ignored = config.words("modules_to_not_convert")

    def layer(self, name: str, tensors: Tensors, shape: Sizes) -> Layer:
        raise Error(f"{name} is quantized; irc reads mxfp4 in experts that a tensor holds together")

    def experts(self, ref: Ref, tensors: Tensors, shape: Sizes) -> Layer | None:
        source = next(ref.sources())
        if not isinstance(source, UnboundRef) or f"{source.key}_blocks" not in tensors:
            return None
        count, rows, inputs = shape
        rows = source.shape[-1] if source.shape else rows  # [experts, inputs, outputs] as floats
        blocks, scales = (f"{source.key}_{part}" for part in ("blocks", "scales"))
        wanted = (count, rows, inputs // _BLOCK, _BLOCK // 2)
        if inputs % _BLOCK or tensors.info(blocks).shape != wanted:
            raise Error(
                f"{blocks} is {[*tensors.info(blocks).shape]}; expected {[*wanted]} for {rows} "
                f"outputs and {inputs} inputs in blocks of {_BLOCK}"
            )
        tensors.check_scales(scales)
        codes = tensors.bytes(blocks, "f4e2m1", (count, rows, inputs))
        sizes = (count, rows, inputs // _BLOCK)
        return Layer(_rows(ref, codes), _rows(ref, tensors.view(scales, "f8e8m0", sizes)))


def _rows(ref: Ref, part: Part) -> Part:
    """The outputs that a weight takes of all."""
    if not isinstance(ref, StridedRef):
        return part
    taken = StridedRef(part.ref, 1, ref.start, ref.stop, ref.step)
    count = len(range(ref.start, ref.stop, ref.step))
    return replace(part, ref=taken, shape=(part.shape[0], count, *part.shape[2:]))
