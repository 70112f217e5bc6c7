// Codes of 8 bits in caches as f16, in pairs; instructions.cuh comes before. `Cell` is the type of a
// code, f8e4m3 or i8. Pairs are divided by CODE_FACTOR.
constexpr float CODE_FACTOR = INTEGERS ? 1.0f : E4M3_FACTOR;
typedef Pack<u32, 2> Features;  // eight of them

INLINE uint4 pairs_of(const Features& x) {
    u32 pair[4];
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (INTEGERS) {  // 1024 + 128 + the code has the code among its bits
            const u32 selected = k % 2 ? 0x4342 : 0x4140;
            const u32 code = __byte_perm(x.item[k / 2] ^ 0x80808080u, 0x64646464u, selected);
            pair[k] = fma_pairs(code, ONE, 0xe480e480u);
        } else {
            pair[k] = half2_e4m3(x.item[k / 2] >> 16 * (k % 2));
        }
    }
    return {pair[0], pair[1], pair[2], pair[3]};
}
// The largest power of two that is at most x.
INLINE float power_of_2(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000u); }
