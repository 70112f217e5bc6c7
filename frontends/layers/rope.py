"""`Rope`: the settings of rotary positions, and their rotation by the operation `rope`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from ...errors import Error
from ...source import here
from .. import functional as F
from ..tensor import Tensor
from .positions import rotated

Kind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding; each field up to `long_factors` is the attribute of that name.

    `sections` are the pairs that turn by each of several rows of positions (mrope of Qwen2-VL).
    `scales` multiply the turned features of calls up to `original_positions` tokens, and of longer
    ones. With `halves` both halves of a head turn on their own (ChatGLM).
    """

    theta: float = 10000.0
    kind: Kind = "default"
    rotary_dim: int = 0
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    scales: tuple[float, float] | None = None
    halves: bool = False

    def __call__(self, x: Tensor, positions: Tensor, head_dim: int) -> Tensor:
        """x [B, S, heads*head_dim] rotated by positions i32 [B, S].

        Positions are [N, B, S] for N `sections`. With `halves` they are [B, 2, S] (ChatGLM-6B), one
        row for each half of a head; or [B, S] (ChatGLM2), by which the first half turns in pairs
        (2i, 2i + 1).
        """
        if self.halves:
            return self._by_halves(x, positions, head_dim)
        if positions.ndim == 3:
            return rotated(x, *self._by_section(positions), head_dim, self.interleaved)
        settings = asdict(self)
        for name in ("sections", "scales", "halves"):
            del settings[name]
        turned = F.rope(x, positions, head_dim, **settings)
        if self.scales is None:
            return turned
        short, long = (F.full(float(scale)) for scale in self.scales)
        length = F.reduce_max(positions, dims=(0, 1)) + 1
        scale = F.where(F.gt(length, self.original_positions), long, short)
        return (turned.cast("f32") * scale).cast(x.dtype)

    def frequencies(self) -> Tensor:
        """The radians per position of every pair of the kind `default`: f32 [rotary_dim / 2]."""
        powers = F.cast(F.iota(self.rotary_dim // 2), "f32") * (-2.0 / self.rotary_dim)
        return F.pow(F.full(float(self.theta)), powers)

    def _by_section(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin f32 [B, S, pairs], each pair by the row of its section."""
        pairs = self.rotary_dim // 2
        if len(self.sections) != positions.shape[0] or sum(self.sections) != pairs:
            raise Error(
                f"rope: expected {positions.shape[0]} sections that add up to {pairs} pairs, found "
                f"{list(self.sections)}",
                loc=here(),
            )
        angles = positions.cast("f32").unsqueeze(3) * self.frequencies()
        parts: list[Tensor] = []
        first = 0
        for row, count in enumerate(self.sections):
            parts.append(angles[row][..., first : first + count])
            first += count
        joined = F.concat(parts, 2)
        return F.cos(joined), F.sin(joined)

    def _by_halves(self, x: Tensor, positions: Tensor, head_dim: int) -> Tensor:
        half, whole = head_dim // 2, replace(self, halves=False)
        if positions.ndim == 2:
            return replace(whole, interleaved=True)(x, positions, head_dim)
        heads = x.reshape(*x.shape[:2], -1, head_dim)
        turned = [
            whole(part.reshape(*x.shape[:2], -1), positions[:, row], half).reshape(*part.shape)
            for row, part in enumerate(heads.split(half, 3))
        ]
        return F.concat(turned, 3).reshape(*x.shape)


def table_angles(table: Tensor, positions: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin f32 [B, S, pairs] from a table of [cos, sin] per pair and position."""
    rows = table.reshape(-1, rotary_dim // 2, 2)
    pairs = F.gather(rows, positions, dim=0).cast("f32")
    return pairs[..., 0], pairs[..., 1]


def mrope_angles(
    table: Tensor, deltas: Tensor | None, positions: Tensor, prompt: Tensor | None, rope: Rope
) -> tuple[Tensor, Tensor]:
    """cos and sin f32 [B, S, pairs] of mrope.

    Tokens of the prompt, of `prompt` i32 [B] tokens, take theirs from `table` [B, N * rotary_dim],
    [cos, sin] per pair and position; later ones have the angle of position + `deltas` i32 [B, 1].
    """
    if deltas is None or prompt is None:
        raise Error(
            "mrope_rotary_cos_sin needs mrope_position_deltas and context_lengths", loc=here()
        )
    batch, tokens = positions.shape
    width = rope.rotary_dim
    rows = table.reshape(table.shape[0], -1, width)
    size = rows.shape[1]
    places = F.clip(positions, low=0, high=size - 1) if isinstance(size, int) else positions
    index = F.expand(places.unsqueeze(2), (batch, tokens, width))
    given = F.gather_elements(rows, index, dim=1).reshape(batch, tokens, width // 2, 2).cast("f32")
    later = (positions + deltas).cast("f32").unsqueeze(2) * rope.frequencies()
    inside = F.lt(positions, prompt.unsqueeze(1)).unsqueeze(2)
    cos = F.where(inside, given[..., 0], F.cos(later))
    return cos, F.where(inside, given[..., 1], F.sin(later))
