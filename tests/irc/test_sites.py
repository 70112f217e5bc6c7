"""The sites of a module: products with weights, whatever their layout, and caches."""

from __future__ import annotations

import irc
from irc.quantization.sites import by_input, find_caches, find_sites

TEXT = """module @m dims(B=1:1:4, S=1:4:8, C=1:8:16) {
  weight @a.q_proj.weight : f32[12, 8] = random("q", 1, 0.1)
  weight @a.k_proj.weight : f32[4, 8] = random("k", 1, 0.1)
  weight @plain : f32[8, 6] = random("p", 1, 0.1)
  weight @experts.gate : bf16[3, 5, 8] = random("e", 1, 0.1)
  weight @codes : i8[5, 8] = random("c", 1, 9.0)
  weight @scale : f32[5, 1] = random("s", 1, 0.1)
  func @forward(%x: f32[B, S, 8], %t: bf16[3, 7, 8], %p: i32[B], %n: i8[B, S, 4],
                %k0: f32[B, 2, C, 2], %v0: i8[B, 2, C, 2])
      -> (q: f32[B, S, 12], k0: f32[B, 2, C, 2] aliases %k0, v0: i8[B, 2, C, 2] aliases %v0,
          m: f32[B, S, 6], e: bf16[3, 7, 5], d: f32[B, S, 5]) {
    %q = linear %x, @a.q_proj.weight : f32[B, S, 12]
    %k = linear %x, @a.k_proj.weight : f32[B, S, 4]
    %k0.1 = cache_update %k0, %k, %p : f32[B, 2, C, 2]
    %v0.1 = cache_update %v0, %n, %p : i8[B, 2, C, 2]
    %m = matmul %x, @plain : f32[B, S, 6]
    %w = transpose @experts.gate {order=[0, 2, 1]} : bf16[3, 8, 5]
    %e = matmul %t, %w : bf16[3, 7, 5]
    %dq = dequantize @codes, @scale : f32[5, 8]
    %d = linear %x, %dq : f32[B, S, 5]
    return %q, %k0.1, %v0.1, %m, %e, %d
  }
}"""


def test_sites_groups_and_caches() -> None:
    module = irc.parse(TEXT)
    sites = find_sites(module)
    assert [(s.name, s.op.opname, s.inputs, s.outputs, s.shape) for s in sites] == [
        ("a.q_proj", "linear", 1, 0, (12, 8)),
        ("a.k_proj", "linear", 1, 0, (4, 8)),
        ("plain", "matmul", 0, 1, (8, 6)),
        ("experts.gate", "matmul", 2, 1, (3, 5, 8)),
    ]
    assert [site.weight_operand is site.weight for site in sites] == [True, True, True, False]
    assert by_input(sites) == [sites[:3], sites[3:]], "sites of one input are a group"
    (cache,) = find_caches(module)  # the one of floats
    assert cache.name == "k0" and cache.new.name == "k"
