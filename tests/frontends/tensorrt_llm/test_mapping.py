"""`Mapping`: ranks, groups, and layers of stages."""

# pyright: reportCallIssue=false
# (the binder takes the arguments of every release)

import itertools
import math

import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.mapping import Mapping

WORLDS = [
    dict(zip(("pp_size", "cp_size", "tp_size", "moe_ep_size"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 4))
    if sizes[2] % sizes[3] == 0
]


def worlds(sizes: dict[str, int]) -> list[Mapping]:
    """The mapping of every rank of a world."""
    count = math.prod(size for name, size in sizes.items() if name != "moe_ep_size")
    return [Mapping(count, rank, **sizes) for rank in range(count)]


@pytest.mark.parametrize("sizes", WORLDS, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_ranks_count_through_stages_then_contexts_then_shards(sizes: dict[str, int]) -> None:
    tp, cp, ep = sizes["tp_size"], sizes["cp_size"], sizes["moe_ep_size"]
    for rank, mapping in enumerate(worlds(sizes)):
        place = rank % tp
        assert (mapping.pp_rank, mapping.cp_rank) == (rank // (tp * cp), rank // tp % cp)
        assert (mapping.tp_rank, mapping.moe_ep_rank) == (place, place % ep)
        assert mapping.moe_tp_rank == place // ep
        first = rank - place
        groups = {
            "tp": list(range(first, first + tp)),
            "pp": list(range(rank % (tp * cp), mapping.world_size, tp * cp)),
            "cp": [rank + (i - mapping.cp_rank) * tp for i in range(cp)],
            "moe_ep": [rank - place % ep + i for i in range(ep)],
            "moe_tp": [first + place % ep + i for i in range(0, tp, ep)],
        }
        for kind, group in groups.items():
            assert getattr(mapping, f"{kind}_group") == group
            axes = mapping.axis_of(group[::-1])
            if len(group) == 1:
                assert axes == ()
                continue
            assert group in mapping.mesh.groups(axes)
            assert group in getattr(mapping, f"{kind}_groups")
        assert mapping.next_pp_rank() == (rank + tp * cp) % mapping.world_size
        assert mapping.prev_pp_rank() == (rank - tp * cp) % mapping.world_size
        assert mapping.is_first_pp_rank() == (rank < tp * cp)
        assert mapping.is_last_pp_rank() == (rank >= mapping.world_size - tp * cp)
        has = (mapping.has_tp(), mapping.has_cp(), mapping.has_moe_ep(), mapping.has_moe_tp())
        assert has == (tp > 1, cp > 1, ep > 1, tp > ep)


def test_a_group_of_no_axis_names_those_there_are() -> None:
    with pytest.raises(Error, match=r"\[0, 3\] has the ranks of no axis.*tp: \[\[0, 1\], \[2, 3\]"):
        Mapping(4, 0, tp_size=2, pp_size=2).axis_of([0, 3])


def test_stages_keep_all_layers() -> None:
    for layers, stages in itertools.product(range(1, 12), (1, 2, 3, 4)):
        parts = [m.pp_layers(layers) for m in worlds({"pp_size": stages})]
        assert [layer for part in parts for layer in part] == list(range(layers))
        assert [len(part) for part in parts] == sorted(map(len, parts), reverse=True)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_experts_are_distributed() -> None:
    ranks = [Mapping(4, rank, tp_size=4, moe_ep_size=2) for rank in range(4)]
    assert [m.ep_experts(6) for m in ranks] == [[0, 1, 2], [3, 4, 5]] * 2
    with pytest.raises(ValueError, match="7 experts cannot be distributed over moe_ep_size=2"):
        ranks[0].ep_experts(7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 4, "tp_size": 2}, "world_size is 4, but tp_size"),
        ({"world_size": 2, "rank": 2, "tp_size": 2}, "no rank 2 in a world of 2"),
        ({"world_size": 4, "tp_size": 4, "moe_tp_size": 3, "moe_ep_size": 2}, "is 3 \\* 2"),
        ({"world_size": 2, "tp_size": 2, "moe_ep_size": 0}, "is 2 \\* 0"),
        ({"world_size": 2, "tp_size": 2, "moe_tp_size": -2}, "is -2 \\* 2"),
    ],
)
def test_impossible_worlds_are_a_value_error(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Mapping(**arguments)
    assert isinstance(caught.value, Error)


def test_a_config_file_holds_it() -> None:
    mapping = Mapping(8, 5, tp_size=2, pp_size=2, cp_size=2, moe_ep_size=2)
    again = Mapping.from_dict(mapping.to_dict())
    assert again == mapping and hash(again) == hash(mapping)
    again.rank = 4
    assert again != mapping and again.tp_rank == 0
    assert not hasattr(mapping, "dp_group") and not hasattr(mapping, "tp_kind")
    with pytest.raises(Error, match="Mapping has no argument 'tpsize'; did you mean 'tp_size'"):
        Mapping(tpsize=2)
    with pytest.raises(Error, match="enable_attention_dp is not supported"):
        Mapping(enable_attention_dp=True)


def test_sizes_by_position() -> None:
    for version, sizes in (("0.7", (2, 4, 1)), ("0.11", (2, 4, 1)), ("0.13", (4, 1, 2))):
        with new_session(version):
            mapping = Mapping(8, 0, 8, 2, 4)
        assert (mapping.tp_size, mapping.pp_size, mapping.cp_size) == sizes
    with new_session("0.16"), pytest.raises(Error, match="takes 3 positional arguments"):
        Mapping(8, 0, 8, 2, 4)
