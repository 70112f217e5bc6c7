"""`Engine`: answers many requests at once in the rows of one program (continuous batching).

Rows 0 to n-1 of the program's states belong to n requests that are decoded, and row n to the one
whose prompt is read. A step reads a piece of that prompt, and adds a token to each of the others.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ..backends.base import Port, Program
from ..errors import Error
from ..generation.inputs import cache_range, check_prompt, multiple_of, rounded, vocabulary
from ..generation.model import Model
from ..generation.pages import PAGES, PagePool
from ..generation.rows import Rows, check_language_model
from ..generation.search import Beams, Sampled
from ..generation.settings import GenerationSettings
from ..ops import Rope

Array: TypeAlias = np.ndarray[Any, Any]
Reason: TypeAlias = Literal["stop", "length", "cancelled", "deadline", "refused", "error"]

SLOTS = 16  # by default
_INPUTS = {"input_ids", "positions", "past_lengths", "lengths", "logit_positions", PAGES}
_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_MESSAGES = {
    "cancelled": "the request was cancelled",
    "deadline": "the deadline of the request has passed",
    "error": "the events of the request could not be delivered",
}


class Unavailable(Error):
    """The engine takes no request now."""


class QueueFull(Unavailable):
    """As many requests wait as may."""


class TokenEvent(NamedTuple):
    """A new token, and the text that it completes, which may be empty.

    `logprob` is its log-probability, `top` the best tokens with theirs, where the settings have
    `logprobs`.
    """

    token: int
    text: str
    logprob: float
    top: list[tuple[int, float]]


class FinishEvent(NamedTuple):
    """The last event of a request."""

    reason: Reason
    message: str
    prompt_tokens: int
    completion_tokens: int


Event: TypeAlias = TokenEvent | FinishEvent


@dataclass
class Histogram:
    """Numbers of observations, by the first of `bounds` that they do not exceed; others last."""

    bounds: tuple[float, ...] = _BOUNDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    sum: float = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self.counts)


@dataclass
class Stats:
    """What an engine has done, and what it does now.

    `first_token` are the seconds from the arrival of a request to its first token, `token_gap`
    those between two of its tokens. `running` requests have a slot, `waiting` ones have none.
    """

    slots: int
    finished: dict[Reason, int] = field(default_factory=dict[Reason, int])
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    waiting: int = 0
    running: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    token_gap: Histogram = field(default_factory=Histogram)


@dataclass(eq=False)
class Request:
    """A prompt with its continuation so far; only `Engine` changes it."""

    prompt: list[int]
    search: Sampled
    deliver: Callable[[Event], None]
    deadline: float
    at: float  # the time of its arrival, later of its last token
    read: int = 0  # tokens of the prompt that are in the states
    tokens: int = 0  # new ones
    last: int = 0  # token
    pages: int = 0  # of a pool, at most
    interrupted: Reason | None = None  # why it ends before the next step
    finished: bool = False
    failed: bool = False  # its logits may be NaN


class Engine:
    """Requests over the rows of a model's program. `start` begins the thread that answers them.

    `slots` is the number of rows, by default 16 or as many as the program takes; `piece` the most
    tokens of a prompt that are read between two tokens of the other requests; `queue` the number of
    requests that may wait. `capacity` is the most tokens of a prompt and its answer, at most what
    the program was compiled for; 0: no limit. `cache_tokens` are those of all requests together, of
    a program with a pool of pages: a request waits until there are pages for its most tokens.
    `failure` is what a step raised: the states are unknown then, and no step follows. An Error
    where a program cannot be served.
    """

    def __init__(
        self,
        model: Model,
        slots: int | None = None,
        piece: int = 256,
        queue: int = 256,
        capacity: int = 0,
        cache_tokens: int = 0,
    ) -> None:
        self.model, self.queue = model, queue
        program, dims = model.program, model.dims
        ids = _checked_ids(program)
        self.slots = _slots(ids, dims, slots)
        name, multiple = multiple_of(ids.shape[1]) or ("", 1)
        longest = dims[name][2] if name in dims else piece
        self.piece = max(1, min(piece // multiple, longest)) * multiple
        limits = cache_range(program.ports, dims)
        # a call of one token needs room for `multiple`
        most = (capacity, limits[1] - multiple + 1, *_rope_limits(model))
        self.capacity = min((limit for limit in most if limit > 0), default=0)
        pool = PagePool(program, cache_tokens) if cache_tokens else None
        if pool is not None:
            self.capacity = min(self.capacity, pool.free_tokens)
        room = rounded(self.capacity + multiple - 1, limits)
        self.rows = Rows.empty(program, dims, self.slots, room, pool)
        self.failure: Exception | None = None
        self._stats = Stats(self.slots)
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._decoding: list[Request] = []  # by row
        self._reading: Request | None = None  # the row behind
        self._events: list[tuple[Request, Event]] = []  # of the present step
        self._end = math.inf  # when the last request is cancelled
        self._thread = threading.Thread(target=self._run, name="irc engine", daemon=True)

    def start(self) -> None:
        """Begin to answer requests."""
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        settings: GenerationSettings,
        deliver: Callable[[Event], None],
        deadline: float = math.inf,
        row: int = 0,
    ) -> Request:
        """Let a request wait for a slot; any thread may call it.

        `deliver` is called in the engine's thread with a TokenEvent for every token, and last with
        one FinishEvent. `deadline` is a time of time.monotonic(). Answers to one prompt with one
        seed differ by `row`. Raises Unavailable, QueueFull, and an Error about a request that can
        not be answered.
        """
        self._check_open()
        check_prompt(prompt_ids, vocabulary(self.model.program.ports))
        new = settings.limit(len(prompt_ids))
        if 0 < self.capacity < len(prompt_ids) + new:
            raise Error(
                f"the prompt has {len(prompt_ids)} tokens and max_new_tokens is {new}, but this "
                f"server holds {self.capacity} tokens of a request; shorten the prompt, or ask "
                "for fewer tokens"
            )
        search = self.model.search(prompt_ids, settings, row)
        if isinstance(search, Beams):
            raise Error(f"num_beams is {search.width}, but the server has no beam search; give 1")
        request = Request(list(prompt_ids), search, deliver, deadline, time.monotonic())
        if self.rows.pages is not None:
            request.pages = self.rows.pages.pool.layout.pages(len(prompt_ids) + new)
        with self._changed:
            self._check_open()
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def cancel(self, request: Request) -> None:
        """End a request before the next step, unless it has ended; any thread may call it."""
        request.interrupted = "cancelled"

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no new requests, and cancel those that run after the grace; returns at the end."""
        with self._changed:
            self._end = min(self._end, time.monotonic() + grace_seconds)
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def stats(self) -> Stats:
        """The counts so far, and the requests of now."""
        finished, waiting = dict(self._stats.finished), len(self._waiting)
        return replace(self._stats, finished=finished, waiting=waiting, running=len(self._running))

    def turn(self) -> None:
        """Do one step: deliver its events, or set `failure` and end all requests."""
        try:
            self._step()
        except Exception as error:
            self._fail(error)
        self._publish()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._ends)
                if not (self._waiting or self._running):
                    return
            self.turn()

    @property
    def _running(self) -> list[Request]:
        """The requests that have rows, by row."""
        return [*self._decoding, *filter(None, [self._reading])]

    @property
    def _ends(self) -> bool:
        return self.failure is not None or self._end < math.inf

    def _check_open(self) -> None:
        if self.failure is not None:
            raise Unavailable(f"the server has failed: {self.failure}; start it again")
        if self._end < math.inf:
            raise Unavailable("the server is about to end")
        if len(self._waiting) >= self.queue:
            raise QueueFull(f"{self.queue} requests wait already; try again later")

    def _step(self) -> None:
        """Change the states of all requests; their events wait until it has succeeded."""
        self._interrupt()
        if self._reading is None and self._waiting and self._has_room(self._waiting[0]):
            self._reading = self._waiting.popleft()
        reading, decoding = self._reading, self._decoding
        piece: list[int] = []
        logits_of_piece = logits = np.zeros((0, 0))
        if reading is not None:
            piece = reading.prompt[reading.read : reading.read + self.piece]
            logits_of_piece = self.rows.step([piece], len(decoding))
        if decoding:
            logits = self.rows.step([[request.last] for request in decoding], 0)
        now = time.monotonic()
        self._stats.steps += 1
        for row, request in enumerate(decoding):
            self._advance(request, logits[row : row + 1], now)
        if reading is not None:
            reading.read += len(piece)
            self._stats.prompt_tokens += len(piece)
            if reading.read == len(reading.prompt):
                self._advance(reading, logits_of_piece, now)
                decoding.append(reading)
                self._reading = None
        self._compact()

    def _has_room(self, request: Request) -> bool:
        """Whether a slot is free, and pages for the most tokens of all requests."""
        if len(self._decoding) >= self.slots:
            return False
        running = [request, *self._decoding]
        pages = self.rows.pages
        return pages is None or sum(each.pages for each in running) <= pages.pool.count

    def _interrupt(self) -> None:
        """End the requests that were cancelled, or whose deadline has passed."""
        now = time.monotonic()
        rest: Reason | None = "cancelled" if now >= self._end else None
        with self._changed:
            for request in (*self._waiting, *self._running):
                late = "deadline" if now >= request.deadline else rest
                if reason := request.interrupted or late:
                    self._finish(request, reason, _MESSAGES[reason])
            if self._events:
                self._waiting = deque(r for r in self._waiting if not r.finished)
        self._compact()

    def _advance(self, request: Request, logits: Array, now: float) -> None:
        """Choose the token after those of a request, from logits [1, V]."""
        search = request.search
        try:
            search.advance(logits)
            token = search.sequences[0][-1]
            text = search.text + search.finish_text() if search.done else search.text
            scored = bool(search.log_probs)  # the settings ask for log-probabilities
            logprob, top = (search.log_probs[-1], search.best[-1]) if scored else (0.0, list[Any]())
        except Exception as error:  # an Error: settings that allow no token
            reason: Reason = "refused" if isinstance(error, Error) else "error"
            self._finish(request, reason, str(error) or repr(error))
            return
        if not math.isfinite(logits[0, token]):
            message = "the model's logits are not numbers (NaN or infinity)"
            self._finish(request, "error", message)
            return
        seconds = self._stats.token_gap if request.tokens else self._stats.first_token
        seconds.observe(now - request.at)
        request.at, request.last = now, token
        request.tokens += 1
        self._stats.completion_tokens += 1
        self._events.append((request, TokenEvent(token, text, logprob, top)))
        if search.done:
            self._finish(request, "length" if search.finish == "length" else "stop", "")

    def _finish(self, request: Request, reason: Reason, message: str) -> None:
        request.finished, request.failed = True, reason not in ("stop", "length")
        event = FinishEvent(reason, message, len(request.prompt), request.tokens)
        self._events.append((request, event))

    def _compact(self) -> None:
        """Let the last rows move into those of requests that have ended, and clear what is free."""
        decoding, reading, used = self._decoding, self._reading, len(self._running)
        kept = [row for row, request in enumerate(decoding) if not request.finished]
        moved = [row for row in kept if row >= len(kept)]
        order = [moved.pop() if decoding[row].finished else row for row in range(len(kept))]
        if reading is not None and not reading.finished:
            order.append(len(decoding))
        if len(order) == used:
            return
        if self.rows.pages is not None:  # nobody else may read NaN
            self.rows.pages.zero([at for at, each in enumerate(self._running) if each.failed])
        self.rows.copy(order, range(len(order)))
        self.rows.clear(range(len(order), used))
        self._decoding = [decoding[row] for row in order[: len(kept)]]
        self._reading = reading if len(order) > len(kept) else None

    def _publish(self) -> None:
        """Deliver the events of a step; a request whose receiver raises ends with the next."""
        for request, event in self._events:
            if isinstance(event, FinishEvent):
                finished = self._stats.finished
                finished[event.reason] = finished.get(event.reason, 0) + 1
            try:
                request.deliver(event)
            except Exception:
                request.deliver, request.interrupted = lambda event: None, "error"
        self._events.clear()

    def _fail(self, error: Exception) -> None:
        """End all requests: the states after a failed step are unknown."""
        with self._changed:
            self.failure = error
            ended = [request for request, _ in self._events]
            requests = dict.fromkeys([*ended, *self._waiting, *self._running])
            self._waiting.clear()
            self._decoding, self._reading = [], None
        self._events.clear()
        for request in requests:
            self._finish(request, "error", f"the server has failed: {error}")


