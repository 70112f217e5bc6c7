// Products of tiles of rows with weights [EXPERTS, N, K], on tensor cores of compute capability 9.0:
// blocks take one tile after the other. One warp copies what tiles multiply, 64 numbers of a row at a
// time, into STAGES that GROUPS of four warps multiply, 64 rows each. Constants come before: T, ROWS
// (of a tile that are copied), GROUPS, COLUMNS (results of a tile with each of the weights), WEIGHTS
// (1 or 2), STAGES, SHARED_BYTES, N and K.

constexpr int THREADS = 128 * (GROUPS + 1);
// Large tiles are taken when a block is ready, so that those that share weights start together.
constexpr bool TAKEN = GROUPS > 1;
constexpr int DEPTH = 64, WIDTH = WEIGHTS * COLUMNS;

struct Stage { u16 x[ROWS][DEPTH], weights[WEIGHTS][COLUMNS][DEPTH]; };
struct Stages {
    Stage at[STAGES];
    TensorMap maps[WEIGHTS + 1];
    u64 full[STAGES], empty[STAGES];  // barriers
    int tiles[STAGES];  // whose numbers are in the stages
};
struct StagesAndGap { unsigned char bytes[sizeof(Stages) + 1024]; };
static_assert(sizeof(StagesAndGap) <= SHARED_BYTES, "the launch has as much");

// Tile `i` is what next(i) sets `row`, `column` and `expert` to, before it returns true; `rows` are
// those of x.
template <class Next>
INLINE void copy_tiles(
    Stages& s, TensorMap* maps, int* taken, const void* x, u32 rows, const void* const (&weights)[2], u32 experts,
    const int& row, const int& column, const int& expert, Next next
) {
    make_map(maps, s.maps, x, K, rows, 1, ROWS);
    #pragma unroll
    for (int w = 0; w < WEIGHTS; ++w)
        make_map(maps + 1 + w, s.maps + 1 + w, weights[w], K, N, experts, COLUMNS);
    if (threadIdx.x % 32) return;
    int step = 0;
    for (int tile = blockIdx.x;; tile += gridDim.x) {
        if (TAKEN) tile = take(taken);
        const bool is_tile = next(tile);
        if (!TAKEN && !is_tile) return;
        for (int k = 0; k < K; k += DEPTH, ++step) {
            Stage& stage = s.at[step % STAGES];
            u64* full = s.full + step % STAGES;
            barrier_wait(s.empty + step % STAGES, step / STAGES % 2 ^ 1);
            s.tiles[step % STAGES] = tile;
            if (!is_tile) {
                barrier_arrive(full);
                if (take(taken + 1) == (int)gridDim.x - 1) taken[0] = taken[1] = 0;
                return;
            }
            barrier_expect(full, 2 * DEPTH * (ROWS + WIDTH));
            copy_tile(stage.x, maps, k, row, 0, full);
            #pragma unroll
            for (int w = 0; w < WEIGHTS; ++w)
                copy_tile(stage.weights[w], maps + 1 + w, k, column, expert, full);
        }
    }
}

// Lane t of four neighbours gets word t of each.
INLINE void transpose_fours(u32 (&x)[4]) {
    #pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = threadIdx.x & step;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const u32 other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + step], step);
            if (upper) x[i] = other;
            else x[i + step] = other;
        }
    }
}

// value(column, ...) makes a result of the sums with every weight, and y(i) is where row i of the
// tile, of `rows`, lies.
template <class Next, class Value, class Y>
INLINE void multiply_tiles(
    Stages& s, int group, const int& column, const int& rows, Next next, Value value, Y y
) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = group * 64 + threadIdx.x / 32 % 4 * 16 + g;
    float sums[WIDTH / 8][4];
    int step = 0;
    for (int tile = blockIdx.x;; tile += gridDim.x) {
        if (TAKEN) {
            barrier_wait(s.full + step % STAGES, step / STAGES % 2);
            tile = s.tiles[step % STAGES];
        }
        if (!next(tile)) return;
        const bool busy = group * 64 < rows;
        for (int k = 0; k < K; k += DEPTH, ++step) {
            const Stage& stage = s.at[step % STAGES];
            barrier_wait(s.full + step % STAGES, step / STAGES % 2);
            if (busy) {
                const u64 a = smem_descriptor(stage.x[0] + group * 64 * DEPTH);
                const u64 b = smem_descriptor(stage.weights[0][0]);
                begin_group();
                #pragma unroll
                for (int i = 0; i < DEPTH / 16; ++i)
                    multiply_group<T, WIDTH>(sums, a + 2 * i, b + 2 * i, k + i);
                commit_group();
                wait_for_groups<1>();
            }
            if (lane == 0 && k) barrier_arrive(s.empty + (step - 1) % STAGES);
        }
        wait_for_groups<0>();
        #pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n) settle(sums[n]);
        if (lane == 0) barrier_arrive(s.empty + (step - 1) % STAGES);
        if (!busy) continue;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + 8 * half;
            u16* to = y(min(row, rows - 1)) + column + 8 * t;
            #pragma unroll
            for (int n = 0; n < COLUMNS / 8; n += 4) {
                u32 pairs[4];
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = min(column + 8 * (n + i) + 2 * t, N - 2);
                    const float* a = sums[n + i] + 2 * half;
                    const float* b = sums[WIDTH / 8 - COLUMNS / 8 + n + i] + 2 * half;
                    pairs[i] = pack<T>(value(at, a[0], b[0]), value(at + 1, a[1], b[1]));
                }
                transpose_fours(pairs);
                if (row < rows && column + 8 * (n + t) < N)
                    *(uint4*)(to + 8 * n) = {pairs[0], pairs[1], pairs[2], pairs[3]};
            }
        }
    }
}

template <class Next, class Value, class Y>
INLINE void grouped_gemm(
    TensorMap* maps, int* taken, const void* x, u32 rows_of_x, const void* const (&weights)[2], u32 experts,
    const int& expert, const int& row, const int& rows, const int& column, Next next, Value value, Y y
) {
#if defined(EMULATED_WARPS) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    TILES(StagesAndGap, memory);
    Stages& s = *(Stages*)(memory.bytes + (0u - (u32)(u64)memory.bytes) % 1024u);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(s.full + i, 1);
            barrier_init(s.empty + i, 4 * GROUPS);
        }
        barriers_visible();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = warp / 4;
    maps += blockIdx.x * (WEIGHTS + 1);
    if (group == GROUPS) {
        if constexpr (GROUPS > 1) fewer_registers<GROUPS == 2 ? 40 : 32>();
        if (warp == 4 * GROUPS)
            copy_tiles(s, maps, taken, x, rows_of_x, weights, experts, row, column, expert, next);
    } else {
        if constexpr (GROUPS > 1) more_registers<GROUPS == 2 ? 232 : 160>();
        multiply_tiles(s, group, column, rows, next, value, y);
    }
#endif
}
