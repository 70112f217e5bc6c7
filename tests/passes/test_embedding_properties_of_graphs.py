"""Properties of rewrite-embeddings: capacity, slots, checkpoints, tied tables, groups, costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.analysis.communication import messages
from irc.analysis.sizes import LocalSizes
from irc.analysis.topology_file import default_topology
from irc.backends.reference import evaluate
from irc.frontends import layers
from irc.frontends.layers.index import FrozenIndex, frozen_levels
from irc.ir.core import Module
from irc.ops import ScatterElements
from irc.ops.collective import Collective
from irc.passes.embeddings import tables
from irc.passes.embeddings.cost import CostContext, candidate
from irc.passes.embeddings.schemes import LAYOUTS, Site, find_site
from irc.pipeline import run_pipeline
from irc.text import parse_module
from irc.weights import FileRef
from irc.weights.checkpoint import Reader
from tests.fresh import fresh
from tests.passes.embedding_lab import (
    CYCLIC,
    GROUP_SIZES,
    PAIRS,
    Array,
    Lab,
    assert_same,
    distinct,
    drawn,
    localized,
    looked_up,
    on_ranks,
    write_table,
)


def overflowing(
    ids: Array, rows: int, group_size: int, capacity: int, wanted: str
) -> tuple[Array, int]:
    """Whether each id exceeds the capacity; the capacity that all ids need."""
    lost = np.zeros(ids.shape, bool)
    used: dict[tuple[int, int], int] = {}
    dim = {"replicated": None, "scattered": 1, "sharded": 0}[wanted]
    for place in np.ndindex(*ids.shape):
        if not 0 <= ids[place] < rows:
            continue
        part = 0 if dim is None else place[dim] // -(-ids.shape[dim] // group_size)
        queue = part, int(ids[place]) % group_size
        lost[place] = used.setdefault(queue, 0) >= capacity
        used[queue] += 1
    return lost, max(used.values(), default=0)


@pytest.mark.parametrize(("wanted", "scheme"), CYCLIC)
def test_capacity_overflow_gives_zeros_and_names_the_capacity_needed(
    wanted: str, scheme: str, tmp_path: Path
) -> None:
    rng = fresh(9)
    for group_size in GROUP_SIZES:
        for capacity in (1, 2, 5, 40):
            lab = Lab(tmp_path, distinct(13, 3), (5, 7), wanted, group_size)
            ids = drawn(rng, 13, (5, 7))
            module, _ = lab.rewritten(scheme, f", capacity={capacity}")
            lost, needed = overflowing(ids, 13, group_size, capacity, wanted)
            want = np.where(lost[..., None], 0, looked_up(lab.table, ids)).astype(np.float32)
            local = localized(module)
            for results in (evaluate(module, {"ids": ids}), evaluate(local, {"ids": ids})):
                assert_same(results["y"], want, (lab, capacity))
                assert results["capacity_overflow"] == (needed if needed > capacity else 0)
            ranks = {int(each["capacity_overflow"]) for each in on_ranks(module, ids)}
            assert len(ranks) == 1, "all ranks agree"
            assert (needed > capacity) == lost.any() and needed <= 35
            enough, _ = lab.rewritten(scheme, f", capacity={max(1, needed)}")
            assert not evaluate(enough, {"ids": ids})["capacity_overflow"]


@pytest.mark.parametrize(("wanted", "scheme"), CYCLIC)
def test_no_slot_is_written_twice(
    wanted: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runtimes leave open which of two updates of one element wins."""
    plain, seen = ScatterElements.evaluate, list[int]()

    def watched(op: ScatterElements, x: Array, indices: Array, updates: Array) -> Any:
        assert len(np.unique(indices)) == indices.size, indices
        seen.append(indices.size)
        return plain(op, x, indices, updates)

    lab = Lab(tmp_path, distinct(13, 3), (6, 8), wanted, 2)
    ids = drawn(fresh(10), 5, (6, 8))
    module = lab.local(scheme, ", capacity=4")
    monkeypatch.setattr(ScatterElements, "evaluate", watched)
    evaluate(module, {"ids": ids})
    assert len(seen) == 2, "on two ranks"


