// Attention of one query per sequence: rope of the new query and key, their row of the caches, and
// softmax(scale q k') v over the visible keys. A grid of (splits, key heads * PARTS, sequences); a
// block has up to 16 query heads of one key head. Its warps take 16 keys at a time, on tensor
// cores, straight from global memory, 8 features a lane. The splits of a head are joined in a
// cluster, where the kernel is built for one, or by the block that ends last.
// Constants come before: T, D, GROUP (query heads of a key head), ROWS (of them in a block), PARTS,
// WARPS, THREADS, EARLY, NEW (writes the caches), NORM (rms_norm of heads), ROPE,
// INTERLEAVED, ROTARY_DIM, FACTOR, FREQUENCY, CAUSAL, WINDOW, LENGTHS, SINKS, SCALE, SOFTCAP, SPLIT
// (several blocks per head), CLUSTER (blocks in one, or 1), AHEAD (loads values and the next keys
// while it computes).

struct Decode {
    const u16 *q, *k, *v;                  // the new rows of a sequence, `*_stride` elements apart
    long long q_stride, k_stride, v_stride;
    const NormType *q_norm, *k_norm;       // [D], the weights of rms_norm of every head
    u16 *keys, *values;                    // of sequence b and head h at b * sequence + h * head
    long long sequence, head, row;         // elements between sequences, heads and keys
    int count;                             // keys of a sequence
    u16* out;                              // [sequences, query heads * D]
    const PastIndex* past;
    const PositionIndex* positions;
    const LengthIndex* lengths;
    const SinkType* sinks;                 // [query heads]: scores of keys of value 0
    Quad* partial;                         // per split: QUADS sums, then the top and total of a row
    int* arrived;                          // per head: splits that are done; 0 before and after
};

constexpr int CHUNKS = (D + 31) / 32, PITCH = CHUNKS * 32 + 8;
constexpr int HALVES = ROWS > 8 ? 2 : 1, NEW_ROWS = ROWS + NEW;
constexpr int BLOCKS = (D + 63) / 64;  // of features of a value
constexpr int ROW_QUADS = 16 * BLOCKS, QUADS = ROWS * ROW_QUADS;
constexpr float NONE = -1e30f, LOG2E = 1.4426950408889634f;

struct DecodeShared {
    alignas(16) u16 rows[(ROWS + 2) * PITCH];  // queries, the new key, the new value
    Quad sums[WARPS][QUADS], inbox[CLUSTER > 1 ? QUADS : 1];
    float cosine[ROTARY_DIM / 2 + 1], sine[ROTARY_DIM / 2 + 1], tops[WARPS][ROWS], totals[WARPS][ROWS];
    Pack<float, 2> inbox_tops[CLUSTER * ROWS];  // and totals
    Inbox arrived;
    int last;
};

INLINE u32 lows(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
INLINE u32 highs(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }

// The new queries and the new key, each of its own length 1, times weights.
INLINE void norm_rows(DecodeShared& s, const Decode& a) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < NEW_ROWS; r += WARPS) {
        const NormType* weights = r == ROWS ? a.k_norm : a.q_norm;
        u16* row = s.rows + r * PITCH;
        float sum = 0.0f;
        for (int d = lane; d < D; d += 32) sum += number(row[d]) * number(row[d]);
        const float root = root_of(sum_of_warp(sum));
        for (int d = lane; d < D; d += 32) row[d] = normed(number(row[d]), root, weights[d]).bits;
    }
    __syncthreads();
}

