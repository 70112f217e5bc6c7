// Attention of many queries on tensor cores: a block has ROWS queries that share their keys, 16 per
// warp, and takes KEYS keys at a time, with a softmax that is corrected as larger scores appear. The
// next keys are on their way while the values of these are summed. Constants come before: T, D and
// DV (features of a head of k and v), KEYS, WARPS, CHANGED (scores are more than scaled products)
// and SCALE (of scores in powers of two).

constexpr int THREADS = WARPS * 32, ROWS = WARPS * 16;
constexpr bool CLUSTER = false;
constexpr int WIDE = (D + 15) / 16 * 16, WIDE_VALUES = (DV + 15) / 16 * 16;
// Rows are an odd number of 16 bytes apart, so that eight of them lie in different banks.
constexpr int PITCH = WIDE + 8, VALUE_PITCH = WIDE_VALUES + 8;

struct alignas(16) Tiles {
    u16 queries[ROWS * PITCH], keys[KEYS * PITCH], values[KEYS * VALUE_PITCH];
};

INLINE float negative_infinity() { return __uint_as_float(0xff800000u); }

// Starts to copy `COUNT` rows of `WIDTH` numbers: `rows` from where `from` says, then zeros.
template <int COUNT, int WIDTH, class From> INLINE void copy_rows(u16* to, ix rows, From from) {
    constexpr int PARTS = (WIDTH + 15) / 16 * 2;
    #pragma unroll
    for (int i = threadIdx.x; i < COUNT * PARTS; i += THREADS) {
        const int row = i / PARTS, part = i % PARTS;
        const bool real = row < rows && part * 8 < WIDTH;
        const u16* source = from(real ? row : 0) + (real ? part * 8 : 0);
        copy_async(to + row * (PARTS * 8 + 8) + part * 8, source, real);
    }
}

// score = queries k', for the 16 queries of this warp.
INLINE void multiply_keys(const Tiles& s, float (&score)[KEYS / 8][4]) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    #pragma unroll
    for (int k = 0; k < WIDE; k += 16) {
        u32 a[4];
        load_matrices<false>(a, s.queries + (first + lane % 16) * PITCH + k + lane / 16 * 8);
        #pragma unroll
        for (int n = 0; n < KEYS; n += 16) {
            u32 b[4];
            const int key = n + lane / 16 * 8 + lane % 8;
            load_matrices<false>(b, s.keys + key * PITCH + k + lane / 8 % 2 * 8);
            mma<T>(score[n / 8], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma<T>(score[n / 8 + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// sums += weights v.
INLINE void multiply_values(
    const Tiles& s, const float (&weight)[KEYS / 8][4], float (&sums)[WIDE_VALUES / 8][4]
) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int k = 0; k < KEYS; k += 16) {
        u32 a[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = pack<T>(weight[k / 8 + i / 2][i % 2 * 2], weight[k / 8 + i / 2][i % 2 * 2 + 1]);
        #pragma unroll
        for (int n = 0; n < WIDE_VALUES; n += 16) {
            u32 b[4];
            load_matrices<true>(b, s.values + (k + lane % 16) * VALUE_PITCH + n + lane / 16 * 8);
            mma<T>(sums[n / 8], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma<T>(sums[n / 8 + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// Scores become weights; `half` is 0 or 1 for rows g and g + 8 of the warp.
INLINE void weigh(
    float (&score)[KEYS / 8][4], float (&sums)[WIDE_VALUES / 8][4], int half, float& top,
    float& total
) {
    float best = top;
    #pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
        best = fmaxf(best, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
    const float base = best == negative_infinity() ? 0.0f : best * SCALE;
    const float fade = exp2_fast(top * SCALE - base);
    top = best;
    total *= fade;
    #pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
        #pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
            score[n][e] = exp2_fast(score[n][e] * SCALE - base);
            total += score[n][e];
        }
    #pragma unroll
    for (int n = 0; n < WIDE_VALUES / 8; ++n) {
        sums[n][2 * half] *= fade;
        sums[n][2 * half + 1] *= fade;
    }
}

// query(row), key(j) and value(j) are where rows lie; whole(j) says that all queries see the keys j
// to j + KEYS - 1; visible(row, j) and change(row, j, product) are about one score; out(row, column,
// pair) takes two results.
template <class Query, class Key, class Value, class Whole, class Visible, class Change, class Out>
INLINE void attend(
    ix rows, ix low, ix high, Query query, Key key, Value value, Whole whole, Visible visible,
    Change change, Out out
) {
    TILES(Tiles, s);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = threadIdx.x / 32 * 16 + g;
    float sums[WIDE_VALUES / 8][4] = {}, total[2] = {};
    float top[2] = {negative_infinity(), negative_infinity()};
    auto next_keys = [&](ix j) {
        auto from = [&](int row) { return key(j + row); };
        if (j < high) copy_rows<KEYS, D>(s.keys, high - j, from);
        commit_copies();
    };
    auto next_values = [&](ix j) {
        auto from = [&](int row) { return value(j + row); };
        if (j < high) copy_rows<KEYS, DV>(s.values, high - j, from);
        commit_copies();
    };
    copy_rows<ROWS, D>(s.queries, rows, query);
    next_keys(low);
    next_values(low);
    for (ix j = low; j < high; j += KEYS) {
        float score[KEYS / 8][4] = {};
        wait_for_copies<1>();
        __syncthreads();
        multiply_keys(s, score);
        __syncthreads();
        next_keys(j + KEYS);
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
        weigh(score, sums, 0, top[0], total[0]);
        weigh(score, sums, 1, top[1], total[1]);
        wait_for_copies<1>();
        __syncthreads();
        multiply_values(s, score, sums);
        __syncthreads();
        next_values(j + KEYS);
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
