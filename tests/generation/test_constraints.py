"""Constrained text: always a beginning of what json, re and Python's own parser accept."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.generation.constraints import Constraint, constraint_of
from irc.generation.sampling import draw
from irc.generation.settings import GenerationSettings as Texts
from irc.generation.tokenizer import Tokenizer
from tests.fresh import fresh
from tests.tiny_checkpoint import write_tokenizer

pytest.importorskip("llguidance")
EXTRA = 37  # logits behind the tokens of the tokenizer
END, OTHER_END = 260, 270  # <|end|> of the byte-level tokenizer, and one that it does not have


def write_metaspace(folder: Path) -> None:
    """A tokenizer as those of sentencepiece: words with ▁, and bytes for other characters."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers

    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [
        "▁",
        "▁a",
        "a",
        "b",
        "é",
        '▁"',
        '{"',
        '"',
        "}",
        ":",
        "▁{",
        "[",
        "▁1",
        "tr",
        "ue",
        "日",
    ]
    tokenizer = Engine(models.Unigram([(word, -1.0) for word in words], 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=["bytes", "metaspace"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    (write_tokenizer if request.param == "bytes" else write_metaspace)(folder)
    return Tokenizer(folder), (END if request.param == "bytes" else 1, OTHER_END)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return "\ufffd" not in text and isinstance(json.loads(text), dict)
    except ValueError:
        return False


PROPERTIES: dict[str, Any] = {
    "kind": {"enum": ["größe", "b"]},
    "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    "n": {"type": "integer", "minimum": -3, "maximum": 12},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
SCHEMA["additionalProperties"] = False


def is_of_schema(text: str) -> bool:
    """Whether a text is an object of SCHEMA."""
    value = json.loads(text) if is_object(text) else {}
    return (
        set(value) == set(PROPERTIES)
        and value["kind"] in ("größe", "b")
        and [type(tag) for tag in value["tags"]] in ([str], [str, str])
        and type(value["n"]) is int
        and -3 <= value["n"] <= 12
    )


def is_sum(text: str) -> bool:
    """Whether a text is an expression of Python."""
    try:
        return text == text.strip() and ast.parse(text, mode="eval") is not None
    except SyntaxError:
        return False


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: "\ufffd" not in text and bool(re.fullmatch(pattern, text))


SUMS = 'start: sum\nsum: term (("+" | " - ") term)*\nterm: /[1-9][0-9]{0,2}/ | "(" sum ")"'
GBNF = 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [1-9] | "(" sum ")"'
REGEX = "[a-z]{2,8}(é|日本|👍)+_[0-9]{0,3}", ".{1,5}(é.|)", "(ab|a|b/)*", "^the (er)+$", "a\n/?"
CASES: list[tuple[Texts, Callable[[str], bool]]] = [
    (Texts(json_schema="{}"), is_object),
    (Texts(json_schema=json.dumps(SCHEMA)), is_of_schema),
    (Texts(grammar=SUMS), is_sum),
    (Texts(grammar=GBNF), is_sum),
    *((Texts(regex=pattern), matches(pattern)) for pattern in REGEX),
]


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text that tokens add to a text."""
    return tokenizer.decode([*tokenizer.encode("a", special=False), *tokens])[1:]


def token_of(tokenizer: Tokenizer, text: str) -> int:
    """The last of the tokens that are this text behind a text."""
    return [i for i in range(tokenizer.size) if text_of(tokenizer, [i]) == text][-1]


def made(texts: Texts, model: Any, *ends: int) -> Constraint:
    constraint = constraint_of(texts, model[0], ends or model[1])
    assert constraint is not None
    return constraint


def allowed(constraint: Constraint, logits: np.ndarray) -> np.ndarray:
    """Which logits a constraint leaves, and leaves as they are."""
    masked = logits.copy()
    constraint.mask(masked)
    kept = np.isfinite(masked)
    assert (masked[kept] == logits[kept]).all()
    return kept


@pytest.mark.parametrize(("texts", "is_whole"), CASES)
def test_text_never_leaves_the_grammar(texts: Texts, is_whole: Any, model: Any) -> None:
    """Random tokens of a model that prefers forbidden ones; then those that close what is open."""
    (tokenizer, ends), random = model, fresh()
    size = tokenizer.size + EXTRA
    costs = {'"': 0, "}": 0, "]": 0, ")": 0, "(": 2, "[": 2, "{": 2} | dict.fromkeys(" \t\r\n", 9)
    pieces = [text_of(tokenizer, [token]) for token in range(tokenizer.size)]
    closing = np.array([-sum(costs.get(c, 1) for c in piece) for piece in pieces] + [-99.0] * EXTRA)
    for _ in range(20):
        constraint, tokens = made(texts, model), list[int]()
        settings = Texts(temperature=random.uniform(1, 2))
        while not constraint.is_complete:
            logits = random.standard_normal(size)
            kept = allowed(constraint, logits)
            logits[~kept] += 50
            assert (allowed(constraint, logits) == kept).all()
            text = text_of(tokenizer, tokens)
            assert kept[list(ends)].tolist() == [is_whole(text)] * 2, text
            assert set(np.flatnonzero(kept[tokenizer.size :]) + tokenizer.size) <= set(ends)
            assert len(tokens) < 400, "what was cut after 80 tokens cannot be completed"
            if len(tokens) >= 80:
                if is_whole(text):
                    break
                logits = closing.copy()
            constraint.mask(logits)
            token = int(logits.argmax()) if len(tokens) >= 80 else draw(logits, settings, random)
            constraint.accept(token)
            if token in ends:
                break
            tokens.append(token)
        assert is_whole(text_of(tokenizer, tokens))


def test_what_may_follow(model: Any) -> None:
    tokenizer, ends = model
    a, b = (token_of(tokenizer, letter) for letter in "ab")
    constraint, logits = made(Texts(regex="ab"), model), np.zeros(tokenizer.size + EXTRA)
    constraint.accept(a)
    with pytest.raises(Error, match=r"no token is left that the schema, .* forbid those"):
        constraint.mask(np.full(len(logits), -np.inf))
    assert not constraint.is_complete
    constraint.accept(b)
    assert constraint.is_complete
    assert np.flatnonzero(allowed(constraint, logits)).tolist() == list(ends)
    with pytest.raises(Error, match=r"cannot be followed: "):
        constraint.accept(a)
    words = made(Texts(regex="(bb|a)+"), model, b)
    assert not allowed(words, logits)[b], "the text may begin with b, but may not end here"
    words.accept(a)
    assert allowed(words, logits)[b]
    blank = made(Texts(json_schema='{"type": "object", "maxProperties": 0}'), model)
    for _ in range(99):  # JSON ends, even if a model likes blanks more than all else
        spaces = np.array([tokenizer.decode([a, i])[1:].isspace() for i in range(len(logits))])
        if not blank.is_complete:
            blank.accept(int((spaces + 2 * allowed(blank, logits)).argmax()))
    assert blank.is_complete


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (Texts(json_schema="{"), "the JSON schema is not accepted: EOF while parsing"),
        (Texts(json_schema="[]"), "not accepted: Expecting object schema"),
        (Texts(json_schema='{"a":' * 20000), "not accepted: recursion limit exceeded"),
        (Texts(json_schema='{"type": "text"}'), "JSON schema is not accepted: Invalid type: text"),
        (Texts(json_schema='{"uniqueItems": true}'), r'Unimplemented keys: \["uniqueItems"\]'),
        (Texts(json_schema='{"$ref": "https://x.y/z"}'), "JSON schema is not accepted: Resource"),
        (Texts(regex="a("), "the regular expression is not accepted: .*unclosed group"),
        (Texts(regex="a\ud800"), "not accepted: .*surrogates not allowed"),
        (Texts(grammar="start: b"), 'the grammar is not accepted: .*unknown name: "b"'),
        (Texts(grammar="root ::= " + "(" * 9999), "the grammar is not accepted"),
        (Texts(regex="a" * 99_999 + "("), "the regular expression is not accepted"),
        (Texts(regex="a" * 200_000), "expression has 200000 characters; expected at most 131072"),
        (Texts(grammar="start: a\n" * 500), "the grammar has 500 lines; expected at most 400"),
    ],
)
@pytest.mark.parametrize("model", ["bytes"], indirect=True)
def test_what_cannot_be_followed_is_said(texts: Texts, message: str, model: Any) -> None:
    with pytest.raises(Error, match=message) as raised:
        made(texts, model)
    assert len(str(raised.value)) < 4000


HOSTILE = """
import json, re, sys, time
from pathlib import Path
import numpy as np
from irc.errors import Error
from irc.generation.constraints import constraint_of
from irc.generation.settings import GenerationSettings as Texts
from irc.generation.tokenizer import Tokenizer

tokenizer = Tokenizer(Path(sys.argv[1]))
array = {"type": "array"}
chain = {str(i): array | {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1900)}
doubled = "".join(f"A{i}: A{i + 1} A{i + 1}\\n" for i in range(390))
for texts in (
    Texts(json_schema=json.dumps({"$ref": "#/$defs/0", "$defs": chain | {"1900": {}}})),
    Texts(grammar=f"start: A0\\n{doubled}A390: /x/"),
    Texts(regex="(a{1000}){1000}"),
    Texts(json_schema=json.dumps({"enum": [f"v{i}" for i in range(9000)]})),
    Texts(json_schema=json.dumps({"type": "array", "minItems": 10**9})),
):
    began = time.process_time()
    try:
        constraint, random = constraint_of(texts, tokenizer, (260,)), np.random.default_rng(0)
        for _ in range(100):
            logits = random.standard_normal(261)
            constraint.mask(logits)
            constraint.accept(int(logits.argmax()))
    except Error as error:
        assert "at most" not in str(error)
    assert time.process_time() - began < 20
peak = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())
assert peak is None or int(peak[1]) < 2**20, "a GiB"  # of this process alone
"""


def test_hostile_grammars_take_little_time_and_memory(tmp_path: Path) -> None:
    """Recursion that would end the process without a deep stack, and automata without end."""
    write_tokenizer(tmp_path)
    command = [sys.executable, "-c", HOSTILE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Error, match=r"a regular expression needs llguidance .*serve"):
        constraint_of(Texts(regex="a"), Tokenizer(tmp_path), ())
