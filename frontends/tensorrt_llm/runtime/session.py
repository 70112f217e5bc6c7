"""`Session`: any engine on arrays by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irc.backends.reference.inputs import Input, bind_sizes
from irc.errors import Error
from irc.generation.checks import checked
from irc.generation.inputs import check_ranges, converted
from irc.ir.dims import Dim, bind
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType

from ..dtypes import as_array
from .generation import like, open_engine


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


class Session:
    """The program of an artifact: `run` takes all inputs, and returns or fills the outputs."""

    def __init__(self, engine: Any) -> None:
        self.artifact = open_engine(engine)

    @classmethod
    def from_artifact(cls, folder: Any) -> Session:
        """The session of an artifact folder."""
        return cls(folder)

    from_serialized_engine = from_engine = from_artifact

    def infer_shapes(self, inputs: Sequence[TensorInfo], context: Any = None) -> list[TensorInfo]:
        """The outputs for inputs of these shapes, states included in neither."""
        ports, shapes = self.artifact.program.ports, {each.name: each.shape for each in inputs}
        given = [port for port in (*ports.inputs, *ports.states) if port.name in shapes]
        zeros = {port.name: np.zeros((), numpy_dtype(port.dtype)) for port in given}
        arrays = {name: np.broadcast_to(zero, shapes[name]) for name, zero in zeros.items()}
        rows = [Input(p.name, TensorType(p.dtype, p.shape), arrays[p.name]) for p in given]
        sizes = bind_sizes(rows, {})
        check_ranges(given, arrays, self.artifact.manifest["dims"])
        outputs: list[TensorInfo] = []
        for port in ports.outputs:
            shape = [bind(dim, sizes) for dim in port.shape]
            unknown = [dim for dim in shape if isinstance(dim, Dim)]
            if unknown:
                raise Error(
                    f"the output {port.name} has the size {unknown[0]}, which the inputs "
                    f"{', '.join(shapes)} do not determine; give all inputs"
                )
            outputs.append(TensorInfo(port.name, port.dtype, tuple(map(int, map(str, shape)))))
        return outputs

    def set_shapes(self, tensor_dict: Mapping[str, Any], context: Any = None) -> None:
        """Check that the engine takes these shapes; `run` sets them itself."""
        self.infer_shapes([TensorInfo(n, None, tuple(t.shape)) for n, t in tensor_dict.items()])

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
        ports = [p for p in (*program.ports.inputs, *program.ports.states) if p.name in inputs]
        arrays = {port.name: converted(port, as_array(inputs[port.name])) for port in ports}
        check_ranges(ports, arrays, self.artifact.manifest["dims"])
        results = checked(program, program.run(arrays), arrays)
        first = next(iter(inputs.values()), None)
        if outputs is None:
            return {name: like(array, first) for name, array in results.items()}
        for name, buffer in outputs.items():
            if name not in results:
                raise Error(f"the engine has no output {name!r}; it has {', '.join(results)}")
            buffer[...] = like(results[name], buffer)
        return True
