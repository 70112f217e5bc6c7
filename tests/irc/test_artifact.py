"""The artifact folder: written whole or not at all, and checked against its manifest."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from irc.artifact import check, is_artifact, problems, read_manifest, write_manifest
from irc.atomic import whole_folder
from irc.checksums import sampled, sha256
from irc.errors import Error

FACTS = {
    "irc": "0",
    "backend": "onnx",
    "mesh": "",
    "pipeline": "",
    "dtype": "f32",
    "dims": {},
    "program": {},
}


def replaceable(folder: Path) -> bool:
    return is_artifact(folder)


def make(folder: Path, weights: dict[str, Path] | None = None, **files: bytes) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return write_manifest(folder, FACTS, weights or {})


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------ writing a folder


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "out"
    with whole_folder(output, replaceable) as folder:
        (folder / "x").write_text("1")
        assert not output.exists()
        assert folder.parent == output.parent, "a rename works only within one file system"
    assert (output / "x").read_text() == "1"
    assert entries(output.parent) == ["out"]


def test_the_folder_has_ordinary_rights(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out", replaceable):
        pass
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure), whole_folder(tmp_path / "a" / "b" / "out", replaceable) as folder:
        (folder / "x").write_text("1")
        raise failure
    assert entries(tmp_path) == []


def test_a_failure_keeps_parents_that_others_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^$"), whole_folder(tmp_path / "a" / "out", replaceable):
        (tmp_path / "a" / "other").write_text("mine")
        raise ValueError
    assert entries(tmp_path / "a") == ["other"]


def test_an_artifact_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    make(output, old=b"1")
    with whole_folder(output, replaceable) as folder:
        (folder / "new").write_text("2")
        assert entries(output) == ["config.json", "old"]
    assert entries(output) == ["new"]
    assert entries(tmp_path) == ["out"]


def test_a_failure_keeps_the_artifact_that_was_there(tmp_path: Path) -> None:
    output = tmp_path / "out"
    make(output, old=b"1")
    with pytest.raises(ValueError, match=r"^$"), whole_folder(output, replaceable):
        raise ValueError
    assert entries(output) == ["config.json", "old"]
    assert entries(tmp_path) == ["out"]


def test_an_artifact_behind_a_link_is_replaced_there(tmp_path: Path) -> None:
    make(tmp_path / "real", old=b"1")
    (tmp_path / "link").symlink_to("real")
    with whole_folder(tmp_path / "link", replaceable) as folder:
        (folder / "new").write_text("2")
    assert (tmp_path / "link").is_symlink()
    assert entries(tmp_path / "real") == ["new"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with whole_folder(tmp_path / "out", replaceable) as folder:
        (folder / "x").write_text("1")
    assert entries(tmp_path / "out") == ["x"]


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "home" / "config.json").write_text('{"architectures": ["Llama"]}')
    with (
        pytest.raises(Error, match="not empty and no artifact of irc, so it is left alone"),
        whole_folder(tmp_path / "home", replaceable),
    ):
        pytest.fail("the block must not run")
    assert entries(tmp_path / "home") == ["config.json", "thesis.tex"]


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(Error, match="is a file"), whole_folder(tmp_path / "out", replaceable):
        pytest.fail("the block must not run")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(Error, match=r"the disk is full .* nothing was left behind; free some space"),
        whole_folder(tmp_path / "out", replaceable),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert entries(tmp_path) == []


def test_another_failure_to_write_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(
            Error, match=r"cannot write .*out: Not a directory .*nothing was left behind"
        ),
        whole_folder(tmp_path / "file" / "out", replaceable),
    ):
        pytest.fail("the block must not run")


def test_the_old_artifact_comes_back_if_the_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    make(output, old=b"1")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with pytest.raises(Error, match="Input/output error"), whole_folder(output, replaceable):
        monkeypatch.setattr(Path, "rename", refuse)
    assert entries(output) == ["config.json", "old"]
    assert entries(tmp_path) == ["out"]


def test_an_older_artifact_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    make(output, old=b"1")

    def refuse(path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied", "config.json")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    says = r"out is written, but the older one .* \(Permission denied\); delete .*\.old"
    with pytest.raises(Error, match=says), whole_folder(output, replaceable) as folder:
        (folder / "new").write_text("2")
    assert entries(output) == ["new"]


FILL = """
    import sys, time
    from pathlib import Path
    from irc.atomic import whole_folder
    with whole_folder(Path(sys.argv[1]), lambda folder: False) as folder:
        (folder / "half").write_text("x")
        print("writing", flush=True)
        time.sleep(3600)
