"""What goes wrong in a build: each fault is a sentence about the graph, and leaves nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from irc.backends.tensorrt.builder import build as building
from irc.backends.tensorrt.builder import process
from irc.backends.tensorrt.builder.build import BuildRequest, Built, Profile, build
from irc.backends.tensorrt.builder.failures import Hearing
from irc.backends.tensorrt.builder.model import read
from irc.backends.tensorrt.builder.process import Ended
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from tests.tensorrt.graphs import (
    F32,
    I64,
    asked,
    attention,
    gemm,
    node,
    profile,
    relu,
    save,
    value,
)

pytestmark = pytest.mark.needs_rtx
X, Y = value("x", [4, 64]), value("y", [4, 64])


def refusal(request: BuildRequest) -> str:
    """The Error of a build, after which nothing new lies in the folder."""
    before = sorted(path.name for path in request.engine.parent.iterdir())
    with pytest.raises(Error) as raised:
        build(request)
    assert sorted(path.name for path in request.engine.parent.iterdir()) == before
    return str(raised.value)


def test_an_operation_that_the_parser_does_not_take_is_named_with_its_line(tmp_path: Path) -> None:
    nodes = [node("layers.1/unique", "Unique", ["x"], "y", line=7)]
    text = refusal(asked(save(tmp_path / "m.onnx", nodes, [X], [value("y", [256])])))
    assert text.startswith("model.py:7 in layers.1: TensorRT-RTX 1.")
    assert "cannot build unique (Unique layers.1/unique/Unique.y)" in text


def test_every_node_that_is_wrong_is_listed_at_once(tmp_path: Path) -> None:
    nodes = [
        node("a/unique", "Unique", ["x"], "u", line=5),
        node("a/relu", "Relu", ["x"], "r", line=6),
        node("b/add", "Add", ["r", "z"], "s", line=8),
        node("b/exp", "Exp", ["s"], "t", line=9),
        node("c/nonzero", "NonZero", ["x"], "n", line=10),
        node("c/neg", "Neg", ["t"], "y"),
    ]
    inputs = [X, value("z", [4, 64], F32)]
    outputs = [Y, value("u", ["k"]), value("n", [2, "m"], I64)]
    path = save(tmp_path / "m.onnx", nodes, inputs, outputs, values=[value("s", [4, 64])])
    text = refusal(asked(path))
    first, *lines = text.splitlines()
    assert "cannot build 3 nodes of m.onnx" in first
    found = [line.strip().partition(" (")[0] for line in lines if line.startswith("  model.py")]
    assert found == [
        "model.py:5 in a: unique",
        "model.py:8 in b: add",
        "model.py:10 in c: nonzero",
    ]
    assert "Half and Float" in text  # the library's own reason
    assert "/_src/" not in text and "cudaError" not in text


def test_what_the_builder_refuses_names_the_operation(tmp_path: Path) -> None:
    heads = [1, 2, 4, 32]
    nodes = [
        node("l.0/mul", "Mul", ["q", "q"], "s", line=50),
        node("l.0/attention", "TRT_Attention", ["s", "k", "v"], "o", line=51, domain="trt"),
    ]
    inputs = [value(name, heads, F32) for name in "qkv"]
    text = refusal(asked(save(tmp_path / "m.onnx", nodes, inputs, [value("o", heads, F32)])))
    assert text.startswith("model.py:51 in l.0: ")
    assert "cannot build attention (TRT_Attention" in text
    assert "not supported by a dedicated kernel" in text


def test_too_little_workspace_says_which_option_gives_more(tmp_path: Path) -> None:
    path = gemm(tmp_path / "m.onnx")
    text = refusal(asked(path, [profile("p", path, B=(1, 2, 4))], workspace=1))
    assert "workspace" in text and text.endswith("; raise --workspace, or leave it out")


@pytest.mark.parametrize("limited", [True, False])
def test_memory_that_ran_out_under_a_limit(limited: bool, tmp_path: Path) -> None:
    said = {"text": "Error Code 2: OutOfMemory (Requested size was 111 bytes.)", "node": ""}
    hearing = Hearing(read(relu(tmp_path / "m.onnx")), "TensorRT", "m.engine", print, limited)
    hearing.hear({"event": "failed", "doing": "building", "errors": [said]})
    problem = hearing.problem(Ended(1, ""))
    assert str(problem).endswith("; raise --workspace, or leave it out") == limited


def test_an_input_that_the_parser_drops_is_an_error(tmp_path: Path) -> None:
    # A decoder's own: ONNX Attention with lengths, which TensorRT reads as if none were given.
    heads = [1, 2, 1, 64]
    nodes = [node("l.0/attention", "Attention", ["q", "k", "v", "", "", "", "kl"], "o", line=31)]
    inputs = [value(name, heads) for name in "qkv"] + [value("kl", [1], I64)]
    text = refusal(asked(save(tmp_path / "m.onnx", nodes, inputs, [value("o", heads)])))
    assert text.startswith("model.py:31 in l.0: ")
    assert "drops the input kl" in text and "input 6 of attention" in text


def test_an_input_that_nothing_reads_is_an_error(tmp_path: Path) -> None:
    nodes = [node("m/relu", "Relu", ["x"], "y")]
    path = save(tmp_path / "m.onnx", nodes, [X, value("z", [1])], [Y])
    assert "drops the input z: z is read by no node" in refusal(asked(path))


def test_profiles_that_do_not_fit(tmp_path: Path) -> None:
    path = gemm(tmp_path / "m.onnx")
    assert "says nothing of the input x" in refusal(asked(path, [Profile("p", {})]))
    ranges = ((1, 64), (2, 64), (4, 64))
    wrong = Profile("p", {"x": ranges, "ids": ranges})
    assert "'ids', which is no input of m.onnx; it has x" in refusal(asked(path, [wrong]))
    shrinking = Profile("p", {"x": ((4, 64), (2, 64), (4, 64))})
    assert "must not shrink" in refusal(asked(path, [shrinking]))
    twice = Profile("p", {"x": ranges})
    assert "two profiles have one name" in refusal(asked(path, [twice, twice]))
    assert "no optimization profile" in refusal(asked(path))
    other = Profile("p", {"x": ((1, 32), (1, 32), (1, 32))})
    assert "Dimension mismatch for tensor x and profile 0" in refusal(asked(path, [other]))


def test_requests_that_no_library_could_fulfil(tmp_path: Path) -> None:
    path = relu(tmp_path / "m.onnx")
    assert "workspace of 0 bytes" in refusal(asked(path, workspace=0))
    newer = BuildRequest(path, tmp_path / "e", Target("tensorrt-rtx", (1, 99), (89,)))
    assert "lowered for tensorrt-rtx-1.99/sm_89" in refusal(newer)
    bare = BuildRequest(path, tmp_path / "e", Target("tensorrt-rtx", (1, 7)))
    assert "names no GPU architecture" in refusal(bare)
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    assert "no ONNX file" in refusal(asked(tmp_path / "bad.onnx"))
    assert "cannot read the model" in refusal(asked(tmp_path / "none.onnx"))
    with pytest.raises(Error, match="does not exist; make it"):
        build(BuildRequest(path, tmp_path / "no" / "e", Target("tensorrt-rtx", (1, 7), (89,))))


def test_refit_and_strip_need_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "has_gpu", lambda: False)
    path = relu(tmp_path / "m.onnx")
    assert "needs a GPU to build an engine for refit" in refusal(asked(path, refit=True))
    assert "needs a GPU to build an engine for strip" in refusal(asked(path, strip=True))


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
                    lambda fields, x: x, lambda *given: None, "Nothing.", namespace="own"))
plugin_class(trt).configure_plugin = configure
"""


