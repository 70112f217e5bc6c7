"""Shared by the tests of several ranks: a local module emitted, run by threads, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Program
from irc.backends.onnx import backend
from irc.backends.onnxruntime import OnnxRuntimeProgram
from irc.backends.onnxruntime.session import Part
from irc.backends.ranks.ports import Inputs
from irc.backends.ranks.threads import ThreadWorld
from irc.backends.reference import evaluate_ranks
from irc.ir.core import Function, Module, Result, Value
from irc.ir.declare import op_class
from irc.ir.dtypes import dtype_of, numpy_dtype
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.ops import Return
from tests.backends.checked_models import emit_checked

Inputs_ = Mapping[str, "np.ndarray | list[np.ndarray]"]


def loaded(module: Module, folder: Path, **options: Any) -> OnnxRuntimeProgram:
    """The program of a module, which is emitted into `folder`/out and checked by ONNX."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    facts = emit_checked(module, out, base=folder)
    known = {"threads": 1} | ({"timeout": 100} if module.mesh.ranks > 1 else {})
    program = backend.load(out, facts, **(known | options))
    assert isinstance(program, OnnxRuntimeProgram)
    return program


def session_of(program: Program) -> Any:
    """The session of a program of one rank."""
    assert isinstance(program, OnnxRuntimeProgram)
    (part,) = program.models[0].parts.steps
    assert isinstance(part, Part)
    return part.session


def rank_results(program: OnnxRuntimeProgram, inputs: Inputs_, ranks: int) -> list[Arrays]:
    """The results of every rank's model for its own inputs, which may differ."""
    given = [
        {k: v[rank] if isinstance(v, list) else v for k, v in inputs.items()}
        for rank in range(ranks)
    ]
    ports = program.models[0].ports
    bound = [Inputs("forward", [*ports.inputs, *ports.states]).bind(g) for g in given]
    return ThreadWorld(ranks, 100).run(lambda c: program.models[c.rank].run(*bound[c.rank], c))


def agrees(module: Module, inputs: Inputs_, folder: Path) -> OnnxRuntimeProgram:
    """Every rank's results are those of the reference, which rounds narrow floats."""
    program = loaded(module, folder)
    found = rank_results(program, inputs, module.mesh.ranks)
    for rank, (got, want) in enumerate(
        zip(found, evaluate_ranks(module, inputs, folder), strict=True)
    ):
        assert set(got) == set(want)
        for name, array in want.items():
            close(got[name], array, f"{name} on rank {rank}")
    return program


def close(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Equal shapes, and numbers within a tolerance."""
    narrow = dtype_of(want) in ("f16", "bf16")
    wide = want.astype(np.float32) if narrow else want
    assert (got.dtype, got.shape) == (wide.dtype, wide.shape), what
    if wide.dtype.kind != "f":
        np.testing.assert_array_equal(got, wide, what)
        return
    limit = {"f16": 2e-3, "bf16": 2e-2}.get(dtype_of(want), 1e-5)
    largest = float(np.max(np.abs(wide[np.isfinite(wide)]), initial=1))
    np.testing.assert_allclose(got, wide, limit, limit * largest, err_msg=what)


class Builder:
    """Builds a local module of one function, whose values are each rank's own."""

    def __init__(self, mesh: str, args: Mapping[str, TensorType]) -> None:
        self.module = Module("m", Mesh.parse(mesh), local=True)
        self.function = Function("forward", [(n, self._own(type)) for n, type in args.items()])
        self.module.add_function(self.function)

    def put(self, op: str, /, *operands: Any, **attributes: Any) -> Value:
        """The result of one more operation."""
        value = self.function.append(op_class(op)(*operands, **attributes)).result
        value.type = value.type if op == "rank" else self._own(value.type)
        return value

    def _own(self, type: TensorType) -> TensorType:
        return type.part_of(type.replicated.replace(varying=self.module.mesh.names))

    def collective(self, op: str, x: Value, axis: str = "tp", /, **attributes: Any) -> Value:
        """The result of one more collective."""
        group_size = self.module.mesh.group_size(tuple(axis.split(".")))
        return self.put(op, x, axis=axis, group_size=group_size, **attributes)

    def done(self, results: Mapping[str, Value]) -> Module:
        """The module that returns these."""
        self.function.append(Return(list(results.values())))
        self.function.results = tuple(Result(name, varies=True) for name in results)
        verify(self.module)
        return self.module


def drawn(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...], ranks: int
) -> list[np.ndarray]:
    """One random array per rank."""
    if dtype == "bool":
        return [rng.random(shape) < 0.5 for _ in range(ranks)]
    if dtype.startswith(("i", "u")):
        low = 0 if dtype.startswith("u") else -9
        return [rng.integers(low, 9, shape).astype(numpy_dtype(dtype)) for _ in range(ranks)]
    return [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for _ in range(ranks)]
