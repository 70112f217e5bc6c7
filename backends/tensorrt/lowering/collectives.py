"""Which collectives TensorRT computes itself, and which irc's plugin computes with NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from irc.backends.tensorrt.target import BUILDER, Scope, Target
from irc.ops.collective_names import OPERATIONS, ROOTED

Collectives: TypeAlias = Literal["auto", "native", "plugin"]

# Native ones that the builder refuses in bf16; f32 holds the same values.
WITHOUT_BF16 = ROOTED


@dataclass(frozen=True, kw_only=True)
class Support(Scope):
    """What is known of native collectives in the versions of a flavour."""

    operations: tuple[str, ...] = OPERATIONS
    is_correct: bool = False
    reason: str
    source: str


SUPPORT = (  # the first that includes operation and target counts
    Support(
        flavour="tensorrt",
        before=(11, 1),
        reason="engines of 11.0 may bind no communicator and leave every value as it was",
        source="pytorch/TensorRT #4381",
    ),
    Support(
        flavour="tensorrt",
        since=(11, 2),
        operations=("all_reduce",),
        is_correct=True,
        reason="the sum over all ranks was right on 8 GPUs with 11.2.1; sub-groups were not",
        source="pytorch/TensorRT #4380",
    ),
    Support(
        flavour="tensorrt",
        reason="no report of right results; the builder rejects a fused all_gather",
        source="pytorch/TensorRT #4380, #4388",
    ),
    Support(
        reason="the builder accepts them, and no run on a GPU has been reported", source=BUILDER
    ),
)


def support_of(operation: str, target: Target) -> Support:
    """What is known of a native collective for a target."""
    known = (each for each in SUPPORT if operation in each.operations)
    return next(each for each in known if each.includes(target))


def is_native(operation: str, target: Target, all_ranks: bool, wanted: Collectives) -> bool:
    """Whether a collective becomes TensorRT's own node.

    `all_ranks`: whether its group is all ranks that run the engine. TensorRT 11.2 ignores native
    sub-groups, so those are the plugin's.
    """
    if wanted == "plugin" or not all_ranks:
        return False
    return wanted == "native" or support_of(operation, target).is_correct
