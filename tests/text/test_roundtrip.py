"""Printing and parsing are inverses, on random modules and on the constructs one by one."""

import pytest

import irc.passes
from irc.backends.onnx.backend import OnnxBackend
from irc.errors import TextError
from irc.frontends import huggingface
from irc.frontends.script import load_script
from irc.ir.verify import verify
from irc.pipeline import parse_pipeline, run_pipeline
from irc.text import parse_module, print_module
from irc.text.cursor import Cursor
from irc.text.references import parse_ref
from irc.weights import FileRef, Ref, Slice, UnboundRef
from irc.weights.steps import StepBase
from tests.fresh import fresh
from tests.layout import ROOT
from tests.random_modules import random_module

assert irc.passes  # importing registers them

COUNT = 2000


def test_random_modules_print_parse_and_print_to_the_same_bytes() -> None:
    start = int(fresh(51).integers(10**9))
    lines = 0
    for seed in range(start, start + COUNT):
        module = random_module(seed)
        verify(module)
        for locs in (False, True):
            text = print_module(module, locs=locs)
            again = parse_module(text)
            verify(again)
            assert print_module(again, locs=locs) == text, f"seed {seed}"
            lines += text.count("\n")
    assert lines > 10 * COUNT


def test_every_dtype_mesh_and_step_in_one_text() -> None:
    text = """module @m local mesh(dp=2, tp=3) dims(B=1:2:4) {
  file @ckpt = "a \\"b\\" \\\\ c.safetensors"
  weight @w.0 : i4[8, 4] = @ckpt["w"][0:8, :].transpose(1, 0).shard(0, dp.tp).cast(i4)
  weight @v : u8[2] = concat(@ckpt["a"], random("b", 3, 0.02).cast(u8); 0)[0:2]
  weight @q : u4[4, 8] = quantized(@ckpt["w"].cast(f32), "codes", "uint4", [1, 4])[0:4, :]
  weight @p : f16[4] = multiply(@ckpt["w"], @ckpt["s"][0:4]; 0)
  weight @i : bf16[1, 1] = quantized(@ckpt["w"], "scales", "int8", [0, 0], "mse", bf16).pad(0, 0)
  weight @u : f64[] = unbound("u")
  weight @r : f32[4, 8] = random("k", 7, 0.02, [8, 8])[0:4, :]
  weight @z : f32[1, 9] = zeros([6, 9], f32).pad(0, 1).cyclic(0, 2).shard(0, dp.tp)[0:1, :]
  weight @s : i8[1, 2] = concat(zeros([], i8).unsqueeze(0), zeros([1], i8); 0).unsqueeze(0)
  func @forward(%x: f8e4m3[B, 2*B + 1], %n: bool[]) -> (y: f8e4m3[B, 2*B + 1] aliases %x, bool[]) {
    return %x, %n
  }
}
"""
    assert print_module(parse_module(text)) == text


