// Attention of `ROWS` queries that share their keys by one block, with a softmax that is corrected
// as larger scores appear (online softmax). `room` is memory of the block, ROWS * (D + DV) numbers. query(row, d), key(j, d) and value(j, c) are elements;
// visible(row, j) and change(row, j, product) are about one score; sink(row) is that of a key of value
// 0, or -infinity. The keys are `low` to `high` - 1.

const int THREADS = 128;

template <typename R, int ROWS, int D, int DV, class Query, class Key, class Value, class Visible,
          class Change, class Sink, class Out>
INLINE void plain_attention(
    R* room, ix rows, ix low, ix high, Query query, Key key, Value value, Visible visible, Change change,
    Sink sink, Out out
) {
    __shared__ R weights[ROWS][THREADS];
    R (*const features)[D] = (R(*)[D])room, (*const sums)[DV] = (R(*)[DV])(room + ROWS * D);
    const R infinity = (R)__uint_as_float(0x7f800000u);
    R tops[ROWS], totals[ROWS], rescale[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        for (int d = threadIdx.x; d < D; d += blockDim.x)
            features[r][d] = r < rows ? query((ix)r, (ix)d) : (R)0;
        for (int c = threadIdx.x; c < DV; c += blockDim.x) sums[r][c] = 0;
        tops[r] = r < rows ? sink((ix)r) : -infinity;
        totals[r] = tops[r] == -infinity ? (R)0 : (R)1;
    }
    __syncthreads();
    for (ix j0 = low; j0 < high; j0 += blockDim.x) {
        const ix mine = j0 + threadIdx.x;
        R products[ROWS] = {};
        for (int d = 0; d < D && mine < high; ++d) {
            const R x = key(mine, (ix)d);
            #pragma unroll
            for (int r = 0; r < ROWS; ++r) products[r] += features[r][d] * x;
        }
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool seen = r < rows && mine < high && visible((ix)r, mine);
            const R score = seen ? change((ix)r, mine, products[r]) : -infinity, before = tops[r];
            tops[r] = maximum(before, block_max(score));
            const R base = tops[r] == -infinity ? (R)0 : tops[r];
            rescale[r] = exp(before - base);
            weights[r][threadIdx.x] = exp(score - base);
            totals[r] = totals[r] * rescale[r] + block_sum(weights[r][threadIdx.x]);
        }
        __syncthreads();
        for (int c = threadIdx.x; c < DV; c += blockDim.x) {
            R found[ROWS];
            #pragma unroll
            for (int r = 0; r < ROWS; ++r) found[r] = sums[r][c] * rescale[r];
            for (int k = 0; k < blockDim.x && j0 + k < high; ++k) {
                const R x = value(j0 + k, (ix)c);
                #pragma unroll
                for (int r = 0; r < ROWS; ++r)  // unseen values may be NaN
                    if (weights[r][k] != (R)0) found[r] += weights[r][k] * x;
            }
            #pragma unroll
            for (int r = 0; r < ROWS; ++r) sums[r][c] = found[r];
        }
        __syncthreads();
    }
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
        for (int c = threadIdx.x; r < rows && c < DV; c += blockDim.x)
            out((ix)r, (ix)c, totals[r] > (R)0 ? sums[r][c] / totals[r] : sums[r][c]);
}
