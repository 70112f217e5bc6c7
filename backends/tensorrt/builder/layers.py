"""Reads the list of kernels that the builder prints in detail, and its lines about memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from irc.backends.tensorrt.builder.report import Dims, Layer, Memory, Port, Range, Report, Tensor

_DTYPES = {
    "Float": "f32",
    "Half": "f16",
    "BFloat16": "bf16",
    "Int64": "i64",
    "Int32": "i32",
    "Int8": "i8",
    "UInt8": "u8",
    "Bool": "bool",
    "FP8": "f8e4m3",
    "Int4": "i4",
    "FP4": "f4e2m1",
}
_LAYER = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: \[(?P<inputs>.*?)\]"
    r"(?:, Constants: \[(?P<constants>.*?)\])?, Outputs: \[(?P<outputs>.*?)\]"
    r", Tactic\w+: (?P<tactic>[^,]*), .*?Metadata:(?P<metadata>.*)"
)
# What is chosen only when the engine runs: neither says anything.
_NO_TACTIC = re.compile(r"__myelin_CASK_STUB|0x0+|")
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?),(?: Location: \w+,)? Dimensions: \[(?P<dims>[-\d,]*)\],"
    r".*?Datatype: (?P<dtype>\w+),"
)
_PORT = re.compile(
    r"\s*Name: (?P<name>.*?), IOMode: (?P<mode>\w+), DataType: (?P<dtype>\w+), "
    r"Dimensions: \[(?P<dims>[-\d,]*)\], .*?IsShapeInferenceIO: (?P<shape>\w+)"
    r"(?P<profiles>.*)"
)
_RANGE = re.compile(
    r"MinShape: \[(?P<min>[-\d,]*)\], OptShape: \[(?P<opt>[-\d,]*)\], "
    r"MaxShape: \[(?P<max>[-\d,]*)\]"
)
# The unit separator (0x1f) stands between the origins of what was fused.
_ORIGINS = re.compile(r"\[ONNX Layer: (.*?)\](?=\s*(?:\[ONNX Layer: |$))")
_PROFILE = re.compile(r" \[profile (\d+)\]")
_PART = re.compile(r"_myl(\d+)_\d+$")  # which compiled part of the graph a kernel belongs to
_MEMORY = {
    "Total Activation Memory": "activation",
    "Max Scratch Memory": "scratch",
    "Total Weights Memory": "weights",
}
_BYTES = re.compile(rf"(?P<what>{'|'.join(_MEMORY)}): (?P<bytes>\d+) bytes")
_SKIPPED = 200  # characters kept of a line that reads otherwise


@dataclass
class Listing:
    """Collects from the builder's messages what a report is made of."""

    text: str = ""
    activation: list[int] = field(default_factory=list[int])
    scratch: list[int] = field(default_factory=list[int])
    weights: list[int] = field(default_factory=list[int])

    def hear(self, text: str) -> None:
        """Take one message."""
        if text.startswith("Layers:"):
            self.text = text
        elif found := _BYTES.fullmatch(text.strip()):
            kept: list[int] = getattr(self, _MEMORY[found["what"]])
            kept.append(int(found["bytes"]))

    def report(
        self, library: str, target: str, profiles: Iterable[str], engine_bytes: int
    ) -> Report:
        """Everything heard, as a report."""
        memory = zip(self.activation, self.scratch, strict=False)
        return Report(
            library,
            target,
            tuple(profiles),
            layers=tuple(layers_of(self.text)),
            ports=tuple(ports_of(self.text)),
            memory=tuple(Memory(i, *each) for i, each in enumerate(memory)),
            weights=max(self.weights, default=0),
            engine_bytes=engine_bytes,
            multi_device="Multi-Device: Enabled" in self.text,
        )


def layers_of(text: str) -> Iterator[Layer]:
    """The kernels, in the order they run, with the profile each belongs to."""
    lines = text.partition("\nI/O Tensors:")[0].split("\n")[1:]
    lines = [line for line in lines if line.strip()]
    profiles = _profiles(lines)
    for line, profile in zip(lines, profiles, strict=True):
        yield _layer(_PROFILE.sub("", line), profile)


def _layer(line: str, profile: int) -> Layer:
    found = _LAYER.fullmatch(line.strip())
    if found is None:
        return Layer(line[:_SKIPPED], "unknown", profile, (), (), (), ())
    return Layer(
        found["name"],
        found["kind"],
        profile,
        _tensors(found["inputs"]),
        _tensors(found["outputs"]),
        _tensors(found["constants"] or ""),
        tuple(dict.fromkeys(_ORIGINS.findall(found["metadata"]))),
        "" if _NO_TACTIC.fullmatch(found["tactic"].strip()) else found["tactic"].strip(),
    )


def _profiles(lines: list[str]) -> list[int]:
    """The profile of each kernel.

    All but the first profile mark the values of the network with `[profile 1]`. A kernel between
    values of its own has no mark; then another one of its compiled part has, or the one before.
    """
    marks = [_PROFILE.search(line) for line in lines]
    parts = [
        _PART.search(line.removeprefix("Name: ").partition(", LayerType: ")[0]) for line in lines
    ]
    marked = {
        part[1]: int(mark[1])
        for part, mark in zip(parts, marks, strict=True)
        if part is not None and mark is not None
    }
    found: list[int] = []
    for part, mark in zip(parts, marks, strict=True):
        before = found[-1] if found else 0
        if mark is not None:
            found.append(int(mark[1]))
        elif part is not None:
            found.append(marked.get(part[1], 0))
        else:
            found.append(before)
    return found


def ports_of(text: str) -> Iterator[Port]:
    """The inputs and outputs of the engine, with the shapes that each profile allows."""
    lines = text.partition("\nI/O Tensors:\n")[2].partition("\n\n")[0].split("\n")
    for found in filter(None, map(_PORT.fullmatch, lines)):
        is_input = found["mode"] == "Input"
        yield Port(
            found["name"],
            is_input,
            _dtype(found["dtype"]),
            _dims(found["dims"]),
            tuple(_ranges(found["profiles"])) if is_input else (),
            found["shape"] == "true",
        )


def _ranges(text: str) -> Iterator[Range]:
    for found in _RANGE.finditer(text):
        yield _dims(found["min"]), _dims(found["opt"]), _dims(found["max"])


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(found["name"], _dtype(found["dtype"]), _dims(found["dims"]))
        for found in _TENSOR.finditer(text)
    )


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name.lower())


def _dims(text: str) -> Dims:
    return tuple(int(each) for each in text.split(",") if each)