def _checked_ids(program: Program) -> Port:
    """The port `input_ids` [B, S]; an Error about a program that cannot be served."""
    ports = program.ports
    check_language_model(ports)
    others = [port.name for port in ports.inputs if port.name not in _INPUTS]
    if others:
        raise Error(
            "the server continues tokens by language models that irc compile has compiled from a "
            f"checkpoint; this program also has the inputs {', '.join(others)}"
        )
    if not any(port.name == "logits" for port in ports.outputs):
        raise Error("this program returns no logits; compile without --next-tokens to serve it")
    return next(port for port in ports.inputs if port.name == "input_ids")


def _slots(ids: Port, dims: Mapping[str, Sequence[int]], wanted: int | None) -> int:
    """The number of rows; an Error where a call cannot have from one row to so many."""
    name, multiple = multiple_of(ids.shape[0]) or ("", 0)
    least, _, most = dims.get(name, (1, 1, wanted or SLOTS))
    slots = wanted or min(SLOTS, most)
    if multiple != 1 or least > 1 or slots > most:
        rows = f"{least} to {most}" if multiple == 1 else str(ids.shape[0])
        raise Error(
            f"the server needs calls of 1 to {slots} rows, but one of this program takes {rows}; "
            f"compile with --dims B=1:{slots}:{slots}, and for a mesh without dp"
        )
    return slots


def _rope_limits(model: Model) -> list[int]:
    """The positions beyond which the angles of all rows depend on the longest row."""
    module = model.module() if model.module is not None else None
    ropes = [op for op in module.ops() if isinstance(op, Rope)] if module is not None else []
    return [rope.original_positions for rope in ropes if rope.by_length]
