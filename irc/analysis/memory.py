"""The memory of one rank: weights, states such as KV caches, activations, workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir.core import Function, Op, Value, Weight
from ..ir.dtypes import dtype, is_float
from ..ir.types import TensorType
from ..text.printer import names_of
from .cost import is_kept_as_codes, is_view, operations
from .sizes import LocalSizes
from .topology import Device


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `states` are arguments that results overwrite, such as KV caches.

    `activations` is the peak of inputs, outputs and intermediate values.
    """

    weights: int
    states: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.weights + self.states + self.activations + self.workspace


@dataclass(frozen=True)
class Buffer:
    """Memory that a value has from step `first` to `last`; `offset` in an arena, -1 without one."""

    name: str
    first: int
    last: int
    nbytes: int
    offset: int = -1


def memory(
    functions: Sequence[Function],
    sizes: LocalSizes,
    device: Device | None = None,
    stored: str | None = None,
) -> Memory:
    """The bytes of a rank that runs some functions one after the other.

    Workspace is that of the device; `stored` is as for `weight_bytes`.
    """
    return Memory(
        weight_bytes(functions, sizes, stored),
        sum(state_bytes(function, sizes) for function in functions),
        max((peak_bytes(function, sizes) for function in functions), default=0),
        workspace_bytes(sizes, device),
    )


def workspace_bytes(sizes: LocalSizes, device: Device | None) -> int:
    """The workspace of libraries, on a rank alone or with others."""
    if device is None:
        return 0
    return device.workspace_bytes + (device.communication_bytes if sizes.mesh.ranks > 1 else 0)


def weight_bytes(
    functions: Sequence[Function], sizes: LocalSizes, stored: str | None = None
) -> int:
    """The local bytes of every weight that the functions read, padding included.

    `stored` is the float dtype of the checkpoint: weights are kept in it if it is narrower than
    that of the computation.
    """
    types = (weight.type for weight in weights_of(functions))
    return sum(sizes.bytes(_narrowed(type, stored)) for type in types)


def _narrowed(type: TensorType, stored: str | None) -> TensorType:
    if stored is None or not is_float(type.dtype):
        return type
    return type.replace(dtype=stored) if dtype(stored).bits < dtype(type.dtype).bits else type


def weights_of(functions: Sequence[Function]) -> list[Weight]:
    """The weights that functions read or return, each once, in order of first use."""
    values: dict[Value, None] = {}
    for function in functions:
        for op in operations(function):
            values |= dict.fromkeys(op.operands)
        values |= dict.fromkeys(function.returned)
    return [value for value in values if isinstance(value, Weight)]


def state_bytes(function: Function, sizes: LocalSizes) -> int:
    """One rank's shard of every argument that a result overwrites."""
    return sum(sizes.bytes(function.args[i].type) for i in set(function.aliases().values()))


def peak_bytes(function: Function, sizes: LocalSizes) -> int:
    """The peak bytes of values other than weights and states while the function runs.

    Operations run in order, a value is freed after its last use, inputs and outputs stay. The peak
    of a called function adds to the live values of the caller.
    """
    stateful = set(function.aliases().values())
    inputs = sum(sizes.bytes(arg.type) for arg in function.args if arg.index not in stateful)
    return inputs + _peak(function, sizes)


def _peak(function: Function, sizes: LocalSizes) -> int:
    """The peak bytes of the values that a function computes."""
    ops = [op for op in function if op.opname != "return"]
    owner = _owners(function, sizes)
    last = _last_uses(function, ops, owner)
    ending: dict[int, int] = {}
    for value, i in last.items():
        ending[i] = ending.get(i, 0) + sizes.bytes(value.type)
    live = highest = 0
    for i, op in enumerate(ops):
        live += sum(sizes.bytes(v.type) for v in op.results if owner.get(v) is v)
        highest = max(highest, live + _inside(op, sizes))
        live -= ending.get(i, 0)
    return highest


def _last_uses(
    function: Function, ops: Sequence[Op], owner: Mapping[Value, Value]
) -> dict[Value, int]:
    """The position of the last operation that uses the memory of each value that owns some."""
    last = {owner[v]: len(ops) for v in function.returned if v in owner}
    for i, op in reversed(list(enumerate(ops))):
        for value in (*op.operands, *op.results):
            if value in owner:
                last.setdefault(owner[value], i)
    return last


def buffers_of(function: Function, sizes: LocalSizes) -> list[Buffer]:
    """The memory of every value that a function computes; see `peak_bytes`."""
    ops = [op for op in function if op.opname != "return"]
    last, names = _last_uses(function, ops, _owners(function, sizes)), names_of(function)
    first = {result: i for i, op in enumerate(ops) for result in op.results}
    return [Buffer(names[v], first[v], last[v], sizes.bytes(v.type)) for v in first if v in last]


def _inside(op: Op, sizes: LocalSizes) -> int:
    """The peak bytes of a called function without its results, which its caller counts."""
    if op.opname != "call":
        return 0
    peak = _peak(op.attributes["callee"], sizes)
    return max(0, peak - sum(sizes.bytes(value.type) for value in op.results))


def _owners(function: Function, sizes: LocalSizes) -> dict[Value, Value]:
    """The value that owns the memory of each value; values in arguments or weights are left out."""
    owner: dict[Value, Value] = {}
    for op in function:
        overwritten = op.overwrites()
        for result in op.results:
            shared = op.operands[0] if is_view(op, sizes) else overwritten.get(result, result)
            shared = op.results[0] if is_kept_as_codes(result) else shared
            if shared is result:
                owner[result] = result
            elif shared in owner:
                owner[result] = owner[shared]
    return owner
