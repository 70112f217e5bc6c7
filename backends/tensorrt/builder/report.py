"""What the builder made of a graph: the kernels of each profile, and the memory they need."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from irc.backends.tensorrt.builder.model import operation_of
from irc.schema import checked

Dims: TypeAlias = tuple[int, ...]  # -1 for a dynamic dimension


@dataclass(frozen=True)
class Tensor:
    """An operand or result of a kernel; `dtype` is irc's name, `bf16`."""

    name: str
    dtype: str
    dims: Dims


@dataclass(frozen=True)
class Layer:
    """One kernel of one profile, and the ONNX nodes that it computes.

    `kind` is TensorRT's word: `gemm`, `runtime_fusion` (a product fused with its neighbours),
    `kgen` (generated), `comm_allreduce` and other collectives, `custom_layer` (a plugin), `copy`,
    `shape_call` and others. `tactic` names the implementation, "" if it is chosen at run time.
    """

    name: str
    kind: str
    profile: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    nodes: tuple[str, ...]
    tactic: str = ""

    @property
    def operations(self) -> tuple[str, ...]:
        """The IR operations that it computes, as `scope/opname`, each once."""
        return tuple(dict.fromkeys(operation_of(node) for node in self.nodes))


@dataclass(frozen=True)
class Report:
    """What is known of an engine without running it; `activations` are bytes per profile."""

    library: str
    target: str
    profiles: tuple[str, ...]
    layers: tuple[Layer, ...]
    activations: tuple[int, ...]

    def layers_of(self, name: str, profile: int | str | None = None) -> tuple[Layer, ...]:
        """The kernels that compute an operation: by opname (`linear`), or by scope."""
        layers = self.layers if profile is None else self.of_profile(profile)
        return tuple(x for x in layers if any(_belongs(each, name) for each in x.operations))

    def of_profile(self, profile: int | str) -> tuple[Layer, ...]:
        """The kernels of one profile."""
        wanted = self.profiles.index(profile) if isinstance(profile, str) else profile
        return tuple(layer for layer in self.layers if layer.profile == wanted)

    def kinds(self, profile: int | str) -> dict[str, int]:
        """The number of kernels of each kind in a profile, in the order they first occur."""
        return dict(Counter(layer.kind for layer in self.of_profile(profile)))

    def rows(
        self, profile: int | str = 0, name: str | None = None
    ) -> list[tuple[str, str, str, str]]:
        """(kind, dtype, kernel, operations) of each kernel, or of those of an operation or scope;
        kernels that only compute shapes are left out."""
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
        """The report as JSON; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: object) -> Report:
        """The report that `to_json` wrote; an Error if it did not."""
        return checked(found, cls, "the report of an engine")


def _belongs(operation: str, name: str) -> bool:
    """Whether `scope/opname` is `name`, has it as its opname, or lies within it as a scope."""
    scope, _, opname = operation.rpartition("/")
    return name in (operation, opname, scope) or operation.startswith((f"{name}.", f"{name}/"))
