"""What a build made of a graph: kernels, their origins and dtypes, memory, inputs, outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from irc.backends.tensorrt.builder.model import operation_of

Dims: TypeAlias = tuple[int, ...]  # -1 where a dimension is dynamic
Range: TypeAlias = tuple[Dims, Dims, Dims]  # smallest, typical, largest


@dataclass(frozen=True)
class Tensor:
    """A value between two kernels; `dtype` is irc's name, `bf16`."""

    name: str
    dtype: str
    dims: Dims


@dataclass(frozen=True)
class Layer:
    """One kernel of one profile, and the ONNX nodes that went into it.

    `kind` is TensorRT's word: `gemm`, `runtime_fusion` (a product with what stands before or after
    it), `kgen` (generated), `comm_allreduce` and its like, `custom_layer` (a plugin), `copy`,
    `shape_call` and others.
    """

    name: str
    kind: str
    profile: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    nodes: tuple[str, ...]
    tactic: str = ""

    @property
    def operations(self) -> tuple[str, ...]:
        """The IR operations that went into it, as `scope/opname`, each once."""
        return tuple(dict.fromkeys(operation_of(node) for node in self.nodes))


@dataclass(frozen=True)
class Memory:
    """Bytes of one profile: activations (`activation`), of which one kernel needs `scratch`."""

    profile: int
    activation: int
    scratch: int


@dataclass(frozen=True)
class Port:
    """An input or output of the engine. `ranges` has an entry per profile, for inputs."""

    name: str
    is_input: bool
    dtype: str
    dims: Dims
    ranges: tuple[Range, ...] = ()
    shape_values: bool = False


@dataclass(frozen=True)
class Report:
    """What is known of an engine without running it. `weights` are the bytes of its constants."""

    library: str
    target: str
    profiles: tuple[str, ...]
    layers: tuple[Layer, ...]
    ports: tuple[Port, ...]
    memory: tuple[Memory, ...]
    weights: int = 0
    engine_bytes: int = 0
    multi_device: bool = False
    warnings: tuple[str, ...] = ()

    def layers_of(self, name: str, profile: int | str | None = None) -> tuple[Layer, ...]:
        """The kernels that an operation went into: by opname (`linear`), or by scope."""
        wanted = self.profiles.index(profile) if isinstance(profile, str) else profile
        return tuple(
            layer
            for layer in self.layers
            if wanted in (None, layer.profile)
            and any(_belongs(operation, name) for operation in layer.operations)
        )

    def of_profile(self, profile: int | str) -> tuple[Layer, ...]:
        """The kernels of one profile."""
        wanted = self.profiles.index(profile) if isinstance(profile, str) else profile
        return tuple(layer for layer in self.layers if layer.profile == wanted)

    def kinds(self, profile: int | str) -> dict[str, int]:
        """How many kernels of each kind a profile has, in the order they first occur."""
        counts: dict[str, int] = {}
        for layer in self.of_profile(profile):
            counts[layer.kind] = counts.get(layer.kind, 0) + 1
        return counts

    def rows(
        self, profile: int | str = 0, name: str | None = None
    ) -> list[tuple[str, str, str, str]]:
        """(kind, dtype, kernel, operations) per kernel that does work, for a table; with a name
        those that an operation or scope went into."""
        layers = self.of_profile(profile) if name is None else self.layers_of(name, profile)
        return [
            (
                layer.kind,
                "+".join(dict.fromkeys(tensor.dtype for tensor in layer.outputs)) or "-",
                layer.tactic or layer.name,
                ", ".join(layer.operations) or "-",
            )
            for layer in layers
            if layer.kind != "shape_call"
        ]

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Report:
        """The report that `to_json` wrote; KeyError or TypeError where it did not."""
        return cls(
            found["library"],
            found["target"],
            tuple(found["profiles"]),
            tuple(_layer(each) for each in found["layers"]),
            tuple(_port(each) for each in found["ports"]),
            tuple(Memory(**each) for each in found["memory"]),
            found["weights"],
            found["engine_bytes"],
            found["multi_device"],
            tuple(found["warnings"]),
        )


def _belongs(operation: str, name: str) -> bool:
    """Whether `scope/opname` is `name`, has it as its opname, or lies within it as a scope."""
    scope, _, opname = operation.rpartition("/")
    return name in (operation, opname, scope) or operation.startswith((f"{name}.", f"{name}/"))


def _layer(found: Mapping[str, Any]) -> Layer:
    return Layer(
        found["name"],
        found["kind"],
        found["profile"],
        _tensors(found["inputs"]),
        _tensors(found["outputs"]),
        _tensors(found["constants"]),
        tuple(found["nodes"]),
        found["tactic"],
    )


def _tensors(found: Iterable[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(each["name"], each["dtype"], tuple(each["dims"])) for each in found)


def _port(found: Mapping[str, Any]) -> Port:
    ranges = tuple((tuple(low), tuple(usual), tuple(high)) for low, usual, high in found["ranges"])
    return Port(
        found["name"],
        found["is_input"],
        found["dtype"],
        tuple(found["dims"]),
        ranges,
        found["shape_values"],
    )
