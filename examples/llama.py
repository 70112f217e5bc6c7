"""An example of a Llama, with sizes from a checkpoint folder, or small ones.

irc compile examples/llama.py --checkpoint examples/tiny_llama -o build/tiny_llama
irc compile examples/llama.py --set layers=4 --random-weights 1 -o build/random_llama
"""

import json
from pathlib import Path

import irc
from irc.frontends import Module, ModuleList
from irc.frontends import functional as F
from irc.frontends.layers import Attention, Embedding, GatedMLP, Linear, RmsNorm, Rope
from irc.frontends.layers.attention import Cache


class Layer(Module):
    def __init__(self, sizes, dtype):
        hidden, eps = sizes["hidden_size"], sizes["rms_norm_eps"]
        self.input_layernorm = RmsNorm(hidden, eps, dtype=dtype)
        self.self_attn = Attention(
            hidden,
            sizes["num_attention_heads"],
            sizes["num_key_value_heads"],
            sizes["head_dim"],
            rope=Rope(theta=sizes["rope_theta"]),
            dtype=dtype,
        )
        self.post_attention_layernorm = RmsNorm(hidden, eps, dtype=dtype)
        self.mlp = GatedMLP(hidden, sizes["intermediate_size"], dtype=dtype)

    def forward(self, x, positions, past, cache):
        y, cache = self.self_attn(self.input_layernorm(x), positions, past=past, cache=cache)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(Module):
    def __init__(self, sizes, dtype):
        self.embed_tokens = Embedding(sizes["vocab_size"], sizes["hidden_size"], dtype)
        self.layers = ModuleList(Layer(sizes, dtype) for _ in range(sizes["num_hidden_layers"]))
        self.norm = RmsNorm(sizes["hidden_size"], sizes["rms_norm_eps"], dtype=dtype)


class Llama(Module):
    """The attributes are named as in the checkpoint, so that every weight is bound."""

    def __init__(self, sizes, dtype):
        self.model = Decoder(sizes, dtype)
        self.lm_head = Linear(sizes["hidden_size"], sizes["vocab_size"], bias=False, dtype=dtype)
        if sizes["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids, positions, past_lengths, logit_positions, **caches):
        x = self.model.embed_tokens(input_ids)
        results = {}
        for i, layer in enumerate(self.model.layers):
            cache = Cache(caches[f"k{i}"], caches[f"v{i}"])
            x, (results[f"k{i}"], results[f"v{i}"]) = layer(x, positions, past_lengths, cache)

        # the head is applied to the requested tokens only
        batch, wanted = logit_positions.shape
        index = logit_positions[:, :, None].expand(batch, wanted, x.shape[2])
        x = self.model.norm(F.gather_elements(x, index, dim=1))
        return {"logits": self.lm_head(x).cast("f32"), **results}


def build(
    checkpoint: str | None = None,
    dtype: str = "f32",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocab: int = 256,
    context: int = 512,
):
    """The traced model; a checkpoint determines the sizes."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    if checkpoint:
        config = json.loads((Path(checkpoint) / "config.json").read_text())
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError("this example supports default rope only; compile the folder itself")
        sizes |= {name: config[name] for name in sizes if config.get(name) is not None}
        if config.get("head_dim") is None:
            sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]

    context, depth = sizes["max_position_embeddings"], sizes["num_hidden_layers"]
    cache = irc.Spec(dtype, ("B", sizes["num_key_value_heads"], "C", sizes["head_dim"]))
    names = [f"{kind}{i}" for i in range(depth) for kind in "kv"]
    inputs = {
        "input_ids": irc.Spec("i32", ("B", "S")),
        "positions": irc.Spec("i32", ("B", "S")),
        "past_lengths": irc.Spec("i32", ("B",)),
        "logit_positions": irc.Spec("i32", ("B", "T")),
        **dict.fromkeys(names, cache),
    }
    dims = {"B": (1, 1, 8), "S": (1, 64, context), "T": (1, 1, context), "C": (1, context, context)}
    aliases = {name: name for name in names}  # every cache is updated in place
    return irc.trace(Llama(sizes, dtype), inputs, dims, name="llama", aliases=aliases)
