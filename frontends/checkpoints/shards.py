"""`RankShards`: what a rank of TensorRT-LLM holds of a checkpoint folder of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import Error, did_you_mean
from ...weights import Cast, ConcatRef, FileRef, Ref, Shard, Slice
from ..huggingface.files import Checkpoint
from ..huggingface.quantized.parts import FLOATS
from .ranks import PLACES


class RankShards:
    """References by the names that rank files have, sharded over the mesh axis tp.

    `layers` are the layers of the rank's pipeline stage, `kv_heads` those of the whole model, and
    `table_dim` the dimension over which ranks split the embedding, None if each has all of it.
    `name_of` gives the name of a file in the module.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name_of: Callable[[str], str],
        *,
        tp: int,
        layers: Sequence[int],
        kv_heads: int,
        table_dim: int | None,
    ) -> None:
        self.checkpoint, self._name_of = checkpoint, name_of
        self._tp, self._layers, self._kv_heads = tp, layers, kv_heads
        self._table_dim = table_dim

    def of(self, name: str, dtype: str) -> Ref:
        """The reference of a tensor, cast to `dtype`."""
        module, _, kind = name.rpartition(".")
        scope = ""
        if module.startswith("transformer.layers."):
            _, _, index, module = module.split(".", 3)
            scope = f"model.layers.{self._layers[int(index)]}."
        if module not in PLACES:
            raise Error(f"no tensor of a LLaMA checkpoint belongs to {name}")
        names, dim = PLACES[module]
        if module == "lm_head" and "lm_head.weight" not in self.checkpoint:
            names = ("model.embed_tokens",)
        if module == "transformer.vocab_embedding":
            dim = self._table_dim
        if dim == 1 and kind == "bias":
            dim = None
        parts = [self._part(f"{scope}{each}.{kind}", dtype, dim) for each in names]
        return ConcatRef(tuple(parts), 0) if len(parts) > 1 else parts[0]

    def _part(self, key: str, dtype: str, dim: int | None) -> Ref:
        """This rank's shard; of fewer key heads than ranks each several times."""
        if key not in self.checkpoint:
            near = did_you_mean(key, self.checkpoint)
            raise Error(f"{self.checkpoint.folder} lacks the tensor {key}{near}")
        stored = self.checkpoint.tensor(key)
        if stored.dtype not in FLOATS:
            raise Error(
                f"{key} is {stored.dtype}, and LLaMAForCausalLM reads floats; compile the folder "
                "itself with irc compile, which reads quantized ones"
            )
        ref: Ref = FileRef(self._name_of(self.checkpoint.file(key)), key)
        ref = ref if stored.dtype == dtype else ref.then(Cast(dtype))
        if self._tp == 1 or dim is None:
            return ref
        if (".k_proj." in key or ".v_proj." in key) and self._kv_heads % self._tp:
            ref = self._repeated(ref, stored.shape)
        return ref.then(Shard(dim, ("tp",)))

    def _repeated(self, ref: Ref, shape: Sequence[int]) -> Ref:
        """Every key head as often as its query heads are spread over ranks."""
        tp, heads = self._tp, self._kv_heads
        if tp % heads:
            raise Error(
                f"{heads} key-value heads cannot be shared by tp_size={tp} ranks; choose a "
                "multiple or a divisor"
            )
        size, rest = shape[0] // heads, (None,) * (len(shape) - 1)
        each = [ref.then(Slice(((i * size, (i + 1) * size), *rest))) for i in range(heads)]
        return ConcatRef(tuple(part for part in each for _ in range(tp // heads)), 0)
