"""Checkpoint folders: single files, shards, links; binding; everything that can be wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import huggingface, random_weights
from irc.frontends.layers import LayerNorm

from ..models.golden import write_checkpoint, write_safetensors
from .test_module import Net

SPEC = {"x": irc.Spec("f32", ("B", 4))}
SHAPES = {
    "first": (4,),
    "blocks.0.up.weight": (4, 4),
    "blocks.0.scale": (4,),
    "head.weight": (2, 4),
    "head.bias": (2,),
}


def tensors(**changes: Any) -> dict[str, np.ndarray]:
    found = {
        key: np.full(shape, i + 1, np.float32) for i, (key, shape) in enumerate(SHAPES.items())
    }
    found |= {key: value for key, value in changes.items() if value is not None}
    return {key: value for key, value in found.items() if changes.get(key, 0) is not None}


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    write_safetensors(path / "model.safetensors", tensors(**changes))
    return path


def net() -> irc.Module:
    return irc.trace(Net(1), SPEC)


def sharded(path: Path, where: dict[str, str] | None = None) -> Path:
    """The same tensors in two files with an index."""
    path.mkdir(exist_ok=True)
    every = tensors()
    where = where or {
        key: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, key in enumerate(every)
    }
    for name in sorted(set(where.values())):
        if "/" not in name and name.endswith(".safetensors"):
            write_safetensors(path / name, {k: every[k] for k in where if where[k] == name})
    index = {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def refs(module: irc.Module) -> dict[str, str]:
    return {name: str(weight.ref) for name, weight in module.weights.items()}


def test_a_single_file(tmp_path: Path) -> None:
    module = huggingface.bind(net(), folder(tmp_path))
    assert module.files == {"ckpt": f"{tmp_path}/model.safetensors"}
    assert refs(module)["head.bias"] == '@ckpt["head.bias"]'
    x = np.ones((1, 4), np.float32)
    out = irc.evaluate(module, {"x": x})["result0"]
    hidden = np.maximum(np.full((4, 4), 2.0) @ np.full(4, 2.0), 0) * 3
    assert out.tolist() == [(np.full((2, 4), 4.0) @ hidden + 5).tolist()]


def test_shards_are_named_in_the_order_of_use(tmp_path: Path) -> None:
    module = huggingface.bind(net(), sharded(tmp_path))
    assert {name: Path(path).name for name, path in module.files.items()} == {
        "ckpt": "model-00001-of-00002.safetensors",
        "ckpt_1": "model-00002-of-00002.safetensors",
    }
    assert refs(module)["blocks.0.up.weight"] == '@ckpt_1["blocks.0.up.weight"]'
    whole = huggingface.bind(net(), folder(tmp_path / "whole"))
    x = {"x": np.ones((1, 4), np.float32)}
    assert irc.evaluate(module, x)["result0"].tolist() == irc.evaluate(whole, x)["result0"].tolist()
    assert str(irc.parse(str(module))) == str(module)


def test_links_of_a_hugging_face_cache(tmp_path: Path) -> None:
    real = sharded(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots"
    snapshot.mkdir()
    for i, path in enumerate(sorted(real.iterdir())):
        blob = path.rename(real / f"sha{i}")
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / blob.name)
    module = huggingface.bind(net(), snapshot)
    assert irc.evaluate(module, {"x": np.ones((1, 4), np.float32)})["result0"].shape == (1, 2)


def test_files_without_an_index(tmp_path: Path) -> None:
    every = tensors()
    write_safetensors(tmp_path / "b.safetensors", {k: every[k] for k in list(every)[:2]})
    write_safetensors(tmp_path / "a.safetensors", {k: every[k] for k in list(every)[2:]})
    assert len(huggingface.bind(net(), tmp_path).files) == 2
    write_safetensors(tmp_path / "c.safetensors", {"first": every["first"]})
    with pytest.raises(irc.Error, match=r"both b\.safetensors and c\.safetensors hold 'first'"):
        huggingface.bind(net(), tmp_path)


def test_other_float_dtypes_are_cast(tmp_path: Path) -> None:
    changed = folder(tmp_path, first=np.ones(4, np.float16))
    module = huggingface.bind(net(), changed)
    assert refs(module)["first"] == '@ckpt["first"].cast(f32)'


def test_only_unbound_weights_are_bound(tmp_path: Path) -> None:
    module = random_weights(net(), 1)
    before = refs(module)
    with pytest.raises(irc.Error, match="the model has no place for them"):
        huggingface.bind(module, folder(tmp_path))
    huggingface.bind(module, tmp_path, ignore=["*"])
    assert refs(module) == before and not module.files


def complaint(path: Path, **options: Any) -> str:
    module = net()
    before = str(module)
    with pytest.raises(irc.Error) as caught:
        huggingface.bind(module, path, **options)
    assert str(module) == before, "a module that does not fit is left as it was"
    return str(caught.value)


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    wrong = {
        "head.weight": np.zeros((3, 4), np.float32),
        "blocks.0.up.weight": None,
        "blocks.0.down.weight": np.zeros((4, 4), np.float32),
        "blocks.0.scale": np.zeros(4, np.int32),
        "vision.weight": np.zeros(2, np.float32),
    }
    text = complaint(folder(tmp_path, **wrong))
    assert f"the checkpoint {tmp_path} does not fit the model @net" in text
    assert "blocks.0.up.weight; did you mean 'blocks.0.down.weight'?" in text
    assert "blocks.0.down.weight; did you mean 'blocks.0.up.weight'?" in text
    assert "\n    vision.weight\n" in text
    assert "head.weight is f32[3, 4], but the model takes f32[2, 4]" in text
    assert "blocks.0.scale is i32[4], which does not convert to f32" in text


JOINED = """module @m {
  weight @w : f32[6, 4] = concat(unbound("a", [4, 4]), unbound("b", [2, 4]); 0)
  func @forward() -> (f32[6, 4]) {
    return @w
  }
}
"""


def test_parameters_that_were_joined_before_they_were_bound(tmp_path: Path) -> None:
    arrays = {"a": np.ones((4, 4), np.float32), "b": np.ones((2, 4), np.float16)}
    write_safetensors(tmp_path / "model.safetensors", arrays)
    module = huggingface.bind(irc.parse(JOINED), tmp_path)
    assert refs(module)["w"] == 'concat(@ckpt["a"], @ckpt["b"].cast(f32); 0)'
    write_safetensors(tmp_path / "model.safetensors", arrays | {"b": np.ones((3, 4), np.float32)})
    with pytest.raises(irc.Error, match=r"b is f32\[3, 4\], but the model takes f32\[2, 4\]"):
        huggingface.bind(irc.parse(JOINED), tmp_path)


def test_many_of_a_kind_are_counted(tmp_path: Path) -> None:
    extra = {f"extra.{i}": np.zeros(1, np.float32) for i in range(30)}
    assert "... and 10 more" in complaint(folder(tmp_path, **extra))


def test_what_is_left_out_on_purpose(tmp_path: Path) -> None:
    extra = {
        "vision.a": np.zeros(1, np.float32),
        "model.rotary_emb.inv_freq": np.zeros(2, np.float32),
    }
    path = folder(tmp_path, **extra)
    assert "vision.a" in complaint(path) and "inv_freq" not in complaint(path)
    huggingface.bind(net(), path, ignore=["vision.*"])


def test_other_names(tmp_path: Path) -> None:
    path = folder(tmp_path, first=None, second=np.ones(4, np.float32))
    module = huggingface.bind(net(), path, other_names={"first": ["zero", "second"]})
    assert refs(module)["first"] == '@ckpt["second"]'


@pytest.mark.parametrize("missing", [None, "lm_head.weight", "model.embed_tokens.weight"])
def test_tied_embeddings_are_found_under_either_name(tmp_path: Path, missing: str | None) -> None:
    path = write_checkpoint(tmp_path / "m", "mha_tied_odd")
    module = huggingface.load(path)
    assert "lm_head.weight" not in module.weights
    shape = (101, 48)
    every = {key: np.zeros(w.type.shape, np.float32) for key, w in module.weights.items()}  # type: ignore[arg-type]
    every["lm_head.weight"] = np.ones(shape, np.float32)
    every.pop(missing or "", None)
    write_safetensors(path / "model.safetensors", every)
    key = (
        "lm_head.weight" if missing == "model.embed_tokens.weight" else "model.embed_tokens.weight"
    )
    assert refs(huggingface.load(path))["model.embed_tokens.weight"] == f'@ckpt["{key}"]'


def test_untied_models_need_their_head(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", "mha")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    module = huggingface.load(path)
    every = {key: np.zeros(w.type.shape, np.float32) for key, w in module.weights.items()}  # type: ignore[arg-type]
    write_safetensors(path / "model.safetensors", every)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(irc.Error, match=r"which are not there:\n +lm_head.weight"):
        huggingface.load(path)


def test_load_takes_dtype_and_ranges(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", "mqa_odd")
    module = huggingface.load(path, "bf16", {"B": (1, 2, 3)})
    assert module.dims == {"B": (1, 2, 3), "S": (1, 128, 256), "T": (1, 1, 256), "C": (1, 256, 256)}
    assert refs(module)["model.norm.weight"] == '@ckpt["model.norm.weight"].cast(bf16)'
    assert module.name == "llama" and str(module.main.returned[0].type) == "f32[B, T, 89]"
    with pytest.raises(irc.Error, match="f32, f16 or bf16, not in i8"):
        huggingface.load(path, "i8")


def test_pickles_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    text = complaint(tmp_path)
    assert (
        "only as pytorch_model.bin, a pickle, which runs code" in text and "save_pretrained" in text
    )


def test_folders_without_weights(tmp_path: Path) -> None:
    assert "has no weights: no model.safetensors" in complaint(tmp_path)
    assert "there is no checkpoint folder" in complaint(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../secret.safetensors", "'../secret.safetensors', which lies outside its folder"),
        ("/etc/secret.safetensors", "which lies outside its folder"),
        ("a/../../b.safetensors", "which lies outside its folder"),
        ("..\\\\secret.safetensors", "which lies outside its folder"),
        ("C:secret.safetensors", "which lies outside its folder"),
        ("pytorch_model.bin", "which is no safetensors file"),
        ("gone/lost.safetensors", "'gone/lost.safetensors', which is not there"),
        (7, "7 is no name of a file"),
    ],
)
def test_an_index_stays_in_its_folder(tmp_path: Path, name: Any, message: str) -> None:
    index = {"weight_map": {"first": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path.parent / "secret.safetensors").write_bytes(b"")
    assert message in complaint(tmp_path)


def test_an_index_that_lies(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    index = path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    files = sorted(set(where.values()))
    swapped = {k: files[1] if v == files[0] else files[0] for k, v in where.items()}
    index.write_text(json.dumps({"weight_map": swapped}))
    assert "says that 'first' is in model-00002-of-00002.safetensors, but it is not" in complaint(
        path
    )
    index.write_text("{")
    assert "cannot read" in complaint(path)
    index.write_text("[]")
    assert "has no weight_map" in complaint(path)


def test_a_truncated_file(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    assert "model.safetensors" in complaint(tmp_path) and "truncated" in complaint(tmp_path)


def test_random_norms_keep_their_input() -> None:
    norm = irc.trace(LayerNorm(4), SPEC)
    assert refs(random_weights(norm, 2)) == {
        "weight": 'random("weight", 2, 1.0)',
        "bias": 'random("bias", 2, 0.02)',
    }


def test_random_weights_come_only_on_request() -> None:
    module = net()
    with pytest.raises(
        irc.Error, match="weight @first has no data: give --checkpoint DIR, or --random-weights"
    ):
        irc.evaluate(module, {"x": np.ones((1, 4), np.float32)})
    random_weights(module, 7)
    assert refs(module)["head.weight"] == 'random("head.weight", 7, 0.5)'
    assert refs(module)["head.bias"] == 'random("head.bias", 7, 0.02)'
    one = irc.evaluate(module, {"x": np.ones((1, 4), np.float32)})["result0"]
    two = irc.evaluate(random_weights(net(), 7), {"x": np.ones((1, 4), np.float32)})["result0"]
    other = irc.evaluate(random_weights(net(), 8), {"x": np.ones((1, 4), np.float32)})["result0"]
    assert np.array_equal(one, two) and not np.array_equal(one, other)
