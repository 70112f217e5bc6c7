"""Pages of a pool on the host: the bits of caches of one capacity, and one graph for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.base import Program
from irc.backends.cuda.backend import backend
from irc.backends.cuda.codegen.attention import prefill_attention
from irc.backends.cuda.codegen.decode_attention import decode_attention
from irc.backends.cuda.codegen.rope_and_cache import rope_and_cache
from irc.backends.cuda.execute.load import program_of
from irc.backends.reference import ReferenceProgram
from irc.frontends import random_weights
from irc.frontends.models import DecoderConfig
from irc.frontends.models.families.llama import LLAMA
from irc.generation.greedy import greedy
from irc.generation.pages import PagePool
from irc.generation.rows import Rows
from irc.ir.core import Module
from irc.ir.dtypes import numpy_dtype
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.cuda.decode_cases import made_by, operations_of
from tests.cuda.emulate import run_templates
from tests.cuda.fake_cuda import World
from tests.cuda.regimes import regime_of
from tests.cuda.test_program import compiled
from tests.fresh import fresh
from tests.gpu_ranks import needs_gpus
from tests.sharded.models import TINY
from tests.tensorrt.test_runtime import step_of

PAGE, CAPACITY, CONVERSATIONS = 4, 32, 9
PAGES = CAPACITY // PAGE
HEADS: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TEXT = """module @m dims(B=1:1:8, S=1:1:64) {{
  func @f(%x: bf16[B, S, 64], %y: bf16[B, S, 32], %z: bf16[B, S, 32], %past: i32[B],
          %positions: i32[B, S], %k0: {cache}, %v0: {cache}, %pages: i32[B, N])
      -> (mixed: bf16[B, S, 64], k0: {cache} aliases %k0, v0: {cache} aliases %v0) {{
    %mixed, %k1, %v1 = fused_attention %x, %y, %z, %k0, %v0, %past,
      positions=%positions{pages} {{head_dim=16, causal}} : bf16[B, S, 64], {cache}, {cache}
    return %mixed, %k1, %v1
  }}
}}"""


def results(
    paged: bool, inputs: dict[str, Any], tokens: int, maker: Any = None
) -> list[np.ndarray]:
    """What attention gives, and the caches: by `maker`, or by the kernels of a prefill."""
    count, _, size, _ = inputs["k0"].shape
    cache = f"bf16[{'P' if paged else 'B'}, 2, {size}, 16]"
    text = TEXT.format(cache=cache, pages=", pages=%pages" * paged)
    text = text.replace("i32[B, N]", f"i32[B, {inputs['pages'].shape[1]}]")
    module = parse_module(text.replace("dims(", "dims(P=1:1:99, "))
    if maker is None:
        run_pipeline(module, "expand{ops=[fused_attention]}")
    sizes = {"B": 3, "S": tokens, "P": count}
    makers: dict[str, Any] = {
        "fused_attention": maker,
        "rope_and_cache": rope_and_cache,
        "attention": prefill_attention,
    }
    made = [
        each
        for op in operations_of(module)
        if op.opname in makers
        for each in made_by(makers[op.opname], op, regime_of(sizes))
    ]
    arrays = {arg: inputs[str(arg.name)] for arg in module.main.args}
    found = run_templates(made, arrays, sizes)
    return [found[value] for value in module.main.returned]


@pytest.mark.parametrize("size", [16, 4])
@pytest.mark.parametrize(
    ("tokens", "maker"), [(1, None), (19, None), (1, decode_attention), (3, decode_attention)]
)
def test_kernels_give_the_same_bits(tokens: int, maker: Any, size: int) -> None:
    rng, row = fresh(tokens), 64 // size
    past = rng.integers(0, 65 - tokens, 3).astype(np.int32)
    table = rng.permutation(3 * row + 5)[: 3 * row].reshape(3, row).astype(np.int32)

    def drawn(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape).astype(numpy_dtype("bf16"))

    inputs = {
        "x": drawn(3, tokens, 64),
        **{name: drawn(3, tokens, 32) for name in "yz"},
        "past": past,
        "positions": past[:, None] + np.arange(tokens, dtype=np.int32),
        **{name: drawn(3 * row + 5, 2, size, 16) for name in ("k0", "v0")},
    }

    def whole(pool: np.ndarray) -> np.ndarray:
        return pool[table].swapaxes(1, 2).reshape(3, 2, 64, 16)

    used = np.arange(row) * size < past[:, None] + tokens
    inputs["pages"] = np.where(used, table, -1).astype(np.int32)
    got = results(True, inputs, tokens, maker)
    caches = {name: whole(inputs[name]) for name in ("k0", "v0")}
    wanted = results(False, inputs | caches, tokens, maker)
    assert got[0].tobytes() == wanted[0].tobytes()
    for pool, cache, old in zip(got[1:], wanted[1:], (inputs["k0"], inputs["v0"]), strict=True):
        assert whole(pool).tobytes() == cache.tobytes()
        others = np.setdiff1d(np.arange(len(pool)), table[used])
        assert pool[others].tobytes() == old[others].tobytes()


@pytest.mark.parametrize(("tokens", "maker"), [(19, None), (3, decode_attention)])
def test_padding_without_pages_is_not_written(tokens: int, maker: Any) -> None:
    rng = fresh()
    inputs = {
        **{
            name: np.zeros((3, tokens, 32 * (1 + (name == "x"))), numpy_dtype("bf16"))
            for name in "xyz"
        },
        "past": np.zeros(3, np.int32),
        "positions": np.zeros((3, tokens), np.int32),
        **{
            name: rng.uniform(1, 2, (5, 2, 4, 16)).astype(numpy_dtype("bf16"))
            for name in ("k0", "v0")
        },
        "pages": np.full((3, 16), -1, np.int32),
    }
    inputs["pages"][1, 0] = 2
    for pool, old in zip(
        results(True, inputs, tokens, maker)[1:], (inputs["k0"], inputs["v0"]), strict=True
    ):
        count = min(tokens, 4)
        assert not pool[2, :, :count].any()
        pool[2, :, :count] = old[2, :, :count]
        assert pool.tobytes() == old.tobytes()


def test_conversations_share_a_graph(tmp_path: Path) -> None:
    """Nine conversations in turn, each over pages of its own, as one stream."""
    world = World(compiled("gqa", "", f"inline, page-caches{{page={PAGE}}}"), tmp_path)
    (program,), driver = world.programs, world.gpus[0].driver
    pool = program.open({"P": CONVERSATIONS * PAGES})
    reference = ReferenceProgram(compiled("gqa", ""))
    alone = [reference.open({"B": 1, "C": CAPACITY}) for _ in range(CONVERSATIONS)]
    table = fresh().permutation(CONVERSATIONS * PAGES).astype(np.int32).reshape(-1, 1, PAGES)
    for turn in range(3):
        for conversation in range(CONVERSATIONS):
            step = step_of(1, turn, 3 + conversation)
            got = pool.step(step | {"pages": table[conversation]})["logits"]
            wanted = alone[conversation].step(step)["logits"]
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        assert sum(call[0] == "capture" for call in driver.calls) == 1
    world.close()


def test_tokens_are_fed_back_over_pages(tmp_path: Path) -> None:
    """Pages of all tokens are taken before the first; without enough, step by step."""
    world = World(compiled("gqa", "", f"inline, next-tokens, page-caches{{page={PAGE}}}"), tmp_path)
    (program,) = world.programs
    prompt = fresh().integers(0, 37, 3).tolist()
    wanted = greedy(ReferenceProgram(compiled("gqa", "")), prompt, 9, (), {}).tokens
    assert greedy(program, prompt, 9, (), {}).tokens == wanted
    pool = PagePool(program, 2 * PAGE)
    rows = Rows.empty(program, {}, 1, 0, pool)
    (token,) = rows.next_tokens([prompt]).tolist()
    assert rows.ahead(token, 9) is None and pool.free_tokens == PAGE
    ahead = rows.ahead(token, 3)
    assert ahead is not None and [token, *np.concatenate([*ahead]).tolist()] == [*wanted[:4]]
    assert pool.free_tokens == 0 and rows.past.tolist() == [6]
    world.close()


def bf16_model(first: str) -> Module:
    """A Llama whose kernels are those of real sizes, after a pass."""
    config = DecoderConfig(**TINY | HEADS)
    module = random_weights(LLAMA.trace(config, "bf16", name="tiny"), 3)
    run_pipeline(module, f"inline, {first}, {backend.default_pipeline}")
    return module


def talk(program: Program, pool: PagePool | None) -> bytes:
    """The logits of nine conversations, a prompt and some tokens each, in turn."""
    rng = fresh(1)
    rows = [Rows.empty(program, {}, 1, 512, pool) for _ in range(CONVERSATIONS)]
    found = [row.step([rng.integers(0, 37, 5).tolist()]) for row in rows]
    found += [row.step([[token]]) for token in range(7) for row in rows]
    return np.stack(found).tobytes()


@pytest.mark.gpu
def test_conversations_share_a_graph_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits that each has with caches of its own, which take a graph each."""
    needs_gpus(1)
    captures: list[object] = []
    program = program_of(bf16_model("page-caches"), tmp_path / "paged")
    kind = type(program.rank.stream)
    capture = kind.capture

    def counted(*arguments: Any) -> Any:
        captures.append(arguments)
        return capture(*arguments)

    monkeypatch.setattr(kind, "capture", counted)
    paged = talk(program, PagePool(program, CONVERSATIONS * 64))
    assert len(captures) == 2  # for prompts, and for tokens
    program.close()
    captures.clear()
    program = program_of(bf16_model("static-capacity"), tmp_path / "whole")
    whole = talk(program, None)
    assert len(captures) == CONVERSATIONS
    program.close()
    assert paged == whole


def test_padding_without_a_page_reads_the_last_one() -> None:
    """Its values are multiplied by 0, and another page may have NaN."""
    rng = fresh()
    kind, pages = numpy_dtype("bf16"), np.full((3, 4), -1, np.int32)
    pages[:, :3] = rng.permutation(np.arange(1, 16))[:9].reshape(3, 3)
    past = np.array([40, 33, 47], np.int32)
    inputs: dict[str, Any] = {
        "x": rng.uniform(-1, 1, (3, 17, 64)).astype(kind),
        **{name: rng.uniform(-1, 1, (3, 17, 32)).astype(kind) for name in "yz"},
        "past": past,
        "positions": past[:, None] + np.arange(17, dtype=np.int32),
        **{name: rng.uniform(-1, 1, (17, 2, 16, 16)).astype(kind) for name in ("k0", "v0")},
        "pages": pages,
    }
    for name in ("k0", "v0"):
        inputs[name][0], inputs[name][16] = np.nan, 0
    found = results(True, inputs, 17)[0]
    for row, count in enumerate((48 - past).tolist()):
        assert np.isfinite(found[row, :count].astype(np.float32)).all()
