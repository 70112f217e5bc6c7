"""The public functions: trace, compile, load, run, generate, run_passes, and the lazy names.

Arguments of the wrong type are an Error that states what is expected.
"""

import ast
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper

import irc
from irc.analysis.topology_file import default_topology
from irc.backends.reference import evaluate_ranks
from irc.driver import Artifact, open_model
from irc.driver.forecast import forecast
from irc.frontends import Module
from irc.frontends.layers import Linear
from irc.frontends.onnx import import_onnx
from irc.frontends.random_weights import random_weights
from tests.backends.ranks import session_of
from tests.frontends.onnx_models import model, saved
from tests.layout import ROOT
from tests.tiny_checkpoint import write_checkpoint


class Double(Module):
    def forward(self, x: Any) -> dict[str, Any]:
        return {"y": x + x}


def doubled() -> irc.Module:
    return irc.trace(Double(), {"x": irc.Spec("f32", ("B", 4))}, {"B": (1, 2, 8)})


class Head(Module):
    def __init__(self) -> None:
        self.head = Linear(4, 3)

    def forward(self, x: Any) -> dict[str, Any]:
        return {"y": self.head(x)}


X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_every_public_name_exists() -> None:
    for name in irc.__all__:
        assert getattr(irc, name) is not None, name
    assert set(irc.__all__) <= set(dir(irc))
    assert irc.Module.__module__ == "irc.ir.core"
    assert irc.parse.__name__ == "parse_module"
    with pytest.raises(AttributeError, match="module 'irc' has no attribute 'Modul'"):
        irc.Modul  # noqa: B018  # pyright: ignore


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
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
    """At most 100 ms of a core in addition to numpy."""
    code = "import numpy, time; t = time.process_time(); import irc; print(time.process_time() - t)"
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, check=True) for _ in range(3)]
    assert min(float(each.stdout) for each in runs) < 0.1


def test_a_module_compiles_and_runs(tmp_path: Path) -> None:
    artifact = irc.compile(doubled(), tmp_path / "out")
    np.testing.assert_array_equal(artifact.run({"x": X})["y"], 2 * X)
    loaded = irc.load(tmp_path / "out")
    np.testing.assert_array_equal(loaded.run({"x": X})["y"], 2 * X)
    assert str(loaded.module).startswith("module @double dims(B=1:2:8)")
    with pytest.raises(irc.Error, match="the inputs of the model is a ndarray; give a mapping"):
        loaded(X)  # pyright: ignore[reportArgumentType]
    assert repr(loaded) == f"<artifact {tmp_path}/out for onnx>"


@pytest.mark.parametrize(
    "options",
    [{"mesh": "tp=2"}, {"quantize": "w8a16"}, {"mesh": "tp=3"}, {"bundle": True, "pipeline": ""}],
)
def test_compiling_leaves_the_module_as_it_is(options: Any, tmp_path: Path) -> None:
    """Also where it fails: no weight of x * y can be shared, and 3 ranks are too many."""
    shared = irc.trace(Linear(8, 4, bias=False), {"x": irc.Spec("f32", ("B", 8))}, {"B": (1, 2, 8)})
    random_weights(shared, 0)
    for module in (shared, doubled()):
        text, mesh = str(module), module.mesh
        with suppress(irc.Error):
            irc.compile(module, tmp_path / "a", **options)
        if "mesh" in options:
            with suppress(irc.Error):
                forecast(module, default_topology(), **options)
        assert (str(module), module.mesh, module.local) == (text, mesh, False)
    assert irc.compile(shared, tmp_path / "b").manifest["mesh"] == ""


def test_options_of_loading(tmp_path: Path) -> None:
    irc.compile(doubled(), tmp_path / "out")
    program = irc.load(tmp_path / "out", threads=1).program
    assert session_of(program).get_session_options().intra_op_num_threads == 1
    with pytest.raises(irc.Error, match="threads is 1000000; give a whole number from 1 to"):
        _ = irc.load(tmp_path / "out", threads=10**6).program
    with pytest.raises(irc.Error, match="the reference backend has no option threads"):
        open_model(tmp_path / "out", "reference", threads=1)
    irc.compile(doubled(), tmp_path / "numpy", backend="reference")
    with pytest.raises(irc.Error, match="the reference backend has no option threads"):
        _ = irc.load(tmp_path / "numpy", threads=1).program


def test_evaluate_and_run_passes() -> None:
    module = doubled()
    np.testing.assert_array_equal(irc.evaluate(module, {"x": X})["y"], 2 * X)
    (step,) = irc.run_passes(module, "canonicalize")
    assert str(step) == "canonicalize"


