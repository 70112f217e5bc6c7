"""Engine files are judged by their first bytes, without the library and without a GPU."""

import struct
from pathlib import Path

import pytest

from irc.backends.tensorrt.builder import header
from irc.backends.tensorrt.builder.build import BuildRequest, build
from irc.backends.tensorrt.builder.library import find
from irc.backends.tensorrt.target import RTX_ARCHITECTURES, Target
from irc.errors import Error
from tests.tensorrt.graphs import relu


def engine(path: Path, *, size: int = 100, version: bytes = b"\1\7\1\x74", mask: int = 10) -> Path:
    """A file that begins as an engine of TensorRT-RTX does."""
    start = struct.pack("<4s4xI4xQ4s4sI", b"vtrt", 2, size, version, b"vtrt", mask)
    path.write_bytes(start.ljust(100, b"\0"))
    return path


def test_a_header_says_the_version_and_the_capabilities(tmp_path: Path) -> None:
    found = header.check(engine(tmp_path / "e"), "1.7.1.116")
    assert found == header.Header((1, 7, 1, 116), 100, (80, 89))
    assert found is not None
    header.check_gpu(found, tmp_path / "e", 89)
    with pytest.raises(Error, match="built for sm_80, sm_89, and this GPU is sm_120; compile"):
        header.check_gpu(found, tmp_path / "e", 120)


@pytest.mark.needs_rtx
@pytest.mark.parametrize("chips", [(each,) for each in RTX_ARCHITECTURES] + [(80, 86, 89, 120)])
def test_the_header_of_a_real_engine(tmp_path: Path, chips: tuple[int, ...]) -> None:
    target = Target("tensorrt-rtx", (1, 7), chips)
    built = build(BuildRequest(relu(tmp_path / "m.onnx"), tmp_path / "e", target, caching=False))
    found = header.check(built.engine, find("tensorrt-rtx").version)
    assert found is not None
    assert (found.capabilities, found.size) == (chips, built.report.engine_bytes)


def test_engines_that_are_damaged(tmp_path: Path) -> None:
    path = engine(tmp_path / "e")
    whole = path.read_bytes()
    for data, words in (
        (whole[:-1], "it has 99 bytes and says that it has 100"),
        (whole + b"x", "it has 101 bytes"),
        (whole[:30], "it ends within its header"),
        (b"", "begins with other bytes"),
        (b"\x7fELF" + whole[4:], "begins with other bytes"),
        (whole[:28] + b"????" + whole[32:], "its header is not as TensorRT-RTX writes it"),
    ):
        path.write_bytes(data)
        with pytest.raises(Error) as raised:
            header.read(path)
        assert words in str(raised.value) and str(raised.value).endswith("compile again")


def test_an_engine_of_another_version(tmp_path: Path) -> None:
    path = engine(tmp_path / "e", version=b"\1\6\1\x78")
    with pytest.raises(Error) as raised:
        header.check(path, "1.7.1.116")
    assert "was built by TensorRT-RTX 1.6.1.120, and 1.7.1.116 is installed" in str(raised.value)


def test_engines_that_are_not_there_or_of_the_other_library(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"cannot read the engine .*; compile again"):
        header.read(tmp_path / "none")
    rtx = engine(tmp_path / "e")
    with pytest.raises(Error, match="is no engine of TensorRT; compile again"):
        header.read(rtx, "tensorrt")
    other = tmp_path / "o"
    other.write_bytes(b"ptrt".ljust(100, b"\0"))
    assert header.read(other, "tensorrt") is None
    assert header.check(other, "11.4.0.106", "tensorrt") is None
