// One token of a row of logits, as `sample` of irc/ops defines it: a cluster of blocks has the row,
// every thread some neighbours of it. Weights are integers, so that sums do not depend on an order.
struct Settings {
    float temperature;
    int top_k;
    float top_p, min_p;
    u64 seed, position;
};
// What the threads of a block share. The blocks of the cluster read `bins`, `most` and `total`.
struct Shared {
    u32 low[2][256], high[2][256];  // by digits of distances: sums of amounts, in 32 bits each
    u32 most, total[2];
    u32 whole_most, found;
    u64 before, sums[256], groups[16], warps[32], blocks[CLUSTER];
};

// What block `rank` of the cluster has at the place of `mine`, behind a `sync_cluster` at which it
// was there, and in front of the next one.
#if defined(EMULATED_WARPS)
INLINE u32 read_of(u32* mine, u32 rank) { return in_block(mine, rank); }
INLINE void arrive() { cluster_arrive(); }
#elif __CUDA_ARCH__ >= 900
INLINE u32 read_of(u32* mine, u32 rank) {
    u32 found;
    asm volatile("ld.shared::cluster.u32 %0, [%1];"
                 : "=r"(found) : "r"(in_block(mine, rank)) : "memory");
    return found;
}
INLINE void arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
#else
INLINE u32 read_of(u32* mine, u32) { return *mine; }
INLINE void arrive() { __syncthreads(); }
#endif
INLINE void sync_cluster() {
    arrive();
    cluster_wait();
}

INLINE u64 mul_high(u64 x, u64 y) {
    const u64 a = x >> 32, b = (u32)x, c = y >> 32, d = (u32)y;
    const u64 middle = a * d + (b * d >> 32);
    return a * c + (middle >> 32) + (b * c + (u32)middle >> 32);
}
// Two of the four words of Philox 4x32-10.
INLINE u64 random_bits(u64 seed, u64 position) {
    u32 a = (u32)position, b = (u32)(position >> 32), c = 0, d = 0;
    u32 key = (u32)seed, other_key = (u32)(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const u64 first = (u64)0xD2511F53u * a, second = (u64)0xCD9E8D57u * c;
        a = (u32)(second >> 32) ^ b ^ key;
        b = (u32)second;
        c = (u32)(first >> 32) ^ d ^ other_key;
        d = (u32)first;
        key += 0x9E3779B9u;
        other_key += 0xBB67AE85u;
    }
    return (u64)b << 32 | a;
}
INLINE u32 distance_of(float x, float most, float scale) {
    const float halvings = x == most ? 0.0f : mul(sub(most, x), scale);
    return halvings < 32.0f ? (u32)rint(mul(halvings, (float)(1 << STEPS))) : NEVER;
}
INLINE u32 weight_of(u32 distance) {
    if (distance >= NEVER) return 0;
    const float y = mul((float)(distance & (1u << STEPS) - 1u), 1.0f / (1 << STEPS));
    const u32 most = (u32)mul(power_of_half(y), (float)LARGEST), halvings = distance >> STEPS;
    return most + (1u << halvings >> 1) >> halvings;
}

// The distances of the tokens of a thread, of which some have been counted.
template <int COUNT> struct Tokens {
    Shared& shared;
    u32 distance[COUNT];
    int round;

    // The least distance that the likeliest tokens have which reach `wanted` together, of those up
    // to `limit`; each counts 1, or, where `weigh`, its weight, of which `part` / 2^32 is wanted.
    INLINE u32 reaching(u64 wanted, u32 limit, bool weigh, u64 part) {
        u32 begin = 0;
        for (int shift = STEPS - 3; shift >= 0; shift -= 8, round ^= 1) {
            u32 *low = shared.low[round], *high = shared.high[round];
            for (int b = threadIdx.x; b < 256; b += THREADS) low[b] = high[b] = 0;
            __syncthreads();
            if (threadIdx.x == 0) shared.found = 255, shared.before = 0;
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (distance[i] > limit || (distance[i] ^ begin) >> (shift + 8)) continue;
                const u32 amount = weigh ? weight_of(distance[i]) : 1;
                const int b = distance[i] >> shift & 255;
                if (atomicAdd(low + b, amount) + amount < amount) atomicAdd(high + b, 1u);
            }
            sync_cluster();
            for (int b = threadIdx.x; b < 256; b += THREADS) {
                u64 sum = 0;
                for (int rank = 0; rank < CLUSTER; ++rank)
                    sum += read_of(low + b, rank) + ((u64)read_of(high + b, rank) << 32);
                shared.sums[b] = sum;
            }
            __syncthreads();
            for (int g = threadIdx.x; g < 16; g += THREADS) {
                shared.groups[g] = 0;
                for (int b = 16 * g; b < 16 * g + 16; ++b) shared.groups[g] += shared.sums[b];
            }
            __syncthreads();
            if (weigh && shift == STEPS - 3) {
                for (int g = 0; g < 16; ++g) wanted += shared.groups[g];
                wanted = mul_high(wanted << 1, part << 31);
                wanted = wanted ? wanted : 1;
            }
            for (int b = threadIdx.x; b < 256; b += THREADS) {
                u64 before = 0;
                for (int g = 0; g < b / 16; ++g) before += shared.groups[g];
                for (int other = b / 16 * 16; other < b; ++other) before += shared.sums[other];
                if (before >= wanted || before + shared.sums[b] < wanted) continue;
                shared.found = b;
                shared.before = before;
            }
            __syncthreads();
            begin |= shared.found << shift;
            wanted -= shared.before;
        }
        return begin;
    }
};

