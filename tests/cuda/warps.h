// Instructions of warps and clusters (warp.cuh) on the host, where the threads take turns.
#define EMULATED_WARPS
struct alignas(16) uint4 { u32 x, y, z, w; };

const std::size_t SHARED_MEMORY = 227 << 10;
static std::vector<std::unique_ptr<unsigned char[]>> shared_memory;  // of the blocks of a cluster
inline unsigned char* shared_of(unsigned rank) {
    while (shared_memory.size() <= rank) {
        shared_memory.emplace_back(new unsigned char[SHARED_MEMORY]);
        std::memset(shared_memory.back().get(), 0xA5, SHARED_MEMORY);
    }
    return shared_memory[rank].get();
}
inline unsigned rank_in_cluster() { return current / blockDim.x; }
#define SHARED(type, name) type& name = *(type*)shared_of(rank_in_cluster())

inline void cluster_arrive() { ++fibers[current].clusters; }
inline void cluster_wait() { wait_for(&Fiber::clusters, 0, fibers.size()); }
typedef u64 Inbox;
constexpr bool CLUSTERS = true;
template <typename V> V& in_block(V* mine, u32 rank) {
    return *(V*)(shared_of(rank) + ((unsigned char*)mine - shared_of(rank_in_cluster())));
}
inline void expect(Inbox* inbox, u32 nbytes) { *inbox = nbytes; }
template <typename V> void send(V* mine, Inbox* inbox, u32 rank, const V& value) {
    in_block(mine, rank) = value;
    in_block(inbox, rank) -= sizeof value;
}
inline void await(Inbox* inbox) {
    cluster_arrive();
    cluster_wait();
    if (*inbox) std::abort();  // on a GPU, it would wait forever
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
        std::memcpy(fibers[current].given, mine, sizeof mine);
        __syncwarp();
        for (unsigned lane = 0; lane < 32; ++lane)
            std::memcpy(of[lane].word, fibers[current - threadIdx.x % 32 + lane].given, sizeof mine);
        __syncwarp();
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