@pytest.mark.parametrize("policy", ["zero", "clamp", "row:1", "error"])
def test_the_policy_applies_per_slot(policy: str, tmp_path: Path) -> None:
    sizes = (3, 5, 2, *range(4, 22))
    table = distinct(sum(sizes), 4)
    rng = fresh(11)
    ids = rng.integers(-3, 25, (6, len(sizes), 2)).astype(np.int64)
    ids[0, 0], ids[0, 1] = (3, 2**62), (-(2**63), 2**63 - 1)
    bound = np.array(sizes)[:, None]
    start = np.cumsum((0, *sizes[:-1]))[:, None]
    known = (ids >= 0) & (ids < bound)
    row = {"clamp": np.clip(ids, 0, bound - 1), "row:1": np.where(known, ids, 1)}.get(policy, ids)
    want = table[np.where(known | (policy in ("clamp", "row:1")), row, 0) + start]
    if policy in ("zero", "error"):
        want = np.where(known[..., None], want, 0)
    specs = {"ids": irc.Spec("i64", ("B", len(sizes), 2))}
    for scheme in ("R", "RA", "CA", "KA"):
        module = irc.trace(layers.SlotEmbedding(sizes, 4), specs)
        options = f'{{scheme={scheme}, policy="{policy}"}}'
        found = ran(module, options, {"ids": ids}, table, tmp_path)
        assert_same(found["result0"], want.astype(np.float32), scheme, scheme)
        if policy == "error":
            assert found["ids_out_of_range"] == np.count_nonzero(~known)


def ran(module: Module, options: str, ids: dict[str, Array], table: Array, folder: Path) -> Any:
    """The results of a module with one table, sharded by rows over three ranks."""
    plan = folder / "plan.txt"
    plan.write_text("weight 0@tp\n")
    write_table(folder / "table.safetensors", table)
    module.files["ckpt"] = str(folder / "table.safetensors")
    module.weights["weight"].ref = FileRef("ckpt", "t")
    run_pipeline(module, f'shard{{mesh="tp=3", plan="{plan}"}}, rewrite-embeddings{options}')
    return evaluate(localized(module), ids)


@pytest.mark.parametrize("branching", [2, 3, 16, 64])
@pytest.mark.parametrize("extreme", [True, False])
def test_a_frozen_index_finds_its_keys_only(branching: int, extreme: bool) -> None:
    rng = fresh(14)
    for count in (1, 2, 3, 5, 9, 64, 65, 300):
        keys = rng.choice(2**40, count, replace=False) - 2**39
        if extreme:
            keys[: min(3, count)] = (-(2**63), 2**63 - 2, 0)[:count]
        levels = frozen_levels(keys, branching)
        again = frozen_levels(rng.permutation(keys), branching)
        assert all(np.array_equal(a, b) for a, b in zip(levels, again, strict=True))
        near = [int(k) + d for k in keys.tolist() for d in (-1, 0, 1)]
        probe = np.array([k for k in near if k >= -(2**63)] + [2**63 - 1, -(2**63)])
        order = {int(key): i for i, key in enumerate(np.sort(keys).tolist())}
        module = irc.trace(FrozenIndex(count, branching), {"keys": irc.Spec("i64", ("N",))})
        weights = {f"levels.{i}.keys": level for i, level in enumerate(levels)}
        found = evaluate(module, {"keys": probe}, weights=weights)["result0"]
        assert found.tolist() == [order.get(int(key), -1) for key in probe.tolist()]


def test_a_tied_table_is_stored_once_and_padding_is_never_chosen(tmp_path: Path) -> None:
    rng = fresh(15)
    for rows, group_size in ((7, 4), (10, 3), (3, 8), (8, 2)):
        table = rng.standard_normal((rows, 6)).astype(np.float32)
        for negative in (False, True):
            x = np.eye(6, dtype=np.float32)[None, :rows]
            x = -np.abs(x) * 50 if negative else x
            held = np.abs(table) if negative else table
            module = tied(tmp_path, held, group_size, x.shape[1])
            steps = run_pipeline(module, "rewrite-embeddings{hot=2}, next-tokens{k=2}")
            assert any("it has other uses" in note for note in steps[0].stats.notes)
            found = evaluate(localized(module), {"ids": np.arange(rows, dtype=np.int32), "x": x})
            assert_same(found["rows"], held, "embed(i) is row i of lm_head", "RA")
            logits = x @ held.T
            assert found["next_tokens"].tolist() == logits.argmax(-1).tolist()
            assert found["top_tokens"].max() < rows
            assert len(module.weights) == 1, "the table is there once"


def tied(folder: Path, table: Array, group_size: int, count: int) -> Module:
    """An embedding and a head on one table."""
    path, rows = folder / "table.safetensors", len(table)
    write_table(path, table)
    return parse_module(f"""
module @m mesh(tp={group_size}) {{
  file @ckpt = "{path}"
  weight @t : f32[{rows}@tp, 6] = @ckpt["t"]
  func @forward(%ids: i32[{rows}], %x: f32[1, {count}, 6])
      -> (rows: f32[{rows}, 6], logits: f32[1, {count}, {rows}]) {{
    %e = embedding %ids, @t : f32[{rows}, 6]{{sum tp}}
    %r = all_reduce %e {{axis="tp"}} : f32[{rows}, 6]
    %l = linear %x, @t : f32[1, {count}, {rows}@tp]
    %logits = all_gather %l {{axis="tp", dim=2}} : f32[1, {count}, {rows}]
    return %r, %logits
  }}
}}""")