// The new queries and the new key, rotated, and the new value, in shared memory; zeros behind D.
INLINE void stage_rows(DecodeShared& s, const Decode& a, int kv, int part) {
    constexpr int VECTORS = 4 * CHUNKS, COUNT = (NEW_ROWS + NEW) * VECTORS;
    constexpr int EACH = (COUNT + THREADS - 1) / THREADS;
    const long long b = blockIdx.z;
    uint4 mine[EACH];  // all of them are under way at once
    #pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const int i = threadIdx.x + n * THREADS, r = i / VECTORS, d = i % VECTORS * 8;
        const u16* from = r < ROWS ? a.q + b * a.q_stride + (kv * GROUP + part * ROWS + r) * D
            : r == ROWS ? a.k + b * a.k_stride + kv * D : a.v + b * a.v_stride + kv * D;
        const bool real = i < COUNT && d < D && (r >= ROWS || part * ROWS + r < GROUP);
        mine[n] = real ? *(const uint4*)(from + d) : uint4{0, 0, 0, 0};
    }
    #pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const int i = threadIdx.x + n * THREADS;
        if (i < COUNT) *(uint4*)(s.rows + i / VECTORS * PITCH + i % VECTORS * 8) = mine[n];
    }
    __syncthreads();
    if (NORM) norm_rows(s, a);
    if (!ROPE) return;
    for (int i = threadIdx.x; i < NEW_ROWS * (ROTARY_DIM / 2); i += THREADS) {
        const int pair = i % (ROTARY_DIM / 2), one = INTERLEAVED ? 2 * pair : pair;
        u16 *x = s.rows + i / (ROTARY_DIM / 2) * PITCH + one, *y = x + (INTERLEAVED ? 1 : ROTARY_DIM / 2);
        const float c = s.cosine[pair], z = s.sine[pair];
        const float left = number(*x), right = number(*y);
        *x = T::of(rotated_first(left, right, c, z)).bits;
        *y = T::of(rotated_second(left, right, c, z)).bits;
    }
    __syncthreads();
}

// A quad of parts with their own tops and totals: sums of weight * part.
template <typename Top, typename Total, typename Part>
INLINE Quad joined(int parts, Top top_of, Total total_of, Part part_of, float& top, float& total) {
    Quad sum = {};
    top = NONE;
    total = 0.0f;
    #pragma unroll 8
    for (int n = 0; n < parts; ++n) top = fmaxf(top, top_of(n));
    #pragma unroll 8
    for (int n = 0; n < parts; ++n) {
        const float weight = exp2_fast(top_of(n) - top);
        const Quad part = part_of(n);
        total += weight * total_of(n);
        #pragma unroll
        for (int k = 0; k < 4; ++k) sum.item[k] += weight * part.item[k];
    }
    return sum;
}

INLINE void finish(const Decode& a, int kv, int part, int i, const Quad& value, float top, float total) {
    const int r = part * ROWS + i / ROW_QUADS, d = i % ROW_QUADS * 4;
    if (r >= GROUP || d >= D) return;
    const long long heads = (long long)(gridDim.y / PARTS) * GROUP;
    if (SINKS) total += exp2_fast((float)a.sinks[kv * GROUP + r] * LOG2E - top);
    const float weight = total == 0.0f ? 0.0f : 1.0f / total;
    Pack<u16, 4> done;
    #pragma unroll
    for (int k = 0; k < 4; ++k) done.item[k] = T::of(value.item[k] * weight).bits;
    *(Pack<u16, 4>*)(a.out + (blockIdx.z * heads + kv * GROUP + r) * D + d) = done;
}

// Quad i of the warps of a block.
INLINE Quad of_warps(const DecodeShared& s, int i, float& top, float& total) {
    const int r = i / ROW_QUADS;
    return joined(
        WARPS, [&](int w) { return s.tops[w][r]; }, [&](int w) { return s.totals[w][r]; },
        [&](int w) { return s.sums[w][i]; }, top, total);
}

