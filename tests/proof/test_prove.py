"""`irc prove`: correct passes are certified, wrong variants of what they give are not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import irc
from irc.driver.history import history_of, replay
from irc.ir.core import Module, Value
from irc.ops import Neg
from irc.proof import certify, prove, prove_passes
from irc.proof.identities import IDENTITIES, Identity, check_identity
from tests.cli.runner import irc as command
from tests.cli.runner import works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.sharded.models import tiny_llama

from .models import MESHES, MODELS, history
from .mutants import chosen, differs, mutants

RIGHT = """module @m mesh(tp=2) dims(B=1:4:16) {
  weight @up : f32[6@tp, 8] = unbound("layers.0.up")
  weight @down : f32[8, 6@tp] = unbound("layers.0.down")
  func @forward(%x: f32[B, 8], %y: f32[B, 8]) -> (f32[B, 8]) {
    %h = linear %x, @up : f32[B, 6@tp] loc("m.py":3 "layers.0.up")
    %a = relu %h : f32[B, 6@tp] loc("m.py":4 "layers.0")
    %z = linear %a, @down : f32[B, 8]{sum tp} loc("m.py":5 "layers.0.down")
    %s = all_reduce %z {axis="tp"} : f32[B, 8] loc("m.py":5 "layers.0.down")
    %r = sub %s, %y : f32[B, 8] loc("m.py":6 "layers.0")
    return %r
  }
}
"""
UP = 'unbound("layers.0.up", [6, 8])'
WRONG = {
    "another operand of the type": ("linear %x", "linear %y"),
    "exchanged operands": ("sub %s, %y", "sub %y, %s"),
    "another operation": ("relu %h", "silu %h"),
    "a permuted weight": ('unbound("layers.0.up")', f"concat({UP}[3:6, :], {UP}[0:3, :]; 0)"),
    "a sum divided afterwards": (
        "%r = sub %s",
        "%half = full {value=0.5} : f32[]\n    %t = mul %s, %half : f32[B, 8]\n    %r = sub %t",
    ),
}


def local(text: str) -> Module:
    """A module in the local view."""
    module = irc.parse(text)
    irc.run_passes(module, "localize")
    return module


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_every_pass_is_certified(name: str, mesh: str) -> None:
    proofs = [proof for proof in prove_passes(history(name, mesh)) if proof.certificate]
    assert {proof.status for proof in proofs} == {"certified"}
    counts = [proof.certificate.counts for proof in proofs if proof.certificate]
    assert sum(one["neither"] for one in counts) == 0
    assert sum(one["proved"] for one in counts) > sum(one["supported"] for one in counts)


@pytest.mark.parametrize("stream", range(20))
def test_no_wrong_variant_is_certified(stream: int) -> None:
    rng = fresh(stream)
    records = history(chosen(rng, [*MODELS]), chosen(rng, MESHES)).records
    changed = [i for i in range(1, len(records)) if records[i].text != records[i - 1].text]
    at = chosen(rng, changed)
    before, right = irc.parse(records[at - 1].text), irc.parse(records[at].text)
    what, wrong = next(mutants(records[at].text, rng))
    if differs(right, wrong, rng):
        assert not prove(before, wrong).certified, f"{records[at].name}: {what}"


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("form", [irc.parse, local])
def test_what_layouts_cannot_tell(what: str, form: Callable[[str], Module]) -> None:
    text = RIGHT.replace(*WRONG[what])
    certificate = prove(irc.parse(RIGHT), form(text))
    assert text != RIGHT
    assert certificate.results == {"result0": "neither"}
    assert "elements differ" in certificate.difference
    assert certificate.difference.startswith("%")


def test_a_difference_names_the_first_line() -> None:
    certificate = prove(irc.parse(RIGHT), irc.parse(RIGHT.replace("relu", "silu")))
    assert certificate.difference.startswith("%a at m.py:4 in layers.0: ")


def test_names_and_order_do_not_matter() -> None:
    text = RIGHT.replace("%h", "%first").replace("@up", "@w").replace("%z", "%h")
    for other in (irc.parse(text), local(text)):
        certificate = prove(irc.parse(RIGHT), other)
        assert certificate.certified
        assert certificate.counts == {"proved": 5, "supported": 0, "neither": 0}


def test_padding_must_not_reach_a_sum() -> None:
    """relu(exp(0)) is not 0: what the last rank has beyond 7 elements is masked."""
    text = RIGHT.replace("6@tp", "7@tp").replace("relu", "exp").replace("8, 7@tp", "7@tp, 8")
    text = text.replace("linear %a, @down", "reduce_sum %a {dims=[-1], keep}").replace(
        "f32[B, 8]{sum tp}", "f32[B, 1]{sum tp}"
    )
    text = text.replace(
        '%s = all_reduce %z {axis="tp"} : f32[B, 8]', '%s = all_reduce %z {axis="tp"} : f32[B, 1]'
    )
    module = local(text)
    assert prove(irc.parse(text), module).certified
    masked = next(op for op in module.main if op.opname == "where")
    masked.results[0].replace_by(masked.operands[1])
    assert not prove(irc.parse(text), module).certified


def test_equal_layers_are_evaluated_once() -> None:
    records = history_of(tiny_llama(num_hidden_layers=5), 'shard{mesh="tp=3"}, localize')
    certificate = prove_passes(records)[-1].certificate
    assert certificate is not None and certificate.certified
    assert [one.count for one in certificate.evidence if "mlp" in one.scope] == [5]


def test_quantization_changes_numbers() -> None:
    (proof,) = prove_passes(history_of(tiny_llama(), 'quantize{scheme="w8a16", group=8}'))
    assert proof.status == "changes numbers by design"


def test_numbers_that_support_nothing() -> None:
    text = """module @m {
      func @forward(%x: f32[4]) -> (f32[4]) {
        %y = abs %x : f32[4]
        %n = neg %y : f32[4]
        %z = log %n : f32[4]
        return %z
      }
    }"""
    certificate = prove(irc.parse(text), irc.parse(text.replace("log", "sqrt")))
    assert not certificate.certified
    assert "infinite or NaN" in certificate.reasons[0]


def test_other_arguments_and_results() -> None:
    more = RIGHT.replace("%y: f32[B, 8])", "%y: f32[B, 8], %q: f32[B])").replace("%r\n", "%s\n")
    certificate = prove(irc.parse(RIGHT), irc.parse(more))
    assert certificate.reasons[0] == "the arguments differ: x, y, q instead of x, y"
    named = RIGHT.replace("-> (f32[B, 8])", "-> (y: f32[B, 8])")
    reasons = prove(irc.parse(RIGHT), irc.parse(named)).reasons[1:]
    assert reasons == [f"the result {name} is in one module only" for name in ("result0", "y")]


STATES = """module @m mesh(tp=2) dims(B=1:4:16) {
  func @forward(%x: f32[B, 8], %k: f32[B, 8], %v: f32[B, 8]) -> (
      y: f32[B, 8], kk: f32[B, 8] aliases %k, vv: f32[B, 8] aliases %v) {
    %k2 = add %k, %x : f32[B, 8]
    %v2 = sub %v, %x : f32[B, 8]
    %y = mul %k2, %v2 : f32[B, 8]
    return %y, %k2, %v2
  }
}
"""
INTERFACES = {
    "what kk aliases differs: none": ("kk: f32[B, 8] aliases %k", "kk: f32[B, 8]"),
    "what kk aliases differs: v": (
        "kk: f32[B, 8] aliases %k, vv: f32[B, 8] aliases %v",
        "kk: f32[B, 8] aliases %v, vv: f32[B, 8] aliases %k",
    ),
    "the range of B differs: 1 to 4": ("B=1:4:16", "B=1:2:4"),
    "the arguments differ": ("(%x: f32[B, 8], %k: f32[B, 8]", "(%k: f32[B, 8], %x: f32[B, 8]"),
    "the mesh differs: tp=4": ("tp=2", "tp=4"),
}


@pytest.mark.parametrize("reason", INTERFACES)
def test_another_interface(reason: str) -> None:
    other = STATES.replace(*INTERFACES[reason])
    certificate = prove(irc.parse(STATES), irc.parse(other))
    assert not certificate.certified
    assert reason in certificate.reasons[0]
    assert prove(irc.parse(STATES), irc.parse(STATES)).certified


@pytest.mark.parametrize("operation", ["add", "sub"])
def test_longer_states_are_compared(operation: str) -> None:
    text = STATES.replace(" %v: f32[B, 8])", " %v: f32[B, 16])")
    text = text.replace("vv: f32[B, 8]", "vv: f32[B, 16]").replace(
        "    %v2 = sub %v, %x : f32[B, 8]",
        f"""    %r = concat %x, %x {{dim=1}} : f32[B, 16]
    %v2 = {operation} %v, %r : f32[B, 16]
    %h = slice %v2 {{dim=1, start=0, stop=8, step=1}} : f32[B, 8]""",
    )
    text = text.replace("mul %k2, %v2", "mul %k2, %h")
    certificate = prove(irc.parse(STATES), irc.parse(text))
    assert certificate.certified == (operation == "sub"), certificate.reasons
    assert certificate.notes == ["the result vv is f32[B, 16] instead of f32[B, 8]"]


@pytest.mark.parametrize("mask", ["-3.4e38", "-1e30", "-1e9", "-65504.0"])
def test_masks_hide_nothing(mask: str) -> None:
    text = f"""module @m dims(B=1:4:16) {{
      func @forward(%x: f32[B, 8], %y: f32[B, 8]) -> (f32[B, 8]) {{
        %c = gt %x, %y : bool[B, 8]
        %n = full {{value={mask}}} : f32[]
        %h = mul %x, %y : f32[B, 8]
        %w = where %c, %h, %n : f32[B, 8]
        %r = softmax %w {{dim=-1}} : f32[B, 8]
        return %r
      }}
    }}"""
    for wrong in (
        text.replace("%h = mul", "%h = add"),
        text.replace("where %c, %h", "where %c, %x"),
    ):
        assert not prove(irc.parse(text), irc.parse(wrong)).certified


def plain(body: str, arguments: str = "%x: f32[B, S, 8]", weights: str = "") -> str:
    """A module of one function."""
    return f"""module @m dims(B=1:4:16, S=1:8:4096) {{
      {weights}
      func @forward({arguments}) -> (f32[B, S, 8]) {{
        {body}
        return %r
      }}
    }}"""


IDS = "%r = embedding %i, @t : f32[B, S, 8]"
QKV = "%q: f32[B, S, 8], %k: f32[B, S, 8], %v: f32[B, S, 8], %l: i32[B]"
LENGTHS = "%r = attention %q, %k, %v, lengths=%l {head_dim=4} : f32[B, S, 8]"
WINDOW = "%r = attention %q, %k, %v {head_dim=4, causal, window=64} : f32[B, S, 8]"
ABOVE = """%k = full {value=50.0} : f32[]
        %c = gt %x, %k : bool[B, S, 8]
        %n = neg %x : f32[B, S, 8]
        %r = where %c, %n, %x : f32[B, S, 8]"""
SOFTMAX = """%m = reduce_max %x {dims=[2], keep=true} : f32[B, S, 1]
        %s = sub %x, %m : f32[B, S, 8]
        %e = exp %s : f32[B, S, 8]
        %d = reduce_sum %e {dims=[2], keep=true} : f32[B, S, 1]
        %r = div %e, %d : f32[B, S, 8]"""
NORM = """%s = mul %x, %x : f32[B, S, 8]
        %m = reduce_mean %s {dims=[2], keep=true} : f32[B, S, 1]
        %k = full {value=1e-12} : f32[]
        %e = add %m, %k : f32[B, S, 1]
        %q = rsqrt %e : f32[B, S, 1]
        %r = mul %x, %q : f32[B, S, 8]"""
RARE = {
    "lengths": (LENGTHS, ", lengths=%l", "", QKV),
    "a window": (WINDOW, ", window=64", "", QKV),
    "a constant": (ABOVE, "where %c, %n", "where %c, %x", "%x: f32[B, S, 8]"),
    "overflow": (SOFTMAX, "exp %s", "exp %x", "%x: f32[B, S, 8]"),
    "eps": (NORM, "rsqrt %e", "rsqrt %m", "%x: f32[B, S, 8]"),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("what", RARE)
def test_what_usual_numbers_do_not_show(what: str, seed: int) -> None:
    body, old, new, arguments = RARE[what]
    before, after = plain(body, arguments), plain(body.replace(old, new), arguments)
    if what != "eps":  # about 1 % of the seeds draw no vector that is small enough
        seed += int(fresh(2).integers(1 << 20))
    assert not prove(irc.parse(before), irc.parse(after), seed=seed).certified


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ends", [(0, 200), (-200, 99)])
def test_ids_outside_of_the_table_are_drawn(ends: tuple[int, int], seed: int) -> None:
    clipped = f"%g = clip %i {{low={ends[0]}, high={ends[1]}}} : i32[B, S]\n        {IDS}"
    table = 'weight @t : f32[100, 8] = unbound("t")'
    before = irc.parse(plain(IDS, "%i: i32[B, S]", table))
    after = irc.parse(
        plain(clipped.replace("embedding %i", "embedding %g"), "%i: i32[B, S]", table)
    )
    seed += int(fresh(3).integers(1 << 20))
    assert not prove(before, after, seed=seed).certified
    assert prove(before, before, seed=seed).certified


def test_sizes_beyond_what_is_drawn_are_said() -> None:
    long = plain(WINDOW.replace("64", "1000"), QKV)
    other = long.replace("window=1000", "window=1001")
    certificate = prove(irc.parse(long), irc.parse(other))
    assert [one.note for one in certificate.evidence] == ["sizes up to 4 drawn"]


def test_rounding_is_said() -> None:
    text = plain("""%t = cast %x {dtype="bf16"} : bf16[B, S, 8]
        %y = cast %t {dtype="f32"} : f32[B, S, 8]
        %r = relu %y : f32[B, S, 8]""")
    certificate = prove(irc.parse(text), irc.parse(text.replace("relu %y", "relu %x")))
    assert certificate.notes == ["rounding differs: 1 casts of floats"]
    assert not prove(irc.parse(text), irc.parse(text)).notes


def test_every_rank_is_compared() -> None:
    text = """module @m local mesh(tp=2) dims(B=1:4:16) {
      func @forward(%x: f32[B, 8]) -> (f32[B, 8]) {
        %y = relu %x : f32[B, 8]
        return %y
      }
    }"""
    other = text.replace("-> (f32[B, 8])", "-> (f32[B, 8]{varies tp})").replace(
        "%y = relu %x : f32[B, 8]",
        """%k = rank {axis="tp"} : i32[]{varies tp}
        %f = cast %k {dtype="f32"} : f32[]{varies tp}
        %r = relu %x : f32[B, 8]
        %y = add %r, %f : f32[B, 8]{varies tp}""",
    )
    certificate = prove(irc.parse(text), irc.parse(other))
    assert certificate.reasons == ["result0 is f32[B, 8]{varies tp} instead of f32[B, 8]"]
    certificate = prove(irc.parse(other), irc.parse(other.replace("add %r, %f", "sub %r, %f")))
    assert not certificate.certified
    swapped = other.replace("add %r, %f", "add %f, %r")
    assert prove(irc.parse(other), irc.parse(swapped)).certified


def test_weights_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal paths under different names are equal; equal names of different files are not."""
    monkeypatch.chdir(tmp_path)
    texts: dict[str, str] = {}
    for folder in "ab":
        Path(folder).mkdir()
        save_file({"up": np.ones((6, 8), np.float32)}, f"{folder}/w.safetensors")
        texts[folder] = RIGHT.replace(
            "{\n  weight", '{\n  file @ckpt = "w.safetensors"\n  weight', 1
        )
        texts[folder] = texts[folder].replace('unbound("layers.0.up")', '@ckpt["up"]')
        Path(folder, "m.irc").write_text(texts[folder])
    renamed = texts["a"].replace("@ckpt", "@other").replace("w.safetensors", "./w.safetensors")
    Path("a/n.irc").write_text(renamed)
    assert command("prove", "a/m.irc", "b/m.irc").status == 1
    assert command("prove", "a/m.irc", "a/n.irc").out.startswith("certified: 5 proved")


