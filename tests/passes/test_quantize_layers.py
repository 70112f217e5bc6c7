"""The pass quantize: which layers it takes, their blocks, names of schemes, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.errors import Error
from irc.extensions.user_files import forget, name_of
from irc.ir.core import Module
from irc.ir.mesh import Mesh
from irc.ops import Dequantize, Linear
from irc.passes.quantize import Scheme, register_scheme
from irc.pipeline import load_file, run_pipeline
from irc.quantization.schemes import scheme_called
from tests.fresh import fresh
from tests.passes.test_quantize import GATED, linear, quantized
from tests.sharded.models import logits, mixtral, prompt_of, tiny_llama

assert irc.passes

# which layers


def chosen(module: Module, options: str) -> set[str]:
    """The scopes whose weights were quantized."""
    quantized(module, options)
    return {
        op.x.name.removesuffix(".weight").rpartition("layers.0.")[2]
        for op in module.ops()
        if isinstance(op, Dequantize) and op.x.name
    }


ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
ALL = ATTENTION | MLP | {"lm_head"}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("scheme=w8a16", ALL),
        ("scheme=w8a16, exclude=[]", ALL),
        ('scheme=w8a16, exclude=["*lm_head"]', ATTENTION | MLP),
        ('scheme=w8a16, exclude=["*.mlp.*"]', ATTENTION | {"lm_head"}),
        ('scheme=w8a16, include=["*.mlp.*"]', MLP),
        ("scheme=w8a16, include=[]", set()),
        ('scheme=w8a16, include=["lm_head", "*.up_proj"]', {"lm_head", "mlp.up_proj"}),
        ('scheme=w8a16, include=["*.mlp.*"], exclude=["*.up_proj"]', MLP - {"mlp.up_proj"}),
        ('table="{\\"*.mlp.*\\": \\"w8a16\\"}"', MLP),
        ('scheme=w8a16, table="{\\"*.mlp.*\\": null}"', ALL - MLP),
        ('table="{\\"*.up_proj\\": null, \\"*\\": \\"w8a16\\"}"', ALL - {"mlp.up_proj"}),
        ('table="{\\"lm_head\\": \\"w8a16\\"}"', {"lm_head"}),
    ],
)
def test_selection(options: str, wanted: set[str]) -> None:
    assert chosen(tiny_llama(num_hidden_layers=1), options) == wanted


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("scheme=w4a16", "i8"),
        ("scheme=fp8_rowwise", "i8"),
        ('scheme=w4a16, exclude=["*.mlp.*"]', "i8"),
        ('table="{\\"*\\": \\"w4a16\\"}"', "i8"),
        ("scheme=w4a16, exclude=[]", "i4"),
        ('scheme=w4a16, include=["*lm_head"]', "i4"),
        ('table="{\\"lm_head\\": \\"w4a16\\", \\"*\\": \\"w8a16\\"}"', "i4"),
        ('scheme=w4a16, exclude=["*lm_head"]', ""),
        ('scheme=w4a16, table="{\\"lm_head\\": null}"', ""),
        ('table="{\\"*.mlp.*\\": \\"w4a16\\"}"', ""),
        ('scheme=auto, budget="6 bits"', "i8"),
    ],
)
def test_the_codes_of_a_head(options: str, kind: str, tied: bool) -> None:
    module = tiny_llama(num_hidden_layers=1, tie_word_embeddings=tied)
    quantized(module, options)
    head = next(
        op for op in module.ops() if isinstance(op, Linear) and op.result.type.shape[-1] == 37
    )
    codes = head.weight.producer
    assert (codes.operands[0].type.dtype if codes is not None else "") == kind
    assert head.x.producer is not None and head.x.producer.opname != "dequantize"


def test_a_tied_weight_becomes_two() -> None:
    """The embedding reads the weight as it is stored, the head codes of 8 bits."""
    module = tiny_llama(num_hidden_layers=1, tie_word_embeddings=True)
    table = module.weights["model.embed_tokens.weight"]
    ids = prompt_of(module, fresh(8))
    wanted = logits(module, ids)
    assert chosen(module, "scheme=w8a16") == ALL
    assert module.weights["model.embed_tokens.weight"] is table and table.type.dtype == "f32"
    assert module.weights["lm_head.weight"].type.dtype == "i8"
    assert np.linalg.norm(logits(module, ids) - wanted) < 0.03 * np.linalg.norm(wanted)


def test_routers_stay_and_experts_do_not() -> None:
    module = mixtral(4, 2)
    scopes = chosen(module, "scheme=w8a16")
    assert {"block_sparse_moe.experts.gate", "block_sparse_moe.experts.down"} <= scopes
    assert "block_sparse_moe.gate" not in scopes
    assert module.weights["model.layers.0.block_sparse_moe.experts.up.scale"].type.shape == (
        4,
        10,
        1,
    )


def test_a_table_mixes_schemes_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    row = {"scheme": "w4a16", "group": 8}
    path.write_text(json.dumps({"*.mlp.*": row, "*.o_proj": "fp8_rowwise", "*": "w8a16"}))
    module = tiny_llama(num_hidden_layers=1)
    quantized(module, f"table={json.dumps(str(path))}")
    layer, weights = "model.layers.0", module.weights
    assert weights[f"{layer}.mlp.up_proj.scale"].type.shape == (22, 3)
    dtypes = {name: weights[f"{layer}.{name}.weight"].type.dtype for name in ATTENTION | MLP}
    assert dtypes == dict.fromkeys(MLP, "i4") | dict.fromkeys(ATTENTION, "i8") | {
        "self_attn.o_proj": "f8e4m3"
    }


def test_a_table_of_tensorrt_llm(tmp_path: Path) -> None:
    path = tmp_path / "quant_cfg.json"
    layers = {"fc": {"quant_algo": "W4A16_AWQ", "group_size": 64}}
    path.write_text(json.dumps({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}))
    with pytest.raises(Error, match="w4a16_awq needs statistics of the inputs"):
        quantized(linear(), f"table={json.dumps(str(path))}")


@pytest.mark.parametrize("layers", [{"quantized_layers": {"*mlp*": {"quant_algo": "W8A16"}}}, {}])
def test_caches_of_a_table(layers: dict[str, Any], tmp_path: Path) -> None:
    def table(kind: str | None) -> str:
        rows = layers or {"*mlp*": "w8a16"}
        return f"table={json.dumps(json.dumps({'kv_cache_quant_algo': kind, **rows}))}"

    for kind, code in (("FP8", "f8e4m3"), (None, "f32")):
        module = tiny_llama(num_hidden_layers=1, head_dim=4)
        quantized(module, table(kind))
        assert {str(arg.type.dtype) for arg in module.main.args[4:]} == {code}
        assert module.weights["model.layers.0.mlp.up_proj.weight"].type.dtype == "i8"
    with pytest.raises(Error, match="no format of caches called 'nvfp4'"):
        quantized(tiny_llama(num_hidden_layers=1), table("NVFP4"))
    rows = {"*": "w8a16", "kv_cache_quant_algo": "FP8"}
    with pytest.raises(
        Error, match="kv_cache_quant_algo of the table has no effect: the model has"
    ):
        irc.compile(linear(), tmp_path / "out", quantize=rows)


# blocks


@pytest.mark.parametrize(
    ("inputs", "options", "scales"),
    [
        (256, "scheme=w4a16", (24, 2)),
        (256, "scheme=w4a16, group=32", (24, 8)),
        (256, "scheme=w8a16, group=64", (24, 4)),
        (120, "scheme=w4a16", (24, 1)),
        (408, "scheme=w4a16", (24, 4)),  # groups of 102
        (331, "scheme=w4a16", (24, 1)),  # a prime
        (331, "scheme=fp8_block", (1, 1)),
        (384, "scheme=fp8_block", (1, 3)),
    ],
)
def test_blocks_divide_weights(inputs: int, options: str, scales: tuple[int, int]) -> None:
    module = linear(24, inputs)
    stats = quantized(module, options)
    assert module.weights["fc.scale"].type.shape == scales
    whole = inputs % 128 == 0 and "fp8" not in options
    assert bool(stats.notes) != whole


@pytest.mark.parametrize(
    ("mesh", "group", "blocks"), [("tp=2", 64, 6), ("tp=3", 64, 6), ("tp=4", 48, 8)]
)
def test_no_shard_cuts_a_group(mesh: str, group: int, blocks: int, tmp_path: Path) -> None:
    """384 inputs over 2, 3 and 4 ranks: 192, 128 and 96 on each."""
    (tmp_path / "plan.txt").write_text("fc.weight 1@tp")
    module = irc.parse(str(linear(24, 384)).replace("module @m", f"module @m mesh({mesh})"))
    quantized(module, f'scheme=w4a16, group=64, plan="{tmp_path}/plan.txt"')
    assert module.weights["fc.scale"].type.shape == (24, 384 // group)
    assert 384 // group == blocks


def test_heads_that_ranks_do_not_share_keep_their_groups() -> None:
    """Six heads of 32 over four ranks are padded to eight; no group holds two heads."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32}
    module = tiny_llama(num_hidden_layers=1, hidden_size=64, **sizes)
    run_pipeline(module, "inline")
    module.mesh = Mesh.parse("tp=4")
    quantized(module, "scheme=w4a16")
    assert module.weights["model.layers.0.self_attn.o_proj.scale"].type.shape == (64, 6)


