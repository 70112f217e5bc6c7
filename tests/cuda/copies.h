// The instructions of streaming products, for blocks of many threads on the host. Copies end as late
// as they may.
inline u64 read_once() { return 0; }
template <int N> void load_once(u32 (&to)[N], const void* from) { std::memcpy(to, from, sizeof to); }
inline u32 fma_pairs(u32 x, u32 y, u32 z) {
    auto part = [&](u32 pair, int half) { return (float)f16{(u16)(pair >> 16 * half)}; };
    auto sum = [&](int half) { return part(x, half) * part(y, half) + part(z, half); };
    return pack<f16>(sum(0), sum(1));
}
// A barrier counts the phases that have ended.
static std::vector<u64*> unseen_barriers;  // that copies do not see yet
inline void barrier_init(u64* barrier) {
    *barrier = 0;
    unseen_barriers.push_back(barrier);
}
inline void barriers_visible() { unseen_barriers.clear(); }
inline void barrier_wait(u64* barrier, u32 parity) {
    wait_for_copies_on(barrier, [&] { return *barrier % 2 != parity; }, [&](u32) { ++*barrier; });
}
inline void bulk_copy(void* to, const void* from, u32 nbytes, u64* barrier, u64) {
    for (u64* unseen : unseen_barriers)
        if (unseen == barrier) fail("a copy counts on a barrier in front of barriers_visible");
    late_copies.emplace_back(to, from, nbytes, barrier);
    std::memset(to, 0xff, nbytes);
}
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 both = (u64)high << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
// Copies of 16 bytes by each thread, in groups.
inline void start_copy(void* to, const void* from) {
    Fiber& me = fibers[current];
    me.copies.emplace_back(to, from, 16, nullptr, me.groups);
    std::memset(to, 0xff, 16);
}
inline void end_groups(unsigned left) {
    Fiber& me = fibers[current];
    while (end_copy(me.copies, [&](const LateCopy& copy) { return copy.group + left < me.groups; }))
        ;
}
