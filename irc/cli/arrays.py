"""Arrays of commands: read from .npz files or random, written, and compared."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.dims import checked_sizes
from ..ir.dtypes import widened
from ..npz import Arrays, read_npz, write_npz
from .arguments import whole_number

if TYPE_CHECKING:
    from ..artifact.folder import ArtifactFolder
    from ..backends.commands import Ranges


def add_inputs(parser: ArgumentParser, required: bool) -> None:
    """`--inputs F`, or `--random SEED` in its place."""
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("--inputs", metavar="IN.npz", help="one array per input")
    what = "random inputs of the typical sizes"
    group.add_argument("--random", metavar="SEED", type=whole_number(), help=what)


def given_inputs(args: Namespace, dims: Ranges | None = None) -> Arrays:
    """The arrays of `--inputs`, else random ones (by default with the seed 0), at sizes of `dims`
    or typical ones."""
    if args.inputs is not None:
        return read_npz(Path(args.inputs), partial(_check_shapes, args.artifact))
    from ..artifact.folder import ArtifactFolder
    from ..driver.sources import read_text
    from ..generation.random_inputs import random_inputs

    path = Path(args.source)
    if path.is_file() and args.backend != "reference":
        return {}  # it cannot be run, and loading it says why
    module = read_text(path if path.is_file() else ArtifactFolder.open(path).module)
    return random_inputs(module, args.random or 0, checked_sizes(dims or {}, module.dims))


def _check_shapes(artifact: ArtifactFolder | None, shapes: Mapping[str, Sequence[int]]) -> None:
    """An Error where arrays of some shapes are no inputs of an artifact."""
    from ..backends.base import Port
    from ..generation.inputs import check_names, sizes_of_shapes
    from ..text.cursor import Cursor
    from ..text.literals import parse_type

    facts: Mapping[str, Any] = {} if artifact is None else artifact.manifest
    texts = {**facts.get("inputs", {}), **facts.get("states", {})}
    if artifact is None or not texts:  # no artifact, or one of an older irc
        return
    check_names(shapes, texts)
    types = {name: parse_type(Cursor(text, str(artifact.path))) for name, text in texts.items()}
    ports = [Port(name, type.dtype, type.shape) for name, type in types.items()]
    sizes_of_shapes(ports, shapes, facts["dims"])


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write an .npz file, completely or not at all."""
    write_npz(path, plain(arrays))


def plain(arrays: Arrays) -> Arrays:
    """The arrays, with f32, i8 or u8 in place of narrower dtypes that numpy lacks."""
    return {
        name: array if array.dtype.isbuiltin == 1 else widened(array)
        for name, array in arrays.items()
    }


@dataclass(frozen=True)
class Difference:
    """How two arrays of one name differ. `wrong` elements of `size` are beyond the tolerance.

    `largest` and `relative` are the largest finite differences. `problem` says why the arrays
    cannot be compared, else it is empty.
    """

    name: str
    wrong: int = 0
    size: int = 0
    largest: float = 0.0
    relative: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the arrays agree."""
        return not self.wrong and not self.problem


def differences(results: Arrays, wanted: Arrays, rtol: float, atol: float) -> list[Difference]:
    """A Difference for each name on either side; the arrays of both are plain."""
    names = dict.fromkeys([*results, *wanted])
    return [_difference(name, results.get(name), wanted.get(name), rtol, atol) for name in names]


def _difference(name: str, results: Any, wanted: Any, rtol: float, atol: float) -> Difference:
    """|found - wanted| <= atol + rtol * |wanted| for floats; integers and bools must be equal."""
    if results is None or wanted is None:
        return Difference(name, problem=f"only in the {'first' if wanted is None else 'second'}")
    if results.shape != wanted.shape:
        shapes = f"{list(results.shape)} and {list(wanted.shape)}"
        return Difference(name, problem=f"the shapes {shapes} differ")
    kinds = results.dtype.kind + wanted.dtype.kind
    if set(kinds) - {*"biuf"}:
        return Difference(name, problem=f"{results.dtype} and {wanted.dtype} are not numbers")
    a, b = results.astype(np.float64), wanted.astype(np.float64)
    same = (results == wanted) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        gap = np.abs(a - b)
        finite = np.isfinite(gap) & ~same
        near = (gap <= atol + rtol * np.abs(b)) & finite & (kinds == "ff")
        relative = np.where(finite & (b != 0), gap / np.abs(b), 0.0)
    largest = float(gap.max(initial=0.0, where=finite))
    most = float(relative.max(initial=0.0))
    return Difference(name, int(np.sum(~(same | near))), results.size, largest, most)
