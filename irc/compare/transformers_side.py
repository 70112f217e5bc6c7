"""A side of a comparison that transformers computes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import Error
from .points import Point
from .sides import Array, Arrays, Side, Visit


class TransformersSide(Side):
    """A checkpoint folder run by transformers in f32 on the CPU, with its own model class.

    `results` are those of the other side; some have the name of an output here.
    """

    def __init__(self, folder: Path, results: Sequence[Point]) -> None:
        self.folder = folder
        with self._explained("load"):
            self.model = self._loaded()
        names = [name for name, part in self.model.named_modules() if name and not _scales(part)]
        points = [Point((name, f"tensor:{name}"), name) for name in names]
        points += [Point(point.keys, "", result=point.result) for point in results]
        super().__init__(f"{folder} in transformers", points)

    def _loaded(self) -> Any:
        transformers: Any = import_module("transformers")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        own: dict[str, Any] = {"local_files_only": True}
        options = {**own, "dtype": "float32", "attn_implementation": "eager"}
        config = transformers.AutoConfig.from_pretrained(self.folder, **own)
        name = (config.architectures or ["AutoModel"])[0]
        cls = getattr(transformers, name, transformers.AutoModel)
        model, info = cls.from_pretrained(self.folder, **options, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it has no {min(info['missing_keys'])}")
        return model.eval()

    @contextmanager
    def _explained(self, what: str) -> Generator[None]:
        try:
            yield
        except Error:
            raise
        except Exception as error:
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            hint = "give --reference irc to compare with irc's own reading of the folder"
            raise Error(f"transformers cannot {what} {self.folder}: {reason}; {hint}") from error

    def without_padding(self, inputs: Mapping[str, Array]) -> Arrays:
        """See Side."""
        pad, ids = self.model.config.pad_token_id, inputs.get("input_ids")
        if ids is None or pad is None:
            return {**inputs}
        return {**inputs, "input_ids": np.where(ids == pad, pad + 1, ids).astype(ids.dtype)}

    def run(self, inputs: Mapping[str, Array], chosen: Collection[Point], visit: Visit) -> None:
        """See Side."""
        torch: Any = import_module("torch")
        by_name = {point.scope: point for point in chosen if not point.result}

        def after(point: Point, part: Any, args: Any, output: Any) -> Any:
            first = _own_output(part, args, output)
            if first is None or (new := visit(point, first.float().numpy())) is None:
                return None
            changed = torch.tensor(new).to(first.dtype)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        for name, part in self.model.named_modules():
            if name in by_name:
                part.register_forward_hook(partial(after, by_name[name]))
        takes = inspect.signature(self.model.forward).parameters
        plain = {n: x.astype("i8" if x.dtype.kind in "iu" else "f4") for n, x in inputs.items()}
        given = {name: torch.tensor(array) for name, array in plain.items() if name in takes}
        with torch.no_grad(), self._explained("run"):
            outputs = self.model(**given)
        for point in chosen:
            if point.result and hasattr(array := outputs.get(point.result), "numpy"):
                visit(point, array.float().numpy())


def _own_output(part: Any, args: Any, output: Any) -> Any:
    """The first tensor that a component returns, None where it returns none.

    Nor has a component without others inside it one if it takes or returns several tensors: it is
    more than the operation that has its weight.
    """
    is_tensor, is_named = hasattr(output, "numpy"), hasattr(output, "keys")
    results: Any = (output,) if is_tensor else () if is_named else output or ()
    counts = [len([x for x in several if hasattr(x, "numpy")]) for several in (args, results)]
    joint = max(counts) > 1 and not any(part.children())
    return results[0] if counts[1] and not joint and hasattr(results[0], "numpy") else None


def _scales(part: object) -> bool:
    """Whether an embedding has a class of its own, which scales rows, as irc does afterwards."""
    name = type(part).__name__
    return "Embedding" in name and name != "Embedding"
