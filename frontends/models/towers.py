"""Models of one encoder with a head, or of an encoder of texts and one of images (CLIP).

Arguments: `input_ids`, `attention_mask` (1 for a token, 0 for padding) and, where there are types
of tokens, `token_type_ids`, i32 [B, S]; `pixel_values` f32 [B, channels, height, width], beside
texts [N, ...]. Results are those of transformers, in f32; `sentence_embedding` that of
sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from ...weights import Ref, UnboundRef
from .. import functional as F
from ..module import Module, Parameter
from ..tensor import Tensor
from ..trace import Spec
from .config_reader import HARMLESS, MOST_LAYERS, ConfigReader
from .encoder import TextConfig, TextEncoder, VisionConfig, VisionEncoder
from .family import Family, Signature, register
from .heads import Head, HeadLayers, SentenceHead, SentenceLayers, Stage
from .stored import Stored

# What the objects of a config of two encoders have by default
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
BASE["num_hidden_layers"] = 12
SENTENCES = "SentenceTransformer"  # the architecture of a folder with a modules.json
_TASKS = """
    Model ForSequenceClassification ForTokenClassification ForMaskedLM ForQuestionAnswering
"""


@dataclass(frozen=True)
class Tower:
    """An encoder and its head."""

    encoder: TextConfig | VisionConfig
    head: Head | SentenceHead
    tie_word_embeddings: bool = False  # the weights of the head's output are the table of tokens


@dataclass(frozen=True)
class TwoTowers:
    """Encoders of texts and of images, whose vectors are compared; SigLIP adds a bias to scores."""

    text: Tower
    vision: Tower
    bias: bool = False


class TowerModel(Module):
    """An encoder with its head."""

    def __init__(self, tower: Tower, dtype: str) -> None:
        config, head = tower.encoder, tower.head
        text = TextEncoder(config, dtype) if isinstance(config, TextConfig) else None
        self.encoder: Any = text or VisionEncoder(cast("VisionConfig", config), dtype)
        if isinstance(head, SentenceHead):
            self.head = SentenceLayers(head, dtype)
        else:
            self.head = HeadLayers(head, config, dtype)
            if tower.tie_word_embeddings and text and self.head.output:
                self.head.output.weight = text.embed_tokens.weight
        self.last_hidden_state = head.last_hidden_state

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The results by name."""
        hidden: Tensor = self.encoder(**inputs)
        results = {"last_hidden_state": hidden} if self.last_hidden_state else {}
        results |= self.head(hidden, inputs)
        return {name: result.cast("f32") for name, result in results.items()}


class TwoTowerModel(Module):
    """Vectors of texts and images of length 1, and their products as scores."""

    def __init__(self, towers: TwoTowers, dtype: str) -> None:
        self.text, self.vision = TowerModel(towers.text, dtype), TowerModel(towers.vision, dtype)
        ones = (1,) * towers.bias
        self.logit_scale = Parameter(ones, dtype)
        self.logit_bias = Parameter(ones, dtype) if towers.bias else None

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor
    ) -> dict[str, Tensor]:
        """Scores of B texts and N images, and their vectors [B, D] and [N, D]."""
        text = self.text(input_ids=input_ids, attention_mask=attention_mask)
        image = self.vision(pixel_values=pixel_values)
        texts, images = (_unit([*found.values()][-1]) for found in (text, image))
        scores = F.matmul(texts, images.permute(1, 0)) * F.exp(F.cast(self.logit_scale, "f32"))
        if self.logit_bias is not None:
            scores = scores + F.cast(self.logit_bias, "f32")
        scored = {"logits_per_image": scores.permute(1, 0), "logits_per_text": scores}
        return {**scored, "text_embeds": texts, "image_embeds": images}


def _unit(x: Tensor) -> Tensor:
    return x / F.sqrt((x * x).sum(1, keep=True))