// The token, for one thread of the cluster, and -1 for the others. A thread has `PACKS` packs of N
// elements, which `read` reads, or fewer.
template <int N, int PACKS, typename Read>
INLINE int sampled(const Settings& settings, ix packs, const Read& read) {
    SHARED(Shared, shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const ix first = ((ix)blockIdx.x * THREADS + (ix)threadIdx.x) * PACKS;
    if (threadIdx.x == 0) shared.most = shared.whole_most = 0;
    float x[PACKS][N];
    #pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) read(min(first + pack, packs - 1), x[pack]);
    u32 most = 0;
    #pragma unroll
    for (int i = 0; i < PACKS * N; ++i) {
        float& logit = x[i / N][i % N];
        if (logit != logit || first + i / N >= packs) logit = __uint_as_float(0xff800000u);
        most = max(most, (u32)ordered(logit));
    }
    __syncthreads();
    for (int step = 16; step > 0; step >>= 1)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (lane == 0) atomicMax(&shared.most, most);
    sync_cluster();
    if (threadIdx.x < CLUSTER) atomicMax(&shared.whole_most, read_of(&shared.most, threadIdx.x));
    __syncthreads();
    most = shared.whole_most;
    const float largest = __uint_as_float(most >> 31 ? most ^ 1u << 31 : ~most);
    const bool greedy = !(settings.temperature > 0.0f) || settings.top_k == 1;
    const float scale = __fdiv_rn(LOG2_E, greedy ? 0.0f : settings.temperature);
    Tokens<PACKS * N> tokens = {shared};
    #pragma unroll
    for (int i = 0; i < PACKS * N; ++i)
        tokens.distance[i] = first + i / N < packs ? distance_of(x[i / N][i % N], largest, scale)
                                                   : NEVER;
    u32 limit = NEVER - 1;
    if (settings.top_k > 0 && settings.top_k < packs * N)
        limit = tokens.reaching(settings.top_k, limit, false, 0);
    if (settings.top_p < 1.0f) {
        const float part = settings.top_p > 0.0f ? settings.top_p : 0.0f;
        limit = tokens.reaching(0, limit, true, (u64)mul(part, 0x1p32f));
    }
    const float least = settings.min_p > 0.0f ? min(settings.min_p, 1.0f) : 0.0f;
    const u32 least_weight = (u32)ceil(mul(least, (float)LARGEST));
    auto weight = [&](int i) -> u32 {
        if (tokens.distance[i] > limit) return 0;
        const u32 found = weight_of(tokens.distance[i]);
        return found >= least_weight ? found : 0;
    };
    u64 sum = 0;
    #pragma unroll
    for (int i = 0; i < PACKS * N; ++i) sum += weight(i);
    u64 upto = sum;  // of the warp, up to this thread
    for (int step = 1; step < 32; step *= 2) {
        const u64 other = __shfl_sync(0xffffffffu, upto, lane - step);
        if (lane >= step) upto += other;
    }
    if (lane == 31) shared.warps[warp] = upto;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 total = 0;
        for (int w = 0; w < THREADS / 32; ++w) total += shared.warps[w];
        shared.total[0] = (u32)total;
        shared.total[1] = (u32)(total >> 32);
    }
    sync_cluster();
    if (threadIdx.x < CLUSTER)
        shared.blocks[threadIdx.x] = read_of(shared.total, threadIdx.x) |
                                     (u64)read_of(shared.total + 1, threadIdx.x) << 32;
    arrive();
    __syncthreads();
    u64 total = 0, before = upto - sum;
    for (int rank = 0; rank < CLUSTER; ++rank) {
        total += shared.blocks[rank];
        before += rank < blockIdx.x ? shared.blocks[rank] : 0;
    }
    for (int w = 0; w < warp; ++w) before += shared.warps[w];
    const u64 bits = greedy ? 0 : random_bits(settings.seed, settings.position);
    const u64 wanted = mul_high(total, bits);
    int token = -1;
    if (before <= wanted && wanted - before < sum) {
        #pragma unroll
        for (int i = 0; i < PACKS * N; ++i) {
            const u32 mine = weight(i);
            if (before <= wanted && wanted - before < mine) token = first * N + i;
            before += mine;
        }
    }
    cluster_wait();
    return token;
}