KINDS = [FileRef, *Ref.registry.values(), Slice, *StepBase.registry.values()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_example_in_the_documentation_of_a_reference_is_its_text(kind: type) -> None:
    example = str(kind.__doc__).split("`")[1]
    text = f'@ckpt["w"]{example}' if issubclass(kind, StepBase) else example
    files: dict[str, str] = dict.fromkeys(("ckpt", "model", "stats", "lora"), "")
    ref = parse_ref(Cursor(text, "<text>"), files)
    assert isinstance(ref.steps[-1] if issubclass(kind, StepBase) else ref, kind)
    assert str(ref) == text


@pytest.mark.parametrize("key", ["a\u2028b", "a\x85b", "tab\t", "größe", "\U0001f600"])
def test_any_string_is_written_on_one_line_in_utf_8(key: str) -> None:
    module = parse_module(
        'module @m { weight @w : f32[4] = unbound("w") func @f() -> () {return} }'
    )
    module.weights["w"].ref = UnboundRef(key)
    text = print_module(module)
    assert text.encode("utf-8") and len(text.splitlines()) == 6
    assert parse_module(text).weights["w"].ref == UnboundRef(key)


@pytest.mark.parametrize("number", [(1 << 63) - 1, -(1 << 63)])
def test_integers_of_64_bits(number: int) -> None:
    """Folding makes them: products of i64 wrap."""
    body = f'%x = full {{value={number}, dtype="i64"}} : i64[]'
    module = parse_module(f"module @m {{ func @f() -> (i64[]) {{ {body} return %x }} }}")
    assert body in str(module)


LLAMA, TOWERS = (str(ROOT / "examples" / name) for name in ("llama.py", "two_tower.py"))
EXAMPLES = {
    "llama": lambda: load_script(LLAMA),
    "two_tower": lambda: load_script(TOWERS),
    "tiny_llama": lambda: huggingface.load(ROOT / "examples/tiny_llama"),
    "fuse-qkv": lambda: load_script(LLAMA, {"layers": "1"}),
}


@pytest.mark.parametrize("locs", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_dump_of_the_examples(name: str, locs: bool) -> None:
    """The example as traced, and after every pass of the default pipeline."""
    module = EXAMPLES[name]()
    assert (" loc(" in print_module(module, locs=locs)) == locs
    pipeline = "fuse-qkv" if name == "fuse-qkv" else OnnxBackend.default_pipeline
    for step in ("", *parse_pipeline(pipeline)):
        run_pipeline(module, str(step))
        text = print_module(module, locs=locs)
        again = parse_module(text)
        verify(again)
        assert print_module(again, locs=locs) == text


def test_comments_and_white_space_are_ignored() -> None:
    text = "module @m {// a {comment}\n\n func @f (%x : f32[ 2,S ]) ->"
    text += "(f32[2, S]){ return %x }\n}// end"
    assert str(parse_module(text)) == (
        "module @m {\n  func @f(%x: f32[2, S]) -> (f32[2, S]) {\n    return %x\n  }\n}\n"
    )


def test_arguments_and_results_have_any_names() -> None:
    text = r"""module @m local mesh(tp=2) {
  func @forward(%"x:0": f32[4] of f32[8@tp], %"k \"0": f32[2], %"0": f32[4] of f32[8@tp]) -> ("y/0": f32[4] of f32[8@tp], k: f32[2] aliases %"k \"0") {
    %x = relu %"x:0" : f32[4] of f32[8@tp]
    %0 = add %x, %"0" : f32[4] of f32[8@tp]
    return %0, %"k \"0"
  }
}
"""  # noqa: E501
    module = parse_module(text)
    verify(module)
    assert [arg.name for arg in module.main.args] == ["x:0", 'k "0', "0"]
    assert module.main.result_names() == ("y/0", "k")
    assert print_module(module) == text


def test_hints_of_values_are_printed_as_words() -> None:
    body = "%a = neg %x : f32[2] %b = neg %a : f32[2] return %b"
    module = parse_module(f"module @m {{ func @f(%x: f32[2]) -> (f32[2]) {{ {body} }} }}")
    for op, name in zip(module.main, ("x:0", "0"), strict=False):  # as passes take from arguments
        op.results[0].name = name
    verify(module)
    text = str(module)
    assert "%x_0 = neg %x" in text and "%_0 = neg %x_0" in text
    assert str(parse_module(text)) == text


def test_name_hints_survive_and_become_unique() -> None:
    text = """module @m {
  func @f(%x: f32[2]) -> (f32[2]) {
    %a = neg %x : f32[2]
    %a.1 = neg %a : f32[2]
    %0 = neg %a.1 : f32[2]
    return %0
  }
}
"""
    module = parse_module(text)
    assert [op.result.name for op in module.main if op.results] == ["a", "a", None]
    assert str(module) == text


@pytest.mark.parametrize("seed", range(5))
def test_text_cut_anywhere_is_an_error_with_a_place(seed: int) -> None:
    number = int(fresh(52 + seed).integers(10**9))
    text = print_module(random_module(number), locs=True).rstrip()
    for cut in range(len(text)):
        with pytest.raises(TextError, match=r"^<text>:\d+:\d+: error: "):
            parse_module(text[:cut])
