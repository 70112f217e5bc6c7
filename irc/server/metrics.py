"""`Metrics`: the text of /metrics, in the format of Prometheus, version 0.0.4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate

from .engine import Histogram, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# the field of Stats -> the name of its metric, the type, the help
_NUMBERS = {
    "slots": ("irc_slots", "gauge", "Requests that can run at once."),
    "running": ("irc_requests_running", "gauge", "Requests that have a slot."),
    "waiting": ("irc_requests_waiting", "gauge", "Requests that wait for a slot."),
    "steps": ("irc_steps_total", "counter", "Steps of the engine."),
    "prompt_tokens": ("irc_prompt_tokens_total", "counter", "Tokens of prompts that were read."),
    "completion_tokens": ("irc_completion_tokens_total", "counter", "New tokens."),
}
_HISTOGRAMS = {
    "first_token": ("irc_first_token_seconds", "From a request to its first token."),
    "token_gap": ("irc_token_gap_seconds", "Between two tokens of a request."),
}


class Metrics:
    """Counts of HTTP requests by path and status."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()

    def count(self, path: str, status: int) -> None:
        """Count an answered request; `path` is one of few."""
        self._requests[path, status] += 1

    def text(self, stats: Stats | None) -> str:
        """Everything that is counted, with what the engine counts."""
        counts = sorted(self._requests.items())
        samples = [(f'{{path="{path}",status="{status}"}}', n) for (path, status), n in counts]
        lines = [*_family("irc_http_requests_total", "counter", "Answered requests.", samples)]
        if stats is not None:
            for field, (name, kind, text) in _NUMBERS.items():
                lines += _family(name, kind, text, [("", getattr(stats, field))])
            ends = [(f'{{reason="{reason}"}}', n) for reason, n in sorted(stats.finished.items())]
            lines += _family("irc_requests_finished_total", "counter", "Ended requests.", ends)
            for field, (name, text) in _HISTOGRAMS.items():
                lines += _family(name, "histogram", text, _histogram(getattr(stats, field)))
        return "\n".join(lines) + "\n"


def _histogram(histogram: Histogram) -> Iterator[tuple[str, float]]:
    bounds = [*map(repr, histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
        yield f'_bucket{{le="{bound}"}}', count
    yield "_sum", histogram.sum
    yield "_count", histogram.count


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    """The lines of a metric; `samples` are (suffix and labels, value)."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield from (f"{name}{what} {value}" for what, value in samples)
