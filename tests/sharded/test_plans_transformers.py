"""The tp_plans of transformers: a weight is sharded here where transformers splits it itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from irc.passes.shard.plan import find_row, read_plan
from tests.models.test_transformers import oracle

pytestmark = pytest.mark.oracle
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
    "phi3": {},
    "glm": {},
    "gpt_neox": {},
    "starcoder2": {},
    "cohere": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "deepseek_v3": LATENT,
}
ENDS = {"embed_tokens.weight", "embed_in.weight", "lm_head.weight"}  # no row is for them here


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Two ranks of tensor parallelism that send nothing."""
    torch, _ = oracle()
    import torch.distributed as distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert torch is not None
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    distributed.destroy_process_group()


def split_dims(parameter: Any) -> set[int]:
    """The dimensions that transformers has split."""
    kinds = ("Shard", "_StridedShard")
    placements = [p for p in getattr(parameter, "placements", ()) if type(p).__name__ in kinds]
    return {placement.dim % parameter.ndim for placement in placements}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_split_where_transformers_splits_them(
    family: str, mesh: Any, tmp_path: Path
) -> None:
    torch, transformers = oracle()
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(model.config.base_model_tp_plan))
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
    rows, _ = read_plan(str(plan))
    count = 0
    for name, parameter in model.named_parameters():
        row = find_row(rows, name)
        ours = {dim for dim, axes in row.splits if "tp" in axes} if row is not None else set()
        theirs = split_dims(parameter)
        assert ours == theirs or name.split(".", 1)[-1] in ENDS or name in ENDS, name
        count += bool(theirs)
    assert count > 8
