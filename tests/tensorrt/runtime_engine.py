"""Engines that interpret the module of their artifact with numpy, on the memory of a fake GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.onnx.stages import stages_of
from irc.backends.reference.execute import Executor
from irc.backends.reference.inputs import bind_inputs
from irc.backends.reference.weights import Weights
from irc.backends.tensorrt.probe import probe
from irc.backends.tensorrt.runtime.driver import Gpu, Shape, Tensor
from irc.core import Function, Module, Value, Weight
from irc.dims import Dim
from irc.errors import Error
from irc.ops.collective import Collective
from irc.text import parse_module
from tests.tensorrt.runtime_gpu import Array, Fabric, Group, Memory, Stream

PROBE = -1  # in place of the number of a stage
MARK = b"\0fake engine\0"


class Library:
    """An artifact's folder as the fake library sees it, for all ranks of a test."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder, self.facts = folder, facts
        path = folder / "module.irc"
        self.module = parse_module(path.read_text(), str(path))
        base = facts.get("base") or folder
        self._kept = stages_of(self.module)
        self.stages = self._kept.__enter__()
        self.weights = Weights(self.module, base)

    def close(self) -> None:
        self._kept.__exit__(None, None, None)


class Driver:
    """See the runtime's Driver."""

    def __init__(self, library: Library, fabric: Fabric, number: int) -> None:
        self._library, self.fabric, self.number = library, fabric, number
        self.gpu = Gpu("Fake 9000", 89, f"fake-{number}", 1 << 40)
        self.library = (1, 7, 1, 116)
        self.memory = Memory()
        self.calls: list[tuple[Any, ...]] = []
        self.registered: dict[str, Group] = {}
        self.groups: list[Group] = []
        self.faults: dict[str, str] = {}
        self.can_capture = True
        self.can_bind = True
        self.does_nothing = False  # collectives of engines, besides those of plugins
        self.contexts: list[Context] = []
        self.skew = 0.0  # added to every result of this GPU's engines
        self.closed = False

    def allocate(self, size: int) -> int:
        return self.memory.allocate(size)

    def free(self, address: int) -> None:
        self.memory.free(address)

    def free_memory(self) -> int:
        return self.memory.total - self.memory.used

    def pinned(self, size: int) -> Array:
        return np.full(size, 0xAB, np.uint8)

    def stream(self) -> Stream:
        return Stream(self.memory, self.calls)

    def engine(self, path: Path) -> Engine:
        data = path.read_bytes()
        if not data[64:].startswith(MARK + b"{") or not data.endswith(b"}"):
            raise Error(f"TensorRT cannot read {path}")
        names = {entry["engine"]: entry["stage"] for entry in self._library.facts["ranks"]}
        if path.name == "probe.engine":
            names = {path.name: PROBE}
        return Engine(self, self._library, names[path.name], json.loads(data.partition(MARK)[2]))

    def group_name(self) -> bytes:
        return self.fabric.name()

    def group(self, name: bytes, rank: int, ranks: int, label: str) -> Group:
        group = Group(self.fabric, self.memory, name, rank, ranks)
        group.fault = self.faults.get(label, "")
        self.groups.append(group)
        return group

    def register(self, key: str, rank: int, group: Group) -> None:
        self.registered[key] = group

    def close(self) -> None:
        self.closed = True


class Engine:
    """A stage of the module. `own` says what is written in the engine's file."""

    def __init__(self, driver: Driver, library: Library, stage: int, own: Any) -> None:
        self.driver, self.library, self.own = driver, library, own
        if stage == PROBE:
            self.stage = probe(library.module)
            self.facts = {
                "profiles": [],
                "results": [{"result": "total", "output": "total"}],
                "scalars": {},
                "copied": [],
            }
        else:
            self.stage, self.facts = library.stages[stage], library.facts["stages"][stage]
        self.function: Function = self.stage.function
        self.profiles: int = own.get("profiles", max(1, len(self.facts["profiles"])))
        self.outputs = {each["result"]: each["output"] for each in self.facts["results"]}
        self.tensors: dict[str, Tensor] = {}
        for arg in self.function.args:
            self._add(str(arg.name), arg.type.dtype, arg.type.shape, False)
        values = zip(self.function.result_names(), self.function.returned, strict=True)
        for name, value in values:
            self._add(self.outputs[name], value.type.dtype, value.type.shape, True)
        for name in self.facts["scalars"]:
            self._add(name, "i32", (), False)
        for name, each in own.get("weights", {}).items():
            self._add(name, each["dtype"], each["shape"], False)

    def _add(self, name: str, dtype: str, shape: Sequence[Any], output: bool) -> None:
        dims = tuple(-1 if isinstance(dim, Dim) else int(dim) for dim in shape)
        self.tensors[name] = Tensor(name, dtype, dims, output)

    def aliased(self, output: str) -> str | None:
        found = [e.get("state") for e in self.facts["results"] if e["output"] == output]
        return found[0] if found and found[0] not in self.facts["copied"] else None

    def context(self, profile: int, stream: Stream) -> Context:
        context = Context(self, profile)
        self.driver.contexts.append(context)
        return context


