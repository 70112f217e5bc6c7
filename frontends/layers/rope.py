"""`Rope`: the settings of rotary positions, and their rotation by the operation `rope`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from .. import functional as F
from ..tensor import Tensor

Kind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding; each field is the attribute of that name."""

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

    def __call__(self, x: Tensor, positions: Tensor, head_dim: int) -> Tensor:
        """x [B, S, heads*head_dim] rotated by positions i32 [B, S]."""
        return F.rope(x, positions, head_dim, **asdict(self))


def table_angles(table: Tensor, positions: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin f32 [B, S, pairs] from a table of [cos, sin] per pair and position."""
    rows = table.reshape(-1, rotary_dim // 2, 2)
    pairs = F.gather(rows, positions, dim=0).cast("f32")
    return pairs[..., 0], pairs[..., 1]
