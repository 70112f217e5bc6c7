"""A Llama folder through torch.onnx.export: caches in and out, dynamic batch and lengths."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class WithCaches(torch.nn.Module):
    """The model with its caches as plain inputs and outputs, as every runtime needs them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, position_ids: Any, caches: list[Any]) -> list[Any]:
        cache = DynamicCache(config=self.model.config)
        for i in range(len(caches) // 2):
            cache.update(caches[2 * i], caches[2 * i + 1], i)
        out = self.model(
            input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        layers = out.past_key_values.layers
        return [out.logits, *(t for layer in layers for t in (layer.keys, layer.values))]


def main() -> None:
    source, target = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    c = model.config
    past, new = 4, 3
    caches = [
        torch.zeros(1, c.num_key_value_heads, past, c.head_dim)
        for _ in range(2 * c.num_hidden_layers)
    ]
    ids = torch.zeros(1, new, dtype=torch.int64)
    positions = torch.arange(past, past + new)[None]
    length, held = torch.export.Dim.DYNAMIC, torch.export.Dim.DYNAMIC
    shapes = ({1: length}, {1: length}, [{2: held} for _ in caches])
    with torch.no_grad():
        torch.onnx.export(
            WithCaches(model).eval(), (ids, positions, caches), target, dynamo=True,
            external_data=True, dynamic_shapes=shapes, verbose=False,
        )  # fmt: skip


if __name__ == "__main__":
    main()
