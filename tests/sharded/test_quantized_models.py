"""Quantized models over ranks give the logits of the quantized model on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ir.mesh import Mesh
from irc.pipeline import run_pipeline
from irc.quantization.schemes import SCHEMES
from irc.quantization.sites import find_sites
from tests.calibration.statistics_folder import write_folder
from tests.fresh import fresh
from tests.rows import ROWS, row_error
from tests.sharded.cases import pairs
from tests.sharded.models import logits, mixtral, prompt_of, tiny_llama

assert irc.passes
ROUND = [n for n, each in SCHEMES.items() if each.algorithm == "round" or each.optional]
CALIBRATED = [n for n, each in SCHEMES.items() if each.algorithm != "round"]
MESHES = ("tp=2", "tp=3", "ep=2", "pp=2")
BEFORE, AFTER = "inline, canonicalize, cse", ("fuse-collectives{norm=true}", "cse, fold, dce")
CLOSE = 1e-5  # relative: sums of other orders differ by some ten millionths
SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2}


def llama(**sizes: Any) -> Module:
    """Heads that two ranks do not share; blocks of 32 fit the shards of two and three ranks."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192}
    return tiny_llama(**SIZES | heads | sizes)


def experts() -> Module:
    """Four experts."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    return mixtral(4, 2, **SIZES | heads)


@pytest.mark.parametrize(("scheme", "mesh"), pairs(ROUND, MESHES, 1))
def test_ranks_give_the_same_logits(scheme: str, mesh: str) -> None:
    module = experts() if "ep" in mesh else llama()
    module.mesh = Mesh.parse(mesh)
    ids = prompt_of(module, fresh(7), ROWS)
    run_pipeline(module, f"{BEFORE}, quantize{{scheme={scheme}}}")
    wanted = logits(module, ids)
    stages = ", pipeline" if "pp" in mesh else ""
    for text in (f'shard{{mesh="{mesh}"}}, fuse-gated-mlp{stages}', "localize", *AFTER):
        run_pipeline(module, text)
        off = row_error(logits(module, ids), wanted, bool(SCHEMES[scheme].activation))
        assert off <= CLOSE, f"after {text}: off by {off}"
    assert module.local
    gathered = {op.operands[0].type.shape[-1] for op in module.ops() if op.opname == "all_gather"}
    assert all(size != 192 for size in gathered), "no features are gathered to be quantized"


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "ep=2"])
def test_a_rank_has_its_shard_of_both_levels_of_scales(mesh: str) -> None:
    module = experts() if "ep" in mesh else llama()
    module.mesh = Mesh.parse(mesh)
    run_pipeline(module, f'{BEFORE}, quantize{{scheme=w4a16_nvfp4}}, shard{{mesh="{mesh}"}}')
    sharded = {name for name, each in module.weights.items() if each.type.sharded}
    codes = {name for name in sharded if f"{name[:-6]}scale" in module.weights}
    assert codes and {f"{name[:-6]}scale" for name in codes} <= sharded
    sliced = [op.operands[0].producer for op in module.ops() if op.opname == "shard_slice"]
    assert all(op is None or op.opname != "dequantize" for op in sliced)


@pytest.mark.parametrize(("scheme", "mesh"), pairs(CALIBRATED, MESHES, 1))
def test_ranks_of_calibrated_schemes(scheme: str, mesh: str, tmp_path: Path) -> None:
    module = experts() if "ep" in mesh else llama()
    rng = fresh(11)
    spread = 10 ** rng.uniform(-1, 1, 512)  # some channels are much larger than others
    inputs = {
        site.name: rng.standard_normal((64, size)) * spread[:size]
        for site in find_sites(module)
        for size in [site.shape[site.inputs]]
    }
    write_folder(tmp_path, {name: x.astype(np.float32) for name, x in inputs.items()})
    module.mesh = Mesh.parse(mesh)
    ids = prompt_of(module, fresh(12), ROWS)
    where = json.dumps(str(tmp_path))
    run_pipeline(module, f"{BEFORE}, quantize{{scheme={scheme}, calibration={where}}}")
    wanted = logits(module, ids)
    stages = ", pipeline" if "pp" in mesh else ""
    for text in (f'shard{{mesh="{mesh}"}}, fuse-gated-mlp{stages}', "localize", *AFTER):
        run_pipeline(module, text)
    assert row_error(logits(module, ids), wanted, bool(SCHEMES[scheme].activation)) <= CLOSE


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


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "ep=2", "pp=2"])
@pytest.mark.parametrize("options", [{"quantize": "w4a16", "group": 32}, {"quantize": "fp8_block"}])
def test_ranks_on_onnx_runtime(mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    build = experts if "ep" in mesh else llama
    ids = prompt_of(build(), fresh(10), ROWS)
    module = build()
    module.mesh = Mesh.parse(mesh)
    more = f", group={options['group']}" if "group" in options else ""
    run_pipeline(module, f"{BEFORE}, quantize{{scheme={options['quantize']}{more}}}")
    module.mesh = Mesh()
    wanted = logits(module, ids, whole_calls=True)
    artifact = irc.compile(
        build(), tmp_path / "out", mesh=mesh, dims={"B": (1, 2, ROWS)}, **options
    )
    found = artifact.run({"input_ids": ids})["logits"]
    assert row_error(found, wanted, "group" not in options) <= 1e-3
