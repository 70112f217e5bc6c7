"""Random-weight Llamas against transformers: prefill, decoding with a KV cache, greedy text."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.frontends import huggingface

from .runners import Runner, program, relative
from .shapes import SHAPES

pytestmark = pytest.mark.oracle
BACKENDS = ("reference", "onnx")
PROMPT, DECODED, GREEDY, ROWS = 9, 32, 64, 2


def oracle() -> tuple[Any, Any]:
    """torch and transformers, which are not installed everywhere."""
    torch = import_module("torch")
    torch.set_num_threads(1)  # models this small are slower on several, and tests run in parallel
    return torch, import_module("transformers")


def checkpoint(folder: Path, name: str, seed: int = 0, dtype: str = "float32") -> Any:
    """A transformers model of a shape, saved to a folder as safetensors."""
    torch, transformers = oracle()

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SHAPES[name], bos_token_id=0, eos_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval().to(getattr(torch, dtype))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("norm.weight", "bias")):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def tokens(name: str, count: int, seed: int = 1) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(0, SHAPES[name]["vocab_size"], (ROWS, count))


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """All logits of whole sequences, in f32."""
    torch, _ = oracle()

    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def greedy_of(model: Any, prompt: np.ndarray, count: int) -> np.ndarray:
    torch, _ = oracle()

    with torch.no_grad():
        out = model.generate(
            torch.tensor(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
    return out[:, prompt.shape[1] :].numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_llama_is_the_llama_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", name)
    compiled = program(huggingface.load(tmp_path / "model"), backend, tmp_path / "built")
    ids = tokens(name, PROMPT + DECODED)
    wanted = logits_of(model, ids)
    prefill, steps = Runner(compiled, ROWS).decode(ids[:, :PROMPT], ids[:, PROMPT:])
    assert relative(prefill, wanted[:, :PROMPT]) < 1e-4
    assert relative(steps, wanted[:, PROMPT:]) < 1e-4
    got = Runner(compiled, ROWS).greedy(ids[:, :PROMPT], GREEDY)
    assert np.array_equal(got, greedy_of(_endless(model), ids[:, :PROMPT], GREEDY))


def _endless(model: Any) -> Any:
    """The model without an end token, which generate() would keep from being chosen."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_floats_stay_near_f32(dtype: str, backend: str, tmp_path: Path) -> None:
    names = {"bf16": "bfloat16", "f16": "float16"}
    model = checkpoint(tmp_path / "model", "gqa_llama3", dtype=names[dtype])
    module = huggingface.load(tmp_path / "model")
    assert {weight.type.dtype for weight in module.weights.values()} == {dtype}
    compiled = program(module, backend, tmp_path / "built")
    ids = tokens("gqa_llama3", PROMPT + DECODED)
    wanted = logits_of(model.float(), ids)
    prefill, steps = Runner(compiled, ROWS).decode(ids[:, :PROMPT], ids[:, PROMPT:])
    assert relative(prefill, wanted[:, :PROMPT]) < 2e-2
    assert relative(steps, wanted[:, PROMPT:]) < 2e-2


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "factor": 2.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_every_rope_of_a_config(kind: str, tmp_path: Path) -> None:
    torch, transformers = oracle()

    torch.manual_seed(3)
    shape = SHAPES["mha"] | {"rope_parameters": ROPES[kind], "max_position_embeddings": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    model.save_pretrained(tmp_path)
    ids = tokens("mha", 40)  # beyond the model's own length, where dynamic and longrope change
    compiled = program(huggingface.load(tmp_path), "reference", tmp_path / "built")
    assert relative(Runner(compiled, ROWS).step(ids), logits_of(model, ids)) < 1e-4


@pytest.mark.parametrize("family", ["Mistral", "Qwen2"])
def test_families_that_differ_in_biases_and_windows(family: str, tmp_path: Path) -> None:
    torch, transformers = oracle()

    torch.manual_seed(4)
    shape = {key: value for key, value in SHAPES["mha"].items() if key != "num_key_value_heads"}
    more = {"sliding_window": 7} if family == "Mistral" else {"use_sliding_window": False}
    config = getattr(transformers, f"{family}Config")(**shape, num_key_value_heads=2, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    ids = tokens("mha", 20)
    compiled = program(huggingface.load(tmp_path), "reference", tmp_path / "built")
    assert relative(Runner(compiled, ROWS).step(ids), logits_of(model, ids)) < 1e-4
