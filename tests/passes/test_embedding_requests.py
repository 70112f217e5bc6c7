"""What is asked of rewrite-embeddings by name: it is done, or an Error says why it cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.errors import Error
from irc.text import parse_module
from tests.fresh import fresh
from tests.passes.embedding_lab import assert_same, drawn, localized
from tests.passes.test_rewrite_embeddings import (
    CALLING,
    COLUMNS,
    FOUND,
    LEFT,
    REPLICATED,
    ROWS,
    after,
)

SHARDED = LEFT.format(type=ROWS, body=FOUND + '%y = all_reduce %e {axis="tp"} : f32[4, 8]')
PLAIN = LEFT.format(type="12, 8", body="%y = embedding %ids, @t : f32[4, 8]")
SILU = LEFT.format(
    type=COLUMNS,
    body="%e = embedding %ids, @t : f32[4, 8@tp]\n%s = silu %e : f32[4, 8@tp]\n"
    '%y = all_gather %s {axis="tp", dim=1} : f32[4, 8]',
)
TWICE = LEFT.format(
    type=ROWS,
    body=FOUND + '%a = add %e, %e : f32[4, 8]{sum tp}\n%y = all_reduce %a {axis="tp"} : f32[4, 8]',
)
NONE = "module @m mesh(tp=2) { func @forward(%x: f32[4]) -> (f32[4]) { return %x } }"
ONE = """module @m mesh(dp=2, tp=1) {
  weight @t : f32[12, 8] = random("t", 1, 1.0)
  func @forward(%ids: i32[4@dp]) -> (f32[4@dp, 8]) {
    %y = embedding %ids, @t : f32[4@dp, 8]
    return %y
  }
}"""
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
NO_TABLE = "but it decides for no table"
NO_LOOKUP = "cyclic was requested, but no lookup can have it: @t: "
ERRORS = [
    (SHARDED, 'tables=["nothing* ca"]', rf'"nothing\* ca", {NO_TABLE} that is looked up \(@t\)'),
    (SHARDED, "memory=-1", "memory cannot be negative; it is -1"),
    (SHARDED, "hot=-1", "hot cannot be negative; it is -1"),
    (SHARDED, 'tables=["* ca@tp", "t kd"]', f'tables has "t kd", {NO_TABLE}'),
    (SHARDED, 'tables=["t keep", "* keep"]', rf'tables has "\* keep", {NO_TABLE}'),
    (SHARDED, 'scheme=ca, tables=["* keep"]', "ca was .* none is left for it"),
    (SHARDED.replace("y:", "capacity_overflow:"), "scheme=ka, capacity=1", "the name is taken"),
    (CALLING, "scheme=ka, capacity=1", "and @found has one; put inline in front"),
    (NONE, "scheme=ca", "ca was .* looked up \\(none\\) none is left"),
    (USERS, "scheme=ca", "ca was requested.*@users: dimension 0 of its ids is sharded over dp"),
    (TWICE, "scheme=cyclic", f"{NO_LOOKUP}its partial sum is used in several places"),
    (TWICE, 'tables=["t cyclic"]', f"{NO_LOOKUP}its partial sum is used in several places"),
    (PLAIN, "scheme=cyclic", f"{NO_LOOKUP}its table is not sharded; shard it by"),
    (ONE, 'tables=["* ca@tp"]', "ca was requested, .*: @t: its axes have one rank"),
    (ONE, 'tables=["* rs"]', "rs was requested, .*: @t: its axes have one rank"),
    (ONE, 'tables=["* cyclic"]', "cyclic was requested, .*: @t: its axes have one rank"),
    (REPLICATED.format(mesh="tp=2", batch="B"), 'tables=["place* ca@xp"]', "has no axis 'xp'"),
    (
        REPLICATED.format(mesh="dp=2, tp=2", batch="2*B@dp"),
        'tables=["token* ca@dp"]',
        r"over dp, but it is f32\[12@tp, 4\] already; leave @dp out",
    ),
]
ACCEPTED = [
    (PLAIN, "t cyclic"),
    (NONE, ""),
    *((ONE, row) for row in ("* replicated", "* rows@dp", "* auto", "* keep")),
]


@pytest.mark.parametrize(("text", "options", "message"), ERRORS)
def test_requests_that_nothing_meets_are_errors(text: str, options: str, message: str) -> None:
    with pytest.raises(Error, match=f"(?m){message}"):
        after(parse_module(text), f"{{{options}}}")


@pytest.mark.parametrize(("text", "row"), ACCEPTED)
def test_requests_that_are_met(text: str, row: str) -> None:
    after(parse_module(text), f'{{tables=["{row}"]}}' if row else "")


@pytest.mark.parametrize("scheme", ["rows", "cyclic", "replicated", "columns"])
def test_columns_that_are_used_as_they_are_sharded(scheme: str) -> None:
    ids = {"ids": drawn(fresh(1), 12, (4,)), "x": np.zeros((4, 8), np.float32)}
    wanted = evaluate(parse_module(SILU), ids)
    module = parse_module(SILU)
    notes = after(module, f"{{scheme={scheme}}}").notes
    assert ("is looked up by" in notes[0]) == (scheme != "columns")
    for found in (evaluate(module, ids), evaluate(localized(module), ids)):
        assert_same(found["y"], wanted["y"], scheme, "RA")


def test_a_later_row_is_for_the_other_tables() -> None:
    notes = after(parse_module(USERS), '{tables=["users cd@dp", "* keep"]}').notes
    assert [note[:6] for note in notes if "is looked up by CD" in note] == ["@users"]


@pytest.mark.parametrize(
    ("scheme", "users", "items"),
    [
        ("cd", ("columns", "CD"), None),
        ("kd", ("cyclic", "KD"), None),
        ("rsd", ("rows", "RSD"), None),
        ("columns", ("columns", "CD"), ("columns", "CD")),
        ("cyclic", ("cyclic", "KD"), ("cyclic", "KD")),
        ("keep", None, None),
    ],
)
def test_replicated_tables_are_sharded_over_the_axis_of_their_ids(
    scheme: str, users: tuple[str, str] | None, items: tuple[str, str] | None
) -> None:
    rng = fresh()
    given = {"u": drawn(rng, 12, (4, 3)), "i": drawn(rng, 9, (5,))}
    wanted = evaluate(parse_module(USERS), given)
    module = parse_module(USERS)
    notes = after(module, f"{{scheme={scheme}}}").notes
    for table, found in (("@users", users), ("@items", items)):
        said = [note for note in notes if note.startswith(table) and "is looked up by" in note]
        assert bool(said) == (found is not None)
        if found is not None:
            assert f"is looked up by {found[1]}" in said[0]
            assert module.weights[table[1:]].type.sharded
    local = localized(module)
    for name, rows in evaluate(local, given).items():
        assert_same(rows, wanted[name], (scheme, name), "RA")
