"""Arguments of public functions that have the wrong type: an Error states what is expected."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import irc
from irc.backends.reference import evaluate_ranks
from irc.driver import Artifact
from irc.frontends import Module
from irc.frontends.onnx import import_onnx
from tests.frontends.onnx_models import model, saved
from tests.tiny_checkpoint import write_checkpoint

IDS = np.array([[1, 2, 3]], np.int32)


class Double(Module):
    def forward(self, x: Any) -> dict[str, Any]:
        return {"y": x + x}


def doubled() -> irc.Module:
    return irc.trace(Double(), {"x": irc.Spec("f32", ("B", 4))}, {"B": (1, 2, 8)})


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
    says = "the input input_ids is no array .*; expected rows of equal length"
    refuses(says, artifact.run, {"input_ids": [[1], [1, 2]]})
    for prompt in (None, [1, 2], ["a", "b"], b"abc"):
        refuses("the prompt is .*; give text", artifact.generate, prompt)
    for most in ("3", 2.5, -1, 0, True, None):
        says = f"max_new_tokens is {most!r}; give a whole number of at least 1"
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
    from onnx import helper

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
