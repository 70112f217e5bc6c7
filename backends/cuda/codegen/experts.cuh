// Products of rows with the weights of one expert [N, K], or with two of them, on tensor cores: a
// block has up to ROWS rows and COLUMNS results of each. Constants come before: T, ROWS, COLUMNS,
// WEIGHTS (1 or 2), DEPTH (elements along k at a time), STAGES of those on their way, N and K.
// WARPS_DOWN x WARPS_ACROSS warps share the results, and WARPS_DEEP what is summed.

constexpr int WARPS = WARPS_DOWN * WARPS_ACROSS;
constexpr int THREADS = 32 * WARPS * WARPS_DEEP;
constexpr int PITCH = DEPTH + 8;  // an odd number of 16 bytes, so that eight rows lie in different banks
constexpr int PARTS = DEPTH / 8, STEP = THREADS / PARTS;  // a thread copies 16 bytes of every STEP-th row
constexpr int MS = ROWS / WARPS_DOWN / 16, NS = COLUMNS / WARPS_ACROSS / 8;  // of one warp

struct alignas(16) Stage { u16 x[ROWS * PITCH], weights[WEIGHTS * COLUMNS * PITCH]; };
struct Stages { Stage at[STAGES]; };
typedef float Sums[MS][WEIGHTS][NS][4];

INLINE void multiply(const Stage& s, Sums& sums) {
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32;
    const int down = warp / WARPS_ACROSS * MS * 16, across = warp % WARPS_ACROSS * NS * 8;
    #pragma unroll
    for (int j = 0; j < DEPTH; j += 16 * WARPS_DEEP) {
        const int k = j + (WARPS_DEEP > 1 ? threadIdx.x / 32 / WARPS * 16 : 0);
        u32 a[MS][4];
        #pragma unroll
        for (int m = 0; m < MS; ++m)
            load_matrices<false>(
                a[m], s.x + (down + m * 16 + lane % 16) * PITCH + k + lane / 16 * 8);
        #pragma unroll
        for (int w = 0; w < WEIGHTS; ++w)
            #pragma unroll
            for (int n = 0; n < NS; n += 2) {
                u32 b[4];
                const int row = w * COLUMNS + across + n * 8 + lane / 16 * 8 + lane % 8;
                load_matrices<false>(b, s.weights + row * PITCH + k + lane / 8 % 2 * 8);
                #pragma unroll
                for (int m = 0; m < MS; ++m) {
                    mma<T>(sums[m][w][n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    mma<T>(sums[m][w][n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
    }
}

// Adds up what the warps summed along k; those of the first results have the totals.
INLINE void add_up(float* parts, Sums& sums) {
    if (WARPS_DEEP == 1) return;
    constexpr int COUNT = sizeof(Sums) / 4, STEP = 32 * WARPS;
    const int deep = threadIdx.x / STEP;
    float* mine = parts + threadIdx.x % STEP;
    float* all = &sums[0][0][0][0];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (deep) mine[((deep - 1) * COUNT + i) * STEP] = all[i];
    __syncthreads();
    #pragma unroll
    for (int from = 0; from < WARPS_DEEP - 1; ++from)
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!deep) all[i] += mine[(from * COUNT + i) * STEP];
}

// `x(row)` and `y(row)` are where rows begin, `weights(w)` the weights; value(column, ...) makes a
// result of the sums with every weight.
template <class X, class Weights, class Value, class Y>
INLINE void multiply_rows(int rows, int first, X x, Weights weights, Value value, Y y) {
    TILES(Stages, stages);
    const int part = threadIdx.x % PARTS * 8, top = threadIdx.x / PARTS;
    const u16 *from_x[ROWS / STEP], *from_weights[WEIGHTS * COLUMNS / STEP];
    #pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i) from_x[i] = x(min(top + i * STEP, rows - 1)) + part;
    #pragma unroll
    for (int i = 0; i < WEIGHTS * COLUMNS / STEP; ++i) {
        const int row = top + i * STEP;
        from_weights[i] = weights(row / COLUMNS) + (u64)min(first + row % COLUMNS, N - 1) * K + part;
    }
    auto start = [&](int k) {
        Stage& s = stages.at[k / DEPTH % STAGES];
        const bool real = k + part < K;
        if (k < K) {
            #pragma unroll
            for (int i = 0; i < WEIGHTS * COLUMNS / STEP; ++i)
                copy_async(s.weights + (top + i * STEP) * PITCH + part, from_weights[i] + k, real);
            #pragma unroll
            for (int i = 0; i < ROWS / STEP; ++i)
                copy_async(s.x + (top + i * STEP) * PITCH + part, from_x[i] + k, real);
        }
        commit_copies();
    };
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) start(i * DEPTH);
    Sums sums = {};
    for (int k = 0; k < K; k += DEPTH) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        start(k + (STAGES - 1) * DEPTH);
        multiply(stages.at[k / DEPTH % STAGES], sums);
    }
    add_up((float*)&stages, sums);
    if (threadIdx.x >= 32 * WARPS) return;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int half = 0; half < 2 * MS; ++half) {
        const int m = half / 2, row = (warp / WARPS_ACROSS * MS + m) * 16 + half % 2 * 8 + g;
        if (row >= rows) continue;
        u16* to = y(row);
        #pragma unroll
        for (int n = 0; n < NS; ++n) {
            const int column = first + (warp % WARPS_ACROSS * NS + n) * 8 + 2 * t, e = half % 2 * 2;
            const auto& a = sums[m][0][n];
            const auto& b = sums[m][WEIGHTS - 1][n];
            if (column < N)
                *(u32*)(to + column) =
                    pack<T>(value(column, a[e], b[e]), value(column + 1, a[e + 1], b[e + 1]));
        }
    }
}