def test_stored_integers_are_read_in_every_layer(tmp_path: Path) -> None:
    """clip to 9 changes the numbers of the second layer only."""
    numbers = {f"q{i}": np.full((8, 8), 9 + i, np.int8) for i in range(2)}
    save_file(numbers, tmp_path / "w.safetensors")
    body = "".join(
        f"""    %c{i} = cast @w{i} {{dtype="f32"}} : f32[8, 8] loc("m.py":3 "layers.{i}")
    %x{i + 1} = linear %x{i}, %c{i} : f32[B, 8] loc("m.py":3 "layers.{i}")
"""
        for i in range(2)
    )
    text = f"""module @m dims(B=1:4:16) {{
  file @ckpt = "w.safetensors"
  weight @w0 : i8[8, 8] = @ckpt["q0"]
  weight @w1 : i8[8, 8] = @ckpt["q1"]
  func @forward(%x0: f32[B, 8]) -> (f32[B, 8]) {{
{body}    return %x2
  }}
}}
"""
    clipped = re.sub(
        r"(%x. = linear %x., )%c(.)",
        r"%d\2 = clip %c\2 {low=-9.0, high=9.0} : f32[8, 8]\n    \1%d\2",
        text,
    )
    base = str(tmp_path)
    assert prove(irc.parse(text), irc.parse(text), base=base).certified
    assert not prove(irc.parse(text), irc.parse(clipped), base=base).certified


