"""Encoders of tokens and of images, with a head: the models of one encoder.

Arguments: `input_ids`, `attention_mask` (1 for a token, 0 for padding) and, where there are types
of tokens, `token_type_ids`, i32 [B, S]; or `pixel_values` f32 [B, channels, height, width]. Results
are those of transformers, in f32. Parameters have the names of this file in every family; `Stored`
says where a checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...weights import Ref, UnboundRef
from .. import functional as F
from ..layers import Conv2d, Embedding
from ..layers.masks import key_mask, local_mask
from ..layers.positions import query_positions
from ..module import Module, Parameter
from ..tensor import Tensor
from ..trace import Spec
from .config_reader import ConfigReader
from .decoder import Call, Decoder, DecoderConfig, Stack, read_decoder
from .family import Family, Signature, register
from .heads import Head, HeadLayers, SentenceHead, SentenceLayers, Stage
from .stored import Layout, Stored, laid_out, renamed

SENTENCES = "SentenceTransformer"  # the architecture of a folder with a modules.json
_TASKS = """
    Model ForSequenceClassification ForTokenClassification ForMaskedLM ForQuestionAnswering
"""


@dataclass(frozen=True)
class EncoderConfig(DecoderConfig):
    """The sizes and options of an encoder, those of a decoder among them, and its head.

    `sliding_window` > 0 is the number of tokens that a query sees on either side. Texts: with a
    `padding_id` tokens that are not padding are at the positions padding_id + 1, + 2, ...
    (RoBERTa). Images have `image_size` rows and columns, 0 where the encoder is one of texts, and
    patches `patch_size`; `class_token` is a learned token in front of the patches. `leading_ones`:
    a checkpoint has it as [1, 1, hidden_size], and the positions as [1, tokens, hidden_size].
    """

    head: Head | SentenceHead = field(default_factory=Head)
    padding_id: int | None = None
    type_vocab_size: int = 0
    image_size: int = 0
    patch_size: int = 1
    num_channels: int = 3
    class_token: bool = True
    leading_ones: bool = False
    patch_bias: bool = True


class TextEncoder(Decoder):
    """Layers behind embeddings of tokens, positions and types."""

    def __init__(self, config: EncoderConfig, dtype: str) -> None:
        super().__init__(config, dtype)
        types = config.type_vocab_size
        self.types = Embedding(types, config.hidden_size, dtype) if types else None

    def call(self, inputs: Mapping[str, Tensor]) -> Call:
        """The positions of tokens, and which of them every layer sees."""
        config, ids = self.config, inputs["input_ids"]
        count, rows = ids.shape[1], query_positions(ids.shape[1])
        visible = key_mask(inputs["attention_mask"], count)
        masks = {0: visible}
        for window in sorted({options.sliding_window for options in config.of_layers()} - {0}):
            masks[window] = local_mask(rows, count, window) & visible
        if config.padding_id is not None:
            present = F.ne(ids, config.padding_id).cast("i32")
            return Call(F.cumsum(present, dim=1) * present + config.padding_id, masks=masks)
        return Call(rows if config.learned_positions else rows.expand(*ids.shape), masks=masks)

    def embed(self, inputs: Mapping[str, Tensor], call: Call) -> Tensor:
        """Ids [B, S] to embeddings [B, S, hidden_size]."""
        x, types = super().embed(inputs["input_ids"], call), inputs.get("token_type_ids")
        if self.types is None:
            return x
        return x + (self.types.weight if types is None else self.types(types))


class VisionEncoder(Stack):
    """Layers behind patches of images as tokens."""

    def __init__(self, config: EncoderConfig, dtype: str) -> None:
        super().__init__(config, dtype)
        size, patch, ones = config.hidden_size, config.patch_size, (1,) * config.leading_ones
        count, channels = (config.image_size // patch) ** 2, config.num_channels
        self.class_token = Parameter((*ones, *ones, size), dtype) if config.class_token else None
        self.patches = Conv2d(channels, size, patch, patch, bias=config.patch_bias, dtype=dtype)
        self.position_embeddings = Parameter((*ones, count + config.class_token, size), dtype)
        self.dtype = dtype

    def call(self, inputs: Mapping[str, Tensor]) -> Call:
        """Every layer sees all tokens."""
        return Call()

    def embed(self, inputs: Mapping[str, Tensor], call: Call) -> Tensor:
        """Images f32 [B, channels, height, width] to embeddings [B, tokens, hidden_size]."""
        x = self.patches(inputs["pixel_values"].cast(self.dtype))
        batch, size = x.shape[:2]
        x = x.reshape(batch, size, -1).permute(0, 2, 1)
        if self.class_token is not None:
            first = F.reshape(self.class_token, (1, 1, size)).expand(batch, 1, size)
            x = F.concat([first, x], 1)
        return x + self.position_embeddings


class EncoderModel(Module):
    """An encoder with its head."""

    def __init__(self, config: EncoderConfig, dtype: str) -> None:
        head, text = config.head, not config.image_size
        encoder = TextEncoder(config, dtype) if text else VisionEncoder(config, dtype)
        self.encoder, self.last_hidden_state = encoder, head.last_hidden_state
        if isinstance(head, SentenceHead):
            self.head = SentenceLayers(head, dtype)
            return
        self.head = HeadLayers(head, config, dtype)
        if isinstance(encoder, TextEncoder) and self.head.output and _tied(config):
            self.head.output.weight = encoder.embed_tokens.weight

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The results by name."""
        hidden: Tensor = self.encoder.last(self.encoder(inputs, self.encoder.call(inputs))[0])
        results = {"last_hidden_state": hidden} if self.last_hidden_state else {}
        results |= self.head(hidden, inputs)
        return {name: result.cast("f32") for name, result in results.items()}


