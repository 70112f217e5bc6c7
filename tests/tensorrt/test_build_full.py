"""Builds for full TensorRT with a fake library: the calls that it gets, not the engines."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from irc.backends.tensorrt.builder import build as building
from irc.backends.tensorrt.builder.build import build
from irc.backends.tensorrt.builder.request import BuildRequest
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from tests.tensorrt.graphs import gemm, profile

pytestmark = pytest.mark.skipif("tensorrt" in sys.modules, reason="the real one is loaded")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A request on a machine with (a fake) TensorRT and a GPU."""
    modules = tmp_path / "modules"
    modules.mkdir()
    shutil.copy(Path(__file__).with_name("fake_tensorrt.py"), modules / "tensorrt.py")
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setattr(building, "device_count", lambda: 1)
    monkeypatch.setattr(building, "_gpu", lambda: "NVIDIA H200 13000")
    path = gemm(tmp_path)
    one = profile("one", path, B=(1, 2, 4))
    options = EngineOptions(cache=tmp_path / "kept")
    target = Target("tensorrt", (11, 4), (90,))
    yield BuildRequest(path, tmp_path / "m.engine", target, (one,), options)
    sys.modules.pop("tensorrt", None)


def with_options(request: BuildRequest, **options: Any) -> BuildRequest:
    """The request with other options."""
    return replace(request, options=replace(request.options, **options))


def test_calls_of_the_library(asked: BuildRequest) -> None:
    built = build(with_options(asked, workspace=1 << 30, weight_streaming=True, refit=True))
    engine = json.loads(built.engine.read_bytes()[64:])
    assert engine["calls"] == [
        ["create_network", 2],
        ["limit", "WORKSPACE", 1 << 30],
        ["flag", "WEIGHT_STREAMING"],
        ["flag", "REFIT"],
        ["profile", {"x": [[1, 64], [2, 64], [4, 64]]}],
    ]
    assert engine["modules"] == [] and engine["detail"] == "DETAILED"
    assert (built.report.library, built.report.activations) == ("TensorRT 11.4.0.106", (12,))


def test_another_gpu_is_another_engine(
    asked: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not build(asked).cached and build(asked).cached
    monkeypatch.setattr(building, "_gpu", lambda: "NVIDIA B200 13000")
    assert not build(asked).cached


def test_without_a_gpu_nothing_is_built(
    asked: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "device_count", lambda: 0)
    with pytest.raises(Error) as raised:
        build(asked)
    assert "TensorRT builds engines only for the GPU of this machine" in str(raised.value)
    assert "compile on the machine with the GPU, or build for tensorrt-rtx" in str(raised.value)


def test_refit_on_the_release_that_drops_a_bias(asked: BuildRequest) -> None:
    module = Path(sys.path[0]) / "tensorrt.py"
    module.write_text(module.read_text().replace("11.4.0.106", "11.3.0.99"))
    with pytest.raises(Error, match=r"11\.3\.0\.99 may drop the bias of a product"):
        build(with_options(asked, refit=True))
    assert build(asked).engine.exists()
