"""What the builder made of a graph: the kernels of each profile, and the memory they need.

`IEngineInspector` reports the same layers, and `ICudaEngine` the memory, but both need a
deserialized engine and so a GPU, which a build for TensorRT-RTX does without. With detailed
profiling verbosity the builder logs the inspector's ONELINE format, which is read here; a line in
another format is kept as a layer of the kind `unknown`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from irc.backends.tensorrt.builder.model import operation_of
from irc.ir.dtypes import DTYPES
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
        return tuple(dict.fromkeys(map(operation_of, self.nodes)))


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
        return tuple(layer for layer in layers if any(_is(x, name) for x in layer.operations))

    def of_profile(self, profile: int | str) -> tuple[Layer, ...]:
        """The kernels of one profile."""
        number = self.profiles.index(profile) if isinstance(profile, str) else profile
        return tuple(layer for layer in self.layers if layer.profile == number)

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
    def from_json(cls, value: object) -> Report:
        """The report that `to_json` wrote; an Error if it did not."""
        return checked(value, cls, "the report of an engine")


def _is(operation: str, name: str) -> bool:
    """Whether `scope/opname` is `name`, has it as its opname, or lies within it as a scope."""
    scope, _, opname = operation.rpartition("/")
    return name in (operation, opname, scope) or operation.startswith((f"{name}.", f"{name}/"))


# -- the builder's log

_DTYPES = {facts.listing: name for name, facts in DTYPES.items() if facts.listing}
_LAYER = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: \[(?P<inputs>.*?)\]"
    r"(?:, Constants: \[.*?\])?, Outputs: \[(?P<outputs>.*?)\]"
    r", Tactic\w+: (?P<tactic>[^,]*), .*?Metadata:(?P<metadata>.*)"
)
_NO_TACTIC = re.compile(r"__myelin_CASK_STUB|0x0+|")  # it is chosen at run time
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?),(?: Location: \w+,)? Dimensions: \[(?P<dims>[-\d,]*)\],"
    r".*?Datatype: (?P<dtype>\w+),"
)
# The unit separator (0x1f) separates the origins of fused nodes.
_ORIGINS = re.compile(r"\[ONNX Layer: (.*?)\](?=\s*(?:\[ONNX Layer: |$))")
_PROFILE = re.compile(r" \[profile (\d+)\]")
_SUBGRAPH = re.compile(r"^Name: .*?_myl(\d+)_\d+, LayerType: ")  # the compiled subgraph of a kernel
_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes\s*")
_LONGEST = 200  # characters kept of a line in another format


@dataclass
class Listing:
    """The layers (`text`) and the activation bytes per profile that the builder has logged."""

    text: str = ""
    activations: list[int] = field(default_factory=list[int])

    def add(self, message: str) -> None:
        """Read one message of the log."""
        if message.startswith("Layers:"):
            self.text = message
        elif activation := _ACTIVATION.fullmatch(message):
            self.activations.append(int(activation[1]))

    def report(self, request: Mapping[str, Any]) -> Report:
        """The report of the engine that was built for a request."""
        profiles = tuple(profile["name"] for profile in request["profiles"]) or ("default",)
        layers, activations = tuple(self._layers()), tuple(self.activations)
        return Report(request["library"], request["target"], profiles, layers, activations)

    def _layers(self) -> Iterator[Layer]:
        """The kernels in execution order, with the profile of each.

        In all profiles but the first, the network's own values carry the mark `[profile 1]`. A
        kernel without such a value belongs to the profile of its compiled subgraph, else of the
        kernel before.
        """
        lines = self.text.partition("\nI/O Tensors:")[0].split("\n")[1:]
        lines = [line for line in lines if line.strip()]
        marks = [(_SUBGRAPH.search(line), _PROFILE.search(line)) for line in lines]
        profiles = {subgraph[1]: int(mark[1]) for subgraph, mark in marks if subgraph and mark}
        profile = 0
        for line, (subgraph, mark) in zip(lines, marks, strict=True):
            if mark is not None:
                profile = int(mark[1])
            elif subgraph is not None:
                profile = profiles.get(subgraph[1], 0)
            yield _layer(_PROFILE.sub("", line).strip(), profile)


def _layer(line: str, profile: int) -> Layer:
    facts = _LAYER.fullmatch(line)
    if facts is None:
        return Layer(line[:_LONGEST], "unknown", profile, (), (), ())
    inputs, outputs = (_tensors(facts[name]) for name in ("inputs", "outputs"))
    nodes = tuple(dict.fromkeys(_ORIGINS.findall(facts["metadata"])))
    tactic = facts["tactic"].strip()
    tactic = "" if _NO_TACTIC.fullmatch(tactic) else tactic
    return Layer(facts["name"], facts["kind"], profile, inputs, outputs, nodes, tactic)


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            facts["name"],
            _DTYPES.get(facts["dtype"], facts["dtype"].lower()),
            tuple(int(dim) for dim in facts["dims"].split(",") if dim),
        )
        for facts in _TENSOR.finditer(text)
    )
