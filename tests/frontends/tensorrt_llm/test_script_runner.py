"""Build scripts of TensorRT-LLM run from top to bottom, by `irc compile` and in Python."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.cli.main import main
from irc.frontends.script import load_script
from irc.frontends.tensorrt_llm.engines import find_artifact
from irc.frontends.tensorrt_llm.lint import is_build_script
from irc.frontends.tensorrt_llm.script import run_script
from tests.fresh import fresh
from tests.layout import ROOT

# A script of 0.5 to 0.7: y = x W^T, whose rows of W are shared by the ranks.
HEAD = """
import argparse
from collections import OrderedDict
from pathlib import Path
import numpy as np
import tensorrt as trt
import tensorrt_llm
from factors import FACTOR
from tensorrt_llm.builder import Builder
from tensorrt_llm.functional import Tensor
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.network import net_guard

class Scale(tensorrt_llm.Module):
    def __init__(self, mapping):
        super().__init__()
        self.factor = tensorrt_llm.Parameter(
            np.full((4,), FACTOR * (mapping.rank + 1), np.float32), dtype=trt.float32)

    def forward(self, x):
        (x * self.factor.value).mark_output("y", "float32")

def build(rank, args):
    print("building", rank)
    mapping = Mapping(world_size=args.tp_size, rank=rank, tp_size=args.tp_size)
    builder = Builder()
    network = builder.create_network()
    network.trt_network.name = f"{args.name}_rank{rank}.engine"
    config = builder.create_builder_config(name=args.name, precision="float32", timing_cache="x")
    network.plugin_config.set_gemm_plugin("float32")
    model = Scale(mapping)
    with net_guard(network):
        network.set_named_parameters(model.named_parameters())
        ranges = OrderedDict([("B", [[1, 2, 8]]), ("width", [4])])
        model(Tensor(name="x", dtype=trt.float32, shape=[-1, 4], dim_range=ranges))
    tensorrt_llm.graph_rewriting.optimize(network)
    engine = builder.build_engine(network, config)
    cache = config.trt_builder_config.get_timing_cache()
    builder.create_builder_config("float32", timing_cache=cache)
    Path(args.output_dir, f"{args.name}_rank{rank}.engine").write_bytes(bytearray(engine))

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--name", default="scale")
    parser.add_argument("--output_dir", default=".")
    args = parser.parse_args()
