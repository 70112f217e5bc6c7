"""Which collectives TensorRT runs itself, and which our plugin runs through NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from irc.backends.tensorrt.lowering.table import Row
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.backends.tensorrt.target import Flavour, Target
from irc.collectives import OPERATIONS, ROOTED

Collectives: TypeAlias = Literal["auto", "native", "plugin"]

# Native ones that the builder refuses in bf16; f32 holds the same values.
WITHOUT_BF16 = ROOTED


@dataclass(frozen=True)
class Verdict:
    """What is known of a native collective in some versions of a flavour."""

    flavour: Flavour
    since: tuple[int, int]
    before: tuple[int, int]
    operations: tuple[str, ...]
    good: bool
    reason: str
    source: str

    def about(self, operation: str, target: Target) -> bool:
        """Whether it speaks of an operation for a target."""
        within = self.since <= target.version < self.before
        return target.flavour == self.flavour and within and operation in self.operations


_ALWAYS = (1 << 30, 0)
VERDICTS = (
    Verdict(
        "tensorrt",
        (11, 0),
        (11, 1),
        OPERATIONS,
        False,
        "engines of 11.0 may bind no communicator and leave every value as it was",
        "pytorch/TensorRT #4381",
    ),
    Verdict(
        "tensorrt",
        (11, 2),
        _ALWAYS,
        ("all_reduce",),
        True,
        "the sum over all ranks was right on 8 GPUs with 11.2.1; sub-groups were not",
        "pytorch/TensorRT #4380",
    ),
    Verdict(
        "tensorrt",
        (11, 0),
        _ALWAYS,
        OPERATIONS,
        False,
        "no report of right results; a fused all_gather is rejected by the builder",
        "pytorch/TensorRT #4380, #4388",
    ),
    Verdict(
        "tensorrt-rtx",
        (1, 0),
        _ALWAYS,
        OPERATIONS,
        False,
        "the builder accepts them, and no run on a GPU has been reported",
        "layer dump of the TensorRT-RTX 1.7.1.116 builder on CPU",
    ),
)


def verdict(operation: str, target: Target) -> Verdict:
    """What is known of a native collective for a target."""
    return next(each for each in VERDICTS if each.about(operation, target))


def is_native(operation: str, target: Target, whole: bool, wanted: Collectives) -> bool:
    """Whether a collective is written as TensorRT's own node.

    `whole`: whether its group is all ranks that run the engine; native sub-groups are ignored by
    TensorRT 11.2, so those are the plugin's.
    """
    if wanted == "plugin":
        return False
    return whole and (wanted == "native" or verdict(operation, target).good)


def native_rows(target: Target) -> list[Row]:
    """The choices for collectives among all ranks of an engine."""
    found: list[Row] = []
    for operation in OPERATIONS:
        known = verdict(operation, target)
        choice = "DistCollective" if known.good else COLLECTIVE_PLUGIN
        name = operation if operation not in ("gather", "scatter") else f"collective_{operation}"
        found.append(Row(name, choice, known.reason, known.source))
    return found
