"""Where the bytes of initializers are: in the files of the module, or in files beside the models.

A tensor whose bytes are contiguous in a file is referred to in place. All others are
streamed into a file beside the models, a block at a time: `rank{r}.weights` for what one rank
needs, `shared.weights` for what several do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from math import prod
from operator import itemgetter
from pathlib import Path

import numpy as np
from onnx.onnx_ml_pb2 import TensorProto

from irc.artifact.atomic import check_space
from irc.artifact.manifest import Progress, silent
from irc.backends.onnx.graph import DTYPES, entries
from irc.backends.onnx.weight_files import Unfinished, Writer
from irc.errors import Error
from irc.ir.core import Weight
from irc.ir.dtypes import dtype, is_float
from irc.ir.mesh import Mesh
from irc.weights import ConcatRef, Ref, is_computed
from irc.weights.checkpoint import Extent, Reader
from irc.weights.steps import Cast, Pad, Slice

ALIGNMENT = 4096  # a page, so that every tensor can be mapped
# What ONNX Runtime cannot hold, and the dtype that has all its numbers.
_HELD_AS = {"f4e2m1": "f8e4m3", "f8e8m0": "f32"}
RESUMED = 256 << 20  # bytes of computed weights that are kept if their writer is interrupted
OWN, SHARED = "rank{}.weights", "shared.weights"


@dataclass(frozen=True)
class Form:
    """How all ranks that run one graph store a weight: what is read, its dtype and shape.

    `flipped` has the bits of every byte that are inverted when it is written.
    """

    weight: Weight
    ref: Weight | Ref
    dtype: str
    shape: tuple[int, ...]
    flipped: int = 0

    @property
    def nbytes(self) -> int:
        """The size of one rank's shard."""
        return dtype(self.dtype).nbytes(prod(self.shape))


@dataclass
class _Converted:
    """Bytes to be written, the initializers that need them, and the ranks of these."""

    form: Form
    protos: list[TensorProto] = field(default_factory=list[TensorProto])
    ranks: list[int] = field(default_factory=list[int])
    offset: int = 0

    @property
    def file(self) -> str:
        """The name of the file that holds them."""
        return OWN.format(self.ranks[0]) if len(set(self.ranks)) == 1 else SHARED


@dataclass(frozen=True)
class Locations:
    """Where the weights of all models are.

    `base` is the folder that checkpoint files are relative to; per rank, `files` are its checkpoint
    files and `inside` those in the models' folder: converted weights and those of a bundle.
    `hashes` has what is known of the files that were written, by name.
    """

    base: str | None
    files: dict[int, list[str]]
    inside: dict[int, list[str]]
    hashes: Mapping[str, str] = field(default_factory=dict[str, str])