"""


def test_ctrl_c_in_another_process_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FILL), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            assert len(entries(tmp_path)) == 1
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
        finally:
            process.kill()
    assert entries(tmp_path) == []


# ------------------------------------------------------------------ the manifest


def test_a_sound_artifact_passes(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(os.urandom(1000))
    written = make(tmp_path / "out", {str(weights): weights}, a=b"1", b=b"2")
    manifest = read_manifest(tmp_path / "out")
    assert manifest == written
    assert list(manifest["files"]) == ["a", "b"]
    assert manifest["files"]["a"]["hash"].startswith("sha256:6b86b273ff34fce1")
    assert list(problems(tmp_path / "out", manifest, whole=True)) == []
    check(tmp_path / "out", manifest)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "a is missing; compile again"),
        (grow, "a has 4 bytes, and the manifest says 3"),
        (flip, "a was changed after it was compiled"),
    ],
)
def test_a_harmed_file_is_named(tmp_path: Path, harm: Callable[[Path], None], message: str) -> None:
    manifest = make(tmp_path / "out", a=b"abc", b=b"2")
    harm(tmp_path / "out" / "a")
    with pytest.raises(Error, match=message):
        check(tmp_path / "out", manifest)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "weight file .*model.safetensors is gone; put it back, or compile again"),
        (grow, "had 1000 bytes and has 1001 now; compile again .with --bundle"),
        (flip, "was changed after the model was compiled"),
    ],
)
def test_harmed_weights_are_named(
    tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(os.urandom(1000))
    manifest = make(tmp_path / "out", {str(weights): weights})
    harm(weights)
    with pytest.raises(Error, match=message):
        check(tmp_path / "out", manifest)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"1")
    manifest = make(tmp_path / "out", a=b"1")
    manifest["files"] = {name: manifest["files"]["a"]}
    with pytest.raises(Error, match="leaves"):
        check(tmp_path / "out", manifest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no manifest of irc"),
        ('{"model_type": "llama"}', r"is no manifest of irc; if .* is a checkpoint, compile it"),
        ('{"irc_artifact": 99}', "has the artifact format 99, and this irc reads format 1"),
        ('{"irc_artifact": 1}', "has no 'irc' of the right kind"),
        (json.dumps({"irc_artifact": 1, **FACTS, "files": [], "weights": {}}), "has no 'files'"),
    ],
)
def test_a_bad_manifest_is_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Error, match=message):
        read_manifest(tmp_path)


def test_a_manifest_entry_without_hash_is_a_sentence(tmp_path: Path) -> None:
    manifest = make(tmp_path / "out", a=b"1")
    manifest["files"] = {"a": {"size": 1}}
    with pytest.raises(Error, match="neither size nor hash of 'a'"):
        check(tmp_path / "out", manifest)


def test_what_is_no_artifact_is_said(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"nowhere does not exist; write one with: irc compile"):
        read_manifest(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match="is a file, not an artifact folder"):
        read_manifest(tmp_path / "file")
    with pytest.raises(Error, match=r"has no config.json"):
        read_manifest(tmp_path)


# ------------------------------------------------------------------ hashes


def test_the_whole_hash_reports_its_progress(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(5 << 20))
    seen: list[int] = []
    sha256(path, seen.append)
    assert sum(seen) == 5 << 20
    assert len(seen) > 1


def test_the_sampled_hash_covers_a_small_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(9_000_000))
    before = sampled(path)
    for at in (0, 5_000_001, 8_999_999):
        data = bytearray(9_000_000)
        data[at] = 1
        path.write_bytes(data)
        assert sampled(path) != before, at


@pytest.mark.parametrize(
    ("at", "seen"),
    [(8, True), (300_000, True), (64 * 1024 * 1100 - 1, True), (3_000_000, False)],
)
def test_the_sampled_hash_of_a_large_file(tmp_path: Path, at: int, seen: bool) -> None:
    """It covers the header of a safetensors file and the ends, not every byte between blocks."""
    path, size = tmp_path / "x.safetensors", 64 * 1024 * 1100
    path.write_bytes((400_000).to_bytes(8, "little"))
    os.truncate(path, size)
    before = sampled(path)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\1")
    assert (sampled(path) != before) is seen


def test_the_sampled_hash_of_a_large_file_is_as_documented(tmp_path: Path) -> None:
    import hashlib

    path, size = tmp_path / "x.bin", 70_000_019
    data = os.urandom(size)
    path.write_bytes(data)
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    for i in range(64):
        begin = i * (size - 65536) // 63
        digest.update(data[begin : begin + 65536])
    assert sampled(path) == f"sampled-sha256-v1:{digest.hexdigest()}"


def test_large_files_are_read_whole_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irc.artifact._READ_WHOLE", 6 << 20)
    folder = tmp_path / "out"
    manifest = make(folder, big=bytes(66 << 20))
    with (folder / "big").open("r+b") as file:
        file.seek(70_000)  # between the first two blocks
        file.write(b"\1")
    assert list(problems(folder, manifest)) == []
    assert len(list(problems(folder, manifest, whole=True))) == 1
