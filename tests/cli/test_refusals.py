"""Commands that are refused: what is typed, the exit status, and the sentence, a row each."""

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.argument_checks import MOST_THREADS
from irc.artifact.manifest import add_facts
from irc.backends.cuda import runtime
from irc.npz import Member
from tests.cli.conftest import MODULE, SCRIPT
from tests.cli.runner import irc, refused, works
from tests.tensorrt.graphs import model, node
from tests.tiny_checkpoint import CONFIG
from tests.user_code import EXAMPLE, restored_registries

FULL = """module @m {
  func @forward(%x: f32[2]) -> (y: f32[SHAPE]) {
    %y = full {value=1.0, shape=[SHAPE]} : f32[SHAPE]
    return %y
  }
}
"""
WEIGHT = """module @m {
  weight @w : f32[SIZES] = REF
  func @forward(%x: f32[1, N]) -> (y: f32[1, N]) {
    %y = linear %x, @w : f32[1, N]
    return %y
  }
}
"""
HUGE, DIGITS = "268435456", "9" * 5000
RELU = model(node("Relu", "x"), "x:f16[4,8]").SerializeToString()
TEXTS = {
    "tiny.py": SCRIPT,
    "valid.irc": MODULE,
    "broken.irc": "module @m {",
    "undeclared.irc": MODULE.replace("f32[B, 4]) -> ", "f32[Q, 4]) -> "),
    "two.irc": "module @m mesh(tp=2) { func @f(%x: f32[2]) -> (f32[2]) { return %x } }",
    "local.irc": """module @m local mesh(tp=2) {
  func @forward(%x: f32[6]{varies tp}) -> (f32[6]) {
    %b = all_reduce %x {axis="tp", group_size=2} : f32[6]
    return %b
  }
}""",
    "slice.irc": """module @m mesh(tp=2) {
  func @f(%x: f32[4]) -> (f32[4@tp]) {
    %a = shard_slice %x {axis="tp", dim=0} : f32[4@tp] loc("model.py":3)
    return %a
  }
}""",
    "lookup.irc": """module @m mesh(tp=2) {
  weight @t : f32[9@tp, 4] = random("t", 0, 1)
  func @forward(%ids: i32[6]) -> (f32[6, 4]) {
    %a = embedding %ids, @t : f32[6, 4]{sum tp}
    %b = all_reduce %a {axis="tp"} : f32[6, 4]
    return %b
  }
}""",
    "wide.irc": FULL.replace("SHAPE", "1099511627776, 64"),
    "wider.irc": FULL.replace("SHAPE", "1099511627776, 1099511627776"),
    "cyclic.irc": WEIGHT.replace("REF", "zeros([2], f32).cyclic(0, 1000000000000)"),
    "steps.irc": WEIGHT.replace("REF", "zeros([2], f32)" + ".cast(f32)" * 100_000),
    "dims.irc": WEIGHT.replace("REF", "zeros([SIZES], f32)").replace("SIZES", "1, " * 1000 + "1"),
    "disk.irc": WEIGHT.replace("REF", "zeros([SIZES], f32)")
    .replace("SIZES", f"{HUGE}, {HUGE}")
    .replace("N]", f"{HUGE}]"),
    "checkpoint/config.json": '{"model_type": "llama"}',
    "made_up/config.json": '{"model_type": "made_up"}',
    "empty/none.txt": "",
    "plan.txt": "*.nope.weight 0@tp\n",
    "nameless.json": '{"format": 1}',
    "utf16.txt": b"\xff\xfe",
    "utf16.irc": b"module \xff",
    "text.onnx": b"not a model",
    "half.onnx": RELU[: len(RELU) // 2],
    "short.onnx": RELU[:-1],
    "relu.onnx": RELU,
    "text.npz": b"nonsense",
    **{f"m.{kind}": b"GGUF\0\0\3\0" for kind in ("gguf", "safetensors", "engine")},
}
ARRAYS: dict[str, dict[str, Any]] = {
    "in.npz": {"input_ids": [[1, 2, 3]]},
    "other.npz": {"ids": [[1, 2, 3]]},
    "rows.npz": {"input_ids": np.zeros((9, 3))},
    "cube.npz": {"input_ids": np.zeros((1, 3, 2))},
    "cache.npz": {"input_ids": [[1, 2, 3], [4, 5, 6]], "k0": np.zeros((2, 2, 9, 9))},
    "huge.npz": {"input_ids": [[1, 2, 3]], "huge": np.zeros(9)},
}
USAGE = [
    ("compil", "no command called 'compil'; did you mean 'compile'?"),
    ("foretell", "no command called 'foretell'"),
    ("--bogus", "no option called '--bogus'"),
    ("show m.irc --stat", "irc show has no option --stat; did you mean '--stats'?"),
    ("show m.irc --stat=1", "irc show has no option --stat; did you mean '--stats'?"),
    ("compile m.irc --serve", "irc compile has no option --serve\n"),
    ("run m.irc --outptus", "irc run has no option --outptus; did you mean '--outputs'"),
    ("show", "the following arguments are required: FILE|DIR"),
    ("show a b", "one argument too many: 'b'"),
    ("compile x -o y --dtype fp16", "'fp16' is none of f32, f16, bf16"),
    ("compile x -o y --dtype bf32", "did you mean 'f32'?"),
    ("compile x -o y --dims B=1:2", "'B=1:2' is not name=min:typical:max"),
    (f"show {{dir}} --plan --dims B={DIGITS}", "is not name=min:typical:max"),
    ("compile x -o y --dims B=1,B=2", "B is given twice"),
    ("compile x -o y --dims B=1 --dims B=2", "B is given twice"),
    ("compile x -o y --set layers", "'layers' is not key=value"),
    ("show x --set a=1 --set a=2", "--set: a is given twice"),
    ("compile x -o y --output z", "-o/--output: given twice"),
    ("compile x -o y --refit --no-refit", "given in both forms"),
    ("opt x --limit cse=1 --limit cse=2", "--limit: cse is given twice"),
    ("compile x -o y --random-weights -1", "-1 is less than 0"),
    ("compile x", "no artifact folder: give -o DIR, or --dry-run"),
    ("generate x", "expected --prompt TEXT, --prompts FILE or --chat"),
    ("generate x --prompt a --prompts b", "expected --prompt TEXT, --prompts FILE or --chat"),
    ("generate x --prompt a --inputs b", "--inputs needs --encoder"),
    ("generate x --prompt a --top-p 1.5", "top_p is 1.5"),
    ("generate x --prompt a --max-new-tokens 0", "0 is less than 1"),
    ("generate x --prompt a --max-new-tokens x", "'x' is not a whole number"),
    ("run x --random 0 --threads 1024", f"1024 is more than {MOST_THREADS}"),
    ("run x --outputs a", "one of the arguments --inputs --random is required"),
    ("run x --inputs a --random 1", "not allowed with argument --inputs"),
    ("run x --random 1 --rtol 1", "--rtol and --atol are for --compare B"),
    ("run x --random 1 --compare b --atol nan", "not a number of at"),
    ("bench frobnicate", "there is no artifact 'frobnicate'\n"),
    ("bench colectives", "there is no artifact 'colectives'; did you mean 'collectives'?"),
    ("bench collectives --runs 3", "--runs is not for collectives"),
    ("bench collectives --per-op", "--per-op is not for collectives"),
    ("bench {dir} --per-op --inputs in.npz --dims S=4", "--dims has no effect with --inputs"),
    ("bench collectives --low-memory", "--low-memory is not for collectives"),
    ("bench {dir} --kinds all_reduce", "--kinds is not for an artifact"),
    ("bench collectives --kinds allreduce", "did you mean 'all_reduce'"),
    ("bench collectives --sizes 12", "12 is less than 1024"),
    ("bench collectives --ranks 1", "--ranks is 1; expected 2 or more"),
    ("calibrate x --data d -o y --bach 1", "irc calibrate has no option --bach"),
    ("cache clean", "did you mean 'clear'"),
]
NO_SCHEME = "has no effect without --quantize SCHEME"
IN_LOCAL = "the module is in the local view already, so"
IN_TEXT = "--pipeline names the passes, so"
SHARDED = "the module is sharded already, so"
# `{out}` is a folder that must not appear, `{ck}` a checkpoint, `{dir}` its artifact.
COMPILE = [
    ("none", "there is no none; a source is script.py[:factory], a checkpoint"),
    (".", "not a checkpoint folder: it has no config.json"),
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
    ("slice.irc --pipeline ''", "the backend onnx cannot run this module"),
    ("slice.irc --pipeline ''", "model.py:3: shard_slice"),
    ("{ck} --checkpoint {ck}", "is a checkpoint itself"),
    ("{ck} --dims Q=1", "has no dimension 'Q'"),
    ("{ck} --dims B=3:2:1", "the range B=3:2:1 must be in increasing order"),
    ("{ck} --pipeline dcee", "no pass called 'dcee'; did you mean 'dce'?"),
    ("{ck} --set layers=2", "a checkpoint folder has no setting 'layers'"),
    ("{ck} --mesh tp=2 --plan none.txt", "cannot read the plan"),
    ("{ck} --mesh tp=2 --plan plan.txt", "plan.txt:1: *.nope.weight 0@tp fits no weight"),
    ("{ck} --mesh tp", "cannot read the mesh axis 'tp'; write it as name=size"),
    ("{ck} --backend onyx", "no backend called 'onyx'; did you mean 'onnx'?"),
    ("{ck} --load none.py", "there is no file"),
    ("{ck} --no-build", "no option build: --no-build is for --backend tensorrt or tensorrt-rtx"),
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
    ("{ck} --quantize fp8 --pipeline cse", f"{IN_TEXT} --quantize has no effect; write quantize{{"),
    ("{ck} --sequence --pipeline cse", "write shard{sequence=true} there"),
    ("{ck} --plan x --pipeline cse", "--plan has no effect; write shard{plan=...} there"),
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
    ("lookup.irc --sequence", f"{SHARDED} --sequence has no effect"),
    ("lookup.irc --plan megatron", f"{SHARDED} --plan has no effect"),
    ("cyclic.irc", "expected 1 to 16384"),
    ("steps.irc", "more than 256 steps"),
    ("dims.irc", "expected at most 64"),
    ("disk.irc", "bytes of weights are to be written"),
    ("disk.irc --bundle", "bytes of weights are to be written"),
    ("{ck} --mesh tp=2 --plan PIPE", "regular file"),
    ("{ck} --quantize PIPE.json", "regular file"),
]
# Commands that are no sources of a compilation, or have other words than -o behind them.
OTHERS = [
    ("compile {ck} -o {ck}", "would be replaced, and with it the weights in"),
    ("compile {ck} --dry-run --quantize fp8 --calibration in.npz", "or -o DIR without --dry-run"),
    ("forecast {ck} --link nvlnk", "no link 'nvlnk'; did you mean 'nvlink'?"),
    ("forecast {ck} --link foo", "has no link 'foo'; it has nvlink, pcie, ethernet"),
    ("forecast {ck} --tokens 97", "97 tokens do not fit: the caches hold C=96; give --dims C=97"),
    ("forecast {ck} --topology absent.json", "cannot read the topology absent.json"),
    ("forecast {ck} --topology nameless.json", "nameless.json: name is missing"),
    ("forecast {ck} --topology PIPE", "regular file"),
    ("forecast {ck} --backend onxx", "no backend called 'onxx'"),
    ("forecast .", "has no config.json"),
    ("forecast valid.irc --tokens 5", "--tokens is for language models"),
    ("run {dir} --random 0 --no-self-test", "--no-self-test is for artifacts of tensorrt or"),
    ("run {dir} --random 0 --plugin my.py", "is given with --load"),
    ("run {dir} --random 0 --backend reference --threads 2", "--threads is for artifacts of"),
    ("run {dir} --random 0 --ranks 2", "was compiled for 1; give --ranks 1, or compile"),
    ("run {dir} --random 0 --backend onnxx", "no backend called 'onnxx'; did you mean 'onnx'?"),
    ("run {dir}/none --random 0", "does not exist; write one with: irc compile"),
    ("run . --random 0", "has no config.json"),
    ("run valid.irc --random 0", "is not compiled; compile it with irc compile"),
    ("run wide.irc --backend reference --random 0", "this takes more memory than there is ("),
    ("run wider.irc --backend reference --random 0", "give smaller sizes"),
    ("run {dir} --inputs none.npz --outputs {out}", "No such file or directory"),
    ("run {dir} --inputs empty --outputs {out}", "cannot read"),
    ("run {dir} --inputs PIPE.npz --outputs {out}", "regular file"),
    ("run {dir} --inputs text.npz", "text.npz is not an .npz archive of plain arrays"),
    ("run {dir} --inputs other.npz", "no input 'ids'"),
    ("run {dir} --inputs rows.npz", "input_ids has B=9, but the model was compiled for B=1"),
    ("run {dir} --inputs cube.npz", "input_ids has the shape [1, 3, 2], but it must be i"),
    ("run {dir} --inputs cache.npz", "k0 has the shape [2, 2, 9, 9], but it"),
    ("run {dir} --inputs huge.npz", "no input 'huge'"),
    ("generate {dir} --raw-ids --prompt a", "the prompt is numbers such as 1 15043, not 'a'"),
    ("generate {dir} --raw-ids '--prompt=-1 2'", "not '-1'"),
    (f"generate {{dir}} --raw-ids --prompt {DIGITS}", "numbers such as 1 15043"),
    ("generate {dir} --raw-ids --prompt \u0661", "numbers such as 1 15043"),
    ("generate {dir} --json --prompt ''", "the prompt has no tokens; expected at least one"),
    (f"generate {{dir}} --json --prompt {'x' * 97}", "97 tokens, but the cache of this"),
    ("quality {dir} --text none.txt", "cannot read"),
    ("quality {dir} --text utf16.txt", "not text in UTF-8"),
    ("quality {dir} --text empty/none.txt", "the text has 0 tokens"),
    ("quality {dir} --text PIPE", "regular file"),
    ("quality {dir} --length 600", "a call takes 96 tokens at most; give --length 96 or less"),
    ("calibrate {ck} --data PIPE.npz -o {out}", "regular file"),
    ("calibrate {ck} --data PIPE.txt -o {out}", "regular file"),
    ("calibrate {ck} --data in.npz -o .", "choose another folder"),
    ("show {dir} --plan --dims X=3", "the model has no dimension 'X'"),
    ("show {dir} --plan --dims S=99999", "one size of S from 1 to 96, found"),
    ("show {dir} --plan --dims B=1:2:3", "one size of B from 1 to 8, found 1:2"),
    ("show valid.irc --set a=1", "is not a script, so --set has no effect; leave it out"),
    ("show none.irc", "cannot read none.irc: No such file or directory\n"),
    ("show checkpoint", "compile it first: irc compile checkpoint -o DIR"),
    ("show utf16.irc", "utf16.irc is not text in UTF-8 (byte 7 is wrong)"),
    ("show undeclared.irc", "Q"),
    ("show PIPE", "regular file"),
    ("diff PIPE PIPE", "regular file"),
    ("opt valid.irc --dtype f32", "so --dtype has no effect; leave it out"),
    ("opt valid.irc --checkpoint x", "so --checkpoint has no effect; leave it out"),
    ("opt valid.irc --passes folds", "no pass called 'folds'; did you mean 'fold'?"),
    ("opt valid.irc --passes expand{{opps=1}}", "has no option 'opps'; did you mean 'ops'?\n"),
    ("opt valid.irc --passes 'cse dce'", "expected ','"),
    ("opt tiny.py --set with=5", "did you mean 'width'?"),
    ("passes folds", "did you mean 'fold'?"),
    ("ops softmaxx", "did you mean 'softmax'?"),
    ("ops --target tensorr", "no target 'tensorr'; did you mean"),
    ("ops --target tensorrt-rtx-1.7/sm_90", "no engine is for sm_90"),
    ("ops --target tensorrt-rtx-1.7/sm_89 mull", "did you mean 'mul'?"),
    ("bench {dir} --per-op --dims X=3", "the model has no dimension 'X'"),
    ("bench {dir} --dims S=99999", "one size of S from 1 to 96, found"),
    ("bench {dir} --trace none/t.json --runs 1", "No such file or directory"),
    ("bench collectives --on gpu", "expected at least 2 GPUs"),
    ("bench collectives --link nvlnk", "no link 'nvlnk'"),
    ("bench collectives --topology absent.json", "cannot read the topology"),
    ("plugins IrcColective", "did you mean 'IrcCollective'? Otherwise name the file"),
    ("plugins zzz", "no plugin called 'zzz'; name the file that registers it"),
    (f"plugins --plugin {EXAMPLE.with_name('two_tower.py')}", "registers no plugin"),
    ("lint none.onnx", "cannot read"),
    ("lint none.py", "there is no script"),
    ("lint empty", "empty holds no .onnx file"),
    ("lint made_up", "'made_up'; irc models lists"),
    ("lint relu.onnx --ignore doubles", "did you mean 'double'?"),
    ("lint", "say which model"),
    ("lint text.onnx", "is not an ONNX model"),
    ("lint half.onnx", "or it is truncated: at byte "),
    ("show half.onnx", "or it is truncated: at byte "),
    ("lint short.onnx", "or it is truncated: at byte "),
    ("show short.onnx", "or it is truncated: at byte "),
    ("lint valid.irc", "valid.irc is not an ONNX model; irc lint reads ONNX models and"),
    ("lint tiny.py", "folders: irc compile tiny.py -o DIR, then irc lint DIR\n"),
    ("lint tiny.py:build", "folders: irc compile tiny.py:build -o DIR, then irc lint DIR\n"),
    *(
        (words, message)
        for kind, message in (
            (
                "gguf",
                "a model of llama.cpp, which irc does not read; compile the checkpoint folder",
            ),
            ("safetensors", "weights without a model; compile the checkpoint folder"),
            ("engine", "an engine; give the artifact folder"),
        )
        for words in (f"compile m.{kind} -o {{out}}", f"lint m.{kind}", f"show m.{kind}")
    ),
]
ROWS = [
    *((2, command, message) for command, message in USAGE),
    *((1, f"compile {words} -o {{out}}", message) for words, message in COMPILE),
    *((1, command, message) for command, message in OTHERS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of TEXTS and ARRAYS, and pipes, which nobody writes."""
    path = tmp_path_factory.mktemp("refusals")
    for name, text in TEXTS.items():
        text = text.replace("SIZES", "2").replace("N]", "2]") if isinstance(text, str) else text
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    for name, arrays in ARRAYS.items():
        np.savez(path / name, **arrays)
    for name in ("PIPE", "PIPE.json", "PIPE.txt", "PIPE.npz"):
        os.mkfifo(path / name)
    return path


@pytest.mark.timeout(60)
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
    """Arrays that do not fit are not read; usage says where help is."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runtime, "device_count", lambda: 0)
    monkeypatch.setattr(Member, "read", lambda *_: pytest.fail("the array was read"))
    out, before = tmp_path / "out", sorted(folder.iterdir())
    with restored_registries():
        answer = irc(*shlex.split(command.format(ck=checkpoint, dir=artifact, out=out)))
    assert message in answer.err
    assert (answer.status, answer.out, len(answer.err) < 5000) == (status, "", True), answer
    assert status == 1 or "--help" in answer.err
    assert not out.exists() and sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        ("show -", b"module \xff", "<stdin> is not text in UTF-8 (byte 7 is wrong)"),
        ("opt", b"", "<stdin>:1:1: error: expected"),
        ("generate {dir} --prompt -", b"\xff", "not text in UTF-8 (byte 0 is wrong)"),
    ],
)
def test_standard_input(words: str, text: bytes, message: str, artifact: Path) -> None:
    assert message in refused(*words.format(dir=artifact).split(), stdin=text)


def test_places_have_a_caret(module: Path) -> None:
    """In the text of a module, and in that of a pipeline."""
    module.write_text(MODULE.replace("= add", "= addd"))
    first, source, caret = refused("show", module).splitlines()
    assert first.startswith(f"{module}:6:12: error: no operation called 'addd'; did you mean 'add'")
    assert "load the file that declares it with --load" in first
    assert source.index("addd ") == caret.index("^")
    module.write_text(MODULE)
    assert refused("opt", module, "--passes", "folds").splitlines()[-1].strip() == "^"


PROGRAMS: list[dict[str, Any]] = [
    *({"base": base} for base in (5, ["/"], "a\0b")),
    *({"axes": axes} for axes in (5, [1], [["tp"]], [["tp", "x"]])),
    *({"ranks": ranks} for ranks in (5, [5], {}, [{"model": 5}])),
    {"ranks": [{"model": "rank0.onnx", "bindings": 5}]},
]


def test_manifests_beside_an_onnx_file(artifact: Path, tmp_path: Path) -> None:
    """Their hash is right, as anyone can compute it."""
    import onnx

    shutil.copytree(artifact, tmp_path, dirs_exist_ok=True)
    manifest = json.loads((artifact / "config.json").read_text())
    for program in PROGRAMS:
        facts = manifest | {"program": manifest["program"] | program}
        (tmp_path / "config.json").write_text(json.dumps(facts))
        add_facts(tmp_path, {})
        assert str(tmp_path / "config.json") in refused("show", tmp_path / "rank0.onnx"), program
    shutil.copy(artifact / "config.json", tmp_path)
    proto = onnx.load(str(artifact / "rank0.onnx"), load_external_data=False)
    onnx.helper.set_model_props(proto, {"irc.rank": DIGITS})
    onnx.save(proto, str(tmp_path / "rank0.onnx"))
    works("show", tmp_path / "rank0.onnx")


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 2**63}, "expected a number of at most 2147483647"),
        ({"rms_norm_eps": 10**400}, "expected a number of at most 1e308"),
        ({"rope_theta": [1] * 100_000}, "expected a number"),
        ({"num_hidden_layers": "x" * 100_000}, "expected a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: expected a number of at"),
        ({**MIXTRAL, "num_local_experts": 10**9}, "1000000000 experts in"),
    ],
)
def test_numbers_of_a_config(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    for words in (("compile", tmp_path, "-o", tmp_path / "out"), ("forecast", tmp_path)):
        told = refused(*words)
        assert message in told and len(told) < 5000


@pytest.mark.parametrize("size", [1, 2**62])
def test_many_dimensions_in_a_safetensors_file(size: int, tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [size] * 100_000, "data_offsets": [0, 4]}
    header = json.dumps({"w": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "w.safetensors").write_bytes(data)
    text = WEIGHT.replace("  weight", '  file @f = "w.safetensors"\n  weight')
    text = text.replace("SIZES", "2, 2").replace("REF", '@f["w"]').replace("N]", "2]")
    (tmp_path / "m.irc").write_text(text)
    told = refused("compile", tmp_path / "m.irc", "-o", tmp_path / "out")
    assert "the tensor 'w' has no valid shape" in told and len(told) < 5000


def test_an_onnx_file_that_only_its_plugin_explains(tmp_path: Path) -> None:
    named = {"plugin_version": "1", "plugin_namespace": "example", "cap": "2.0"}
    path, text = tmp_path / "capped.onnx", tmp_path / "capped.irc"
    path.write_bytes(model(node("SoftCap", "x", **named), "x:f16[4,8]").SerializeToString())
    with restored_registries():
        assert "name the file that registers that with --load" in refused("show", path)
        text.write_text(works("show", path, "--load", EXAMPLE).out)
        assert "soft_cap %x {cap=2.0}" in text.read_text()
    with restored_registries():
        assert "the file that declares it with --load" in refused("show", text)
        assert "soft_cap %x" in works("show", text, "--load", EXAMPLE).out
