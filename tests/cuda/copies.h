// The instructions of streaming products, for blocks of many threads on the host. Bulk copies are
// made at once.
inline u64 read_once() { return 0; }
template <int N> void load_once(u32 (&to)[N], const void* from) { std::memcpy(to, from, sizeof to); }
inline u32 fma_pairs(u32 x, u32 y, u32 z) {
    auto part = [&](u32 pair, int half) { return (float)f16{(u16)(pair >> 16 * half)}; };
    auto sum = [&](int half) { return part(x, half) * part(y, half) + part(z, half); };
    return pack<f16>(sum(0), sum(1));
}
// A barrier counts the phases that have ended.
inline void barrier_init(u64* barrier) { *barrier = 0; }
inline void barriers_visible() {}
inline void barrier_wait(u64* barrier, u32 parity) {
    while (*(volatile u64*)barrier % 2 == parity)
        swapcontext(&fibers[current].context, &host_context);
}
inline void bulk_copy(void* to, const void* from, u32 nbytes, u64* barrier, u64) {
    std::memcpy(to, from, nbytes);
    ++*barrier;
}
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 both = (u64)high << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
