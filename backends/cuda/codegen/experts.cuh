// Products of rows with the weights of one expert [N, K], or with two of them, on tensor cores. An
// item is up to ROWS rows and COLUMNS results of each weight; a block computes every gridDim.x-th
// item, and copies what comes next, of the next item too, while it multiplies. Constants come
// before: T, ROWS, COLUMNS, WEIGHTS (1 or 2), DEPTH (elements along k at a time), STAGES of those on
// their way, N and K. WARPS_DOWN x WARPS_ACROSS warps share the results, and WARPS_DEEP what is
// summed.

constexpr int WARPS = WARPS_DOWN * WARPS_ACROSS;
constexpr int THREADS = 32 * WARPS * WARPS_DEEP;
constexpr bool CLUSTER = false;
constexpr int PITCH = DEPTH + 8;  // an odd number of 16 bytes, so that eight rows lie in different banks
constexpr int PARTS = DEPTH / 8, STEP = THREADS / PARTS;  // a thread copies 16 bytes of every STEP-th row
constexpr int MS = ROWS / WARPS_DOWN / 16, NS = COLUMNS / WARPS_ACROSS / 8;  // of one warp

typedef float Sums[MS][WEIGHTS][NS][4];
constexpr int SUMS = MS * WEIGHTS * NS * 4;
struct alignas(16) Stage { u16 x[ROWS * PITCH], weights[WEIGHTS * COLUMNS * PITCH]; };
struct Stages {
    Stage at[STAGES];
    float sums[(WARPS_DEEP - 1) * SUMS * 32 * WARPS + 1];
};
struct Item { int expert, first, rows, column; };
struct Operands { u32 a[MS][4], b[WEIGHTS][NS / 2][4]; };

INLINE void load_operands(const Stage& s, int k, Operands& found) {
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32;
    const int down = warp / WARPS_ACROSS * MS * 16, across = warp % WARPS_ACROSS * NS * 8;
    #pragma unroll
    for (int m = 0; m < MS; ++m)
        load_matrices<false>(
            found.a[m], s.x + (down + m * 16 + lane % 16) * PITCH + k + lane / 16 * 8);
    #pragma unroll
    for (int w = 0; w < WEIGHTS; ++w)
        #pragma unroll
        for (int n = 0; n < NS; n += 2) {
            const int row = w * COLUMNS + across + n * 8 + lane / 16 * 8 + lane % 8;
            load_matrices<false>(
                found.b[w][n / 2], s.weights + row * PITCH + k + lane / 8 % 2 * 8);
        }
}

INLINE void multiply(const Stage& s, Sums& sums) {
    constexpr int STEPS = DEPTH / 16 / WARPS_DEEP;
    const int first = WARPS_DEEP > 1 ? threadIdx.x / 32 / WARPS * 16 : 0;
    Operands each[2];
    load_operands(s, first, each[0]);
    #pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        if (i + 1 < STEPS) load_operands(s, first + (i + 1) * 16 * WARPS_DEEP, each[(i + 1) % 2]);
        const Operands& now = each[i % 2];
        #pragma unroll
        for (int w = 0; w < WEIGHTS; ++w)
            #pragma unroll
            for (int n = 0; n < NS; ++n)
                #pragma unroll
                for (int m = 0; m < MS; ++m)
                    mma<T>(sums[m][w][n], now.a[m][0], now.a[m][1], now.a[m][2], now.a[m][3],
                           now.b[w][n / 2][n % 2 * 2], now.b[w][n / 2][n % 2 * 2 + 1]);
    }
}

// Adds up what the warps summed along k; those of the first results have the totals.
INLINE void add_up(float* parts, Sums& sums) {
    if (WARPS_DEEP == 1) return;
    constexpr int COUNT = 32 * WARPS;
    const int deep = threadIdx.x / COUNT;
    float *mine = parts + threadIdx.x % COUNT, *all = &sums[0][0][0][0];
    #pragma unroll
    for (int i = 0; i < SUMS; ++i)
        if (deep) mine[((deep - 1) * SUMS + i) * COUNT] = all[i];
    __syncthreads();
    #pragma unroll
    for (int from = 0; from < WARPS_DEEP - 1; ++from)
        #pragma unroll
        for (int i = 0; i < SUMS; ++i)
            if (!deep) all[i] += mine[(from * SUMS + i) * COUNT];
}

// `value` makes a result of the sums with every weight, `y(item, row)` is where a row of them begins.
template <class Value, class Y>
INLINE void store_results(const Sums& sums, const Item& item, Value value, Y y) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (warp >= WARPS) return;
    #pragma unroll
    for (int half = 0; half < 2 * MS; ++half) {
        const int m = half / 2, row = (warp / WARPS_ACROSS * MS + m) * 16 + half % 2 * 8 + g;
        if (row >= item.rows) continue;
        u16* to = y(item, row) + item.column;
        #pragma unroll
        for (int n = 0; n < NS; ++n) {
            const int column = (warp % WARPS_ACROSS * NS + n) * 8 + 2 * t, e = half % 2 * 2;
            const auto& a = sums[m][0][n];
            const auto& b = sums[m][WEIGHTS - 1][n];
            if (item.column + column < N)
                *(u32*)(to + column) = pack<T>(value(a[e], b[e]), value(a[e + 1], b[e + 1]));
        }
    }
}

// `find(i)` is an item, `x(item, row)` where a row begins, `weights(w)` where weights do.
template <class Find, class X, class Weights, class Value, class Y>
INLINE void multiply_items(int items, Find find, X x, Weights weights, Value value, Y y) {
    TILES(Stages, stages);
    const int part = threadIdx.x % PARTS * 8, top = threadIdx.x / PARTS;
    const u16 *from_x[ROWS / STEP], *from_weights[WEIGHTS];
    int copied = blockIdx.x, columns = 0, k = 0, into = 0, stage = 0;  // of the next copy; of now
    auto copy = [&]() {
        if (copied < items) {
            if (k == 0) {
                const Item item = find(copied);
                columns = min(COLUMNS, N - item.column);
                #pragma unroll
                for (int w = 0; w < WEIGHTS; ++w)
                    from_weights[w] = weights(w) +
                        ((u64)item.expert * N + item.column + top) * K + part;
                #pragma unroll
                for (int i = 0; i < ROWS / STEP; ++i)
                    from_x[i] = x(item, min(top + i * STEP, item.rows - 1)) + part;
            }
            Stage& s = stages.at[into];
            #pragma unroll
            for (int i = 0; i < WEIGHTS * COLUMNS; i += STEP)
                copy_async(s.weights + (top + i) * PITCH + part,
                           from_weights[i / COLUMNS] + (u64)(i % COLUMNS) * K + k,
                           k + part < K && top + i % COLUMNS < columns);
            #pragma unroll
            for (int i = 0; i < ROWS / STEP; ++i)
                copy_async(s.x + (top + i * STEP) * PITCH + part, from_x[i] + k, k + part < K);
            k += DEPTH;
            if (k >= K) k = 0, copied += gridDim.x;
        }
        into = into + 1 == STAGES ? 0 : into + 1;
        commit_copies();
    };
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy();
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
        const Item item = find(i);
        const bool used = threadIdx.x / 32 % WARPS / WARPS_ACROSS * MS * 16 < item.rows;
        Sums sums = {};
        for (int j = 0; j < K; j += DEPTH) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            copy();
            if (used) multiply(stages.at[stage], sums);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        add_up(stages.sums, sums);
        store_results(sums, item, value, y);
    }
}
