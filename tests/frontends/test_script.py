"""Scripts: factories, settings, isolation, main memory, and errors at the user's line."""

import sys
from pathlib import Path
from typing import Any

import pytest

import irc
from irc.frontends.main_memory import in_main_memory
from irc.frontends.script import load_script, split_name

HEAD = """import irc
from irc.frontends import Module, Parameter
SPEC = {"x": irc.Spec("f32", ("B", 4))}
def trace(f, name="m"): return irc.trace(f, SPEC, name=name)
"""


def script(tmp_path: Path, text: str, name: str = "model.py") -> str:
    (tmp_path / name).write_text(HEAD + text)
    return str(tmp_path / name)


def test_the_factory(tmp_path: Path) -> None:
    text = (
        "def build(): return trace(lambda x: -x)\ndef small(): return trace(lambda x: x, 'small')\n"
    )
    path = script(tmp_path, text)
    assert [op.opname for op in load_script(path).main] == ["neg", "return"]
    assert load_script(f"{path}:small").name == "small"
    assert split_name("a/b.py") == (Path("a/b.py"), "build")
    assert split_name("a/b.py:c") == (Path("a/b.py"), "c")


SETTINGS = """
from typing import Literal
from pathlib import Path
from enum import Enum
class Kind(Enum):
    BIG = 1
def build(layers: int, rate: float = 0.5, flag: bool = False, name: str = "a", size=3,
          act: Literal["silu", "gelu"] = "silu", widths: tuple[int, ...] = (),
          pair: tuple[int, str] = (0, ""), some: list[float] | None = None,
          path: Path | None = None, kind: Kind = Kind.BIG, free=None, either: str | int = ""):
    rest = (some, path, kind.name, free, either)
    print((layers, rate, flag, name, size, act, widths, pair, *rest))
    return trace(lambda x: -x)
"""


def test_settings_are_converted_by_annotation(tmp_path: Path, capsys: Any) -> None:
    words = "layers=2|rate=1e-3|flag=yes|name=7|size=9|act=gelu|widths=1, 2,3|pair=4,b|some=0.5,1"
    words += "|path=a/b|kind=BIG|free=text|either=x"
    pairs = (word.partition("=") for word in words.split("|"))
    settings = {name: value for name, _, value in pairs}
    load_script(script(tmp_path, SETTINGS), settings)
    found = "(2, 0.001, True, '7', 9, 'gelu', (1, 2, 3), (4, 'b'), [0.5, 1.0]"
    assert capsys.readouterr().err.strip() == found + ", PosixPath('a/b'), 'BIG', 'text', 'x')"
    load_script(script(tmp_path, SETTINGS), {"layers": 5, "some": "none", "either": "3"})
    found = "(5, 0.5, False, 'a', 3, 'silu', (), (0, ''), None, None, 'BIG', None, 3)"
    assert capsys.readouterr().err.strip() == found