// Joins the splits through shared memory: every block owns a share of the result.
INLINE void join_in_cluster(DecodeShared& s, const Decode& a, int kv, int part) {
    constexpr int SHARE = QUADS / CLUSTER;
    const int split = blockIdx.x;
    float top, total;
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        const Quad value = of_warps(s, i, top, total);
        send(&s.inbox[split * SHARE + i % SHARE], &s.arrived, i / SHARE, value);
        if (i % ROW_QUADS < CLUSTER) {
            const Pack<float, 2> both = {top, total};
            send(&s.inbox_tops[split * ROWS + i / ROW_QUADS], &s.arrived, i % ROW_QUADS, both);
        }
    }
    await(&s.arrived);
    for (int i = threadIdx.x; i < SHARE; i += THREADS) {
        const int at = split * SHARE + i, r = at / ROW_QUADS;
        const Quad value = joined(
            CLUSTER, [&](int n) { return s.inbox_tops[n * ROWS + r].item[0]; },
            [&](int n) { return s.inbox_tops[n * ROWS + r].item[1]; },
            [&](int n) { return s.inbox[n * SHARE + i]; }, top, total);
        finish(a, kv, part, at, value, top, total);
    }
}

// Joins the splits through global memory, in the block that ends last.
INLINE void join_by_last(DecodeShared& s, const Decode& a, int kv, int part, int splits) {
    constexpr int SIZE = QUADS + ROWS;
    const long long head = (long long)blockIdx.z * gridDim.y + blockIdx.y;
    Quad* all = a.partial + head * gridDim.x * SIZE;
    Quad* mine = all + (long long)blockIdx.x * SIZE;
    float top, total;
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        mine[i] = of_warps(s, i, top, total);
        if (i % ROW_QUADS == 0) mine[QUADS + i / ROW_QUADS] = {top, total, 0.0f, 0.0f};
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) s.last = atomicAdd(a.arrived + head, 1) == splits - 1;
    __syncthreads();
    if (!s.last) return;
    __threadfence();
    if (threadIdx.x == 0) a.arrived[head] = 0;
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        const Quad* tops = all + QUADS + i / ROW_QUADS;
        const Quad value = joined(
            splits, [&](int n) { return tops[n * SIZE].item[0]; },
            [&](int n) { return tops[n * SIZE].item[1]; },
            [&](int n) { return all[n * SIZE + i]; }, top, total);
        finish(a, kv, part, i, value, top, total);
    }
}

