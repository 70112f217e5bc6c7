"""Quantized weights over ranks: scales follow their blocks, and no block is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module, Op, Weight
from irc.ir.mesh import Mesh
from irc.ir.verify import verify
from irc.ops import Dequantize
from irc.ops.collective import Exchange
from irc.passes.quantize import QuantizeModule
from irc.passes.shared.parameters import weights_of
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.quantization.sites import find_sites
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh
from tests.sharded.checking import spread
from tests.sharded.models import MODELS, mixtral, tiny_llama
from tests.sharded.test_models import check

assert irc.passes
PASSES = "fuse-gated-mlp, localize, fuse-collectives"


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


@pytest.mark.parametrize("kind", ["i4", "u4", "i8", "f8e4m3"])
@pytest.mark.parametrize(
    ("group_size", "ffn", "block"),
    [(2, 24, 6), (3, 30, 5), (4, 16, 2), (3, 16, 2), (3, 64, 8), (4, 16, 8), (3, 192, 24)],
)
def test_sharded_is_unsharded(
    kind: str, group_size: int, ffn: int, block: int, tmp_path: Path
) -> None:
    """Features get zeros where their blocks do not divide, as 8 blocks and 3 ranks."""
    rng = fresh(group_size + ffn)
    x = {"x": rng.standard_normal((3, 24)).astype(np.float32)}
    wanted = evaluate(mlp(kind, ffn, block), x)["y"]
    module = mlp(kind, ffn, block)
    for step in (f'shard{{mesh="tp={group_size}"}}', *PASSES.split(", ")):
        run_pipeline(module, step)
        found = evaluate(module, x)["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    scales = module.weights["down_proj.scale"].type.shape
    assert scales == (24, -(-(ffn // block) // group_size))
    artifact = irc.compile(mlp(kind, ffn, block), tmp_path / "out", mesh=f"tp={group_size}")
    found = artifact.run(x)["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


# What %s and the codes of %h are, and the format of the weight behind them and its block.
ACTIVATIONS = {
    "i8 per tensor": ("%s = full {value=16.0, shape=[1, 1]} : f32[1, 1]", "i8", "int8", 0),
    "i8 per token": ('%s = dynamic_scale %h {dtype="i8"} : f32[B, 1]', "i8", "int8", 0),
    "fp8 per token": ("%s = dynamic_scale %h : f32[B, 1]", "f8e4m3", "fp8", 0),
    "mxfp8": (
        '%s = dynamic_scale %h {block=4, scale="f8e8m0"} : f8e8m0[B, BLOCKS]',
        *("f8e4m3", "mxfp8", 4),
    ),
    "nvfp4": (
        """%t = full {value=16.0, shape=[1, 1]} : f32[1, 1]
        %s4 = dynamic_scale %h, tensor_scale=%t {dtype="f4e2m1", block=4, scale="f8e4m3"}
        : f8e4m3[B, BLOCKS]
        %s = dequantize %s4, %t {dtype="f32"} : f32[B, BLOCKS]""",
        *("f4e2m1", "nvfp4", 4),
    ),
}
SCALES = {"mxfp8": "f8e8m0", "nvfp4": "f8e4m3"}


def rounded_mlp(scheme: str, ffn: int) -> Module:
    """A feed-forward whose inner values are rounded.

    Before that they are integers and relu, so that no order of sums changes a code.
    """
    scales, codes, format, block = ACTIVATIONS[scheme]
    blocks, integers = ffn // block if block else 1, f"2.0, [{ffn}, 24]).cast(i8).cast(f32)"
    of = f'quantized(random("d", 1, 0.5, [24, {ffn}]), PART, "{format}", [1, {block}])'
    tensor_scale = ""
    scale, kind = "@down_proj.scale", SCALES.get(format, "f32")
    if format == "nvfp4":
        part = of.replace("PART", '"tensor_scale"')
        tensor_scale = f"weight @down_proj.tensor_scale : f32[1, 1] = {part}"
        scale = "%scales"
    nested = f"""%scales = dequantize @down_proj.scale, @down_proj.tensor_scale {{dtype="f32"}}
        : f32[24, {blocks}]"""
    return irc.parse(f"""module @m dims(B=1:3:8) {{
      weight @gate_proj.weight : f32[{ffn}, 24] = random("g", 1, {integers}
      weight @up_proj.weight : f32[{ffn}, 24] = random("u", 1, {integers}
      weight @down_proj.weight : {codes}[24, {ffn}] = {of.replace("PART", '"codes"')}
      weight @down_proj.scale : {kind}[24, {blocks}] = {of.replace("PART", '"scales"')}
      {tensor_scale}
      func @forward(%x: f32[B, 24]) -> (y: f32[B, 24]) {{
        %g = linear %x, @gate_proj.weight : f32[B, {ffn}]
        %u = linear %x, @up_proj.weight : f32[B, {ffn}]
        %r = relu %g : f32[B, {ffn}]
        %h = mul %r, %u : f32[B, {ffn}]
        {scales.replace("BLOCKS", str(blocks))}
        %q = quantize %h, %s {{dtype="{codes}"}} : {codes}[B, {ffn}]
        %d = dequantize %q, %s {{dtype="f32"}} : f32[B, {ffn}]
        {nested if format == "nvfp4" else ""}
        %down = dequantize @down_proj.weight, {scale} {{dtype="f32"}} : f32[24, {ffn}]
        %y = linear %d, %down : f32[B, 24]
        return %y
      }}
    }}""")


def touched_weights(module: Module) -> list[Op]:
    """What gathers or masks a quantized weight whenever the module runs."""
    return [
        op
        for op in module.ops()
        if op.opname in ("all_gather", "where")
        for value in op.operands
        if isinstance(value, Weight) or weights_of(value)
    ]


@pytest.mark.parametrize("scheme", ACTIVATIONS)
@pytest.mark.parametrize(("mesh", "ffn"), [("tp=2", 24), ("tp=3", 32), ("tp=2", 20), ("tp=3", 40)])
def test_rounded_activations_have_the_scales_of_all_ranks(
    scheme: str, mesh: str, ffn: int, tmp_path: Path
) -> None:
    """Scales per token are of the largest of all ranks, and blocks stay whole."""
    ffn -= 3 * (mesh == "tp=2" and "per" in scheme)  # features that do not divide
    module = rounded_mlp(scheme, ffn)
    x = {"x": fresh(ffn).integers(-4, 5, (3, 24)).astype(np.float32)}
    wanted = evaluate(module, x)["y"]
    spread(module, x, mesh)
    sent = [op.attributes["op"] for op in module.ops() if isinstance(op, Exchange)]
    assert sent == ["max"] * scheme.endswith("token") + ["sum"]
    masked = [v for op in module.ops() if op.opname == "where" for v in op.operands]
    assert not touched_weights(module)
    assert not any(isinstance(value.producer, Dequantize) for value in masked)
    if "f4e2m1" not in str(module):
        artifact = irc.compile(rounded_mlp(scheme, ffn), tmp_path / "out", mesh=mesh)
        found = artifact.run(x)["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("mesh", ["ep=2", "tp=2", "tp=3", "ep=2,tp=3", "ep=4,tp=2"])
@pytest.mark.parametrize("block", [0, 4])
def test_rounded_experts(mesh: str, block: int) -> None:
    """36 features get zeros where 9 blocks do not divide."""
    of = f'quantized(random("d", 1, 0.5, [4, 24, 36]), PART, "int8", [1, 1, {block}])'
    scale = f"""%s = dynamic_scale %h {{dtype="i8", block={block}}}
        : f32[4, T, {36 // block if block else 1}]"""
    module = irc.parse(f"""module @m dims(T=1:3:8) {{
      weight @experts.up : f32[4, 36, 24] = random("u", 1, 2.0, [4, 36, 24]).cast(i8).cast(f32)
      weight @experts.down : i8[4, 24, 36] = {of.replace("PART", '"codes"')}
      weight @experts.down_scale : f32[4, 24, {36 // block if block else 1}]
        = {of.replace("PART", '"scales"')}
      func @forward(%x: f32[T, 24]) -> (y: f32[T, 24]) {{
        %e = expand %x {{shape=[4, T, 24]}} : f32[4, T, 24]
        %up = transpose @experts.up {{order=[0, 2, 1]}} : f32[4, 24, 36]
        %u = matmul %e, %up : f32[4, T, 36]
        %h = relu %u : f32[4, T, 36]
        {scale}
        %q = quantize %h, %s : i8[4, T, 36]
        %d = dequantize %q, %s : f32[4, T, 36]
        %w = dequantize @experts.down, @experts.down_scale : f32[4, 24, 36]
        %down = transpose %w {{order=[0, 2, 1]}} : f32[4, 36, 24]
        %each = matmul %d, %down : f32[4, T, 24]
        %y = reduce_sum %each {{dims=[0]}} : f32[T, 24]
        return %y
      }}
    }}""")
    x = {"x": fresh(36).integers(-4, 5, (3, 24)).astype(np.float32)}
    spread(module, x, mesh)
    names = {op.opname for op in module.ops()}
    assert not names & {"all_gather", "all_to_all"}


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16", "w4a16_asym"])
@pytest.mark.parametrize(("name", "mesh"), [("gqa", "tp=2"), ("mha_5", "tp=3"), ("prime", "tp=2")])
def test_models_of_quantized_weights(scheme: str, name: str, mesh: str) -> None:
    """No weight is gathered, nor masked when it is used."""
    module = MODELS[{"prime": "ffn_prime"}.get(name, name)]()
    run_pipeline(module, f'inline, quantize{{scheme="{scheme}", group=4}}')
    check(module, mesh)
    assert not touched_weights(module)


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


def test_a_block_that_cannot_be_padded_is_never_cut() -> None:
    """Features that more than elementwise operations compute have to have their size."""
    module = mlp("i4", 64, 8)
    text = str(module).replace("mul %s, %u", "add %s, %u").replace("silu %g", "softmax %g")
    with pytest.raises(Error) as caught:
        run_pipeline(irc.parse(text), 'shard{mesh="tp=3"}')
    assert (
        "dequantize of @down_proj.weight: 64 over tp makes shards of 22, which cut a block of 8; "
        "quantize it in blocks of 2 or with one scale per row, use 2 or 4 ranks along tp, or "
        "exclude it from quantization"
    ) in str(caught.value)


def test_the_numbers_of_ranks_for_which_blocks_can_be_smaller() -> None:
    """At least 8 elements have a scale: of blocks of 32, and shards of 12, 4 would."""
    text = str(mlp("i4", 96, 32)).replace("mul %s, %u", "add %s, %u")
    text = text.replace("silu %g", "softmax %g")
    with pytest.raises(Error, match="use 2 or 3 or 4 or 6 or 12 or 13 ranks along tp"):
        run_pipeline(irc.parse(text), 'shard{mesh="tp=8"}')
    for ranks in (2, 3, 4, 6, 12, 13):
        run_pipeline(irc.parse(text), f'shard{{mesh="tp={ranks}"}}')
    for ranks in (5, 7):
        with pytest.raises(Error, match="cut a block of 32"):
            run_pipeline(irc.parse(text), f'shard{{mesh="tp={ranks}"}}')


def test_a_shard_boundary_within_a_block_is_an_error() -> None:
    text = """module @m mesh(tp=4) {
      func @forward(%x: i8[3, 16@tp], %s: f32[3, 2@tp]) -> (y: f32[3, 16@tp]) {
        %y = dequantize %x, %s : f32[3, 16@tp]
        return %y } }"""
    with pytest.raises(Error, match="16 over tp makes shards of 4, which cut a block of 8"):
        verify(irc.parse(text))


def test_the_stages_of_quantized_weights_with_fewer_rows_than_ranks() -> None:
    module = irc.parse("""module @m mesh(tp=2) dims(B=1:2:8) {
      weight @w : i4[1@tp, 2] = random("w", 5, 3.0)
      weight @s : f32[1@tp, 2] = random("s", 5, 0.1)
      func @forward(%x: f32[B, 2]) -> (f32[B, 2]) {
        %a = dequantize @w, @s : f32[1@tp, 2]
        %b = all_gather %a {axis="tp", dim=0} : f32[1, 2]
        %c = mul %x, %b : f32[B, 2]
        %d = tanh %c : f32[B, 2]
        return %d
      }
    }""")
    run_pipeline(module, "pipeline{stages=2}")
    assert [op.opname for op in module.main] == ["call", "call", "return"]
