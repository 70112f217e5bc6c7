// One block sorts pairs by expert, -1 for pairs that are left out, and divides those of each expert
// into tiles of up to ROWS: (expert, first pair, pairs), of which the last ones have no pairs.
template <int ROWS, int EXPERTS, class ExpertOf>
INLINE void sort_pairs(ix pairs, ExpertOf expert_of, i32* order, i32* tiles) {
    __shared__ int ends[EXPERTS];
    for (ix i = threadIdx.x; i < EXPERTS; i += blockDim.x) ends[i] = 0;
    for (ix i = threadIdx.x; i < pairs / ROWS + EXPERTS; i += blockDim.x) tiles[3 * i + 2] = {0};
    __syncthreads();
    for (ix i = threadIdx.x; i < pairs; i += blockDim.x) {
        const int expert = expert_of(i);
        if (expert >= 0) atomicAdd(ends + expert, 1);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int e = 0, begin = 0, tile = 0; e < EXPERTS; ++e) {
            const int end = begin + ends[e];
            ends[e] = begin;
            for (; begin < end; begin += ROWS, ++tile) {
                tiles[3 * tile] = {e};
                tiles[3 * tile + 1] = {begin};
                tiles[3 * tile + 2] = {min(ROWS, end - begin)};
            }
            begin = end;
        }
    __syncthreads();
    for (ix i = threadIdx.x; i < pairs; i += blockDim.x) {
        const int expert = expert_of(i);
        if (expert >= 0) store(order, atomicAdd(ends + expert, 1), i);
    }
}
