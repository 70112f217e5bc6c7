"""Compiled kernels and their cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from irc.backends.cuda.execute import compile as module
from irc.backends.cuda.execute import launch as launch_module
from irc.backends.cuda.execute.compile import Compiler, compile_kernel, default_folder, key_of
from irc.backends.cuda.execute.launch import Kernels
from irc.backends.cuda.plan import Kernel, Launch
from irc.errors import Error
from tests.cuda.fake_api import Images

ONE = Kernel("one", 'extern "C" __global__ void one(f32* x) { store<f32>(x, 0, SCALE); }')


def scaled(value: str) -> Kernel:
    return Kernel(ONE.name, ONE.source, {"SCALE": value})


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, by a compiler that returns its macro."""
    found: list[str] = []

    def compile(kernel: Kernel, architecture: str) -> bytes:
        found.append(f"{kernel.macros['SCALE']} for {architecture}")
        return found[-1].encode()

    monkeypatch.setattr(module, "compile_kernel", compile)
    monkeypatch.setattr(module, "nvrtc_version", lambda: (13, 0))
    return found


def test_each_kernel_is_compiled_once(compiled: list[str], tmp_path: Path) -> None:
    kernels = [scaled("1"), scaled("2"), scaled("1")]
    first, second = Compiler(90, tmp_path), Compiler(90, tmp_path)
    for compiler in (first, second):
        found = compiler.images(kernels)
        assert found[key_of(kernels[1])] == b"2 for sm_90a"
    assert sorted(compiled) == ["1 for sm_90a", "2 for sm_90a"]
    assert (first.compiled, second.compiled) == (2, 0)


def test_another_gpu_or_compiler_compiles_again(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for capability, version in ((90, (13, 0)), (80, (13, 0)), (90, (13, 1)), (90, (13, 0))):
        monkeypatch.setattr(module, "nvrtc_version", lambda found=version: found)
        Compiler(capability, tmp_path).image(scaled("1"))
    assert compiled == ["1 for sm_90a", "1 for sm_80", "1 for sm_90a"]


@pytest.mark.parametrize("damage", ["shorter", "changed", "empty"])
def test_a_damaged_entry_is_compiled_again(
    damage: str, compiled: list[str], tmp_path: Path
) -> None:
    Compiler(90, tmp_path).image(scaled("1"))
    (path,) = tmp_path.glob("*.cubin")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    new = {"shorter": data[1:], "changed": data, "empty": b""}
    path.write_bytes(new[damage])
    for _ in range(2):
        assert Compiler(90, tmp_path).image(scaled("1")) == b"1 for sm_90a"
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_written(compiled: list[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert Compiler(90, file / "folder").image(scaled("1")) == b"1 for sm_90a"
    assert len(compiled) == 1


def test_old_gpus_are_refused(compiled: list[str]) -> None:
    with pytest.raises(Error, match=r"expected a GPU of compute capability 8\.0 .* found 7\.5"):
        Compiler(75)


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRC_CACHE", "/somewhere")
    assert default_folder() == Path("/somewhere/kernels")
    monkeypatch.delenv("IRC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/irc/kernels")


@pytest.mark.usefixtures("nvrtc")
def test_nvrtc() -> None:
    for capability in (80, 90, 120):
        assert Compiler(capability).image(scaled("1")).startswith(b"\x7fELF")


@pytest.mark.usefixtures("nvrtc")
def test_an_error_of_the_compiler_has_its_line() -> None:
    with pytest.raises(Error, match=r"kernel one does not compile for sm_90: one\.cu.*error"):
        compile_kernel(scaled("nothing"), "sm_90")


@pytest.mark.parametrize(
    ("static", "dynamic", "asked"),
    [
        (0, [48 << 10], []),
        (16, [48 << 10], [48 << 10]),
        (40 << 10, [8 << 10, 9 << 10, 9 << 10], [9 << 10]),
        (0, [50 << 10, 49 << 10, 60 << 10], [50 << 10, 60 << 10]),
    ],
)
def test_more_than_48_kb_of_shared_memory_are_asked_for(
    static: int, dynamic: list[int], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Static and dynamic ones together."""
    limits: list[int] = []

    def call(function: str, *arguments: Any) -> int:
        if function == "cuFuncSetAttribute":
            limits.append(arguments[2])
        return static if function == "cuFuncGetAttribute" else 0

    monkeypatch.setattr(launch_module, "call", call)
    images: Any = Images()
    kernels = Kernels(90, images)
    kernels.load([ONE])
    for nbytes in dynamic:
        kernels.bind(Launch("one", (1, 1, 1), 32, (), nbytes), ONE, (), False)
    assert limits == asked
