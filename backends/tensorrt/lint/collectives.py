"""Rules about native collectives: DistCollective."""

from __future__ import annotations

from collections.abc import Iterator

from onnx.onnx_ml_pb2 import TensorProto

from irc.backends.tensorrt.lint.graph import Graph, Node, dtype_name
from irc.backends.tensorrt.lint.rules import BUILDER, IMPORTERS, Complaint, graph_rule, node_rule
from irc.backends.tensorrt.target import Target
from irc.collectives import OPERATIONS, REDUCING, ROOTED
from irc.errors import did_you_mean

KIND = "DistCollective"
SIZED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")  # by nb_rank
CUT = ("reduce_scatter", "all_to_all", "scatter")
REDUCTIONS = ("sum", "prod", "max", "min", "avg")
_REFUSED = (
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT4E2M1,
    TensorProto.INT4,
)
_THREAD = "https://github.com/pytorch/TensorRT/issues/4381"
_GROUPS = "https://github.com/pytorch/TensorRT/pull/4380"


@node_rule(KIND, source=IMPORTERS)
def collective_operation(node: Node, target: Target) -> Iterator[str]:
    """The operation is one of eight, in lower case."""
    given = node.text("collective_operation")
    if given is None:
        yield f"collective_operation is missing; write one of {', '.join(OPERATIONS)}"
    elif given not in OPERATIONS:
        hint = did_you_mean(_snake(given), OPERATIONS)
        yield f"no collective_operation {given!r}{hint}; write one of {', '.join(OPERATIONS)}"


@node_rule(KIND, source=f"{IMPORTERS}; {BUILDER}")
def collective_reduction(node: Node, target: Target) -> Iterator[str]:
    """reduce_op is always written: a reduction where the operation reduces, else none."""
    given, what = node.text("reduce_op"), _operation(node)
    if given is None:
        yield 'reduce_op is missing; write it, "none" where nothing is reduced'
    elif given not in (*REDUCTIONS, "none"):
        yield f"no reduce_op {given!r}; write one of {', '.join(REDUCTIONS)}, none"
    elif what in REDUCING and given == "none":
        yield f"{what} has the reduce_op none; write one of {', '.join(REDUCTIONS)}"
    elif what and what not in REDUCING and given != "none":
        yield f'{what} reduces nothing and has the reduce_op {given}; write "none"'


@node_rule(KIND, source=f"{IMPORTERS}; {BUILDER}")
def collective_root(node: Node, target: Target) -> Iterator[str]:
    """root is -1 unless the operation has one; the attribute's default is 0, so it is written."""
    what, root = _operation(node), node.number("root", 0)
    given = "root" in node.attributes
    if what in ROOTED and root < 0:
        yield f"{what} has the root {root}; write the position of one of the ranks"
    elif what in ROOTED and root >= node.number("nb_rank", 1) > 1:
        yield f"root is {root}, of {node.number('nb_rank', 1)} ranks; write one below"
    elif what and what not in ROOTED and root != -1:
        yield f"{what} has {f'the root {root}' if given else 'no root'}; write root = -1"


@node_rule(KIND, source=f"{IMPORTERS}; {BUILDER}")
def collective_group_size(node: Node, target: Target) -> Iterator[str]:
    """group_size counts the ranks in groups, 0 where there are none; a rank stands there once."""
    groups, size = node.numbers("groups"), node.number("group_size", 0)
    if size != len(groups):
        yield f"group_size is {size} and groups has {len(groups)} ranks; write the same number"
    if len(set(groups)) < len(groups):
        yield f"groups {groups} names a rank twice; name each once"


@node_rule(KIND, source=f"{IMPORTERS}; {BUILDER}")
def collective_ranks(node: Node, target: Target) -> Iterator[str]:
    """nb_rank, not groups, says how many ranks take part; the default is 1."""
    ranks, groups = node.number("nb_rank", 1), node.numbers("groups")
    if ranks <= 1:
        yield (
            "nb_rank is 1, so that the engine is none for several GPUs; write the number of "
            "ranks, or leave the node out where there is one"
        )
    elif groups and len(groups) != ranks:
        yield f"nb_rank is {ranks} and groups has {len(groups)} ranks; write the same number"


