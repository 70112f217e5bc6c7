"""TensorRT-RTX builds an engine of every script in examples/tensorrt_llm, in narrow floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import irc
from irc.frontends.tensorrt_llm.script import run_script
from tests.fresh import fresh
from tests.frontends.tensorrt_llm import models
from tests.frontends.tensorrt_llm.test_scripts import SCRIPTS, options
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.needs_rtx
ENGINE = {"target": "tensorrt-rtx/sm_89"}
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


def built(script: str, folder: Path, given: list[str], **compilation: Any) -> irc.Artifact:
    """The artifact, with engines, of the one engine that a script builds."""
    run = run_script(SCRIPTS / script, given, options={"backend": "reference"})
    (module,) = run.engines.values()
    return irc.compile(
        module, folder / "out", backend="tensorrt-rtx", engine=ENGINE, bundle=True, **compilation
    )


def engines(artifact: irc.Artifact) -> list[str]:
    return sorted(path.name for path in artifact.folder.glob("*.engine"))


CASES: list[tuple[str, str, int, int]] = [  # script, dtype, tp, pp
    ("release_0_7/gpt.py", "f16", 2, 1), ("release_0_7/encoder.py", "bf16", 1, 1),
    ("release_0_7/llama.py", "bf16", 2, 2), ("release_0_16/gpt.py", "bf16", 1, 1),
    ("release_0_16/encoder.py", "f16", 2, 1), ("release_0_16/llama.py", "f16", 2, 1),
]  # fmt: skip


@pytest.mark.parametrize(("script", "dtype", "tp", "pp"), CASES)
def test_one_engine_per_stage(script: str, dtype: str, tp: int, pp: int, tmp_path: Path) -> None:
    artifact = built(script, tmp_path, arguments(script, tp, dtype, tmp_path, pp))
    name = "rank" if tp == 1 else "stage"
    assert engines(artifact) == [f"{name}{at}.engine" for at in range(pp)]
    assert len(artifact.manifest["program"]["ranks"]) == tp * pp
    graph = artifact.module
    assert {v.type.dtype for op in graph.ops() for v in op.results} > {dtype}


def test_float8(tmp_path: Path) -> None:
    script = "release_0_7/gpt.py"
    given = arguments(script, 1, "bf16", tmp_path)
    artifact = built(script, tmp_path, given, quantize="fp8")
    assert engines(artifact) == ["rank0.engine"]
    codes = [op for op in artifact.module.ops() if op.opname == "quantize"]
    assert len(codes) >= 8
