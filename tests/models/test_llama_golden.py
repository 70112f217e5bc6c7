"""The six Llamas against stored results of transformers, for machines without torch."""

from pathlib import Path

import numpy as np
import pytest

from irc.frontends import huggingface

from .golden import DECODED, GOLDEN, GREEDY, PROMPT, prompt, write_checkpoint
from .runners import Runner, program, relative
from .shapes import SHAPES


@pytest.mark.parametrize("backend", ["reference", "onnx"])
@pytest.mark.parametrize("name", SHAPES)
def test_llama_agrees_with_transformers(name: str, backend: str, tmp_path: Path) -> None:
    with np.load(GOLDEN) as golden:
        wanted, text = golden[f"{name}_logits"], golden[f"{name}_greedy"]
    folder = write_checkpoint(tmp_path / "model", name)
    compiled = program(huggingface.load(folder), backend, tmp_path / "built")
    ids = prompt(name, PROMPT + DECODED)
    prefill, steps = Runner(compiled, 1).decode(ids[:, :PROMPT], ids[:, PROMPT:])
    assert relative(prefill, wanted[:, :PROMPT]) < 1e-4
    assert relative(steps, wanted[:, PROMPT:]) < 1e-4
    assert np.array_equal(Runner(compiled, 1).greedy(ids[:, :PROMPT], GREEDY), text)
