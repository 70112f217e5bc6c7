// Copies into shared memory that go on while a block computes, and matrices from there for tensor
// cores.
#ifdef EMULATED_WARPS
#define TILES(type, name) SHARED(type, name)
inline void copy_async(u16* to, const u16* from, bool real) {
    static const u16 zeros[8] = {};
    start_copy(to, real ? from : zeros);
}
inline void commit_copies() { ++fibers[current].groups; }
template <int left> void wait_for_copies() { end_groups(left); }
template <bool turned> void load_matrices(u32 (&m)[4], const u16* row) {
    const u32 mine[] = {(u32)(u64)row, (u32)((u64)row >> 32)};
    const Given<2> given(mine);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    auto at = [&](int i, int row, int column) -> u32 {
        const u32* half = given.of[8 * i + row].word;
        return ((const u16*)(half[0] | (u64)half[1] << 32))[column];
    };
    for (int i = 0; i < 4; ++i)
        m[i] = turned ? at(i, 2 * t, g) | at(i, 2 * t + 1, g) << 16
                      : at(i, g, 2 * t) | at(i, g, 2 * t + 1) << 16;
}
#else
#define TILES(type, name) DYNAMIC_SHARED(type, all_tiles); type& name = *all_tiles
// 16 bytes into shared memory, or zeros.
INLINE void copy_async(u16* to, const u16* from, bool real) {
    const u32 there = (u32)__cvta_generic_to_shared(to), count = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(there), "l"(from), "r"(count) : "memory");
}
INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of copies but the last `left`.
template <int left> INLINE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}
// Four 8 x 8 matrices of 16-bit numbers, whose rows lie where the lanes say, eight lanes each: row
// g, columns 2 t and 2 t + 1 of every matrix, or of its transpose.
template <bool turned> INLINE void load_matrices(u32 (&m)[4], const u16* row) {
    const u32 from = (u32)__cvta_generic_to_shared(row);
    if (turned)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(from) : "memory");
}
#endif
