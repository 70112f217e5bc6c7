"""`irc compile` of an artifact: what it was made from has to be what it was."""

from pathlib import Path

import pytest

from tests.cli.runner import refused, works
from tests.tiny_checkpoint import write_checkpoint

MODEL = "model.safetensors"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """An artifact, its checkpoint beside it."""
    write_checkpoint(tmp_path / "checkpoint")
    works("compile", tmp_path / "checkpoint", "-o", tmp_path / "made")
    return tmp_path / "made"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("inside", ["", "module.irc", "rank0.onnx"])
def test_weights_that_were_changed(made: Path, tmp_path: Path, inside: str) -> None:
    trust = ["--trust"] if inside.endswith(".onnx") else []
    again = ("compile", made / inside, "-o", tmp_path / "again", *trust)
    works(*again)
    weights = tmp_path / "checkpoint" / MODEL
    flip(weights)
    says = f"the weight file {weights} differs from that of the compilation"
    assert says in refused("generate", made, "--prompt", "a")
    (tmp_path / "again").rename(tmp_path / "first")
    err = refused(*again)
    assert says in err
    assert f"{made} is the source here: put the file back as it was" in err
    assert not (tmp_path / "again").exists()
    flip(weights)
    works(*again)


def test_a_forecast_reads_no_weights(made: Path, tmp_path: Path) -> None:
    flip(tmp_path / "checkpoint" / MODEL)
    works("forecast", made)


def test_another_checkpoint_of_the_same_size(made: Path, tmp_path: Path) -> None:
    again = ("compile", made, "-o", tmp_path / "again", "--checkpoint")
    other = write_checkpoint(tmp_path / "other", seed=8)
    assert (other / MODEL).stat().st_size == (tmp_path / "checkpoint" / MODEL).stat().st_size
    err = refused(*again, other)
    assert f"the weight file {other / MODEL} differs from that of the compilation" in err
    assert "give the checkpoint that the model was compiled with" in err
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    works(*again, tmp_path / "moved")


@pytest.mark.parametrize("where", ["checkpoint", "moved"])
def test_a_file_of_the_artifact_that_was_changed(made: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "checkpoint").rename(tmp_path / where)
    flip(made / "rank0.onnx")
    words = ["--checkpoint", tmp_path / where] if where == "moved" else []
    err = refused("compile", made, "-o", tmp_path / "again", *words)
    assert f"{made / 'rank0.onnx'} was changed after it was compiled" in err


@pytest.mark.parametrize("whole", [True, False])
def test_a_text_that_was_edited(made: Path, tmp_path: Path, whole: bool) -> None:
    text = (made / "module.irc").read_text()
    (made / "module.irc").write_text(text.replace("module @", "module @edited_", 1))
    works("compile", made if whole else made / "module.irc", "-o", tmp_path / "again")
    assert "module @edited_" in (tmp_path / "again" / "module.irc").read_text()