def test_values_of_parameters_are_required(tmp_path: Path) -> None:
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
    ids = {"input_ids": np.array([[1, 2, 3, 4, 5]])}
    exact = irc.compile(folder, tmp_path / "exact").run(ids)["logits"]
    found = artifact.run(ids)["logits"]
    assert found.shape == (1, 5, 300)
    tolerance = 1e-6 if dtype == "f32" else 2e-2
    assert np.abs(found - exact).max() <= tolerance * np.abs(exact).max()
    assert [arg.type.dtype for arg in artifact.module.main.args if arg.name == "k0"] == [dtype]


def test_progress_is_reported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    reported: dict[str, list[float]] = {}

    def progress(stage: str, done: float) -> None:
        reported.setdefault(stage, []).append(done)

    irc.compile(folder, tmp_path / "out", bundle=True, progress=progress)
    copying = ["copying the weights", "computing checksums"]
    stages = ["reading the model", "running passes", "writing the program", *copying]
    assert sorted(reported) == sorted(stages)
    for stage in copying:
        assert reported[stage] == sorted(reported[stage])
        assert len(reported[stage]) > 3
        assert reported[stage][-1] == 1.0


def test_the_module_of_an_artifact_finds_its_weights(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    ids = {"input_ids": np.array([[3, 1, 2]])}
    wanted = irc.compile(folder, tmp_path / "near").run(ids)["logits"]
    module = irc.compile(folder, tmp_path / "out", bundle=True).module
    assert list(module.files.values()) == [str(tmp_path / "out" / "rank0.safetensors")]
    again = irc.compile(module, tmp_path / "again")
    np.testing.assert_array_equal(again.run(ids)["logits"], wanted)


def test_a_loaded_artifact_is_checked(tmp_path: Path) -> None:
    irc.compile(doubled(), tmp_path / "out")
    (tmp_path / "out" / "module.irc").unlink()
    with pytest.raises(irc.Error, match=r"module.irc is missing; compile again"):
        irc.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("given", "range"),
    [(4, (4, 4, 4)), ((1, 2, 4), (1, 2, 4)), ([1, 2, 4], (1, 2, 4)), (np.int64(3), (3, 3, 3))],
)
def test_dims_are_ranges_or_one_number(given: Any, range: tuple[int, ...], tmp_path: Path) -> None:
    artifact = irc.compile(doubled(), tmp_path / "out", dims={"B": given})
    assert artifact.manifest["dims"]["B"] == list(range)


