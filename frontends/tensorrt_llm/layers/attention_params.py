"""What the attention layers of a model share in one call: caches, lengths, masks, and LoRA.

The fields of a class are the arguments of its row in api.toml, in the versions that have them.
"""

from __future__ import annotations

from inspect import Parameter as Argument
from inspect import Signature
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ..api import api, fields, rows
from ..errors import ScriptError


class Fields:
    """An object that holds the arguments and attributes of its row, None unless given."""

    row: ClassVar[str]

    def __init_subclass__(cls, row: str = "", holds_all: bool = False) -> None:
        if not row:  # a class of a script
            return
        cls.row = row
        if holds_all:  # also what layers of irc do not read, as those of a script may

            def hold(self: Fields, **given: Any) -> None:
                Fields.__init__(self, **given)

            own = Argument("self", Argument.POSITIONAL_ONLY)
            names = [Argument(n, Argument.KEYWORD_ONLY, default=None) for n in rows()[row].names]
            cast("Any", hold).__signature__ = Signature([own, *names])
            cast("Any", cls).__init__ = hold
        api(row)(cls)

    def __init__(self, **given: Any) -> None:
        attributes = (attribute.name for attribute in rows()[self.row].attributes)
        vars(self).update({**dict.fromkeys(attributes), **fields(self.row, every=True), **given})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def is_off(self) -> bool:
        """True: only arguments that are off are accepted."""
        return True

    def is_valid(self, **switches: Any) -> bool:
        """True: the layers say what they lack."""
        return True


class AttentionParams(Fields, row="layers.attention.AttentionParams", holds_all=True):
    """The lengths of the sequences of a call, i32 [B] each.

    `context_lengths` are the lengths of the prompts, `encoder_input_lengths` those of the
    sequences that cross attention reads. irc computes the angles of rotary embeddings, so that
    the tables for them stay None.
    """


class KeyValueCacheParams(Fields, row="layers.attention.KeyValueCacheParams", holds_all=True):
    """The KV caches of the layers, and how many tokens they hold, i32 [B].

    `past_key_value` has a cache [B, 2, kv, P, D] per layer. `host_max_attention_window_sizes` is
    a number, one per layer, or i32 [layers]. irc's caches are contiguous: the fields of paged ones
    stay None.
    """

    past_key_value: Any
    host_max_attention_window_sizes: Any

    @property
    def windows(self) -> Any:
        """The windows, by their name in any version."""
        windows = self.host_max_attention_window_sizes
        return self.host_max_kv_cache_lengths if windows is None else windows

    def get_first_past_key_value(self) -> Any:
        """The cache of the first layer, that of a layer in its own call."""
        return self.past_key_value[0] if self.past_key_value else None

    def get_first_kv_cache_block_pointers(self) -> None:
        """None: caches have no blocks."""

    get_first_host_kv_cache_block_pointers = get_first_kv_cache_block_pointers

    def fill_none_tensor_list(self, list_size: int) -> None:
        """Give every layer a cache, a window and blocks that are None, unless there are some."""
        for name, value in list(vars(self).items()):
            per_layer = name.endswith(("_key_value", "_sizes", "_cache_lengths", "_pointers"))
            if per_layer and value is None:
                setattr(self, name, (None,) * list_size)


class AttentionMaskParams(Fields, row="layers.attention.AttentionMaskParams"):
    """The masks of a layer, [B, T] or [B, S, T]; packed masks are not supported."""


class BlockSparseAttnParams(Fields, row="layers.attention.BlockSparseAttnParams"):
    """Blocks of AttentionMaskType.blocksparse; `irc.frontends.layers.BlockSparse` defines them."""


class MropeParams(Fields, row="layers.attention.MropeParams"):
    """Angles of images and videos, which are refused."""


class SpecDecodingParams(Fields, row="layers.attention.SpecDecodingParams"):
    """Several tokens per call, which are refused."""


# -- adapters (LoRA): accepted where there are none, as scripts write it; else refused


def refuse_lora(*given: Any) -> None:
    """An Error where there are LoRA weights at run time."""
    if all(adapter is None or getattr(adapter, "is_off", bool)() for adapter in given):
        return
    raise ScriptError(
        "LoRA weights at run time are not supported; add them to the weights of the model before "
        "it is compiled"
    )


class LoraParams(Fields, row="layers.lora.LoraParams"):
    """The adapters of the layers, of which there are none: every list is None or empty."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        lists = [value for name, value in vars(self).items() if name.startswith("lora_")]
        refuse_lora(*(adapters for adapters in lists if any(adapters or ())))

    def get_layer_params(self, layer_idx: int) -> LoraParams:
        """Those of a layer."""
        return self


@api("runtime.lora_manager.LoraConfig")
@api("lora_manager.LoraBuildConfig")
class LoraConfig(Fields, row="lora_manager.LoraConfig"):
    """The adapters of a build: none, in no folder. `is_valid` is whether there are any."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        folders = self.hf_lora_dir, self.lora_dir or None
        refuse_lora(*folders, self.lora_target_modules or None)

    @classmethod
    def from_hf(
        cls,
        hf_lora_dir: str | None,
        hf_modules_to_trtllm_modules: dict[str, str] | None = None,
        trtllm_modules_to_hf_modules: dict[str, str] | None = None,
    ) -> LoraConfig:
        """The config of a folder of adapters, or of None."""
        return cls(hf_lora_dir=hf_lora_dir)
