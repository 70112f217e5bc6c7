"""Messages of a module: those of the collectives that its ranks execute, in either view."""

from typing import Any
from unittest import mock

import numpy as np
import pytest

import irc.passes  # noqa: F401  (registers the passes)
from irc.analysis.communication import Message, messages
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.analysis.topology import Topology, sent
from irc.analysis.topology_file import default_topology
from irc.backends.reference import evaluate_ranks
from irc.ir.core import Module
from irc.ops.collective import Exchange
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.analysis.local_samples import block_sample
from tests.sharded.models import MODELS

Summary = tuple[str, int, int]  # kind, ranks, bytes of the whole tensor


def performed(module: Module, inputs: dict[str, Any]) -> list[Summary]:
    """The collectives that the ranks of the first group execute, from the arrays."""
    found: list[Summary] = []
    seen: set[int] = set()

    def watching(cls: type[Exchange]) -> Any:
        plain = cls.combine

        def combine(op: Exchange, shards: list[np.ndarray]) -> list[np.ndarray]:
            results = plain(op, shards)
            if id(op) not in seen:
                seen.add(id(op))
                size = max(shards[0].nbytes, results[0].nbytes)
                kind = op.opname.removeprefix("collective_")
                found.append((kind, len(shards), size))
            return results

        return mock.patch.object(cls, "combine", combine)

    patches = [watching(cls) for cls in Exchange.__subclasses__() if "combine" in cls.__dict__]
    for patch in patches:
        patch.start()
    try:
        evaluate_ranks(module, inputs)
    finally:
        for patch in patches:
            patch.stop()
    return found


def summary(found: list[Message]) -> list[Summary]:
    return [(each.kind, each.group_size, each.size) for each in found]


def all_of(module: Module, topology: Topology | None = None) -> list[Message]:
    sizes = LocalSizes(module.mesh, typical_sizes(module))
    return messages(module.main, sizes, topology or default_topology())


@pytest.mark.parametrize("seed", range(25))
def test_messages_are_those_that_ranks_execute(seed: int) -> None:
    sample = block_sample(seed)
    module = parse_module(sample.text)
    found = all_of(module)
    assert summary(found) == performed(module, dict(sample.inputs))
    assert found
    for each in found:
        assert each.sent == sent(each.kind, each.group_size, each.size)
        assert each.us > 0


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2, tp=2"])
@pytest.mark.parametrize("model", ["gqa", "tied_prime", "all_bias"])
def test_both_views_have_the_same_messages(model: str, mesh: str) -> None:
    module = MODELS[model]()
    run_pipeline(module, f'inline, cse, shard{{mesh="{mesh}"}}')
    before = summary(all_of(module))
    run_pipeline(module, "localize, dce")
    assert summary(all_of(module)) == before
    assert [kind for kind, _, _ in before].count("all_reduce") >= 2 * 3


TEXT = """module @m local mesh(pp=2, tp=4) {{
  func @forward(%x: bf16[8, 6]{{varies pp tp}}) -> (bf16[8, 6]{{varies pp tp}}) {{
    %a = all_reduce %x {{axis="{axis}", group_size={group_size}}} : bf16[8, 6]{{varies pp tp}}
    return %a
  }}
}}"""


def test_a_group_that_spans_hosts_takes_the_link_between_them() -> None:
    topology = default_topology()
    (near,) = all_of(parse_module(TEXT.format(axis="tp", group_size=4)))
    assert (near.link, near.group_size, near.size, near.sent) == ("nvlink", 4, 96, 2 * 3 / 4 * 96)
    small = Topology("two hosts", topology.device, topology.links, "nvlink", "ethernet", 4)
    (near,) = all_of(parse_module(TEXT.format(axis="tp", group_size=4)), small)
    (far,) = all_of(parse_module(TEXT.format(axis="pp", group_size=2)), small)
    (whole,) = all_of(parse_module(TEXT.format(axis="pp.tp", group_size=8)), small)
    assert (near.link, far.link, whole.link) == ("nvlink", "ethernet", "ethernet")
    assert far.us > near.us


def test_fused_collectives_count() -> None:
    module = parse_module(
        """module @m local mesh(tp=2) {
  weight @w : f32[6] = unbound("w")
  func @forward(%x: f32[8, 6]{sum tp}, %r: f32[8, 6]) -> (f32[8, 6], f32[8, 6]) {
    %n, %s = all_reduce_rms_norm %x, %r, @w {axis="tp", group_size=2} : f32[8, 6], f32[8, 6]
    return %n, %s
  }
}"""
    )
    assert summary(all_of(module)) == [("all_reduce", 2, 192)]


@pytest.mark.parametrize(
    ("line", "results", "found"),
    [
        (
            '%v, %i = sharded_topk %x {k=2, axis="tp"} : f32[3, 2], i32[3, 2]',
            "f32[3, 2], i32[3, 2]",
            [("all_gather", 4, 4 * 3 * 2 * 4)] * 2,
        ),
        ('%v = sharded_max %x {axis="tp"} : f32[3, 1]', "f32[3, 1]", [("all_reduce", 4, 3 * 4)]),
    ],
)
def test_candidates_only_are_sent(
    line: str, results: str, found: list[tuple[str, int, int]]
) -> None:
    text = f"""module @m mesh(tp=4) {{
  func @forward(%x: f32[3, 40@tp]) -> ({results}) {{
    {line}
    return {line.partition(" = ")[0]}
  }}
}}"""
    module = parse_module(text)
    before = all_of(module)
    assert summary(before) == found
    run_pipeline(module, "localize")
    assert sum(each.sent for each in all_of(module)) == sum(each.sent for each in before)