def _tied(config: EncoderConfig) -> bool:
    """Whether the weights of the output are the table of tokens."""
    is_tied = isinstance(config.head, Head) and config.head.scores_tokens
    return is_tied and config.tie_word_embeddings


def signature(config: EncoderConfig, dtype: str, rows: str = "B") -> Signature:
    """Up to 32 rows, of texts or of images."""
    if config.image_size:
        shape = (rows, config.num_channels, config.image_size, config.image_size)
        return Signature({"pixel_values": Spec("f32", shape)}, {rows: (1, 1, 32)})
    names = ["input_ids", "attention_mask"]
    names += ["token_type_ids"] if config.type_vocab_size > 1 else []
    longest = config.max_position_embeddings
    longest -= 0 if config.padding_id is None else config.padding_id + 1
    dims = {rows: (1, 1, 32), "S": (1, min(128, longest), longest)}
    return Signature(dict.fromkeys(names, Spec("i32", (rows, "S"))), dims)


def stored_in(
    config: EncoderConfig, layout: Layout, base: str, inside: str = ""
) -> Sequence[Stored]:
    """`layout` with `base` in front of its keys, and the layers of the head; see Head."""
    entries = [
        replace(entry, pattern=inside + entry.pattern, key=base + entry.key)
        for entry in laid_out(layout, config)
    ]
    head = config.head
    if isinstance(head, SentenceHead):
        return entries
    bias = head.bias if _tied(config) else ""  # transformers ties it as well
    parts = {"output.bias": bias, "dense": head.dense, "norm": head.norm, "output": head.output}
    return entries + renamed({own: key for own, key in parts.items() if key}, "", f"{inside}head.")


def _alternatives(config: EncoderConfig) -> Mapping[str, Ref]:
    if not isinstance(config.head, Head) or not _tied(config):
        return {}
    output = config.head.output
    bias = {"head.output.bias": UnboundRef(f"{output}.bias")} if config.head.bias else {}
    return {"encoder.embed_tokens.weight": UnboundRef(f"{output}.weight"), **bias}


def register_encoder(
    model_type: str,
    architectures: Sequence[str],
    read: Callable[[ConfigReader], EncoderConfig],
    layout: Layout,
    base: str,
    unused: Sequence[str] = (),
) -> Family[EncoderConfig]:
    """Register a family; checkpoints of the encoder alone lack `base`, see `stored_in`."""

    def stored(config: EncoderConfig) -> Sequence[Stored]:
        return stored_in(config, layout, base)

    return register(
        Family(
            model_type, architectures, read, EncoderModel, signature, _alternatives, stored,
            prefixes=(base, ""), unused=unused,
        )
    )  # fmt: skip


