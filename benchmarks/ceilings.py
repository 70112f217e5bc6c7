"""Peak rates of one GPU: bytes and products per second, the cost of a kernel. Needs torch.

    python -m benchmarks.ceilings [-o FILE]

The device constants of irc/analysis/h200.json come from here. Random data, CUDA graphs, medians.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import graph_us

SIZE = 8192
TINY = 100  # short kernels, or short rows of them, in one graph


def median_us(work: Callable[[], Any]) -> float:
    """Median microseconds of a graph of `work`."""
    return graph_us(work, torch.cuda.Stream())


def copy_gb_s() -> float:
    """Bytes read and written per nanosecond by a kernel that reads and writes each once."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: torch.neg(source, out=target)) / 1e3


def product_tflops(name: str) -> float:
    """Operations per picosecond of a product of large square matrices of a dtype."""
    x, y = (torch.randn(SIZE, SIZE, device="cuda") for _ in range(2))
    if name == "f8e4m3":
        a, b = (m.to(torch.float8_e4m3fn) for m in (x, y))
        one = torch.ones((), device="cuda")
        us = median_us(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16))
    elif name == "i8":
        a, b = ((16 * m).clamp(-127, 127).to(torch.int8) for m in (x, y))
        us = median_us(lambda: torch._int_mm(a, b.t()))
    else:
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[name]
        a, b = x.to(kind), y.to(kind)
        us = median_us(lambda: a @ b)
    return 2 * SIZE**3 / us / 1e6


def kernel_us() -> dict[str, float]:
    """Microseconds per kernel in rows of short ones: of one element, and of row lookups."""
    x = torch.zeros(1, device="cuda")
    table = torch.randn(1 << 17, 4096, device="cuda").bfloat16()
    ids = torch.randint(0, 1 << 17, (TINY, 1), device="cuda").int()

    def tiny() -> None:
        for _ in range(TINY):
            x.add_(1)

    def lookups() -> list[torch.Tensor]:
        return [table.index_select(0, torch.add(row, 1).clamp_(0, 1 << 16)) for row in ids]

    return {
        "one element": round(median_us(tiny) / TINY, 2),
        "add, clamp, row lookup": round(median_us(lookups) / TINY / 3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    free, total = torch.cuda.mem_get_info()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "memory_bytes": total,
        "context_bytes": total - free,
        "copy_gb_s": round(copy_gb_s()),
        "kernel_us": kernel_us(),
        "peak_tflops": {},
    }
    for name in ("bf16", "f16", "f32", "f8e4m3", "i8"):
        try:
            found["peak_tflops"][name] = round(product_tflops(name))
        except RuntimeError as error:
            found["peak_tflops"][name] = f"{error}".partition("\n")[0]
    text = json.dumps(found, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
