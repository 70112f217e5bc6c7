"""examples/custom_llm.py computes what transformers' GPT-NeoX computes, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import irc
from irc.cli.main import main
from irc.generation.greedy import greedy
from tests.fresh import fresh, session_seed

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_llm.py"


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "tp=3,pp=2"])
@pytest.mark.parametrize("parallel", [True, False])
def test_custom_model(parallel: bool, mesh: str, tmp_path: Path) -> None:
    torch.manual_seed(session_seed())
    config = GPTNeoXConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=76,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=64,
        use_parallel_residual=parallel,
    )
    model: Any = GPTNeoXForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float("norm.w" in name), parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    options = ["--load", str(EXAMPLE), "--mesh", mesh, "-o", str(out)]
    assert main(["compile", str(tmp_path / "model"), *options]) == 0
    prompt = fresh().integers(0, 97, 6).tolist()
    tokens = greedy(irc.load(out).program, prompt, 20).tokens
    wanted = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert list(tokens) == wanted[0, 6:].tolist()
