// Copies that go on while a warp computes, and codes as pairs of 16-bit floats.

#ifndef EMULATED_WARPS
// For what is read once: it makes room in the L2 cache first.
INLINE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// 4, 8 or 16 bytes that nobody reads again.
INLINE void load_once(u32 (&to)[4], const void* from) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
}
INLINE void load_once(u32 (&to)[2], const void* from) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}
INLINE void load_once(u32 (&to)[1], const void* from) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}
// 4 or 16 bytes that nobody reads again, into shared memory; zeros if they are not real.
template <int nbytes> INLINE void copy_once(void* to, const void* from, bool real) {
    const u32 there = shared_address(to), count = real ? nbytes : 0;
    if (nbytes == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                     ::"r"(there), "l"(from), "r"(count) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     ::"r"(there), "l"(from), "r"(count) : "memory");
}
// x y + z of pairs of f16.
INLINE u32 fma_pairs(u32 x, u32 y, u32 z) {
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z));
    return x;
}
// A barrier for one thread each of so many warps.
INLINE void expect_arrivals(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
INLINE void arrive(u64* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }"
                 ::"r"(shared_address(barrier)) : "memory");
}
INLINE void await_arrivals(u64* barrier) {
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0; "
                     "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared_address(barrier)) : "memory");
}
#if __CUDA_ARCH__ >= 900
// One bulk copy at a time per barrier.
INLINE void barriers_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void bulk_copy(void* to, const void* from, u32 nbytes, u64* barrier, u64 policy) {
    u32 on = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(on), "r"(nbytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
                 "l"(from), "r"(nbytes), "r"(on), "l"(policy) : "memory");
}
#endif
#endif

// Two e4m3 of the low 16 bits as f16, divided by the factor.
#if !defined(EMULATED_WARPS) && __CUDA_ARCH__ >= 890
constexpr float E4M3_FACTOR = 1.0f;
INLINE u32 half2_e4m3(u32 pair) {
    u32 found;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(found) : "h"((u16)pair));
    return found;
}
#else
constexpr float E4M3_FACTOR = 256.0f;  // the exponents of f16 are larger by 8; NaN becomes 480
INLINE u32 half2_e4m3(u32 pair) {
    const u32 bits = __byte_perm(pair, 0, 0x1404);
    return (bits & 0x80008000u) | ((bits >> 1) & 0x3f803f80u);
}
#endif

INLINE uint4 load16(const void* p) { return *(const uint4*)p; }
template <int N> INLINE void load_words(u32 (&to)[N], const void* from) {
    *(Pack<u32, N>*)to = *(const Pack<u32, N>*)from;
}
INLINE float warp_sum(float x) {
    #pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Eight neighbouring codes of type W as four pairs of 16-bit floats, which are exact and divided by
// `factor`. `zero` is a pair of integers, the zero points. Pairs of codes of four bits are the
// elements k and k + 4.
template <typename W> struct Codes {  // of 16 bits
    static constexpr float factor = 1.0f;
    INLINE static void pairs(const u32* words, u32, u32 (&pair)[4]) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) pair[k] = words[k];
    }
};
template <> struct Codes<f8e4m3> {
    static constexpr float factor = E4M3_FACTOR;
    INLINE static void pairs(const u32* words, u32, u32 (&pair)[4]) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) pair[k] = half2_e4m3(words[k / 2] >> 16 * (k % 2));
    }
};
template <> struct Codes<f8e5m2> {
    static constexpr float factor = 1.0f;
    INLINE static void pairs(const u32* words, u32, u32 (&pair)[4]) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) pair[k] = __byte_perm(words[k / 2], 0, k % 2 ? 0x3424 : 0x1404);
    }
};
// Integers: 1024 + the code, or 16 times the code, is an f16 with the code among its bits. Those
// with a sign have it flipped, which adds 2^(bits - 1).
constexpr u32 ONE = 0x3c003c00u, SIXTEENTH = 0x2c002c00u;  // pairs
// The constant, in a register: the compiler, which does not know that the grid has one layer, would
// load it again for every use.
INLINE u32 held(u32 constant) { return constant * gridDim.z; }
template <u32 flipped> struct Bytes {
    static constexpr float factor = 1.0f;
    INLINE static void pairs(const u32* words, u32 zero, u32 (&pair)[4]) {
        const u32 minus = (flipped ? 0xe480e480u : 0xe400e400u) + zero;
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 selected = k % 2 ? 0x4342 : 0x4140;
            const u32 code = __byte_perm(words[k / 2] ^ flipped, held(0x64646464u), selected);
            pair[k] = fma_pairs(code, ONE, minus);
        }
    }
};
template <> struct Codes<i8> : Bytes<0x80808080u> {};
template <> struct Codes<u8> : Bytes<0u> {};
template <u32 flipped> struct HalfBytes {
    static constexpr float factor = 1.0f;
    INLINE static void pairs(const u32* words, u32 zero, u32 (&pair)[4]) {
        zero += flipped;
        #pragma unroll
        for (int k = 0; k < 4; k += 2) {
            const u32 code = words[0] >> 4 * k;
            const u32 low = (code & held(0x000f000fu)) ^ (0x64006400u + flipped);
            const u32 high = (code & held(0x00f000f0u)) ^ (0x64006400u + 16 * flipped);
            pair[k] = fma_pairs(low, ONE, 0xe400e400u + zero);
            pair[k + 1] = fma_pairs(high, SIXTEENTH, 0xd400d400u + 16 * zero);
        }
    }
};
template <> struct Codes<u4> : HalfBytes<0u> {};
template <> struct Codes<i4> : HalfBytes<0x00080008u> {};
template <> struct Codes<f4e2m1> {  // the exponents of f16 are larger by 14
    static constexpr float factor = 16384.0f;
    INLINE static void pairs(const u32* words, u32, u32 (&pair)[4]) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 code = words[0] >> 4 * k;
            pair[k] = (code & 0x00080008u) << 12 | (code & 0x00070007u) << 9;
        }
    }
};