@pytest.mark.parametrize("name", ["B", "C"])
def test_a_range_that_ends_at_0_is_an_error(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(irc.Error, match=f"the range of {name} ends at 0; expected a maximum of 1"):
        irc.compile(checkpoint, tmp_path / "out", dims={name: 0})


# -- wrong arguments

IDS = np.array([[1, 2, 3]], np.int32)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("artifact")
    write_checkpoint(folder / "llama")
    return irc.compile(folder / "llama", folder / "out")


def refuses(says: str, call: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(irc.Error, match=says):
        call(*arguments, **named)


AS_TEXT = 'give the passes as text, such as "cse, dce"'


@pytest.mark.parametrize(
    ("says", "call", "arguments"),
    [
        *[
            (says, irc.run_passes, (doubled(), pipeline))
            for pipeline, says in (
                (["cse"], f"a pass of the pipeline is 'cse'; {AS_TEXT}"),
                (3, f"the pipeline is 3; {AS_TEXT}"),
                (None, "the pipeline is None; give"),
                (b"cse", "a pass of the pipeline is 99; give"),
            )
        ],
        ("the module is 'm.irc'; give one of irc", irc.run_passes, ("m.irc", "cse")),
        ("the module is None; give one of irc", irc.evaluate, (None, {})),
        ("the module is None; give one of irc", evaluate_ranks, (None, {})),
        ("the folder to write is None; give a path", irc.compile, (doubled(), None)),
        ("the artifact is None; give a path", irc.load, (None,)),
        *[
            ("the text of a module is .*; give text, such as", irc.parse, (text,))
            for text in (None, b"module @m {}", Path("m.irc"))
        ],
        *[
            ("give .*a mapping from names to arrays", irc.evaluate, (doubled(), inputs))
            for inputs in (None, IDS, [IDS], {3: IDS})
        ],
        (r'the shape of a Spec is 3; give a tuple, such as \("B", 64\)', irc.Spec, ("f32", 3)),
        ("the shape of a Spec is 'BS'; give a tuple", irc.Spec, ("f32", "BS")),
        ('the dtype of a Spec is a type; give its name, such as "f32"', irc.Spec, (float, (3,))),
    ],
)
def test_arguments_of_the_wrong_type(says: str, call: Any, arguments: tuple[Any, ...]) -> None:
    refuses(says, call, *arguments)


def test_arguments_of_methods(artifact: Artifact) -> None:
    for inputs in (None, IDS, [IDS], {3: IDS}):
        refuses("give .*a mapping from names to arrays", artifact.run, inputs)
    says = "the input input_ids is not an array .*; expected rows of equal length"
    refuses(says, artifact.run, {"input_ids": [[1], [1, 2]]})
    for prompt in (None, [1, 2], ["a", 3], b"abc"):
        refuses("the prompt is .*; give text", artifact.generate, prompt)
    for most in ("3", 2.5, -1, 0, True):
        says = f"max_new_tokens is {most!r}; give (a whole number|at least 1)"
        refuses(says, artifact.generate, "abc", max_new_tokens=most)
    two: Any = np.int64(2)
    assert artifact.generate("abc", two) == artifact.generate("abc", 2)
    for threads in ("2", -3, 0, 1.5):
        loaded = irc.load(artifact.folder, threads=threads)  # pyright: ignore[reportArgumentType]
        refuses("threads is .*; give a whole number from 1 to", loaded.run, {"input_ids": IDS})


@pytest.mark.parametrize(
    ("option", "says"),
    [
        *[({"src": each}, "give a path or a module") for each in (5, None, b"a.irc", ModelProto())],
        ({"dtype": "fp8"}, "dtype is 'fp8'; it can be f32 or f16 or bf16"),
        ({"random_weights": 3}, "so --random-weights has no effect"),
        ({"engine": [1]}, "engine is a list; give a mapping"),
        ({"engine": 5}, "engine is 5; give a mapping"),
        ({"engine": {"weights": "inside"}}, "the backend onnx has no option weights"),
        ({"pipeline": ["cse"]}, f"pipeline is a list; {AS_TEXT}"),
        ({"pipeline": 3}, f"pipeline is 3; {AS_TEXT}"),
        ({"backend": 3}, 'backend is 3; give its name, such as "onnx"'),
        ({"embedding": 3}, "embedding is 3; give the name of a scheme"),
        ({"outside": 3}, 'outside is 3; give one of "zero"'),
        ({"plan": 3}, "plan is 3; give a path"),
        ({"mesh": 3}, 'mesh is 3; give axes and sizes, such as "tp=2"'),
        ({"dims": [("B", 4)]}, "give a mapping, such as"),
        ({"dims": {"B": (1, 2)}}, "the range of B is .1, 2.; give .min, typical, max., or one"),
        ({"dims": {"B": "4"}}, "the range of B is '4'; give"),
        ({"dims": {"B": (1, 2.0, 4)}}, "give .min, typical, max., or one number"),
        ({"dims": {"B": True}}, "the range of B is True"),
        ({"dims": {"B": None}}, "the range of B is None"),
        ({"dims": {4: 4}}, "the model has no dimension 4; it has B"),
    ],
)
def test_wrong_options(option: dict[str, Any], says: str, tmp_path: Path) -> None:
    given = {"src": doubled(), "output": tmp_path / "out"} | option
    refuses(says, irc.compile, **given)
    assert not (tmp_path / "out").exists()


def test_a_plan_may_be_a_path(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama")
    plan = tmp_path / "plan.txt"
    plan.write_text("model.layers.*.mlp.up_proj.weight 0@tp\n")
    texts = [
        str(irc.compile(tmp_path / "llama", tmp_path / "out", mesh="tp=2", plan=given).module)
        for given in (plan, str(plan))
    ]
    assert texts[0] == texts[1]


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    return saved(model(nodes, {"x": ("f32", ("batch", "past", 4))}, ["y"]), tmp_path)


def test_one_number_is_a_range(onnx_file: Path) -> None:
    assert import_onnx(onnx_file, dims={"batch": 3}).dims["batch"] == (3, 3, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dims": {"bach": 3}}, "the model has no dimension 'bach'; did you mean 'batch'"),
        ({"dims": "batch=3"}, "dims is 'batch=3'; give a mapping"),
        ({"equal": {"pasd": "batch"}}, "no dimension 'pasd'; did you mean 'past'"),
        ({"equal": ["past"]}, "equal is a list; give a mapping from text to text"),
        ({"equal": {"past": 3}}, "an entry of equal is 3; give a mapping from text to text"),
        ({"mesh": 3}, 'a mesh is text such as "tp=2"'),
        ({"base": 3}, "base is 3; give a path"),
    ],
)
def test_options_of_the_import(options: Any, says: str, onnx_file: Path) -> None:
    refuses(says, import_onnx, onnx_file, **options)
