"""The prompt for every engine, and the line that it prints."""

from __future__ import annotations

import json
from statistics import median


def prompt_ids(count: int) -> list[int]:
    """Token ids that any vocabulary of the benchmark has."""
    return [(37 * i) % 991 + 1 for i in range(count)]


def report(load: float, prefills: list[float], decodes: list[float]) -> None:
    """Print seconds: loading, the best prefill, and the median decode step."""
    print(json.dumps({"load": load, "prefill": min(prefills), "decode": median(decodes)}))
