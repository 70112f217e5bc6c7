"""Perplexity, divergence and size of a language model under every quantization scheme.

    python -m benchmarks.quantization_quality [--model FOLDER] [--schemes w4a16,fp8] [--tokens N]

FOLDER is a checkpoint with `calibration.txt` and `heldout.txt`, by default examples/outlier_llama.
It is compiled once per scheme for ONNX Runtime, with the statistics of calibration.txt, and
predicts heldout.txt in windows of 256 tokens; prints a Markdown table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import irc
from irc.artifact.report import weight_bytes
from irc.driver import Artifact
from irc.driver.calibration import calibrate
from irc.generation.quality import Quality, measure_quality
from irc.quantization.schemes import SCHEMES

MODEL = Path(__file__).resolve().parent.parent / "examples" / "outlier_llama"
CACHES = {"kv-int8": "int8", "kv-fp8": "fp8"}
HEADER = ("scheme", "", "weights", "perplexity", "KL, nats per token", "same likeliest token")


class Result(NamedTuple):
    """The bytes of the weights, and the quality against the unquantized model."""

    nbytes: int
    quality: Quality


def main() -> None:
    """Measure the chosen schemes, all by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--schemes", default=",".join([*SCHEMES, *CACHES]))
    parser.add_argument("--tokens", type=int, default=1 << 20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        plain = irc.compile(options.model, place / "plain")
        text = (options.model / "heldout.txt").read_text()
        ids = plain.model.tokenizer.encode(text)[: options.tokens]
        data = options.model / "calibration.txt"
        calibrate(options.model, data, place / "calibration", gram=True)
        base = measure_quality(plain.model, None, ids)
        size = f"{weight_bytes(plain.module) / 1e6:.2f} MB"
        print(_line(HEADER))
        print(_line(["---"] * len(HEADER)))
        print(_line(["none", "", size, f"{base.perplexity:.3f}", "", ""]), flush=True)
        for name in options.schemes.split(","):
            try:
                cells = _cells(name, _measured(name, options.model, place, plain, ids))
            except irc.Error as error:
                cells = [f"`{name}`", "refused: " + str(error).partition("\n")[0], *[""] * 4]
            print(_line(cells), flush=True)


def _measured(name: str, model: Path, place: Path, plain: Artifact, ids: list[int]) -> Result:
    """One scheme, or one dtype of caches."""
    chosen = {"kv_cache": CACHES[name]} if name in CACHES else {"quantize": name}
    calibration = place / "calibration"
    found = irc.compile(model, place / name, calibration=calibration, **chosen)  # type: ignore[arg-type]
    return Result(weight_bytes(found.module), measure_quality(found.model, plain.model, ids))


def _cells(name: str, found: Result) -> list[str]:
    quality = found.quality
    what = f"KV cache in {CACHES[name].upper()}" if name in CACHES else SCHEMES[name].doc
    return [
        f"`--kv-cache {CACHES[name]}`" if name in CACHES else f"`{name}`",
        what,
        f"{found.nbytes / 1e6:.2f} MB",
        f"{quality.increase:+.2%}",
        f"{quality.kl:.4f}",
        f"{quality.top1:.1%}",
    ]


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