# names and refusals


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("W8A16", "w8a16"),
        ("W4A16", "w4a16"),
        ("W4A16_AWQ", "w4a16_awq"),
        ("int4_awq", "w4a16_awq"),
        ("W4A8_AWQ", "w4a8_awq"),
        ("W4A16_GPTQ", "w4a16_gptq"),
        ("W8A16_GPTQ", "w8a16_gptq"),
        ("int8_sq", "w8a8_sq_per_channel"),
        ("W8A8_SQ_PER_CHANNEL", "w8a8_sq_per_channel"),
        ("W8A8_SQ_PER_TENSOR_PLUGIN", "w8a8_sq"),
        ("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "w8a8_sq_per_channel_per_token"),
        ("W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN", "w8a8_sq_per_channel"),
        ("W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN", "w8a8_sq_per_token"),
        ("FP8", "fp8"),
        ("FP8_QDQ", "fp8"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8_rowwise"),
        ("fp8-rowwise", "fp8_rowwise"),
        ("FP8_BLOCK_SCALES", "fp8_block"),
        ("FP8_1x128_128x128", "fp8_block"),
        ("NVFP4", "nvfp4"),
        ("W4A8_NVFP4_FP8", "w4a8_nvfp4_fp8"),
        ("W4A8_MXFP4_FP8", "w4a8_mxfp4_fp8"),
        ("W4A8_MXFP4_MXFP8", "w4a8_mxfp4_mxfp8"),
        ("W4A16_MXFP4", "w4a16_mxfp4"),
        ("QuantMode.INT4_WEIGHTS | PER_GROUP", "w4a16"),
        ("INT8_WEIGHTS|ACTIVATIONS|PER_TOKEN|PER_CHANNEL", "w8a8_sq_per_channel_per_token"),
        ("QuantAlgo.FP8", "fp8"),
    ],
)
def test_names_of_tensorrt_llm(name: str, scheme: str) -> None:
    assert scheme_called(name).name == scheme


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("scheme=w4a15", "no quantization scheme 'w4a15'; did you mean 'w4a16'"),
        ("scheme=w4a8_qserve_per_group", "QServe's two-level int4 is not supported"),
        ("scheme=FP8_KV_CACHE", "it is for caches; give kv"),
        ("scheme=w8a16, group=-1", "group is -1; give a number of inputs"),
        ("scheme=mxfp8, group=64", "mxfp8 has blocks of 32 by definition"),
        ("scheme=fp8, group=64", "fp8 has one scale per tensor"),
        ("scheme=auto", "belong together"),
        ('scheme=w8a16, budget="4 bits"', "belong together"),
        ('scheme=auto, budget="4 bit/s"', "no budget: '4 bit/s'; write bits per weight"),
        ('scheme=auto, budget="9 bits", group=64', "group has no effect here"),
        ('scheme=auto, budget="99 dB"', "a budget of 99 dB leaves all weights as they are"),
        ('table="{}", group=64', "group has no effect here"),
        ("kv=fp8, group=64", "group has no effect here"),
        ("kv=fp8, include=[fc]", "include and exclude have no effect without a scheme"),
        ("kv=fp8, exclude=[]", "include and exclude have no effect without a scheme"),
        ("kv=fp8, observer=kl", "no observer called 'kl'"),
        ("kv=int4", "no format of caches called 'int4'.*give int8 or fp8"),
        ('kv=fp8, kv_scales=["k0"]', "'k0' is not a scale of a cache; give one above 0"),
        ('kv=fp8, kv_scales=["k0=1e-50"]', "'k0=1e-50' is not a scale of a cache"),
        ('kv=fp8, kv_scales=["k0=nan"]', "'k0=nan' is not a scale of a cache"),
        ('scheme=w8a16, kv_scales=["k0=1"]', "kv_scales have no effect without kv"),
        ("kv=int8", "a cache in int8 needs statistics .* give --calibration"),
        *(
            (f"scheme={scheme}", f"{scheme} needs statistics .* give --calibration DATA")
            for scheme in ("w4a16_awq", "w4a16_gptq", "w8a8_sq")
        ),
        ('scheme=w8a16, exclude=["fd"]', "'fd' fits no layer of this module; did you mean 'fc'"),
        ('table="{}"', "has no rows; write some"),
        ('table="{\\"*\\": 3}"', r"'\*' has 3; give a scheme, null"),
        ('table="{\\"fc\\": \\"w9\\"}"', "'fc': no quantization scheme 'w9'"),
        ('table="missing.json"', "cannot read the table of schemes missing.json"),
        ('table="{,}"', "the table of schemes is not JSON"),
        ('scheme=w8a16, plan="missing.txt"', "cannot read the plan missing.txt"),
        ('scheme=fp8, calibration="missing"', "missing holds no complete calibration"),
    ],
)
def test_refusals(options: str, message: str) -> None:
    module = tiny_llama(num_hidden_layers=1) if options.startswith("kv") else linear()
    with pytest.raises(Error, match=message):
        quantized(module, options)


