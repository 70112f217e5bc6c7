"""Reads the kernels and the activation memory of an engine from the builder's log.

`IEngineInspector` reports the same layers, and `ICudaEngine` the memory, but both need a
deserialized engine and so a GPU, which a build for TensorRT-RTX does without. With detailed
profiling verbosity the builder logs the inspector's ONELINE format, which is read here; a line in
another format is kept as a layer of the kind `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from irc.backends.tensorrt.builder.report import Layer, Tensor
from irc.ir.dtypes import DTYPES

# The log's names of dtypes.
_DTYPES = {each.listing: name for name, each in DTYPES.items() if each.listing}
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
        elif found := _ACTIVATION.fullmatch(message):
            self.activations.append(int(found[1]))


def layers_of(text: str) -> Iterator[Layer]:
    """The kernels of a listing in execution order, with the profile of each."""
    lines = text.partition("\nI/O Tensors:")[0].split("\n")[1:]
    lines = [line for line in lines if line.strip()]
    for line, profile in zip(lines, _profiles(lines), strict=True):
        yield _layer(_PROFILE.sub("", line).strip(), profile)


def _layer(line: str, profile: int) -> Layer:
    found = _LAYER.fullmatch(line)
    if found is None:
        return Layer(line[:_LONGEST], "unknown", profile, (), (), ())
    tactic = found["tactic"].strip()
    return Layer(
        found["name"],
        found["kind"],
        profile,
        _tensors(found["inputs"]),
        _tensors(found["outputs"]),
        tuple(dict.fromkeys(_ORIGINS.findall(found["metadata"]))),
        "" if _NO_TACTIC.fullmatch(tactic) else tactic,
    )


def _profiles(lines: list[str]) -> list[int]:
    """The profile of each kernel.

    In all profiles but the first, the network's own values carry the mark `[profile 1]`. A kernel
    without such a value belongs to the profile of its compiled subgraph, else of the kernel before.
    """
    marks = [_PROFILE.search(line) for line in lines]
    subgraphs = [_SUBGRAPH.search(line) for line in lines]
    marked = {
        subgraph[1]: int(mark[1])
        for subgraph, mark in zip(subgraphs, marks, strict=True)
        if subgraph is not None and mark is not None
    }
    found = [0]
    for subgraph, mark in zip(subgraphs, marks, strict=True):
        if mark is not None:
            found.append(int(mark[1]))
        else:
            found.append(found[-1] if subgraph is None else marked.get(subgraph[1], 0))
    return found[1:]


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            found["name"],
            _DTYPES.get(found["dtype"], found["dtype"].lower()),
            tuple(int(each) for each in found["dims"].split(",") if each),
        )
        for found in _TENSOR.finditer(text)
    )
