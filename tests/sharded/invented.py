"""Ten models of different kinds whose weights have names that nobody else gives them."""

from __future__ import annotations

from typing import Any

from irc.frontends import Module, ModuleList, Tensor
from irc.frontends import functional as F
from irc.frontends.layers import Conv2d, Embedding, LayerNorm, Linear, RmsNorm
from irc.frontends.module import Parameter
from irc.frontends.trace import Spec
from tests.sharded.checking import Case

WIDE, HEADS, WORDS = 24, 6, 40
SIZE = WIDE // HEADS
IDS = {"ids": Spec("i32", ("B", "S"))}
IMAGES = {"pixels": Spec("f32", ("B", 3, 8, 8))}
PAIR = {"source": Spec("i32", ("B", "S")), "target": Spec("i32", ("B", "M"))}


class Turned(Module):
    """x · weight + shift with weight [in, out]."""

    def __init__(self, inside: int, outside: int) -> None:
        self.kernel, self.shift = Parameter((inside, outside)), Parameter((outside,))

    def forward(self, x: Tensor) -> Tensor:
        return F.matmul(x, self.kernel) + self.shift


def in_heads(x: Tensor) -> Tensor:
    """[B, S, heads*size] to [B, heads, S, size]."""
    rows, tokens, _ = x.shape
    return x.reshape(rows, tokens, HEADS, SIZE).transpose(1, 2)


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Attention in products and a softmax, of [B, S, heads*size]."""
    scores = in_heads(q) @ in_heads(k).transpose(2, 3) / SIZE**0.5 + bias
    mixed = F.softmax(scores) @ in_heads(v)
    rows, _, tokens, _ = mixed.shape
    return mixed.transpose(1, 2).reshape(rows, tokens, WIDE)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    """An RMS norm written out."""
    return x * F.rsqrt((x * x).mean(-1, keep=True) + 1e-6) * gain


class Fused(Module):
    """A block whose queries, keys and values are one product."""

    def __init__(self) -> None:
        self.before, self.between = LayerNorm(WIDE), LayerNorm(WIDE)
        self.in_q, self.out = Linear(WIDE, 3 * WIDE), Linear(WIDE, WIDE)
        self.linear1, self.linear2 = Linear(WIDE, 31), Linear(31, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.in_q(self.before(x)).split(WIDE)
        x = x + self.out(F.attention(q, k, v, head_dim=SIZE, causal=True))
        return x + self.linear2(F.gelu(self.linear1(self.between(x))))


class Separate(Module):
    """A block with attention and norms in simple operations; `memory` is what it looks at."""

    def __init__(self, linear: Any = Linear) -> None:
        self.g1, self.g2 = Parameter((WIDE,)), Parameter((WIDE,))
        self.to_q, self.to_k, self.to_v, self.to_out = (linear(WIDE, WIDE) for _ in range(4))
        self.ff1, self.ff2 = linear(WIDE, 36), linear(36, WIDE)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = normed(x, self.g1)
        other = y if memory is None else memory
        x = x + self.to_out(attended(self.to_q(y), self.to_k(other), self.to_v(other)))
        return x + self.ff2(F.relu(self.ff1(normed(x, self.g2))))


class Language(Module):
    """Blocks between a table and another one for the words that follow."""

    def __init__(self, block: Any) -> None:
        self.glyphs, self.answer = Embedding(WORDS, WIDE), Linear(WIDE, WORDS, False)
        self.steps, self.end = ModuleList([block(), block()]), RmsNorm(WIDE)

    def forward(self, ids: Tensor) -> Any:
        x = self.glyphs(ids)
        for step in self.steps:
            x = step(x)
        return self.answer(self.end(x))


class Vision(Module):
    """Patches by a convolution, places, blocks and a class. Dosovitskiy et al., 2021."""

    def __init__(self) -> None:
        self.tiles, self.spots = Conv2d(3, WIDE, 4, stride=4), Parameter((1, 4, WIDE))
        self.steps = ModuleList([Fused(), Separate()])
        self.end, self.kinds = LayerNorm(WIDE), Linear(WIDE, 10)

    def forward(self, pixels: Tensor) -> Any:
        tiles = self.tiles(pixels)
        x = tiles.reshape(tiles.shape[0], WIDE, 4).transpose(1, 2) + self.spots
        for step in self.steps:
            x = step(x)
        return self.kinds(self.end(x).mean(1))


class Translator(Module):
    """An encoder, and a decoder that looks at it; one table for both, and for the words."""

    def __init__(self) -> None:
        self.dictionary = Embedding(WORDS, WIDE)
        self.reader, self.writer = ModuleList([Separate()]), ModuleList([Separate(), Separate()])

    def forward(self, source: Tensor, target: Tensor) -> Any:
        seen, x = self.dictionary(source), self.dictionary(target)
        for step in self.reader:
            seen = step(seen)
        for step in self.writer:
            x = step(step(x), seen)
        return F.linear(x, self.dictionary.weight)


class Pair(Module):
    """Users and items, each by a table and two products; their scores."""

    def __init__(self) -> None:
        self.who, self.what = Embedding(50, 16), Embedding(90, 16)
        self.l1, self.l2, self.r1, self.r2 = (Linear(16, 32), Linear(32, 16)) * 2
        self.r1, self.r2 = Linear(16, 32), Linear(32, 16)

    def forward(self, source: Tensor, target: Tensor) -> Any:
        user = self.l2(F.relu(self.l1(self.who(source).sum(1))))
        item = self.r2(F.relu(self.r1(self.what(target).sum(1))))
        return (user * item).sum(-1)


class Clicks(Module):
    """Bags of features and dense ones, whose dot products are features. Naumov et al., 2019."""

    def __init__(self) -> None:
        self.bags = ModuleList([Embedding(size, 8) for size in (40, 21, 30)])
        self.low1, self.low2 = Linear(5, 16), Linear(16, 8)
        self.top1, self.top2 = Linear(24, 32), Linear(32, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Any:
        x = F.relu(self.low2(F.relu(self.low1(dense))))
        parts = [x, *(bag(ids).sum(1) for bag in self.bags)]
        features = F.stack(parts, dim=1)
        crossed = features @ features.transpose(1, 2)
        rows = crossed.reshape(crossed.shape[0], 16)
        return F.sigmoid(self.top2(F.relu(self.top1(F.concat([x, rows], dim=1)))))


class Recurrence(Module):
    """A gate, a short convolution, a decay per channel, and what the gate lets through."""

    def __init__(self) -> None:
        self.entry, self.exit = Linear(WIDE, 96, False), Linear(48, WIDE, False)
        self.taps, self.rates, self.norm = Parameter((48, 4)), Parameter((48,)), RmsNorm(WIDE)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.entry(self.norm(x)).split(48)
        rows = value.shape[0]
        state = F.full(value=0.0, shape=(rows, 3, 48), dtype="f32")
        mixed, _ = F.short_conv(value, self.taps, state)
        decay = F.exp(F.softplus(mixed) * F.neg(F.exp(self.rates)))
        return x + self.exit(F.cumsum(mixed * decay, dim=1) * F.silu(gate))


class Crowd(Module):
    """Attention, then experts that every token weighs by a router, all in one product each."""

    def __init__(self) -> None:
        self.look, self.norm = Separate(), RmsNorm(WIDE)
        self.guide = Parameter((6, WIDE))
        self.opens, self.closes = Parameter((6, WIDE, 40)), Parameter((6, 40, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        x = self.look(x)
        y = self.norm(x)
        shares = F.softmax(F.linear(y, self.guide)).transpose(1, 2).unsqueeze(3)
        inside = F.silu(y.unsqueeze(1) @ self.opens.unsqueeze(0))
        return x + ((inside @ self.closes.unsqueeze(0)) * shares).sum(1)


class Relative(Module):
    """Attention with a bias per head and distance, and a gated feed-forward, as in T5."""

    def __init__(self) -> None:
        self.distances = Embedding(16, HEADS)
        self.ask, self.offer, self.carry, self.merge = (Turned(WIDE, WIDE) for _ in range(4))
        self.wide0, self.wide1, self.narrow = (Parameter((WIDE, 44)) for _ in range(3))
        self.narrow, self.one, self.two = Parameter((44, WIDE)), RmsNorm(WIDE), RmsNorm(WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y, tokens = self.one(x), x.shape[1]
        places = F.iota(tokens)
        far = F.minimum(F.abs(places.unsqueeze(1) - places.unsqueeze(0)), 15)
        bias = self.distances(far).permute(2, 0, 1).unsqueeze(0)
        x = x + self.merge(attended(self.ask(y), self.offer(y), self.carry(y), bias))
        y = self.two(x)
        return x + (F.gelu(y @ self.wide0) * (y @ self.wide1)) @ self.narrow


class PerHead(Module):
    """Products with weights [heads, in, size], as einsum writes them."""

    def __init__(self) -> None:
        self.rays, self.keys, self.loads = (Parameter((HEADS, WIDE, SIZE)) for _ in range(3))
        self.back, self.norm = Parameter((HEADS, SIZE, WIDE)), LayerNorm(WIDE)
        self.up, self.down = Turned(WIDE, 50), Turned(50, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).unsqueeze(1)
        q, k, v = (y @ weight for weight in (self.rays, self.keys, self.loads))
        mixed = F.softmax(q @ k.transpose(2, 3) / SIZE**0.5) @ v
        x = x + (mixed @ self.back).sum(1)
        return x + self.down(F.gelu(self.up(self.norm(x))))


INVENTED = {
    "gpt_fused": Case(lambda: Language(Fused), IDS),
    "gpt_separate": Case(lambda: Language(Separate), IDS),
    "vision": Case(Vision, IMAGES),
    "translator": Case(Translator, PAIR),
    "two_towers": Case(Pair, PAIR),
    "clicks": Case(Clicks, IDS | {"dense": Spec("f32", ("B", 5))}),
    "recurrence": Case(lambda: Language(Recurrence), IDS),
    "experts": Case(lambda: Language(Crowd), IDS),
    "relative": Case(lambda: Language(Relative), IDS),
    "per_head": Case(lambda: Language(PerHead), IDS),
}