BAD: list[tuple[dict[str, str], str]] = [
    ({"layer": "2"}, "build of {path} has no setting 'layer'; did you mean 'layers'?"),
    ({"layers": "two"}, "layers is a whole number, not 'two'"),
    ({"layers": "1", "rate": "x"}, "rate is a number, not 'x'"),
    ({"layers": "1", "flag": "maybe"}, "flag is true or false, not 'maybe'"),
    (
        {"layers": "1", "act": "gellu"},
        "act is one of silu, gelu, not 'gellu'; did you mean 'gelu'?",
    ),
    ({"layers": "1", "size": "x"}, "size is a whole number, not 'x'"),
    ({"layers": "1", "widths": "1,x"}, "widths is a whole number, not '1,x'"),
    ({"layers": "1", "pair": "1"}, "pair is a list of 2 items, as in x,x, not '1'"),
    ({"layers": "1", "some": "a"}, "some is a number or none, not 'a'"),
    ({"layers": "1", "kind": "BEG"}, "kind is one of BIG, not 'BEG'; did you mean 'BIG'?"),
    ({}, "needs layers; give --set layers=..."),
    ({"layers": "1", "dtype": "f32"}, "give dtype as --dtype, not with --set"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    path = script(tmp_path, SETTINGS)
    with pytest.raises(irc.Error) as caught:
        load_script(path, settings)
    assert message.format(path=path) in str(caught.value)


def test_a_type_that_text_cannot_be(tmp_path: Path) -> None:
    path = script(tmp_path, "def build(a: dict = {}): return trace(lambda x: -x)\n")
    with pytest.raises(irc.Error, match="a is a dict, which --set cannot write, not 'x'"):
        load_script(path, {"a": "x"})


def test_open_ended_settings_stay_text(tmp_path: Path, capsys: Any) -> None:
    path = script(tmp_path, "def build(**more):\n    print(more)\n    return trace(lambda x: -x)\n")
    load_script(path, {"a": "1"})
    assert capsys.readouterr().err == "{'a': '1'}\n"


def test_annotations_may_be_text(tmp_path: Path) -> None:
    text = "from __future__ import annotations\n" + HEAD
    text += "def build(n: int = 1): return trace(lambda x: x * n)\n"
    (tmp_path / "late.py").write_text(text)
    assert "value=3.0" in str(load_script(str(tmp_path / "late.py"), {"n": "3"}))
    (tmp_path / "late.py").write_text(text.replace("n: int", "n: Missing"))
    with pytest.raises(
        irc.Error, match=r"cannot read the parameters of build.*'Missing' is not defined"
    ):
        load_script(str(tmp_path / "late.py"))


def test_checkpoint_and_dtype(tmp_path: Path, capsys: Any) -> None:
    text = "def build(checkpoint=None, dtype='f32'):\n    print(checkpoint, dtype)\n"
    path = script(tmp_path, text + "    return trace(lambda x: -x)\n")
    load_script(path, checkpoint="c", dtype="bf16")
    load_script(path)
    assert capsys.readouterr().err == "c bf16\nNone f32\n"
    plain = script(tmp_path, "def build(): return trace(lambda x: -x)\n")
    with pytest.raises(irc.Error, match="no parameter `dtype`, so --dtype bf16 has no effect"):
        load_script(plain, dtype="bf16")
    needy = script(tmp_path, "def build(checkpoint): return trace(lambda x: -x)\n")
    with pytest.raises(irc.Error, match=r"needs checkpoint; give --checkpoint \.\.\."):
        load_script(needy)


def test_unbound_weights_are_bound_to_the_checkpoint(tmp_path: Path) -> None:
    import numpy as np

    from ..models.golden import write_safetensors

    path = script(
        tmp_path, "W = Parameter((4,), name='w')\ndef build(): return trace(lambda x: x * W)\n"
    )
    assert str(load_script(path).weights["w"].ref) == 'unbound("w")'
    write_safetensors(tmp_path / "model.safetensors", {"w": np.ones(4, np.float32)})
    assert str(load_script(path, checkpoint=str(tmp_path)).weights["w"].ref) == '@ckpt["w"]'


RAISES = [
    (
        "def helper():\n    raise ValueError('no luck')\ndef build(): return helper()\n",
        "model.py:6: ValueError: no luck",
    ),
    (
        "def f(x):\n    return x.shapes\ndef build(): return trace(f)\n",
        "model.py:6: AttributeError: 'Tensor' object has no attribute 'shapes'",
    ),
    ("1 / 0\n", "model.py:5: ZeroDivisionError: division by zero"),
    ("import no_such_package\n", "model.py:5: ModuleNotFoundError: No module"),
    ("def build(:\n", "model.py:5:11: error: not Python: "),
    ("def build(): exit(3)\n", "model.py:5: SystemExit: 3"),
    (
        "def build(): return trace(lambda x: x + x[:, 1:])\n",
        "model.py:5: add: the shapes [B, 4] and [B, 3] do not broadcast",
    ),
    (
        "def make(): pass\ndef other(): pass\n",
        "defines no function 'build'; it defines trace, make, other. Name one, as in",
    ),
    ("def build(): pass\n", "build of {path} returned None, not a traced module"),
    ("def build(): return Module()\n", "returned a Module, not a traced module"),
    ("def build(): return 3\n", "returned an int, not a traced module"),
]


@pytest.mark.parametrize(("text", "message"), RAISES)
def test_errors_of_a_script(tmp_path: Path, text: str, message: str) -> None:
    path = script(tmp_path, text)
    with pytest.raises(irc.Error) as caught:
        load_script(path)
    assert message.format(path=path) in str(caught.value)
    raised = any(word in message for word in ("Error: ", "SystemExit", "not Python"))
    assert (caught.value.__cause__ is not None) == raised
    assert str(caught.value).count("^") >= raised, "the part of the line is marked"


NO_VALUE = "TypeError: B has no value while tracing"
MARKED = {
    "x if <x.shape[0] > 4> else -x": NO_VALUE,
    "x * (<1 / x.shape[0]>)": NO_VALUE,
    "x[:<min(x.shape[0], 3)>]": NO_VALUE,
    "[x for _ in <range(x.shape[0])>]": NO_VALUE,
    "<float(x.shape[0])>": NO_VALUE,
    "<np.zeros(x.shape)>": NO_VALUE,
    "<np.sqrt(x.shape[0])>": "TypeError: loop of ufunc does not support argument 0 of type Dim",
    "<x * x.shape[0]>": "mul: an operand is B, which has no value while tracing",
    "x.reshape(<x.shape[0] * 0.5>)": "TypeError: 'float' object cannot be interpreted as",
    "-<json.dumps(x)>": "TypeError: Object of type Tensor is not JSON serializable",
    "-<json.loads('[')>": "json.decoder.JSONDecodeError: Expecting value",
    "-<eval('1 +')>": 'File "<string>", line 1\n    1 +\nSyntaxError: ',
    "x + (1 / <np.exp(x)>)": "a tensor has no value while a model is traced",
    "x + <sibling.two(x)>": "a tensor cannot be iterated over",
}


@pytest.mark.parametrize("expression", MARKED)
def test_a_failure_is_shown_at_the_line_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str
) -> None:
    before, _, marked = expression.partition("<")
    marked, _, after = marked.rpartition(">")
    line = f"return {before}{marked}{after}"
    (tmp_path / "sibling.py").write_text("def two(x):\n    a, b = x\n")
    text = (
        f"import json, sibling, numpy as np\ndef f(x):\n    {line}\ndef build(): return trace(f)\n"
    )
    script(tmp_path, text)
    monkeypatch.chdir(tmp_path.parent)
    path = f"{tmp_path.name}/model.py"
    with pytest.raises(irc.Error) as caught:
        load_script(path)
    if "sibling" in marked:
        path, line, marked = f"{tmp_path.name}/sibling.py", "a, b = x", "a, b"
    number = 2 if "a, b" in marked else 7
    caret = " " * line.index(marked) + "^" * len(marked)
    message = str(caught.value)
    assert message.startswith(f"{path}:{number}: {MARKED[expression]}")
    assert f"\n    {line}\n    {caret}" in message


def test_a_failure_over_several_lines_is_marked_on_the_first(tmp_path: Path) -> None:
    path = script(tmp_path, "def build():\n    return trace(lambda x: x + (1 /\n        0))\n")
    with pytest.raises(irc.Error) as caught:
        load_script(path)
    line = "    return trace(lambda x: x + (1 /"
    assert str(caught.value).endswith(f"{line}\n{' ' * line.index('1 /')}^^^")


def test_symbols_and_tensors_can_be_printed(tmp_path: Path, capsys: Any) -> None:
    text = "def f(x):\n    print(f'{x} {x.shape} {x.shape[0]:>3}|')\n    return -x\n"
    load_script(script(tmp_path, text + "def build(): return trace(f)\n"))
    assert capsys.readouterr().err == "<tensor f32[B, 4]> (B, 4)   B|\n"


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("torch.nn.functional.relu(x)", "relu"),
        ("torch.nn.Linear(4, 4)(x)", "linear"),
        ("torch.ones(4) + x", "add"),
        ("torch.cat([x, x])", "cat"),
    ],
)
def test_a_tensor_given_to_pytorch(tmp_path: Path, expression: str, name: str) -> None:
    text = f"import torch\ndef f(x): return {expression}\ndef build(): return trace(f)\n"
    with pytest.raises(irc.Error) as caught:
        load_script(script(tmp_path, text))
    says = f"model.py:6: {name} of PyTorch got a tensor of irc, which has no value while"
    assert says in str(caught.value)
    assert f"{expression}\n" in str(caught.value)


