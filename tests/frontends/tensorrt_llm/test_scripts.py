"""The scripts of examples/tensorrt_llm give what the same models give in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import irc
from irc.frontends.tensorrt_llm.runtime import GenerationSession, SamplingConfig
from irc.frontends.tensorrt_llm.script import run_script
from tests.fresh import fresh
from tests.frontends.tensorrt_llm import models
from tests.frontends.tensorrt_llm.llamas import VOCAB, Llama
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.oracle
SCRIPTS = Path(__file__).parents[3] / "examples" / "tensorrt_llm"
STEPS = 32


def compiled(script: str, folder: Path, *arguments: str, **options: Any) -> irc.Artifact:
    """The artifact of the one engine that a script builds."""
    run = run_script(SCRIPTS / script, [*arguments], options={"backend": "reference"})
    (module,) = run.engines.values()
    return irc.compile(module, folder / "artifact", bundle=True, **options)


def continued(artifact: Any, prompts: list[list[int]]) -> np.ndarray[Any, Any]:
    """The tokens [B, STEPS] that follow prompts, each with the largest logit."""
    session = GenerationSession(None, artifact)
    session.setup(len(prompts), max(map(len, prompts)), STEPS)
    sampling = SamplingConfig(end_id=-1, pad_id=-1)
    rows = session.decode_batch([np.array(prompt) for prompt in prompts], sampling)[:, 0]
    ends = [len(prompt) + STEPS for prompt in prompts]
    return np.stack([row[end - STEPS : end] for row, end in zip(rows, ends, strict=True)])


def greedy(logits: Any, prompts: list[list[int]]) -> np.ndarray[Any, Any]:
    """The same by a function from ids [1, S] to logits [1, S, V]."""
    found: list[list[int]] = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(STEPS):
            ids.append(int(logits(np.array([ids]))[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return np.array(found)


def drawn_prompts(rng: np.random.Generator, vocab: int, *lengths: int) -> list[list[int]]:
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def options(script: str, tp: int, weights: dict[str, Any], folder: Path) -> list[str]:
    """The command line of a script that reads weights, which are written to a folder."""
    path, old = folder / "weights", "0_7/" in script
    if old:
        np.savez(path, allow_pickle=False, **weights)
    else:
        own = "lm_head" if "gpt" in script else ""  # the other names are those of a part
        parts = {n if n.startswith(own) else f"transformer.{n}": x for n, x in weights.items()}
        save_file(parts, path)
    output = "output" if script == "release_0_16/encoder.py" else "output_dir"
    to = ["--weights", f"{path}{'.npz' * old}", f"--{output}", str(folder / "engines")]
    return [*to, "--world_size" if old else "--tp_size", str(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("script", ["release_0_7/gpt.py", "release_0_16/gpt.py"])
def test_a_gpt_with_its_own_attention(script: str, tp: int, tmp_path: Path) -> None:
    rng = fresh(tp)
    weights = models.drawn(rng, models.gpt_shapes(joined="0_7/" in script))
    prompts = drawn_prompts(rng, 96, 5, 5)  # its own attention knows no padding
    artifact = compiled(script, tmp_path, *options(script, tp, weights, tmp_path))
    wanted = greedy(lambda ids: models.gpt(weights, ids), prompts)
    np.testing.assert_array_equal(continued(artifact, prompts), wanted)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("plugin", [True, False], ids=["plugin", "plain"])
@pytest.mark.parametrize("script", ["release_0_7/llama.py", "release_0_16/llama.py"])
def test_llama(script: str, plugin: bool, tp: int, pp: int, tmp_path: Path, llama: Llama) -> None:
    prompts = drawn_prompts(fresh(tp + 4 * pp), VOCAB, 5, 3)
    sizes = ["--tp_size", str(tp), "--pp_size", str(pp)]
    options = ["--model_dir", str(llama.folder), *sizes, "--output_dir", str(tmp_path / "engines")]
    if "0_7/" in script:
        options += ["--world_size", str(tp * pp)]
        options += ["--use_gpt_attention_plugin"] * plugin
    else:
        options += ["--gpt_attention_plugin", "auto" if plugin else ""]
    artifact = compiled(script, tmp_path, *options)
    with torch.no_grad():
        wanted = greedy(lambda ids: llama.torch(torch.from_numpy(ids)).logits.numpy(), prompts)
    np.testing.assert_array_equal(continued(artifact, prompts), wanted)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("script", ["release_0_7/encoder.py", "release_0_16/encoder.py"])
def test_an_encoder(script: str, tp: int, tmp_path: Path) -> None:
    rng, old = fresh(tp), "0_7/" in script
    weights = models.drawn(rng, models.bert_shapes() if old else models.encoder_shapes())
    artifact = compiled(script, tmp_path, *options(script, tp, weights, tmp_path))
    ids, types, lengths = rng.integers(0, 120, (3, 7)), rng.integers(0, 2, (3, 7)), [7, 2, 5]
    is_token = np.arange(7) < np.array(lengths)[:, None]
    given = {
        "input_ids": ids,
        "position_ids": np.tile(np.arange(7), (3, 1)),
        "input_lengths": np.array(lengths),
    }
    inputs: dict[str, Any] = {name: array.astype(np.int32) for name, array in given.items()}
    if not old:
        inputs["mask"] = is_token.astype(np.float32)
        wanted = {"embedding": models.encoder(weights, ids, np.array(lengths))}
    else:
        inputs["token_type_ids"] = types.astype(np.int32)
        hidden, pooled = models.bert(weights, ids, types, np.array(lengths))
        wanted = {"hidden_states": hidden, "pooled": pooled}
    outputs = artifact.run(inputs)
    for name, array in wanted.items():
        kept = is_token if name == "hidden_states" else ...
        np.testing.assert_allclose(outputs[name][kept], array[kept], atol=1e-4)


# -- engines of TensorRT-RTX, in narrow floats

ENGINE: dict[str, Any] = {
    "backend": "tensorrt-rtx", "engine": {"target": "tensorrt-rtx/sm_89"},
}  # fmt: skip
DTYPES = {"f16": "float16", "bf16": "bfloat16"}


def arguments(script: str, tp: int, dtype: str, folder: Path, pp: int = 1) -> list[str]:
    """The command line of a script with random weights, which come into a folder."""
    old, kind, to = "0_7/" in script, Path(script).stem, ["--dtype", DTYPES[dtype]]
    if kind != "llama":
        encoder = models.bert_shapes() if old else models.encoder_shapes()
        shapes = encoder if kind == "encoder" else models.gpt_shapes(joined=old)
        return [*to, *options(script, tp, models.drawn(fresh(), shapes), folder)]
    checkpoint = write_checkpoint(folder / "llama", hidden_act="silu")
    to += ["--model_dir", str(checkpoint), "--output_dir", str(folder / "engines")]
    sizes = {"tp_size": tp, "pp_size": pp} | ({"world_size": tp * pp} if old else {})
    return to + [word for name, size in sizes.items() for word in (f"--{name}", str(size))]


def engines(artifact: irc.Artifact) -> list[str]:
    return sorted(path.name for path in artifact.folder.glob("*.engine"))


CASES: list[tuple[str, str, int, int]] = [  # script, dtype, tp, pp
    ("release_0_7/gpt.py", "f16", 2, 1), ("release_0_7/encoder.py", "bf16", 1, 1),
    ("release_0_7/llama.py", "bf16", 2, 2), ("release_0_16/gpt.py", "bf16", 1, 1),
    ("release_0_16/encoder.py", "f16", 2, 1), ("release_0_16/llama.py", "f16", 2, 1),
]  # fmt: skip


@pytest.mark.needs_rtx
@pytest.mark.parametrize(("script", "dtype", "tp", "pp"), CASES)
def test_one_engine_per_stage(script: str, dtype: str, tp: int, pp: int, tmp_path: Path) -> None:
    artifact = compiled(script, tmp_path, *arguments(script, tp, dtype, tmp_path, pp), **ENGINE)
    name = "rank" if tp == 1 else "stage"
    assert engines(artifact) == [f"{name}{at}.engine" for at in range(pp)]
    assert len(artifact.manifest["program"]["ranks"]) == tp * pp
    graph = artifact.module
    assert {v.type.dtype for op in graph.ops() for v in op.results} > {dtype}