def test_blocks_by_definition_have_to_fit(tmp_path: Path) -> None:
    with pytest.raises(Error, match="blocks of 32, which mxfp4 requires, do not divide 120"):
        quantized(linear(24, 120), "scheme=mxfp4")
    (tmp_path / "plan.txt").write_text("fc.weight 1@tp")
    module = irc.parse(str(linear(24, 96)).replace("module @m", "module @m mesh(tp=2)"))
    with pytest.raises(Error, match="do not divide 96 in shards of 48; exclude the layer"):
        quantized(module, f'scheme=mxfp8, plan="{tmp_path}/plan.txt"')


def test_auto_counts_the_scales_of_the_shards_of_the_plan(tmp_path: Path) -> None:
    """Shards of 64 inputs have blocks of 64, so that a weight takes 4.5 bits, not 4.25."""
    (tmp_path / "plan.txt").write_text("fc.weight 1@tp")
    text = str(linear()).replace("module @m", "module @m mesh(tp=4)")
    options = 'scheme=auto, budget="4.4 bits"'
    assert "auto: 4.250 bits per weight" in quantized(irc.parse(text), options).notes[-1]
    options += f", plan={json.dumps(str(tmp_path / 'plan.txt'))}"
    with pytest.raises(Error, match=r"4\.500 to 32\.000 bits per weight"):
        quantized(irc.parse(text), options)


