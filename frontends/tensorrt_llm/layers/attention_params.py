"""What the attention layers of a model share in one call: caches, lengths, masks, and LoRA.

The fields of a class are the arguments of its row in api.toml, in the versions that have them.
"""

from __future__ import annotations

from inspect import Parameter as Argument
from inspect import Signature
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ....errors import Error
from ....source import here
from ..api import api, rows


class Fields:
    """An object that holds the arguments of its row, None unless given."""

    path: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        row = rows()[cls.path]
        every = dict.fromkeys([*row.names, *(each.name for each in row.attributes)])

        def hold(self: Fields, **fields: Any) -> None:
            vars(self).update(every | fields)
            self.check()

        own = Argument("self", Argument.POSITIONAL_ONLY)
        names = [Argument(name, Argument.KEYWORD_ONLY, default=None) for name in sorted(row.names)]
        cast("Any", hold).__signature__ = Signature([own, *names])  # so that all are held
        cast("Any", cls).__init__ = hold

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **fields: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def check(self) -> None:
        """Raise an Error about fields that irc cannot honour."""

    def is_valid(
        self,
        gpt_attention_plugin: Any = None,
        remove_input_padding: Any = None,
        use_kv_cache: Any = None,
    ) -> bool:
        """True: the layers say what they lack."""
        return True


@api("layers.attention.AttentionParams")
class AttentionParams(Fields):
    """The lengths of the sequences of a call, i32 [B] each.

    `context_lengths` are the lengths of the prompts, `encoder_input_lengths` those of the
    sequences that cross attention reads. irc computes the angles of rotary embeddings, so that
    the tables for them stay None.
    """

    path = "layers.attention.AttentionParams"

    def is_valid_cross_attn(self, do_cross_attention: Any) -> bool:
        """True."""
        return True

    def fill_attention_const_params_for_rope(self) -> AttentionParams:
        """Itself: tables of angles are not needed."""
        return self

    fill_attention_const_params_for_long_rope = fill_attention_const_params_for_rope


@api("layers.attention.KeyValueCacheParams")
class KeyValueCacheParams(Fields):
    """The KV caches of the layers, and how many tokens they hold, i32 [B].

    `past_key_value` has a cache [B, 2, kv, P, D] per layer. `host_max_attention_window_sizes` is
    a number, one per layer, or i32 [layers]. irc's caches are contiguous: the fields of paged ones
    are only held.
    """

    path = "layers.attention.KeyValueCacheParams"
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
        for name in rows()[self.path].names:
            per_layer = name.endswith(("_key_value", "_sizes", "_cache_lengths", "_pointers"))
            if per_layer and vars(self)[name] is None:
                setattr(self, name, (None,) * list_size)


@api("layers.attention.AttentionMaskParams")
class AttentionMaskParams(Fields):
    """The masks of a layer, [B, T] or [B, S, T]; packed masks are not supported."""

    path = "layers.attention.AttentionMaskParams"


@api("layers.attention.MropeParams")
class MropeParams(Fields):
    """Angles of mrope: [cos, sin] per pair of the tokens of prompts, [B, N * D], and i32 [B, 1],
    what is added to the positions of later tokens."""

    path = "layers.attention.MropeParams"


@api("layers.attention.BlockSparseAttnParams")
class BlockSparseAttnParams(Fields):
    """Blocks of AttentionMaskType.blocksparse; `irc.frontends.layers.BlockSparse` defines them."""

    path = "layers.attention.BlockSparseAttnParams"


@api("layers.attention.SpecDecodingParams")
class SpecDecodingParams(Fields):
    """Refused where it has tensors: speculative decoding is not supported."""

    path = "layers.attention.SpecDecodingParams"

    def check(self) -> None:
        if not self.is_off():
            raise Error(
                "speculative decoding is not supported; generate one token per call", loc=here()
            )

    def is_off(self) -> bool:
        """Whether one token is generated per call."""
        most = self.spec_decoding_max_generation_length or 1
        fields = [value for value in vars(self).values() if not isinstance(value, (int, bool))]
        return most <= 1 and not any(value is not None for value in fields)
