"""Encoders of texts, each with every head; a name is model_type/task."""

from __future__ import annotations

from typing import Any

from . import Case

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 24,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}
MODERN = SIZES | {
    "num_hidden_layers": 4,
    "local_attention": 4,
    "classifier_pooling": "mean",
    "cls_token_id": 0,
    "sep_token_id": 2,
}
DISTILLED = SIZES | {"dim": 36, "hidden_dim": 42, "n_layers": 2, "n_heads": 3}
for _key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
    del DISTILLED[_key]
TASKS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM",
         "ForQuestionAnswering")  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES | {"tie_word_embeddings": False}),
    "roberta": ("Roberta", SIZES | {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", SIZES),
    "modernbert": ("ModernBert", MODERN),
    "mpnet": ("MPNet", SIZES),
    "distilbert": ("DistilBert", DISTILLED),
}
ENCODERS: dict[str, Case] = {
    f"{model_type}/{task}": Case(
        model_type,
        keys | ({"num_labels": 3} if "Classification" in task else {}),
        ("tp=2", "tp=3", "pp=2") if task == "ForMaskedLM" else (),
        name + task,
    )
    for model_type, (name, keys) in FAMILIES.items()
    for task in TASKS
}
