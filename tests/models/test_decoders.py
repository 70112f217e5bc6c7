"""Every decoder family against transformers: in one piece, in several, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.base import ports_of
from irc.frontends import huggingface
from tests.sharded.checking import share_of_products

from .cases import TABLES, Case, cases, to_build
from .runners import Runner, program, relative
from .test_transformers import logits_of, tokens, with_rounded_weights

pytestmark = pytest.mark.oracle
PROMPT, DECODED = 9, 32
DECODERS: dict[str, Case] = cases("DECODERS")
ROWS = 2
QUANTIZED = [(name, scheme) for name, case in DECODERS.items() for scheme in case.schemes]
BUILT = to_build(DECODERS, 4, 13)
MESHES = [(name, mesh) for name, case in DECODERS.items() for mesh in case.meshes]


def check_steps(runner: Runner, model: Any, case: Case, pieces: list[int], steps: int) -> None:
    """Compare the logits of a prompt in pieces, then of single tokens, with transformers."""
    ids = tokens(sum(pieces) + steps, seed=len(pieces))
    wanted, begin = logits_of(model, ids), 0
    for count in [*pieces, *[1] * steps]:
        logits = runner.step(ids[:, begin : begin + count])
        assert relative(logits, wanted[:, begin : begin + count]) < case.limit
        begin += count


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    case = DECODERS[name]
    model = case.save(tmp_path / "model")
    for backend, pieces, steps in (("onnx", [4, 1, 4], DECODED), ("reference", [PROMPT], 3)):
        module = huggingface.load(tmp_path / "model")
        compiled = program(module, backend, tmp_path / backend)
        check_steps(Runner(compiled, ROWS), model, case, pieces, steps)


@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_a_decoder_on_several_ranks(name: str, mesh: str, tmp_path: Path) -> None:
    case = DECODERS[name]
    model = case.save(tmp_path / "model")
    built = irc.compile(tmp_path / "model", tmp_path / "built", backend="reference", mesh=mesh)
    check_steps(Runner(built.program, ROWS), model, case, [5, 3], 2)
    if mesh.startswith("tp"):
        assert share_of_products(built.module, built.module.mesh.ranks) >= 0.95


@pytest.mark.parametrize("name", DECODERS)
def test_every_operation_of_a_decoder_has_a_kernel(name: str, tmp_path: Path) -> None:
    DECODERS[name].save(tmp_path / "model", "bfloat16")
    irc.compile(tmp_path / "model", tmp_path / "built", backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_on_a_gpu(name: str, tmp_path: Path) -> None:
    """As the reference computes it: GPU machines may have another transformers."""
    DECODERS[name].save(tmp_path / "model")
    ids, runners = tokens(13, seed=3), list[Runner]()
    for backend in ("cuda", "reference"):
        built = irc.compile(tmp_path / "model", tmp_path / backend, backend=backend)
        runners.append(Runner(built.program, ROWS))
    begin = 0
    for count in (4, 1, 4, 1, 1, 1, 1):
        got, wanted = (runner.step(ids[:, begin : begin + count]) for runner in runners)
        assert relative(got, wanted) < 1e-5
        begin += count


@pytest.mark.needs_rtx
@pytest.mark.parametrize("name", BUILT)
def test_tensorrt_builds_a_decoder(name: str, tmp_path: Path) -> None:
    DECODERS[name].save(tmp_path / "model", "bfloat16")
    irc.compile(tmp_path / "model", tmp_path / "built", backend="tensorrt-rtx")


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_in_bf16_loses_no_more_than_transformers(name: str, tmp_path: Path) -> None:
    """For nine of ten of 360 tokens: where experts nearly tie, either may choose another one."""
    assert TABLES["DECODERS"][1] == ("f32", "bf16")
    model = DECODERS[name].save(tmp_path / "model", "bfloat16")
    compiled = program(huggingface.load(tmp_path / "model"), "reference", tmp_path / "built")
    prompts = np.random.default_rng(0).integers(0, 89, (5, 8, PROMPT))
    rounded = np.array([logits_of(model, ids) for ids in prompts])
    wanted = np.array([logits_of(model.float(), ids) for ids in prompts])
    got = np.array([Runner(compiled, len(ids)).step(ids) for ids in prompts])
    ours, theirs = (np.abs(logits - wanted).max(-1) for logits in (got, rounded))
    assert np.quantile(ours, 0.9) < 1.5 * np.quantile(theirs, 0.9)


@pytest.mark.parametrize(("name", "scheme"), QUANTIZED)
def test_a_decoder_with_codes(name: str, scheme: str, tmp_path: Path) -> None:
    case, folder = DECODERS[name], tmp_path / "model"
    model, ids = case.save(folder), tokens(12)
    if scheme != "int8 caches":
        built = irc.compile(folder, tmp_path / "weights", quantize=scheme)
        wanted = logits_of(with_rounded_weights(folder, scheme), ids)
        assert relative(Runner(built.program, ROWS).step(ids), wanted) < 5 * case.limit
        return
    data = tmp_path / "data.npz"
    np.savez(data, input_ids=tokens(16, 3))
    built = irc.compile(folder, tmp_path / "caches", kv_cache="int8", calibration=data)
    for port in ports_of(built.module.main).states:
        assert (port.dtype == "i8") == (not port.fixed), port.name
    prefill, steps = Runner(built.program, ROWS).decode(ids[:, :7], ids[:, 7:])
    logits, wanted = np.concatenate([prefill, steps], axis=1), logits_of(model, ids)
    assert 0 < relative(logits, wanted) < 5e-2