def site_of(module: Module) -> Site:
    op = next(op for op in module.main if op.opname == "embedding")
    found = find_site(op, None)  # pyright: ignore[reportArgumentType]
    assert isinstance(found, Site)
    return found


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_bytes_agree_with_the_cost_model(wanted: str, scheme: str, tmp_path: Path) -> None:
    for group_size in GROUP_SIZES:
        lab = Lab(tmp_path, distinct(40, 16), (8, 8), wanted, group_size, "i64")
        whole = lab.module()
        site, topology = site_of(whole), default_topology()
        context = CostContext(whole, topology, topology.within, group_size, 0, True)
        versions = tables.Versions(whole, site.table, ("tp",), False)
        found = [candidate(site, layout, versions, False, context) for layout in LAYOUTS]
        model = next(each for each in found if each.scheme == scheme)
        module = lab.local(scheme)
        sent = messages(module.main, LocalSizes(module.mesh, {}), topology)
        assert len(sent) == model.messages
        assert sum(message.sent for message in sent) == model.sent[0], (group_size, sent)
        held = Reader(module).read(module.weights["t"]).nbytes
        assert held == model.memory, (scheme, group_size)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=2,other=3", "tp=3,other=2", "other=2,tp=4"])
def test_groups_are_independent(mesh: str, tmp_path: Path) -> None:
    rng = fresh(17)
    group_size = int(mesh.partition("tp=")[2].partition(",")[0])
    for wanted, scheme in PAIRS:
        lab = Lab(tmp_path, distinct(11, 4), (6, 4), wanted, group_size, mesh=mesh)
        module = lab.local(scheme)
        ids = drawn(rng, 11, (6, 4))
        found = on_ranks(module, ids)
        whole = evaluate(module, {"ids": ids})["y"]
        assert_same(whole, looked_up(lab.table, ids), (mesh, scheme), scheme)
        for group in module.mesh.groups(("tp",)):
            for rank, first in zip(group, module.mesh.groups(("tp",))[0], strict=True):
                assert_same(found[rank]["y"], found[first]["y"], "each group finds the same")


def test_collectives_have_one_order() -> None:
    text = """module @m mesh(tp=2) {
      weight @a : f32[9@tp, 4] = random("a", 1, 1.0)
      weight @b : f32[5@tp, 4] = random("b", 1, 1.0)
      func @forward(%i: i32[6], %j: i32[6]) -> (x: f32[6, 4], y: f32[6, 4]) {
        %p = embedding %i, @a : f32[6, 4]{sum tp}
        %q = embedding %j, @b : f32[6, 4]{sum tp}
        %y = all_reduce %q {axis="tp"} : f32[6, 4]
        %x = all_reduce %p {axis="tp"} : f32[6, 4]
        return %x, %y
      } }"""
    for scheme in ("RA", "CA", "KA"):
        orders: set[str] = set()
        for _ in range(3):
            module = parse_module(text)
            run_pipeline(module, f"rewrite-embeddings{{scheme={scheme}}}")
            localized(module)
            sends = [op for op in module.main if isinstance(op, Collective) and op.operands]
            orders.add("; ".join(f"{op.opname} {op.operands[0].type}" for op in sends))
        assert len(orders) == 1 and orders.pop().count(";") == 1, "one text for all ranks"


def test_large_tables_are_split_into_several_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """module @m mesh(dp={n}) {{
      weight @t : f32[100000000@dp, 128] = unbound("t")
      func @forward(%ids: i64[B@dp, 26]) -> (y: f32[B@dp, 26, 128]) {{
        %all = all_gather %ids {{axis="dp", dim=0}} : i64[B, 26]
        %e = embedding %all, @t : f32[B, 26, 128]{{sum dp}}
        %y = reduce_scatter %e {{axis="dp", dim=0}} : f32[B@dp, 26, 128]
        return %y
      }} }}"""
    for scheme in ("R", "RSD", "CD", "KD"):
        for group_size in (2, 3, 8):
            module = parse_module(text.format(n=group_size).replace("B", f"{group_size}*b"))
            run_pipeline(module, f"rewrite-embeddings{{scheme={scheme}}}")
            localized(module)
            held = [tables.table_shape(weight) for weight in module.weights.values()]
            assert all(rows * width < 2**31 for rows, width in held), (scheme, group_size, held)
            least = sum(rows * width for rows, width in held) / 2**31
            assert len(held) <= least + 1, "as few pieces as there can be"
    monkeypatch.setattr(tables, "LIMIT", 90)
    rng = fresh(20)
    for wanted, scheme in PAIRS:
        for group_size in (2, 3):
            lab = Lab(tmp_path, distinct(61, 6), (4, 6), wanted, group_size, "i64")
            ids = drawn(rng, 61, (4, 6), "i64")
            module = lab.local(scheme)
            assert len(module.weights) > 1
            want = looked_up(lab.table, ids)
            assert_same(evaluate(module, {"ids": ids})["y"], want, (scheme, group_size), scheme)
