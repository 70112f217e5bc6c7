"""What we emit comes back as what it was, or where a file says less, computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.onnx import backend
from irc.backends.reference import evaluate
from irc.driver import prepare, write
from irc.dtypes import numpy_dtype
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.fresh import fresh
from tests.frontends.onnx_models import read
from tests.ops.compare import assert_close
from tests.ops.example import Example, inputs_of, module_of
from tests.ops.examples import EXAMPLES
from tests.ops.test_onnx import GLOBAL_VIEW, solvable
from tests.random_modules import random_module
from tests.tiny_checkpoint import write_checkpoint

# These have no lowering of their own: their expansion is what a file holds.
EXPANDED = [
    "gated_mlp",
    "quick_gelu",
    "squared_relu",
    "stack",
    "one_hot",
    "moe_slots",
    "moe_dispatch",
    "moe_combine",
    "slot_ids",
]
# What a file of ONNX does not say. Everything else comes back as it was.
LOST = {
    "a dimension counted from the end": {
        "transpose 2x12x3x24 order=(0, -2, 1, -1)",
        "repeat 2xBx12 dim=-2,count=2",
        "cumsum 12x9",
    },
    "an operation that does nothing": {
        "cast Bx8 dtype=f32",
        "cast dtype=f32",
        "split 5x24x12 dim=-3,sizes=(5,)",
        "pad before=(),after=()",
        "call Bx4,Bx4",
    },
    "a dtype that is computed in f32": {
        "cast Bx8 dtype=f16",
        "cast Bx8 dtype=bf16",
        "cast 12 dtype=bf16",
        "constant values=(),shape=(0,),dtype=bf16",
        "dequantize 12x6,12x1",
        "dequantize 6x12,1x1",
        "full value=1.5,shape=(2, 3),dtype=f16",
    },
    "1 and 1.0": {"constant values=(1, 2.5, -3, 0),shape=(2, 2)"},
    "a statement": {
        "embedding 12,12x24 sentinel=True",
        "attention BxSx16,BxTx16,BxTx16 head_dim=4,group=1",
    },
    "an argument of four bits": {
        "dequantize 12x48,12x12",
        "dequantize 48x7,24x7",
        "dequantize 24x12,24x1,24x1",
    },
    "scales that ONNX has no form of": {"dequantize 24x24,12x12"},
    "which of two ways to write it": {"constant values=(7,),dtype=i64"},
}
RARE = {"rope", "moe_dispatch", "moe_combine", "slot_ids"}  # some, see below


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of this session and this test."""
    return fresh(crc32(request.node.nodeid.encode()))


def plain(module: irc.Module, expand: bool = True) -> str:
    """The text with neither names of values nor what a file does not hold."""
    names = ", ".join(f'"{name}"' for name in EXPANDED)
    passes = f"inline, expand{{ops=[{names}]}}, cse, dce" if expand else "inline"
    run_pipeline(module, passes)
    for function in module.functions.values():
        function.results = ()
        for op in function:
            for result in op.results:
                result.name = None
    module.dims = {}
    return str(module)


def emitted(module: irc.Module, folder: Path) -> Path:
    """The file of a module of one rank."""
    folder.mkdir(exist_ok=True)
    backend.emit(module, folder, {"base": folder})
    return folder / "rank0.onnx"


def examples() -> list[Any]:
    """Every example of one rank, in its first dtype, and in another that is no float."""
    found: list[Any] = []
    for op, many in EXAMPLES.items():
        for example in many:
            if op in GLOBAL_VIEW or example.local or example.mesh or not example.dtypes:
                continue
            if op == "return" and not example.args:
                continue
            whole = [kind for kind in example.dtypes[1:] if kind in ("i32", "bool")][:1]
            for dtype in (example.dtypes[0], *whole):
                found.append(pytest.param(example, dtype, id=f"{example}-{dtype}"))
    return found


