"""Programs of plans on real GPUs: operations, tiny models, ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.cuda.execute.load import program_of
from irc.backends.reference import ReferenceProgram, evaluate
from irc.driver.timing import time_operations
from irc.errors import Error
from irc.ir.mesh import Mesh
from tests.cuda.cases import cases, compare, drawn, odd_sizes
from tests.cuda.gpu_rank import conversation, rows_conversation, tokens_of
from tests.cuda.test_program import compiled
from tests.fresh import fresh
from tests.gpu_ranks import needs_gpus, ran
from tests.ops.example import inputs_of
from tests.ops.examples import EXAMPLES
from tests.sharded.models import MODELS

pytestmark = pytest.mark.gpu
OPTIONS = [{"graphs": graphs, "programmatic": early} for graphs in (1, 0) for early in (1, 0)]


@pytest.mark.parametrize("op", [op for op in EXAMPLES if op not in ("call", "return")])
def test_operations(op: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """In two dtypes: launched, captured, and from a graph."""
    needs_gpus(1)
    examples = [each for each in EXAMPLES[op] if not each.local and not each.mesh]
    for case in drawn(cases(examples, lambda op: ()), rng, 2):
        program = program_of(case.module, tmp_path)
        for sizes in odd_sizes(case.example, rng):
            example = replace(case.example, sizes=sizes)
            first, second = (inputs_of(example, case.dtype, rng) for _ in range(2))
            for inputs in (first, first, second):
                try:
                    wanted = evaluate(case.module, inputs)
                except Error:  # the operation refuses them, or they do not tell all sizes
                    continue
                found = program.run(inputs)
                for name, want in wanted.items():
                    compare(found[name], want, example, case.dtype)
        program.close()


@pytest.mark.parametrize(
    ("name", "options"), [*(("gqa", each) for each in OPTIONS), *((name, {}) for name in MODELS)]
)
def test_models(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    needs_gpus(1)
    program = program_of(compiled(name, ""), tmp_path, **options)
    for talk in (conversation, rows_conversation)[: 1 if name == "vocab_5" else 2]:
        wanted = talk(ReferenceProgram(compiled(name, "")))
        np.testing.assert_allclose(talk(program), wanted, rtol=1e-3, atol=1e-4)
    program.close()


@pytest.mark.parametrize("programmatic", [True, False])
def test_tokens_are_fed_back(programmatic: bool, tmp_path: Path) -> None:
    needs_gpus(1)
    module = compiled("gqa", "", "next-tokens")
    program = program_of(module, tmp_path, programmatic=programmatic)
    own, given = tokens_of(program)
    assert own == given
    program.close()


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "dp=2", "tp=2,pp=2", "tp=4"])
def test_several_gpus(mesh: str, tmp_path: Path) -> None:
    ranks = Mesh.parse(mesh).ranks
    needs_gpus(ranks)
    wanted, of_rows = (
        each(ReferenceProgram(compiled("tied", ""))) for each in (conversation, rows_conversation)
    )
    status, err = ran(ranks, "tests.cuda.gpu_rank", tmp_path, "tied", mesh)
    assert status == 0, err
    for rank in range(ranks):
        found = np.load(tmp_path / f"logits{rank}.npy")
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
        if "dp" not in mesh:
            rows = np.load(tmp_path / f"rows{rank}.npy")
            np.testing.assert_allclose(rows, of_rows, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_over_ranks(ranks: int, tmp_path: Path) -> None:
    needs_gpus(ranks)
    (tmp_path / "seed").write_text(str(fresh().integers(1 << 30)))
    status, err = ran(ranks, "tests.cuda.gpu_peer_memory", tmp_path, "sums")
    assert status == 0, err


@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_lost_rank_ends_the_others(ranks: int, how: str, tmp_path: Path) -> None:
    needs_gpus(ranks)
    status, _ = ran(ranks, "tests.cuda.gpu_peer_memory", tmp_path, how)
    assert status
    for rank in range(ranks - 1):
        seconds, _, message = (tmp_path / f"lost{rank}").read_text().partition(" ")
        assert float(seconds) < 10
        assert f"rank {ranks - 1}" in message


def test_operations_are_timed(checkpoint: Path, tmp_path: Path) -> None:
    needs_gpus(1)
    irc.compile(checkpoint, tmp_path / "out", backend="cuda", dtype="bf16")
    for times in time_operations(str(tmp_path / "out"), runs=5):
        assert times.operations and times.rest_us >= 0
        assert all(row.us > 0 and row.floor_us <= row.us for row in times.operations)
        found = {(row.scope, row.operation) for row in times.operations}
        assert ("lm_head", "fused_linear") in found
