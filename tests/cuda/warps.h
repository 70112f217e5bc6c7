// Instructions of warps and clusters (warp.cuh) on the host, where the threads take turns.
#define EMULATED_WARPS
struct alignas(16) uint4 { u32 x, y, z, w; };

const std::size_t SHARED_MEMORY = 227 << 10;
static std::size_t shared_used = 0;  // of what follows, by the kernels so far
static std::vector<std::unique_ptr<unsigned char[]>> shared_memory;  // of the blocks of a cluster
static void poison_shared_memory() {
    std::memset(dynamic_shared, 0xff, launch->shared_bytes);
    for (auto& memory : shared_memory) std::memset(memory.get(), 0xff, shared_used);
}
inline unsigned char* shared_of(unsigned rank) {
    while (shared_memory.size() <= rank) {
        shared_memory.emplace_back(new unsigned char[SHARED_MEMORY]);
        std::memset(shared_memory.back().get(), 0xff, SHARED_MEMORY);
    }
    return shared_memory[rank].get();
}
inline unsigned rank_in_cluster() { return current / blockDim.x; }
template <typename T> T& shared_object() {
    shared_used = max(shared_used, sizeof(T));
    return *(T*)shared_of(rank_in_cluster());
}
#define SHARED(type, name) type& name = shared_object<type>()
#define wait_for_previous wait_for_kernel_in_front

inline void cluster_arrive() { fibers[current].cluster_phase = arrive(cluster); }
inline void cluster_wait() { wait_behind(cluster, fibers[current].cluster_phase); }
typedef u64 Inbox;
constexpr bool CLUSTERS = true;
template <typename V> V& in_block(V* mine, u32 rank) {
    return *(V*)(shared_of(rank) + ((unsigned char*)mine - shared_of(rank_in_cluster())));
}
inline void expect(Inbox* inbox, u32 nbytes) { *inbox = nbytes; }
template <typename V> void send(V* mine, Inbox* inbox, u32 rank, const V& value) {
    Inbox& there = in_block(inbox, rank);
    if (there >> 32) fail("a block sends to another one that does not expect it yet");
    late_copies.emplace_back(&in_block(mine, rank), &value, sizeof value, &there);
}
// Waits until `is_over`, while copies that count on a barrier end one after the other.
template <typename IsOver, typename Count>
void wait_for_copies_on(void* barrier, IsOver is_over, Count count) {
    while (!is_over()) {
        u32 nbytes = 0;
        auto matches = [&](const LateCopy& copy) {
            return copy.barrier == barrier && (nbytes = copy.nbytes);
        };
        if (end_copy(late_copies, matches)) count(nbytes);
        else yield();
    }
    ++moves;
}
inline void await(Inbox* inbox) {
    wait_for_copies_on(inbox, [&] { return !*inbox; }, [&](u32 nbytes) { *inbox -= nbytes; });
}

inline float exp2_fast(float x) { return std::exp2(x); }
template <typename T> u32 pack(float first, float second) {
    return (u32)T::of(first).bits | (u32)T::of(second).bits << 16;
}
inline void settle(float (&)[4]) {}
inline void prefetch(const void* from) { (void)*(const volatile char*)from; }

struct Words { u32 word[6]; };
// What every lane of the warp gives.
template <int N> struct Given {
    Words of[32];
    explicit Given(const u32 (&mine)[N]) {
        const u32 turn = fibers[current].exchanges++ % 2, first = current - threadIdx.x % 32;
        std::memcpy(fibers[current].given[turn], mine, sizeof mine);
        __syncwarp();
        for (unsigned lane = 0; lane < 32; ++lane)
            std::memcpy(of[lane].word, fibers[first + lane].given[turn], sizeof mine);
    }
};
template <typename T> void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 mine[] = {a0, a1, a2, a3, b0, b1};
    const Given<6> given(mine);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 16; ++k) {
            const u32 a = given.of[4 * g + k % 8 / 2].word[e / 2 + k / 8 * 2];
            const u32 b = given.of[4 * (2 * t + e % 2) + k % 8 / 2].word[4 + k / 8];
            c[e] += (float)T{(u16)(a >> 16 * (k % 2))} * (float)T{(u16)(b >> 16 * (k % 2))};
        }
}
inline u32 __match_any_sync(unsigned, int x) {
    const u32 mine[] = {(u32)x};
    const Given<1> given(mine);
    u32 equal = 0;
    for (int lane = 0; lane < 32; ++lane) equal |= (u32)(given.of[lane].word[0] == mine[0]) << lane;
    return equal;
}
inline int __popc(u32 x) { return __builtin_popcount(x); }