def _tower_signature(tower: Tower, dtype: str, rows: str = "B") -> Signature:
    encoder, dims = tower.encoder, {rows: (1, 1, 32)}
    if isinstance(encoder, VisionConfig):
        shape = (rows, encoder.num_channels, *encoder.image_size)
        return Signature({"pixel_values": Spec("f32", shape)}, dims)
    names = ["input_ids", "attention_mask"]
    names += ["token_type_ids"] if encoder.type_vocab_size > 1 else []
    padding = encoder.padding_id
    longest = encoder.max_position_embeddings - (0 if padding is None else padding + 1)
    dims |= {"S": (1, min(128, longest), longest)}
    return Signature(dict.fromkeys(names, Spec("i32", (rows, "S"))), dims)


def _two_signature(towers: TwoTowers, dtype: str) -> Signature:
    text, vision = _tower_signature(towers.text, dtype), _tower_signature(towers.vision, dtype, "N")
    return Signature({**text.inputs, **vision.inputs}, {**text.dims, **vision.dims})


Layout: TypeAlias = Callable[[Any], Sequence[Stored]]  # where a checkpoint has an encoder


def named(names: Mapping[str, str], inside: str = "encoder.") -> list[Stored]:
    """Where a checkpoint has the parameters inside a part of a tower: pattern -> key."""
    return [Stored(inside + pattern, key) for pattern, key in names.items()]


def bert_names(encoder: object = None) -> list[Stored]:
    """Where BERT's checkpoints have an encoder; RoBERTa and others kept the names."""
    names = {
        "embed_tokens": "embeddings.word_embeddings",
        "embed_positions": "embeddings.position_embeddings",
        "token_type_embeddings": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
        "layers.*.attention.q_proj": "encoder.layer.*.attention.self.query",
        "layers.*.attention.k_proj": "encoder.layer.*.attention.self.key",
        "layers.*.attention.v_proj": "encoder.layer.*.attention.self.value",
        "layers.*.attention.o_proj": "encoder.layer.*.attention.output.dense",
        "layers.*.attention_norm": "encoder.layer.*.attention.output.LayerNorm",
        "layers.*.mlp.up_proj": "encoder.layer.*.intermediate.dense",
        "layers.*.mlp.down_proj": "encoder.layer.*.output.dense",
        "layers.*.mlp_norm": "encoder.layer.*.output.LayerNorm",
    }
    return named(names)


def _stored(tower: Tower, layout: Layout, base: str, inside: str = "") -> list[Stored]:
    """The parameters of a tower whose encoder's keys begin with `base`."""
    entries = [
        replace(entry, pattern=inside + entry.pattern, key=base + entry.key)
        for entry in layout(tower.encoder)
    ]
    head = tower.head
    if isinstance(head, SentenceHead):
        return entries
    bias = head.bias if tower.tie_word_embeddings else ""  # transformers ties it as well
    parts = {"output.bias": bias, "dense": head.dense, "norm": head.norm, "output": head.output}
    return entries + named({part: key for part, key in parts.items() if key}, f"{inside}head.")


def _alternatives(tower: Tower) -> Mapping[str, Ref]:
    head = tower.head
    if not isinstance(head, Head) or not tower.tie_word_embeddings:
        return {}
    bias = {"head.output.bias": UnboundRef(f"{head.output}.bias")} if head.bias else {}
    return {"encoder.embed_tokens.weight": UnboundRef(f"{head.output}.weight"), **bias}


def register_tower(
    model_type: str,
    architectures: Sequence[str],
    read: Callable[[ConfigReader], Tower],
    layout: Layout,
    base: str,
    unused: Sequence[str] = (),
) -> Family[Tower]:
    """Register the family of an encoder with its head; `base` is in front of its keys, or absent.

    `layout` says where a checkpoint has the parameters of the encoder, behind `base`.
    """

    def stored(tower: Tower) -> Sequence[Stored]:
        return _stored(tower, layout, base)

    return register(
        Family(
            model_type, architectures, read, TowerModel, _tower_signature, _alternatives, stored,
            (base, ""), unused,
        )
    )  # fmt: skip


