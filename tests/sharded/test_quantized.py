"""Quantized weights and models over ranks: scales follow their blocks, no block is split, and the
logits are those of the quantized model on one rank."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module, Op, Weight
from irc.ir.mesh import Mesh
from irc.ir.verify import verify
from irc.passes.quantize import QuantizeModule
from irc.passes.shared.parameters import weights_of
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.quantization.schemes import SCHEMES
from irc.quantization.sites import find_sites
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh
from tests.rows import ROWS, row_error
from tests.sharded.checking import BEFORE, FUSE, plan_file, spread
from tests.sharded.models import logits, mixtral, prompt_of, tiny_llama

assert irc.passes


def mlp(kind: str, ffn: int, block: int) -> Module:
    """A quantized feed-forward of 24 features: scales per row, in 4 blocks, and per block."""
    number = {"i4": 4.0, "u4": 4.0, "i8": 40.0, "f8e4m3": 1.0}[kind]
    zero = (
        f'weight @down.zero : u4[24, {ffn // block}] = random("z", 1, 4.0)' if kind == "u4" else ""
    )
    given = ", zero=@down.zero" if zero else ""
    return irc.parse(f"""module @m dims(B=1:3:8) {{
      weight @gate_proj.weight : {kind}[{ffn}, 24] = random("g", 1, {number})
      weight @gate_proj.scale : f32[{ffn}, 1] = random("gs", 1, 0.05)
      weight @up_proj.weight : {kind}[{ffn}, 24] = random("u", 1, {number})
      weight @up_proj.scale : f32[{ffn}, 4] = random("us", 1, 0.05)
      weight @down_proj.weight : {kind}[24, {ffn}] = random("d", 1, {number})
      weight @down_proj.scale : f32[24, {ffn // block}] = random("ds", 1, 0.05)
      {zero}
      func @forward(%x: f32[B, 24]) -> (y: f32[B, 24]) {{
        %gate = dequantize @gate_proj.weight, @gate_proj.scale : f32[{ffn}, 24]
        %up = dequantize @up_proj.weight, @up_proj.scale : f32[{ffn}, 24]
        %down = dequantize @down_proj.weight, @down_proj.scale{given} : f32[24, {ffn}]
        %g = linear %x, %gate : f32[B, {ffn}]
        %u = linear %x, %up : f32[B, {ffn}]
        %s = silu %g : f32[B, {ffn}]
        %m = mul %s, %u : f32[B, {ffn}]
        %y = linear %m, %down : f32[B, 24]
        return %y
      }}
    }}""")


@pytest.mark.parametrize(
    ("kind", "group_size", "ffn", "block"),
    [
        ("i4", 2, 24, 6),
        ("i8", 3, 30, 5),
        ("f8e4m3", 4, 16, 8),
        ("u4", 3, 64, 8),
        ("u4", 3, 192, 24),
    ],
)
def test_sharded_is_unsharded(
    kind: str, group_size: int, ffn: int, block: int, tmp_path: Path
) -> None:
    """Features get zeros where their blocks do not divide, as 8 blocks and 3 ranks."""
    x = {"x": fresh(group_size + ffn).standard_normal((3, 24), np.float32)}
    module = mlp(kind, ffn, block)
    wanted = evaluate(module, x)["y"]
    spread(module, x, f"tp={group_size}")
    scales = module.weights["down_proj.scale"].type.shape
    assert scales == (24, -(-(ffn // block) // group_size))
    artifact = irc.compile(mlp(kind, ffn, block), tmp_path / "out", mesh=f"tp={group_size}")
    limit = 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(artifact.run(x)["y"], wanted, rtol=1e-4, atol=limit)


def touched_weights(module: Module) -> list[Op]:
    """What gathers or masks a quantized weight whenever the module runs."""
    return [
        op
        for op in module.ops()
        if op.opname in ("all_gather", "where")
        for value in op.operands
        if isinstance(value, Weight) or weights_of(value)
    ]


SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2}


def llama(**sizes: Any) -> Module:
    """Heads that two ranks do not share; blocks of 32 fit the shards of two and three ranks."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192}
    return tiny_llama(**SIZES | heads | sizes)


def experts() -> Module:
    """Four experts."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    return mixtral(4, 2, **SIZES | heads)


def quantized(scheme: str, mesh: str, folder: Path) -> Module:
    """A model in a scheme, calibrated by random inputs of channels of which some are much larger
    than others."""
    module = experts() if "ep" in mesh else llama()
    module.mesh = Mesh.parse(mesh)
    rng, calibration = fresh(11), ""
    if SCHEMES[scheme].algorithm != "round":
        sizes = 10 ** rng.uniform(-1, 1, 512)
        inputs = {
            site.name: rng.standard_normal((64, size)) * sizes[:size]
            for site in find_sites(module)
            for size in [site.shape[site.inputs]]
        }
        write_folder(folder, {name: x.astype(np.float32) for name, x in inputs.items()})
        calibration = f", calibration={json.dumps(str(folder))}"
    run_pipeline(module, f"{BEFORE}, quantize{{scheme={scheme}{calibration}}}")
    return module


@pytest.mark.parametrize(
    ("scheme", "mesh"), [*zip(SCHEMES, cycle(("tp=2", "tp=3", "ep=2", "pp=2")), strict=False)]
)
def test_ranks_give_the_same_logits(scheme: str, mesh: str, tmp_path: Path) -> None:
    module = quantized(scheme, mesh, tmp_path)
    ids = prompt_of(module, fresh(7), ROWS)
    wanted = logits(module, ids)
    stages = ", pipeline" if "pp" in mesh else ""
    shard = f'shard{{mesh="{mesh}"}}, fuse-gated-mlp{stages}'
    for text in (shard, f"localize, {FUSE}, cse, fold, dce"):
        run_pipeline(module, text)
        off = row_error(logits(module, ids), wanted, bool(SCHEMES[scheme].activation))
        assert off <= 1e-5, f"after {text}: off by {off}"
    gathered = {op.operands[0].type.shape[-1] for op in module.ops() if op.opname == "all_gather"}
    assert all(size != 192 for size in gathered), "no features are gathered to be quantized"
    assert not touched_weights(module)


@pytest.mark.parametrize("mesh", ["tp=3", "ep=2"])
def test_a_rank_has_its_shard_of_both_levels_of_scales(mesh: str, tmp_path: Path) -> None:
    module = quantized("w4a16_nvfp4", mesh, tmp_path)
    run_pipeline(module, f'shard{{mesh="{mesh}"}}')
    sharded = {name for name, each in module.weights.items() if each.type.sharded}
    codes = {name for name in sharded if f"{name[:-6]}scale" in module.weights}
    assert codes and {f"{name[:-6]}scale" for name in codes} <= sharded
    sliced = [op.operands[0].producer for op in module.ops() if op.opname == "shard_slice"]
    assert all(op is None or op.opname != "dequantize" for op in sliced)


ROW = """module @m dims(B=1:2:8) {
  file @fc1 = FC1
  file @down = DOWN
  weight @fc1.weight : f32[96, 32] = bytes(@fc1, 0, f32[96, 32])
  weight @down_proj.weight : f32[32, 96] = bytes(@down, 0, f32[32, 96])
  func @forward(%x: f32[B, 3, 32]) -> (y: f32[B, 3, 32]) {
    %g = linear %x, @fc1.weight : f32[B, 3, 96]
    %y = linear %g, @down_proj.weight : f32[B, 3, 32]
    return %y } }"""


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3"])
def test_a_scale_per_token_is_that_of_all_ranks(mesh: str, tmp_path: Path) -> None:
    """Features of one rank are so large that by their scale those of the others are 0, and the
    second weight ignores the large ones: what is not 0 was rounded by a scale of its own rank."""
    first, second = np.ones((96, 32), np.float32), np.ones((32, 96), np.float32)
    first[:16], second[:, :16] = 1e7, 0
    text = ROW
    for name, values in (("FC1", first), ("DOWN", second)):
        (tmp_path / name).write_bytes(values.tobytes())
        text = text.replace(name, json.dumps(str(tmp_path / name)))
    x = {"x": 1 + fresh(9).random((2, 3, 32), np.float32)}
    for scheme, ranks in (("w8a16", 80 * 32), ("fp8_rowwise", 0)):
        module = irc.parse(text)
        passes = f'quantize{{scheme={scheme}}}, shard{{mesh="{mesh}"}}, localize, cse, fold, dce'
        run_pipeline(module, passes)
        found = np.abs(evaluate(module, x)["y"]).min()
        assert (found > ranks) if ranks else (found == 0)


@pytest.mark.parametrize(("scheme", "mesh"), [("fp8_block", "tp=3"), ("w8a16", "ep=2")])
def test_ranks_on_onnx_runtime(scheme: str, mesh: str, tmp_path: Path) -> None:
    module = quantized(scheme, mesh, tmp_path)
    ids = prompt_of(module, fresh(10), ROWS)
    module.mesh = Mesh()
    wanted = logits(module, ids, whole_calls=True)
    source = experts() if "ep" in mesh else llama()
    dims = {"B": (1, 2, ROWS)}
    artifact = irc.compile(source, tmp_path / "out", mesh=mesh, dims=dims, quantize=scheme)
    got = artifact.run({"input_ids": ids})["logits"]
    assert row_error(got, wanted, scheme == "fp8_block") <= 1e-3


@pytest.mark.parametrize(
    ("scheme", "features", "block", "added"),
    [
        ("w4a16", 352, 32, 32),
        ("mxfp4", 352, 32, 32),
        ("w4a16_nvfp4", 80, 16, 16),
        ("w4a16", 160, 20, 20),
    ],
)
def test_blocks_are_chosen_for_features_with_zeros(
    scheme: str, features: int, block: int, added: int
) -> None:
    """The largest that adds at most an eighth, or those of the format."""
    module = tiny_llama(hidden_size=32, intermediate_size=features, head_dim=32)
    module.mesh = Mesh.parse("tp=3")
    run_pipeline(module, f"inline, quantize{{scheme={scheme}}}, shard")
    down = next(w for name, w in module.weights.items() if name.endswith("down_proj.scale"))
    assert down.type.shape == (32, (features + added) // block)


def test_joined_projections_have_the_scales_of_their_blocks() -> None:
    """The codes and scales of heads that are padded, and of queries, keys and values, are joined
    in other sizes."""
    module = tiny_llama(hidden_size=64, head_dim=32, num_hidden_layers=1)
    module.mesh = Mesh.parse("tp=2")
    run_pipeline(module, "inline, quantize{scheme=fp8_block}, shard, localize")
    (done,) = run_pipeline(module, "fuse-qkv", [VerifyEach()])
    assert done.stats["fused"] == 1


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "mxfp8", "nvfp4"])
def test_rounded_tokens_go_to_experts_from_their_rank(scheme: str, tmp_path: Path) -> None:
    module = mixtral(4, hidden_size=64, intermediate_size=64, head_dim=32, num_hidden_layers=1)
    run_pipeline(module, "inline")
    sites = find_sites(module)
    write_folder(tmp_path, {s.key: np.ones((1, s.shape[s.inputs]), np.float32) for s in sites})
    run_pipeline(module, [QuantizeModule(scheme=scheme, calibration=str(tmp_path))])
    run_pipeline(module, 'shard{mesh="dp=2"}')
    assert not any(op.opname == "all_gather" for op in module.ops())


def test_a_block_that_cannot_be_padded_is_never_cut(tmp_path: Path) -> None:
    """Features that more than elementwise operations compute have to have their size. Without a
    plan another dimension is sharded."""
    plan = plan_file(tmp_path, "down_proj.* 1@tp", "auto")
    module = mlp("i4", 64, 8)
    text = str(module).replace("mul %s, %u", "add %s, %u").replace("silu %g", "softmax %g")
    spread(irc.parse(text), {"x": fresh(5).standard_normal((3, 24), np.float32)}, "tp=3")
    with pytest.raises(Error) as caught:
        run_pipeline(irc.parse(text), f'shard{{mesh="tp=3", plan="{plan}"}}')
    assert (
        "dequantize of @down_proj.weight: 64 over tp makes shards of 22, which cut a block of 8; "
        "quantize it in blocks of 2 or with one scale per row, use 2 or 4 ranks along tp, or "
        "exclude it from quantization"
    ) in str(caught.value)


def test_the_numbers_of_ranks_for_which_blocks_can_be_smaller(tmp_path: Path) -> None:
    """At least 8 elements have a scale: of blocks of 32, and shards of 12, 4 would."""
    plan = plan_file(tmp_path, "down_proj.* 1@tp", "auto")
    text = str(mlp("i4", 96, 32)).replace("mul %s, %u", "add %s, %u")
    text = text.replace("silu %g", "softmax %g")
    with pytest.raises(Error, match="use 2 or 3 or 4 or 6 or 12 or 13 ranks along tp"):
        run_pipeline(irc.parse(text), f'shard{{mesh="tp=8", plan="{plan}"}}')
    for ranks in (2, 3, 4, 6, 12, 13):
        run_pipeline(irc.parse(text), f'shard{{mesh="tp={ranks}", plan="{plan}"}}')
    for ranks in (5, 7):
        with pytest.raises(Error, match="cut a block of 32"):
            run_pipeline(irc.parse(text), f'shard{{mesh="tp={ranks}", plan="{plan}"}}')


def test_a_shard_boundary_within_a_block_is_an_error() -> None:
    text = """module @m mesh(tp=4) {
      func @forward(%x: i8[3, 16@tp], %s: f32[3, 2@tp]) -> (y: f32[3, 16@tp]) {
        %y = dequantize %x, %s : f32[3, 16@tp]
        return %y } }"""
    with pytest.raises(Error, match="16 over tp makes shards of 4, which cut a block of 8"):
        verify(irc.parse(text))