"""
LOOPS = {
    "loop": "    for rank in range(args.tp_size):\n        build(rank, args)\n",
    "spawn": "    import torch.multiprocessing as mp\n    mp.set_start_method('spawn')\n"
    "    mp.spawn(build, nprocs=args.tp_size, args=(args,))\n",
    "threads": "    from concurrent.futures import ThreadPoolExecutor\n"
    "    with ThreadPoolExecutor(1) as pool:\n"
    "        list(pool.map(build, range(args.tp_size), [args] * args.tp_size))\n",
}


LOADED = ("factors", "tensorrt_llm", "tensorrt", "__main__")
Compile = Callable[..., str]  # (words of the command, status) -> what it prints


def write(folder: Path, text: str) -> Path:
    """The script, beside a file that it imports."""
    (folder / "factors.py").write_text("FACTOR = 3\n")
    path = folder / "old.py"
    path.write_text(text)
    return path


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path, HEAD + LOOPS["loop"] + "    raise SystemExit(0)\n")


@pytest.fixture
def compile(script: Path, capsys: pytest.CaptureFixture[str]) -> Compile:
    """`irc compile` of the script, for the reference backend."""

    def run(*words: str | Path, status: int = 0) -> str:
        command = ["compile", str(script), "--backend", "reference", *map(str, words)]
        assert main(command) == status
        return "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize("loop", LOOPS)
def test_the_ranks_of_a_script(loop: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if loop == "spawn":
        pytest.importorskip("torch")
    script.write_text(HEAD + LOOPS[loop])
    before, argv = dict(sys.modules), list(sys.argv)
    run = run_script(script, ["--tp_size", "2"])
    assert run.session.release < 8 and sys.argv == argv
    left = {name: module for name, module in sys.modules.items() if before.get(name) != module}
    assert not {name for name in left if name.partition(".")[0] in LOADED}
    out, err = capsys.readouterr()
    assert (out, err.count("building")) == ("", 2)
    (module,) = run.engines.values()
    x = fresh().random((2, 4), np.float32)
    results = irc.evaluate_ranks(module, {"x": x})
    for rank in range(2):
        np.testing.assert_allclose(results[rank]["y"], x * 3 * (rank + 1), rtol=1e-6)


def test_the_command_compiles_the_engine(script: Path, compile: Compile) -> None:
    assert "wrote out for reference" in compile("-o", "out", "--")
    x = fresh().random((2, 4), np.float32)
    engine = Path("scale_rank0.engine")
    for artifact in (irc.load("out"), find_artifact(engine.read_bytes()), find_artifact(engine)):
        np.testing.assert_allclose(artifact.run({"x": x})["y"], x * 3, rtol=1e-6)


def test_processes_of_mpi(script: Path, compile: Compile) -> None:
    size = "tensorrt_llm.mpi_world_size()"
    alone = f"    args.tp_size = {size}\n    build(tensorrt_llm.mpi_rank(), args)\n"
    script.write_text(HEAD + alone)
    (module,) = run_script(script, processes=2).engines.values()
    assert module.mesh.ranks == 2
    script.write_text(HEAD + alone.replace(size, "2"))
    assert "networks of 2 ranks, found those of rank 0;" in compile("--dry-run", status=1)
    compile("--dry-run", "--processes", "2")


def test_several_engines_become_folders(script: Path, compile: Compile) -> None:
    script.write_text(HEAD + "    for args.name in ('one', 'two'):\n        build(0, args)\n")
    compile("-o", "out")
    assert sorted(os.listdir("out")) == ["one", "two"]
    x = np.ones((1, 4), np.float32)
    assert irc.load("out/two").run({"x": x})["y"].tolist() == [[3] * 4]
    assert find_artifact("one_rank0.engine").folder == Path("out/one").absolute()


USE = """
import sys
import numpy as np
from tensorrt_llm.runtime import Session
folder = sys.argv[1]
file = folder + "/scale_rank0.engine"
for buffer in (folder, file, open(file, "rb").read()):
    session = Session.from_serialized_engine(buffer)
    print(session.run({"x": np.ones((1, 4), np.float32)})["y"].tolist())
if len(sys.argv) > 2:
    session.infer_shapes([])
"""


def test_a_script_that_runs_an_engine(compile: Compile, tmp_path: Path) -> None:
    compile("-o", "out")
    use = tmp_path / "use.py"
    use.write_text(USE)

    def run(*more: str) -> tuple[int, str, str]:
        words = [sys.executable, "-m", "irc.frontends.tensorrt_llm", use, tmp_path, *more]
        process = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
        return process.returncode, process.stdout, process.stderr

    assert run() == (0, "[[3.0, 3.0, 3.0, 3.0]]\n" * 3, "")
    status, _, err = run("x")
    assert status == 1 and err.startswith(f"error: {use}:11: y has the size B")
    use.write_text("import sys, tensorrt_llm\nsys.exit(3)\n")
    assert run() == (3, "", "")


SAVES = (
    HEAD[: HEAD.index("def build(")]
    + """
from types import SimpleNamespace
from tensorrt_llm import BuildConfig, build

class Model(Scale):
    def __init__(self, mapping):
        super().__init__(mapping)
        self.config = SimpleNamespace(mapping=mapping, architecture="Scale", to_dict=dict)

    def prepare_inputs(self, max_batch_size):
        ranges = OrderedDict([("B", [[1, 1, max_batch_size]]), ("width", [4])])
        return {"x": Tensor(name="x", dtype="float32", shape=[-1, 4], dim_range=ranges)}

for rank in range(2):
    mapping = Mapping(world_size=2, rank=rank, tp_size=2)
    build(Model(mapping), BuildConfig(max_batch_size=5)).save(Path(__file__).parent / "saved")
