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
from typing import Any

import pytest

from irc.backends.tensorrt.builder import build as building
from irc.backends.tensorrt.builder.build import build
from irc.backends.tensorrt.builder.request import BuildRequest, Built, Profile
from irc.errors import Error
from tests.layout import ROOT
from tests.tensorrt.graphs import HALF, asked, at, external, gemm, node, profile, relu, saved

pytestmark = pytest.mark.needs_rtx


def refusal(request: BuildRequest) -> str:
    """The Error of a build, which leaves no new file in the folder."""
    before = sorted(path.name for path in request.engine.parent.iterdir())
    with pytest.raises(Error) as raised:
        build(request)
    assert sorted(path.name for path in request.engine.parent.iterdir()) == before
    return str(raised.value)


QKV = " ".join(f"{name}:f32[1,2,4,32]" for name in "qkv")
ATTENTION = [
    at("l.0/mul", 50, node("Mul", "q q", "s")),
    at("l.0/attention", 51, node("TRT_Attention", "s k v", "o", "trt")),
]
SECOND = at("l.1/attention", 52, node("TRT_Attention", "o k v", "p"))
# ONNX Attention with lengths, which TensorRT's parser ignores.
DROPPED = at("l.0/attention", 31, node("Attention", "q k v - - - kl", "o"))
HALVES = " ".join(f"{name}:f16[1,2,1,64]" for name in "qkv") + " kl:i64[1]"


@pytest.mark.parametrize(
    ("parts", "messages"),
    [
        (
            (at("layers.1/unique", 7, node("Unique", "x")), HALF[0], "y:f16[256]"),
            ["model.py:7 in layers.1: TensorRT-RTX 1.", "cannot build unique (Unique layers.1/uni"],
        ),
        (
            (ATTENTION, QKV, "o:f32[1,2,4,32]"),
            ["model.py:51 in l.0: ", "build attention (TRT_", "not supported by a dedicated kern"],
        ),
        (
            ([*ATTENTION, SECOND], QKV, "p:f32[1,2,4,32]"),
            [
                "it may be about model.py:51 in l.0: attention (TRT_",
                ", model.py:52 in l.1: attenti",
            ],
        ),
        (
            (DROPPED, HALVES, "o:f16[1,2,1,64]"),
            [
                "model.py:31 in l.0: ",
                "attention (Attention l.0/",
                "the library ignores the input kl,",
            ],
        ),
        (
            (node("Relu", "x"), f"{HALF[0]} z:f16[1]", HALF[1]),
            ["cannot build m.engine (parsing): the library ignores the input z, so the engine"],
        ),
    ],
)
def test_what_the_library_refuses(parts: Any, messages: list[str], tmp_path: Path) -> None:
    """An error of the parser and of the builder, of several nodes, dropped inputs."""
    text = refusal(asked(saved(tmp_path, *parts)))
    assert all(message in text for message in messages), text


def test_requests_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gemm(tmp_path)
    text = refusal(asked(path, [profile("p", path, B=(1, 2, 4))], workspace=1))
    assert "workspace" in text and text.endswith("; raise --workspace, or leave it out")
    assert "no optimization profile" in refusal(asked(path))
    other = Profile("p", {"x": ((1, 32), (1, 32), (1, 32))})
    assert "Dimension mismatch for tensor x and profile 0" in refusal(asked(path, [other]))
    assert "m.engine" in refusal(asked(path, [Profile("p", {})]))
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    assert "is not an ONNX model" in refusal(asked(tmp_path / "bad.onnx"))
    assert "cannot read " in refusal(asked(tmp_path / "none.onnx"))
    model = external(tmp_path / "a", "w.bin")
    assert "w.bin is missing; restore it" in refusal(asked(model))
    assert "none.py" in refusal(asked(relu(tmp_path), plugins=(str(tmp_path / "none.py"),)))
    monkeypatch.setattr(building, "device_count", lambda: 0)
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
    nodes = [node("Relu", "x", "a"), at("m/own", 41, node("Own", "a", **own))]
    nodes[0].name = "Own.y"  # a part of the other name
    return asked(saved(folder, nodes, *HALF), plugins=(str(file),))


@pytest.mark.skipif(not Path("/proc/self/personality").exists(), reason="reads /proc")
def test_a_user_s_plugin_is_in_the_engine(tmp_path: Path) -> None:
    """Built at fixed addresses. The parser would end the process here if it did not find its
    library by its bare name."""
    flags = tmp_path / "personality"
    copy = f"open({str(flags)!r}, 'w').write(open('/proc/self/personality').read())"
    report = build(with_plugin(tmp_path, configure=copy)).report
    assert [layer.kind for layer in report.layers_of("own")] == ["custom_layer"]
    assert int(flags.read_text(), 16) & 0x0040000
    assert not int(Path("/proc/self/personality").read_text(), 16) & 0x0040000


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ({"configure": "os.abort()"}, "crashed (Aborted"),
        ({"configure": "os._exit(3)"}, "crashed (exit status 3"),
        ({"configure": "os.kill(os.getpid(), signal.SIGKILL)"}, "was killed, most likely because"),
        (
            {"shapes": "raise Error('own: x is too small')"},
            "cannot build own (Own m/own/Own.y): m/own/Own.y: own: x is too small",
        ),
    ],
)
def test_plugins_that_fail(code: dict[str, str], message: str, tmp_path: Path) -> None:
    assert message in (text := refusal(with_plugin(tmp_path, **code)))
    assert "m.engine" in text or text.startswith("model.py:41 in m: ")


def test_a_full_disk(tmp_path: Path) -> None:
    request = with_plugin(tmp_path)
    with (tmp_path / "own.py").open("a") as file:
        file.write("import resource; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n")
        file.write("resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n")
    text = refusal(request)
    assert "cannot build " in text and text.endswith("m.engine: [Errno 27] File too large")


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
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


BUILDER = """
from pathlib import Path
from irc.backends.tensorrt.builder.build import build
from tests.tensorrt.graphs import asked
folder = Path({folder!r})
build(asked(folder / "m.onnx", plugins=(str(folder / "own.py"),)))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_parent_that_ends_leaves_no_process_and_no_file(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = slow(tmp_path).model.parent
    command = [sys.executable, "-c", BUILDER.format(folder=str(folder))]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True
    ) as parent:
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
        builds: list[Built] = [
            *pool.map(lambda asked: build(asked, progress), (request, request, other))
        ]
    assert sorted(built.cached for built in builds) == [False, True, True]
    assert (tmp_path / "o.engine").read_bytes() == (tmp_path / "m.engine").read_bytes()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"m.onnx", "m.engine", "o.engine", "kept"}
    assert {path.suffix for path in (tmp_path / "kept").iterdir()} <= {".engine", ".json", ".lock"}


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = relu(tmp_path)
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "engines"
    text = refusal(asked(path, caching=True, cache=cache))
    assert "cannot be written" in text and "set IRC_CACHE or --cache to another folder" in text
    monkeypatch.setenv("IRC_CACHE", str(cache))
    built = build(asked(path, caching=True))
    assert built.engine.exists() and not built.cached
    (warning,) = built.warnings
    assert "is not kept for later compilations" in warning and str(cache) in warning
