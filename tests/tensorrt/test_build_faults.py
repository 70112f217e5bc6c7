"""Builds that fail: each error is a sentence about the graph, and no file is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from irc.backends.tensorrt.builder import build as building
from irc.backends.tensorrt.builder.build import build
from irc.backends.tensorrt.builder.request import BuildRequest, Built, Profile
from irc.errors import Error
from tests.tensorrt.graphs import HALF, asked, at, external, gemm, node, profile, relu, saved

pytestmark = pytest.mark.needs_rtx


def refusal(request: BuildRequest) -> str:
    """The Error of a build, which leaves no new file in the folder."""
    before = sorted(path.name for path in request.engine.parent.iterdir())
    with pytest.raises(Error) as raised:
        build(request)
    assert sorted(path.name for path in request.engine.parent.iterdir()) == before
    return str(raised.value)


def test_an_operation_unknown_to_the_parser_is_named_with_its_line(tmp_path: Path) -> None:
    made = at("layers.1/unique", 7, node("Unique", "x"))
    text = refusal(asked(saved(tmp_path, made, HALF[0], "y:f16[256]")))
    assert text.startswith("model.py:7 in layers.1: TensorRT-RTX 1.")
    assert "cannot build unique (Unique layers.1/unique/Unique.y)" in text


def test_an_operation_that_the_builder_refuses_is_named(tmp_path: Path) -> None:
    nodes = [
        at("l.0/mul", 50, node("Mul", "q q", "s")),
        at("l.0/attention", 51, node("TRT_Attention", "s k v", "o", "trt")),
    ]
    inputs = " ".join(f"{name}:f32[1,2,4,32]" for name in "qkv")
    text = refusal(asked(saved(tmp_path, nodes, inputs, "o:f32[1,2,4,32]")))
    assert text.startswith("model.py:51 in l.0: ")
    assert "cannot build attention (TRT_Attention" in text
    assert "not supported by a dedicated kernel" in text
    nodes.append(at("l.1/attention", 52, node("TRT_Attention", "o k v", "p")))
    text = refusal(asked(saved(tmp_path, nodes, inputs, "p:f32[1,2,4,32]")))
    assert "it may be about model.py:51 in l.0: attention (TRT_Attention" in text
    assert ", model.py:52 in l.1: attention (" in text


def test_too_little_workspace_names_the_option(tmp_path: Path) -> None:
    path = gemm(tmp_path)
    text = refusal(asked(path, [profile("p", path, B=(1, 2, 4))], workspace=1))
    assert "workspace" in text and text.endswith("; raise --workspace, or leave it out")


def test_an_input_that_the_parser_drops_is_an_error(tmp_path: Path) -> None:
    # ONNX Attention with lengths, which TensorRT's parser ignores.
    made = at("l.0/attention", 31, node("Attention", "q k v - - - kl", "o"))
    inputs = " ".join(f"{name}:f16[1,2,1,64]" for name in "qkv") + " kl:i64[1]"
    text = refusal(asked(saved(tmp_path, made, inputs, "o:f16[1,2,1,64]")))
    assert "ignores inputs of m.onnx" in text
    assert "kl, which is input 6 of model.py:31 in l.0: attention (Attention l.0/" in text
    path = saved(tmp_path, node("Relu", "x"), f"{HALF[0]} z:f16[1]", HALF[1])
    assert refusal(asked(path)).endswith("  z, which no node reads")


def test_profiles_that_do_not_fit(tmp_path: Path) -> None:
    path = gemm(tmp_path)
    assert "no optimization profile" in refusal(asked(path))
    other = Profile("p", {"x": ((1, 32), (1, 32), (1, 32))})
    assert "Dimension mismatch for tensor x and profile 0" in refusal(asked(path, [other]))
    assert "m.engine" in refusal(asked(path, [Profile("p", {})]))


def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    assert "is not an ONNX model" in refusal(asked(tmp_path / "bad.onnx"))
    assert "cannot read " in refusal(asked(tmp_path / "none.onnx"))


def test_refit_and_strip_need_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "has_gpu", lambda: False)
    path = relu(tmp_path)
    assert "needs a GPU to build an engine with --refit" in refusal(asked(path, refit=True))
    assert "needs a GPU to build an engine with --strip" in refusal(asked(path, strip=True))


PLUGIN = """
import os, signal, time
import tensorrt_rtx as trt
from irc.backends.tensorrt.plugins import PluginSpec, Tensor, register
from irc.backends.tensorrt.plugins.adapter import plugin_class
from irc.errors import Error

def shapes(fields, x):
    {shapes}
    return (x,)

def configure(self, inputs, outputs):
    {configure}

register(PluginSpec("Own", "1", (Tensor("x", "f16"),), (Tensor("y", "f16"),), shapes,
                    lambda *given: None, "Nothing.", namespace="own"))
