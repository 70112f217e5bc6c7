// The instructions of streaming products, for blocks of many threads on the host. Asynchronous copies
// are made as late as a kernel allows, bulk copies at once.
struct Copies {
    struct Copy { void* to; const void* from; };
    std::vector<Copy> open;                 // of no group yet
    std::vector<std::vector<Copy>> groups;  // the oldest first
};
static Copies copies[1024];  // of each thread of a block

inline u64 read_once() { return 0; }
inline void copy16(void* to, const void* from, u64) {
    copies[threadIdx.x].open.push_back({to, from});
}
inline void commit_copies() {
    Copies& mine = copies[threadIdx.x];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}
template <int LEFT> void wait_copies() {
    auto& groups = copies[threadIdx.x].groups;
    while (groups.size() > LEFT) {
        for (const Copies::Copy& each : groups[0]) std::memcpy(each.to, each.from, 16);
        groups.erase(groups.begin());
    }
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
inline u32 __reduce_max_sync(u32 mask, u32 x) {
    for (u32 step = 16; step; step >>= 1) x = std::max(x, __shfl_xor_sync(mask, x, step));
    return x;
}
