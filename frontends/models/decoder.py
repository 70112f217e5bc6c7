"""A decoder of layers with attention and its language model head; families differ in options.

Names of parameters as in the Hugging Face checkpoints of Llama, Mistral, Qwen and Mixtral.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, overload

from ...errors import Error
from ...weights import Ref, UnboundRef
from .. import functional as F
from ..layers import MLP, Attention, Embedding, GatedMLP, LayerNorm, Linear, RmsNorm, Rope
from ..layers.attention import Cache
from ..layers.positions import RelativePositions, query_positions
from ..module import Module, ModuleList, Parameter
from ..tensor import Tensor
from .config_reader import REQUIRED, ConfigReader
from .family import Family, Signature, register
from .language_model import States, at_positions, key_value_cache, results_of, signature_of
from .mixture import Mixture, joined_alternatives
from .rope_config import read_rope

_POSITIVE = """
    vocab_size hidden_size intermediate_size num_hidden_layers max_position_embeddings
"""
Block = Literal["pre", "post", "sandwich", "sums", "parallel", "parallel_two_norms"]


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes and options of a decoder, most of them named as in config.json.

    `num_key_value_heads` None means num_attention_heads, `head_dim` None hidden_size /
    num_attention_heads, `sliding_window` 0 no window, a softcap of 0 none. `rope` None: queries and
    keys are not rotated. `learned_positions` > 0 is the size of a table of positions, whose first
    `position_offset` rows have no position; `relative` adds biases by distance, the same in all
    layers. `qk_norm` normalizes queries and keys per head, with the same weights or with those of
    `each_head`, or across all heads; `rotated`: per head, behind the rope and without weights.
    `attention` are other options of Attention, by the names that it gives them.

    `norm_offset` is added to the weights of RMS norms; `norm_bias` and `norm_affine`, whether they
    have weights at all, are for layer norms. `block`
    says where the norms of a layer are: before attention and feed-forward, behind each (before the
    residual is added), both, behind the `sums` with the residual (Vaswani et al., 2017), or
    `parallel`, with attention and feed-forward of the same input, of one norm or of two. Without
    `input_norm` attention has none before it, without `last_norm` the layers have none behind them.
    What attention and feed-forward add to the residual is multiplied by `residual_multiplier`,
    embeddings by `embedding_multiplier`, and logits by `logits_multiplier`, none of which is
    rounded to the dtype without `round_embedding_multiplier`. `mixture`: the feed-forward is a
    mixture of experts. `cross_attention`: layers also attend to the result of an encoder.

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
    input_norm: bool = True
    last_norm: bool = True
    causal: bool = True
    cross_attention: bool = False
    rope: Rope | None = field(default_factory=Rope)
    learned_positions: int = 0
    position_offset: int = 0
    relative: RelativePositions | None = None
    qkv_bias: bool = False
    key_bias: bool = True
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    logits_bias: bool = False
    qk_norm: Literal["", "head", "each_head", "all_heads", "rotated"] = ""
    attention: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sliding_window: int = 0
    embedding_norm: bool = False
    embedding_multiplier: float = 1.0
    round_embedding_multiplier: bool = False
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float = 0.0
    tie_word_embeddings: bool = False
    mixture: Mixture | None = None
    layers: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE.split():
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
        learned = self.learned_positions or self.relative
        return bool(learned) or any(layer.rope for layer in self.of_layers())

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
    attention_bias: bool = False,
    biases: bool = False,
    **more: Any,
) -> DecoderConfig:
    """The sizes that every decoder has, and `more` fields of `kind`, which are not read.

    `keys` are the names of fields in a family's config.json where they differ, with | between
    alternatives; `defaults` are the values of absent keys. The next three options describe the
    rope, which `more` may replace. `attention_bias`: products of attention have biases; `biases`:
    those of the feed-forward as well.
    """
    attention = dict.fromkeys(("qkv_bias", "output_bias"), attention_bias or biases)
    more = {**attention, "mlp_bias": biases, **more}
    names, values = {"norm_eps": "rms_norm_eps", **(keys or {})}, defaults or {}
    sizes = {
        name: read(config, config.key(names.get(name, name)), values.get(name, default))
        for name, (read, default) in _READ.items()
        if name not in more
    } | more
    if "rope" not in sizes:
        heads = max(1, sizes["num_attention_heads"])
        head_size = sizes["head_dim"] or sizes["hidden_size"] // heads
        context = sizes["max_position_embeddings"]
        rope = read_rope(config, head_size, context, rope_theta, rotary_fraction)
        sizes["rope"] = replace(rope, interleaved=True) if interleaved_rope else rope
    return kind(**sizes)


# field of DecoderConfig -> how its key in config.json is read, and its default
_READ: dict[str, tuple[Callable[[ConfigReader, str, Any], Any], Any]] = {
    "vocab_size": (ConfigReader.integer, REQUIRED),
    "hidden_size": (ConfigReader.integer, REQUIRED),
    "intermediate_size": (ConfigReader.integer, REQUIRED),
    "num_hidden_layers": (ConfigReader.layers, REQUIRED),
    "num_attention_heads": (ConfigReader.integer, REQUIRED),
    "num_key_value_heads": (ConfigReader.integer, None),
    "head_dim": (ConfigReader.integer, None),
    "hidden_act": (ConfigReader.word, "silu"),
    "max_position_embeddings": (ConfigReader.integer, REQUIRED),
    "norm_eps": (ConfigReader.number, 1e-6),
    "tie_word_embeddings": (ConfigReader.flag, False),
}


def read_windows(
    config: ConfigReader, is_local: Callable[[int], Any] | None = None
) -> tuple[Mapping[str, Any], ...]:
    """The windows of the layers of Qwen, which `use_sliding_window` switches on.

    Without `layer_types` layer i (from 0) has a window if `is_local(i)`, by default from layer
    `max_window_layers` on.
    """
    count, window = config.layers(), config.integer("sliding_window", 0)
    first = config.integer("max_window_layers", 28)
    if not config.flag("use_sliding_window"):
        config.require("layer_types", ["full_attention"] * count, "use_sliding_window is not set")
        return ()
    if window < 1:
        raise config.error("use_sliding_window", "expected a sliding_window of at least 1")
    local = [is_local(i) if is_local else i >= first for i in range(count)]
    default = ["sliding_attention" if limited else "full_attention" for limited in local]
    return read_layer_types(config, window_types(window), default=default)


def window_types(window: int, **local: Any) -> dict[str, Mapping[str, Any]]:
    """The options of layers with and without a window; `local` are others of the former."""
    return {
        "sliding_attention": {"sliding_window": window, **local},
        "full_attention": {"sliding_window": 0},
    }


def read_layer_types(
    config: ConfigReader,
    types: Mapping[Any, Mapping[str, Any]],
    period: int = 0,
    default: Sequence[str] = (),
) -> tuple[Mapping[str, Any], ...]:
    """The options of every layer by its type in `layer_types` of config.json.

    `types` are the options of each type. Without `layer_types` layers have the types of `default`;
    without both, every layer number `period` (from 1) has the last type, the others the first.
    """
    names, count = config.words("layer_types") or default, config.layers()
    first, last = next(iter(types)), list(types)[-1]
    if not names:
        names = [last if period and (i + 1) % period == 0 else first for i in range(count)]
    for name in names:
        if name not in types:
            raise config.error("layer_types", f"expected {' or '.join(types)}")
    return tuple(types[name] for name in names)


def tied_embeddings(config: DecoderConfig, head: str = "lm_head.weight") -> Mapping[str, Ref]:
    """The other name of a tied embedding table: the key of the head."""
    if not config.tie_word_embeddings:
        return {}
    return {"model.embed_tokens.weight": UnboundRef(head)}


def other_names(config: DecoderConfig) -> Mapping[str, Ref]:
    """Where a checkpoint may have a tied embedding table, and experts that it stores joined."""
    return {**tied_embeddings(config), **joined_alternatives(config)}


@dataclass(frozen=True)
class Call:
    """What one call of a model gives to every layer: positions i32 [B|1, S], past lengths i32 [B].

    `positions` is None where a model has none, `lengths` i32 [B], the numbers of tokens of this
    call, where no layer depends on them; `encoder_lengths` are those of the encoder. An encoder has
    no past, but `masks` by the windows of layers. `bias` is that of the scores of all layers.
    `memory` holds what layers leave for later ones in this call.
    """

    positions: Tensor | None = None
    past: Tensor | None = None
    lengths: Tensor | None = None
    encoder_lengths: Tensor | None = None
    masks: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    bias: Tensor | None = None
    memory: dict[str, Any] = field(default_factory=dict[str, Any])


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a number that is not rounded to the dtype of x."""
    return x if factor == 1 else (x.cast("f32") * factor).cast(x.dtype)


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


