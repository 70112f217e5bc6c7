"""Shared by the tests of ONNX emission: small modules over a checkpoint, emitted and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from irc.backends.onnx import backend
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.ir.dtypes import widened
from tests.backends.checked_models import emit_checked
from tests.backends.decoder import write
from tests.backends.text import module as text_module
from tests.fresh import fresh

# Multiples of 1/4: products with such weights are added without rounding.
X = {"x": (fresh(3).integers(-8, 9, (3, 4)) / 4).astype(np.float32)}


def module(weights: str, body: str, result: str, files: dict[str, str] | None = None) -> Module:
    """A module of one argument %x: f32[S, 4]."""
    given = {"f": "m.safetensors"} if files is None else files
    head = "".join(f'  file @{k} = "{v}"\n' for k, v in given.items())
    return text_module("%x: f32[S, 4]", result, body, "dims(S=1:3:9)", head + weights)


def linear(ref: str, dtype: str = "f32") -> Module:
    """x times the weight of a reference, computed in f32."""
    cast = '%w = cast @w {dtype="f32"} : f32[5, 4]\n' if dtype != "f32" else ""
    used = "%w" if cast else "@w"
    return module(
        f"weight @w : {dtype}[5, 4] = {ref}",
        f"{cast}%y = linear %x, {used} : f32[S, 5]\nreturn %y",
        "f32[S, 5]",
    )


def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint folder with an empty folder for the artifact."""
    rng = fresh(0)
    wide = rng.standard_normal((6, 5)).astype(np.float32)
    arrays = {
        "a": rng.standard_normal((5, 4)).astype(np.float32),
        "b": wide[:5, :4].astype(ml_dtypes.bfloat16),
        "c": wide,
        "half": wide[:5, :4].astype(np.float16),
    }
    write(tmp_path / "m.safetensors", arrays)
    (tmp_path / "out").mkdir()
    return tmp_path


def emitted(m: Module, folder: Path, **options: Any) -> tuple[dict[str, Any], onnx.ModelProto]:
    """(facts, model), after the results were compared with the reference."""
    out = folder / "out"
    facts = emit_checked(m, out, base=folder, **options)
    found = backend.load(out, facts, threads=1).run(X)
    for name, want in evaluate(m, X, folder).items():
        assert found[name].dtype == want.dtype
        close = 1e-5 if want.dtype == np.float32 else 1e-2  # f32 all through, so rounded once
        np.testing.assert_allclose(*map(widened, (found[name], want)), rtol=close, atol=close)
    return facts, onnx.load(str(out / "rank0.onnx"), load_external_data=False)


def places(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Initializer to its external data."""
    return {
        t.name: {entry.key: entry.value for entry in t.external_data}
        for t in model.graph.initializer
        if t.external_data
    }
