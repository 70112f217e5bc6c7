"""`irc doctor`: the installation, another package called irc, checks of an artifact."""

from importlib import metadata
from pathlib import Path

import pytest

from irc.backends.tensorrt.builder import library
from irc.errors import Error
from tests.cli.runner import irc, works


def findings(*words: str | Path) -> dict[str, tuple[bool | None, str]]:
    answer = irc("doctor", *words, "--json")
    found = answer.json
    assert answer.status == (0 if found["ok"] else 1)
    return {each["what"]: (each["ok"], each["detail"]) for each in found["findings"]}


def test_a_valid_installation() -> None:
    found = findings()
    for name in ("python", "irc", "import name", "numpy", "ml_dtypes", "onnx", "onnxruntime"):
        assert found[name][0] is True, found[name]
    assert metadata.version("numpy") in found["numpy"][1]
    text = works("doctor").out
    assert text.startswith("ok  python: 3.")


def test_the_clash_over_the_name_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"irc": ["irc", "irc-compiler", "irc-compiler"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: owners)
    ok, detail = findings()["import name"]
    assert ok is False
    assert "irc also installs a package called irc" in detail
    assert "pip uninstall irc irc-compiler, then pip install . in the checkout of irc" in detail
    answer = irc("doctor")
    assert answer.status == 1
    assert "no  import name: " in answer.out


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name in ("onnxruntime", "torch"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    found = findings()
    assert found["onnxruntime"][0] is False
    assert found["onnxruntime"][1].endswith("pip install onnxruntime")
    assert found["torch"] == (None, "not installed (the reference of the tests)")


def test_the_libraries_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", lambda flavour: flavour == "tensorrt")
    engine = library.Library("tensorrt", None, "11.4.0.106")
    monkeypatch.setattr(library, "find", lambda flavour: engine)
    found = findings()
    assert found["tensorrt"] == (True, "11.4.0.106 (engines of TensorRT)")
    assert found["tensorrt-rtx"][0] is None
    assert found["tensorrt-rtx"][1].endswith("pip install '.[tensorrt-rtx]' in the checkout of irc")

    def old(flavour: str) -> None:
        raise Error("too old")

    monkeypatch.setattr(library, "find", old)
    assert findings()["tensorrt"] == (False, "too old")


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irc.backends.cuda.runtime.driver_version", lambda: None)
    ok, detail = findings()["gpu driver"]
    assert ok is None
    assert detail.startswith("none: programs for GPUs are compiled here, but not run")


def test_a_valid_artifact(artifact: Path) -> None:
    found = findings(artifact)
    assert found["artifact"][1].startswith(f"{artifact}: backend onnx, dtype f32")
    assert found["files"] == (True, "as compiled: 5 in the folder, 1 with weights elsewhere")


def test_a_damaged_artifact(checkpoint: Path, tmp_path: Path) -> None:
    ok, detail = findings(tmp_path)["artifact"]
    assert ok is False
    assert "has no config.json, so it is not an artifact" in detail
    works("compile", checkpoint, "-o", tmp_path / "out")
    (tmp_path / "out" / "report.html").unlink()
    (tmp_path / "out" / "module.irc").write_text("module @m {}")
    answer = irc("doctor", tmp_path / "out")
    assert answer.status == 1
    assert "report.html is missing; compile again" in answer.out
    assert "module.irc has 12 bytes, and the manifest says" in answer.out
