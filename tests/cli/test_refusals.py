"""Commands that are refused: what is typed, the exit status, and the sentence, a row each."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from irc.backends.cuda import runtime
from tests.cli.conftest import MODULE, SCRIPT
from tests.cli.runner import irc

TEXTS = {
    "tiny.py": SCRIPT,
    "valid.irc": MODULE,
    "broken.irc": "module @m {",
    "two.irc": "module @m mesh(tp=2) { func @f(%x: f32[2]) -> (f32[2]) { return %x } }",
    "local.irc": """module @m local mesh(tp=2) {
  func @forward(%x: f32[6]{varies tp}) -> (f32[6]) {
    %b = all_reduce %x {axis="tp", group_size=2} : f32[6]
    return %b
  }
}""",
}
DIGITS = "9" * 5000
NO_SCHEME = "has no effect without --quantize SCHEME"
IN_LOCAL = "the module is in the local view already, so"
IN_TEXT = "--pipeline names the passes, so"
# `{out}` is a folder that must not appear, `{ck}` a checkpoint, `{dir}` its artifact.
COMPILE: list[tuple[str, str]] = [
    ("none", "there is no none; a source is script.py[:factory], a checkpoint"),
    (".", "no checkpoint folder: it has no config.json"),
    ("tiny.py:broken", "tiny.py:20: ValueError: no such luck"),
    ("tiny.py:misshapen", "tiny.py:24: add: the shapes [2, 3] and [2, 4] do not"),
    ("tiny.py:other --dtype bf16", "--dtype bf16 has no effect"),
    ("tiny.py", "2 of 2 weights have no values (head.weight, head.bias): give --ch"),
    ("tiny.py --checkpoint none", "there is no checkpoint folder none"),
    ("tiny.py --checkpoint x --random-weights 1", "not both"),
    ("broken.irc", "broken.irc:1:12: error: "),
    ("broken.irc --dtype f16", "a module's text states its dtypes"),
    ("broken.irc --set a=1", "a module's text has no settings"),
    ("two.irc --random-weights 1", "there are no weights, so --random-weights"),
    ("two.irc --mesh tp=3", "the module is for the mesh (tp=2), not for (tp=3)"),
    ("{ck} --checkpoint {ck}", "is a checkpoint itself"),
    ("{ck} --dims Q=1", "has no dimension 'Q'"),
    ("{ck} --dims B=3:2:1", "the range B=3:2:1 must rise"),
    ("{ck} --pipeline dcee", "no pass called 'dcee'; did you mean 'dce'?"),
    ("{ck} --set layers=2", "a checkpoint folder has no setting 'layers'"),
    ("{ck} --mesh tp=2 --plan none.txt", "cannot read the plan"),
    ("{ck} --mesh tp", "cannot read the mesh axis 'tp'; write it as name=size"),
    ("{ck} --backend onyx", "no backend called 'onyx'; did you mean 'onnx'?"),
    ("{ck} --load none.py", "there is no file"),
    (
        "{ck} --no-build",
        "has no option build: --no-build is for --backend tensorrt or tensorrt-rtx",
    ),
    ("{ck} --backend cuda --layout genai", "has no option layout: --layout is for --backend onnx"),
    ("{ck} --group 64", f"--group {NO_SCHEME}"),
    ("{ck} --exclude x", f"--exclude {NO_SCHEME}"),
    ("{ck} --calibration x", f"--calibration {NO_SCHEME}"),
    ("{ck} --quantize w3", "no quantization scheme 'w3'; known are w8a16, w4a16"),
    ("{ck} --kv-cache int8", "a cache in int8 needs statistics"),
    ("{ck} --quantize mxfp4", "blocks of 32, which mxfp4 requires, do not divide 48"),
    ("{ck} --quantize int8_sq", "w8a8_sq_per_channel needs statistics"),
    ("{ck} --quantize none.json", "cannot read the table of schemes none.json"),
    ("{ck} --quantize auto", 'scheme "auto" and a budget such as "4.5 bits" belong together'),
    (
        "{ck} --quantize fp8 --pipeline cse",
        f"{IN_TEXT} --quantize has no effect; write quantize{{sch",
    ),
    (
        "{ck} --sequence --pipeline cse",
        f"{IN_TEXT} --sequence has no effect; write shard{{sequence=true",
    ),
    (
        "{ck} --plan x --pipeline cse",
        f"{IN_TEXT} --plan has no effect; write shard{{plan=...}} there",
    ),
    ("{ck} --embedding CA --pipeline cse", "write rewrite-embeddings{scheme=...} there"),
    ("{ck} --outside zero --pipeline cse", "write rewrite-embeddings{policy=...} there"),
    ("{ck} --next-tokens --pipeline cse", "--next-tokens has no effect; write next-tokens there"),
    ("{ck} --sequence", "one rank has all tokens; --sequence is for several ranks"),
    ("{ck} --plan megatron", "one rank holds all weights; --plan is for several ranks"),
    ("{ck} --embedding CA", "one rank holds all weights; --embedding is for several ranks"),
    ("{ck} --outside row:x", "--outside is 'row:x', but it must be zero, clamp, error, or row:N"),
    ("local.irc --sequence", f"{IN_LOCAL} --sequence has no effect"),
    ("local.irc --plan megatron", f"{IN_LOCAL} --plan has no effect"),
    ("local.irc --embedding CA", f"{IN_LOCAL} --embedding has no effect"),
    ("local.irc --outside clamp", f"{IN_LOCAL} --outside has no effect"),
    ("local.irc --next-tokens", f"{IN_LOCAL} --next-tokens has no effect"),
    ("local.irc --quantize w8a16", f"{IN_LOCAL} --quantize has no effect; leave it out"),
]
OTHERS: list[tuple[int, str, str]] = [
    (1, "forecast {ck} --link nvlnk", "no link 'nvlnk'; did you mean 'nvlink'?"),
    (1, "forecast {ck} --link foo", "has no link 'foo'; it has nvlink, pcie, ethernet"),
    (
        1,
        "forecast {ck} --tokens 97",
        "97 tokens do not fit: the caches hold C=96; give --dims C=97",
    ),
    (1, "forecast {ck} --topology absent.json", "cannot read the topology absent.json"),
    (1, "forecast {ck} --backend onxx", "no backend called 'onxx'"),
    (1, "forecast .", "has no config.json"),
    (2, "forecast {ck} --tokens 0", "0 is less than 1"),
    (1, "run {dir} --random 0 --no-self-test", "--no-self-test is for artifacts of tensorrt or"),
    (1, "run {dir} --random 0 --plugin my.py", "is given with --load"),
    (1, "run {dir} --random 0 --backend reference --threads 2", "--threads is for artifacts of"),
    (1, "run {dir} --random 0 --ranks 2", "was compiled for 1; give --ranks 1, or compile"),
    (1, "run {dir} --random 0 --backend onnxx", "no backend called 'onnxx'; did you mean 'onnx'?"),
    (1, "run {dir}/none --random 0", "does not exist; write one with: irc compile"),
    (1, "run . --random 0", "has no config.json"),
    (1, "generate {dir} --raw-ids --prompt a", "the prompt is numbers such as 1 15043, not 'a'"),
    (1, "generate {dir} --raw-ids '--prompt=-1 2'", "not '-1'"),
    (1, f"generate {{dir}} --raw-ids --prompt {DIGITS}", "numbers such as 1 15043"),
    (1, "generate {dir} --raw-ids --prompt \u0661", "numbers such as 1 15043"),
    (2, f"show {{dir}} --plan --dims B={DIGITS}", "is not name=min:typical:max"),
    (2, "show {dir} --plan --dims B=1:2", "is not name=min:typical:max"),
    (1, "show {dir} --plan --dims X=3", "the model has no dimension 'X'"),
    (1, "show {dir} --plan --dims S=99999", "at one size of S from 1 to 96, not"),
    (1, "show {dir} --plan --dims B=1:2:3", "one size of B from 1 to 8, not 1:2"),
    (
        1,
        "show valid.irc --set a=1",
        "valid.irc is not a script, so --set has no effect; leave it out",
    ),
    (1, "opt valid.irc --dtype f32", "so --dtype has no effect; leave it out"),
    (1, "opt valid.irc --checkpoint x", "so --checkpoint has no effect; leave it out"),
    (1, "opt valid.irc --passes folds", "no pass called 'folds'; did you mean 'fold'?"),
    (
        1,
        "opt valid.irc --passes expand{{opps=1}}",
        "expand has no option 'opps'; did you mean 'ops'?",
    ),
    (1, "opt valid.irc --passes 'cse dce'", "expected ','"),
    (2, "bench frobnicate", "there is no artifact 'frobnicate'\n"),
    (2, "bench colectives", "there is no artifact 'colectives'; did you mean 'collectives'?"),
    (2, "bench collectives --runs 3", "--runs is not for collectives"),
    (2, "bench collectives --low-memory", "--low-memory is not for collectives"),
    (2, "bench {dir} --kinds all_reduce", "--kinds is not for an artifact"),
    (2, "bench collectives --kinds allreduce", "did you mean 'all_reduce'"),
    (2, "bench collectives --sizes 12", "12 is less than 1024"),
    (2, "bench collectives --ranks 1", "--ranks is 1; expected 2 or more"),
    (1, "bench collectives --on gpu", "expected at least 2 GPUs"),
    (1, "bench collectives --link nvlnk", "no link 'nvlnk'"),
    (1, "bench collectives --topology absent.json", "cannot read the topology"),
    (2, "cache clean", "did you mean 'clear'"),
]
ROWS = [(1, f"compile {words} -o {{out}}", message) for words, message in COMPILE] + OTHERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of TEXTS, and an archive of inputs."""
    path = tmp_path_factory.mktemp("refusals")
    for name, text in TEXTS.items():
        (path / name).write_text(text)
    np.savez(path / "in.npz", input_ids=[[1, 2, 3]])
    return path


@pytest.mark.parametrize(
    ("status", "command", "message"), ROWS, ids=[command[:60] for _, command, _ in ROWS]
)
def test_a_refusal(
    status: int,
    command: str,
    message: str,
    folder: Path,
    checkpoint: Path,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runtime, "device_count", lambda: 0)
    out = tmp_path / "out"
    answer = irc(*shlex.split(command.format(ck=checkpoint, dir=artifact, out=out)))
    assert (answer.status, answer.out) == (status, ""), answer
    assert message in answer.err and len(answer.err) < 5000
    assert not out.exists()
