"""The tensors of a quantized layer, as references to the files of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, TypeAlias

import numpy as np

from ....errors import Error
from ....files import open_file
from ....ir.dtypes import dtype as dtype_called
from ....ir.dtypes import numpy_dtype
from ....ir.types import TensorType
from ....quantization.packing import words_shape
from ....quantization.rounding import as_f32
from ....quantization.sites import FakeQuantize
from ....weights import BytesRef, ConcatRef, FileRef, Ref, Transpose, UnpackedRef, Unsqueeze
from ....weights.safetensors import Tensor
from ..files import Checkpoint

Sizes: TypeAlias = tuple[int, ...]
FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Part:
    """A tensor of a layer: where its bytes are, and what they are."""

    ref: Ref
    dtype: str
    shape: Sizes

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)

    def transposed(self) -> Part:
        """The matrix with rows and columns exchanged."""
        return Part(self.ref.then(Transpose((1, 0))), self.dtype, self.shape[::-1])

    def of_rank(self, ndim: int) -> Part:
        """The tensor with dimensions of size 1 in front."""
        part = self
        while len(part.shape) < ndim:
            part = replace(part, ref=part.ref.then(Unsqueeze(0)), shape=(1, *part.shape))
        return part


@dataclass(frozen=True)
class Layer:
    """A quantized weight [N, K]: dequantize(codes, scales, zeros), and the input's quantization.

    With a `tensor_scale` the scales are themselves codes, dequantized by it. `order` i32[K] are the
    input features in the order in which the weight has them; `factors` [K] multiply the input.
    """

    codes: Part
    scales: Part
    zeros: Part | None = None
    tensor_scale: Part | None = None
    activation: FakeQuantize | None = None
    order: Part | None = None
    factors: Part | None = None

    def parts(self) -> dict[str, Part | None]:
        """The tensors by what is added to the name of the weight."""
        return {
            "": self.codes,
            "scale": self.scales,
            "zero": self.zeros,
            "tensor_scale": self.tensor_scale,
        }


def stacked(layers: Sequence[Layer]) -> Layer:
    """The layers of experts as one, along a new first dimension, with the largest input scales."""
    first, inputs = layers[0], [layer.activation for layer in layers]
    if any(x.order or x.factors or _kinds(x) != _kinds(first) for x in layers):
        raise Error("the experts of a layer are quantized differently; irc stacks equal ones")
    columns = zip(*(layer.parts().values() for layer in layers), strict=True)
    codes, scales, zeros, tensor_scale = map(_stack, columns)
    assert codes is not None and scales is not None
    largest = max(
        inputs,
        key=lambda activation: (
            (activation and (activation.scale or activation.tensor_scale)) or 0.0
        ),
    )
    return Layer(codes, scales, zeros, tensor_scale, largest)


def _kinds(layer: Layer) -> tuple[object, ...]:
    """What layers have in common that can be stacked."""
    inputs = layer.activation and replace(layer.activation, scale=None, tensor_scale=None)
    return inputs, *(part and part.type for part in layer.parts().values())


def _stack(parts: tuple[Part | None, ...]) -> Part | None:
    """Tensors of one type along a new first dimension; None if there are none."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    ref = ConcatRef(tuple(part.ref.then(Unsqueeze(0)) for part in present), 0)
    return Part(ref, present[0].dtype, (len(present), *present[0].shape))


class Tensors:
    """The tensors of a checkpoint; `used` has the keys of those that were taken."""

    def __init__(self, checkpoint: Checkpoint, file: Callable[[str], str]) -> None:
        self.checkpoint, self._file = checkpoint, file
        self.used: set[str] = set()
        self._first: dict[tuple[TensorType, bytes], Part] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.checkpoint

    def info(self, key: str) -> Tensor:
        """dtype and shape of a tensor, which counts as used."""
        if key not in self.checkpoint:
            raise Error(f"{self.checkpoint.folder} lacks the tensor {key}, which a layer needs")
        self.used.add(key)
        return self.checkpoint.tensor(key)

    def take(self, key: str, *dtypes: str) -> Part:
        """A tensor as it is; an Error where it has none of the dtypes."""
        tensor = self.info(key)
        if tensor.dtype not in dtypes:
            raise Error(f"{key} is {_shown(tensor)}; expected {' or '.join(dtypes)}")
        return self._part(key, tensor)

    def _part(self, key: str, tensor: Tensor) -> Part:
        return Part(FileRef(self._file(key), key), tensor.dtype, tensor.shape)

    def view(self, key: str, dtype: str, shape: Sizes) -> Part:
        """The bytes of a tensor as another type, also with other dimensions of size 1."""
        tensor = self.info(key)
        if (tensor.dtype, tensor.shape) == (dtype, shape):
            return self.take(key, dtype)
        outer, wanted = ([n for n in sizes if n != 1][:-1] for sizes in (tensor.shape, shape))
        if tensor.nbytes != dtype_called(dtype).nbytes(prod(shape)) or outer != wanted:
            type = TensorType(dtype, shape)
            raise Error(f"{key} is {_shown(tensor)}; expected the bytes of {type}")
        return self.bytes(key, dtype, shape)

    def bytes(self, key: str, dtype: str, shape: Sizes) -> Part:
        """The bytes of a tensor as another type of as many bytes."""
        offset = self.info(key).offset
        return Part(BytesRef(self._file(key), offset, dtype, shape), dtype, shape)

    def number(self, key: str) -> float:
        """The number in a tensor of one positive element."""
        tensor = self.info(key)
        if prod(tensor.shape) != 1 or tensor.dtype not in FLOATS:
            raise Error(f"{key} is {_shown(tensor)}; expected one number")
        value = float(self.read(key).reshape(()))
        if not 0 < value < inf:
            raise Error(f"{key} is {value}; a scale is positive and finite")
        return value

    def check_scales(self, key: str) -> None:
        """An Error unless all scales are positive and finite; f8e4m3 rounds small ones to 0, and
        bytes are f8e8m0, where 255 is NaN."""
        values = self.read(key)
        if values.dtype == np.uint8:
            values = values.view(numpy_dtype("f8e8m0"))
        values = as_f32(values)
        low, high = values.min(initial=1), values.max(initial=1)
        if not ((low > 0 or (low == 0 and self.info(key).dtype == "f8e4m3")) and high < inf):
            raise Error(
                f"{key} has scales from {low} to {high}; expected positive and finite numbers, so "
                "quantize the checkpoint again"
            )

    def words(self, key: str, layout: str, dtype: str, shape: Sizes) -> Part:
        """Elements that are packed in words of 32 bits."""
        part, wanted = self.take(key, "i32"), words_shape(layout, dtype, shape)
        if part.shape != wanted:
            raise Error(f"{key} is {part.type}; expected i32{[*wanted]} for {dtype}{[*shape]}")
        return Part(UnpackedRef(part.ref, layout, dtype, shape), dtype, shape)

    def shared(self, key: str, part: Part) -> Part:
        """`part`, made of a small tensor, or the first one that was made of equal values."""
        return self._first.setdefault((part.type, self.read(key).tobytes()), part)

    def read(self, key: str) -> Any:
        """The values of a small tensor."""
        tensor = self.info(key)
        with open_file(self.checkpoint.folder / self.checkpoint.file(key)) as file:
            file.seek(tensor.offset)
            values = np.frombuffer(file.read(tensor.nbytes), numpy_dtype(tensor.dtype))
        return values.reshape(tensor.shape)


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
