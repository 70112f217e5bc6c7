"""Checks cuDNN's attention against numpy on a GPU, and prints its speed.

    python -m tests.cuda.try_cudnn

It needs a GPU, cuda-bindings, nvidia-cudnn-cu13 and nvidia-cudnn-frontend, and takes about a
minute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from irc.backends.cuda.device import CudaDriver, CudaStream
from irc.backends.cuda.execute.cudnn import Cudnn, layouts_of
from irc.backends.cuda.measure import median_us
from irc.backends.cuda.plan.core import Argument, LibraryCall
from irc.backends.cuda.plan.product import Settings
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype
from tests.cuda.library_calls import Array, attention_of

CASES: list[tuple[Settings, bool]] = []
for dtype in ("bf16", "f16"):
    for head, causal, cached, past in (
        (128, 1, 1, True),
        (64, 1, 1, True),
        (128, 1, 0, False),
        (64, 0, 0, False),
        (80, 1, 1, True),
    ):
        sizes = {"batch": 3, "heads": 8, "key_heads": 2, "queries": 130, "keys": 333}
        words = {"dtype": dtype, "head": head, "value": head, "causal": causal, "cached": cached}
        CASES.append(({**sizes, **words, "scale": head**-0.5}, past))
LONG: Settings = {
    "batch": 1,
    "heads": 32,
    "key_heads": 8,
    "queries": 2048,
    "keys": 4096,
    "head": 128,
    "value": 128,
    "dtype": "bf16",
    "causal": 1,
    "cached": 1,
    "scale": 128**-0.5,
}


class Tried:
    """cuDNN on the first GPU."""

    def __init__(self) -> None:
        self.driver, self.stream = CudaDriver(0), CudaStream()
        self.cudnn = Cudnn(self.driver)

    def run(self, settings: Settings, arrays: Sequence[Array], launches: int) -> tuple[float, str]:
        """(microseconds of a call, seconds that its plan took); the last array is the result."""
        places = [self.driver.allocate(array.nbytes) for array in arrays]
        for place, array in zip(places, arrays, strict=True):
            self.stream.upload(place, array.reshape(-1).view(np.uint8))
        call = LibraryCall("cudnn", "attention", tuple(Argument("") for _ in arrays), settings)
        began = time.perf_counter()
        self.cudnn.prepare([call])
        made = time.perf_counter() - began
        enqueue = self.cudnn.bind(call, places)
        enqueue(self.stream.handle)
        self.stream.wait("attention")
        self.driver.zero(places[-1], arrays[-1].nbytes, self.stream.handle)
        graph = self.stream.capture(lambda: enqueue(self.stream.handle))
        us = median_us(self.stream, graph, launches)
        self.stream.download(arrays[-1], places[-1])
        self.stream.wait("attention")
        for place in places:
            self.driver.free(place)
        return us, f"{made:.2f} s to plan"


def arrays_of(settings: Settings, past: bool, first: int | None = None) -> list[Array]:
    """Operands, and memory for the result."""
    rng, dtype = np.random.default_rng(), numpy_dtype(str(settings["dtype"]))
    layouts = layouts_of(settings)
    found = [rng.uniform(-1, 1, np.prod(layout[0])).astype(dtype) for layout in layouts[:3]]
    if past:
        batch, queries, keys = (int(str(settings[n])) for n in ("batch", "queries", "keys"))
        most = keys - queries if first is None else first
        before = rng.integers(0 if first is None else first, most + 1, batch)
        found += [np.full(batch, queries, np.int32), (before + queries).astype(np.int32)]
    return [*found, np.zeros(np.prod(layouts[-1][0]), dtype)]


def main() -> None:
    tried = Tried()
    for settings, past in CASES:
        arrays = arrays_of(settings, past)
        expected = attention_of(settings, arrays[:-1]).astype(np.float32)
        try:
            us, made = tried.run(settings, arrays, 3)
        except Error as failure:
            print(f"FAIL  {failure.message}", flush=True)
            continue
        error = float(np.max(np.abs(arrays[-1].astype(np.float32) - expected))) / 0.01
        verdict = "ok   " if error <= 1 else "WRONG"
        print(f"{verdict} {error:6.3f} {us:7.1f} us, {made}: past {past}, {settings}", flush=True)
    for past, before in ((True, 0), (True, 2048), (False, None)):
        settings = dict(LONG) | ({} if past else {"keys": 2048})
        us, made = tried.run(settings, arrays_of(settings, past, before), 30)
        keys = 2048 * 1024 + 2048 * (before or 0)
        rate = 4 * keys * 4096 / us / 1e6
        lengths = "with lengths" if past else "without lengths"
        print(
            f"2048 queries after {before or 0} keys, {lengths}: {us:.1f} us = {rate:.0f} TFLOP/s, "
            f"{made}",
            flush=True,
        )


if __name__ == "__main__":
    main()
