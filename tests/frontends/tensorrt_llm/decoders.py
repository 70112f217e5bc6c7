"""Small random language models with the engine tensors of TensorRT-LLM, and of irc."""

from pathlib import Path

import numpy as np

import irc
from irc.frontends import Module, Parameter, random_weights
from irc.frontends import functional as F
from irc.frontends.tensor import Tensor

VOCAB, HIDDEN, HEADS, LONGEST = 23, 12, 3, 32
SIZE = HIDDEN // HEADS
DIMS = {
    "B": (1, 2, 32),
    "S": (1, 4, LONGEST),
    "P": (0, 4, LONGEST),
    "C": (1, 16, LONGEST),
    "R": (1, 2, 8),
}


class Decoder(Module):
    """One layer of attention between a table and a head; `kind` is the form of its cache."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.table = Parameter((VOCAB, HIDDEN), "f32")
        self.places = Parameter((LONGEST, HIDDEN), "f32")
        self.qkv = Parameter((3 * HIDDEN, HIDDEN), "f32")
        self.head = Parameter((VOCAB, HIDDEN), "f32")

    def forward(self, input_ids: Tensor, **more: Tensor) -> dict[str, Tensor]:
        batch, count = input_ids.shape
        named = more.get("position_ids", more.get("positions"))
        places = F.iota(count).unsqueeze(0).expand(batch, count) if named is None else named
        table = self.table
        if "prompt_embedding_table" in more:  # ids behind the vocabulary are its rows
            table = F.concat([table, more["prompt_embedding_table"]], dim=0)
        x = F.embedding(input_ids, table) + F.embedding(places, self.places)
        q, k, v = F.linear(x, self.qkv).split(HIDDEN)
        mixed, caches = getattr(self, f"attend_{self.kind}")(q, k, v, more)
        logits = F.linear((x + mixed) * 8.0, self.head)
        if "bias" in more:
            logits = logits + more["bias"].unsqueeze(1)
        return {"logits": self.last(logits, more), **caches}

    def last(self, logits: Tensor, more: dict[str, Tensor]) -> Tensor:
        if "last_token_ids" not in more:
            return logits
        at = (more["last_token_ids"] - 1).reshape("B", 1, 1).expand("B", 1, VOCAB)
        return F.gather_elements(logits, at, dim=1).squeeze(1)

    def attend_none(self, q: Tensor, k: Tensor, v: Tensor, more: dict[str, Tensor]):
        return F.attention(q, k, v, SIZE, causal=True), {}

    def attend_own(self, q: Tensor, k: Tensor, v: Tensor, more: dict[str, Tensor]):
        past = more["past_lengths"]
        keys, values = (F.cache_update(more[n], x, past) for n, x in (("k0", k), ("v0", v)))
        return F.attention(q, keys, values, SIZE, past=past, causal=True), {
            "k0": keys,
            "v0": values,
        }

    def attend_fixed(self, q: Tensor, k: Tensor, v: Tensor, more: dict[str, Tensor]):
        past = more["host_past_key_value_lengths"]
        end = more["sequence_length"]  # attention sees the keys before it only
        olds = more["past_key_value_0"].split(1, dim=1)
        keys, values = (
            F.cache_update(old.squeeze(1), x, past) for old, x in zip(olds, (k, v), strict=True)
        )
        mixed = F.attention(q, keys, values, SIZE, past=past, lengths=end, causal=True)
        return mixed, {"present_key_value_0": F.stack([keys, values], dim=1)}

    def attend_growing(self, q: Tensor, k: Tensor, v: Tensor, more: dict[str, Tensor]):
        heads = [x.reshape("B", "S", HEADS, SIZE).permute(0, 2, 1, 3) for x in (k, v)]
        olds = [old.squeeze(1) for old in more["past_key_value_0"].split(1, dim=1)]
        keys, values = (F.concat([o, x], dim=2) for o, x in zip(olds, heads, strict=True))
        mask = more["attention_mask"].unsqueeze(1, 2) > 0 if "attention_mask" in more else None
        mixed = F.attention(q, keys, values, SIZE, mask=mask, causal=True)
        return mixed, {"present_key_value_0": F.stack([keys, values], dim=1)}


CACHE = irc.Spec("f32", ("B", HEADS, "C", SIZE))
INPUTS = {
    "none": {},
    "own": {
        "positions": irc.Spec("i32", ("B", "S")),
        "past_lengths": irc.Spec("i32", ("B",)),
        "k0": CACHE,
        "v0": CACHE,
    },
    "fixed": {
        "position_ids": irc.Spec("i32", ("B", "S")),
        "last_token_ids": irc.Spec("i32", ("B",)),
        "host_past_key_value_lengths": irc.Spec("i32", ("B",)),
        "sequence_length": irc.Spec("i32", ("B",)),
        "past_key_value_0": irc.Spec("f32", ("B", 2, HEADS, "C", SIZE)),
    },
    "growing": {
        "position_ids": irc.Spec("i32", ("B", "S")),
        "last_token_ids": irc.Spec("i32", ("B",)),
        "attention_mask": irc.Spec("i32", ("B", "P + S")),
        "past_key_value_0": irc.Spec("f32", ("B", 2, HEADS, "P", SIZE)),
    },
}
ALIASES = {"own": {"k0": "k0", "v0": "v0"}, "fixed": {"present_key_value_0": "past_key_value_0"}}


def decoder(
    kind: str, seed: int, biased: bool = False, unmasked: bool = False, tuned: bool = False
) -> irc.Module:
    """The model with a kind of cache; those of one seed have the same weights.

    A biased one has an input `bias` [B, VOCAB], which is added to the logits; an unmasked one has
    no `attention_mask`; a tuned one has an input `prompt_embedding_table` [R, HIDDEN].
    """
    inputs = {"input_ids": irc.Spec("i32", ("B", "S")), **INPUTS[kind]}
    inputs |= {"bias": irc.Spec("f32", ("B", VOCAB))} if biased else {}
    inputs |= {"prompt_embedding_table": irc.Spec("f32", ("R", HIDDEN))} if tuned else {}
    if unmasked:
        del inputs["attention_mask"]
    used = {
        s
        for spec in inputs.values()
        for dim in spec.type.shape
        for s in getattr(dim, "symbols", list)()
    }
    dims = {name: DIMS[name] for name in DIMS if name in used}
    model = irc.trace(Decoder(kind), inputs, dims, aliases=ALIASES.get(kind))
    return random_weights(model, seed)


def artifact(
    kind: str, seed: int, folder: Path, backend: str = "reference", **options: bool
) -> Path:
    """The model compiled into a folder."""
    irc.compile(decoder(kind, seed, **options), folder, backend=backend)
    return folder


class Oracle:
    """The logits after any tokens, computed without a cache."""

    def __init__(self, seed: int) -> None:
        self.module = decoder("none", seed)

    def logits(self, tokens: list[int]) -> np.ndarray:
        ids = np.array([tokens], np.int32)
        return irc.evaluate(self.module, {"input_ids": ids})["logits"][0, -1]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The prompt with the most likely tokens behind it."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens

    def prompts(self, random: np.random.Generator, count: int) -> list[list[int]]:
        """Prompts whose next six most likely tokens no rounding changes."""
        found: list[list[int]] = []
        while len(found) < count:
            prompt = random.integers(0, VOCAB, random.integers(1, 6)).tolist()
            tokens = self.greedy(prompt, 6)
            every = [np.sort(self.logits(tokens[: len(prompt) + i])) for i in range(6)]
            if min(logits[-1] - logits[-2] for logits in every) > 1e-2:
                found.append(prompt)
        return found
