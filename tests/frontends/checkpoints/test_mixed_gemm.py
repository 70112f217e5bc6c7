"""Weight-only codes: values by their definition, and the order of their bytes."""

from __future__ import annotations

import numpy as np
import pytest

from irc.frontends.checkpoints.mixed_gemm import is_interleaved, pack, quantize_columns, unpack
from tests.fresh import fresh


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outer", [(), (3,)])
def test_codes(bits: int, outer: tuple[int, ...]) -> None:
    weight = fresh().standard_normal((*outer, 32, 24)).astype(np.float32)
    weight[..., 5] = 0.0
    codes, scales = quantize_columns(weight, bits)
    most = 2 ** (bits - 1)
    np.testing.assert_allclose(scales, np.abs(weight).max(-2) / most)
    assert (codes.min(), codes.max()) == (-most, most - 1) and not codes[..., 5].any()
    near = np.abs(codes * scales[..., None, :] - weight)
    assert (near <= 0.5001 * scales[..., None, :])[codes < most - 1].all()
    stored = pack(codes, bits)
    assert stored.shape == (*outer, 32, 24 * bits // 8) and stored.dtype == np.int8
    assert (unpack(stored, bits) == codes).all()
    assert not is_interleaved(stored, bits)
    assert is_interleaved(pack(codes.astype(np.int16) + most, bits), bits)  # as unsigned numbers


def test_halves_are_rounded_away_from_zero() -> None:
    codes, _ = quantize_columns(np.array([[-128.0], [2.5], [-2.5], [0.4]]), 8)
    assert codes[:, 0].tolist() == [-128, 3, -3, 0]


def test_bytes_are_those_of_transposed_codes() -> None:
    codes = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)  # [K, N]
    assert pack(codes, 8).reshape(-1).tolist() == codes.T.reshape(-1).tolist()
    first = pack(codes, 4).reshape(-1).view(np.uint8)[0]
    assert (first & 15, first >> 4) == (codes[0, 0] & 15, codes[1, 0] & 15)
