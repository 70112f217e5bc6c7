// Attention of one query by one block, with a softmax that is corrected as larger scores appear
// (online softmax). query(0, d), key(j, d) and value(j, c) are elements; visible(0, j) and
// change(0, j, product) are about one score. The keys are `low` to `high` - 1.

const int THREADS = 128;

template <typename R, int D, int DV, class Query, class Key, class Value, class Visible, class Change,
          class Out>
INLINE void attend(
    ix low, ix high, Query query, Key key, Value value, Visible visible, Change change, Out out
) {
    __shared__ R features[D], weights[THREADS], sums[DV];
    const R infinity = (R)__uint_as_float(0x7f800000u);
    for (int d = threadIdx.x; d < D; d += blockDim.x) features[d] = query((ix)0, (ix)d);
    for (int c = threadIdx.x; c < DV; c += blockDim.x) sums[c] = 0;
    __syncthreads();
    R top = -infinity, total = 0;
    for (ix j0 = low; j0 < high; j0 += blockDim.x) {
        const ix mine = j0 + threadIdx.x;
        R score = -infinity;
        if (mine < high && visible((ix)0, mine)) {
            R product = 0;
            for (int d = 0; d < D; ++d) product += features[d] * key(mine, (ix)d);
            score = change((ix)0, mine, product);
        }
        const R before = top;
        top = maximum(top, block_max(score));
        const R base = top == -infinity ? (R)0 : top, fade = exp(before - base);
        const R weight = exp(score - base);
        total = total * fade + block_sum(weight);
        weights[threadIdx.x] = weight;
        __syncthreads();
        for (int c = threadIdx.x; c < DV; c += blockDim.x) {
            R sum = sums[c] * fade;
            for (int k = 0; k < blockDim.x && j0 + k < high; ++k)  // unseen values may be NaN
                if (weights[k] != (R)0) sum += weights[k] * value(j0 + k, (ix)c);
            sums[c] = sum;
        }
        __syncthreads();
    }
    for (int c = threadIdx.x; c < DV; c += blockDim.x)
        out((ix)0, (ix)c, total > (R)0 ? sums[c] / total : sums[c]);
}