def test_what_comes_too_late_or_has_nothing_to_do() -> None:
    with pytest.raises(Error, match="no product of activations and a float weight"):
        quantized(
            irc.parse("module @m { func @f(%x: f32[2]) -> (f32[2]) { return %x } }"), "scheme=fp8"
        )
    for passes, message in (
        ('shard{mesh="tp=2"}', "sharded already; quantize comes before shard"),
        ('shard{mesh="tp=2"}, localize', "in the local view already"),
        ("fuse-gated-mlp", "gated feed-forwards are fused already"),
    ):
        module = irc.parse(GATED)
        run_pipeline(module, passes)
        with pytest.raises(Error, match=message):
            quantized(module, "scheme=fp8")


SCHEME = """'''A scheme of a user.'''
from irc.passes.quantize import Scheme, register_scheme

register_scheme(Scheme("w4a8", ("int4", (1, 32)), "token", "int8", aliases="mine"))
"""


def test_one_file_adds_a_scheme(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SCHEME)
    assert load_file(path) == ["w4a8"]
    try:
        module = linear()
        quantized(module, "scheme=MINE")
        assert module.weights["fc.scale"].type.shape == (256, 8)
        assert {op.opname for op in module.ops()} >= {"dynamic_scale", "quantize"}
        with pytest.raises(Error, match="called 'w4a8' is registered already"):
            register_scheme(Scheme("W4A8", ("int4", (1, 0))))
    finally:
        forget(name_of(path))
    with pytest.raises(Error, match="no quantization scheme 'mine'"):
        quantized(linear(), "scheme=mine")
    with pytest.raises(Error, match="no format called 'int5'; did you mean 'int"):
        register_scheme(Scheme("w5", ("int5", (1, 0))))
