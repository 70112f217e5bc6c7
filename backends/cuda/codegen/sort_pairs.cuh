// One block sorts pairs by expert, in their order, without those of expert -1, and divides those of
// each expert into tiles of up to ROWS: (expert, first pair, pairs, first tile of the expert, tiles of
// the expert). Large ones of the last expert of many are half as large, so that blocks that take one tile
// after the other end at about the same time. Tiles behind the last one have no pairs, and `order` is
// 0 behind the last pair. EXPERTS comes before.
constexpr int SORTING = EXPERTS <= 256 ? 32 : EXPERTS <= 1024 ? 8 : 1;  // warps, with a count of each expert
constexpr int THREADS = 1024;

// Sums of a warp's numbers up to that of the caller.
INLINE int warp_scan(int x) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_sync(0xffffffffu, x, lane < step ? lane : lane - step);
        x += lane < step ? 0 : other;
    }
    return x;
}

template <int ROWS, class ExpertOf>
INLINE void sort_pairs(ix pairs, ExpertOf expert_of, i32* order, i32* tiles) {
    __shared__ int places[SORTING][EXPERTS];  // counts of pairs, then where the next pair comes
    __shared__ int sorted, filled;  // pairs and tiles
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < SORTING * EXPERTS; i += THREADS) places[0][i] = 0;
    __syncthreads();
    const ix share = (pairs + 32 * SORTING - 1) / (32 * SORTING) * 32, begin = warp * share;
    const ix end = warp < SORTING ? min(begin + share, pairs) : 0;
    #pragma unroll 4
    for (ix i = begin + lane; i < end; i += 32) {
        const int expert = expert_of(i);
        if (expert >= 0) atomicAdd(&places[warp][expert], 1);
    }
    __syncthreads();
    if (warp == 0) {
        int pair = 0, tile = 0;
        for (int first = 0; first < EXPERTS; first += 32) {
            const int expert = first + lane;
            int count = 0;
            for (int w = 0; w < SORTING && expert < EXPERTS; ++w) count += places[w][expert];
            const int rows = EXPERTS > 4 && ROWS > 64 && expert == EXPERTS - 1 ? ROWS / 2 : ROWS;
            const int parts = (count + rows - 1) / rows;
            const int last = pair + warp_scan(count), last_tile = tile + warp_scan(parts);
            pair = __shfl_sync(0xffffffffu, last, 31), tile = __shfl_sync(0xffffffffu, last_tile, 31);
            int place = last - count;
            i32* entry = tiles + 5 * (last_tile - parts);
            for (int at = place; at < last; at += rows, entry += 5) {
                entry[0] = {expert};
                entry[1] = {at};
                entry[2] = {min(rows, last - at)};
                entry[3] = {last_tile - parts};
                entry[4] = {parts};
            }
            for (int w = 0; w < SORTING && expert < EXPERTS; ++w) {
                const int count = places[w][expert];
                places[w][expert] = place;
                place += count;
            }
        }
        if (lane == 0) sorted = pair, filled = tile;
    }
    __syncthreads();
    for (ix i = sorted + (int)threadIdx.x; i < pairs; i += THREADS) order[i] = {0};
    for (ix i = filled + (int)threadIdx.x; i < 2 * pairs / ROWS + EXPERTS; i += THREADS)
        tiles[5 * i + 2] = {0};
    for (ix first = begin; first < end; first += 32) {
        const ix i = first + lane;
        const int expert = i < end ? expert_of(i) : -1;
        const u32 equal = __match_any_sync(0xffffffffu, expert), before = equal & ((1u << lane) - 1);
        const int place = expert < 0 ? 0 : places[warp][expert];
        __syncwarp();
        if (expert >= 0) {
            store(order, place + __popc(before), i);
            if (!before) places[warp][expert] = place + __popc(equal);
        }
        __syncwarp();
    }
}
