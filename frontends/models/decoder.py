"""A decoder of layers with attention and its language model head; families differ in options.

Names of parameters as in the Hugging Face checkpoints of Llama, Mistral, Qwen and Mixtral.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, overload

from ...errors import Error
from ...weights import Ref, UnboundRef
from .. import functional as F
from ..layers import MLP, Attention, Embedding, GatedMLP, LayerNorm, Linear, RmsNorm, Rope
from ..layers.attention import Cache
from ..layers.positions import QueryGrowth
from ..module import Module, ModuleList, Parameter
from ..tensor import Tensor
from .config_reader import MOST_LAYERS, REQUIRED, ConfigReader
from .family import Family, Signature, register
from .language_model import States, at_positions, key_value_cache, results_of, signature_of
from .mixture import Mixture, joined_alternatives
from .rope_config import read_rope
from .stored import Stored

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
)
Block = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms"]


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes and options of a decoder, most of them named as in config.json.

    `num_key_value_heads` None means num_attention_heads, `head_dim` None hidden_size /
    num_attention_heads, `sliding_window` 0 no window, `attention_scale` None 1/sqrt(head_dim), a
    softcap of 0 none. `rope` None: queries and keys are not rotated. `alibi` is as in Attention.
    `learned_positions` > 0 is the size of a table of positions, whose first `position_offset` rows
    have no position. `qk_norm` normalizes queries and keys per head, with the same weights or with
    those of `each_head`, or across all heads; `rotated`: per head, behind the rope and without
    weights. With `attention_gate` a sigmoid of the input multiplies what the heads give;
    `attention_sinks` and `attention_chunk` are as sinks and chunk of Attention.

    `norm_offset` is added to the weights of RMS norms; `norm_bias` and `norm_affine`, whether they
    have weights at all, are for layer norms. `block`
    says where the norms of a layer are: before attention and feed-forward, behind each (before the
    residual is added), both, or `parallel`, with attention and feed-forward of the same input, of
    one norm or of two. What they add to the residual is multiplied by `residual_multiplier`,
    embeddings by `embedding_multiplier`, and logits by `logits_multiplier`. `mixture`: the
    feed-forward is a mixture of experts.

    `layers` has the options in which each layer differs, by the names of these fields.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    gated: bool = True
    max_position_embeddings: int = 2048
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_bias: bool = True
    norm_affine: bool = True
    block: Block = "pre"
    rope: Rope | None = field(default_factory=Rope)
    alibi: float = 0.0
    learned_positions: int = 0
    position_offset: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: Literal["", "head", "each_head", "all_heads", "rotated"] = ""
    attention_gate: bool = False
    query_growth: QueryGrowth | None = None
    value_norm: bool = False
    keys_are_values: bool = False
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    attention_sinks: bool = False
    attention_chunk: int = 0
    qkv_clip: float = 0.0
    sliding_window: int = 0
    embedding_norm: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float = 0.0
    tie_word_embeddings: bool = False
    mixture: Mixture | None = None
    layers: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise Error(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads < 1 or self.kv_heads < 1:
            raise Error("num_attention_heads and num_key_value_heads must be at least 1")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise Error(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; give head_dim"
            )
        if self.num_attention_heads % self.kv_heads:
            raise Error(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.kv_heads}"
            )
        if self.layers and len(self.layers) != self.num_hidden_layers:
            raise Error(
                f"config.json has the types of {len(self.layers)} layers; expected one for each of "
                f"{self.num_hidden_layers}"
            )

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads."""
        heads = self.num_key_value_heads
        return self.num_attention_heads if heads is None else heads

    @property
    def head_size(self) -> int:
        """The number of features of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def has_positions(self) -> bool:
        """Whether the numbers of positions count, as with rope."""
        return bool(self.learned_positions) or any(layer.rope for layer in self.of_layers())

    def of_layers(self) -> list[Any]:
        """The options of every layer."""
        if not self.layers:
            return [self] * self.num_hidden_layers
        return [replace(self, **changes, layers=()) for changes in self.layers]


Config = TypeVar("Config", bound=DecoderConfig)


@overload
def read_decoder(config: ConfigReader, **more: Any) -> DecoderConfig: ...
@overload
def read_decoder(config: ConfigReader, kind: type[Config], **more: Any) -> Config: ...
def read_decoder(
    config: ConfigReader,
    kind: type[DecoderConfig] = DecoderConfig,
    *,
    keys: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    rope_theta: float = 10000.0,
    rotary_fraction: float | None = None,
    interleaved_rope: bool = False,
    **more: Any,
) -> DecoderConfig:
    """The sizes that every decoder has, and `more` fields of `kind`, which are not read.

    `keys` are the names of fields in a family's config.json where they differ, with | between
    alternatives; `defaults` are the values of absent keys. The last three options describe the
    rope, which `more` may replace.
    """
    names = {"norm_eps": "rms_norm_eps", **(keys or {})}
    values = {**_DEFAULTS, **(defaults or {})}
    read = {
        name: how(config, config.key(names.get(name, name)), values.get(name, REQUIRED))
        for name, how in _READ.items()
        if name not in more
    }
    sizes = read | more
    if "rope" not in sizes:
        head_size = sizes["head_dim"] or sizes["hidden_size"] // max(
            1, sizes["num_attention_heads"]
        )
        context = sizes["max_position_embeddings"]
        rope = read_rope(config, head_size, context, rope_theta, rotary_fraction)
        sizes["rope"] = replace(rope, interleaved=True) if interleaved_rope else rope
    return kind(**sizes)


# field of DecoderConfig -> how its key in config.json is read, with a default
_READ: dict[str, Callable[[ConfigReader, str, Any], Any]] = {
    "vocab_size": ConfigReader.integer,
    "hidden_size": ConfigReader.integer,
    "intermediate_size": ConfigReader.integer,
    "num_hidden_layers": partial(ConfigReader.integer, most=MOST_LAYERS),
    "num_attention_heads": ConfigReader.integer,
    "num_key_value_heads": ConfigReader.integer,
    "head_dim": ConfigReader.integer,
    "hidden_act": ConfigReader.word,
    "max_position_embeddings": ConfigReader.integer,
    "norm_eps": ConfigReader.number,
    "tie_word_embeddings": ConfigReader.flag,
}
_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def read_windows(
    config: ConfigReader, is_local: Callable[[int], Any] | None = None
) -> tuple[Mapping[str, Any], ...]:
    """The windows of the layers of Qwen, which `use_sliding_window` switches on.

    Without `layer_types` layer i (from 0) has a window if `is_local(i)`, by default from layer
    `max_window_layers` on.
    """
    count, window = layer_count(config), config.integer("sliding_window", 0)
    first = config.integer("max_window_layers", 28)
    if not config.flag("use_sliding_window"):
        config.require("layer_types", ["full_attention"] * count, "use_sliding_window is not set")
        return ()
    if window < 1:
        raise config.error("use_sliding_window", "expected a sliding_window of at least 1")
    local = [is_local(i) if is_local else i >= first for i in range(count)]
    default = ["sliding_attention" if limited else "full_attention" for limited in local]
    return read_layer_types(config, count, window_types(window), default=default)


def layer_count(config: ConfigReader) -> int:
    """The number of layers."""
    return config.integer("num_hidden_layers", most=MOST_LAYERS)


def window_types(window: int, **local: Any) -> dict[str, Mapping[str, Any]]:
    """The options of layers with and without a window; `local` are others of the former."""
    return {
        "sliding_attention": {"sliding_window": window, **local},
        "full_attention": {"sliding_window": 0},
    }


def read_layer_types(
    config: ConfigReader,
    count: int,
    types: Mapping[Any, Mapping[str, Any]],
    period: int = 0,
    default: Sequence[str] = (),
) -> tuple[Mapping[str, Any], ...]:
    """The options of every layer by its type in `layer_types` of config.json.

    `types` are the options of each type. Without `layer_types` layers have the types of `default`;
    without both, every layer number `period` (from 1) has the last type, the others the first.
    """
    names = config.words("layer_types") or default
    first, last = next(iter(types)), list(types)[-1]
    if not names:
        names = [last if period and (i + 1) % period == 0 else first for i in range(count)]
    for name in names:
        if name not in types:
            raise config.error("layer_types", f"expected {' or '.join(types)}")
    return tuple(types[name] for name in names)


def tied_embeddings(config: DecoderConfig) -> Mapping[str, Ref]:
    """The other name of a tied embedding table."""
    if not config.tie_word_embeddings:
        return {}
    return {"model.embed_tokens.weight": UnboundRef("lm_head.weight")}


def other_names(config: DecoderConfig) -> Mapping[str, Ref]:
    """Where a checkpoint may have a tied embedding table, and experts that it stores joined."""
    return {**tied_embeddings(config), **joined_alternatives(config)}


class Call(NamedTuple):
    """What one call of a model gives to every layer: positions i32 [B, S], past lengths i32 [B].

    `positions` is None where a model has none, `lengths` i32 [B], the numbers of tokens of this
    call, where no layer has a fixed state. `memory` holds what layers leave for later ones in this
    call.
    """

    positions: Tensor | None
    past: Tensor
    lengths: Tensor | None
    memory: dict[str, Any]


def make_norm(config: Any, dtype: str, size: int = 0) -> Module:
    """A norm over `size` features, by default hidden_size."""
    size = size or config.hidden_size
    if config.norm == "layer":
        affine, bias = config.norm_affine, config.norm_bias
        return LayerNorm(size, config.norm_eps, affine, bias, dtype)
    return RmsNorm(size, config.norm_eps, config.norm_offset, dtype)


def _make_qk_norm(config: Any, dtype: str, size: int) -> Module:
    if config.qk_norm == "rotated":
        return RmsNorm(size, config.norm_eps, affine=False)
    if config.qk_norm == "each_head":
        return HeadNorms(size // config.head_size, config.head_size, config.norm_eps, dtype)
    return make_norm(config, dtype, size)


class HeadNorms(Module):
    """The layer norm of every head of x [..., heads*head_dim], with weights of its own."""

    def __init__(self, heads: int, head_dim: int, eps: float, dtype: str) -> None:
        self.weight = Parameter((heads, head_dim), dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., heads*head_dim] to the same."""
        heads = x.reshape(*x.shape[:-1], *self.weight.shape)
        return (F.layer_norm(heads, eps=self.eps) * self.weight).reshape(*x.shape)


