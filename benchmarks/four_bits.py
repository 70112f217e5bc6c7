"""The model of a checkpoint with random 4-bit weights in its layers, in blocks along a row.

    python -m benchmarks.four_bits CHECKPOINT FOLDER [--block 128] [--typical 512]

FOLDER gets `module.irc` and a file with the weights; embedding, head and norms stay those of the
checkpoint. Elements from -8 to 7 are equally likely, and scales such that products keep their size.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from irc.driver import prepare, run_passes
from irc.ir.core import Module, Value, Weight
from irc.ir.types import TensorType
from irc.ops import Dequantize, Linear
from irc.weights import BytesRef

FILE = "four_bits.bin"
CHUNK = 1 << 24  # random bytes that are written repeatedly
Dims = Mapping[str, tuple[int, int, int]]


def write(checkpoint: Path, folder: Path, dims: Dims, block: int = 128) -> Path:
    """Write the module and its weights; returns the path of the module.

    `dims` are ranges (smallest, typical, largest) of symbols.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "module.irc"
    module = prepare(checkpoint, dtype="bf16", dims=dims, pipeline="inline").module
    _Writer(module, folder, block).replace_all()
    run_passes(module, "dce")
    path.write_text(str(module))
    return path


class _Writer:
    """Writes weights consecutively into a file that the module refers to."""

    def __init__(self, module: Module, folder: Path, block: int) -> None:
        self.module, self.block = module, block
        module.files["four_bits"] = FILE
        self._file = (folder / FILE).open("wb")
        self._random = np.random.default_rng(0).bytes(CHUNK)

    def replace_all(self) -> None:
        """Replace the weight of every linear in a layer by a dequantized one."""
        with self._file:
            for op in [each for each in self.module.main if isinstance(each, Linear)]:
                weight = op.weight
                if isinstance(weight, Weight) and ".layers." in weight.name:
                    made = Dequantize(*self._quantized(weight))
                    made.loc = op.loc
                    self.module.main.insert(made, op)
                    op.set_operands((op.x, made.result, *op.operands[2:]))

    def _quantized(self, weight: Weight) -> tuple[Value, Value]:
        rows, columns = (int(size) for size in weight.type.shape)  # type: ignore[arg-type]
        values = self._weight(f"{weight.name}.i4", "i4", (rows, columns))
        self._write_random(rows * columns // 2)
        blocks = (rows, columns // self.block)
        scales = self._weight(f"{weight.name}.scale", "bf16", blocks)
        number = 0.2 / columns**0.5  # elements have a deviation of 4.6
        self._file.write(np.full(blocks, number, ml_dtypes.bfloat16).tobytes())
        return values, scales

    def _weight(self, name: str, kind: str, shape: tuple[int, int]) -> Weight:
        """A weight appended to the file."""
        ref = BytesRef("four_bits", self._file.tell(), kind, shape)
        return self.module.add_weight(Weight(TensorType(kind, shape), name, ref))

    def _write_random(self, size: int) -> None:
        begin = self._file.tell() % CHUNK  # so that no two matrices are equal
        while size:
            part = self._random[begin : begin + size]
            size, begin = size - self._file.write(part), 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--typical", type=int, default=512, help="tokens of a prompt")
    options = parser.parse_args()
    dims = {"S": (1, options.typical, 2048), "T": (1, 1, 2048)}
    print(write(options.checkpoint, options.folder, dims, options.block))


if __name__ == "__main__":
    main()
