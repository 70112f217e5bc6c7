"""`irc build`: every flag of trtllm-build is honoured, without effect, or refused, and says so."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends.tensorrt_llm.trtllm_build import FLAGS, OFF
from tests.fresh import fresh
from tests.frontends.checkpoints.rank_folders import Conversion, write_folder
from tests.frontends.checkpoints.test_rank_folders import LLAMA, tensors_of

from .runner import refused, works


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("ranks") / "llama"
    return write_folder(path, LLAMA, tensors_of(LLAMA), Conversion(tp=2))


def built(folder: Path, out: Path, *flags: str) -> tuple[irc.Artifact, dict[str, list[str]]]:
    """The artifact, and requested and effective values by flag."""
    answer = works("build", "--checkpoint_dir", folder, "--output_dir", out, *flags)
    rows = json.loads((out / "build_flags.json").read_text())
    for row in rows:
        assert row["flag"] in answer.out and row["effective"] in answer.out
    return irc.load(out), {row["flag"]: [row["requested"], row["effective"]] for row in rows}


def test_sizes_become_ranges(folder: Path, tmp_path: Path) -> None:
    sizes = ("--max_batch_size", "6", "--max_beam_width", "2", "--max_seq_len", "48")
    more = ("--max_input_len", "40", "--max_num_tokens", "30", "--opt_num_tokens", "9")
    artifact, rows = built(folder, tmp_path / "out", "--backend", "reference", *sizes, *more)
    dims = {name: tuple(bounds) for name, bounds in artifact.manifest["dims"].items()}
    assert dims == {"B": (1, 2, 12), "S": (1, 9, 30), "T": (1, 1, 30), "C": (1, 48, 48)}
    why = "the largest batch; times max_beam_width the range of B"
    assert rows["--max_batch_size"] == ["6", f"B=1:2:12 ({why})"]
    assert artifact.module.mesh.ranks == 2 and rows["--mesh"] == ["as stored", "tp=2"]


def test_another_mesh_and_no_fused_mlp(folder: Path, tmp_path: Path) -> None:
    flags = ("--mesh", "tp=3", "--use_fused_mlp")
    names = [
        {op.opname for op in built(folder, tmp_path / word, *flags, word)[0].module.ops()}
        for word in ("enable", "disable")
    ]
    assert ["gated_mlp" in found for found in names] == [True, False]
    assert irc.load(tmp_path / "disable").module.mesh.ranks == 3


def test_a_build_config(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "build.json"
    own = {"max_batch_size": 3, "max_seq_len": 32, "plugin_config": {"gemm_plugin": "auto"}}
    path.write_text(json.dumps(own | {"kv_cache_type": "PAGED", "enable_debug_output": False}))
    flags = ("--build_config", str(path), "--max_batch_size", "5", "--backend", "reference")
    artifact, rows = built(folder, tmp_path / "out", *flags)
    assert [artifact.manifest["dims"][name][2] for name in "BC"] == [5, 32]
    assert rows["--gemm_plugin"] == ["auto", "no effect: kernels are chosen by the backend"]
    assert rows["--kv_cache_type"][1].startswith("continuous")


def test_a_dry_run_and_levels(folder: Path, tmp_path: Path) -> None:
    out, dumps = tmp_path / "out", tmp_path / "dumps"
    words = ("build", "--checkpoint_dir", folder, "--output_dir", out, "--backend", "reference")
    answer = works(*words, "--dry_run", "--visualize_network", dumps)
    assert not out.exists() and list(dumps.iterdir())
    assert "nothing written (dry run)" in answer.out and "--explain" not in answer.out
    assert "--explain" in works(*words, "--log_level", "verbose").out
    assert (out / "build_flags.json").is_file()


def test_a_config_alone(folder: Path, tmp_path: Path) -> None:
    words = ("build", "--model_config", folder / "config.json", "--output_dir", tmp_path / "out")
    assert "a model without weights" in refused(*words)
    works(*words, "--random-weights", "3", "--backend", "reference")
    assert "random(" in str(irc.load(tmp_path / "out").module)


def test_weights_that_the_build_quantizes(folder: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    copy = write_folder(tmp_path / "ranks", LLAMA, tensors_of(LLAMA), Conversion(tp=2))
    (copy / "config.json").write_text(
        json.dumps(config | {"quantization": {"quant_algo": "W8A16"}})
    )
    artifact, _ = built(copy, tmp_path / "out", "--backend", "reference", "--mesh", "tp=1")
    kinds = {weight.type.dtype for weight in artifact.module.weights.values()}
    assert "i8" in kinds
    ids = fresh().integers(0, LLAMA["vocab_size"], (1, 5)).astype(np.int32)
    assert artifact.run({"input_ids": ids})["logits"].shape[-1] == LLAMA["vocab_size"]


VALUES = {"INT": "7", "LIST": "a", "enable|disable": "enable"}


@pytest.mark.parametrize("use", ["ignored", "refused"])
def test_every_other_flag(use: str, folder: Path) -> None:
    """Flags without effect are in the table with the reason; refused ones are refused together."""
    flags = [flag for flag in FLAGS.values() if flag.use == use]
    words: list[str] = []
    for flag in flags:
        value = VALUES.get(flag.takes, next((w for w in flag.words if w not in OFF), "x"))
        words += [f"--{flag.name}", *([value] if flag.takes != "-" else [])]
    command = ("build", "--checkpoint_dir", folder, "--dry_run", "--backend", "reference", *words)
    found = works(*command).out if use == "ignored" else refused(*command)
    for flag in flags:
        assert f"--{flag.name}" in found and flag.why in found, flag.name


# status, flags, what build.json holds where there is one, and a part of the message
REFUSED: list[tuple[int, str, Any, str]] = [
    (1, "--kv_cache_type disabled", None, "always have caches"),
    (1, "--max_seq_len 65", None, "more than max_position_embeddings=64"),
    (2, "--max_batchsize 3", None, "did you mean '--max_batch_size'?"),
    (2, "--gemm_plugin float15", None, "did you mean 'float16'?"),
    (1, "", {"max_batch_size": "eight"}, "max_batch_size is 'eight'; expected a whole number"),
    (1, "", {"max_seq_len": -1}, "max_seq_len is -1; expected a whole number"),
    (1, "", {"max_input_len": 0}, "--max_input_len is 0; expected 1 or more"),
    (1, "", {"dry_run": "yes"}, "dry_run is 'yes'; expected true or false"),
    (1, "", {"plugin_config": {"gemm_plugin": "half"}}, "gemm_plugin is 'half'; expected auto"),
    (1, "", {"max_batchsize": 3}, "build.json: BuildConfig has no argument"),
]


@pytest.mark.parametrize(("status", "flags", "config", "message"), REFUSED)
def test_refused(
    status: int, flags: str, config: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "build.json").write_text(json.dumps(config))
    own = [] if config is None else ["--build_config", tmp_path / "build.json"]
    words = ("--checkpoint_dir", folder, "--output_dir", tmp_path / "out", *flags.split(), *own)
    assert message in refused("build", *words, status=status)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["mapping", "max_position_embeddings"])
def test_a_config_that_is_wrong(key: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: "many"}))
    told = refused("build", "--checkpoint_dir", tmp_path, "--dry_run")
    assert f"config.json: {key} is 'many'; expected" in told
    assert "give --checkpoint_dir DIR" in refused("build", status=2)


def test_flags_that_ask_for_nothing_are_not_refused(folder: Path) -> None:
    words = ("--streamingllm", "disable", "--max_draft_len", "0", "--auto_parallel", "1")
    works("build", "--checkpoint_dir", folder, "--dry_run", "--backend", "reference", *words)
