"""rewrite-embeddings: its choices and notes, the graphs around a lookup, and requests by name.

`tests/matrix/test_embeddings.py` compares what the schemes find.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.analysis.communication import messages
from irc.analysis.sizes import LocalSizes
from irc.analysis.topology_file import default_topology, write_topology
from irc.analysis.units import amount
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.frontends import layers
from irc.frontends.layers.index import FrozenIndex, frozen_levels
from irc.ir.core import Module
from irc.passes.embeddings.tables import table_shape
from irc.pipeline import Stats, run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.text import parse_module
from irc.weights import FileRef
from irc.weights.checkpoint import Reader
from tests.fresh import fresh
from tests.passes.embedding_lab import (
    GROUP_SIZES,
    PAIRS,
    Array,
    Lab,
    assert_same,
    distinct,
    drawn,
    localized,
    write_table,
)


def after(module: Module, options: str = "") -> Stats:
    """The statistics and notes of the pass."""
    return run_pipeline(module, f"rewrite-embeddings{{{options}}}", [VerifyEach()])[0].stats


def module_of(body: str, table: str = "12@tp, 8", mesh: str = "tp=2") -> Module:
    """A module whose @forward looks up 4 ids, or does something else with a table @t."""
    return parse_module(f"""module @m mesh({mesh}) {{
  weight @t : f32[{table}] = random("t", 1, 1.0)
  func @forward(%ids: i32[4], %x: f32[4, 8]) -> (y: f32[4, 8]) {{
    {body}
    return %y
  }}
}}""")


def check_results(text: str, options: str, inputs: dict[str, Array]) -> None:
    """Raise unless the pass keeps the results of a text, in both views."""
    wanted, module = evaluate(parse_module(text), inputs), parse_module(text)
    after(module, options)
    for form in (module, localized(module)):
        for name, array in evaluate(form, inputs).items():
            np.testing.assert_allclose(array, wanted[name], rtol=1e-4, atol=1e-4)


# the choice, and its report


def large(wanted: str, n: int) -> Module:
    """A lookup in a large table, of 64 tokens typically, and 8192 at most."""
    split, end = {
        "replicated": ("", 'all_reduce %e {axis="tp"}'),
        "scattered": ("@tp", 'reduce_scatter %e {axis="tp", dim=1}'),
    }[wanted]
    sizes = f"dims(B=1:1:1, S=1:{max(1, 64 // n)}:{8192 // n})"
    return parse_module(f"""module @m mesh(tp={n}) {sizes} {{
  weight @table : bf16[128256@tp, 4096] = unbound("t")
  func @forward(%ids: i32[B, {n}*S]) -> (y: bf16[B, {n}*S{split}, 4096]) {{
    %e = embedding %ids, @table : bf16[B, {n}*S, 4096]{{sum tp}}
    %y = {end} : bf16[B, {n}*S{split}, 4096]
    return %y
  }}
}}""")


@pytest.mark.parametrize(
    ("wanted", "group_size", "options", "scheme"),
    [
        ("replicated", 2, "", "CA"),
        ("replicated", 8, "", "CA"),
        ("scattered", 4, "", "CS"),
        ("scattered", 8, "", "CS"),
        ("replicated", 4, "memory=0", "RA"),
        ("replicated", 4, "scheme=columns", "CA"),
        ("scattered", 4, "scheme=columns", "CS"),
        ("replicated", 4, 'tables=["*able RA"]', "RA"),
    ],
)
def test_the_choice(wanted: str, group_size: int, options: str, scheme: str) -> None:
    notes = after(large(wanted, group_size), options).notes
    assert f"is looked up by {scheme}:" in notes[0]
    chosen = [line for line in notes[1:] if line.endswith("; chosen")]
    assert len(chosen) == 1 and chosen[0].split()[0] == scheme


def test_constants_come_from_a_file(tmp_path: Path) -> None:
    write_topology(default_topology().using("ethernet"), tmp_path / "slow.json")
    near = after(large("replicated", 8)).notes
    far = after(large("replicated", 8), f'topology="{tmp_path}/slow.json"').notes
    times = [float(notes[3].split()[1].partition("/")[0]) for notes in (near, far)]
    assert times[1] > 2 * times[0]
    with pytest.raises(Error, match="cannot read the topology"):
        after(large("replicated", 8), f'topology="{tmp_path}/none.json"')


def test_a_replicated_table_costs_a_kernel_that_reads_and_writes_the_rows() -> None:
    device, notes = default_topology().device, after(large("replicated", 4)).notes
    (times,) = [note.split()[1] for note in notes if note.startswith("  R ")]
    moved = [2 * tokens * 8192 for tokens in (4, 64, 8192)]
    wanted = [f"{device.kernel_us + n / device.hbm_gb_s / 1e3:.1f}" for n in moved]
    assert times == "/".join(wanted)


def test_a_small_table_is_replicated(tmp_path: Path) -> None:
    for wanted in ("replicated", "scattered", "sharded"):
        module = Lab(tmp_path, distinct(37, 6), (4, 4), wanted, 4).module()
        after(module)
        assert not any(weight.type.sharded for weight in module.weights.values())


@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_the_report_has_the_bytes_of_the_local_program(
    wanted: str, scheme: str, tmp_path: Path
) -> None:
    for group_size in GROUP_SIZES:
        lab = Lab(tmp_path, distinct(40, 16), (8, 8), wanted, group_size, "i64")
        module, step = lab.rewritten(scheme)
        (row,) = [note for note in step.stats.notes if note.startswith(f"  {scheme} ")]
        localized(module)
        sent = messages(module.main, LocalSizes(module.mesh, {}), default_topology())
        bytes_sent = amount(sum(message.sent for message in sent))
        held = amount(Reader(module).read(module.weights["t"]).nbytes)
        assert f"sends {bytes_sent}/{bytes_sent}/{bytes_sent}, holds {held}" in row, group_size


# what is around a lookup


POOLED = """module @m mesh(tp={n}) dims(B=1:2:4) {{
  weight @t : f32[11@tp, 4] = random("t", 1, 1.0)
  weight @w : f32[5, 4] = random("w", 1, 1.0)
  func @forward(%ids: i32[{n}*B, 3]) -> (y: {result}) {{
    %e = embedding %ids, @t : f32[{n}*B, 3, 4]{{sum tp}}
    %a = {op}{{sum tp}}
    %y = {end} : {result}
    return %y
  }}
}}"""
SUM, SCATTER = 'all_reduce %a {axis="tp"}', 'reduce_scatter %a {axis="tp", dim=DIM}'
POOLINGS = {
    "sum": ("reduce_sum %e {dims=[1]} : f32[N*B, 4]", SUM, "f32[N*B, 4]"),
    "linear": ("linear %e, @w : f32[N*B, 3, 5]", SUM, "f32[N*B, 3, 5]"),
    "reshape": ("reshape %e {shape=[N*B, 12]} : f32[N*B, 12]", SUM, "f32[N*B, 12]"),
    "scattered": ("reduce_sum %e {dims=[1]} : f32[N*B, 4]", SCATTER, "f32[N*B@tp, 4]"),
    "transposed": ("transpose %e {order=[1, 0, 2]} : f32[3, N*B, 4]", SCATTER, "f32[3, N*B@tp, 4]"),
}


def pooled(pooling: str, n: int) -> str:
    """The text of a lookup in front of another operation."""
    op, end, result = (part.replace("N", str(n)) for part in POOLINGS[pooling])
    end = end.replace("DIM", "1" if pooling == "transposed" else "0")
    return POOLED.format(n=n, op=op, end=end, result=result).replace("}{sum", "} {sum")


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_lookups_in_front_of_other_operations(pooling: str, group_size: int) -> None:
    text = pooled(pooling, group_size)
    ids = {"ids": fresh(7).integers(-2, 13, (2 * group_size, 3)).astype(np.int32)}
    for scheme in ("RA", "CA", "KA", "R", "auto"):
        module = parse_module(text)
        assert "is looked up by" in after(module, f"scheme={scheme}").notes[0]
        ends = [op.opname for op in module.ops() if op.opname in ("all_reduce", "reduce_scatter")]
        assert len(ends) == (scheme == "RA") or scheme == "auto"
        check_results(text, f"scheme={scheme}", ids)


def test_the_cost_of_a_sum_behind_other_operations() -> None:
    (line,) = [note for note in after(parse_module(pooled("sum", 2))).notes if " RA " in note]
    assert "sends 32 B/64 B/128 B" in line, "one sum of two rows of four floats per B"


TWICE = (
    "%e = embedding %ids, @t : f32[4, 8]{sum tp} %a = add %e, %e : f32[4, 8]{sum tp}"
    '%y = all_reduce %a {axis="tp"} : f32[4, 8]'
)
PLAIN = "%y = embedding %ids, @t : f32[4, 8]"
COLUMNS, IN_COLUMNS = "12, 8@tp", "%e = embedding %ids, @t : f32[4, 8@tp]"
GATHERED = '%y = all_gather %s {axis="tp", dim=1} : f32[4, 8]'
SILU = f"{IN_COLUMNS} %s = silu %e : f32[4, 8@tp] {GATHERED}"
KEPT = [
    ("12, 8", PLAIN, "its table is not sharded"),
    ("12@tp, 8", TWICE, "its partial sum is used in several places"),
    (
        "12@tp, 8",
        TWICE.replace("%a =", "%f = embedding %ids, @t : f32[4, 8]{sum tp} %a =").replace(
            "%e, %e", "%e, %f"
        ),
        "its partial sum is an operand of add",
    ),
    (COLUMNS, SILU, "silu takes its columns as they are sharded"),
    (COLUMNS, SILU.replace("silu %e", "add %e, %e"), "its columns are used in several places"),
    (
        "12@tp, 8",
        '%e = embedding %ids, @t : f32[4, 8]{sum tp} %s = reduce_scatter %e {axis="tp", dim=1} '
        f": f32[4, 8@tp] {GATHERED}",
        "its result is sharded in the columns of the table",
    ),
]


@pytest.mark.parametrize(("table", "body", "reason"), KEPT)
def test_lookups_that_are_not_rewritten(table: str, body: str, reason: str) -> None:
    module = module_of(body, table)
    text = str(module)
    assert after(module).notes[0] == f"@t is not rewritten: {reason}"
    assert str(module) == text


@pytest.mark.parametrize("scheme", ["rows", "cyclic", "replicated", "columns"])
def test_columns_that_are_used_as_they_are_sharded(scheme: str) -> None:
    text = str(module_of(SILU, COLUMNS))
    notes = after(parse_module(text), f"scheme={scheme}").notes
    assert ("is looked up by" in notes[0]) == (scheme != "columns")
    ids = {"ids": drawn(fresh(1), 12, (4,)), "x": np.zeros((4, 8), np.float32)}
    check_results(text, f"scheme={scheme}", ids)


TWO_LOOKUPS = """
    %e = embedding %ids, @t : f32[4, 8]{sum tp}
    %r = all_reduce %e {axis="tp"} : f32[4, 8]
    %f = embedding %ids, @t : f32[4, 8]{sum tp}
    %s = all_reduce %f {axis="tp"} : f32[4, 8]
    %y = add %r, %s : f32[4, 8]"""


@pytest.mark.parametrize(
    ("scheme", "table"), [("ca", COLUMNS), ("replicated", "12, 8"), ("ka", "12@tp, 8")]
)
def test_two_lookups_of_one_table_get_one_layout(scheme: str, table: str) -> None:
    module = module_of(TWO_LOOKUPS)
    text = str(module)
    after(module, f"scheme={scheme}")
    assert [str(weight.type) for weight in module.weights.values()] == [f"f32[{table}]"]
    ids = {"ids": np.array([0, 5, 12, -1], np.int32), "x": np.zeros((4, 8), np.float32)}
    check_results(text, f"scheme={scheme}", ids)


def test_tables_of_other_lookups_keep_their_layout() -> None:
    """One of two lookups of a table cannot be rewritten, so the table keeps its layout."""
    body = TWO_LOOKUPS.replace("all_reduce %f", "all_reduce %g")
    module = module_of(body.replace("%s", "%g = add %f, %f : f32[4, 8]{sum tp}\n%s", 1))
    assert any("(shared); chosen" in line for line in after(module).notes)
    assert str(module.weights["t"].type) == "f32[12@tp, 8]"


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
            results = evaluate(localized(module), {"ids": np.arange(rows, dtype=np.int32), "x": x})
            assert_same(results["rows"], held, "embed(i) is row i of lm_head", "RA")
            logits = x @ held.T
            assert results["next_tokens"].tolist() == logits.argmax(-1).tolist()
            assert results["top_tokens"].max() < rows
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


@pytest.mark.parametrize("scheme", ["R", "RSD", "CD"])
@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_large_tables_become_several_weights(scheme: str, group_size: int) -> None:
    batch = f"{group_size}*b"
    module = parse_module(f"""module @m mesh(dp={group_size}) {{
      weight @t : f32[100000000@dp, 128] = unbound("t")
      func @forward(%ids: i64[{batch}@dp, 26]) -> (y: f32[{batch}@dp, 26, 128]) {{
        %all = all_gather %ids {{axis="dp", dim=0}} : i64[{batch}, 26]
        %e = embedding %all, @t : f32[{batch}, 26, 128]{{sum dp}}
        %y = reduce_scatter %e {{axis="dp", dim=0}} : f32[{batch}@dp, 26, 128]
        return %y
      }} }}""")
    after(module, f"scheme={scheme}")
    localized(module)
    held = [rows * width for rows, width in map(table_shape, module.weights.values())]
    assert max(held) < 2**31, held
    assert len(held) <= sum(held) / 2**31 + 1, "as few pieces as there can be"


# out-of-range ids, and several functions and tables


TWO_TABLES = """module @m mesh(tp=2) {
  weight @t : f32[13@tp, 4] = random("t", 1, 0.5, [13, 4])
  weight @u : f32[7@tp, 4] = random("u", 1, 0.5, [7, 4])
  func @main(%ids: i32[6]) -> (y: f32[6, 4], z: f32[6, 4]) {
    %e = embedding %ids, @t : f32[6, 4]{sum tp}
    %y = all_reduce %e {axis="tp"} : f32[6, 4]
    %f = embedding %ids, @u : f32[6, 4]{sum tp}
    %z = all_reduce %f {axis="tp"} : f32[6, 4]
    return %y, %z
  }
}"""
COMPUTED = """module @m mesh(tp=2) {
  weight @t : f32[9@tp, 2] = random("t", 1, 1.0, [9, 2])
  func @forward(%ids: i32[3], %at: i32[3]) -> (y: f32[3, 2], z: f32[3, 2]) {
    %twice = add %ids, %ids : i32[3]
    %both = add %ids, %at : i32[3]
    %e = embedding %twice, @t : f32[3, 2]{sum tp}
    %y = all_reduce %e {axis="tp"} : f32[3, 2]
    %f = embedding %both, @t : f32[3, 2]{sum tp}
    %z = all_reduce %f {axis="tp"} : f32[3, 2]
    return %y, %z
  }
}"""
REPLICATED = """module @m mesh({mesh}) dims(B=1:2:4) {{
  weight @token.weight : f32[12@tp, 4] = random("t", 1, 1.0)
  weight @place.weight : f32[9, 4] = random("p", 1, 1.0)
  func @forward(%ids: i32[{batch}, 3], %at: i32[{batch}, 3]) -> (y: f32[{batch}, 3, 4]) {{
    %t = embedding %ids, @token.weight : f32[{batch}, 3, 4]{{sum tp}}
    %r = all_reduce %t {{axis="tp"}} : f32[{batch}, 3, 4]
    %p = embedding %at, @place.weight : f32[{batch}, 3, 4]
    %y = add %r, %p : f32[{batch}, 3, 4]
    return %y
  }}
}}"""


@pytest.mark.parametrize(
    ("text", "options", "inputs", "counts"),
    [
        (
            REPLICATED.format(mesh="tp=2", batch="B"),
            "",
            {"ids": [[0, 12, 11]], "at": [[9, -1, 8]]},
            {"ids_out_of_range": 1, "at_out_of_range": 2},
        ),
        (
            COMPUTED,
            "",
            {"ids": [0, 5, 6], "at": [9, 1, 2]},
            {"ids_out_of_range": 2, "computed_ids_out_of_range": 1},
        ),
        (  # 5 and 3 ids are of an even row; 1 and 3 are out of range
            TWO_TABLES,
            ", scheme=ka, capacity=1",
            {"ids": [0, 2, 4, 8, 10, 13]},
            {"ids_out_of_range": 4, "capacity_overflow": 5},
        ),
    ],
)
def test_ids_are_counted_per_input(
    text: str, options: str, inputs: dict[str, Any], counts: dict[str, int]
) -> None:
    module = parse_module(text)
    names = set(module.main.result_names())
    after(module, f'policy="error"{options}')
    arrays = {name: np.array(ids, np.int32) for name, ids in inputs.items()}
    for form in (module, localized(module)):
        results = evaluate(form, arrays)
        assert {name: int(results[name]) for name in results.keys() - names} == counts


@pytest.mark.parametrize("policy", ["zero", "clamp", "row:1", "error"])
def test_the_policy_applies_per_slot(policy: str, tmp_path: Path) -> None:
    sizes = (3, 5, 2, *range(4, 22))
    table = distinct(sum(sizes), 4)
    write_table(tmp_path / "table.safetensors", table)
    (tmp_path / "plan.txt").write_text("weight 0@tp\n")
    ids = fresh(11).integers(-3, 25, (6, len(sizes), 2)).astype(np.int64)
    ids[0, 0], ids[0, 1] = (3, 2**62), (-(2**63), 2**63 - 1)
    bound = np.array(sizes)[:, None]
    start = np.cumsum((0, *sizes[:-1]))[:, None]
    inside = (ids >= 0) & (ids < bound)
    row = {"clamp": np.clip(ids, 0, bound - 1), "row:1": np.where(inside, ids, 1)}.get(policy, ids)
    want = table[np.where(inside | (policy in ("clamp", "row:1")), row, 0) + start]
    if policy in ("zero", "error"):
        want = np.where(inside[..., None], want, 0)
    specs = {"ids": irc.Spec("i64", ("B", len(sizes), 2))}
    for scheme in ("R", "RA", "CA", "KA"):
        module = irc.trace(layers.SlotEmbedding(sizes, 4), specs)
        module.files["ckpt"] = str(tmp_path / "table.safetensors")
        module.weights["weight"].ref = FileRef("ckpt", "t")
        run_pipeline(module, f'shard{{mesh="tp=3", plan="{tmp_path}/plan.txt"}}')
        after(module, f'scheme={scheme}, policy="{policy}"')
        results = evaluate(localized(module), {"ids": ids})
        assert_same(results["result0"], want.astype(np.float32), scheme, scheme)
        assert results.get("ids_out_of_range", 0) == (policy == "error") * np.sum(~inside)


@pytest.mark.parametrize("branching", [2, 3, 16, 64])
@pytest.mark.parametrize("extreme", [True, False])
def test_a_frozen_index_has_its_keys_only(branching: int, extreme: bool) -> None:
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
        places = evaluate(module, {"keys": probe}, weights=weights)["result0"]
        assert places.tolist() == [order.get(int(key), -1) for key in probe.tolist()]


# requests by name


USERS = """module @m mesh(dp=2) dims(B=1:4:8, N=1:3:9) {
  weight @users : f32[12, 8] = random("users", 1, 1.0)
  weight @items : f32[9, 4] = random("items", 2, 1.0)
  func @forward(%u: i32[2*B@dp, 3], %i: i32[N])
      -> (f32[2*B@dp, 3, 8], f32[2*B@dp, 3, 4], f32[N, 4]) {
    %a = embedding %u, @users : f32[2*B@dp, 3, 8]
    %b = embedding %u, @items : f32[2*B@dp, 3, 4]
    %c = embedding %i, @items : f32[N, 4]
    return %a, %b, %c
  }
}"""
NO_TABLES = "module @m mesh(tp=2) { func @forward(%x: f32[4]) -> (f32[4]) { return %x } }"
SHARDED = str(
    module_of(
        '%e = embedding %ids, @t : f32[4, 8]{sum tp}%y = all_reduce %e {axis="tp"} : f32[4, 8]'
    )
)
USED_TWICE, NOT_SHARDED = str(module_of(TWICE)), str(module_of(PLAIN, "12, 8"))
ONE_RANK = str(module_of(PLAIN, "12, 8", "dp=2, tp=1")).replace("[4", "[4@dp")
CALLED = (
    SHARDED.replace("@forward", "@found").rstrip("}\n")
    + """}
  func @main(%ids: i32[4]) -> (i32[4]) { return %ids }
}"""
)
NO_TABLE = "but it decides for no table"
NO_LOOKUP = "cyclic was requested, but no lookup can have it: @t: "
REFUSALS = [
    (SHARDED, 'tables=["nothing* ca"]', rf'"nothing\* ca", {NO_TABLE} that is looked up \(@t\)'),
    (SHARDED, 'tables=["* ca@tp", "t kd"]', f'tables has "t kd", {NO_TABLE}'),
    (SHARDED, 'tables=["t keep", "* keep"]', rf'tables has "\* keep", {NO_TABLE}'),
    (SHARDED, 'scheme=ca, tables=["* keep"]', "ca was .* none is left for it"),
    (SHARDED, "memory=-1", "memory cannot be negative; it is -1"),
    (SHARDED, "hot=-1", "hot cannot be negative; it is -1"),
    (SHARDED.replace("y:", "capacity_overflow:"), "scheme=ka, capacity=1", "the name is taken"),
    (CALLED, "scheme=ka, capacity=1", "and @found has one; put inline in front"),
    (NO_TABLES, "scheme=ca", "ca was .* looked up \\(none\\) none is left"),
    (USERS, "scheme=ca", "ca was requested.*@users: dimension 0 of its ids is sharded over dp"),
    (USED_TWICE, "scheme=cyclic", f"{NO_LOOKUP}its partial sum is used in several places"),
    (USED_TWICE, 'tables=["t cyclic"]', f"{NO_LOOKUP}its partial sum is used in several places"),
    (NOT_SHARDED, "scheme=cyclic", f"{NO_LOOKUP}its table is not sharded; shard it by"),
    (ONE_RANK, 'tables=["* ca@tp"]', "ca was requested, .*: @t: its axes have one rank"),
    (ONE_RANK, 'tables=["* rs"]', "rs was requested, .*: @t: its axes have one rank"),
    (ONE_RANK, 'tables=["* cyclic"]', "cyclic was requested, .*: @t: its axes have one rank"),
    (REPLICATED.format(mesh="tp=2", batch="B"), 'tables=["place* ca@xp"]', "has no axis 'xp'"),
    (
        REPLICATED.format(mesh="dp=2, tp=2", batch="2*B@dp"),
        'tables=["token* ca@dp"]',
        r"over dp, but it is f32\[12@tp, 4\] already; leave @dp out",
    ),
]


@pytest.mark.parametrize(("text", "options", "message"), REFUSALS)
def test_requests_that_no_lookup_can_have_are_errors(text: str, options: str, message: str) -> None:
    with pytest.raises(Error, match=f"(?m){message}"):
        after(parse_module(text), options)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (NOT_SHARDED, "t cyclic"),
        *((ONE_RANK, row) for row in ("* replicated", "* rows@dp", "* auto", "* keep")),
    ],
)
def test_requests_that_lookups_have(text: str, row: str) -> None:
    after(parse_module(text), f'tables=["{row}"]')
    after(parse_module(NO_TABLES))


@pytest.mark.parametrize(
    ("mesh", "batch", "rows", "split"),
    [
        ("tp=2", "B", '"place* ca"', "f32[9, 4@tp]"),
        ("tp=2", "B", '"place* rows@tp"', "f32[9@tp, 4]"),
        ("ep=2, tp=2", "B", '"place* columns"', "f32[9, 4@ep.tp]"),
        ("dp=2, tp=2", "2*B@dp", '"place* cd@dp"', "f32[9, 4@dp]"),
        ("dp=2, tp=2", "2*B@dp", '"place* rsd@dp"', "f32[9@dp, 4]"),
        ("dp=2, tp=2", "2*B@dp", '"place* kd@dp"', "f32[10@dp, 4]"),
        ("dp=2, tp=2", "2*B@dp", '"place* ka"', "f32[10@tp, 4]"),
    ],
)
def test_a_row_shards_a_replicated_table(mesh: str, batch: str, rows: str, split: str) -> None:
    text = REPLICATED.format(mesh=mesh, batch=batch)
    module = parse_module(text)
    after(module, f"tables=[{rows}]")
    assert str(module.weights["place.weight"].type) == split
    rng = fresh(4)
    inputs = {name: rng.integers(-1, 13, (4, 3)).astype(np.int32) for name in ("ids", "at")}
    check_results(text, f"tables=[{rows}]", inputs)


def test_a_later_row_is_for_the_other_tables() -> None:
    notes = after(parse_module(USERS), 'tables=["users cd@dp", "* keep"]').notes
    assert [note[:6] for note in notes if "is looked up by CD" in note] == ["@users"]


@pytest.mark.parametrize(
    ("scheme", "users", "items"),
    [
        ("cd", "CD", None),
        ("kd", "KD", None),
        ("rsd", "RSD", None),
        ("columns", "CD", "CD"),
        ("cyclic", "KD", "KD"),
        ("keep", None, None),
    ],
)
def test_replicated_tables_are_sharded_over_the_axis_of_their_ids(
    scheme: str, users: str | None, items: str | None
) -> None:
    module = parse_module(USERS)
    notes = after(module, f"scheme={scheme}").notes
    for table, name in (("@users", users), ("@items", items)):
        heads = [note for note in notes if note.startswith(table) and "is looked up by" in note]
        assert [f"is looked up by {name}" in head for head in heads[:1]] == [True] * bool(name)
        assert module.weights[table[1:]].type.sharded == bool(name)
    rng = fresh()
    ids = {"u": drawn(rng, 12, (4, 3)), "i": drawn(rng, 9, (5,))}
    check_results(USERS, f"scheme={scheme}", ids)


DATA_PARALLEL = """module @m dims(B=1:2:8) {
  weight @table : f32[11, 6] = random("t", 1, 1.0)
  weight @fc : f32[5, 18] = random("f", 1, 1.0)
  func @forward(%ids: i32[B, 3]) -> (y: f32[B, 5]) {
    %e = embedding %ids, @table : f32[B, 3, 6]
    %f = reshape %e {shape=[B, 18]} : f32[B, 18]
    %y = linear %f, @fc : f32[B, 5]
    return %y
  }
}"""


@pytest.mark.parametrize("split", ["0@dp", "1@dp"])
@pytest.mark.parametrize("scheme", ["R", "RSD", "CD", "KD"])
def test_ids_of_a_rank_are_not_gathered(split: str, scheme: str, tmp_path: Path) -> None:
    """The table is sharded over the axis of the batch: shard keeps the batch sharded after it."""
    (tmp_path / "plan.txt").write_text(f"table {split}\n")
    module = parse_module(DATA_PARALLEL)
    run_pipeline(module, f'shard{{mesh="dp=3", plan="{tmp_path}/plan.txt"}}', [VerifyEach()])
    assert str(module.main.returned[0].type) == "f32[3*B_dp@dp, 5]", "no rank has the whole batch"
    ids = {"ids": fresh(23).integers(-1, 13, (6, 3)).astype(np.int32)}
    check_results(str(module), f"scheme={scheme}", ids)