plugin_class(trt).configure_plugin = configure
"""


def with_plugin(folder: Path, configure: str = "pass", shapes: str = "pass") -> BuildRequest:
    """A model of a relu and a plugin, whose Python does something in two of its methods."""
    file = folder / "own.py"
    file.write_text(PLUGIN.replace("{configure}", configure).replace("{shapes}", shapes))
    own = {"plugin_version": "1", "plugin_namespace": "own"}
    nodes = [at("m/relu", 40, node("Relu", "x", "a")), at("m/own", 41, node("Own", "a", **own))]
    return asked(saved(folder, nodes, *HALF), plugins=(str(file),))


def test_a_user_s_plugin_is_in_the_engine(tmp_path: Path) -> None:
    # The parser would end the process here if it did not find its library by its bare name.
    report = build(with_plugin(tmp_path)).report
    assert [layer.kind for layer in report.layers_of("own")] == ["custom_layer"]


@pytest.mark.skipif(not Path("/proc/self/personality").exists(), reason="reads /proc")
def test_addresses_are_not_randomized(tmp_path: Path) -> None:
    found = tmp_path / "personality"
    copy = f"open({str(found)!r}, 'w').write(open('/proc/self/personality').read())"
    build(with_plugin(tmp_path, configure=copy))
    assert int(found.read_text(), 16) & 0x0040000
    assert not int(Path("/proc/self/personality").read_text(), 16) & 0x0040000


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("os.abort()", "crashed (SIGABRT"),
        ("os._exit(3)", "crashed (exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed, most likely because memory ran out"),
    ],
)
def test_a_building_process_that_ends(command: str, message: str, tmp_path: Path) -> None:
    assert message in (text := refusal(with_plugin(tmp_path, configure=command)))
    assert "m.engine" in text


def test_an_exception_of_a_plugin_names_its_node(tmp_path: Path) -> None:
    text = refusal(with_plugin(tmp_path, shapes="raise Error('own: x is too small')"))
    assert text == "model.py:41 in m: own (Own m/own/Own.y) failed: own: x is too small"
    text = refusal(asked(tmp_path / "m.onnx", plugins=(str(tmp_path / "none.py"),)))
    assert "none.py" in text


def slow(folder: Path) -> BuildRequest:
    """A build that waits in a plugin until it is ended."""
    (folder / "b").mkdir()
    wait = f"open({str(folder / 'there')!r}, 'w').close(); time.sleep(3600)"
    return with_plugin(folder / "b", configure=wait)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


BUILDER = """
from pathlib import Path
from irc.backends.tensorrt.builder.build import build
from irc.backends.tensorrt.builder.request import BuildRequest
from irc.backends.tensorrt.options import EngineOptions
from irc.pipeline.options import options_of
from irc.backends.tensorrt.target import Target
folder = Path({folder!r})
options = options_of(EngineOptions, {{"plugins": str(folder / "own.py"), "caching": False}})
build(BuildRequest(folder / "m.onnx", folder / "m.engine",
                   Target.parse("tensorrt-rtx-1.7/sm_80"), options=options))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_parent_that_ends_leaves_no_process_and_no_file(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = slow(tmp_path).model.parent
    command = [sys.executable, "-c", BUILDER.format(folder=str(folder))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as parent:
        wait_for((tmp_path / "there").exists)
        (builder,) = children(parent.pid)
        assert any(path.suffix == ".part" for path in folder.iterdir())
        os.kill(parent.pid, number)
        _, error = parent.communicate(timeout=120)
        wait_for(lambda: not running(builder))
    assert (b"KeyboardInterrupt" in error) == (number == signal.SIGINT)
    assert {path.name for path in folder.iterdir()} == {"m.onnx", "own.py"}


def test_equal_builds_at_the_same_time_build_once(tmp_path: Path) -> None:
    path = relu(tmp_path)
    request = asked(path, caching=True, cache=tmp_path / "kept")
    other = replace(request, engine=tmp_path / "o.engine")
    stages: list[str] = []

    def progress(stage: str, fraction: float) -> None:
        stages.append(stage)
        if stage.startswith("building"):
            wait_for(lambda: any(each.startswith("waiting for another") for each in stages))

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(build, each, progress) for each in (request, request, other)]
        found: list[Built] = [each.result() for each in waiting]
    assert sorted(each.cached for each in found) == [False, True, True]
    assert (tmp_path / "o.engine").read_bytes() == (tmp_path / "m.engine").read_bytes()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"m.onnx", "m.engine", "o.engine", "kept"}
    assert {path.suffix for path in (tmp_path / "kept").iterdir()} <= {".engine", ".json", ".lock"}


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = relu(tmp_path)
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "engines"
    text = refusal(asked(path, caching=True, cache=cache))
    assert "cannot be written" in text and "name another folder" in text
    monkeypatch.setenv("IRC_CACHE", str(cache))
    built = build(asked(path, caching=True))
    assert built.engine.exists() and not built.cached
    (warning,) = built.warnings
    assert "engines are built each time" in warning and str(cache) in warning


def test_missing_weights_are_named(tmp_path: Path) -> None:
    model = external(tmp_path / "a", "w.bin")
    assert "w.bin is missing; restore it" in refusal(asked(model))


def test_a_full_disk(tmp_path: Path) -> None:
    request = with_plugin(tmp_path)
    with (tmp_path / "own.py").open("a") as file:
        file.write("import resource; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n")
        file.write("resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n")
    text = refusal(request)
    assert "cannot write " in text and "m.engine: File too large" in text