def register_two_towers(
    model_type: str, architecture: str, read: Callable[[ConfigReader], TwoTowers], layout: Layout
) -> Family[TwoTowers]:
    """Register the family of a text and a vision tower, each with this layout."""

    def stored(towers: TwoTowers) -> Sequence[Stored]:
        text = _stored(towers.text, layout, "text_model.", "text.")
        return text + _stored(towers.vision, layout, "vision_model.", "vision.")

    return register(
        Family(model_type, (architecture,), read, TwoTowerModel, _two_signature, stored=stored)
    )


def register_text(
    model_type: str,
    name: str,
    read: Callable[[ConfigReader], Tower],
    layout: Layout,
    base: str,
    unused: Sequence[str] = (),
) -> Family[Tower]:
    """`register_tower` for the classes of transformers `name` + task, and sentence embeddings."""
    architectures = [*(name + task for task in _TASKS.split()), SENTENCES]
    return register_tower(model_type, architectures, read, layout, base, unused)


def read_text(
    config: ConfigReader, name: str, heads: Mapping[str, Head], encoder: TextConfig
) -> Tower:
    """The encoder with the head of the architecture, which is `name` + a key of `heads`."""
    tied = config.flag("tie_word_embeddings", True)
    sentence, labels = config.inner("sentence_transformer"), read_labels(config)
    if config.architecture == SENTENCES:
        stages = tuple(Stage(**stage) for stage in sentence["stages"])
        return Tower(encoder, SentenceHead(tuple(sentence["pools"]), stages))
    task = config.architecture.removeprefix(name)
    head = heads[task]
    pooled = ("pooler_output",) if head.pool else ()
    changes: dict[str, dict[str, Any]] = {
        "Model": {"results": pooled, "last_hidden_state": True},
        "ForMaskedLM": {"outputs": encoder.vocab_size},
        "ForQuestionAnswering": {"outputs": 2, "results": ("start_logits", "end_logits")},
    }
    head = replace(head, **changes.get(task, {"outputs": labels}))
    return Tower(encoder, head, tied and task == "ForMaskedLM")


def read_labels(config: ConfigReader) -> int:
    """The number of classes."""
    count = config.integer("num_labels", 2)
    return len(config.inner("id2label")) or count


def read_inner(
    config: ConfigReader,
    key: str,
    read: Callable[[ConfigReader], Tower],
    defaults: Mapping[str, Any],
    **more: Any,
) -> Tower:
    """What `read` makes of the object at a key; old CLIPs repeat it in `key`_dict."""
    values = {**config.inner(key), **config.inner(f"{key}_dict")}
    if not values:
        raise config.error(key, "expected the sizes of an encoder")
    values = {**defaults, **values, **more}
    inner = ConfigReader(values, f"config.json: {key}")
    tower = read(inner)
    inner.finish(key, HARMLESS)
    return tower


def read_sizes(
    config: ConfigReader,
    act: tuple[str, str] = ("hidden_act", "gelu"),
    eps: tuple[str, float] = ("layer_norm_eps", 1e-12),
) -> dict[str, Any]:
    """The sizes of every encoder; `act` and `eps` are key and default."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads")
    return {
        **{key: config.integer(key) for key in sizes},
        "num_hidden_layers": config.integer("num_hidden_layers", most=MOST_LAYERS),
        "act": config.word(*act),
        "eps": config.number(*eps),
    }


def read_bert(config: ConfigReader, **more: Any) -> TextConfig:
    """An encoder with BERT's keys, and `more` fields."""
    if config.word("position_embedding_type", "absolute") != "absolute":
        raise config.error("position_embedding_type", "irc supports absolute positions only")
    return TextConfig(
        **read_sizes(config),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        **more,
    )
