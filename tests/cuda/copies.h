// The instructions of streaming products, for blocks of many threads on the host. Copies end as late
// as they may.
inline u64 read_once() { return 0; }
template <int N> void load_once(u32 (&to)[N], const void* from) { std::memcpy(to, from, sizeof to); }
inline u32 fma_pairs(u32 x, u32 y, u32 z) {
    auto part = [&](u32 pair, int half) { return (float)f16{(u16)(pair >> 16 * half)}; };
    auto sum = [&](int half) { return part(x, half) * part(y, half) + part(z, half); };
    return pack<f16>(sum(0), sum(1));
}
// What a barrier counts: phases that have ended, arrivals and bytes that this one still needs.
struct Phases { u16 ended; unsigned char arrivals, missing; int nbytes; };
inline void count_on(u64* barrier, int arrivals, int nbytes) {
    Phases& phases = *(Phases*)barrier;
    phases.missing -= arrivals, phases.nbytes += nbytes, moves += arrivals;
    if (phases.missing || phases.nbytes) return;
    ++phases.ended, phases.missing = phases.arrivals;
}
inline void expect_arrivals(u64* barrier, u32 count) { *barrier = count; }
inline void arrive(u64* barrier) { --*barrier, ++moves; }
inline void await_arrivals(u64* barrier) { await(barrier); }
static std::vector<u64*> unseen_barriers;  // that copies do not see yet
inline void barrier_init(u64* barrier, unsigned char arrivals = 1) {
    *(Phases*)barrier = {0, arrivals, arrivals, 0};
    unseen_barriers.push_back(barrier);
}
inline void barriers_visible() { unseen_barriers.clear(); }
inline void barrier_arrive(u64* barrier) { count_on(barrier, 1, 0); }
inline void barrier_expect(u64* barrier, u32 nbytes) { count_on(barrier, 1, nbytes); }
inline void barrier_wait(u64* barrier, u32 parity) {
    wait_for_copies_on(barrier, [&] { return ((Phases*)barrier)->ended % 2 != parity; },
                       [&](u32 nbytes) { count_on(barrier, 0, -(int)nbytes); });
}
inline int take(int* counter) { return (*counter)++; }
inline void late_copy(void* to, const void* from, u32 nbytes, u64* barrier) {
    for (u64* unseen : unseen_barriers)
        if (unseen == barrier) fail("a copy counts on a barrier in front of barriers_visible");
    late_copies.emplace_back(to, from, nbytes, barrier);
    std::memset(to, 0xff, nbytes);
}
inline void bulk_copy(void* to, const void* from, u32 nbytes, u64* barrier, u64) {
    barrier_expect(barrier, nbytes);
    late_copy(to, from, nbytes, barrier);
}
// Tiles of tensors, whose rows of 128 bytes have their eight parts in the order of the products.
struct TensorMap { const u16* start; u32 columns, rows, planes, box, rest[26]; };
inline void make_map(
    TensorMap* map, TensorMap*, const void* start, u32 columns, u32 rows, u32 planes, u32 box
) {
    *map = {(const u16*)start, columns, rows, planes, box};
}
inline u16* in_tile(const void* tile, int row, int column) {
    return (u16*)tile + 64 * row + (column / 8 ^ row % 8) * 8 + column % 8;
}
inline void copy_tile(
    void* to, const TensorMap* map, int column, int row, int plane, u64* barrier
) {
    std::vector<u16> tile(64 * map->box);
    for (int i = 0; i < map->box; ++i)
        for (int j = 0; j < 64 && column + j < map->columns && row + i < map->rows; ++j)
            *in_tile(tile.data(), i, j) =
                map->start[((u64)plane * map->rows + row + i) * map->columns + column + j];
    late_copy(to, tile.data(), 2 * tile.size(), barrier);
}
template <int N> void more_registers() {}
template <int N> void fewer_registers() {}
inline u64 smem_descriptor(const u16* start) { return (u64)start / 16; }
template <typename T, int N> void multiply_group(float (&c)[N / 8][4], u64 a, u64 b, u32 more) {
    const int first = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    auto at = [](u64 start, int row, int column) {
        return (float)T{*in_tile((void*)(start / 64 * 1024), row, start % 8 * 8 + column)};
    };
    for (int n = 0; n < N / 8; ++n)
        for (int e = 0; e < 4; ++e) {
            float sum = more ? c[n][e] : 0.0f;
            for (int k = 0; k < 16; ++k)
                sum += at(a, first + e / 2 * 8, k) * at(b, 8 * n + 2 * t + e % 2, k);
            c[n][e] = sum;
        }
}
inline void begin_group() {}
inline void commit_group() {}
template <int left> void wait_for_groups() {}
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 both = (u64)high << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
// Copies by each thread, in groups.
inline void start_copy(void* to, const void* from, unsigned nbytes = 16) {
    Fiber& me = fibers[current];
    me.copies.emplace_back(to, from, nbytes, nullptr, me.groups);
    std::memset(to, 0xff, nbytes);
}
template <int nbytes> void copy_once(void* to, const void* from, bool real) {
    static const u64 zeros[2] = {};
    start_copy(to, real ? from : zeros, nbytes);
}
inline void end_groups(unsigned left) {
    Fiber& me = fibers[current];
    while (end_copy(me.copies, [&](const LateCopy& copy) { return copy.group + left < me.groups; }))
        ;
}
