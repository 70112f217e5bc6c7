"""Random-weight Mixtrals against transformers, saved per expert and as they lie in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.frontends import huggingface

from .runners import Runner, program, relative
from .shapes import SHAPES
from .test_llama_transformers import DECODED, PROMPT, ROWS, logits_of, oracle, tokens

pytestmark = pytest.mark.oracle
SIZES = {key: value for key, value in SHAPES["gqa_llama3"].items() if key != "rope_parameters"}
MIXTRALS: dict[str, dict[str, Any]] = {
    "two_of_four": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "three_of_five_window": {
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "one_of_three": {"num_local_experts": 3, "num_experts_per_tok": 1},
}


def checkpoint(folder: Path, name: str, per_expert: bool = True, dtype: str = "float32") -> Any:
    """A Mixtral of transformers, saved to a folder as safetensors."""
    torch, transformers = oracle()
    torch.manual_seed(6)
    config = transformers.MixtralConfig(**(SIZES | MIXTRALS[name]), bos_token_id=0, eos_token_id=0)
    model = transformers.MixtralForCausalLM(config).eval().to(getattr(torch, dtype))
    model.save_pretrained(folder, save_original_format=per_expert)
    return model


@pytest.mark.parametrize("backend", ["reference", "onnx"])
@pytest.mark.parametrize("name", MIXTRALS)
def test_mixtral_is_the_mixtral_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", name)
    compiled = program(huggingface.load(tmp_path / "model"), backend, tmp_path / "built")
    ids = tokens("gqa_llama3", PROMPT + DECODED)
    wanted = logits_of(model, ids)
    prefill, steps = Runner(compiled, ROWS).decode(ids[:, :PROMPT], ids[:, PROMPT:])
    assert relative(prefill, wanted[:, :PROMPT]) < 1e-4
    assert relative(steps, wanted[:, PROMPT:]) < 1e-4


def test_both_forms_of_a_checkpoint_are_one_model(tmp_path: Path) -> None:
    wanted = logits_of(checkpoint(tmp_path / "fused", "two_of_four", False), IDS)
    checkpoint(tmp_path / "single", "two_of_four")
    modules = {name: huggingface.load(tmp_path / name) for name in ("fused", "single")}
    up = "model.layers.1.block_sparse_moe.experts.up"
    assert str(modules["fused"].weights[up].ref).endswith('gate_up_proj"][:, 80:160, :]')
    assert 'experts.3.w3.weight"].unsqueeze(0); 0)' in str(modules["single"].weights[up].ref)
    for name, module in modules.items():
        compiled = program(module, "reference", tmp_path / f"{name}_built")
        assert relative(Runner(compiled, ROWS).step(IDS), wanted) < 1e-4


IDS = tokens("gqa_llama3", 12)


def test_narrow_weights_are_widened(tmp_path: Path) -> None:
    torch, transformers = oracle()
    checkpoint(tmp_path / "model", "two_of_four", dtype="bfloat16")
    # read again: the rope tables of a model that was cast are rounded as well
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    compiled = program(huggingface.load(tmp_path / "model", "f32"), "onnx", tmp_path / "built")
    assert relative(Runner(compiled, ROWS).step(IDS), logits_of(model.eval(), IDS)) < 1e-4


def test_the_layer_is_that_of_qwen2_moe(tmp_path: Path) -> None:
    torch, transformers = oracle()
    import irc
    from irc.frontends import layers

    torch.manual_seed(8)
    config = transformers.Qwen2MoeConfig(
        hidden_size=24,
        moe_intermediate_size=10,
        shared_expert_intermediate_size=14,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=False,
    )
    block = transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config)
    x = np.random.default_rng(3).standard_normal((2, 7, 24)).astype(np.float32)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
        wanted = block(torch.tensor(x)).numpy()
    held = {name: value.numpy() for name, value in block.state_dict().items()}
    both = held.pop("experts.gate_up_proj")
    held["experts.gate"], held["experts.up"] = both[:, :10], both[:, 10:]
    held["experts.down"] = held.pop("experts.down_proj")
    layer = layers.MixtureOfExperts(24, 10, 5, 3, normalize=False, shared_size=14, shared_gate=True)
    module = irc.trace(layer, {"x": irc.Spec("f32", x.shape)})
    assert relative(irc.evaluate(module, {"x": x}, weights=held)["result0"], wanted) < 1e-5


def test_sizes_are_checked() -> None:
    config = SIZES | {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}
    with pytest.raises(Error, match="num_experts_per_tok 3 lies outside 1 to num_local_experts 2"):
        huggingface.model_of(config)
