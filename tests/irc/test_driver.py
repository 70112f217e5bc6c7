"""The public functions: trace, compile, load, run, generate, run_passes, and the lazy names."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irc
from irc.backends.onnxruntime import OnnxRuntimeProgram
from irc.driver import open_model
from irc.dtypes import numpy_dtype
from irc.frontends import Module
from irc.frontends.layers import Linear
from irc.frontends.random_weights import random_weights
from tests.layout import ROOT
from tests.tiny_checkpoint import write_checkpoint


class Double(Module):
    def forward(self, x: Any) -> dict[str, Any]:
        return {"y": x + x}


class Head(Module):
    def __init__(self) -> None:
        self.head = Linear(4, 3)

    def forward(self, x: Any) -> dict[str, Any]:
        return {"y": self.head(x)}


def doubled() -> irc.Module:
    return irc.trace(Double(), {"x": irc.Spec("f32", ("B", 4))}, {"B": (1, 2, 8)})


X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_every_public_name_is_there() -> None:
    for name in irc.__all__:
        assert getattr(irc, name) is not None, name
    assert set(irc.__all__) <= set(dir(irc))
    assert irc.Module.__module__ == "irc.core"
    assert irc.parse.__name__ == "parse_module"
    with pytest.raises(AttributeError, match="module 'irc' has no attribute 'Modul'"):
        irc.Modul  # noqa: B018  # pyright: ignore


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
    import ast

    tree = ast.parse((ROOT / "irc" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    names: dict[str, tuple[str, str]] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            names[alias.asname or alias.name] = (f"irc.{node.module}", alias.name)
    assert sorted([*names, "__version__"]) == irc.__all__
    for name, (module, original) in names.items():
        __import__(module)
        assert getattr(irc, name) is getattr(sys.modules[module], original)


def test_importing_is_fast() -> None:
    """At most 100 ms of a core on top of numpy, and a quiet machine takes one."""
    code = (
        "import numpy, time; began = time.process_time(); import irc; "
        "print(time.process_time() - began)"
    )
    command = [sys.executable, "-c", code]
    runs = [
        float(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(runs) < 0.1


def test_a_module_compiles_and_runs(tmp_path: Path) -> None:
    artifact = irc.compile(doubled(), tmp_path / "out")
    np.testing.assert_array_equal(artifact.run({"x": X})["y"], 2 * X)
    loaded = irc.load(tmp_path / "out")
    np.testing.assert_array_equal(loaded.run({"x": X})["y"], 2 * X)
    assert str(loaded.module).startswith("module @double dims(B=1:2:8)")
    assert repr(loaded) == f"<artifact {tmp_path}/out for onnx>"


def test_random_weights_where_nothing_lacks_values(tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match="so --random-weights has no effect"):
        irc.compile(doubled(), tmp_path / "out", random_weights=3)


def test_options_reach_what_loads(tmp_path: Path) -> None:
    irc.compile(doubled(), tmp_path / "out")
    program = irc.load(tmp_path / "out", threads=1).program
    assert isinstance(program, OnnxRuntimeProgram)
    assert program.session.get_session_options().intra_op_num_threads == 1
    with pytest.raises(irc.Error, match="the reference backend has no option threads"):
        open_model(tmp_path / "out", "reference", threads=1)
    irc.compile(doubled(), tmp_path / "numpy", backend="reference")
    with pytest.raises(irc.Error, match="the reference backend has no option threads"):
        _ = irc.load(tmp_path / "numpy", threads=1).program


def test_a_module_compiles_for_the_reference(tmp_path: Path) -> None:
    artifact = irc.compile(doubled(), tmp_path / "out", backend="reference")
    np.testing.assert_array_equal(artifact.run({"x": X})["y"], 2 * X)
    assert artifact.manifest["pipeline"] == ""


def test_evaluate_and_run_passes() -> None:
    module = doubled()
    np.testing.assert_array_equal(irc.evaluate(module, {"x": X})["y"], 2 * X)
    (step,) = irc.run_passes(module, "canonicalize")
    assert str(step) == "canonicalize"
    with pytest.raises(irc.Error, match="no pass called 'canonicalise'; did you mean"):
        irc.run_passes(module, "canonicalise")


def test_values_of_parameters_are_asked_for(tmp_path: Path) -> None:
    module = irc.trace(Head(), {"x": irc.Spec("f32", ("B", 4))}, {"B": (1, 2, 8)})
    with pytest.raises(irc.Error, match=r"2 of 2 weights have no values .*--random-weights SEED"):
        irc.compile(module, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    artifact = irc.compile(module, tmp_path / "out", random_weights=1)
    expected = irc.evaluate(random_weights(module, 1), {"x": X})["y"]
    np.testing.assert_allclose(artifact.run({"x": X})["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_compute_type(tmp_path: Path, dtype: str) -> None:
    folder = write_checkpoint(tmp_path / "model")
    artifact = irc.compile(folder, tmp_path / "out", dtype=dtype)
    assert artifact.manifest["dtype"] == dtype
    ids = np.array([[1, 2, 3, 4, 5]])
    exact = irc.compile(folder, tmp_path / "exact").run({"input_ids": ids})["logits"]
    found = artifact.run({"input_ids": ids})["logits"]
    assert found.shape == (1, 5, 300)
    scale = np.abs(exact).max()
    tolerance = 1e-6 if dtype == "f32" else 2e-2
    assert np.abs(found - exact).max() <= tolerance * scale
    caches = [arg.type.dtype for arg in artifact.module.main.args if arg.name == "k0"]
    assert caches == [dtype]
    assert numpy_dtype(dtype).itemsize in (2, 4)


def test_an_unknown_compute_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match="no compute type called 'fp8'; there are f32, f16, bf16"):
        irc.compile(tmp_path, tmp_path / "out", dtype="fp8")


def test_progress_is_told(tmp_path: Path) -> None:
    stages: list[str] = []
    irc.compile(doubled(), tmp_path / "out", progress=lambda stage, done: stages.append(stage))
    assert list(dict.fromkeys(stages)) == [
        "reading the model",
        "running passes",
        "writing the program",
        "computing checksums",
    ]


def test_the_progress_of_copied_weights_is_told(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    told: dict[str, list[float]] = {}

    def progress(stage: str, done: float) -> None:
        told.setdefault(stage, []).append(done)

    irc.compile(folder, tmp_path / "out", bundle=True, progress=progress)
    for stage in ("copying the weights", "computing checksums"):
        assert told[stage] == sorted(told[stage])
        assert len(told[stage]) > 3
        assert told[stage][-1] == 1.0


def test_the_module_of_an_artifact_finds_its_weights(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    ids = {"input_ids": np.array([[3, 1, 2]])}
    wanted = irc.compile(folder, tmp_path / "near").run(ids)["logits"]
    module = irc.compile(folder, tmp_path / "out", bundle=True).module
    assert list(module.files.values()) == [str(tmp_path / "out" / "rank0.safetensors")]
    again = irc.compile(module, tmp_path / "again")
    np.testing.assert_array_equal(again.run(ids)["logits"], wanted)


def test_compiling_leaves_the_references_of_a_bundled_module(tmp_path: Path) -> None:
    module = random_weights(irc.trace(Head(), {"x": irc.Spec("f32", ("B", 4))}), 1)
    before = str(module)
    irc.compile(module, tmp_path / "out", bundle=True, pipeline="")
    assert str(module) == before


def test_ranges_are_for_symbols_that_the_model_has(tmp_path: Path) -> None:
    module = irc.trace(Double(), {"x": irc.Spec("f32", ("B", 4))})
    with pytest.raises(irc.Error, match="no dimension 'Q'; it has B"):
        irc.compile(module, tmp_path / "out", dims={"Q": (1, 2, 3)})
    assert irc.compile(module, tmp_path / "out", dims={"B": (1, 2, 3)}).manifest["dims"] == {
        "B": [1, 2, 3]
    }


def test_a_loaded_artifact_is_checked(tmp_path: Path) -> None:
    irc.compile(doubled(), tmp_path / "out")
    (tmp_path / "out" / "module.irc").unlink()
    with pytest.raises(irc.Error, match=r"module.irc is missing; compile again"):
        irc.load(tmp_path / "out")


def test_greedy_text_is_the_argmax_of_the_reference(tmp_path: Path) -> None:
    """Token by token from whole prefixes, without any cache."""
    folder = write_checkpoint(tmp_path / "model", seed=3)
    artifact = irc.compile(folder, tmp_path / "out")
    ids = [5, 17, 200]
    expected: list[int] = []
    for _ in range(20):
        row = np.array([[*ids, *expected]])
        logits = artifact.reference.run({"input_ids": row})["logits"]
        expected.append(int(logits[0, -1].argmax()))
    assert list(artifact.model.generate_ids(ids, 20).tokens) == expected


def test_the_end_of_text_stops(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", seed=3)
    tokens = irc.compile(folder, tmp_path / "a").model.generate_ids([5, 17, 200], 20).tokens
    end = tokens[7]
    folder = write_checkpoint(tmp_path / "model", seed=3, eos_token_id=[end])
    summary = irc.compile(folder, tmp_path / "b").model.generate_ids([5, 17, 200], 20)
    assert summary.stop == "end"
    assert summary.tokens == tokens[: tokens.index(end)]


@pytest.mark.parametrize(
    ("given", "range"),
    [(4, (4, 4, 4)), ((1, 2, 4), (1, 2, 4)), ([1, 2, 4], (1, 2, 4)), (np.int64(3), (3, 3, 3))],
)
def test_dims_are_ranges_or_one_number(given: Any, range: tuple[int, ...], tmp_path: Path) -> None:
    artifact = irc.compile(doubled(), tmp_path / "out", dims={"B": given})
    assert artifact.manifest["dims"]["B"] == list(range)


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ({"B": (1, 2)}, r"the range of B is \(1, 2\); give \(min, typical, max\), or one number"),
        ({"B": "4"}, "the range of B is '4'; give"),
        ({"B": (1, 2.0, 4)}, "give .min, typical, max., or one number"),
        ({"B": True}, "the range of B is True"),
        ({"B": None}, "the range of B is None"),
        ({"B": (4, 2, 1)}, "B=4:2:1 must rise"),
        ([("B", 4)], "give a mapping, such as"),
        ({4: 4}, "the model has no dimension 4; it has B"),
    ],
)
def test_dims_that_are_none(dims: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match=says):
        irc.compile(doubled(), tmp_path / "out", dims=dims)


def test_caches_without_room_are_an_option_and_not_a_pass(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    for backend in ("onnx", "tensorrt-rtx"):
        engine = {"build": False} if backend != "onnx" else {}
        with pytest.raises(irc.Error) as raised:
            irc.compile(checkpoint, tmp_path / "out", backend=backend, engine=engine, dims={"C": 0})
        assert str(raised.value) == (
            "caches of the capacity C=0 hold nothing; give more with --dims C=N"
        )


@pytest.mark.parametrize("source", [5, None, b"model.irc", onnx.ModelProto()])
def test_a_source_that_is_none(source: Any, tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match="give a path or a module of irc"):
        irc.compile(source, tmp_path / "out")


@pytest.mark.parametrize("engine", [[1], 5, {"weights": "inside"}])
def test_options_of_engines_are_for_backends_that_build_them(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match="options of engines, and the backend onnx builds none"):
        irc.compile(doubled(), tmp_path / "out", engine=engine)
