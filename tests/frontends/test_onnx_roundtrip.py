"""Files that irc wrote: their text comes back exactly, and their nodes compute the same."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import irc
import irc.passes
from irc.backends.onnx import backend
from irc.backends.reference import evaluate
from irc.cli.main import main
from irc.driver import prepare, write
from irc.frontends.onnx import import_onnx
from irc.ir.dtypes import numpy_dtype
from irc.onnx_format.module_text import CHECKSUM
from irc.text import parse_module, print_module
from tests.frontends.onnx_models import read
from tests.ops.compare import assert_close
from tests.ops.example import Example, inputs_of, module_of
from tests.ops.examples import EXAMPLES
from tests.ops.test_onnx import WITHOUT_LOWERING, solvable
from tests.tiny_checkpoint import write_checkpoint


def emitted(module: irc.Module, folder: Path) -> Path:
    """The file of a module of one rank."""
    folder.mkdir(exist_ok=True)
    backend.emit(module, folder, base=folder)
    return folder / "rank0.onnx"


def exact(module: irc.Module, weights: bool = False) -> str:
    """The text with locations; without files, references and global types of weights unless
    `weights`: a file holds what one rank has of them."""
    lines = print_module(module, locs=True).splitlines()
    if weights:
        return "\n".join(lines)
    kept = [line for line in lines if not line.startswith("  file ")]
    return "\n".join(
        re.sub(r"(\]( of |\{varies )| = ).*", "]", x) if x.startswith("  weight ") else x
        for x in kept
    )


def examples() -> list[Any]:
    """Every example of one rank, in its first dtype, and in another that is no float."""
    found: list[Any] = []
    for op, many in EXAMPLES.items():
        for example in many:
            if op in WITHOUT_LOWERING or example.local or example.mesh or not example.dtypes:
                continue
            if op == "return" and not example.args:
                continue
            others = [kind for kind in example.dtypes[1:] if kind in ("i32", "bool")][:1]
            for dtype in (example.dtypes[0], *others):
                found.append(pytest.param(example, dtype, id=f"{example}-{dtype}"))
    return found


@pytest.mark.parametrize(("example", "dtype"), examples())
def test_an_operation_comes_back(
    example: Example, dtype: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    module = module_of(example if solvable(example) else example.bound(), dtype)
    path = emitted(module, tmp_path)
    assert exact(read(path)) == exact(module)
    by_nodes = read(path, use_text=False)
    inputs = inputs_of(example, dtype, rng)
    given = {
        str(arg.name): inputs[str(arg.name)].astype(numpy_dtype(arg.type.dtype))
        for arg in by_nodes.main.args
    }
    found, wanted = evaluate(by_nodes, given), evaluate(module, inputs)
    for got, (name, want) in zip(found.values(), wanted.items(), strict=True):
        assert_close(got.astype(want.dtype), want, f"{example} {name}", factor=2)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True, "attention_bias": True},
        {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=["plain", "tied", "grouped"],
)
def test_a_language_model_comes_back(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", **settings)
    prepared = prepare(folder, dtype="f32", pipeline="inline, canonicalize, cse, fold, dce")
    write(prepared, tmp_path / "artifact")
    module = read(tmp_path / "artifact" / "rank0.onnx", trust=True)
    (path,) = module.files.values()
    assert Path(path).resolve() == (folder / "model.safetensors").resolve()
    (name,), (file,) = module.files, prepared.module.files
    prepared.module.files[file] = path
    wanted = exact(prepared.module, weights=True)
    assert exact(module, weights=True) == wanted.replace(f"@{file} ", f"@{name} ").replace(
        f"@{file}[", f"@{name}["
    )
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(irc.Error, match=r"should be in .*model\.safetensors: No such file"):
        import_onnx(tmp_path / "artifact" / "rank0.onnx", trust=True)


def changed(path: Path, what: str) -> None:
    """Edit a file as a tool would: the value of a constant, or an operator."""
    model = onnx.load(path, load_external_data=False)
    if what == "constant":
        (tensor,) = model.graph.initializer
        tensor.CopyFrom(numpy_helper.from_array(np.array(3, np.float32), tensor.name))
    elif what == "operator":
        model.graph.node[0].op_type = "Sub"
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("what", ["constant", "operator"])
def test_an_edited_file_is_read_by_its_nodes(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """module @m {
      func @forward(%x: f32[N]) -> (y: f32[N]) {
        %two = full {value=2.0} : f32[]
        %y = add %x, %two : f32[N]
        return %y
      }
    }"""
    path = emitted(parse_module(text), tmp_path)
    changed(path, "nothing")
    assert str(read(path)) == str(parse_module(text))
    changed(path, what)
    with pytest.warns(UserWarning, match="its graph was edited after irc wrote it"):
        module = import_onnx(path)
    x = np.array([1.0], np.float32)
    (found,) = evaluate(module, {"x": x}).values()
    assert found == (4.0 if what == "constant" else -1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["show", str(path)]) == 0
    told = capsys.readouterr().err
    assert told.startswith(f"note: {path} is read by its nodes") and ".py" not in told


def test_a_text_that_is_not_understood(tmp_path: Path) -> None:
    path = emitted(parse_module("module @m { func @forward(%x: f32[N]) -> (f32[N]) {"
                                " %y = neg %x : f32[N] return %y } }"), tmp_path)  # fmt: skip
    model = onnx.load(path)
    for entry in model.metadata_props:
        entry.value = entry.value if entry.key == CHECKSUM else entry.value.replace("neg", "gen")
    path.write_bytes(model.SerializeToString())
    with pytest.warns(UserWarning, match="this irc does not read the text in it .*gen"):
        assert [op.opname for op in import_onnx(path).ops()] == ["neg", "return"]


def test_caches_alias_their_arguments(tmp_path: Path) -> None:
    text = """module @m {
      func @forward(%k: f32[B, 2, C, 4], %new: f32[B, S, 8], %past: i32[B]) -> (k: f32[B, 2, C, 4] aliases %k, n: f32[B, S, 8]) {
        %k.1 = cache_update %k, %new, %past : f32[B, 2, C, 4]
        %n = neg %new : f32[B, S, 8]
        return %k.1, %n
      }
    }"""  # noqa: E501
    assert read(emitted(parse_module(text), tmp_path / "a"), use_text=False).main.aliases() == {
        0: 0
    }
    # a cache that is read as it was before cannot be overwritten
    used = text.replace("%n = neg %new : f32[B, S, 8]", "%n = neg %k : f32[B, 2, C, 4]")
    used = used.replace("n: f32[B, S, 8]", "n: f32[B, 2, C, 4]").replace(" aliases %k", "")
    again = read(emitted(parse_module(used), tmp_path / "b"), use_text=False)
    assert not again.main.aliases()


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3,pp=2"])
@pytest.mark.parametrize("use_text", [True, False])
def test_one_of_several_ranks(mesh: str, use_text: bool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    prepared = prepare(folder, dtype="f32", mesh=mesh)
    write(prepared, tmp_path / "artifact")
    module = read(tmp_path / "artifact" / "rank1.onnx", use_text=use_text, trust=True)
    assert module.local and module.mesh == prepared.module.mesh
    names = [op.opname for op in module.ops()]
    assert "all_reduce" in names
    assert {op.attributes["axis"] for op in module.ops() if op.opname == "all_reduce"} == {"tp"}
    if use_text:
        assert {"rank", "attention", "rope"} <= {*names}
        assert mesh != "tp=2" or exact(module) == exact(prepared.module)


MESHES = [("", "inside"), ("", "outside"), ("tp=2", "outside")]


@pytest.mark.parametrize(("mesh", "weights"), MESHES)
def test_a_file_for_tensorrt_comes_back(mesh: str, weights: str, tmp_path: Path) -> None:
    """In the module's own dtypes, weights that are inputs included."""
    folder = write_checkpoint(tmp_path / "model")
    engine = {"build": False, "weights": weights, "self_test": False}
    prepared = prepare(
        folder,
        dtype="bf16",
        mesh=mesh,
        backend="tensorrt-rtx",
        dims={"C": (64, 64, 64)},
        engine=engine | {"target": "tensorrt-rtx-1.7/sm_89"},
    )
    write(prepared, tmp_path / "artifact")
    (path,) = (tmp_path / "artifact").glob("*.onnx")
    assert exact(read(path)) == exact(prepared.module)
