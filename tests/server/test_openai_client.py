"""A server process under the official client of OpenAI's API."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from tests.fresh import fresh
from tests.server.process import Serving, eventually, serving

openai: Any = pytest.importorskip("openai")
CHAT = [{"role": "user", "content": "Beautiful is"}]


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Any]:
    """A client of the server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: Any, prompt: Any, **more: Any) -> Any:
    """The only choice of a completion."""
    return client.completions.create(model="zen", prompt=prompt, **more).choices[0]


def chat(client: Any, **more: Any) -> Any:
    """A chat, or its stream."""
    return client.chat.completions.create(model="zen", messages=CHAT, **more)


def test_text_is_what_the_model_generates(client: Any, folder: Path) -> None:
    model = irc.load(folder).model
    choice = complete(client, "Explicit is", max_tokens=24)
    assert choice.text == model.generate("Explicit is", max_new_tokens=24) != ""
    assert chat(client, max_tokens=20).choices[0].message.content == model.generate(
        "Beautiful is\n", max_new_tokens=20
    )
    stopped = complete(client, "Beautiful is", max_tokens=50, stop="ugly")
    assert stopped.finish_reason == "stop" and stopped.text == " better than "
    named = complete(client, "Simple is", max_tokens=1, logprobs=5).logprobs
    logits = model.run({"input_ids": [model.tokenizer.encode("Simple is")]})["logits"][0, -1]
    chance = -np.log(np.exp(logits.astype(float) - logits.max()).sum())
    assert named.token_logprobs[0] == pytest.approx(chance, abs=1e-3)
    assert len(named.top_logprobs[0]) == 5


def test_a_stream_has_the_parts_of_the_answer(client: Any) -> None:
    options = {"include_usage": True}
    *parts, last = chat(client, max_tokens=30, stream=True, stream_options=options)
    whole = chat(client, max_tokens=30)
    assert len(parts) > 2 and last.usage == whole.usage
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content


def test_seeds_repeat_samples_and_copies_differ(client: Any) -> None:
    how = {"model": "zen", "temperature": 3.0, "max_tokens": 16, "n": 3, "seed": 5}
    first, second = (client.completions.create(prompt="It", **how).choices for _ in range(2))
    texts = [choice.text for choice in first]
    assert texts == [choice.text for choice in second] and len({*texts}) == 3


def test_a_cancelled_stream_frees_its_slot(client: Any, server: Serving) -> None:
    before = server.metric("cancelled")
    stream = client.completions.create(model="zen", prompt="It", max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    assert eventually(lambda: server.metric("cancelled") == before + 1)
    assert server.metric("irc_requests_running") == 0


def test_tools_are_called_and_formats_kept(client: Any) -> None:
    words = {"type": "string", "enum": ["beautiful", "ugly"]}
    schema = {"type": "object", "properties": {"word": words}, "required": ["word"]}
    schema["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "judge", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "judge"}}
    answer = chat(client, tools=[tool], tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "judge"
    assert json.loads(call.function.arguments)["word"] in words["enum"]
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(client, response_format=format, temperature=2).choices[0]
    assert json.loads(answer.message.content)["word"] in words["enum"]


def test_errors_have_the_classes_of_the_client(client: Any, server: Serving, folder: Path) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x", max_tokens=10**9)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "max_tokens"
    for prompt in ([99999], [-1], [10**30]):
        with pytest.raises(openai.BadRequestError):
            complete(client, prompt, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="schema"):
        complete(client, "x", extra_body={"json_schema": '{"type": 5}'})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="zen", input="x")
    with serving(folder, "--slots", "1", "--queue", "1", "--api-key", "a") as server:
        right, wrong = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in "ab"
        )
        with pytest.raises(openai.AuthenticationError):
            complete(wrong, "x")
        how = {"model": "zen", "prompt": "It", "stream": True, "max_tokens": 500}
        running = right.completions.create(**how)
        next(iter(running))
        waiting = right.completions.create(**how)
        with pytest.raises(openai.RateLimitError) as limited:
            complete(right, "x")
        assert limited.value.response.headers["retry-after"] == "1"
        running.close()
        assert next(iter(waiting))


def test_64_clients_at_once_get_the_answers_that_they_get_alone(client: Any) -> None:
    random = fresh()
    words = ["Beautiful", "is", "better", "than", "Errors", "should", "never", "In", "the", "face"]
    prompts = [" ".join(random.choice(words, 1 + at % 9)) for at in range(64)]

    def answer(prompt: str) -> Any:
        return complete(client, prompt, max_tokens=12, logprobs=2).logprobs

    alone = [*map(answer, prompts)]
    with ThreadPoolExecutor(64) as pool:
        together = [*pool.map(answer, prompts)]
    compared = 0
    for one, other in zip(alone, together, strict=True):
        gaps = [max(best.values()) - min(best.values()) for best in one.top_logprobs]
        certain = next((at for at, gap in enumerate(gaps) if gap < 1e-3), len(gaps))
        assert one.tokens[:certain] == other.tokens[:certain]
        compared += certain
    assert compared > 64 * 6