def with_plugin(folder: Path, configure: str = "pass", shapes: str = "pass") -> BuildRequest:
    """A model of a relu and a plugin, whose Python does something in two of its methods."""
    file = folder / "own.py"
    file.write_text(PLUGIN.replace("{configure}", configure).replace("{shapes}", shapes))
    own = {"plugin_version": "1", "plugin_namespace": "own"}
    nodes = [
        node("m/relu", "Relu", ["x"], "a", line=40),
        node("m/own", "Own", ["a"], "y", line=41, **own),
    ]
    return asked(save(folder / "m.onnx", nodes, [X], [Y]), plugins=(str(file),))


def test_a_plugin_of_the_users_own_is_in_the_engine(tmp_path: Path) -> None:
    # The parser would end the process here if it did not find its library by its bare name.
    report = build(with_plugin(tmp_path)).report
    assert [layer.kind for layer in report.layers_of("own")] == ["custom_layer"]


def test_a_crash_in_the_library_names_the_operation(tmp_path: Path) -> None:
    text = refusal(with_plugin(tmp_path, configure="os.abort()"))
    assert "crashed (SIGABRT) while building the kernels from model.py:40 in m: relu" in text
    assert "to model.py:41 in m: own (Own m/own/Own.y)" in text


def test_a_crash_while_parsing_names_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the link to its library the parser ends the process at the first plugin.
    monkeypatch.setattr(process, "shared_library", lambda traits: None)
    text = refusal(with_plugin(tmp_path))
    assert text.startswith("model.py:41 in m: ") and "while parsing own" in text
    assert "terminate called" in text


def test_what_a_plugin_raises_is_an_error_about_its_node(tmp_path: Path) -> None:
    text = refusal(with_plugin(tmp_path, shapes="raise Error('own: x is too small')"))
    assert text == "model.py:41 in m: own (Own m/own/Own.y) failed: own: x is too small"
    text = refusal(with_plugin(tmp_path, configure="raise ValueError('not so')"))
    assert "a plugin of m.onnx failed: ValueError: not so" in text
    text = refusal(asked(tmp_path / "m.onnx", plugins=(str(tmp_path / "none.py"),)))
    assert "none.py" in text