def test_a_missing_factory_or_script(tmp_path: Path) -> None:
    path = script(tmp_path, "def build_small(): pass\n")
    with pytest.raises(irc.Error, match="'biuld_small'; did you mean 'build_small'"):
        load_script(f"{path}:biuld_small")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(irc.Error, match="and no other; define `def build"):
        load_script(str(tmp_path / "empty.py"))
    with pytest.raises(irc.Error, match=r"cannot read the script .*none\.py: No such file"):
        load_script(str(tmp_path / "none.py"))


def test_scripts_are_loaded_in_isolation(tmp_path: Path) -> None:
    before, path_before = set(sys.modules), list(sys.path)
    texts = []
    for i in range(2):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "sibling_of_script.py").write_text(f"NAME = 'v{i}'\n")
        (folder / "sibling_folder").mkdir()
        (folder / "sibling_folder" / "part.py").write_text(f"NAME = 'w{i}'\n")
        text = "from sibling_of_script import NAME\nfrom sibling_folder import part\n"
        text += "def build(): return trace(lambda x: -x, NAME + part.NAME)\n"
        texts.append(load_script(script(folder, text)).name)
    assert texts == ["v0w0", "v1w1"], "the second script got the first one's siblings"
    assert sys.path == path_before
    new = set(sys.modules) - before
    assert not {name for name in new if "sibling" in name or "irc_loaded" in name}


def test_an_edited_script_is_read_again(tmp_path: Path) -> None:
    for name in ("aa", "bb"):
        path = script(tmp_path, f"def build(): return trace(lambda x: -x, '{name}')\n")
        assert load_script(path).name == name
    assert not list(tmp_path.glob("__pycache__"))


def test_dataclasses_work_in_scripts(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass, KW_ONLY\n" + HEAD
    text += "@dataclass\nclass C:\n    _: KW_ONLY\n    n: int = 2\n"
    text += "def build(): return trace(lambda x: x * C().n)\n"
    (tmp_path / "data.py").write_text(text)
    assert "value=2.0" in str(load_script(str(tmp_path / "data.py")))


def test_tensors_for_a_gpu_lie_in_main_memory() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with in_main_memory({"torch"}):
        x = torch.ones(2, device="cuda").cuda()
        layer = torch.nn.Linear(1, 1).cuda().to("cuda")
        tensors = (x, layer.weight, torch.empty(3, device=0), torch.zeros(1).pin_memory())
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert x[:1].expand(3).cuda().is_contiguous()
        torch.cuda.set_device(0)
        torch.cuda.set_stream(stream := torch.cuda.Stream())
        with torch.cuda.stream(stream) as current:
            assert current is stream and current.query()
        assert torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event()) == 0
        assert torch.cuda.current_stream().cuda_stream == torch.cuda.current_device() == 0
