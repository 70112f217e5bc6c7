// Sums of products by one block: sum over k of x(z, m, k) * y(z, k, n), given to out(z, m, n, sum).
// x, y and out are functions of indices, so operands that are computed need no memory.

constexpr int THREADS = 256, TILE = 64, DEPTH = 32, EACH = 4;

struct Sizes {
    ix batches, rows, columns, depth;
};

// One tile of TILE x TILE sums, EACH x EACH of them per thread. `along`: neighbours along k of y lie
// together in memory, not those along n.
template <typename R, bool along, class X, class Y, class Out>
INLINE void product_tile(const Sizes& s, ix z, ix m0, ix n0, X x, Y y, Out out) {
    alignas(16) __shared__ R xs[DEPTH][TILE + EACH], ys[DEPTH][TILE + EACH];
    R sums[EACH][EACH] = {};
    const int m = threadIdx.x / (TILE / EACH) * EACH, n = threadIdx.x % (TILE / EACH) * EACH;
    for (ix k0 = 0; k0 < s.depth; k0 += DEPTH) {
        #pragma unroll
        for (int e = threadIdx.x; e < TILE * DEPTH; e += THREADS) {
            int k = e % DEPTH, row = e / DEPTH;
            bool real = m0 + row < s.rows && k0 + k < s.depth;
            xs[k][row] = real ? (R)x(z, m0 + row, k0 + k) : (R)0;
        }
        #pragma unroll
        for (int e = threadIdx.x; e < TILE * DEPTH; e += THREADS) {
            int k = along ? e % DEPTH : e / TILE, column = along ? e / DEPTH : e % TILE;
            bool real = n0 + column < s.columns && k0 + k < s.depth;
            ys[k][column] = real ? (R)y(z, k0 + k, n0 + column) : (R)0;
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < DEPTH; ++k)
            #pragma unroll
            for (int i = 0; i < EACH; ++i)
                #pragma unroll
                for (int j = 0; j < EACH; ++j) sums[i][j] += xs[k][m + i] * ys[k][n + j];
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < EACH; ++i)
        #pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (m0 + m + i < s.rows && n0 + n + j < s.columns)
                out(z, m0 + m + i, n0 + n + j, sums[i][j]);
}

// Neighbouring blocks share columns, so that each part of y is read from memory once.
template <typename R, bool along, class X, class Y, class Out>
INLINE void products_by_tile(const Sizes& s, X x, Y y, Out out) {
    ix down = (s.rows + TILE - 1) / TILE, across = (s.columns + TILE - 1) / TILE;
    for (ix tile = blockIdx.x; tile < s.batches * down * across; tile += gridDim.x) {
        ix z = tile / (down * across), rest = tile % (down * across);
        product_tile<R, along>(s, z, rest % down * TILE, rest / down * TILE, x, y, out);
    }
}

// One sum per thread: for few rows or columns.
template <typename R, class X, class Y, class Out>
INLINE void products_by_thread(const Sizes& s, X x, Y y, Out out) {
    const ix count = s.batches * s.rows * s.columns, step = (ix)gridDim.x * (ix)blockDim.x;
    for (ix e = (ix)blockIdx.x * (ix)blockDim.x + (ix)threadIdx.x; e < count; e += step) {
        ix n = e % s.columns, m = e / s.columns % s.rows, z = e / s.columns / s.rows;
        R sum = 0;
        for (ix k = 0; k < s.depth; ++k) sum += (R)x(z, m, k) * (R)y(z, k, n);
        out(z, m, n, sum);
    }
}
