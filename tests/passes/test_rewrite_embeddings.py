"""rewrite-embeddings: its choices, its notes, and the lookups it leaves unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from irc.analysis.topology_file import default_topology, write_topology
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module
from irc.pipeline import Stats, run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.text import parse_module
from tests.fresh import fresh
from tests.passes.embedding_lab import PAIRS, Lab, assert_same, distinct, localized

LARGE = """module @m mesh(tp={n}) dims(B=1:1:1, S=1:{s}:{most}) {{
  weight @table : bf16[128256@tp, 4096] = unbound("t")
  func @forward(%ids: i32[B, {n}*S]) -> (y: bf16[B, {n}*S{split}, 4096]) {{
    %e = embedding %ids, @table : bf16[B, {n}*S, 4096]{{sum tp}}
    %y = {end} : bf16[B, {n}*S{split}, 4096]
    return %y
  }}
}}"""
ENDS = {
    "replicated": ("", 'all_reduce %e {axis="tp"}'),
    "scattered": ("@tp", 'reduce_scatter %e {axis="tp", dim=1}'),
}


def large(wanted: str, group_size: int) -> Module:
    split, end = ENDS[wanted]
    text = LARGE.format(
        n=group_size, s=max(1, 64 // group_size), most=8192 // group_size, split=split, end=end
    )
    return parse_module(text)


def after(module: Module, options: str = "") -> Stats:
    """The statistics and notes of the pass."""
    return run_pipeline(module, f"rewrite-embeddings{options}", [VerifyEach()])[0].stats


@pytest.mark.parametrize(
    ("wanted", "group_size", "options", "scheme"),
    [
        ("replicated", 2, "", "CA"),
        ("replicated", 8, "", "CA"),
        ("scattered", 4, "", "CS"),
        ("scattered", 8, "", "CS"),
        ("replicated", 4, "{memory=0}", "RA"),
        ("replicated", 4, "{scheme=columns}", "CA"),
        ("scattered", 4, "{scheme=columns}", "CS"),
        ("replicated", 4, '{tables=["*able RA"]}', "RA"),
    ],
)
def test_the_choice(wanted: str, group_size: int, options: str, scheme: str) -> None:
    notes = after(large(wanted, group_size), options).notes
    assert f"is looked up by {scheme}:" in notes[0]
    chosen = [line for line in notes[1:] if line.endswith("; chosen")]
    assert len(chosen) == 1 and chosen[0].split()[0] == scheme


def test_constants_come_from_a_file(tmp_path: Path) -> None:
    slow = default_topology().using("ethernet")
    write_topology(slow, tmp_path / "slow.json")
    near = after(large("replicated", 8)).notes
    far = after(large("replicated", 8), f'{{topology="{tmp_path}/slow.json"}}').notes
    times = [float(notes[3].split()[1].partition("/")[0]) for notes in (near, far)]
    assert times[1] > 2 * times[0]
    with pytest.raises(Error, match="cannot read the topology"):
        after(large("replicated", 8), f'{{topology="{tmp_path}/none.json"}}')


def test_a_small_table_is_replicated(tmp_path: Path) -> None:
    for wanted in ("replicated", "scattered", "sharded"):
        module = Lab(tmp_path, distinct(37, 6), (4, 4), wanted, 4).module()
        after(module)
        assert not any(type_.sharded for type_ in (w.type for w in module.weights.values()))


@pytest.mark.parametrize("options", ["", ', policy="clamp"', ', policy="error"', ", capacity=3"])
@pytest.mark.parametrize(("wanted", "scheme"), PAIRS)
def test_a_second_run_changes_nothing(
    wanted: str, scheme: str, options: str, tmp_path: Path
) -> None:
    module, _ = Lab(tmp_path, distinct(11, 4), (4, 4), wanted, 2).rewritten(scheme, options)
    text = str(module)
    after(module, f"{{scheme={scheme}{options}}}" if scheme[0] != "K" else "")
    assert str(module) == text


POOLED = """module @m mesh(tp={n}) dims(B=1:2:4) {{
  weight @t : f32[11@tp, 4] = random("t", 1, 1.0)
  weight @w : f32[5, 4] = random("w", 1, 1.0)
  func @forward(%ids: i32[{n}*B, 3]) -> (y: {result}) {{
    %e = embedding %ids, @t : f32[{n}*B, 3, 4]{{sum tp}}
    {body}
    return %y
  }}
}}"""
SUM = '%y = all_reduce %a {{axis="tp"}} : {result}'
SCATTER = '%y = reduce_scatter %a {{axis="tp", dim=0}} : {result}'
POOLINGS = {
    "sum": ("reduce_sum %e {{dims=[1]}} : f32[{n}*B, 4]", SUM, "f32[{n}*B, 4]"),
    "linear": ("linear %e, @w : f32[{n}*B, 3, 5]", SUM, "f32[{n}*B, 3, 5]"),
    "reshape": ("reshape %e {{shape=[{n}*B, 12]}} : f32[{n}*B, 12]", SUM, "f32[{n}*B, 12]"),
    "scattered": ("reduce_sum %e {{dims=[1]}} : f32[{n}*B, 4]", SCATTER, "f32[{n}*B@tp, 4]"),
    "transposed": (
        "transpose %e {{order=[1, 0, 2]}} : f32[3, {n}*B, 4]",
        SCATTER.replace("dim=0", "dim=1"),
        "f32[3, {n}*B@tp, 4]",
    ),
}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_lookups_in_front_of_other_operations(pooling: str, group_size: int) -> None:
    op, end, result = POOLINGS[pooling]
    body = f"%a = {op}{{{{sum tp}}}}\n{end}"
    text = POOLED.replace("{body}", body).replace("{result}", result).format(n=group_size)
    ids = fresh(7).integers(-2, 13, (2 * group_size, 3)).astype(np.int32)
    wanted = evaluate(parse_module(text), {"ids": ids})
    for scheme in ("RA", "CA", "KA", "R", "auto"):
        module = parse_module(text)
        stats = after(module, f"{{scheme={scheme}}}")
        assert "is looked up by" in stats.notes[0]
        ends = [op.opname for op in module.ops() if op.opname in ("all_reduce", "reduce_scatter")]
        assert len(ends) == (scheme == "RA") or scheme == "auto"
        for found in (evaluate(module, {"ids": ids}), evaluate(localized(module), {"ids": ids})):
            np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-4, atol=1e-4)


def test_the_cost_of_a_sum_behind_other_operations() -> None:
    op, end, result = POOLINGS["sum"]
    text = POOLED.replace("{body}", f"%a = {op}{{{{sum tp}}}}\n{end}").replace("{result}", result)
    (line,) = [each for each in after(parse_module(text.format(n=2))).notes if " RA " in each]
    assert "sends 32 B/64 B/128 B" in line, "one sum of two rows of four floats per B"


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
    module = parse_module(REPLICATED.format(mesh=mesh, batch=batch))
    rng = fresh(4)
    inputs = {name: rng.integers(-1, 13, (4, 3)).astype(np.int32) for name in ("ids", "at")}
    want = evaluate(module, inputs)["y"]
    after(module, f"{{tables=[{rows}]}}")
    assert str(module.weights["place.weight"].type) == split
    assert_same(evaluate(localized(module), inputs)["y"], want, split, "RA")


LEFT = """module @m mesh(tp=2) {{
  weight @t : f32[{type}] = random("t", 1, 1.0)
  func @forward(%ids: i32[4], %x: f32[4, 8]) -> (y: f32[4, 8]) {{
    {body}
    return %y
  }}
}}"""
ROWS, COLUMNS = "12@tp, 8", "12, 8@tp"
FOUND = "%e = embedding %ids, @t : f32[4, 8]{sum tp}\n"


@pytest.mark.parametrize(
    ("type", "body", "reason"),
    [
        ("12, 8", "%y = embedding %ids, @t : f32[4, 8]", "its table is not sharded"),
        (
            ROWS,
            FOUND
            + '%a = add %e, %e : f32[4, 8]{sum tp}\n%y = all_reduce %a {axis="tp"} : f32[4, 8]',
            "its partial sum is used in several places",
        ),
        (
            ROWS,
            FOUND
            + "%f = embedding %ids, @t : f32[4, 8]{sum tp}\n%a = add %e, %f : f32[4, 8]{sum tp}\n"
            + '%y = all_reduce %a {axis="tp"} : f32[4, 8]',
            "its partial sum is an operand of add",
        ),
        (
            COLUMNS,
            "%e = embedding %ids, @t : f32[4, 8@tp]\n%s = silu %e : f32[4, 8@tp]\n"
            '%y = all_gather %s {axis="tp", dim=1} : f32[4, 8]',
            "silu takes its columns as they are sharded",
        ),
        (
            COLUMNS,
            "%e = embedding %ids, @t : f32[4, 8@tp]\n%s = add %e, %e : f32[4, 8@tp]\n"
            '%y = all_gather %s {axis="tp", dim=1} : f32[4, 8]',
            "its columns are used in several places",
        ),
        (
            ROWS,
            FOUND + '%r = reduce_scatter %e {axis="tp", dim=1} : f32[4, 8@tp]\n'
            '%y = all_gather %r {axis="tp", dim=1} : f32[4, 8]',
            "its result is sharded in the columns of the table",
        ),
    ],
)
def test_lookups_that_are_not_rewritten(type: str, body: str, reason: str) -> None:
    module = parse_module(LEFT.format(type=type, body=body))
    text = str(module)
    notes = after(module).notes
    assert str(module) == text
    assert notes[0] == f"@t is not rewritten: {reason}"


def test_tables_of_other_lookups_keep_their_layout() -> None:
    """One of two lookups of a table cannot be rewritten, so the table keeps its layout."""
    body = FOUND + (
        '%r = all_reduce %e {axis="tp"} : f32[4, 8]\n%f = embedding %ids, @t : f32[4, 8]{sum tp}\n'
        "%g = add %f, %f : f32[4, 8]{sum tp}\n"
        '%s = all_reduce %g {axis="tp"} : f32[4, 8]\n%y = add %r, %s : f32[4, 8]'
    )
    module = parse_module(LEFT.format(type=ROWS, body=body))
    notes = after(module).notes
    assert str(module.weights["t"].type) == "f32[12@tp, 8]"
    assert any("(shared); chosen" in line for line in notes)


def test_two_lookups_of_one_table_get_one_layout() -> None:
    body = FOUND + (
        '%r = all_reduce %e {axis="tp"} : f32[4, 8]\n%f = embedding %ids, @t : f32[4, 8]{sum tp}\n'
        '%s = all_reduce %f {axis="tp"} : f32[4, 8]\n%y = add %r, %s : f32[4, 8]'
    )
    ids = {"ids": np.array([0, 5, 12, -1], np.int32), "x": np.zeros((4, 8), np.float32)}
    for scheme, type in (("ca", COLUMNS), ("replicated", "12, 8"), ("ka", "12@tp, 8")):
        module = parse_module(LEFT.format(type=ROWS, body=body))
        want = evaluate(module, ids)["y"]
        after(module, f"{{scheme={scheme}}}")
        assert [str(w.type) for w in module.weights.values()] == [f"f32[{type}]"]
        assert_same(evaluate(localized(module), ids)["y"], want, scheme)


def test_ids_are_counted_per_input() -> None:
    module = parse_module(REPLICATED.format(mesh="tp=2", batch="B"))
    after(module, '{policy="error"}')
    ids, at = np.array([[0, 12, 11]], np.int32), np.array([[9, -1, 8]], np.int32)
    for text in (module, localized(module)):
        found = evaluate(text, {"ids": ids, "at": at})
        assert (int(found["ids_out_of_range"]), int(found["at_out_of_range"])) == (1, 2)


COMPUTED = """module @m {
  weight @t : f32[9, 2] = random("t", 1, 1.0)
  func @forward(%ids: i32[3], %at: i32[3]) -> (y: f32[3, 2], z: f32[3, 2]) {
    %twice = add %ids, %ids : i32[3]
    %both = add %ids, %at : i32[3]
    %y = embedding %twice, @t : f32[3, 2]
    %z = embedding %both, @t : f32[3, 2]
    return %y, %z
  }
}
"""


def test_computed_ids_are_counted_under_their_only_input() -> None:
    module = parse_module(COMPUTED)
    after(module, '{policy="error"}')
    ids, at = np.array([0, 5, 6], np.int32), np.array([9, 1, 2], np.int32)
    found = evaluate(module, {"ids": ids, "at": at})
    assert found.keys() == {"y", "z", "ids_out_of_range", "computed_ids_out_of_range"}
    assert (int(found["ids_out_of_range"]), int(found["computed_ids_out_of_range"])) == (2, 1)


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
    ids = {"ids": fresh(23).integers(-1, 13, (6, 3)).astype(np.int32)}
    want = evaluate(parse_module(DATA_PARALLEL), ids)["y"]
    module = parse_module(DATA_PARALLEL)
    run_pipeline(module, f'shard{{mesh="dp=3", plan="{tmp_path}/plan.txt"}}', [VerifyEach()])
    assert str(module.main.returned[0].type) == "f32[3*B_dp@dp, 5]", "no rank has the whole batch"
    after(module, f"{{scheme={scheme}}}")
    assert np.allclose(evaluate(localized(module), ids)["y"], want, atol=1e-5)


CALLING = """module @m mesh(tp=2) {
  weight @t : f32[13@tp, 4] = random("t", 1, 0.5, [13, 4])
  func @twice(%x: f32[6, 4]) -> (f32[6, 4]) {
    %y = add %x, %x : f32[6, 4]
    return %y
  }
  func @found(%ids: i32[6]) -> (f32[6, 4]) {
    %e = embedding %ids, @t : f32[6, 4]{sum tp}
    %y = all_reduce %e {axis="tp"} : f32[6, 4]
    return %y
  }
  func @main(%ids: i32[6]) -> (y: f32[6, 4]) {
    %e = embedding %ids, @t : f32[6, 4]{sum tp}
    %r = all_reduce %e {axis="tp"} : f32[6, 4]
    %y = call %r {callee=@twice} : f32[6, 4]
    return %y
  }
}"""


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


def test_counts_of_two_tables_are_added_and_the_larger_capacity_is_named() -> None:
    module = parse_module(TWO_TABLES)
    after(module, '{scheme=ka, capacity=1, policy="error"}')
    ids = np.array([0, 2, 4, 8, 10, 13], np.int32)  # 5 and 3 of an even row; 1 and 3 out of range
    for form in (module, localized(module)):
        results = evaluate(form, {"ids": ids})
        assert (results["ids_out_of_range"], results["capacity_overflow"]) == (4, 5)