@node_rule(KIND, source=BUILDER)
def collective_dim_0(node: Node, target: Target) -> Iterator[str]:
    """Parts lie along dimension 0, which divides evenly; a scalar has none and ends the process."""
    what, shape, ranks = _operation(node), node.shape(0), node.number("nb_rank", 1)
    if shape is None or what not in SIZED:
        return
    if not shape:
        yield f"{what} works along dimension 0, and a scalar has none; reshape it to [1]"
    elif what in CUT and ranks > 1 and isinstance(shape[0], int) and shape[0] % ranks:
        yield f"{what} cuts dimension 0, {shape[0]}, into {ranks} equal parts; pad it to a multiple"


@node_rule(KIND, source=BUILDER)
def collective_dtype(node: Node, target: Target) -> Iterator[str]:
    """Quantized values cannot be communicated."""
    if node.dtype(0) in _REFUSED:
        yield f"{dtype_name(node.dtype(0))} cannot be communicated; dequantize before"


@node_rule(
    KIND,
    source="https://docs.nvidia.com/deeplearning/tensorrt/latest (multi-device inference)",
    architectures=(70, 72, 75),
    warns_on=("tensorrt-rtx",),
)
def collective_architecture(node: Node, target: Target) -> Iterator[str]:
    """Collectives run on sm_80 and newer."""
    yield f"collectives need sm_80, and the target is {target}; leave older architectures out"


@graph_rule(source=_GROUPS, warns_on=("tensorrt-rtx",))
def collective_subgroup(graph: Graph, target: Target) -> Iterator[Complaint]:
    """A group that is not the whole communicator is ignored without a word, or fails.

    Seen on TensorRT 11.2.1.2; the largest group of the model is taken for the communicator.
    """
    groups = {id(node): _group(node) for node in graph.of_kind(KIND)}
    world = max(map(len, groups.values()), default=0)
    for node in graph.of_kind(KIND):
        group = groups[id(node)]
        if group != list(range(world)):
            yield (
                node,
                f"the group {group} is a part of the ranks, and TensorRT takes all of them; "
                "use the plugin IrcCollective (irc compile --collectives plugin)",
            )


@node_rule(
    KIND,
    source="https://github.com/pytorch/TensorRT (nccl_ops.py: groups=[] can be a no-op)",
    severity="warning",
    flavours=("tensorrt",),
)
def collective_empty_groups(node: Node, target: Target) -> Iterator[str]:
    """Without groups a collective can become a no-op; explicit ranks are preferred."""
    if not node.numbers("groups") and node.number("nb_rank", 1) > 1:
        yield "groups is empty, which can do nothing at all; write every rank, and group_size"


@graph_rule(source=_THREAD, severity="warning", flavours=("tensorrt",))
def collective_in_fusion(graph: Graph, target: Target) -> Iterator[Complaint]:
    """A collective that is fused with its neighbours may find no implementation in deep graphs.

    A real change of dtype before and after keeps it apart. Told once per graph.
    """
    for node in graph.of_kind(KIND):
        before, after = node.producer(0), node.users()
        kinds = [before.kind if before else "", *(each.kind for each in after)]
        if any(kind not in ("", "Cast") for kind in kinds):
            yield (
                node,
                "a deep graph may fail to build (CollectiveOperation not supported); if it does, "
                "put Casts around every collective, or use the plugin IrcCollective",
            )
            return


@graph_rule(source=_GROUPS, severity="warning", flavours=("tensorrt",))
def collective_all_gather(graph: Graph, target: Target) -> Iterator[Complaint]:
    """A fused all_gather is refused even with nb_rank: pad with zeros and all_reduce instead.

    Told once per graph.
    """
    for node in graph.of_kind(KIND):
        if _operation(node) == "all_gather":
            yield (
                node,
                "the build may fail (AllGather requires world_size); if it does, pad with zeros "
                "and use all_reduce, or use the plugin IrcCollective",
            )
            return


@graph_rule(source=_THREAD, severity="warning", flavours=("tensorrt",), before=(11, 1))
def collective_silent(graph: Graph, target: Target) -> Iterator[Complaint]:
    """TensorRT 11.0 built engines whose collectives did nothing. Told once per graph."""
    for node in graph.of_kind(KIND):
        yield (
            node,
            f"{target} built engines whose collectives did nothing; use a newer TensorRT or the "
            "plugin IrcCollective, and keep the self-test at load",
        )
        return


def _operation(node: Node) -> str:
    given = node.text("collective_operation", "")
    return given if given in OPERATIONS else ""


def _group(node: Node) -> list[int]:
    return node.numbers("groups") or list(range(node.number("nb_rank", 1)))


def _snake(name: str) -> str:
    """`all_reduce` for AllReduce."""
    spaced = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return spaced.strip("_")