@pytest.mark.parametrize("identity", IDENTITIES, ids=lambda one: one.name)
def test_identities_are_checked(identity: Identity) -> None:
    def sides(*x: Value, **sizes: int) -> tuple[Value, Value]:
        left, right = identity.sides(*x, **sizes)
        return left, Neg(right).result

    check_identity(identity)
    with pytest.raises(irc.Error, match="fails in f64"):
        check_identity(replace(identity, sides=sides))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("right.irc").write_text(RIGHT)
    Path("wrong.irc").write_text(RIGHT.replace("relu", "silu"))
    done = command("prove", "right.irc", "right.irc")
    assert done.status == 0
    assert done.out == "certified: 5 proved, 0 supported, 0 neither operations\n"
    done = command("prove", "right.irc", "wrong.irc", "--json")
    assert done.status == 1 and "%a at m.py:4" in done.json["difference"]
    wrong: list[tuple[list[str], int, str]] = [
        (["right.irc", "missing.irc"], 1, "missing.irc"),
        (["missing"], 1, "missing"),
        (["right.irc", "right.irc", "--draws", "0"], 2, "--draws"),
    ]
    for words, status, message in wrong:
        done = command("prove", *words)
        assert done.status == status and message in done.err


def test_an_artifact(two_ranks: Path) -> None:
    done = command("prove", two_ranks)
    assert done.status == 0, done.out + done.err
    assert "shard" in done.out and "not certified" not in done.out


def test_certificates_are_repeatable() -> None:
    first, second = (json.dumps(certify(history("bert", "tp=3"))) for _ in range(2))
    assert first == second


def test_a_compilation_writes_its_certificate(tmp_path: Path) -> None:
    words = ("--mesh", "tp=2", "--prove")
    said = works("compile", ROOT / "examples" / "tiny_llama", "-o", tmp_path / "a", *words).out
    written = json.loads((tmp_path / "a" / "certificate.json").read_text())
    assert written == certify(replay(tmp_path / "a"))
    assert written["certified"] and "every pass keeps what the model computes" in said
