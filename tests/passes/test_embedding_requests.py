"""What is asked of rewrite-embeddings by name: it is done, or an Error says why it cannot be."""

from __future__ import annotations

import pytest

from irc.backends.reference import evaluate
from irc.errors import Error
from irc.text import parse_module
from tests.fresh import fresh
from tests.passes.embedding_lab import assert_same, drawn, localized
from tests.passes.test_rewrite_embeddings import COLUMNS, FOUND, LEFT, ROWS, after

SILU = (
    "%e = embedding %ids, @t : f32[4, 8@tp]\n%s = silu %e : f32[4, 8@tp]\n"
    '%y = all_gather %s {axis="tp", dim=1} : f32[4, 8]'
)


@pytest.mark.parametrize("option", ["scheme=cyclic", 'tables=["t cyclic"]'])
@pytest.mark.parametrize(
    ("type", "body", "reason"),
    [
        (COLUMNS, SILU, "silu takes its columns as they are sharded"),
        ("12, 8", "%y = embedding %ids, @t : f32[4, 8]", "its table is not sharded; split it by"),
    ],
)
def test_a_scheme_that_no_lookup_supports(option: str, type: str, body: str, reason: str) -> None:
    text = LEFT.format(type=type, body=body)
    if "tables" in option and type == "12, 8":
        after(parse_module(text), "{" + option + "}")  # a row splits a whole table over tp
        return
    with pytest.raises(
        Error, match=f"cyclic was requested, but no lookup can have it: @t: {reason}"
    ):
        after(parse_module(text), "{" + option + "}")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ('tables=["nothing* ca"]', r'tables has "nothing\* ca", but no table .* those are @t$'),
        ("memory=-1", "memory cannot be negative"),
        ("price=-100", "price cannot be negative"),
    ],
)
def test_invalid_options(option: str, message: str) -> None:
    with pytest.raises(Error, match=f"(?m){message}"):
        after(
            parse_module(
                LEFT.format(type=ROWS, body=FOUND + '%y = all_reduce %e {axis="tp"} : f32[4, 8]')
            ),
            "{" + option + "}",
        )


ONE = """module @m mesh(dp=2, tp=1) {
  weight @t : f32[12, 8] = random("t", 1, 1.0)
  func @forward(%ids: i32[4@dp]) -> (f32[4@dp, 8]) {
    %y = embedding %ids, @t : f32[4@dp, 8]
    return %y
  }
}"""


@pytest.mark.parametrize("row", ["* ca@tp", "* rs", "* cyclic"])
def test_an_axis_of_one_rank_shards_nothing(row: str) -> None:
    scheme = row.split()[1].partition("@")[0]
    with pytest.raises(Error, match=f"{scheme} was requested, .*: @t: its axes have one rank"):
        after(parse_module(ONE), f'{{tables=["{row}"]}}')
    for other in ("* replicated", "* rows@dp", "* auto", "* keep"):
        after(parse_module(ONE), f'{{tables=["{other}"]}}')


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            'tables=["* ca@tp", "t kd"]',
            'tables has "t kd", but an earlier row decides for all of them; put it first',
        ),
        ('tables=["t keep", "* keep"]', r'tables has "\* keep", but an earlier row'),
        ('scheme=ca, tables=["* keep"]', "ca was requested, but rows of tables decide for every"),
    ],
)
def test_rows_without_effect_are_errors(option: str, message: str) -> None:
    body = FOUND + '%y = all_reduce %e {axis="tp"} : f32[4, 8]'
    with pytest.raises(Error, match=message):
        after(parse_module(LEFT.format(type=ROWS, body=body)), "{" + option + "}")


def test_a_later_row_is_for_the_other_tables() -> None:
    notes = after(parse_module(USERS), '{tables=["users cd@dp", "* keep"]}').notes
    assert [note[:6] for note in notes if "is looked up by CD" in note] == ["@users"]


def test_a_module_without_lookups_has_no_scheme() -> None:
    text = "module @m mesh(tp=2) { func @forward(%x: f32[4]) -> (f32[4]) { return %x } }"
    with pytest.raises(Error, match="ca was requested, but this module looks nothing up"):
        after(parse_module(text), "{scheme=ca}")
    after(parse_module(text), "{scheme=auto}")


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


def test_a_scheme_that_fits_no_replicated_table_is_an_error() -> None:
    with pytest.raises(
        Error, match=r"ca was requested.*@users: dimension 0 of its ids is sharded over dp"
    ):
        after(parse_module(USERS), "{scheme=ca}")
