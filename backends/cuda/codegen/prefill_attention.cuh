// Attention of many queries on tensor cores: a block has ROWS queries that share their keys, 16 per
// warp, and takes KEYS keys at a time, with a softmax that is corrected as larger scores appear. The
// next keys and values are on their way meanwhile. On compute capability 9.0 groups of four warps
// multiply together (wgmma), from shared memory. Constants come before: T, D and DV (features of a
// head of k and v), KEYS, WARPS, CHANGED (scores are more than scaled products) and SCALE (of
// scores in powers of two).

constexpr int THREADS = WARPS * 32, ROWS = WARPS * 16;
constexpr int WIDE = (D + 15) / 16 * 16, WIDE_VALUES = (DV + 15) / 16 * 16;
constexpr int CHUNKS = (D + 63) / 64, VALUE_CHUNKS = (DV + 63) / 64;  // of 64 numbers of a row

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool GROUPS = KEYS == 64;
#else
constexpr bool GROUPS = false;
#endif
// Weights are relative to the largest score, or to an earlier one that is less than 2^SLACK times
// smaller, so that sums need to be corrected seldom.
constexpr float SLACK = 8.0f;
constexpr int SUMS = (GROUPS ? VALUE_CHUNKS * 64 : WIDE_VALUES) / 8;

// Rows in chunks of 64 numbers; the eight parts of a chunk change places from row to row, so that
// eight rows of a column lie in different banks.
struct alignas(16) Tiles {
    u16 queries[CHUNKS][ROWS][64], keys[2][CHUNKS][KEYS][64], values[2][VALUE_CHUNKS][KEYS][64];
};
struct AlignedTiles { unsigned char bytes[sizeof(Tiles) + 1024]; };
// The next address that is a multiple of 1024.
INLINE Tiles& aligned(AlignedTiles& room) {
    return *(Tiles*)(room.bytes + (0u - (u32)(u64)room.bytes) % 1024u);
}
template <int COUNT, typename U> INLINE U* at(U (*chunks)[COUNT][64], int row, int column) {
    return chunks[column / 64][row] + (column / 8 ^ row) % 8 * 8;
}