class DecoderLayer(Module):
    """Attention and a feed-forward, with norms where `block` says, added to their input."""

    def __init__(self, config: Any, dtype: str) -> None:
        block = config.block
        if block != "post":
            self.input_layernorm = make_norm(config, dtype)
        self.add_attention(config, dtype)
        if block in ("pre", "sandwich", "parallel_two_norms"):
            self.post_attention_layernorm = make_norm(config, dtype)
        self.add_feed_forward(config, dtype)
        if block in ("post", "sandwich"):
            self.attention_output_norm = make_norm(config, dtype)
            self.feed_forward_output_norm = make_norm(config, dtype)
        self.block, self.residual_multiplier = block, config.residual_multiplier

    @staticmethod
    def states(config: Any, dtype: str) -> States:
        """The states of a layer with these options, by the names that `attend` takes."""
        return key_value_cache(config.kv_heads, config.head_size, dtype)

    def add_attention(self, config: Any, dtype: str) -> None:
        """Create the attention, under its name in checkpoints."""
        self.self_attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm=partial(_make_qk_norm, config, dtype) if config.qk_norm else None,
            norm_all_heads=config.qk_norm in ("each_head", "all_heads"),
            norm_rotated=config.qk_norm == "rotated",
            chunk=config.attention_chunk,
            rope=config.rope,
            window=config.sliding_window,
            softcap=config.attention_softcap,
            scale=config.attention_scale,
            clip=config.qkv_clip,
            alibi=config.alibi,
            gate=config.attention_gate,
            sinks=config.attention_sinks,
            growth=config.query_growth,
            value_norm=config.norm_eps if config.value_norm else None,
            keys_are_values=config.keys_are_values,
            dtype=dtype,
        )

    def add_feed_forward(self, config: Any, dtype: str) -> None:
        """Create the feed-forward, under its name in checkpoints."""
        if config.mixture is not None:
            self.mlp = config.mixture.layer(config.hidden_size, dtype)
            return
        kind = GatedMLP if config.gated else MLP
        self.mlp = kind(
            config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias, dtype
        )

    def attend(
        self, x: Tensor, call: Call, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Attention of x [B, S, hidden_size] to the same, and the states after this call."""
        cache = Cache(states["k"], states["v"])
        mixed, cache = self.self_attn(x, call.positions, cache=cache, past=call.past)
        return mixed, {"k": cache.keys, "v": cache.values}

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] to the same."""
        return self.mlp(x)

    def forward(
        self, x: Tensor, call: Call, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """x [B, S, hidden_size] to the same, and the states after this call."""
        normed = x if self.block == "post" else self.input_layernorm(x)
        mixed, states = self.attend(normed, call, states)
        if self.block in ("parallel", "parallel_two_norms"):
            other = normed if self.block == "parallel" else self.post_attention_layernorm(x)
            return x + self._scaled(mixed) + self._scaled(self.feed_forward(other)), states
        if self.block != "pre":
            mixed = self.attention_output_norm(mixed)
        x = x + self._scaled(mixed)
        fed = self.feed_forward(x if self.block == "post" else self.post_attention_layernorm(x))
        if self.block != "pre":
            fed = self.feed_forward_output_norm(fed)
        return x + self._scaled(fed), states

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_multiplier == 1 else x * self.residual_multiplier


class Decoder(Module):
    """Embedding, layers and the last norm; the caller applies the norm."""

    def __init__(
        self, config: DecoderConfig, dtype: str, layer: Callable[[Any, str], Module]
    ) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        if config.learned_positions:
            self.embed_positions = Embedding(config.learned_positions, config.hidden_size, dtype)
        if config.embedding_norm:
            self.embedding_norm = make_norm(config, dtype)
        self.layers = ModuleList(layer(options, dtype) for options in config.of_layers())
        self.norm = make_norm(config, dtype)
        self.config = config

    def forward(
        self, input_ids: Tensor, call: Call, states: Sequence[Mapping[str, Tensor]]
    ) -> tuple[Tensor, list[Mapping[str, Tensor]]]:
        """Ids [B, S] to hidden states [B, S, hidden_size], and the states after this call."""
        x = self.embed(input_ids, call)
        updated: list[Mapping[str, Tensor]] = []
        for layer, layer_states in zip(self.layers, states, strict=True):
            x, after = layer(x, call, layer_states)
            updated.append(after)
        return x, updated

    def embed(self, input_ids: Tensor, call: Call) -> Tensor:
        """Ids [B, S] to the input [B, S, hidden_size] of the first layer."""
        config, x = self.config, self.embed_tokens(input_ids)
        if config.embedding_multiplier != 1:
            x = x * config.embedding_multiplier
        if call.positions is not None and config.learned_positions:
            offset = config.position_offset
            x = x + self.embed_positions(call.positions + offset if offset else call.positions)
        return self.embedding_norm(x) if config.embedding_norm else x


class CausalLM(Module):
    """A decoder with its language model head; its arguments are those of language_model.py."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: str = "f32",
        layer: type[DecoderLayer] = DecoderLayer,
        decoder: type[Decoder] = Decoder,
    ) -> None:
        self.model = decoder(config, dtype, layer)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.head_bias, dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.config, self.states = config, layer_states(config, layer, dtype)

    def forward(
        self,
        input_ids: Tensor,
        past_lengths: Tensor,
        logit_positions: Tensor,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        **states: Tensor,
    ) -> dict[str, Tensor]:
        """Logits f32 [B, T, vocab_size] and the states after this call."""
        call = Call(positions, past_lengths, lengths, {})
        layers = [
            {name: states[f"{name}{i}"] for name in names} for i, names in enumerate(self.states)
        ]
        hidden, layers = self.model(input_ids, call, layers)
        # the norm works row by row, so it is applied to the requested rows only
        rows = self.model.norm(at_positions(hidden, logit_positions))
        logits = self.lm_head(rows).cast("f32")
        if self.config.logits_multiplier != 1:
            logits = logits * self.config.logits_multiplier
        if cap := self.config.logits_softcap:
            logits = F.tanh(logits / cap) * cap
        return results_of(logits, layers)


def layer_states(config: DecoderConfig, layer: type[DecoderLayer], dtype: str) -> list[States]:
    """The states of every layer."""
    return [layer.states(options, dtype) for options in config.of_layers()]


def register_decoder(
    model_type: str,
    architectures: Sequence[str],
    read: Callable[[ConfigReader], Config],
    layer: type[DecoderLayer] = DecoderLayer,
    alternatives: Callable[[Config], Mapping[str, Ref]] = other_names,
    stored: Callable[[Config], Sequence[Stored]] = lambda config: (),
    decoder: type[Decoder] = Decoder,
    **options: Any,
) -> Family[Config]:
    """Register the family whose models are a CausalLM with this `layer` and `decoder`.

    `options` are other fields of Family.
    """

    def build(config: Config, dtype: str) -> CausalLM:
        return CausalLM(config, dtype, layer, decoder)

    def signature(config: Config, dtype: str) -> Signature:
        states, longest = layer_states(config, layer, dtype), config.max_position_embeddings
        return signature_of(states, longest, config.has_positions)

    family = Family(
        model_type, architectures, read, build, signature, alternatives, stored, **options
    )
    return register(family)