def register_text_encoder(
    model_type: str,
    name: str,
    read: Callable[[ConfigReader], EncoderConfig],
    heads: Mapping[str, Head] | Callable[[ConfigReader], Mapping[str, Head]],
    layout: Layout,
    base: str,
    unused: str,
) -> Family[EncoderConfig]:
    """Register the classes of transformers `name` + a task, of `heads`, and sentence embeddings.

    `unused` are patterns of tensors of other heads, separated by spaces.
    """

    def with_head(config: ConfigReader) -> EncoderConfig:
        encoder, of_task = read(config), heads(config) if callable(heads) else heads
        return replace(encoder, head=_head(config, name, of_task, encoder.vocab_size))

    architectures = [*(name + task for task in _TASKS.split()), SENTENCES]
    return register_encoder(model_type, architectures, with_head, layout, base, unused.split())


def _head(
    config: ConfigReader, name: str, heads: Mapping[str, Head], tokens: int
) -> Head | SentenceHead:
    sentence, labels = config.inner("sentence_transformer"), read_labels(config)
    if config.architecture == SENTENCES and not sentence:
        raise config.error("architectures", "expected a folder with a modules.json")
    if config.architecture == SENTENCES:
        stages = tuple(Stage(**stage) for stage in sentence["stages"])
        return SentenceHead(tuple(sentence["pools"]), stages)
    task = config.architecture.removeprefix(name)
    pooled = ("pooler_output",) if heads[task].pool else ()
    changes: dict[str, dict[str, Any]] = {
        "Model": {"results": pooled, "last_hidden_state": True},
        "ForMaskedLM": {"outputs": tokens, "scores_tokens": True},
        "ForQuestionAnswering": {"outputs": 2, "results": ("start_logits", "end_logits")},
    }
    return replace(heads[task], **changes.get(task, {"outputs": labels}))


def read_encoder(
    config: ConfigReader,
    keys: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    **more: Any,
) -> EncoderConfig:
    """An encoder with the keys of BERT; the arguments are those of `read_decoder`."""
    names = {"norm_eps": "layer_norm_eps", **(keys or {})}
    values = {"hidden_act": "gelu", "norm_eps": 1e-12, "tie_word_embeddings": True}
    fixed = {"num_key_value_heads": None, "head_dim": None, "norm": "layer", "gated": False}
    return read_decoder(
        config,
        EncoderConfig,
        keys=names,
        defaults=values | {**(defaults or {})},
        **{"biases": True, "rope": None, "causal": False, **fixed, **more},
    )


def read_bert(
    config: ConfigReader, keys: Mapping[str, str] | None = None, **more: Any
) -> EncoderConfig:
    """An encoder of BERT's kind: learned positions, and norms of sums."""
    config.require("position_embedding_type", "absolute", "irc supports absolute positions only")
    longest = config.integer("max_position_embeddings")
    sums = {"learned_positions": longest, "block": "sums", "last_norm": False}
    return read_encoder(config, keys, embedding_norm=True, **sums, **more)


def read_labels(config: ConfigReader) -> int:
    """The number of classes."""
    count = config.integer("num_labels", 2)
    return len(config.inner("id2label")) or count


# where BERT's checkpoints have an encoder; RoBERTa and others kept the names
_BERT = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "layers.*.self_attn.q_proj": "encoder.layer.*.attention.self.query",
    "layers.*.self_attn.k_proj": "encoder.layer.*.attention.self.key",
    "layers.*.self_attn.v_proj": "encoder.layer.*.attention.self.value",
    "layers.*.self_attn.o_proj": "encoder.layer.*.attention.output.dense",
    "layers.*.attention_output_norm": "encoder.layer.*.attention.output.LayerNorm",
    "layers.*.mlp.up_proj": "encoder.layer.*.intermediate.dense",
    "layers.*.mlp.down_proj": "encoder.layer.*.output.dense",
    "layers.*.feed_forward_output_norm": "encoder.layer.*.output.LayerNorm",
}
BERT_STORED = renamed(_BERT, "", "encoder.")