INLINE void decode_attention(const Decode& a) {
    SHARED(DecodeShared, s);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x, b = blockIdx.z;
    const int kv = blockIdx.y / PARTS, part = blockIdx.y % PARTS;
    constexpr bool cluster = CLUSTERS && CLUSTER > 1;
    if (cluster) {
        if (threadIdx.x == 0) expect(&s.arrived, sizeof s.inbox + sizeof s.inbox_tops);
        cluster_arrive();
    }
    if (!EARLY) wait_for_previous();
    const long long before = a.past ? (long long)a.past[b] : a.count - 1;
    long long end = CAUSAL && before + 1 < a.count ? before + 1 : a.count;
    if (LENGTHS && (long long)a.lengths[b] < end) end = a.lengths[b];
    const int past = (int)before, limit = (int)(end < 0 ? 0 : end);
    const int first = WINDOW && past - WINDOW + 1 > 0 ? past - WINDOW + 1 : 0;
    const int fresh = NEW ? past : -1;
    u16* keys = a.keys + b * a.sequence + kv * a.head;
    u16* values = a.values + b * a.sequence + kv * a.head;

    // Of keys g and g + 8 of a tile, features 32 c + 8 t to + 7; of the values of keys 2 t, 2 t + 1,
    // 2 t + 8 and 2 t + 9, features 64 c + 8 g to + 7.
    uint4 k[2][CHUNKS], v[4][BLOCKS];
    auto key_of = [&](int tile, int i) { return tile * 16 + 8 * i + g; };
    auto value_of = [&](int tile, int i) { return tile * 16 + 8 * (i / 2) + 2 * t + i % 2; };
    auto old = [&](int key) { return key >= first && key < limit && key != fresh; };
    auto load = [&](const u16* from, int key, int d) {  // the last features may be missing
        return old(key) && d < D ? *(const uint4*)(from + key * a.row + d) : uint4{0, 0, 0, 0};
    };
    auto load_keys = [&](int tile) {
        #pragma unroll
        for (int i = 0; i < 2 * CHUNKS; ++i)
            k[i / CHUNKS][i % CHUNKS] =
                load(keys, key_of(tile, i / CHUNKS), 32 * (i % CHUNKS) + 8 * t);
    };
    auto load_values = [&](int tile) {
        #pragma unroll
        for (int i = 0; i < 4 * BLOCKS; ++i)
            v[i / BLOCKS][i % BLOCKS] =
                load(values, value_of(tile, i / BLOCKS), 64 * (i % BLOCKS) + 8 * g);
    };
    auto fetch = [&](int tile) {  // into the cache of the GPU
        constexpr int LINES = (2 * D + 127) / 128;
        for (int i = lane; i < 16 * LINES; i += 32) {
            const int key = tile * 16 + i / LINES;
            if (!old(key)) continue;
            prefetch(keys + key * a.row + i % LINES * 64);
            prefetch(values + key * a.row + i % LINES * 64);
        }
    };
    const bool shown = NEW && fresh >= first && fresh < limit;
    auto has_new = [&](int tile) { return shown && tile == fresh / 16; };

    // Without a cluster, no more splits than there are tiles for their warps.
    const int tiles = (limit + 15) / 16, all = (tiles - first / 16 + WARPS - 1) / WARPS;
    const int most = SPLIT ? gridDim.x : 1;
    const int splits = cluster || all >= most ? most : all > 1 ? all : 1;
    const int begin = split < splits ? first / 16 + warp * splits + split : tiles;
    const int stride = WARPS * splits;
    if (begin < tiles) {
        load_keys(begin);
        if (AHEAD) load_values(begin);
        else fetch(begin);
    }
    if (ROPE)
        for (int i = threadIdx.x; i < ROTARY_DIM / 2; i += THREADS) {
            const float angle = (float)a.positions[b] * FREQUENCY[i];
            float sine, cosine;
            sincosf(angle, &sine, &cosine);
            s.cosine[i] = cosine * FACTOR;
            s.sine[i] = sine * FACTOR;
        }
    allow_next();
    if (cluster) cluster_wait();  // all of its blocks expect what the others send
    if (EARLY) wait_for_previous();
    if (split >= splits) return;
    stage_rows(s, a, kv, part);
    if (NEW && part == 0 && split == 0 && past >= 0 && past < a.count)
        for (int i = threadIdx.x; i < D / 4; i += THREADS) {
            u16* to = (i < D / 8 ? keys : values) + past * a.row + i % (D / 8) * 8;
            *(uint4*)to = *(const uint4*)(s.rows + (ROWS + i / (D / 8)) * PITCH + i % (D / 8) * 8);
        }

    // The sums are transposed: rows are features, columns are query heads.
    float top[HALVES], total[HALVES], out[HALVES][4 * BLOCKS][4] = {};  // of query heads g and g + 8
    #pragma unroll
    for (int h = 0; h < HALVES; ++h) { top[h] = NONE; total[h] = 0.0f; }

    for (int tile = begin; tile < tiles; tile += stride) {
        const int next = tile + stride;
        if (AHEAD && tile != begin) load_values(tile);
        if (!AHEAD) fetch(next);
        if (has_new(tile)) {
            #pragma unroll
            for (int i = 0; i < 2 * CHUNKS; ++i)
                if (key_of(tile, i / CHUNKS) == fresh)
                    k[i / CHUNKS][i % CHUNKS] =
                        *(const uint4*)(s.rows + ROWS * PITCH + 32 * (i % CHUNKS) + 8 * t);
            __syncwarp();
        }
        float score[2][4] = {};
        #pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const u16* at = s.rows + g * PITCH + 32 * c + 8 * t;
            const uint4 q = g < ROWS ? *(const uint4*)at : uint4{0, 0, 0, 0};
            const uint4 w = g + 8 < ROWS ? *(const uint4*)(at + 8 * PITCH) : uint4{0, 0, 0, 0};
            #pragma unroll
            for (int n = 0; n < 2; ++n) {
                mma<T>(score[n], q.x, w.x, q.y, w.y, k[n][c].x, k[n][c].y);
                mma<T>(score[n], q.z, w.z, q.w, w.w, k[n][c].z, k[n][c].w);
            }
        }
        if (!AHEAD) {
            settle(score[0]);
            settle(score[1]);
            load_values(tile);
        }
        if (has_new(tile)) {
            #pragma unroll
            for (int i = 0; i < 4 * BLOCKS; ++i)
                if (value_of(tile, i / BLOCKS) == fresh && 64 * (i % BLOCKS) + 8 * g < D)
                    v[i / BLOCKS][i % BLOCKS] =
                        *(const uint4*)(s.rows + (ROWS + 1) * PITCH + 64 * (i % BLOCKS) + 8 * g);
            __syncwarp();
        }
        if (AHEAD && next < tiles) load_keys(next);
        u32 weights[HALVES][2];
        float rescale[HALVES][2];  // of query heads 2 t and 2 t + 1, and 8 above
        #pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            float p[4], best = top[h];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = tile * 16 + 8 * (i / 2) + 2 * t + i % 2;
                const float scale = SOFTCAP > 0 ? SCALE / SOFTCAP : SCALE * LOG2E;
                float x = score[i / 2][2 * h + i % 2] * scale;
                if (SOFTCAP > 0) x = tanhf(x) * (SOFTCAP * LOG2E);
                p[i] = key >= first && key < limit ? x : NONE;
                best = fmaxf(best, p[i]);
            }
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            const float factor = exp2_fast(top[h] - best);
            rescale[h][0] = __shfl_sync(~0u, factor, 8 * t);
            rescale[h][1] = __shfl_sync(~0u, factor, 8 * t + 4);
            top[h] = best;
            total[h] *= factor;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[i] = exp2_fast(p[i] - best);
                total[h] += p[i];
            }
            weights[h][0] = pack<T>(p[0], p[1]);
            weights[h][1] = pack<T>(p[2], p[3]);
        }
        #pragma unroll
        for (int i = 0; i < 4 * BLOCKS; ++i) {  // rows g and g + 8 are features 2 i and 2 i + 1
            auto pair = [&](int n) { return word(v[n][i / 4], i % 4); };
            const u32 a0 = lows(pair(0), pair(1)), a1 = highs(pair(0), pair(1));
            const u32 a2 = lows(pair(2), pair(3)), a3 = highs(pair(2), pair(3));
            #pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                #pragma unroll
                for (int e = 0; e < 4; ++e) out[h][i][e] *= rescale[h][e % 2];
                mma<T>(out[h][i], a0, a1, a2, a3, weights[h][0], weights[h][1]);
            }
        }
        if (!AHEAD && next < tiles) load_keys(next);
    }

    #pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
        if (t == 0 && g + 8 * h < ROWS) {
            s.tops[warp][g + 8 * h] = top[h];
            s.totals[warp][g + 8 * h] = total[h];
        }
        #pragma unroll
        for (int n = 0; n < 4 * BLOCKS; ++n) {
            const int r = 8 * h + 2 * t + n % 2, half = n / 2 % 2 ^ g / 4;  // all banks at once
            auto item = [&](int i) {
                const int at = n / 4 * 4 + i / 2, e = i % 2 * 2 + n % 2;
                return half ? out[h][at + 2][e] : out[h][at][e];
            };
            if (r < ROWS)
                s.sums[warp][r * ROW_QUADS + n / 4 * 16 + 2 * g + half] =
                    {item(0), item(1), item(2), item(3)};
        }
    }
    __syncthreads();
    if (SPLIT && splits > 1) {
        if (cluster) join_in_cluster(s, a, kv, part);
        else join_by_last(s, a, kv, part, splits);
        return;
    }
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        float best, all;
        const Quad value = of_warps(s, i, best, all);
        finish(a, kv, part, i, value, best, all);
    }
}