def make_attention(config: Any, dtype: str, **options: Any) -> Attention:
    """The attention of a layer; `options` are others of Attention."""
    attention = Attention(
        config.hidden_size,
        config.num_attention_heads,
        config.kv_heads,
        config.head_size,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm=partial(_make_qk_norm, config, dtype) if config.qk_norm else None,
        norm_all_heads=config.qk_norm in ("each_head", "all_heads"),
        norm_rotated=config.qk_norm == "rotated",
        rope=config.rope,
        causal=config.causal,
        window=config.sliding_window if config.causal else 0,
        dtype=dtype,
        **config.attention,
        **options,
    )
    if not config.key_bias:
        attention.k_proj.bias = None
    return attention


def _normed(norm: Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class DecoderLayer(Module):
    """Attention and a feed-forward, with norms where `block` says, added to their input.

    Layers of encoders are the same, without states.
    """

    def __init__(self, config: Any, dtype: str) -> None:
        def norm(is_present: bool) -> Module | None:
            return make_norm(config, dtype) if is_present else None

        block, has_cross_attention = config.block, config.cross_attention
        before, behind = block not in ("post", "sums"), block in ("post", "sandwich", "sums")
        self.input_layernorm = norm(before and config.input_norm)
        self.add_attention(config, dtype)
        self.attention_output_norm = norm(behind)
        self.cross_attn_input_norm = norm(before and has_cross_attention)
        size, self.cross_attn = config.hidden_size, None
        if has_cross_attention:
            self.cross_attn = make_attention(config, dtype, memory_size=size)
        self.cross_attn_output_norm = norm(behind and has_cross_attention)
        self.post_attention_layernorm = norm(before and block != "parallel")
        self.add_feed_forward(config, dtype)
        self.feed_forward_output_norm = norm(behind)
        self.block, self.residual_multiplier = block, config.residual_multiplier
        self.window = config.sliding_window

    @staticmethod
    def states(config: Any, dtype: str) -> States:
        """The states of a layer with these options, by the names that `attend` takes."""
        return key_value_cache(config.kv_heads, config.head_size, dtype)

    def add_attention(self, config: Any, dtype: str) -> None:
        """Create the attention, under its name in checkpoints."""
        self.self_attn = make_attention(config, dtype)

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
        bias, mask = call.bias, call.masks.get(self.window)
        if not states:
            lengths = call.lengths
            return self.self_attn(x, call.positions, lengths=lengths, mask=mask, bias=bias), {}
        cache, past = Cache(states["k"], states["v"]), call.past
        mixed, cache = self.self_attn(x, call.positions, cache=cache, past=past, bias=bias)
        return mixed, {"k": cache.keys, "v": cache.values}

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] to the same."""
        return self.mlp(x)

    def forward(
        self, x: Tensor, call: Call, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """x [B, S, hidden_size] to the same, and the states after this call."""
        normed = _normed(self.input_layernorm, x)
        mixed, after = self.attend(normed, call, states)
        if self.block in ("parallel", "parallel_two_norms"):
            norm = self.post_attention_layernorm
            fed = self.feed_forward(normed if norm is None else norm(x))
            return self._added(self._added(x, mixed), fed), after
        x = self._added(x, mixed, self.attention_output_norm)
        if self.cross_attn is not None:
            memory = Cache(states["cross_k"], states["cross_v"])
            normed = _normed(self.cross_attn_input_norm, x)
            mixed = self.cross_attn(normed, memory=memory, lengths=call.encoder_lengths)
            x = self._added(x, mixed, self.cross_attn_output_norm)
        fed = self.feed_forward(_normed(self.post_attention_layernorm, x))
        return self._added(x, fed, self.feed_forward_output_norm), after

    def _added(self, x: Tensor, y: Tensor, norm: Module | None = None) -> Tensor:
        """The sum of the residual x and y, which the norm is for, or for the sum."""
        if self.block == "sums":
            return _normed(norm, x + y)
        return x + scaled(_normed(norm, y), self.residual_multiplier)


class Stack(Module):
    """Layers, with learned positions and a norm in front and a norm behind, which may be absent."""

    def __init__(
        self, config: Any, dtype: str, layer: Callable[[Any, str], Module] = DecoderLayer
    ) -> None:
        size, positions = config.hidden_size, config.learned_positions
        self.embed_positions = Embedding(positions, size, dtype) if positions else None
        self.relative_table = None
        if config.relative is not None:
            shape = config.num_attention_heads, config.relative.buckets
            self.relative_table = Parameter(shape, dtype)
        self.embedding_norm = make_norm(config, dtype) if config.embedding_norm else None
        self.layers = ModuleList(layer(options, dtype) for options in config.of_layers())
        self.norm = make_norm(config, dtype) if config.last_norm else None
        self.config: Any = config

    def embed(self, inputs: Any, call: Call) -> Tensor:
        """What the model gets to embeddings [B, S, hidden_size], which they are already here."""
        return inputs

    def forward(
        self, inputs: Any, call: Call, states: Sequence[Mapping[str, Tensor]] = ()
    ) -> tuple[Tensor, list[Mapping[str, Tensor]]]:
        """Hidden states [B, S, hidden_size] before the last norm, and the states after it."""
        x, positions = self.embed(inputs, call), call.positions
        if self.embed_positions is not None and positions is not None:
            offset = self.config.position_offset
            x = x + self.embed_positions(positions + offset if offset else positions)
        x = _normed(self.embedding_norm, x)
        if self.relative_table is not None:
            queries, keys = query_positions(x.shape[1]), x.shape[1]
            if states:
                queries, keys = positions, states[0]["k"].shape[2]
            bias = self.config.relative.bias(self.relative_table, queries, keys)
            call = replace(call, bias=bias)
        updated: list[Mapping[str, Tensor]] = []
        for i, layer in enumerate(self.layers):
            x, after = layer(x, call, states[i] if states else {})
            updated.append(after)
        return x, updated

    def last(self, x: Tensor) -> Tensor:
        """The last norm of x, which works row by row, where there is one."""
        return _normed(self.norm, x)


class Decoder(Stack):
    """A stack with the embeddings of tokens."""

    def __init__(
        self, config: Any, dtype: str, layer: Callable[[Any, str], Module] = DecoderLayer
    ) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        super().__init__(config, dtype, layer)

    def embed(self, inputs: Any, call: Call) -> Tensor:
        """Ids [B, S] to embeddings [B, S, hidden_size]."""
        x, factor = self.embed_tokens(inputs), self.config.embedding_multiplier
        return x * factor if self.config.round_embedding_multiplier else scaled(x, factor)


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
        self.logits_bias = Parameter((1, config.vocab_size), dtype) if config.logits_bias else None
        self.config: Any = config
        memory = ("cross_k", "cross_v") if config.cross_attention else ()
        self.state_names = [(*specs, *memory) for specs in layer_states(config, layer, dtype)]

    def forward(
        self,
        input_ids: Tensor,
        past_lengths: Tensor,
        logit_positions: Tensor,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        encoder_lengths: Tensor | None = None,
        **states: Tensor,
    ) -> dict[str, Tensor]:
        """Logits f32 [B, T, vocab_size] and the states after this call."""
        call = Call(positions, past_lengths, lengths, encoder_lengths)
        layers = [
            {name: states[f"{name}{i}"] for name in names}
            for i, names in enumerate(self.state_names)
        ]
        hidden, layers = self.model(input_ids, call, layers)
        rows = self.model.last(at_positions(hidden, logit_positions))
        logits = scaled(self.lm_head(rows).cast("f32"), self.config.logits_multiplier)
        if self.logits_bias is not None:
            logits = logits + F.cast(self.logits_bias, "f32")
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
    decoder: type[Decoder] = Decoder,
    **options: Any,
) -> Family[Config]:
    """Register the family whose models are a CausalLM with this `layer` and `decoder`.

    `options` are other fields of Family, such as `stored`.
    """

    def build(config: Config, dtype: str) -> CausalLM:
        return CausalLM(config, dtype, layer, decoder)

    def signature(config: Config, dtype: str) -> Signature:
        states, longest = layer_states(config, layer, dtype), config.max_position_embeddings
        return signature_of(states, longest, config.has_positions)

    family = Family(model_type, architectures, read, build, signature, alternatives, **options)
    return register(family)
