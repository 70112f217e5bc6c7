"""Models of every family, of a user and with quantized weights against transformers."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import huggingface, layers
from irc.generation.greedy import greedy
from irc.quantization.formats import decode, encode
from tests.cli.runner import works
from tests.fresh import fresh, session_seed
from tests.layout import ROOT
from tests.tiny_checkpoint import write_checkpoint

from .runners import Runner, continued, program, relative
from .shapes import SHAPES

pytestmark = pytest.mark.oracle
PROMPT, DECODED, GREEDY, ROWS = 9, 32, 64, 2
# Rope settings and num_key_value_heads are the family's defaults unless a case sets them.
PLAIN = {k: v for k, v in SHAPES["mha"].items() if k not in ("rope_parameters", "head_dim")}
MOE = {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2}

# case -> model_type and the keys of its config.json
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("llama", shape) for name, shape in SHAPES.items()},
    "mistral_window": ("mistral", PLAIN | {"num_key_value_heads": 2, "sliding_window": 7}),
    "qwen2": ("qwen2", PLAIN | {"num_key_value_heads": 2, "use_sliding_window": False}),
    "qwen3": ("qwen3", PLAIN | {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3_bias": ("qwen3", PLAIN | {"attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", PLAIN | MOE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": (
        "mixtral",
        PLAIN
        | MOE
        | {"num_local_experts": 5, "num_experts_per_tok": 3}
        | {"sliding_window": 7, "tie_word_embeddings": True},
    ),
    "mixtral_one": ("mixtral", PLAIN | MOE | {"num_local_experts": 3, "num_experts_per_tok": 1}),
}


def oracle() -> tuple[Any, Any]:
    """torch and transformers."""
    torch = import_module("torch")
    torch.set_num_threads(1)  # models this small are slower on several, and tests run in parallel
    return torch, import_module("transformers")


def checkpoint(
    folder: Path, case: str, dtype: str = "float32", changes: Any = None, **saving: Any
) -> Any:
    """The model of a case in transformers, saved to a folder as safetensors."""
    torch, transformers = oracle()
    torch.manual_seed(0)
    model_type, keys = CASES[case]
    config = transformers.AutoConfig.for_model(
        model_type, **(keys | (changes or {})), bos_token_id=0, eos_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(getattr(torch, dtype))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("norm.weight", "bias")):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, **saving)
    return model


def tokens(count: int, seed: int = 1) -> np.ndarray:
    """Token ids [ROWS, count] that every vocabulary has."""
    return np.random.default_rng(seed).integers(0, 89, (ROWS, count))


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """All logits of complete sequences, in f32."""
    torch, _ = oracle()
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def greedy_of(model: Any, prompt: np.ndarray, count: int) -> np.ndarray:
    """The tokens that generate() chooses, without an end token."""
    torch, _ = oracle()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor(prompt)
    counts = {"max_new_tokens": count, "min_new_tokens": count}
    with torch.no_grad():  # without a mask, tokens 0 of the prompt would count as padding
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **counts)
    return out[:, prompt.shape[1] :].numpy()


def check_decoding(module: irc.Module, model: Any, backend: str, folder: Path, limit: float) -> Any:
    """Compare the logits of prefill and decode steps; return the program and the prompt."""
    compiled, ids = program(module, backend, folder), tokens(PROMPT + DECODED)
    wanted = logits_of(model, ids)
    prefill, steps = Runner(compiled, ROWS).decode(ids[:, :PROMPT], ids[:, PROMPT:])
    assert relative(prefill, wanted[:, :PROMPT]) < limit
    assert relative(steps, wanted[:, PROMPT:]) < limit
    return compiled, ids[:, :PROMPT]


@pytest.mark.parametrize("backend", ["reference", "onnx"])
@pytest.mark.parametrize("case", CASES)
def test_family_agrees_with_transformers(case: str, backend: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", case, save_original_format=True)
    module = huggingface.load(tmp_path / "model")
    compiled, prompt = check_decoding(module, model, backend, tmp_path / "built", 1e-4)
    got = Runner(compiled, ROWS).greedy(prompt, GREEDY)
    assert np.array_equal(got, greedy_of(model, prompt, GREEDY))


@pytest.mark.parametrize("backend", ["reference", "onnx"])
@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("f16", "float16")])
def test_narrow_floats_are_close_to_f32(
    dtype: str, name: str, backend: str, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model", "gqa_llama3", name)
    module = huggingface.load(tmp_path / "model")
    assert {weight.type.dtype for weight in module.weights.values()} == {dtype}
    check_decoding(module, model.float(), backend, tmp_path / "built", 2e-2)


SHORT = {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": SHORT | {"rope_type": "yarn", "factor": 4.0},
    "longrope": SHORT
    | {
        "rope_type": "longrope",
        "factor": 2.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_every_rope_of_a_config(kind: str, tmp_path: Path) -> None:
    changes = {"rope_parameters": ROPES[kind], "max_position_embeddings": 32}
    model = checkpoint(tmp_path / "model", "mha", changes=changes)
    ids = tokens(40)  # longer than max_position_embeddings, where dynamic and longrope change
    compiled = program(huggingface.load(tmp_path / "model"), "reference", tmp_path / "built")
    assert relative(Runner(compiled, ROWS).step(ids), logits_of(model, ids)) < 1e-4


@pytest.mark.parametrize("passes", ["", 'shard{mesh="tp=3", sequence=true}, localize'])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_prompt_in_pieces_counts_its_whole_length(kind: str, passes: str, tmp_path: Path) -> None:
    changes = {"rope_parameters": ROPES[kind], "max_position_embeddings": 16}
    checkpoint(tmp_path / "model", "mha", changes=changes)
    dims = {"S": (1, 6, 9 if passes else 7), "C": (1, 64, 64)}
    built = irc.compile(tmp_path / "model", tmp_path / "built", dims=dims, pipeline=passes)
    for length in (4, 15, 16, 17, 40):
        prompt = tokens(length)[:1]
        # read again: dynamic keeps the longest length that a model has seen
        model = oracle()[1].LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
        assert (
            continued(built, prompt[0].tolist(), 12) == greedy_of(model, prompt, 12)[0].tolist()
        ), length


def test_mixtral_checkpoints_with_joined_experts(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "joined", "mixtral", save_original_format=False)
    model.save_pretrained(tmp_path / "single", save_original_format=True)
    references: dict[str, Callable[[str], bool]] = {
        "joined": lambda ref: ref.endswith('gate_up_proj"][:, 80:160, :]'),
        "single": lambda ref: 'experts.3.w3.weight"].unsqueeze(0); 0)' in ref,
    }
    for name, expected in references.items():
        module = huggingface.load(tmp_path / name)
        assert expected(str(module.weights["model.layers.1.block_sparse_moe.experts.up"].ref))
        compiled = program(module, "reference", tmp_path / f"{name}_built")
        assert relative(Runner(compiled, ROWS).step(IDS), logits_of(model, IDS)) < 1e-4


IDS = tokens(12)


def test_narrow_weights_are_widened(tmp_path: Path) -> None:
    torch, transformers = oracle()
    checkpoint(tmp_path / "model", "mixtral", "bfloat16", save_original_format=True)
    # read again: the rope tables of a model that was cast are rounded as well
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    compiled = program(huggingface.load(tmp_path / "model", "f32"), "onnx", tmp_path / "built")
    assert relative(Runner(compiled, ROWS).step(IDS), logits_of(model.eval(), IDS)) < 1e-4


def test_mixture_of_experts_agrees_with_qwen2_moe() -> None:
    torch, transformers = oracle()
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
    weights = {name: value.numpy() for name, value in block.state_dict().items()}
    joined = weights.pop("experts.gate_up_proj")
    weights["experts.gate"], weights["experts.up"] = joined[:, :10], joined[:, 10:]
    weights["experts.down"] = weights.pop("experts.down_proj")
    layer = layers.MixtureOfExperts(
        24, 10, 5, 3, routing=layers.Routing(False), shared_size=14, shared_gate=True
    )
    module = irc.trace(layer, {"x": irc.Spec("f32", x.shape)})
    assert relative(irc.evaluate(module, {"x": x}, weights=weights)["result0"], wanted) < 1e-5


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "tp=3,pp=2"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_example_of_a_custom_model(qk_norm: bool, mesh: str, tmp_path: Path) -> None:
    """examples/custom_llm.py computes what Persimmon computes, on any ranks."""
    torch, transformers = oracle()
    torch.manual_seed(session_seed())
    config = transformers.PersimmonConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=76,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=64,
        qk_layernorm=qk_norm,
    )
    model = transformers.PersimmonForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float("norm.w" in name), parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "model")
    words = ["--load", ROOT / "examples" / "custom_llm.py", "--mesh", mesh, "-o", tmp_path / "out"]
    works("compile", tmp_path / "model", *words)
    prompt = fresh().integers(0, 97, (1, 6))
    chosen = greedy(irc.load(tmp_path / "out").program, prompt[0].tolist(), 20).tokens
    assert list(chosen) == greedy_of(model, prompt, 20)[0].tolist()


ROUNDING = {"w8a16": ("int8", (1, 0), "absmax"), "w4a16": ("int4", (1, 0), "mse")}


def with_rounded_weights(folder: Path, scheme: str) -> Any:
    """A model whose linears have the weights of codes and scales; the head has codes of 8 bits."""
    torch, transformers = oracle()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            kind, block, method = ROUNDING["w8a16" if name == "lm_head" else scheme]
            weight = module.weight.detach().numpy()
            values = decode(encode(weight, kind, block, method=method))
            module.weight = torch.nn.Parameter(torch.tensor(values))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("scheme", "backend", "mesh"),
    [
        ("w4a16", "onnx", ""),
        ("w4a16", "reference", ""),
        ("w8a16", "onnx", "tp=2"),
        ("w8a16", "onnx", "tp=3"),
        ("w8a16", "reference", "tp=2"),
    ],
)
def test_quantized_heads(scheme: str, backend: str, mesh: str, tied: bool, tmp_path: Path) -> None:
    """Also where ranks hold uneven parts of the vocabulary of 301."""
    sizes: dict[str, Any] = {"vocab_size": 301, "intermediate_size": 64}
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=tied, **sizes)
    options: dict[str, Any] = {"mesh": mesh} if mesh else {}
    artifact = irc.compile(folder, tmp_path / "a", backend=backend, quantize=scheme, **options)
    types = {name: weight.type for name, weight in artifact.module.weights.items()}
    head, scale = types["lm_head.weight"], types["lm_head.scale"]
    assert (head.dtype, types["model.embed_tokens.weight"].dtype) == ("i8", "f32")
    assert head.shape[0] == scale.shape[0] == -(-301 // int(mesh[-1:] or 1))
    ids = fresh(2).integers(0, 300, (2, 7))
    wanted = logits_of(with_rounded_weights(folder, scheme), ids)
    assert relative(Runner(artifact.program, 2).step(ids), wanted) < 5e-4
