"""Errors of the parser: the place, the message, the caret."""

import pytest

from irc.errors import TextError
from irc.text import parse_module

HEAD = "module @m mesh(tp=2) dims(B=1:2:4) {\n"
WEIGHT = '  file @ckpt = "w.safetensors"\n  weight @w : f32[6, 8] = @ckpt["w"]\n'
FUNC = "  func @forward(%x: f32[B, 8]) -> (f32[B, 8]) {\n"


def quantized(arguments: str, source: str = "") -> str:
    """A module of a weight that is a part of a quantized one."""
    source = f"zeros([4], f32){source}"
    return f"module @m mesh(tp=2) {{ weight @w : f32[4] = quantized({source}, {arguments}) }}"


def stored(shape: str, offset: int = 1) -> str:
    """A module of a weight that is bytes of a file."""
    return f'module @m {{ file @f = "f" weight @w : f32[4] = bytes(@f, {offset}, f32[{shape}]) }}'


def body(*lines: str) -> str:
    ops = "".join(f"    {line}\n" for line in lines)
    return f"{HEAD}{WEIGHT}{FUNC}{ops}    return %x\n  }}\n}}\n"


CASES = {
    "modul @m {}": "1:1: error: expected 'module', found 'modul'",
    "module @m {} x": "1:14: error: expected the end of the text, found 'x'",
    "module @m mesh(tp=2, tp=3) {}": "tp is defined twice",
    "module @m dims(B=4:2:8) {}": "a range is min:typical:max in ascending order, not 4:2:8",
    'module @m { weigth @w : f32[] = unbound("w") }': "found 'weigth'; did you mean 'weight'?",
    'module @m { weight @w : f32[4 = unbound("w") }': "expected a type such as f32[B, 64]",
    'module @m { weight @w : f33[4] = unbound("w") }': "no dtype called 'f33'; did you mean 'f32'?",
    'module @m { weight @w : f32[4@] = unbound("w") }': "cannot read the dimension '4@'",
    'module @m { weight @w : f32[a/b] = unbound("w") }': "cannot read the dimension 'a/b'",
    'module @m { weight @w : f32[99999999999999999999] = unbound("w") }': "cannot read the dim",
    'module @m { weight @w : f32[4] = @ckpt["w"] }': "there is no file @ckpt",
    'module @m { weight @w : f32[4] = unbound("w").cats(f32) }': "no step called 'cats'",
    'module @m { weight @w : f32[4] = lost("w") }': "expected @file[...], bytes, concat, zeros",
    "module @m { weight @w : f32[4] = zeros([4], f33) }": "no dtype called 'f33'",
    'module @m { weight @w : f32[4] = unbound("w").cyclic(0, 0) }': "distributes over 0 parts",
    'module @m { weight @w : f32[4] = unbound("w").pad(0, -1) }': "expected a count of at least 0",
    'module @m { weight @w : f32[4] = unbound("w")[5:4] }': "[5:4] is not a valid slice",
    'module @m { weight @w : f32[4, 4] = unbound("w").shard(2, tp) }': "1:61: error: .shard(2, tp)",
    'module @m { weight @w : f32[4, 4] = unbound("w").transpose(1, 0, 2) }': "does not fit 2",
    'module @m { weight @w : f32[4] = concat(unbound("w")[0:2, :]; 0) }': "does not fit 1",
    "module @m { weight @w : f32[4] = bytes(@g, 1, f32[4]) }": "there is no file @g",
    stored("S, 5"): "is not a dtype with sizes",
    stored("6@tp, 5"): "is not a dtype with sizes",
    stored("6, 5", offset=-1): "the offset must be at least 0",
    quantized('"codes", "int3", [0]'): "no format called 'int3'; did you",
    quantized('"zeros", "int4", [0]'): "'int4' has no part called 'zeros'",
    quantized('"scales", "int4", [0], "best"'): "no method called 'best'",
    quantized('"scales", "int4", [0]', source=".shard(0, tp)"): "belongs after",
    'module @m { weight @w : f32[4] = unbound("w) }': "does not end in its line",
    'module @m { file @a = "\\q" }': "cannot read the string",
    'module @m { weight @w : f32[4] = unbound("\\ud800") }': "cannot read the string",
    body("%y = negg %x : f32[B, 8]"): "5:10: error: no operation called 'negg'; did you mean",
    body("%y = neg %z : f32[B, 8]"): "%z is used before it is defined",
    body("%y = linear %x, @v : f32[B, 6]"): "@v is not declared",
    body("%x = neg %x : f32[B, 8]"): "%x is defined twice",
    f"{HEAD}  func @f(%0: f32[B]) -> () {{ return }}\n}}": "%0 is a number; an argument has a name",
    body("%y = neg %x, %x : f32[B, 8]"): "neg takes 1 operands (x), not 2",
    body("%y = neg %x : f32[B, 9]"): "%y is written as f32[B, 9], but neg gives f32[B, 8]",
    body("%y = neg %x"): "expected ':', found 'return'",
    body("%y, %z = neg %x : f32[B, 8], f32[B, 8]"): "neg has 1 results, but 2 are named",
    body("neg %x"): "neg has 1 results, but 0 are named",
    body('%y = gelu %x {aproximate="tanh"} : f32[B, 8]'): "did you mean 'approximate'?",
    body('%y = gelu %x {approximate="tan"} : f32[B, 8]'): "did you mean 'tanh'?",
    body("%y = gelu %x {approximate=3} : f32[B, 8]"): "gelu is 3, but it must be a string",
    body("%y = cast %x : f32[B, 8]"): "cast needs the attribute dtype",
    body('%y = cast %x {dtype="f23"} : f32[B, 8]'): "no dtype called 'f23'",
    body('%y = cast %x {dtype="f32", dtype="f32"} : f32[B, 8]'): "dtype is defined twice",
    body("%y = reshape %x {shape=[8, C]} : f32[8, C]"): "reshape",
    body("%y = linear %x, @w, bais=%x : f32[B, 6]"): "no operand 'bais' here (optional: bias)",
    body("%y = linear %x, bias=@w, @w : f32[B, 6]"): "an operand without a name follows a named",
    body("%y = call %x {callee=@g} : f32[B, 8]"): "@g is not defined before this use",
    body("return %x"): "expected } after return",
    body("return %x\n    %y = neg %x : f32[B, 8]"): "expected } after return",
    body("%y = full {value=18446744073709551616} : f32[]"): "18446744073709551616' is too large",
    'module @m { weight @w : f32[4] = random("w", 1, 0.5, [-4]) }': "a size cannot be negative",
    'module @m { weight @w : f32[9223372036854775808] = unbound("w") }': "is too large",
    body('%y = neg %x : f32[B, 8] loc("a.py" 3)'): "expected ':', found '3'",
    f"{HEAD}{FUNC}  }}\n}}": "@forward does not end in return",
    f"{HEAD}  func @f(%x: f32[B]) -> (f32[8]) {{\n return %x }}\n}}": "@f returns (f32[B]), not",
    f"{HEAD}  func @f(%x: f32[B]) -> (f32[B] aliases %z) {{ return %x }}\n}}": "is not an argument",
    f"{HEAD}  func @f(%x: f32[B], %x: f32[B]) -> () {{ return }}\n}}": "%x is defined twice",
    "module @m { weight @w : f32[4] = " + "concat(" * 99 + " }": "nested too deeply",
}


@pytest.mark.parametrize("text", CASES, ids=lambda text: text.strip().splitlines()[-1][:30])
def test_message(text: str) -> None:
    with pytest.raises(TextError) as caught:
        parse_module(text, "bad.irc")
    shown = str(caught.value)
    assert CASES[text] in shown
    assert shown.startswith("bad.irc:")
    _, source, caret = shown.splitlines()
    assert caret.strip() == "^"
    assert source.strip() in text.replace("\t", " ")


def test_the_caret_is_under_the_error() -> None:
    with pytest.raises(TextError) as caught:
        parse_module(body("%y = neg %zebra : f32[B, 8]"))
    _, source, caret = str(caught.value).splitlines()
    assert source[caret.index("^") :].startswith("%zebra")
