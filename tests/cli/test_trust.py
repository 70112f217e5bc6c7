"""Who is trusted (decision 0019): what files of others name, link to and hold is not obeyed."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from irc.artifact.manifest import write_manifest
from irc.backends.cuda.execute.compile import Compiler
from irc.backends.tensorrt.builder.cache import open_cache
from irc.errors import Error
from irc.files import sharing_problem
from irc.frontends.onnx import import_onnx
from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.tiny_checkpoint import write_checkpoint

SECRET = bytes(range(64)) * 64
TEXT = """module @m {
  file @f = "FILE"
  weight @w : u8[4096] = REF
  func @forward(%x: u8[4096]) -> (y: u8[8192]) {
    %y = concat %x, @w {dim=0} : u8[8192]
    return %y
  }
}
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user in another folder than that of any source."""
    path = tmp_path / "private" / "id_rsa"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


def text_of(folder: Path, file: Path | str, ref: str = "bytes(@f, 0, u8[4096])") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "m.irc").write_text(TEXT.replace("FILE", str(file)).replace("REF", ref))
    return folder / "m.irc"


def holds_secret(folder: Path) -> bool:
    return any(SECRET[:512] in path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["text", "artifact", "link"])
def test_bytes_that_a_text_names(kind: str, secret: Path, tmp_path: Path) -> None:
    source = text_of(tmp_path / "theirs", secret)
    if kind == "link":
        text_of(tmp_path / "theirs", "up/id_rsa")
        (tmp_path / "theirs" / "up").symlink_to(secret.parent)
    if kind == "artifact":
        works("compile", source, "-o", tmp_path / "artifact")
        source = tmp_path / "artifact"
    works("compile", source, "-o", tmp_path / "reference")
    assert not holds_secret(tmp_path / "reference")
    works("run", tmp_path / "reference", "--random", "0", "--outputs", tmp_path / "y.npz")
    err = refused("compile", source, "-o", tmp_path / "out", "--bundle")
    assert "@w" in err and "which is not in its folder" in err and "--trust" in err
    assert not (tmp_path / "out").exists()
    works("compile", source, "-o", tmp_path / "out", "--bundle", "--trust")
    assert holds_secret(tmp_path / "out")
    works("compile", source, "-o", tmp_path / "g", "--bundle", "--checkpoint", secret.parent)


def test_bytes_from_which_weights_are_computed(secret: Path, tmp_path: Path) -> None:
    cut = text_of(tmp_path / "theirs", secret, "bytes(@f, 0, u8[64, 64]).transpose(1, 0)[0:64, :]")
    cut.write_text(cut.read_text().replace("u8[4096]", "u8[64, 64]").replace("8192", "128, 64"))
    cut.write_text(cut.read_text().replace("(@f, 0, u8[4096])", "(@f, 0, u8[64, 64])"))
    assert "--trust" in refused("compile", cut, "-o", tmp_path / "out")
    works("compile", cut, "-o", tmp_path / "out", "--trust")
    folder = write_checkpoint(tmp_path / "checkpoint")
    works("compile", folder, "-o", tmp_path / "c", "--pipeline", "inline, dce")
    works("compile", tmp_path / "c", "-o", tmp_path / "d")
    for more in (("--quantize", "w8a16"), ("--mesh", "tp=2")):  # shards of o_proj have gaps
        words = ("compile", tmp_path / "c", "-o", tmp_path / "d", *more)
        assert "which is not in its folder" in refused(*words)
        works(*words, "--checkpoint", folder)


def linear_of(folder: Path, file: Path) -> Path:
    """A text whose weight of a linear is 1024 numbers of a file."""
    folder.mkdir()
    (folder / "m.irc").write_text(
        f"""module @m dims(B=1:8:64) {{
  file @f = "{file}"
  weight @w : f32[32, 32] = bytes(@f, 0, f32[32, 32])
  func @f(%x: f32[B, 32]) -> (y: f32[B, 32]) {{
    %y = linear %x, @w : f32[B, 32]
    return %y
  }}
}}
"""
    )
    return folder / "m.irc"


def test_codes_that_a_calibration_keeps(secret: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=fresh(1).standard_normal((64, 32)))
    words = ("compile", linear_of(tmp_path / "theirs", secret), "-o", tmp_path / "out")
    words += ("--calibration", tmp_path / "data.npz", "--quantize", "w4a16_gptq", "--group", "32")
    assert "a copy of @w from" in refused(*words)
    assert not (tmp_path / "out.calibration" / "gptq").exists()
    works(*words, "--trust")
    assert (tmp_path / "out.calibration" / "gptq").exists()


def test_raw_bytes_inside_an_engine(secret: Path, tmp_path: Path) -> None:
    words = ("compile", linear_of(tmp_path / "theirs", secret), "-o", tmp_path / "out")
    words += ("--backend", "tensorrt-rtx", "--no-build")
    assert "a copy of @w from" in refused(*words)
    works(*words, "--trust")


def with_data(folder: Path, location: str) -> Path:
    """A model whose weight is external data."""
    folder.mkdir(exist_ok=True)
    weight = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[4096])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": "4096"}.items():
        weight.external_data.add(key=key, value=value)
    ports = [
        helper.make_tensor_value_info(name, TensorProto.UINT8, [size])
        for name, size in (("x", 4096), ("y", 8192))
    ]
    node = helper.make_node("Concat", ["x", "w"], ["y"], axis=0)
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [weight])
    path = folder / "rank0.onnx"
    opset = [helper.make_opsetid("", 24)]
    path.write_bytes(helper.make_model(graph, opset_imports=opset).SerializeToString())
    return path


def write_config(folder: Path, program: dict[str, Any]) -> None:
    """A config.json with a right checksum, as anybody can write it."""
    facts = {"irc": "1", "backend": "onnx", "mesh": "", "pipeline": "", "dtype": "f32"}
    write_manifest(folder, {**facts, "dims": {}, "program": program}, {})


def test_a_manifest_beside_an_onnx_file(secret: Path, tmp_path: Path) -> None:
    path = with_data(tmp_path / "theirs", str(secret).lstrip("/"))
    write_config(path.parent, {"base": "/"})
    for more in ((), ("--bundle",)):
        err = refused("compile", path, "-o", tmp_path / "out", *more)
        assert "--trust" in err and "weights are below /" in err
    with pytest.raises(Error, match="give --trust"):
        import_onnx(path)
    works("compile", path, "-o", tmp_path / "out", "--bundle", "--trust")
    entry = {"under": "x", "file": str(secret), "offset": 0, "dtype": "u8", "shape": [4096]}
    (path.parent / "b.json").write_text(json.dumps({"w": entry}))
    write_config(path.parent, {"ranks": [{"model": "rank0.onnx", "bindings": "b.json"}]})
    with pytest.raises(Error, match="outside the model's folder"):
        import_onnx(path)


@pytest.mark.parametrize("location", ["link.bin", "up/id_rsa"])
def test_links_below_the_folder_of_an_onnx_file(
    location: str, secret: Path, tmp_path: Path
) -> None:
    path = with_data(tmp_path / "theirs", location)
    (path.parent / "link.bin").symlink_to(secret)
    (path.parent / "up").symlink_to(secret.parent)
    err = refused("compile", path, "-o", tmp_path / "out")
    assert "outside the model's folder, which ONNX forbids" in err
    hub = with_data(tmp_path / "snapshots", "data.bin").parent
    (tmp_path / "blobs").mkdir()
    secret.rename(tmp_path / "blobs" / "0123")
    (hub / "data.bin").symlink_to("../blobs/0123")
    works("compile", hub / "rank0.onnx", "-o", tmp_path / "out", "--bundle")


def test_links_of_a_tokenizer(secret: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    (folder / "special_tokens_map.json").symlink_to(secret)
    (folder / "tokenizer.json").rename(folder / "real.json")
    (folder / "tokenizer.json").symlink_to("real.json")
    out = works("compile", folder, "-o", tmp_path / "out").out
    assert f"special_tokens_map.json was not copied: it is a link to {secret}" in out
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (folder / "real.json").read_text()
    assert not holds_secret(tmp_path / "out")
    works("compile", folder, "-o", tmp_path / "out", "--trust")
    assert holds_secret(tmp_path / "out")


def test_caches_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irc.backends.cuda.execute.compile.nvrtc_version", lambda: (13, 0))
    place, file = tmp_path / "kernels", tmp_path / "kernels" / "a.cubin"
    assert not sharing_problem(place)
    place.mkdir()
    file.write_text("{}")
    tmp_path.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Compiler(90, place)
    file.chmod(0o666)
    assert "other users can write" in sharing_problem(file)
    place.chmod(0o700)  # through which nobody reaches the file
    assert not sharing_problem(file)
    place.chmod(0o777)
    with pytest.warns(UserWarning, match="other users can write .*kernels.* IRC_CACHE"):
        Compiler(90, place)
    with pytest.raises(Error, match="other users can write"):
        open_cache(place)
    monkeypatch.setenv("IRC_CACHE", str(place))
    with pytest.raises(Error, match="other users can write"):
        open_cache(None)
    place.chmod(0o755)
    assert open_cache(None).folder == place
    if not os.geteuid():  # whose files are nobody's else
        os.chown(place, 4711, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "belongs to another user" in sharing_problem(place)


def test_messages_are_for_people_not_for_terminals(tmp_path: Path) -> None:
    path = tmp_path / "e.irc"
    bad = "\x1b]0;pwned\x07neg \u202e%x : f32[4]\r"
    path.write_text(f"module @m {{\n  func @f(%x: f32[4]) -> (y: f32[4]) {{\n    %0 = {bad}\n")
    err = refused("show", path)
    assert r"\x1b]0;pwned\x07neg \u202e%x" in err
    assert not {*err} & {*"\x1b\x07\u202e\r"}
    folder = write_checkpoint(tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"odd\x9b2J": "\x1b[31m\u2066"}))
    err = refused("compile", folder, "-o", tmp_path / "out")
    assert "odd" in err and not {*err} & {*"\x1b\x9b\u2066"}
    assert str(Error("a\x1bb\n\tc")) == "a\\x1bb\n\tc"
