"""`Server`: OpenAI's API over HTTP, as an application of ASGI."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from ..errors import Error, printable
from ..generation.embeddings import embed
from .engine import Engine, Event, QueueFull, Unavailable
from .engine import Request as Generation
from .metrics import CONTENT_TYPE, Metrics
from .options import ServeOptions
from .requests import Reader
from .responses import ApiError, Completion, Json, embeddings, encoded

if TYPE_CHECKING:
    from ..generation.model import Model

CLIENT_LEFT = 499  # the status in logs, where nobody reads one
_BODY_SECONDS = 30  # for a body to arrive
_RETRY_SECONDS = "1"
_WAIT_SECONDS = 0.05
_LATE = "the deadline of the request has passed"


class Server:
    """Answers HTTP requests by a model: `engine` continues prompts, without one it embeds texts.

    `log` takes the line of each request, and what `report` says of an exception that is a defect.
    """

    def __init__(
        self,
        model: Model,
        engine: Engine | None,
        options: ServeOptions,
        log: Callable[[str], None],
        report: Callable[[Exception], str] = repr,
    ) -> None:
        self.model, self.engine, self.options = model, engine, options
        self.log, self.report = log, report
        capacity = engine.capacity if engine else 0
        self.reader = Reader(model, options.name, capacity, options.max_new_tokens)
        self.metrics, self.created = Metrics(), int(time.time())
        self.embedder = ThreadPoolExecutor(1)  # the program takes one call at a time
        self.embedding, self.stopping = 0, False  # requests; whether no more are accepted
        self.reported: set[type[Exception]] = set()  # of which there is a report
        self.page = _page()
        gets = {
            "/": self._get_page,
            "/health": self._get_health,
            "/metrics": self._get_metrics,
            "/v1/models": self._get_models,
            "/v1/models/{name:path}": self._get_models,
        }
        posts = {
            "/v1/completions": partial(self._generate, self.reader.completion),
            "/v1/chat/completions": partial(self._generate, self.reader.chat),
            "/v1/embeddings": self._embed,
        }
        routes = [Route(path, answer) for path, answer in gets.items()]
        routes += [Route(path, answer, methods=["POST"]) for path, answer in posts.items()]
        self.router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, count it and log it."""
        started, status = time.monotonic(), CLIENT_LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope["app"] = self  # lets the router raise HTTPExceptions
        try:
            self._check_key(scope)
            await self.router(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as error:
            refusal = self._refusal(error)
            response = _json(refusal.body, refusal.status, refusal.headers)
            await response(scope, receive, watched)
        finally:
            route = scope.get("route")
            self.metrics.count(route.path if route else "other", status)
            prompt, new = scope.get("tokens", (0, 0))
            what = printable(f"{scope['method']} {scope['path']}".replace("\n", "\\n"))
            tokens = f"prompt_tokens={prompt} completion_tokens={new}"
            self.log(f"{what} {status} {tokens} seconds={time.monotonic() - started:.3f}")

    @property
    def failure(self) -> Exception | None:
        """Why the engine does not go on."""
        return self.engine.failure if self.engine else None

    def stop(self, grace: float) -> None:
        """Accept no more; returns when all has ended, or was cancelled after `grace` seconds."""
        self.stopping, end = True, time.monotonic() + grace
        if self.engine is not None:
            self.engine.stop(grace)
        while self.embedding and time.monotonic() < end:
            time.sleep(_WAIT_SECONDS)
        self.embedder.shutdown(cancel_futures=True)

    def _check_key(self, scope: Scope) -> None:
        if not self.options.api_key or not scope["path"].startswith("/v1"):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + self.options.api_key.encode()):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            raise ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _refusal(self, error: Exception) -> ApiError:
        """What the client learns of an exception."""
        match error:
            case ApiError():
                return error
            case HTTPException():  # an unknown path, or another method
                headers = dict(error.headers or {})
                return ApiError(error.status_code, error.detail, "not_found", headers=headers)
            case Unavailable():
                is_full, headers = isinstance(error, QueueFull), {"retry-after": _RETRY_SECONDS}
                status, code = (429, "rate_limit_exceeded") if is_full else (503, "unavailable")
                return ApiError(status, str(error), code, headers=headers)
            case Error():
                return ApiError(400, str(error))
            case _:
                is_new = type(error) not in self.reported
                self.reported.add(type(error))
                self.log(printable(self.report(error) if is_new else repr(error)))
                return ApiError(500, "the server failed at this request; see its log", "defect")

    async def _get_page(self, _: Request) -> Response:
        return self.page

    async def _get_health(self, _: Request) -> Response:
        if self.failure is not None:
            raise Unavailable(str(self.failure))
        return _json({"status": "ok"})

    async def _get_metrics(self, _: Request) -> Response:
        text = self.metrics.text(self.engine.stats if self.engine else None)
        return Response(text, media_type=CONTENT_TYPE)

    async def _get_models(self, request: Request) -> Response:
        card = {"id": self.options.name, "object": "model"}
        card |= {"created": self.created, "owned_by": "irc"}
        if (name := request.path_params.get("name")) is None:
            return _json({"object": "list", "data": [card]})
        self.reader.check_model(name)
        return _json(card)

    async def _generate(self, read: Callable[[bytes], Completion], request: Request) -> Response:
        if self.engine is None:
            raise ApiError(404, "this model continues no text; use /v1/embeddings", "not_found")
        answer = await asyncio.to_thread(read, await self._body(request))
        run = _Run(self.engine, answer, self.options.timeout, request)
        await run.start()
        if answer.stream:
            return _Stream(run)
        try:
            async for _ in run.changes():
                pass
        finally:
            run.end()
        return _json(answer.whole())

    async def _embed(self, request: Request) -> Response:
        if self.engine is not None:
            message = "this model continues text; use /v1/completions or /v1/chat/completions"
            raise ApiError(404, message, "not_found")
        data = await self._body(request)
        prompts, base_64 = await asyncio.to_thread(self.reader.embedding, data)
        if self.embedding > self.options.queue:
            raise QueueFull(f"{self.options.queue} requests wait already; try again later")
        loop, tokens = asyncio.get_running_loop(), sum(map(len, prompts))
        if self.stopping:
            raise Unavailable("the server is about to end")

        def work() -> bytes:
            vectors = embed(self.model, prompts)
            return encoded(embeddings(self.options.name, vectors, tokens, base_64))

        self.embedding += 1
        try:
            async with asyncio.timeout(self.options.timeout):
                body = await loop.run_in_executor(self.embedder, work)
        except TimeoutError:
            raise ApiError(504, _LATE, "timeout") from None
        finally:
            self.embedding -= 1
        request.scope["tokens"] = tokens, 0
        return Response(body, media_type="application/json")

    async def _body(self, request: Request) -> bytes:
        """The body of a request; an ApiError where it is no JSON by its type, too large or slow."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = f"the content type is {kind or 'missing'}; expected application/json"
            raise ApiError(415, message, "unsupported_media_type")
        most, data = self.options.max_body, bytearray()
        message = f"the body has more than {most} bytes, which this server takes; send less"
        too_large = ApiError(413, message, "body_too_large")
        length = request.headers.get("content-length", "0")
        if len(length) > 18 or int(length) > most:
            raise too_large
        seconds = min(_BODY_SECONDS, self.options.timeout)
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        raise too_large
        except TimeoutError:
            message = f"the body did not arrive in {seconds} seconds"
            raise ApiError(408, message, "timeout", headers={"connection": "close"}) from None
        return bytes(data)


class _Run:
    """The continuations of one answer in the engine, until they end or the client leaves."""

    def __init__(
        self, engine: Engine, answer: Completion, seconds: float, request: Request
    ) -> None:
        self.engine, self.answer, self.request = engine, answer, request
        self.deadline = time.monotonic() + seconds
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self.generations: list[Generation] = []
        self.ended = False
        self.watch = self.loop.create_task(self._wait_for_disconnect())

    async def start(self) -> None:
        """Submit every continuation, in a thread: some compile a grammar, which takes time."""
        try:
            await asyncio.to_thread(self._submit)
        except BaseException:
            self.end()
            raise

    def _submit(self) -> None:
        copies, count = self.answer.copies, len(self.answer.choices)
        if count > self.engine.queue:
            message = f"the request asks for {count} answers; this server takes {self.engine.queue}"
            raise ApiError(400, f"{message} (--queue)", param="n")
        for index in range(count):
            if time.monotonic() > self.deadline:  # grammars take long
                raise ApiError(504, _LATE, "timeout")
            at, row = divmod(index, copies)
            prompt, settings = self.answer.prompts[at], self.answer.settings[at]
            deliver = partial(self._deliver, index)
            generation = self.engine.submit(prompt, settings, deliver, self.deadline, row)
            self.generations.append(generation)
            if self.ended:
                self.end()
                return

    def _deliver(self, index: int, event: Event) -> None:
        """Take an event in the engine's thread."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

    async def _wait_for_disconnect(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self.events.put_nowait(None)
        self.end()

    async def changes(self) -> AsyncIterator[set[int]]:
        """The choices that have changed, as often as events arrive, until all are complete.

        An ApiError where one fails.
        """
        choices = self.answer.choices
        while any(choice.finish is None for choice in choices):
            arrived = [await self.events.get()]
            while not self.events.empty():
                arrived.append(self.events.get_nowait())
            changed: set[int] = set()
            for item in arrived:
                if item is None:
                    raise ClientDisconnect
                choices[item[0]].add(item[1])
                changed.add(item[0])
            self.request.scope["tokens"] = self.answer.counts
            yield changed

    def end(self) -> None:
        """Cancel what still runs; any thread may call it."""
        self.ended = True
        for generation in [*self.generations]:
            self.engine.cancel(generation)
        self.loop.call_soon_threadsafe(self.watch.cancel)


class _Stream(Response):
    """The answer as server-sent events."""

    def __init__(self, run: _Run) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each part of the continuations as soon as it is certain."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async for body in self._bodies():
                part = b"data: " + encoded(body) + b"\n\n"
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        finally:
            self.run.end()

    async def _bodies(self) -> AsyncIterator[Json]:
        answer = self.run.answer
        try:
            async for changed in self.run.changes():
                for chunk in filter(None, map(answer.chunk_of, changed)):
                    yield chunk
        except ApiError as failure:
            yield failure.body
        else:
            if last := answer.last_chunk():
                yield last


def _json(body: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encoded(body), status, headers, "application/json")


def _page() -> Response:
    """The page; it may use nothing but itself and this server."""
    page = Path(__file__).with_name("page.html").read_bytes()
    policy = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'"
    policy += "; frame-ancestors 'none'"
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
    return Response(page, headers=headers, media_type="text/html; charset=utf-8")
