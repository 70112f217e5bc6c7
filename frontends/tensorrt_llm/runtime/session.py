"""`Session`: any engine on arrays by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import irc
from irc.backends.base import Port
from irc.errors import Error
from irc.generation.checks import checked
from irc.generation.inputs import bound_shape, check_ranges, converted, sizes_of_shapes
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType

from ..api import api
from ..dtypes import as_array, data_type, numpy_to_torch
from ..engines import find_artifact
from ..utilities import logger


@api("runtime.session.TensorInfo")
@dataclass(frozen=True)
class TensorInfo:
    """Name, dtype and shape of an input or output."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    def numel(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def squeeze(self, dim: int) -> TensorInfo:
        """This without the dimension `dim`, whose size is one."""
        at = dim % len(self.shape)
        kept = self.shape[:at] + self.shape[at + 1 :]
        return TensorInfo(self.name, self.dtype, kept if self.shape[at] == 1 else self.shape)


class EngineTensors:
    """The inputs and outputs of an engine, by TensorRT's names; -1 is a size that may change."""

    def __init__(self, artifact: irc.Artifact) -> None:
        ports = artifact.program.ports
        self.inputs = {port.name: port for port in (*ports.inputs, *ports.states)}
        self.outputs = {port.name: port for port in ports.outputs}
        self.num_io_tensors = len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index: int) -> str:
        """The name of a tensor; inputs come first."""
        return [*self.inputs, *self.outputs][index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(dim if isinstance(dim, int) else -1 for dim in self._port(name).shape)

    def get_tensor_dtype(self, name: str) -> Any:
        """The DataType of a tensor."""
        return data_type(self._port(name).dtype)

    def get_tensor_mode(self, name: str) -> Any:
        """Whether a tensor is an input or an output."""
        modes: Any = sys.modules["tensorrt"].TensorIOMode
        return modes.INPUT if name in self.inputs else modes.OUTPUT

    def _port(self, name: str) -> Port:
        return (self.inputs | self.outputs)[name]


@api("runtime.session.Session")
class Session:
    """The program of an artifact: `run` takes all inputs, and returns or fills the outputs."""

    def __init__(self, engine: Any) -> None:
        self.artifact = open_engine(engine)
        self.engine = EngineTensors(self.artifact)

    @classmethod
    def from_serialized_engine(cls, engine: Any) -> Session:
        """The session of an engine, its bytes, or its folder."""
        return cls(engine)

    from_engine = from_serialized_engine

    def infer_shapes(self, inputs: Sequence[TensorInfo], context: Any = None) -> list[TensorInfo]:
        """The outputs for inputs of these shapes, states included in neither."""
        sizes = self.check_shapes({port.name: port.shape for port in inputs})
        ports = self.engine.outputs.values()
        return [TensorInfo(p.name, data_type(p.dtype), bound_shape(p, sizes)) for p in ports]

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The sizes of symbols that inputs of these shapes have; an Error if they do not fit."""
        ports = list(self.engine.inputs.values())
        return sizes_of_shapes(ports, shapes, self.artifact.manifest["dims"])

    def set_shapes(self, tensor_dict: Mapping[str, Any], context: Any = None) -> None:
        """Check that the engine takes these shapes; `run` sets them itself."""
        self.check_shapes({name: tuple(tensor.shape) for name, tensor in tensor_dict.items()})

    def run(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any] | None = None,
        stream: Any = None,
        context: Any = None,
    ) -> Any:
        """Run once over all inputs. True, with `outputs` filled; without them, all results.

        Inputs that the engine does not have, because no result needs them, are left out.
        """
        program = self.artifact.program
        ports = [port for name, port in self.engine.inputs.items() if name in inputs]
        given = {port.name: _in_dtype(as_array(inputs[port.name]), port.dtype) for port in ports}
        arrays = {port.name: converted(port, given[port.name]) for port in ports}
        check_ranges(ports, arrays, self.artifact.manifest["dims"])
        results = checked(program.run(arrays), arrays)
        first = next(iter(inputs.values()), None)
        if outputs is None:
            return {name: like(array, first) for name, array in results.items()}
        for name, buffer in outputs.items():
            if name not in results:
                raise Error(f"the engine has no output {name!r}; it has {', '.join(results)}")
            result = results[name]
            if result.size != int(np.prod(tuple(buffer.shape), dtype=np.int64)):
                raise Error(
                    f"the output {name} has the shape {list(result.shape)}, but the buffer for it "
                    f"{list(buffer.shape)}; ask infer_shapes for the shape"
                )
            result = result.reshape(tuple(buffer.shape))
            is_bytes = result.dtype.name.startswith("float8") and str(buffer.dtype) == "torch.int8"
            buffer[...] = like(result.view(np.int8) if is_bytes else result, buffer)
        return True

    def _print_engine_info(self) -> None:
        """Log the inputs and outputs."""
        for port in (*self.engine.inputs.values(), *self.engine.outputs.values()):
            logger.info(f"{port.name}: {TensorType(port.dtype, port.shape)}")

    def _debug_run(self, inputs: Mapping[str, Any], context: Any = None) -> dict[str, Any]:
        """All results for all inputs."""
        return self.run(inputs)


def _in_dtype(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Scripts from before PyTorch had 8-bit floats keep them as bytes, in tensors of int8."""
    is_bytes = array.dtype == np.int8 and dtype.startswith("f8")
    return array.view(numpy_dtype(dtype)) if is_bytes else array


def open_engine(source: Any) -> irc.Artifact:
    """The artifact of an engine: itself, an engine, its bytes or file, or a folder."""
    if isinstance(source, irc.Artifact):
        return source
    artifact = getattr(source, "artifact", None)
    return find_artifact(source) if artifact is None else artifact


def like(array: np.ndarray[Any, Any], given: Any) -> Any:
    """`array`, as a tensor of PyTorch on the device of `given` where that is one."""
    return numpy_to_torch(array).to(given.device) if hasattr(given, "new_tensor") else array