"""
)


def test_an_engine_that_the_script_saves(script: Path, compile: Compile) -> None:
    script.write_text(SAVES)
    saved = script.parent / "saved" / "artifact"
    assert "nothing written (dry run)" in compile("--dry-run") and not saved.exists()
    for words in ((), ("--bundle",)):
        assert f"Scale: the script wrote {saved}" in compile(*words)
    manifest = irc.load(saved).manifest
    assert manifest["backend"] == "reference" and manifest["dims"]["B"] == (1, 1, 5)
    compile("-o", "out")
    assert irc.load("out").module.mesh.ranks == 2
    assert find_artifact("saved").folder.absolute() == saved


def test_what_the_command_prints(script: Path, compile: Compile) -> None:
    printed = compile("--dry-run", "--json", "--tensorrt-llm", "0.16")
    report: dict[str, Any] = json.loads(printed[: printed.rindex("}") + 1])
    assert [engine["ranks"] for engine in report["engines"]] == [1]
    assert any("timing_cache has no effect" in note for note in report["notes"])
    assert "--tp_size TP_SIZE" in compile("-o", "x", "--", "--help")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["-o", "x", "--", "--tp_sise", "2"], 1, "the script ended with status 2"),
        (["-o", "x", "--dtype", "f16", "--"], 1, "so --dtype f16 has no effect"),
        (["--"], 2, "does not save the engine scale: give -o DIR"),
        (["-o", "x", "--tensorrt-llm", "C"], 1, "such as 0.7 or 0.16, found 'C'"),
    ],
)
def test_wrong_commands(words: list[str], status: int, message: str, compile: Compile) -> None:
    assert message in compile(*words, status=status)
    assert not Path("x").exists()


@pytest.mark.parametrize("words", ["-- --layers", "--tensorrt-llm 0", "--processes 2"])
def test_arguments_of_a_factory_are_no_words_of_a_script(
    words: str, script: Path, compile: Compile
) -> None:
    script.write_text("def build(): pass\n")
    printed = compile("-o", "x", *words.split(), status=1)
    assert f"{words.rstrip(' 02')} is for a build script" in printed


def test_an_error_of_a_worker_is_one_of_the_script(tmp_path: Path) -> None:
    text = HEAD + LOOPS["threads"].replace("map(build, range", "map(lambda *_: int('x'), range")
    with pytest.raises(irc.Error, match="ValueError: invalid literal"):
        run_script(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from tensorrt_llm.functional import alreduce\n", "did you mean 'allreduce'?"),
        ("import tensorrt_llm\n", "built no engine"),
        ("import tensorrt_llm\n\nx = 1 / 0\n", "old.py:3: ZeroDivisionError"),
        ("import tensorrt_llm\nraise SystemExit('no model')\n", "old.py:2: no model\n"),
    ],
)
def test_errors_of_scripts(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(irc.Error) as caught:
        run_script(write(tmp_path, text))
    assert message in str(caught.value)


def test_other_commands_say_how_a_script_is_compiled(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["forecast", str(script)]) == 1
    assert f"irc compile {script} -o DIR -- ARGUMENTS" in capsys.readouterr().err


def test_which_scripts_build_engines(script: Path, tmp_path: Path) -> None:
    installed = sys.modules.get("tensorrt_llm")
    assert is_build_script(script)
    factory = tmp_path / "model.py"
    factory.write_text(
        "import irc\nfrom tensorrt_llm.mapping import Mapping\n"
        "def build():\n"
        "    from tensorrt_llm.quantization import QuantMode\n"
        "    assert Mapping().world_size == 1 and not QuantMode(0)\n"
        "    return irc.parse('module @m { func @forward(%x: f32[2]) -> (f32[2]) {'\n"
        "                     'return %x } }')\n"
    )
    assert not is_build_script(factory)
    assert not is_build_script(f"{script}:build")
    assert load_script(str(factory)).main.args[0].name == "x"
    assert sys.modules.get("tensorrt_llm") is installed
