"""Conversations on standard input: the answers of transformers, from states that are kept."""

import io
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

import irc
from irc.cli.chat import chat
from irc.driver import open_model
from irc.generation.rows import Rows
from tests.cli.runner import irc as call
from tests.cli.runner import refused, works
from tests.tiny_checkpoint import write_checkpoint

TEMPLATE = """{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no bad') }}
{% endif %}{{ m.role[:1] + ':' + m.content + ';' }}{% endfor %}a:"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("chat") / "model", seed=3)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    irc.compile(folder, folder.parent / "a", backend="onnx", dims={"C": (1, 64, 96)})
    return folder.parent / "a"


def answers_of(checkpoint: Path, *lines: str) -> list[dict[str, str]]:
    """The messages of a conversation with transformers, computed anew for each answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = cast("Any", AutoTokenizer).from_pretrained(str(checkpoint))
    peer = cast("Any", AutoModelForCausalLM).from_pretrained(str(checkpoint))
    messages = [{"role": "system", "content": "S"}]
    for line in lines:
        messages.append({"role": "user", "content": line})
        ids = torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)])
        new = peer.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        messages.append({"role": "assistant", "content": tokenizer.decode(new)})
    return messages


def test_answers_are_those_of_transformers(artifact: Path) -> None:
    """Each turn computes only the tokens that are new; a new conversation forgets the old one."""
    feed, counts = Rows.feed, list[int]()

    def counted(rows: Rows, tokens: list[list[int]], first: int = 0) -> Any:
        counts.append(len(tokens[0]))
        return feed(rows, tokens, first)

    words = ["generate", artifact, "--chat", "--system", "S", "--max-new-tokens", "6"]
    with mock.patch.object(Rows, "feed", counted):
        answer = works(*words, "--json", stdin="hello\n\nhow are you\né?")
    expected = answers_of(artifact.parent / "model", "hello", "how are you", "é?")
    assert answer.json["messages"] == expected
    assert counts[0] == len("s:S;u:hello;a:")
    assert counts[1] < len("s:S;u:hello;a:") + len(";u:how are you;a:")
    said = "".join(f"{m['content']}\n" for m in expected if m["role"] == "assistant")
    again = "hello\nhow are you\né?\n/clear\nhello\nhow are you\né?\n/exit\nnever\n"
    assert works(*words, stdin=again).out == said + said
    with mock.patch.object(Rows, "can_roll_back", False):  # as with states of fixed size
        assert works(*words, stdin=again).out == said + said
    alone = works(*words, stdin="hello\nhi\n").out
    rest = call(*words, stdin="hello\nbad\n" + "x" * 100 + "\nhi\r\n")
    assert (rest.status, rest.out) == (1, alone)
    assert "refuses these messages: no bad\nthis message is left out; /reset begins" in rest.err
    assert "tokens, but the cache of this model holds 96" in rest.err
    full = works(*words[:3], stdin="x" * 80)
    assert "the cache of the model is full: /reset begins" in full.err


def test_refusals(artifact: Path, tmp_path: Path) -> None:
    words = ["generate", artifact, "--chat"]
    assert "standard input is not text in UTF-8" in refused(*words, stdin=b"\xff\n")
    assert "leave --num-beams" in refused(*words, "--num-beams", "2")
    irc.compile(write_checkpoint(tmp_path / "m"), tmp_path / "a", backend="onnx")
    message = refused("generate", tmp_path / "a", "--chat")
    assert "has no chat template, which --chat needs: add chat_template.jinja" in message


def test_a_terminal(artifact: Path) -> None:
    """Ctrl-C stops an answer, or empties the line that is typed; Ctrl-D ends."""

    class Interrupting(io.StringIO):
        def write(self, text: str, /) -> int:
            before, count = self.tell(), super().write(text)
            if before < 4 <= before + count:
                signal.raise_signal(signal.SIGINT)
            return count

    model, out, err = open_model(artifact), Interrupting(), io.StringIO()
    typed = mock.Mock(side_effect=["hello", KeyboardInterrupt, "hello", EOFError])
    terminal = mock.Mock(isatty=lambda: True)
    with (
        mock.patch("sys.stdin", terminal),
        mock.patch("builtins.input", typed),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        assert chat(model, model.defaults.changed({"max_new_tokens": 20})) == 0
    first, empty, second, end = out.getvalue().split("\n", 3)
    whole = works("generate", artifact, "--chat", "--max-new-tokens", "20", stdin="hello\n").out
    assert whole.startswith(first)
    assert 3 < len(first) < len(whole) - 5
    assert (empty, end, len(second) > 5) == ("", "\n", True)
    assert err.getvalue().startswith("/reset begins")
