"""The page of `irc show --html` for models of real sizes: bytes, time to write, to open, to search.

    python -m benchmarks.page

Llama of 8B, 70B and 405B, by their config.json alone. A page is opened in a headless Chromium.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoints import config
from irc.backends import get
from irc.driver.history import history_of
from irc.driver.options import checked_options
from irc.driver.pipelines import chosen_pipeline
from irc.driver.sources import find_source
from irc.page.write import page
from irc.report import table
from tests.chromium import CHROMIUM, browser

LARGER = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672}
LARGEST = {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248}
MODELS = {
    "8B": (4, {}),
    "70B": (8, LARGER | {"num_attention_heads": 64}),
    "405B": (8, LARGEST | {"num_attention_heads": 128}),
}
OPENED = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
DRAWN = "new Promise(done => requestAnimationFrame(() => done(performance.now() - start)))"


def written(folder: Path, name: str, backend: str) -> tuple[Path, list[str]]:
    """The page of a model, and its row: bytes, seconds of the passes and of writing it."""
    ranks, changes = MODELS[name]
    source = folder / name
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps(config("8b", "bf16") | changes))
    read = find_source(source, bound=False)
    pipeline = chosen_pipeline(get(backend), read, checked_options({"mesh": f"tp={ranks}"}))
    start = time.perf_counter()
    history = history_of(read.module, pipeline)
    replayed = time.perf_counter()
    text = page(history, f"build/{name}", {"backend": backend})
    seconds = [f"{replayed - start:.1f} s", f"{time.perf_counter() - replayed:.1f} s"]
    path = folder / f"{name}-{backend}.html"
    path.write_text(text, encoding="utf-8")
    row = [name, f"tp={ranks}", backend, f"{len(text.encode()) / 1e6:.2f} MB", *seconds]
    return path, row


def timed(path: Path, folder: Path) -> list[str]:
    """Milliseconds to open a page, of the first and the second search, and of a frame scrolled."""
    took = "(() => {{ const start = performance.now(); {}; return {} }})()"
    with browser(folder) as tab:
        for address in "about:blank", f"{path.as_uri()}#scope=model.layers.0":
            tab.call("Page.navigate", url=address)
            time.sleep(2)
        ms = [tab.value(OPENED)]
        for word in "down_proj", "k_proj":
            search = f"searchFor({word!r})"
            ms.append(tab.value(took.format(search, "performance.now() - start")))
        tab.value("go({scope: '', tab: 'text'})")
        ms.append(tab.value(took.format("document.querySelector('.list').scrollTop = 9000", DRAWN)))
    return [f"{each:.0f} ms" for each in ms]


def main() -> None:
    """Write the pages, open them, print a row for each."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as place:
        for name in MODELS:
            for backend in "onnx", "cuda":
                path, row = written(Path(place), name, backend)
                profile = Path(place) / f"{name}-{backend}"
                rows.append(row + (timed(path, profile) if CHROMIUM else []))
    seen = ["opens in", "first search", "second", "scrolls in"] if CHROMIUM else []
    print(table(rows, ["Llama", "mesh", "backend", "bytes", "passes", "page", *seen]))


if __name__ == "__main__":
    main()