class Storage:
    """Collects the initializers of all ranks; `write`, or `locate`, fixes where their bytes are."""

    def __init__(self, reader: Reader, mesh: Mesh) -> None:
        self.reader, self.mesh = reader, mesh
        self._in_place: list[tuple[int, TensorProto, Extent]] = []
        self._converted: dict[object, _Converted] = {}

    def form(self, weight: Weight, compute: str) -> Form:
        """How a weight is stored for a graph that computes in `compute`.

        Where the weight is cast to `compute`, what the checkpoint holds is stored and cast there.
        """
        self.reader.check(weight)
        ref, stored = _as_stored(weight, self.reader, compute)
        return Form(weight, ref, stored, self.reader.shape(ref))

    def padded(self, form: Form, unit: int, repeat: bool = False) -> Form:
        """The form with zeros behind odd sizes above `unit`, to multiples of it, or where `repeat`
        with what it begins with."""
        ref, shape = self.reader.complete(form.ref), form.shape
        for dim, size in enumerate(shape):
            more = -size % unit if size % 2 and size > unit else 0
            if more and repeat:
                first = Slice(tuple((0, more) if i == dim else None for i in range(len(shape))))
                ref = ConcatRef((ref, ref.then(first)), dim)
            elif more:
                ref = ref.then(Pad(dim, more))
        return replace(form, ref=ref, shape=self.reader.shape(ref))

    def place(self, form: Form, name: str, rank: int) -> TensorProto:
        """The initializer of one rank."""
        proto = TensorProto(name=name, data_type=DTYPES[form.dtype])
        proto.dims.extend(form.shape)
        if not form.nbytes:
            proto.raw_data = b""
            return proto
        extent = None if form.flipped else self.reader.extent(form.ref, rank)
        if extent is not None:
            real = replace(extent, path=os.path.realpath(extent.path))
            self._in_place.append((rank, proto, real))
            return proto
        pieces = self.reader.pieces(form.ref, rank)
        key = pieces, form.dtype, form.shape, form.flipped  # equal for equal bytes
        converted = self._converted.setdefault(key, _Converted(form))
        converted.protos.append(proto)
        converted.ranks.append(rank)
        return proto

    def write(self, folder: Path, progress: Progress | None = None) -> Locations:
        """Write weight files into the models' folder where needed, and locate every initializer.

        `progress` gets the name of the step and the fraction that is done.
        """
        self.reader.check_copied(own.form.weight for own in self._converted.values())
        located = self.locate(folder)
        return replace(located, hashes=self._write_own(folder, progress or silent))

    def locate(self, folder: Path) -> Locations:
        """Locate every initializer, as if `write` had written its files."""
        here = os.path.realpath(folder)
        paths = list(dict.fromkeys(extent.path for _, _, extent in self._in_place))
        outside = [path for path in paths if os.path.dirname(path) != here]
        base = os.path.commonpath([os.path.dirname(path) for path in outside]) if outside else None
        names = {path: os.path.relpath(path, base).replace(os.sep, "/") for path in outside}
        ranks = range(self.mesh.ranks)
        located = Locations(base, {rank: [] for rank in ranks}, {rank: [] for rank in ranks})
        for rank, proto, extent in self._in_place:
            name = names.get(extent.path, os.path.basename(extent.path))
            _point(proto, name, extent.offset, extent.nbytes)
            _once((located.files if extent.path in names else located.inside)[rank], name)
        self._lay_out()
        for shard in self._converted.values():
            for rank, proto in zip(shard.ranks, shard.protos, strict=True):
                _point(proto, shard.file, shard.offset, shard.form.nbytes)
                _once(located.inside[rank], shard.file)
        return located

    def _lay_out(self) -> None:
        ends: dict[str, int] = {}
        for shard in chain(*self._shards()):
            shard.offset = -(-ends.get(shard.file, 0) // ALIGNMENT) * ALIGNMENT
            ends[shard.file] = shard.offset + shard.form.nbytes

    def _shards(self) -> list[list[_Converted]]:
        """The bytes to be written in order: weight by weight, and shard by shard."""
        shards: dict[object, list[_Converted]] = {}
        for shard in self._converted.values():
            form = shard.form
            shards.setdefault((form.weight, form.shape, form.flipped), []).append(shard)
        return [*shards.values()]

    def _write_own(self, folder: Path, progress: Progress) -> dict[str, str]:
        """Write the files; their hashes, as far as they are known."""
        groups = self._shards()
        kept = self._unfinished(groups, folder)
        try:
            hashes = self._write_groups(groups, folder, kept, progress)
            if kept is not None:
                kept.move_to(folder)
            return hashes
        except (Error, OSError) as error:  # but not ctrl-C: the next compilation continues
            if kept is not None:
                kept.remove()
            if isinstance(error, Error):
                raise
            where = error.filename or folder
            raise Error(f"cannot write {where}: {error.strerror or error}") from error

    def _unfinished(self, groups: list[list[_Converted]], folder: Path) -> Unfinished | None:
        """What an earlier compilation has finished; None where little is computed."""
        refs = [self.reader.complete(group[0].form.ref) for group in groups]
        pairs = zip(groups, refs, strict=True)
        computed = [
            shard.form.nbytes for group, ref in pairs if is_computed(ref) for shard in group
        ]
        if sum(computed) < RESUMED:
            return None
        text = [str(self.mesh)]
        for path in sorted({self.reader.path(name) for ref in refs for name in ref.files()}):
            facts = os.stat(path)
            text.append(f"{os.path.realpath(path)} {facts.st_size} {facts.st_mtime_ns}")
        for group, ref in zip(groups, refs, strict=True):
            form = group[0].form
            text.append(f"{ref} {form.dtype} {form.shape} {form.flipped}")
            text += [f"{shard.file} {shard.offset} {shard.ranks}" for shard in group]
        return Unfinished(folder, hashlib.sha256("\n".join(text).encode()).hexdigest())

    def _write_groups(
        self,
        groups: list[list[_Converted]],
        folder: Path,
        kept: Unfinished | None,
        progress: Progress,
    ) -> dict[str, str]:
        """Write all weights that are not finished."""
        if kept is not None:
            folder = kept.folder
        first = 0 if kept is None else kept.count
        check_space(folder, sum(shard.form.nbytes for shard in chain(*groups[first:])))
        ends = dict.fromkeys((shard.file for shard in chain(*groups)), 0)
        for shard in chain(*groups[:first]):
            ends[shard.file] = max(ends[shard.file], shard.offset + shard.form.nbytes)
        with ExitStack() as stack:
            files = {name: Writer(folder / name, end) for name, end in ends.items()}
            for shard in files.values():
                stack.enter_context(shard.file)
            for count in self._write_from(first, groups, files, progress):
                for shard in files.values():
                    shard.file.flush()
                if kept is not None:
                    kept.record(count)
            return {name: file.hash for name, file in files.items() if file.hash}

    def _write_from(
        self,
        first: int,
        groups: list[list[_Converted]],
        files: Mapping[str, Writer],
        progress: Progress,
    ) -> Iterator[int]:
        """Write the weights from number `first` on, a block of every shard of one weight at a time,
        since all come from the same rows; the number of finished weights after each."""
        sizes = [sum(shard.form.nbytes for shard in group) for group in groups]
        total, done = sum(sizes), sum(sizes[:first])
        tensors = [(group[0].form.ref, [shard.ranks[0] for shard in group]) for group in groups]
        stream = self.reader.stream(tensors[first:], as_bytes=True)
        for number, items in groupby(stream, itemgetter(0)):
            group = groups[first + number]
            ends = [shard.offset for shard in group]
            for _, blocks in items:
                for i, (shard, block) in enumerate(zip(group, blocks, strict=True)):
                    block = block ^ np.uint8(shard.form.flipped) if shard.form.flipped else block
                    ends[i] += files[shard.file].write(ends[i], block.data)
                done += sum(block.nbytes for block in blocks)
                progress("writing the weights", done / total)
            yield first + number + 1


def _as_stored(weight: Weight, reader: Reader, compute: str) -> tuple[Weight | Ref, str]:
    """(the reference without a cast to `compute`, which the graph does instead, its dtype)."""
    kind = weight.type.dtype
    if kind in _HELD_AS and compute == "f32":
        return reader.complete(weight).then(Cast(_HELD_AS[kind])), _HELD_AS[kind]
    ref = reader.narrowed(weight)
    narrow = reader.dtype(ref)
    if kind != compute or not is_float(narrow):
        return weight, kind
    return ref, narrow


def _once(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def _point(proto: TensorProto, location: str, offset: int, length: int) -> None:
    proto.data_location = TensorProto.EXTERNAL
    where = {"location": location, "offset": str(offset), "length": str(length)}
    proto.external_data.extend(entries(where))
