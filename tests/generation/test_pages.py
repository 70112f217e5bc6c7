"""Rows over pages of one pool give what rows with caches of their own give."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import irc.passes
from irc.backends.base import Port, Ports
from irc.backends.reference import ReferenceProgram
from irc.errors import Error
from irc.generation.inputs import cache_range, complete
from irc.generation.pages import PagePool, layout
from irc.generation.rows import Rows
from irc.ir.dims import symbol
from irc.pipeline import run_pipeline
from tests.backends.decoder import build
from tests.fresh import fresh
from tests.models.runners import talks

assert irc.passes
PAGE = 4
TOKENS, CAPACITY = 61, 64


def program(paged: bool = True) -> ReferenceProgram:
    module = build(max_position_embeddings=CAPACITY)
    run_pipeline(module, f"page-caches{{page={PAGE}}}" if paged else "static-capacity")
    return ReferenceProgram(module)


def random_tokens(count: int) -> list[int]:
    return fresh(count).integers(0, TOKENS, count).tolist()


def test_rows_that_are_moved_and_cleared() -> None:
    """Rows share pages that they have copied, until one of them writes."""
    pool, used = PagePool(program(), 4 * CAPACITY), 0
    paged, whole = Rows.empty(program(), {}, 4, 0, pool), Rows.empty(program(False), {}, 4, 64)
    for (got, texts), (wanted, same) in zip(talks(paged, 40), talks(whole, 40), strict=True):
        assert texts == same and got.tobytes() == wanted.tobytes()
        used = sum(-(-int(past) // PAGE) for past in paged.past)
        assert pool.free_tokens >= 4 * CAPACITY - used * PAGE
    assert pool.free_tokens > 4 * CAPACITY - used * PAGE  # some are shared
    paged.clear(range(4))
    assert pool.free_tokens == 4 * CAPACITY


def test_conversations_take_and_give_pages() -> None:
    paged, reference = program(), program(False)
    pool = PagePool(paged, 10 * PAGE)
    texts = [random_tokens(n) for n in (9, 5, 13)]
    rows = [Rows.empty(paged, {}, 1, 0, pool) for _ in texts]
    for at in range(2, 14):  # in turn, a token each
        for text, row in zip(texts, rows, strict=True):
            new = text[:2] if at == 2 else text[at - 1 : at]
            if new:
                got = row.step([new])
                wanted = Rows(reference, {}, [text[:at]], CAPACITY).start()
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert pool.free_tokens == PAGE  # 3 + 2 + 4 are taken
    rows[2].past = np.array([8])
    assert pool.free_tokens == 3 * PAGE
    first = rows[1].past.tolist()
    with pytest.raises(Error, match="expected 4 free pages of 4 tokens, found 3"):
        rows[1].step([random_tokens(17)])
    assert rows[1].past.tolist() == first and pool.free_tokens == 3 * PAGE
    row = rows.pop(1)
    del row
    gc.collect()
    assert pool.free_tokens == 5 * PAGE
    with pytest.raises(Error, match="has at most 64 tokens, found one of 69"):
        Rows.empty(paged, {}, 1, 0, pool).step([random_tokens(69)])


def test_a_row_without_room_leaves_the_tokens_of_the_others() -> None:
    """Rows that share pages write, of which the last one gets too few."""
    rows = Rows.empty(program(), {}, 3, 0, PagePool(program(), 4 * PAGE))
    text, new = random_tokens(PAGE + 2), random_tokens(1)
    rows.step([text])
    rows.copy([0, 0], [1, 2])
    with pytest.raises(Error, match="expected 1 free pages of 4 tokens, found 0"):
        rows.step([new, new, random_tokens(PAGE)])
    assert rows.past.tolist() == [len(text)] * 3
    wanted = Rows(program(False), {}, [text + new], CAPACITY).start()
    for row in range(3):
        np.testing.assert_allclose(rows.step([new], row), wanted, rtol=1e-5, atol=1e-5)


def test_nobody_reads_nan_of_another_row() -> None:
    """Pages of zeros take the place of absent ones, and of those of a row that has NaN."""
    pool = PagePool(program(), 4 * PAGE)
    rows = Rows.empty(program(), {}, 2, 0, pool)
    rows.step([random_tokens(3 * PAGE)])
    rows.step([random_tokens(PAGE)], 1)
    assert pool.free_tokens == 0 and rows.pages is not None
    states = [array for (array,) in pool.stream.states.values()]  # type: ignore[attr-defined]
    assert all(len(array) == 5 and array[:4].any() and not array[4].any() for array in states)
    rows.pages.zero([0])
    for (array,) in pool.stream.states.values():  # type: ignore[attr-defined]
        assert not array[rows.pages.table[0, :3]].any() and array[rows.pages.table[1, 0]].any()


def test_a_run_without_states_has_pages_of_its_own() -> None:
    ids = fresh().integers(0, TOKENS, (2, 7))
    results = []
    for model in (program(), program(False)):
        limits = cache_range(model.ports, {})
        assert limits[1] == CAPACITY
        results.append(model.run(complete(model.ports, {"input_ids": ids}, limits))["logits"])
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)


def test_pages_that_a_run_is_given() -> None:
    model = program()
    limits, given = cache_range(model.ports, {}), {"input_ids": fresh().integers(0, TOKENS, (1, 7))}
    table = np.full((1, CAPACITY // PAGE), -1, np.int32)
    table[0, :2] = 5, 3
    arrays = complete(model.ports, {**given, "pages": table}, limits)
    wanted = model.run(complete(model.ports, given, limits))["logits"]
    np.testing.assert_array_equal(model.run(arrays)["logits"], wanted)
    pools = {port.name: arrays[port.name][:5] for port in model.ports.states}
    with pytest.raises(Error, match="pages has page 5, but k0 has 5 pages"):
        complete(model.ports, {**given, **pools, "pages": table}, limits)


def test_an_input_called_pages_of_another_model() -> None:
    table, state = Port("pages", "i32", (symbol("B"), 2)), Port("s", "f32", (symbol("B"), 4))
    cache = Port("k0", "f32", (symbol("B"), 2, symbol("C"), 8))
    for states in ((state,), (cache,), (cache, state), ()):
        assert layout(Ports((table,), states, ())) is None


def test_a_pool_needs_a_program_with_pages() -> None:
    with pytest.raises(Error, match="compile it with --page-caches"):
        PagePool(program(False), 64)