// Waits for all copies; tensor cores may read them after the next barrier.
INLINE void finish_copies() {
    commit_copies();
    wait_for_copies<0>();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (GROUPS) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

INLINE float negative_infinity() { return __uint_as_float(0xff800000u); }

// Starts to copy `COUNT` rows of `WIDTH` numbers: `rows` from where `from` says, then zeros.
template <int WIDTH, int COUNT, class From>
INLINE void copy_rows(u16 (*to)[COUNT][64], ix rows, From from) {
    constexpr int PARTS = WIDTH > 128 ? 32 : WIDTH > 64 ? 16 : 8;
    const int column = threadIdx.x % PARTS * 8, first = threadIdx.x / PARTS;
    if (column >= (WIDTH + 15) / 16 * 16) return;
    #pragma unroll
    for (int n = 0; n < COUNT; n += THREADS / PARTS) {
        const int row = first + n;
        const bool real = row < rows && column < WIDTH;
        copy_async(at(to, row, column), from(real ? row : 0) + (real ? column : 0), real);
    }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What tells tensor cores where 64 columns of rows in a chunk start.
INLINE u64 smem_descriptor(const u16* start) {
    const u64 bytes = __cvta_generic_to_shared(start);
    return (bytes & 0x3ffff) >> 4 | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}
#define FOUR(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define TILE(x) FOUR(x[0]), FOUR(x[1]), FOUR(x[2]), FOUR(x[3]), \
    FOUR(x[4]), FOUR(x[5]), FOUR(x[6]), FOUR(x[7])
#define NAMES "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define START(P) "{ .reg .pred more; setp.ne.b32 more, " P ", 0; " \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32."
// c[64, 64] = a[64, 16] b[64, 16]' from shared memory, plus c if `more`; and c += a[64, 16] b[16, 64]
// with a in registers. Rows of c and a are laid out as those of mma, 16 per warp.
template <typename T> struct Group;
#define GROUP_OF(T, KIND) template <> struct Group<T> { \
    INLINE static void multiply(float (*c)[4], u64 a, u64 b, int more) { \
        asm volatile(START("%34") KIND " " NAMES "%32, %33, more, 1, 1, 0, 0; }" \
                     : TILE(c) : "l"(a), "l"(b), "r"(more)); \
    } \
    INLINE static void add(float (*c)[4], const u32 (&a)[4], u64 b) { \
        asm volatile(START("1") KIND " " NAMES "{%32, %33, %34, %35}, %36, more, 1, 1, 1; }" \
                     : TILE(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
};
GROUP_OF(bf16, "bf16.bf16")
GROUP_OF(f16, "f16.f16")
INLINE void begin_group() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Waits until the products into c are done.
template <int N> INLINE void end_group(float (&c)[N][4]) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    #pragma unroll
    for (int n = 0; n < N; ++n) settle(c[n]);
}
#endif

// score = queries k', for the 16 queries of this warp.
INLINE void multiply_keys(const Tiles& s, int stage, float (&score)[KEYS / 8][4]) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (GROUPS) {
        const int group = __shfl_sync(0xffffffffu, first / 64, 0);
        const u64 queries = smem_descriptor(s.queries[0][group * 64]);
        const u64 keys = smem_descriptor(s.keys[stage][0][0]);
        begin_group();
        #pragma unroll
        for (int k = 0; k < WIDE; k += 16) {
            const u64 a = queries + (k / 64 * ROWS * 64 + k % 64) / 8;
            Group<T>::multiply(score, a, keys + (k / 64 * KEYS * 64 + k % 64) / 8, k);
        }
        end_group(score);
        return;
    }
#endif
    #pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) score[n][e] = 0.0f;
    #pragma unroll
    for (int k = 0; k < WIDE; k += 16) {
        u32 a[4];
        load_matrices<false>(a, at(s.queries, first + lane % 16, k + lane / 16 * 8));
        #pragma unroll
        for (int n = 0; n < KEYS; n += 16) {
            u32 b[4];
            const int key = n + lane / 16 * 8 + lane % 8;
            load_matrices<false>(b, at(s.keys[stage], key, k + lane / 8 % 2 * 8));
            mma<T>(score[n / 8], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma<T>(score[n / 8 + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// sums += weights v.
INLINE void multiply_values(
    const Tiles& s, int stage, const float (&weight)[KEYS / 8][4], float (&sums)[SUMS][4]
) {
    const int lane = threadIdx.x % 32;
    u32 a[KEYS / 16][4];
    #pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float (&from)[4] = weight[2 * k + i / 2];
            a[k][i] = pack<T>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (GROUPS) {
        const u64 values = smem_descriptor(s.values[stage][0][0]);
        begin_group();
        #pragma unroll
        for (int k = 0; k < KEYS / 16; ++k)
            #pragma unroll
            for (int n = 0; n < VALUE_CHUNKS; ++n)
                Group<T>::add(sums + 8 * n, a[k], values + (n * KEYS + 16 * k) * 64 / 8);
        end_group(sums);
        return;
    }
#endif
    #pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
        #pragma unroll
        for (int n = 0; n < WIDE_VALUES; n += 16) {
            u32 b[4];
            load_matrices<true>(b, at(s.values[stage], 16 * k + lane % 16, n + lane / 16 * 8));
            mma<T>(sums[n / 8], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
            mma<T>(sums[n / 8 + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
        }
}

// Scores become weights; `half` is 0 or 1 for rows g and g + 8 of the warp. Returns what sums of
// earlier weights are to be multiplied by.
INLINE float rescale(float (&score)[KEYS / 8][4], int half, float& top, float& total) {
    float best = top;
    #pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
        best = fmaxf(best, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
    if ((best - top) * SCALE <= SLACK) best = top;
    const float base = best == negative_infinity() ? 0.0f : best * SCALE;
    const float factor = best == top ? 1.0f : exp2_fast(top * SCALE - base);
    top = best;
    total *= factor;
    #pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
        #pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
            score[n][e] = exp2_fast(score[n][e] * SCALE - base);
            total += score[n][e];
        }
    return factor;
}

INLINE void scale(float (&sums)[SUMS][4], const float (&by)[2]) {
    if (by[0] == 1.0f && by[1] == 1.0f) return;
    #pragma unroll
    for (int n = 0; n < SUMS; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] *= by[e / 2];
}

// query(row), key(j) and value(j) are where rows lie; whole(j) says that all queries see the keys j
// to j + KEYS - 1; visible(row, j) and change(row, j, product) are about one score; sink(row) is that of a
// key of value 0, or -infinity; out(row, column, pair) takes two results.
template <class Query, class Key, class Value, class Whole, class Visible, class Change, class Sink,
          class Out>
INLINE void prefill_attention(
    ix rows, ix low, ix high, Query query, Key key, Value value, Whole whole, Visible visible,
    Change change, Sink sink, Out out
) {
    TILES(AlignedTiles, room);
    Tiles& s = aligned(room);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = threadIdx.x / 32 * 16 + g;
    float sums[SUMS][4] = {}, total[2] = {};
    float top[2];
    for (int half = 0; half < 2; ++half) {
        const int row = first + half * 8;
        top[half] = row < rows ? sink((ix)row) : negative_infinity();
        total[half] = t == 0 && top[half] != negative_infinity();
    }
    float score[KEYS / 8][4];
    auto next_tiles = [&](ix j, int stage) {
        if (j >= high) return;
        copy_rows<D>(s.keys[stage], high - j, [&](int row) { return key(j + row); });
        copy_rows<DV>(s.values[stage], high - j, [&](int row) { return value(j + row); });
    };
    copy_rows<D>(s.queries, rows, query);
    int stage = 0;
    next_tiles(low, 0);
    for (ix j = low; j < high; j += KEYS, stage ^= 1) {
        finish_copies();
        __syncthreads();
        next_tiles(j + KEYS, stage ^ 1);
        multiply_keys(s, stage, score);
        if (CHANGED || !whole(j)) {
            #pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const ix row = first + e / 2 * 8, at = j + n * 8 + 2 * t + e % 2;
                    const bool seen = row < rows && at < high && visible(row, at);
                    score[n][e] = seen ? change(row, at, score[n][e]) : negative_infinity();
                }
        }
        const float factors[2] = {
            rescale(score, 0, top[0], total[0]), rescale(score, 1, top[1], total[1])
        };
        scale(sums, factors);
        multiply_values(s, stage, score, sums);
    }
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float whole_total = total[half];
        whole_total += __shfl_xor_sync(0xffffffffu, whole_total, 1);
        whole_total += __shfl_xor_sync(0xffffffffu, whole_total, 2);
        const float each = whole_total == 0.0f ? 0.0f : 1.0f / whole_total;
        const int row = first + half * 8;
        #pragma unroll
        for (int n = 0; n < WIDE_VALUES / 8; ++n)
            if (row < rows && n * 8 < DV)
                out((ix)row, (ix)(n * 8 + 2 * t),
                    pack<T>(sums[n][2 * half] * each, sums[n][2 * half + 1] * each));
    }
}