class Context:
    """See the runtime's Context; an enqueue takes the addresses and shapes of its moment along."""

    def __init__(self, engine: Engine, profile: int) -> None:
        self.engine, self.profile = engine, profile
        self.group: Group | None = None
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.enqueued = 0

    def bind(self, group: Group) -> bool:
        group.meet("bind")
        self.group = group
        return self.engine.driver.can_bind

    def set_shape(self, name: str, shape: Shape) -> bool:
        tensor = self.engine.tensors[name]
        assert not tensor.output
        profiles = self.engine.facts["profiles"]
        low, _, high = profiles[self.profile]["shapes"][name]
        if any(not a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
            return False
        self.shapes[name] = shape
        return True

    def set_address(self, name: str, address: int) -> None:
        assert name in self.engine.tensors, name
        self.addresses[name] = address

    def shape(self, name: str) -> Shape:
        tensors, function = self.engine.tensors, self.engine.function
        arrays = {
            str(arg.name): np.empty(
                self.shapes.get(str(arg.name), tensors[str(arg.name)].shape),
                _kind(arg.type.dtype),
            )
            for arg in function.args
        }
        _, sizes = bind_inputs(function, arrays, {})
        results = zip(function.result_names(), function.returned, strict=True)
        (value,) = (v for result, v in results if self.engine.outputs[result] == name)
        return tuple(int(str(d.bind(sizes) if isinstance(d, Dim) else d)) for d in value.type.shape)

    def capturable(self, stream: Stream) -> bool:
        return self.engine.driver.can_capture

    def enqueue(self, stream: Stream) -> None:
        missing = set(self.engine.tensors) - set(self.addresses)
        if missing:
            raise Error(f"no address for {sorted(missing)}")
        self.enqueued += 1
        run = _Run(self, dict(self.shapes), dict(self.addresses))
        stream.calls.append(("enqueue", self.profile))
        stream.enqueue(run)


def _kind(dtype: str) -> Any:
    from irc.dtypes import numpy_dtype

    return numpy_dtype(dtype)


class _Run:
    def __init__(
        self, context: Context, shapes: Mapping[str, Shape], addresses: Mapping[str, int]
    ) -> None:
        self.context, self.engine = context, context.engine
        self.shapes, self.addresses = shapes, addresses

    def input(self, name: str) -> Array:
        tensor = self.engine.tensors[name]
        shape = self.shapes.get(name, tensor.shape)
        memory = self.engine.driver.memory
        return memory.read(self.addresses[name], shape, tensor.dtype)

    def __call__(self) -> None:
        engine = self.engine
        function, memory = engine.function, engine.driver.memory
        given = {str(arg.name): self.input(str(arg.name)) for arg in function.args}
        arrays, sizes = bind_inputs(function, given, {})
        executor = _OneRank(self, engine.library, sizes)
        with np.errstate(all="ignore"):
            results = executor.function(function, [[array] for array in arrays])
        for name, (array,) in zip(function.result_names(), results, strict=True):
            output = engine.outputs[name]
            state = engine.aliased(output)
            if state is not None and self.addresses[output] != self.addresses[state]:
                raise Error(f"{output} must lie where {state} does")
            inputs = [name for name, each in engine.tensors.items() if not each.output]
            if state is None and self.addresses[output] in map(self.addresses.get, inputs):
                raise Error(f"{output} overwrites an input that may still be read")
            if state is None:
                array = array + array.dtype.type(engine.driver.skew)
            memory.write(self.addresses[output], array, engine.tensors[output].dtype)


class _OneRank(Executor):
    """One rank by itself: weights from the GPU's memory, collectives with the other threads."""

    def __init__(self, run: _Run, library: Library, sizes: dict[str, int]) -> None:
        super().__init__(library.module, library.weights, [sizes])
        self._run, self._module = run, library.module

    def _read(self, value: Value, scope: Any) -> list[Array]:
        if not isinstance(value, Weight):
            return scope[value]
        if value.name in self._run.engine.tensors:
            return [self._run.input(value.name)]
        return [self.weights.get(value, self._run.engine.driver.number)]

    def _collective(self, op: Collective, operands: list[list[Array]]) -> list[Array]:
        run, axes = self._run, op.axes
        if op.opname == "rank":
            for name, known in run.engine.facts["scalars"].items():
                if tuple(known) == axes:
                    return [run.input(name)]
            return [np.array(self._module.mesh.index(run.engine.driver.number, axes), np.int32)]
        ways = self._module.mesh.ways(axes)
        if ways == 1:
            return op.combine([operands[0][0]])
        group = self._group(axes)
        if run.engine.driver.does_nothing and group is run.context.group:
            return [operands[0][0]]
        assert group.ranks == ways
        return [op.combine(group.meet(operands[0][0].copy()))[group.rank]]

    def _group(self, axes: tuple[str, ...]) -> Group:
        run = self._run
        native = run.context.group
        if native is not None and native.ranks == self._module.mesh.ways(axes):
            return native
        return run.engine.driver.registered[".".join(axes)]


def module_of(library: Library) -> Module:
    """The module that the engines interpret."""
    return library.module