@pytest.mark.parametrize(("example", "dtype"), examples())
def test_an_operation_comes_back(
    example: Example, dtype: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    def fresh_module() -> irc.Module:
        return module_of(example if solvable(example) else example.bound(), dtype)

    module = fresh_module()
    again = read(emitted(module, tmp_path / "a"))
    inputs = inputs_of(example, dtype, rng)
    narrow = {
        str(arg.name): inputs[str(arg.name)].astype(numpy_dtype(arg.type.dtype))
        for arg in again.main.args
    }
    found = evaluate(again, narrow)
    wanted = evaluate(module, inputs)
    assert list(found) == list(wanted)
    for name, want in wanted.items():
        assert_close(found[name].astype(want.dtype), want, f"{example} {name}", factor=2)
    text = str(again)
    assert str(read(emitted(again, tmp_path / "b"))) == text
    if dtype in ("f16", "bf16", "f64") or _lost(example):
        return
    assert plain(read(tmp_path / "a" / "rank0.onnx")) == plain(fresh_module())


def _lost(example: Example) -> bool:
    if example.op == "rope":
        return example.attributes.get("kind") in ("dynamic", "longrope")
    if example.op in RARE:
        return True  # numbers as constant or full, in another order
    return any(str(example) in each for each in LOST.values())


def test_what_is_lost_is_known() -> None:
    every = {str(e) for many in EXAMPLES.values() for e in many}
    for names in LOST.values():
        assert names <= every


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
    folder = tmp_path / "model"
    folder.mkdir()
    write_checkpoint(folder, **settings)
    passes = "inline, canonicalize, cse, fold, dce"
    prepared = prepare(folder, dtype="f32", pipeline=passes)
    artifact = tmp_path / "artifact"
    write(prepared, artifact)
    dims = prepared.module.dims
    module = read(artifact / "rank0.onnx", dims=dims)
    (name, path), *_ = module.files.items()
    assert Path(path).resolve() == (folder / "model.safetensors").resolve()
    want = str(prepared.module)
    file, *_ = prepared.module.files
    line = f'  file @{file} = "{prepared.module.files[file]}"'
    assert str(module) == want.replace(line, f'  file @{name} = "{path}"').replace(
        f"= @{file}[", f"= @{name}["
    )
    assert [str(op.loc) for op in [*module.ops()][:-1]] == [
        str(op.loc) for op in [*prepared.module.ops()][:-1]
    ]


def test_random_modules_are_read(tmp_path: Path) -> None:
    rng, seen = fresh(5), 0
    for _ in range(2000):  # of which one in twenty gets a file
        module = random_module(int(rng.integers(1 << 30)))
        try:
            path = emitted(module, tmp_path / "m")
        except irc.Error:
            continue  # no checkpoint, several ranks, or nothing returned
        read(path)
        seen += 1
        if seen == 6:
            return
    raise AssertionError(f"only {seen} modules got a file")


def test_caches_alias_their_arguments(tmp_path: Path) -> None:
    text = """module @m {
      func @forward(%k: f32[B, 2, C, 4], %new: f32[B, S, 8], %past: i32[B]) -> (k: f32[B, 2, C, 4] aliases %k, n: f32[B, S, 8]) {
        %k.1 = cache_update %k, %new, %past : f32[B, 2, C, 4]
        %n = neg %new : f32[B, S, 8]
        return %k.1, %n
      }
    }"""  # noqa: E501
    module = parse_module(text)
    assert str(read(emitted(module, tmp_path / "a"))) == str(parse_module(text))
    # a cache that is read as it was before cannot be overwritten
    used = text.replace("%n = neg %new : f32[B, S, 8]", "%n = neg %k : f32[B, 2, C, 4]")
    used = used.replace("n: f32[B, S, 8]", "n: f32[B, 2, C, 4]").replace(" aliases %k", "")
    again = read(emitted(parse_module(used), tmp_path / "b"))
    assert not again.main.aliases()


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3,pp=2"])
def test_a_rank_of_several(mesh: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_checkpoint(folder)
    prepared = prepare(folder, dtype="f32", mesh=mesh)
    write(prepared, tmp_path / "artifact")
    module = read(tmp_path / "artifact" / "rank1.onnx")
    assert module.local and module.mesh == prepared.module.mesh
    collectives = [op.opname for op in module.ops() if hasattr(op, "ways")]
    assert "all_reduce" in collectives
    assert {op.attributes["axis"] for op in module.ops() if op.opname == "all_reduce"} == {"tp"}
    assert any(op.opname == "rank" for op in module.ops())


@pytest.mark.parametrize("weights", ["inside", "outside"])
def test_the_flavour_of_tensorrt_comes_back(weights: str, tmp_path: Path) -> None:
    """In the module's own dtypes, scaled queries and weights that are inputs included."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_checkpoint(folder)
    engine = {"build": False, "weights": weights, "self_test": False}
    prepared = prepare(
        folder,
        dtype="bf16",
        backend="tensorrt-rtx",
        dims={"C": (64, 64, 64)},
        engine=engine | {"target": "tensorrt-rtx-1.7/sm_89"},
    )
    write(prepared, tmp_path / "artifact")
    (path,) = (tmp_path / "artifact").glob("*.onnx")
    module = read(path)
    assert len(module.main.aliases()) == 4
    texts = [plain(each).partition("  func ")[2] for each in (module, prepared.module)]
    assert texts[0] == texts[1]
    assert [(w.name, w.type) for w in module.weights.values()] == [
        (w.name, w.type) for w in prepared.module.weights.values()
    ]


def test_one_engine_for_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_checkpoint(folder)
    engine = {"build": False, "self_test": False, "target": "tensorrt-rtx-1.7/sm_89"}
    prepared = prepare(
        folder, backend="tensorrt-rtx", mesh="tp=2", dims={"C": (64, 64, 64)}, engine=engine
    )
    write(prepared, tmp_path / "artifact")
    (path,) = (tmp_path / "artifact").glob("*.onnx")
    module = read(path)
    assert [a.name for a in module.main.args] == [a.name for a in prepared.module.main.args]
    names = [[op.opname for op in m.ops()] for m in (module, prepared.module)]
    assert names[0].count("all_reduce") == names[1].count("all_reduce")
    assert {"rank", "all_reduce_rms_norm"} <= {*names[0]} or "all_reduce" in names[0]
