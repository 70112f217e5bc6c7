"""The plan that irc chooses by the operations: what is sharded, what it computes, what it sends."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import filter as filter_names
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.frontends import huggingface
from irc.frontends.models import DecoderConfig
from irc.frontends.models.families.llama import LLAMA
from irc.frontends.script import load_script
from irc.ir.core import Module
from irc.pipeline import Stats, run_pipeline
from tests.fresh import fresh
from tests.frontends.onnx_models import read
from tests.frontends.torch_models import exported
from tests.layout import ROOT
from tests.models.cases import cases
from tests.sharded.checking import (
    check,
    collectives,
    drawn,
    plan_file,
    sent_bytes,
    sharded,
    share_of_products,
    spread,
)
from tests.sharded.invented import INVENTED
from tests.sharded.models import MODELS, mixtral, tiny_llama

assert irc.passes
RANKS = (2, 3)


def shard(module: Module, mesh: str, plan: Path | str = "") -> Stats:
    more = f', plan="{plan}"' if plan else ""
    steps = run_pipeline(module, f'inline, canonicalize, cse, shard{{mesh="{mesh}"{more}}}')
    return steps[-1].stats


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", INVENTED)
def test_models_with_names_of_our_own(name: str, ranks: int) -> None:
    case = INVENTED[name]
    module = case.module()
    inputs = drawn(module, fresh(1))
    wanted = evaluate(module, inputs)
    shard(module, f"tp={ranks}")
    assert share_of_products(module, ranks) >= 0.95
    check(module, inputs, wanted, "sharded")
    run_pipeline(module, "fuse-gated-mlp, fuse-collectives, localize, cse, fold, dce")
    check(module, inputs, wanted, "localized", case.tolerance())


@pytest.mark.parametrize("mesh", ["ep=2,tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("name", ["gpt_separate", "experts", "translator"])
def test_meshes_of_several_axes(name: str, mesh: str) -> None:
    module = INVENTED[name].module()
    spread(module, drawn(module, fresh(2)), mesh)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["llama", "two_tower", "recommender"])
def test_examples(name: str, ranks: int) -> None:
    module = load_script(str(ROOT / f"examples/{name}.py"))
    shard(module, f"tp={ranks}")
    assert share_of_products(module, ranks) >= 0.95


FAMILIES = {**cases("ENCODERS"), **cases("ENCODER_DECODERS")}  # test_decoders.py has the others


@pytest.mark.oracle
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    FAMILIES[name].save(tmp_path)
    ranks = RANKS[list(FAMILIES).index(name) % 2]
    module = huggingface.load(tmp_path)
    shard(module, f"tp={ranks}")
    assert share_of_products(module, ranks) >= 0.95


# -- what is said

TOWER = """module @m dims(B=1:4:8) {
  weight @a : f32[64, 16] = random("a", 1, 0.5)
  weight @b : f32[16, 64] = random("b", 1, 0.5)
  weight @probe : f32[1, 16] = random("p", 1, 0.5)
  weight @c : f32[48, 16] = random("c", 1, 0.5)
  weight @d : f32[48, 16] = random("d", 1, 0.5)
  func @forward(%x: f32[B, 16], %n: f32[16]) -> (f32[B, 16], f32[B, 16]) {
    %0 = linear %x, @a : f32[B, 64]
    %1 = relu %0 : f32[B, 64]
    %2 = linear %1, @b : f32[B, 16]
    %3 = rms_norm %2, %n : f32[B, 16]
    %4 = linear @probe, @c : f32[1, 48]
    %5 = matmul %4, @d : f32[1, 16]
    %6 = add %x, %5 : f32[B, 16]
    return %3, %6
  }
}"""


def test_why_weights_are_sharded_so() -> None:
    module, stats = sharded(TOWER, "tp=2")
    notes = [note for note in stats.notes if ": auto: " in note]
    assert [note.partition(" (")[0] for note in notes] == [
        "@a is f32[64@tp, 16]: auto: column-parallel, contracted with @b",
        "@b is f32[16, 64@tp]: auto: row-parallel, sums of 256 B",
        "@c is f32[48@tp, 16]: auto: column-parallel, contracted with @d",
        "@d is f32[48@tp, 16]: auto: row-parallel, sums of 64 B",
    ]
    assert all("it would take" in note and note.endswith(" us more)") for note in notes[:2])
    assert collectives(module) == {"all_reduce": 2}


def test_segments_of_a_feature_stay_together() -> None:
    text = """module @m dims(B=1:4:8) {
      weight @ends : f32[2, 16] = random("e", 1, 0.5)
      func @forward(%x: f32[B, 16]) -> (f32[B, 1], f32[B, 1]) {
        %0 = linear %x, @ends : f32[B, 2]
        %1, %2 = split %0 {dim=1, sizes=[1, 1]} : f32[B, 1], f32[B, 1]
        return %1, %2
      }
    }"""
    module, _ = sharded(text, "tp=2")
    assert str(module.weights["ends"].type) == "f32[2@tp, 16]"
    assert collectives(module) == {"all_gather": 1}


def test_a_router_is_replicated_and_said_to_be() -> None:
    module = mixtral()
    summary = shard(module, "tp=2").summary
    assert "block_sparse_moe.gate.weight (960 B: auto: to shard it would take 5 us more)" in summary
    assert sum(op.opname == "all_reduce" for op in module.ops()) == 5


# -- exports of torch

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
TEXT |= {"num_hidden_layers": 2, "max_position_embeddings": 32}
DECODER = TEXT | {"use_cache": False}
IMAGE = {key: TEXT[key] for key in [*TEXT][:3]} | {"num_hidden_layers": 2, "image_size": 16}
EXPORTS: dict[str, dict[str, Any]] = {
    "BertModel": TEXT,
    "RobertaForSequenceClassification": TEXT | {"pad_token_id": 1},
    "DistilBertModel": {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2, "vocab_size": 64},
    "ElectraModel": TEXT | {"embedding_size": 16},
    "AlbertModel": TEXT | {"embedding_size": 16},
    "ModernBertModel": TEXT | {"pad_token_id": 0},
    "OPTForCausalLM": DECODER | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "LlamaForCausalLM": DECODER | {"num_key_value_heads": 2},
    "T5EncoderModel": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "ViTModel": IMAGE | {"patch_size": 8},
    "ConvNextModel": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_of_transformers(name: str, tmp_path: Path) -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    inner = cls(cls.config_class(**EXPORTS[name], attn_implementation="eager"))
    images = name in ("ViTModel", "ConvNextModel")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            words = {"pixel_values": x}
            if not images:
                words = {"input_ids": x, "attention_mask": torch.ones_like(x)}
            return self.inner(**words)[0]

    rng, path = fresh(3), tmp_path / "model.onnx"
    x = rng.standard_normal((2, 3, 16, 16)).astype(np.float32)
    x = x if images else rng.integers(1, 60, (2, 7))
    axes = {"x": {0: "batch"} if images else {0: "batch", 1: "tokens"}}
    wanted = exported(Model(), {"x": x}, path, dynamo=False, dynamic_axes=axes).numpy()
    for ranks in RANKS:
        module = read(path)
        shard(module, f"tp={ranks}")
        assert share_of_products(module, ranks) >= 0.95
        run_pipeline(module, "fuse-collectives, localize")
        (result,) = evaluate(module, {"x": x}, tmp_path).values()
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


# -- bytes on the wire, compared with the plan of Megatron

COLUMN = "0@tp"
MEGATRON = (
    *(f"*.{name}_proj.* {COLUMN}" for name in ("q", "k", "v", "gate", "up")),
    *("*.o_proj.weight 1@tp", "*.down_proj.weight 1@tp", "*embed_tokens.weight 0@tp"),
    *("*lm_head.weight 0@tp", "*experts.gate 1@tp", "*experts.up 1@tp", "*experts.down 2@tp"),
)
SEPARATE = (
    *("*.to_[qkv].* 0@tp", "*.to_out.weight 1@tp", "*.ff1.* 0@tp", "*.ff2.weight 1@tp"),
    *("glyphs.weight 0@tp", "answer.weight 0@tp"),
)
FUSED = (
    *("*.in_q.* 0@tp", "*.out.weight 1@tp", "*.linear1.* 0@tp", "*.linear2.weight 1@tp"),
    *("glyphs.weight 0@tp", "answer.weight 0@tp"),
)
LARGE = DecoderConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=3,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)


def large(tokens: int) -> Module:
    module = LLAMA.trace(LARGE, "bf16", name="large")
    module.dims["S"] = (1, tokens, 8192)
    return module


PRICED: dict[str, tuple[Callable[[], Module], tuple[str, ...]]] = {
    "llama": (tiny_llama, MEGATRON),
    "tied llama": (MODELS["tied"], MEGATRON),
    "mixtral": (mixtral, MEGATRON),
    "large llama, decoding": (lambda: large(1), MEGATRON),
    "large llama, a prompt": (lambda: large(8192), MEGATRON),
    "gpt": (INVENTED["gpt_separate"].module, SEPARATE),
    "gpt, fused": (INVENTED["gpt_fused"].module, FUSED),
}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", PRICED)
def test_no_more_is_sent_than_by_the_plan_of_megatron(
    name: str, ranks: int, tmp_path: Path
) -> None:
    make, rows = PRICED[name]
    ours, theirs = make(), make()
    present = [row for row in rows if filter_names(ours.weights, row.partition(" ")[0])]
    shard(ours, f"tp={ranks}")
    shard(theirs, f"tp={ranks}", plan_file(tmp_path, *present))
    assert 0 < sent_bytes(ours, ranks) <= sent_bytes(theirs, ranks)


LATENT = (*MEGATRON, "*.kv_b_proj.weight 0@tp", "*.shared_expert.*down_proj.weight 1@tp")
OWN_INPUTS = (*MEGATRON, "*embed_tokens_per_layer.weight 0@tp")


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "ranks"), [("deepseek_v2_lite", 2), ("gemma4", 2), ("gemma4", 3)])
def test_the_same_of_families(name: str, ranks: int, tmp_path: Path) -> None:
    cases("DECODERS")[name].save(tmp_path / "model")
    rows = LATENT if name.startswith("deepseek") else OWN_INPUTS
    ours, theirs = (huggingface.load(tmp_path / "model") for _ in range(2))
    present = [row for row in rows if filter_names(ours.weights, row.partition(" ")[0])]
    shard(ours, f"tp={ranks}")
    shard(theirs, f"tp={ranks}", plan_file(tmp_path, *present))
    assert 0 < sent_bytes(ours, ranks) <= sent_bytes(theirs, ranks)