def test_a_killed_process_is_an_error(tmp_path: Path) -> None:
    text = refusal(with_plugin(tmp_path, configure="os.kill(os.getpid(), signal.SIGKILL)"))
    assert "m.engine was killed while building the kernels from" in text
    assert "memory ran out" in text


def slow(folder: Path) -> BuildRequest:
    """A build that stays in a plugin until it is ended."""
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
from irc.backends.tensorrt.builder.build import BuildRequest, build
from irc.backends.tensorrt.target import Target
folder = Path({folder!r})
build(BuildRequest(folder / "m.onnx", folder / "m.engine",
                   Target.parse("tensorrt-rtx-1.7/sm_80"), plugins=(str(folder / "own.py"),),
                   caching=False))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_whoever_asked_goes_away(tmp_path: Path, sign: signal.Signals) -> None:
    """Ctrl-C, and a parent that is killed: no process and no file stay behind."""
    folder = slow(tmp_path).model.parent
    command = [sys.executable, "-c", BUILDER.format(folder=str(folder))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as parent:
        wait_for((tmp_path / "there").exists)
        (builder,) = children(parent.pid)
        assert any(path.suffix == ".part" for path in folder.iterdir())
        os.kill(parent.pid, sign)
        _, error = parent.communicate(timeout=120)
        wait_for(lambda: not running(builder))
    assert (b"KeyboardInterrupt" in error) == (sign == signal.SIGINT)
    left = {path.name for path in folder.iterdir()} - {"m.onnx", "own.py"}
    assert left <= ({".m.engine.lock"} if sign == signal.SIGKILL else set())


def test_two_builds_at_once_are_one(tmp_path: Path) -> None:
    path = attention(tmp_path / "m.onnx")
    request = asked(
        path,
        [profile("decode", path, B=(1, 2, 4), S=(1, 1, 1))],
        caching=True,
        cache=tmp_path / "kept",
    )
    other = BuildRequest(path, tmp_path / "o.engine", request.target, request.profiles)
    other = BuildRequest(**{**vars(other), "cache": tmp_path / "kept"})
    said: list[str] = []

    def somebody_waits() -> bool:
        return any(stage.startswith("waiting for another process") for stage in said)

    def tell(stage: str, fraction: float) -> None:
        said.append(stage)
        if stage.startswith("building"):
            wait_for(somebody_waits)

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(build, each, tell) for each in (request, request, other)]
        found: list[Built] = [each.result() for each in waiting]
    assert sorted(each.cached for each in found) == [False, True, True]
    assert (tmp_path / "o.engine").read_bytes() == (tmp_path / "m.engine").read_bytes()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"m.onnx", "m.engine", "o.engine", "kept"}
    assert len([*(tmp_path / "kept").iterdir()]) == 2


def test_a_lock_of_a_process_that_died_does_not_hold(tmp_path: Path) -> None:
    path = relu(tmp_path / "m.onnx")
    (tmp_path / ".m.engine.lock").touch()
    assert build(asked(path)).engine.exists()
    assert not (tmp_path / ".m.engine.lock").exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = relu(tmp_path / "m.onnx")
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "engines"
    text = refusal(asked(path, caching=True, cache=cache))
    assert "cannot be written" in text and "name another folder" in text
    monkeypatch.setenv("IRC_CACHE", str(cache))
    built = build(asked(path, caching=True))
    assert built.engine.exists() and not built.cached
    (warning,) = built.warnings
    assert "engines are built anew each time" in warning and str(cache) in warning


def test_a_damaged_engine_in_the_cache_is_built_anew(tmp_path: Path) -> None:
    cache = tmp_path / "kept"
    request = asked(relu(tmp_path / "m.onnx"), caching=True, cache=cache)
    whole = build(request).engine.read_bytes()
    (kept,) = cache.glob("*.engine")
    with kept.open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    again = build(request)
    assert not again.cached and again.engine.read_bytes() == whole
    (entry,) = cache.glob("*.json")
    entry.write_text("{")
    assert not build(request).cached
    assert build(request).cached


def test_weights_that_are_gone(tmp_path: Path) -> None:
    from tests.tensorrt.test_build import external

    model = external(tmp_path / "a", "w.bin")
    assert "w.bin is gone; put it back" in refusal(asked(model))
    (tmp_path / "a" / "w.bin").write_bytes(bytes(100))
    assert "was cut short" in refusal(asked(model))


def test_a_full_disk(tmp_path: Path) -> None:
    request = with_plugin(tmp_path)
    with (tmp_path / "own.py").open("a") as file:
        file.write("import resource\n")
        file.write("signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n")
        file.write("resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n")
    text = refusal(request)
    assert "the disk is full" in text and "m.engine was not written" in text


def test_builds_in_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    requests: list[BuildRequest] = []
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        requests.append(asked(relu(tmp_path / str(i) / "m.onnx")))
    threads = [threading.Thread(target=build, args=(each,)) for each in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.engine.read_bytes() for each in requests}) == 1
