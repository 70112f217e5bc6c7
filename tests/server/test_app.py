"""OpenAI's API over HTTP: bodies, refusals, the log and the metrics, with an engine of stubs."""

import asyncio
import base64
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest

from irc.errors import Error
from irc.generation.settings import GenerationSettings
from irc.generation.tokenizer import Tokenizer
from irc.server.app import Server
from irc.server.engine import FinishEvent, QueueFull, Stats, TokenEvent, Unavailable
from irc.server.options import ServeOptions
from tests.tiny_checkpoint import write_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BROKEN = {"type": "function", "function": {"name": "f", "parameters": {"$defs": 5}}}
HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"


class Client:
    """Requests to a server whose engine answers `text` up to the limit, then with `reason`.

    `asked` are (prompt, settings, row) of the engine, `rendered` what the chat template got, and
    `lines` the log.
    """

    def __init__(self, folder: Path, text: str = "hello", **options: Any) -> None:
        write_tokenizer(folder)
        self.text, self.reason, self.refusal = text, "stop", None
        self.rendered: Any = None
        self.variables: Any = None
        self.asked: list[tuple[Any, GenerationSettings, int]] = []
        self.lines: list[str] = []
        self.tokenizer = Tokenizer(folder)
        template = SimpleNamespace(render=self.render)
        self.model: Any = SimpleNamespace(
            tokenizer=self.tokenizer, chat_template=template, defaults=GenerationSettings()
        )
        engine: Any = SimpleNamespace(submit=self.submit, cancel=lambda _: None)
        engine.capacity, engine.queue, engine.failure, engine.stats = 80, 8, None, Stats(4)
        self.engine = engine
        chosen = ServeOptions(name="stub", **options)
        self.server = Server(self.model, engine, chosen, self.lines.append)

    def render(self, messages: Any, /, tools: Any, **variables: Any) -> str:
        """The contents, a line each."""
        self.rendered, self.variables = (messages, tools), variables
        return "\n".join(message["content"] for message in messages)

    def submit(self, prompt: Any, settings: Any, deliver: Any, deadline: float, row: int) -> None:
        """Deliver the events in a thread."""
        if self.refusal is not None:
            raise self.refusal
        self.asked.append((prompt, settings, row))
        ids = self.tokenizer.encode(self.text)
        reason: Any = "length" if settings.max_new_tokens < len(ids) else self.reason

        def answer() -> None:
            for token in ids[: settings.max_new_tokens]:
                word = self.tokenizer.decode([token])
                deliver(TokenEvent(token, word, -0.5, [(token, -0.5), (1, -2.0)]))
            deliver(FinishEvent(reason, "as told", len(prompt), 1))

        threading.Thread(target=answer).start()

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """The answer to one request."""

        async def answer() -> httpx2.Response:
            transport = httpx2.ASGITransport(self.server)
            async with httpx2.AsyncClient(transport=transport, base_url="http://stub") as client:
                return await client.request(method, path, **options)

        return asyncio.run(answer())

    def chat(self, **body: Any) -> Any:
        """The only choice of a chat."""
        answer = self.request("POST", CHAT, json={"messages": HELLO, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def stream(self, **body: Any) -> list[Any]:
        """The chunks of a chat; the last event has to be [DONE]."""
        answer = self.request("POST", CHAT, json={"messages": HELLO, "stream": True, **body})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """A server that says hello."""
    return Client(tmp_path)


def test_prompts_are_texts_or_token_ids_and_copies_are_adjacent(client: Client) -> None:
    for prompt in (["ab", "abc"], [[1, 2], [1, 2, 3]]):
        body = {"prompt": prompt, "n": 2, "max_tokens": 2, "logprobs": 1}
        answer = client.request("POST", TEXTS, json=body).json()
        assert answer["object"] == "text_completion" and answer["model"] == "stub"
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
        named = {"tokens": ["h", "e"], "token_logprobs": [-0.5, -0.5], "text_offset": [0, 1]}
        named["top_logprobs"] = [{"h": -0.5}, {"e": -0.5}]
        ends = {"text": "he", "logprobs": named, "finish_reason": "length"}
        assert answer["choices"] == [{"index": index, **ends} for index in range(4)]
        asked = [(len(prompt), row) for prompt, _, row in client.asked[-4:]]
        assert asked == [(2, 0), (2, 1), (3, 0), (3, 1)]
    client.request("POST", TEXTS, json={"prompt": [1, 2]})
    assert client.asked[-1][0] == [1, 2]


def test_log_probabilities_of_chats(client: Client) -> None:
    content = client.chat(logprobs=True, top_logprobs=2)["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [*"hello"]
    assert content[0]["bytes"] == [104] and len(content[0]["top_logprobs"]) == 2
    assert client.chat(logprobs=True)["logprobs"]["content"][0]["top_logprobs"] == []
    assert client.asked[0][1].logprobs == 2 and client.chat()["logprobs"] is None


def test_fields_become_settings_and_others_are_the_models(client: Client) -> None:
    client.model.defaults = GenerationSettings(temperature=0.25, top_k=7, num_beams=1)
    client.chat(top_p=0.5, seed=4, stop="x", max_completion_tokens=3, user="me", n=None)
    expected = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "seed": 4, "stop": ("x",)}
    assert vars(client.asked[-1][1]).items() >= {**expected, "max_new_tokens": 3}.items()
    client.chat(temperature=1.5)
    client.chat(temperature=1.5)
    (_, first, _), (_, second, _) = client.asked[-2:]
    assert first.temperature == 1.5 and first.seed != second.seed
    assert first.max_new_tokens == 78  # the room that is left


def test_a_format_becomes_a_schema(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    client.chat(response_format={"type": "json_object"})
    client.chat(response_format={"type": "text"}, regex="[ab]+")
    first, second, third = (settings for _, settings, _ in client.asked)
    assert json.loads(first.json_schema) == schema and third.regex == "[ab]+"
    assert json.loads(second.json_schema) == {"type": "object"} and third.json_schema == ""


def test_messages_reach_the_template_as_it_reads_them(client: Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "!"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    client.chat(messages=messages, tools=[TOOL])
    (first, second, third), tools = client.rendered
    assert first == {"role": "system", "content": "be!"} and third == messages[2]
    assert second["tool_calls"][0]["function"]["arguments"] == {"a": 1} and tools == [TOOL]
    variables = {"enable_thinking": False, "messages": [], "tools": []}
    client.chat(tools=[TOOL], tool_choice="none", chat_template_kwargs=variables)
    assert client.rendered[0] and client.rendered[1] is None
    assert client.variables["enable_thinking"] is False


@pytest.mark.parametrize("choice", ["auto", "required", {**TOOL, "function": {"name": "add"}}])
def test_calls_of_tools(tmp_path: Path, choice: Any) -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    text = f"Well <tool_call>{call}</tool_call>" if choice == "auto" else f"[{call}]"
    client = Client(tmp_path, text)
    said = client.chat(tools=[TOOL], tool_choice=choice)
    function = said["message"]["tool_calls"][0]["function"]
    assert said["finish_reason"] == "tool_calls" and function["name"] == "add"
    assert json.loads(function["arguments"]) == {"a": 1}
    assert said["message"]["content"] == ("Well" if choice == "auto" else None)
    *_, settings, _ = client.asked[-1]
    if choice == "auto":
        assert settings.skip_special_tokens is False and not settings.json_schema
    else:
        schema = json.loads(settings.json_schema)["items"]["anyOf"][0]["properties"]
        assert schema == {"name": {"const": "add"}, "arguments": {"type": "object"}}
        cut = client.chat(tools=[TOOL], tool_choice=choice, max_tokens=9)
        assert cut["finish_reason"] == "length" and cut["message"]["content"] == text[:9]
    deltas = [chunk["choices"][0]["delta"] for chunk in client.stream(tools=[TOOL])]
    assert "".join(delta.get("content") or "" for delta in deltas) in ("Well", "Well ", "")
    if choice == "auto":
        client.text = f"\n {text} all"
        deltas = [chunk["choices"][0]["delta"] for chunk in client.stream(tools=[TOOL])]
        said = "".join(delta.get("content") or "" for delta in deltas)
        assert said.split() == ["Well", "all"]
    assert deltas[0]["role"] == "assistant" and deltas[-1]["tool_calls"][0]["index"] == 0
    assert client.chat()["message"] == {"role": "assistant", "content": client.text}


def test_a_stream_is_the_answer_in_parts(client: Client) -> None:
    *parts, usage = client.stream(stream_options={"include_usage": True}, n=2, logprobs=True)
    for index in range(2):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert "".join(choice["delta"]["content"] for choice in mine) == "hello"
        assert ["role" in choice["delta"] for choice in mine] == [True] + [False] * (len(mine) - 1)
        assert sum(len(choice["logprobs"]["content"]) for choice in mine) == 5
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 10
    assert {part["usage"] for part in parts} == {None}


def test_embeddings(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts = "/v1/embeddings", {"input": ["ab", "c"]}
    assert client.request("POST", path, json=texts).status_code == 404
    client.server.engine = None

    def vectors(_: Any, prompts: list[list[int]]) -> Any:
        return np.array([[len(prompt), 0.1] for prompt in prompts], np.float32)

    monkeypatch.setattr("irc.server.app.embed", vectors)
    answer = client.request("POST", path, json=texts).json()
    assert [entry["embedding"] for entry in answer["data"]] == [
        [2, pytest.approx(0.1)],
        [1, pytest.approx(0.1)],
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    body = {"input": [1, 2, 3], "encoding_format": "base64"}
    (entry,) = client.request("POST", path, json=body).json()["data"]
    decoded = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    assert decoded.tolist() == [3, np.float32(0.1)]
    assert client.request("POST", TEXTS, json={"prompt": "x"}).status_code == 404


REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    (TEXTS, {"max_tokens": 10**9}, "max_tokens"),
    (TEXTS, {"max_tokens": -1}, "max_tokens"),
    (TEXTS, {"prompt": "x" * 99}, "max_tokens"),
    (TEXTS, {"temperature": -1}, "temperature"),
    (TEXTS, {"temperature": "hot"}, "temperature"),
    (TEXTS, {"top_p": 2}, "top_p"),
    (TEXTS, {"stop": 5}, "stop"),
    (TEXTS, {"stop": ["a"] * 65}, None),
    (TEXTS, {"n": 0}, "n"),
    (TEXTS, {"prompt": ["x"] * 100, "n": 2}, "n"),
    (TEXTS, {"logit_bias": {"1": 5}}, "logit_bias"),
    (TEXTS, {"prompt": ["x", 1]}, "prompt"),
    (TEXTS, {"prompt": []}, "prompt"),
    (TEXTS, {"prompt": None}, None),
    (TEXTS, {"model": "gpt-4o"}, "model"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "king"}]}, "messages[0].role"),
    (
        CHAT,
        {"messages": [{**HELLO[0], "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"tools": [{**TOOL, "type": "web_search"}]}, "tools[0].type"),
    (CHAT, {"top_logprobs": 50}, "top_logprobs"),
    (CHAT, {"tools": [BROKEN], "tool_choice": "required"}, "tools"),
    (TEXTS, {"stop": "x" * 2000}, None),
    (TEXTS, {"temperature": 10**400}, None),
    (TEXTS, {"n": 9}, "n"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_a_wrong_field_is_named(client: Client, path: str, body: Any, param: str | None) -> None:
    usual = {"prompt": "x"} if path == TEXTS else {"messages": HELLO}
    answer = client.request("POST", path, json={**usual, **body})
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert error["type"] == "invalid_request_error" and client.asked == []
    assert error["param"] == param and error["message"], error


JSON = {"content-type": "application/json"}
BODIES: list[tuple[bytes, dict[str, str], int]] = [
    (b"", JSON, 400),
    (b"[1]", JSON, 400),
    (b'{"prompt": "\xff"}', JSON, 400),
    (b'{"prompt": "\\ud800"}', JSON, 400),
    (b'{"prompt": "x", "temperature": NaN}', JSON, 400),
    (b'{"prompt": "x", "temperature": 1e999}', JSON, 400),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", JSON, 400),
    (b"[" * 200_000, JSON, 400),
    (b'{"prompt": "' + b"x" * 300_000 + b'"}', JSON, 413),
    (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415),
]


@pytest.mark.parametrize(("body", "headers", "status"), BODIES)
def test_a_wrong_body_is_refused(tmp_path: Path, body: bytes, headers: Any, status: int) -> None:
    client = Client(tmp_path, max_body=250_000)
    answer = client.request("POST", TEXTS, content=body, headers=headers)
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert client.chat()


def test_unknown_paths_and_methods_and_absent_templates(client: Client) -> None:
    assert client.request("GET", "/v1/nothing").json()["error"]["code"] == "not_found"
    answer = client.request("GET", TEXTS)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert client.request("GET", "/v1/models/other").status_code == 404
    assert client.request("GET", "/v1/models/stub").json()["id"] == "stub"
    client.model.chat_template = None
    answer = client.request("POST", CHAT, json={"messages": HELLO})
    assert answer.json()["error"]["code"] == "no_chat_template"


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (QueueFull("many wait"), 429, "rate_limit_error"),
        (Unavailable("it ends"), 503, "server_error"),
        (Error("no such token"), 400, "invalid_request_error"),
        (ZeroDivisionError("oh"), 500, "server_error"),
        ("deadline", 504, "server_error"),
        ("cancelled", 503, "server_error"),
        ("refused", 400, "invalid_request_error"),
        ("error", 500, "server_error"),
    ],
)
def test_what_the_engine_fails_with(client: Client, failure: Any, status: int, kind: str) -> None:
    is_late = isinstance(failure, str)  # while it answers
    client.reason, client.refusal = (failure, None) if is_late else ("stop", failure)
    answer = client.request("POST", CHAT, json={"messages": HELLO})
    assert answer.status_code == status and answer.json()["error"]["type"] == kind
    assert ("retry-after" in answer.headers) == (status in (429, 503) and not is_late)
    assert ("oh" in answer.text, "oh" in client.lines[0]) == (False, status == 500 and not is_late)
    if is_late:
        assert client.stream()[-1]["error"]["type"] == kind


def test_a_key_is_needed_for_the_model_only(tmp_path: Path) -> None:
    client = Client(tmp_path, api_key="ключ")
    for given in ({}, {"authorization": "Bearer x"}, {"authorization": "ключ".encode()}):
        answer = client.request("GET", "/v1/models", headers=given)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    headers = {"authorization": "Bearer ключ".encode()}
    assert client.request("GET", "/v1/models", headers=headers).status_code == 200
    assert {client.request("GET", path).status_code for path in ("/", "/health", "/metrics")} == {
        200
    }


def test_the_log_has_one_line_per_request_without_control_characters(client: Client) -> None:
    client.chat()
    tokens = "prompt_tokens=2 completion_tokens=5"
    assert re.fullmatch(rf"POST {CHAT} 200 {tokens} seconds=0\.\d{{3}}", client.lines[-1])
    client.request("GET", "/%1b[31m%0aPOST /")
    assert len(client.lines) == 2 and client.lines[-1].startswith("GET /\\x1b[31m\\nPOST / 404")


SAMPLE = re.compile(r'([a-z_]+)(\{[a-z]+="[^"\n]*"(?:,[a-z]+="[^"\n]*")*\})? (\S+)')


def test_metrics_follow_the_format_of_prometheus(client: Client) -> None:
    client.chat()
    client.request("GET", '/..%22"secret')
    client.engine.stats.first_token.observe(0.07)
    answer = client.request("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    types: dict[str, str] = {}
    values: dict[str, float] = {}
    assert answer.text.endswith("\n")
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, types[name] = line.split()
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            family = match[1] if match[1] in types else match[1].rpartition("_")[0]
            assert types[family] in ("counter", "gauge", "histogram")
            assert match[1] + (match[2] or "") not in values, "a sample occurs twice"
            values[match[1] + (match[2] or "")] = float(match[3])
    assert values[f'irc_http_requests_total{{path="{CHAT}",status="200"}}'] == 1
    assert values['irc_http_requests_total{path="other",status="404"}'] == 1
    buckets = [v for k, v in values.items() if k.startswith("irc_first_token_seconds_bucket")]
    assert (
        buckets == sorted(buckets) and buckets[-1] == values["irc_first_token_seconds_count"] == 1
    )
