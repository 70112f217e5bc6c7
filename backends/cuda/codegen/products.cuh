// Sums of products by one block: sum over k of x(z, m, k) * y(z, k, n), given to out(z, m, n, sum).
// x, y and out are functions of indices, so operands that are computed need no memory.

const int TILE = 64, DEPTH = 32, EACH = 4;

struct Sizes {
    ix batches, rows, columns, depth;
};

// One tile of TILE x TILE sums, EACH x EACH of them per thread. `along`: neighbours along k of y lie
// together in memory, not those along n.
template <typename R, bool along, class X, class Y, class Out>
INLINE void product_tile(const Sizes& s, ix z, ix m0, ix n0, X x, Y y, Out out) {
    alignas(16) __shared__ R xs[DEPTH][TILE + EACH], ys[DEPTH][TILE + EACH];
    R sums[SLOTS][EACH][EACH] = {};
    for (ix k0 = 0; k0 < s.depth; k0 += DEPTH) {
        #pragma unroll
        for (int e = threadIdx.x; e < TILE * DEPTH; e += STEP) {
            int k = e % DEPTH, m = e / DEPTH;
            xs[k][m] = m0 + m < s.rows && k0 + k < s.depth ? (R)x(z, m0 + m, k0 + k) : (R)0;
        }
        #pragma unroll
        for (int e = threadIdx.x; e < TILE * DEPTH; e += STEP) {
            int k = along ? e % DEPTH : e / TILE, n = along ? e / DEPTH : e % TILE;
            ys[k][n] = n0 + n < s.columns && k0 + k < s.depth ? (R)y(z, k0 + k, n0 + n) : (R)0;
        }
        __syncthreads();
        for (int slot = 0; slot < SLOTS; ++slot) {
            int thread = threadIdx.x + slot * STEP;
            int m = thread / (TILE / EACH) * EACH, n = thread % (TILE / EACH) * EACH;
            #pragma unroll
            for (int k = 0; k < DEPTH; ++k)
                #pragma unroll
                for (int i = 0; i < EACH; ++i)
                    #pragma unroll
                    for (int j = 0; j < EACH; ++j) sums[slot][i][j] += xs[k][m + i] * ys[k][n + j];
        }
        __syncthreads();
    }
    for (int slot = 0; slot < SLOTS; ++slot) {
        int thread = threadIdx.x + slot * STEP;
        ix m = m0 + thread / (TILE / EACH) * EACH, n = n0 + thread % (TILE / EACH) * EACH;
        #pragma unroll
        for (int i = 0; i < EACH; ++i)
            #pragma unroll
            for (int j = 0; j < EACH; ++j)
                if (m + i < s.rows && n + j < s.columns) out(z, m + i, n + j, sums[slot][i][j]);
    }
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

// One sum per thread: for few rows or columns. `at` sets z, m and n by the number of a result.
template <typename R, class At, class X, class Y, class Out>
INLINE void products_by_thread(const Sizes& s, At at, X x, Y y, Out out) {
    const ix count = s.batches * s.rows * s.columns, step = (ix)gridDim.x * (ix)blockDim.x;
    for (ix e = (ix)blockIdx.x * (ix)blockDim.x + (ix)threadIdx.x; e < count; e += step) {
        ix z, m, n;
        at(e, z, m, n);
        R sum = 0;
        for (ix k = 0; k < s.depth; ++k) sum += (R)x(z, m, k) * (R)y(z, k, n);
        out(z, m, n, sum);
    }
}

// A block per column, for at most `FEW` rows: it reads neighbours along k together.
const int FEW = 4;
template <typename R, class X, class Y, class Out>
INLINE void products_of_few_rows(const Sizes& s, X x, Y y, Out out) {
    for (ix n = blockIdx.x; n < s.columns; n += gridDim.x) {
        R sums[FEW] = {};
        for (ix k = threadIdx.x; k < s.depth; k += blockDim.x) {
            R weight = y((ix)0, k, n);
            #pragma unroll
            for (int m = 0; m < FEW; ++m)
                if (m < s.rows) sums[m] += (R)x((ix)0, (ix)m, k) * weight;
        }
        #pragma unroll
        for (int m = 0; m < FEW; ++m) {
            R sum = block_sum(sums[m]);
            if (m < s.rows && threadIdx.x == 0) out((ix)0, (ix)m, n, sum);
        }
    }
}
