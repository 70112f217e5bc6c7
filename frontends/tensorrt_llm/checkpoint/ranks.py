"""`Ranks`: the tensors in the files rank0.safetensors, rank1.safetensors, ... of a checkpoint."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from ....errors import Error
from ...huggingface.files import Checkpoint
from ...huggingface.quantized import Tensors
from .config import Layout

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.")


class RankFile(Checkpoint):
    """The tensors of one rank by key."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.name = f"rank{rank}.safetensors"
        super().__init__(folder)

    def file(self, key: str) -> str:
        """The file of every tensor, present or not."""
        return self.name

    def _find(self) -> dict[str, str]:
        return dict.fromkeys(self._header(self.name), self.name)


class Ranks:
    """The tensors of every rank, and the layers of every pipeline stage."""

    def __init__(self, folder: Path, layout: Layout, layers: int) -> None:
        self.folder, self.layout = folder, layout
        self._check_files()
        files = [RankFile(folder, rank) for rank in range(layout.ranks)]
        self.tensors = [Tensors(file, partial(_name_of, rank)) for rank, file in enumerate(files)]
        self._places = self._stages(layers)

    def of_stage(self, stage: int) -> list[Tensors]:
        """The tensors of the ranks of a stage, which split its weights."""
        tp = self.layout.tp
        return self.tensors[stage * tp : (stage + 1) * tp]

    def layer(self, index: int) -> tuple[list[Tensors], str]:
        """The ranks that have a layer, and what its keys begin with there."""
        stage, own = self._places[index]
        return self.of_stage(stage), f"transformer.layers.{own}."

    def unused(self) -> list[str]:
        """The keys of the tensors that no weight was taken from."""
        every = dict.fromkeys(key for each in self.tensors for key in each.checkpoint)
        return [key for key in every if not any(key in each.used for each in self.tensors)]

    def _check_files(self) -> None:
        names = [f"rank{rank}.safetensors" for rank in range(self.layout.ranks)]
        missing = [name for name in names if not (self.folder / name).is_file()]
        layout = f"tp_size={self.layout.tp} and pp_size={self.layout.pp}"
        if missing:
            raise Error(
                f"{self.folder} lacks {', '.join(missing)}: config.json has {layout}, so there are "
                f"{len(names)} rank files; copy all of them"
            )
        if (self.folder / f"rank{len(names)}.safetensors").is_file():
            raise Error(
                f"{self.folder} has rank{len(names)}.safetensors, but config.json has {layout}, "
                f"which are {len(names)} ranks; give the config.json of this conversion"
            )

    def _stages(self, layers: int) -> list[tuple[int, int]]:
        """(stage, number in its files) of every layer; files count per stage or over all."""
        found: list[tuple[int, int]] = []
        for stage in range(self.layout.pp):
            keys = self.of_stage(stage)[0].checkpoint
            ids = sorted({int(match[1]) for key in keys if (match := _LAYER.match(key))})
            first = ids[0] if ids else 0
            if ids != list(range(first, first + len(ids))) or first not in (0, len(found)):
                raise Error(
                    f"{self.folder}: the layers of pipeline stage {stage} are {ids}; expected "
                    f"0, 1, ... or {len(found)}, {len(found) + 1}, ..., without gaps"
                )
            found += [(stage, each) for each in ids]
        if len(found) != layers:
            raise Error(
                f"{self.folder} has {len(found)} layers in {self.layout.pp} pipeline stages, but "
                f"num_hidden_layers is {layers}; some converters leave out the last layers where "
                "pp_size does not divide them, so convert again with another pp_size"
            )
        return found


def _name_of(rank: int, key: str) -> str:
    """The name in a module of the file that holds a tensor of a rank."""
    return f"rank{rank}"
