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
        (COLUMNS, SILU, "silu takes its columns as they are split"),
        ("12, 8", "%y = embedding %ids, @t : f32[4, 8]", "its table is not split; split it by"),
    ],
)
def test_a_scheme_that_no_lookup_can_have(option: str, type: str, body: str, reason: str) -> None:
    text = LEFT.format(type=type, body=body)
    if "tables" in option and type == "12, 8":
        after(parse_module(text), "{" + option + "}")  # a row splits a whole table over tp
        return
    with pytest.raises(
        Error, match=f"cyclic was asked for, but no lookup can have it: @t: {reason}"
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
def test_options_that_mean_nothing(option: str, message: str) -> None:
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
def test_an_axis_of_one_rank_splits_nothing(row: str) -> None:
    scheme = row.split()[1].partition("@")[0]
    reason = f"{scheme} was asked for, .*: @t: its axes have one rank"
    with pytest.raises(Error, match=reason):
        after(parse_module(ONE), f'{{tables=["{row}"]}}')


@pytest.mark.parametrize("row", ["* replicated", "* rows@dp", "* auto", "* keep"])
def test_beside_an_axis_of_one_rank(row: str) -> None:
    """What is there already, what is over another axis, and what names no scheme."""
    after(parse_module(ONE), f'{{tables=["{row}"]}}')


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            'tables=["* ca@tp", "t kd"]',
            'tables has "t kd", but an earlier row decides for all of them; put it first',
        ),
        ('tables=["t keep", "* keep"]', r'tables has "\* keep", but an earlier row'),
        ('scheme=ca, tables=["* keep"]', "ca was asked for, but rows of tables decide for every"),
    ],
)
def test_what_earlier_rows_hide(option: str, message: str) -> None:
    body = FOUND + '%y = all_reduce %e {axis="tp"} : f32[4, 8]'
    with pytest.raises(Error, match=message):
        after(parse_module(LEFT.format(type=ROWS, body=body)), "{" + option + "}")


def test_a_later_row_is_for_the_other_tables() -> None:
    notes = after(parse_module(USERS), '{tables=["users cd@dp", "* keep"]}').notes
    assert [note[:6] for note in notes if "is looked up by CD" in note] == ["@users"]


def test_a_module_without_lookups_has_no_scheme() -> None:
    text = "module @m mesh(tp=2) { func @forward(%x: f32[4]) -> (f32[4]) { return %x } }"
    with pytest.raises(Error, match="ca was asked for, but this module looks nothing up"):
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
def test_whole_tables_go_over_the_axis_that_splits_their_ids(
    scheme: str, users: tuple[str, str] | None, items: tuple[str, str] | None
) -> None:
    rng = fresh()
    given = {
        "u": drawn(rng, 12, (4, 3)),
        "i": drawn(rng, 9, (5,)),
    }
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


def test_a_scheme_that_fits_no_whole_table_says_which_do() -> None:
    with pytest.raises(
        Error, match=r"ca was asked for.*@users: dimension 0 of its ids is split over dp"
    ):
        after(parse_module(USERS), "{scheme=ca}")


def test_a_second_copy_that_is_asked_for_is_no_refusal() -> None:
    body = FOUND + (
        '%y = all_reduce %e {axis="tp"} : f32[4, 8]\n%w = mul @t, @t : f32[12@tp, 8]\n'
        "%n = neg %w : f32[12@tp, 8]"
    )
    module = parse_module(LEFT.format(type=ROWS, body=body))
    notes = after(module, "{scheme=ca}").notes
    (line,) = [note for note in notes if note.startswith("  CA")]
    assert line.endswith("; takes a second copy of a table with other uses, as asked; chosen")
    (line,) = [note for note in notes if note.startswith("  KA")]
    assert line.endswith("; takes a second copy of a table with other uses")
