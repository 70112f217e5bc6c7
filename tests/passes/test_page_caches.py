"""page-caches: pages of a pool give the bits of caches of one capacity, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import irc.passes
from irc.backends.reference import ReferenceProgram
from irc.errors import Error
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.text import parse_module
from irc.text.printer import print_module
from tests.backends.decoder import call
from tests.fresh import fresh
from tests.sharded.models import MODELS, mixtral

assert irc.passes
PAGE, CAPACITY, ROWS = 4, 32, 3
Build = Callable[[], Module]


def compiled(build: Build, mesh: str, paged: bool, *more: str) -> Module:
    """The model with caches of `CAPACITY` tokens, or of as many in pages."""
    shard = [f'shard{{mesh="{mesh}"}}'] * bool(mesh)
    caches = f"page-caches{{page={PAGE}}}" if paged else "static-capacity"
    local = ["localize"] * bool(mesh)
    module = build()
    steps = ["inline, canonicalize, cse", *shard, caches, *local, *more]
    run_pipeline(module, ", ".join(steps), [VerifyEach()])
    return parse_module(print_module(module))


def pages_of(rng: np.random.Generator, count: int) -> np.ndarray:
    """Pages of a pool of `count` in random order, for every row."""
    order = rng.permutation(count)[: ROWS * CAPACITY // PAGE]
    return order.reshape(ROWS, -1).astype(np.int32)


def talk(paged: Module, whole: Module) -> None:
    """Both models get the same calls; rows whose pages are absent only have padding there."""
    rng, count = fresh(), ROWS * CAPACITY // PAGE + int(fresh(1).integers(0, 9))
    table = pages_of(rng, count)
    pool = ReferenceProgram(paged).open({"P": count})
    caches = ReferenceProgram(whole).open({"B": ROWS, "C": CAPACITY})
    past = np.zeros(ROWS, np.int64)
    for tokens in (6, 1, 1, 9, 1):
        given = call(rng.integers(0, 5, (ROWS, tokens)), past)
        taken = -(-(past + tokens) // PAGE)
        absent = np.arange(table.shape[1]) >= taken[:, None]
        given["pages"] = np.where(absent, -1, table).astype(np.int32)
        plain = {name: array for name, array in given.items() if name != "pages"}
        got, wanted = pool.step(given)["logits"], caches.step(plain)["logits"]
        assert got.tobytes() == wanted.tobytes()
        past = past + tokens - rng.integers(0, min(2, tokens), ROWS)  # the last may be padding


@pytest.mark.parametrize("fuse", ["", "fuse-attention, dce"])
@pytest.mark.parametrize("mesh", ["", "tp=2", "tp=3", "tp=4"])
@pytest.mark.parametrize("name", ["gqa", "gqa_8_2", "mqa", "mha_7", "mixtral"])
def test_every_bit(name: str, mesh: str, fuse: str) -> None:
    build: Build = mixtral if name == "mixtral" else MODELS[name]
    paged, whole = (compiled(build, mesh, on, *[fuse] * bool(fuse)) for on in (True, False))
    talk(paged, whole)
    assert [dim for dim in paged.dims if dim not in ("B", "S", "T")] == ["P"]
    kinds = {op.opname for op in paged.ops()}
    assert ("gather_pages" in kinds) == (not fuse) and ("fused_attention" in kinds) == bool(fuse)


def test_a_pool_has_no_size_of_a_conversation() -> None:
    module = compiled(MODELS["gqa"], "", True)
    types = {str(arg.name): str(arg.type) for arg in module.main.args}
    assert types["k0"] == "f32[P, 3, 4, 4]" and types["pages"] == "i32[B, 8]"
    assert module.dims["P"][0] == 1
    before = str(module)
    run_pipeline(module, "page-caches")
    assert str(module) == before


TEXT = """module @m MESH dims(B=1:2:4, S=1:2:4, C=1:8:9) {
  func @f(%c0: f32[BATCH, 2, SIZE, 2], %k: f32[BATCH, S, 4], %past: i32[BATCH], %d0: f32[B, 4])
      -> (c: f32[BATCH, 2, SIZE, 2] aliases %c0, z: f32[BATCH, 2, SIZE, 2]) {
    %c = cache_update %c0, %k, %past : f32[BATCH, 2, SIZE, 2]
    %z = neg %READ : f32[BATCH, 2, SIZE, 2]
    return %STATE, %z
  }
}"""
WORDS = {"BATCH": "B", "SIZE": "C", "READ": "c", "STATE": "c", "MESH": ""}


def text_with(**changes: str) -> Module:
    text = TEXT
    for old, new in (WORDS | changes).items():
        text = text.replace(old, new)
    return parse_module(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"READ": "c0"}, "states that one cache_update each writes, found %c0"),
        ({"STATE": "z"}, "states that one cache_update each writes, found %c0"),
        ({"BATCH": "B@dp", "MESH": "mesh(dp=2)"}, "are sharded over dp"),
        ({"SIZE": "10"}, "10 tokens, which are no pages of 4"),
        ({"d0": "pages"}, "an argument pages"),
    ],
)
def test_refusals(changes: dict[str, str], message: str) -> None:
    with pytest.raises(Error, match=message):
        run_pipeline(text_with(**changes), "page-caches{page=4}")


def test_the_capacity_is_rounded_up_to_pages() -> None:
    module = text_with()
    run_pipeline(module, "page-caches{page=4}", [VerifyEach()])
    assert "gather_pages %c, %pages : f32[B, 2, 12, 2]" in str(module)
