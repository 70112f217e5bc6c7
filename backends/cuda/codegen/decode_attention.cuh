// Attention of one query per sequence: rope of the new query and key, their row of the caches, and
// softmax(scale q k') v over the visible keys. A grid of (splits, key heads * PARTS, sequences); a
// block has up to 16 query heads of one key head. Its warps take 16 keys at a time, on tensor
// cores, straight from global memory: a lane holds 8 features of two keys. The splits of a head
// are joined in a cluster, where the kernel is built for one, or by the block that ends last.
// Constants come before: T, D, GROUP (query heads of a key head), ROWS (of them in a block), PARTS,
// WARPS, THREADS, EARLY, NEW (writes the caches), NORM, EPS and OFFSET (rms_norm of heads), ROPE,
// INTERLEAVED, TURNED, FACTOR, FREQUENCY, CAUSAL, WINDOW, LENGTHS, SCALE, SOFTCAP, CLUSTER, and
// AHEAD (loads values and the next keys while it computes).

struct Decode {
    const u16 *q, *k, *v;                  // the new rows of a sequence, `*_stride` elements apart
    long long q_stride, k_stride, v_stride;
    const GainType *q_gain, *k_gain;       // [D], of rms_norm of every head
    u16 *keys, *values;                    // of sequence b and head h at b * sequence + h * head
    long long sequence, head, row;         // elements between sequences, heads and keys
    int count;                             // keys of a sequence
    u16* out;                              // [sequences, query heads * D]
    const PastIndex* past;
    const PositionIndex* positions;
    const LengthIndex* lengths;
    float* partial;                        // per split: D sums of every row, then its top and total
    int* arrived;                          // per head: splits that are done; 0 before and after
};

constexpr int CHUNKS = (D + 31) / 32, PITCH = CHUNKS * 32 + 8;
constexpr int HALVES = ROWS > 8 ? 2 : 1, NEW_ROWS = ROWS + NEW;
constexpr float NONE = -1e30f, LOG2E = 1.4426950408889634f;

struct DecodeShared {
    alignas(16) u16 rows[(ROWS + 2) * PITCH];  // queries, the new key, the new value
    float cosine[TURNED / 2 + 1], sine[TURNED / 2 + 1];
    float tops[WARPS][ROWS], totals[WARPS][ROWS], sums[WARPS][ROWS * D];
    float inbox_tops[CLUSTER ? 8 * ROWS : 1], inbox_totals[CLUSTER ? 8 * ROWS : 1];
    float inbox[CLUSTER ? ROWS * D : 1];
    int last;
};

INLINE float number(u16 bits) { return (float)T{bits}; }

// Writes the new queries and the new key, each of its own length 1, times weights.
template <typename From> INLINE void stage_normalized(DecodeShared& s, const Decode& a, From from) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < NEW_ROWS; r += WARPS) {
        const GainType* gain = r == ROWS ? a.k_gain : a.q_gain;
        u16* row = s.rows + r * PITCH;
        float sum = 0.0f;
        for (int d = lane; d < PITCH; d += 32) {
            row[d] = from(r, d);
            sum += number(row[d]) * number(row[d]);
        }
        #pragma unroll
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        const float root = sqrtf(add(sum / D, EPS));
        for (int d = lane; d < D; d += 32)
            row[d] = T::of(mul(number(row[d]) / root, add((float)gain[d], OFFSET))).bits;
    }
    __syncthreads();
}

// The new queries and the new key, turned, and the new value, in shared memory.
INLINE void stage_rows(DecodeShared& s, const Decode& a, int kv, int part) {
    const long long b = blockIdx.z;
    const u16* queries = a.q + b * a.q_stride + (kv * GROUP + part * ROWS) * D;
    const u16* key = a.k + b * a.k_stride + kv * D;
    auto given = [&](int r, int d) -> u16 {
        const bool real = d < D && (r == ROWS || part * ROWS + r < GROUP);
        return !real ? 0 : r == ROWS ? key[d] : queries[r * D + d];
    };
    if (NORM) stage_normalized(s, a, given);
    for (int i = threadIdx.x; i < NEW_ROWS * (PITCH / 2); i += THREADS) {
        const int r = i / (PITCH / 2), pair = i % (PITCH / 2);
        const bool turns = pair < TURNED / 2;
        const int one = !turns || INTERLEAVED ? 2 * pair : pair;
        const int two = turns && !INTERLEAVED ? pair + TURNED / 2 : one + 1;
        u16* row = s.rows + r * PITCH;
        u16 x = NORM ? row[one] : given(r, one), y = NORM ? row[two] : given(r, two);
        if (turns) {
            const float c = s.cosine[pair], n = s.sine[pair], left = number(x), right = number(y);
            x = T::of(sub(mul(left, c), mul(right, n))).bits;
            y = T::of(add(mul(right, c), mul(left, n))).bits;
        }
        row[one] = x;
        row[two] = y;
    }
    if (NEW)
        for (int i = threadIdx.x; i < PITCH; i += THREADS)
            s.rows[(ROWS + 1) * PITCH + i] = i < D ? a.v[b * a.v_stride + kv * D + i] : 0;
}

// out[i] of the block's rows, of parts with their own tops and totals: sums of weight * part.
template <typename Top, typename Total, typename Part>
INLINE float joined(int parts, Top top_of, Total total_of, Part part_of, float& top, float& total) {
    float value = 0.0f;
    top = NONE;
    total = 0.0f;
    for (int n = 0; n < parts; ++n) top = fmaxf(top, top_of(n));
    for (int n = 0; n < parts; ++n) {
        const float weight = exp2_fast(top_of(n) - top);
        total += weight * total_of(n);
        value += weight * part_of(n);
    }
    return value;
}

INLINE void finish(const Decode& a, int kv, int part, int i, float value, float total) {
    const int r = part * ROWS + i / D;
    if (r >= GROUP) return;
    const long long heads = (long long)(gridDim.y / PARTS) * GROUP;
    const long long at = (blockIdx.z * heads + kv * GROUP + r) * D + i % D;
    a.out[at] = T::of(total == 0.0f ? 0.0f : value / total).bits;
}

// Value i of the warps of a block.
INLINE float of_warps(const DecodeShared& s, int i, float& top, float& total) {
    const int r = i / D;
    return joined(
        WARPS, [&](int w) { return s.tops[w][r]; }, [&](int w) { return s.totals[w][r]; },
        [&](int w) { return s.sums[w][i]; }, top, total);
}

// Joins the splits through shared memory: every block owns a share of the result.
INLINE void join_in_cluster(DecodeShared& s, const Decode& a, int kv, int part) {
#if defined(EMULATED_WARPS) || __CUDA_ARCH__ >= 900
    const int splits = gridDim.x, share = ROWS * D / splits, split = blockIdx.x;
    float top, total;
    cluster_wait();  // all blocks of the cluster have started
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        const float value = of_warps(s, i, top, total);
        send(&s.inbox[split * share + i % share], i / share, value);
        if (i % D < splits) {
            send(&s.inbox_tops[split * ROWS + i / D], i % D, top);
            send(&s.inbox_totals[split * ROWS + i / D], i % D, total);
        }
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    for (int i = threadIdx.x; i < share; i += THREADS) {
        const int at = split * share + i, r = at / D;
        const float value = joined(
            splits, [&](int n) { return s.inbox_tops[n * ROWS + r]; },
            [&](int n) { return s.inbox_totals[n * ROWS + r]; },
            [&](int n) { return s.inbox[n * share + i]; }, top, total);
        finish(a, kv, part, at, value, total);
    }
#endif
}

// Joins the splits through global memory, in the block that ends last.
INLINE void join_by_last(DecodeShared& s, const Decode& a, int kv, int part, int splits) {
    constexpr int SIZE = ROWS * D + 2 * ROWS;
    const long long head = (long long)blockIdx.z * gridDim.y + blockIdx.y;
    float* all = a.partial + head * gridDim.x * SIZE;
    float* mine = all + (long long)blockIdx.x * SIZE;
    float top, total;
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        mine[i] = of_warps(s, i, top, total);
        if (i % D == 0) {
            mine[ROWS * D + i / D] = top;
            mine[ROWS * D + ROWS + i / D] = total;
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) s.last = atomicAdd(a.arrived + head, 1) == splits - 1;
    __syncthreads();
    if (!s.last) return;
    __threadfence();
    if (threadIdx.x == 0) a.arrived[head] = 0;
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        const float* tops = all + ROWS * D + i / D;
        const float value = joined(
            splits, [&](int n) { return tops[n * SIZE]; },
            [&](int n) { return tops[n * SIZE + ROWS]; },
            [&](int n) { return all[n * SIZE + i]; }, top, total);
        finish(a, kv, part, i, value, total);
    }
}

INLINE void decode_attention(const Decode& a) {
    SHARED(DecodeShared, s);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x, b = blockIdx.z;
    const int kv = blockIdx.y / PARTS, part = blockIdx.y % PARTS;
#if defined(EMULATED_WARPS) || __CUDA_ARCH__ >= 900
    constexpr bool cluster = CLUSTER;
    if (cluster) cluster_arrive();
#else
    constexpr bool cluster = false;
#endif
    if (!EARLY) wait_for_previous();
    const long long before = a.past ? (long long)a.past[b] : a.count - 1;
    long long end = CAUSAL && before + 1 < a.count ? before + 1 : a.count;
    if (LENGTHS && (long long)a.lengths[b] < end) end = a.lengths[b];
    const int past = (int)before, limit = (int)(end < 0 ? 0 : end);
    const int first = WINDOW && past - WINDOW + 1 > 0 ? past - WINDOW + 1 : 0;
    const int fresh = NEW ? past : -1;
    u16* keys = a.keys + b * a.sequence + kv * a.head;
    u16* values = a.values + b * a.sequence + kv * a.head;

    uint4 k[2][CHUNKS], v[2][CHUNKS];  // keys g and g + 8 of a tile, features 32 c + 8 t to + 7
    auto old = [&](int key) { return key >= first && key < limit && key != fresh; };
    auto load = [&](uint4(&x)[2][CHUNKS], const u16* from, int tile) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = tile * 16 + 8 * r + g;
            const bool there = old(key);  // the last chunk may be cut
            const u16* at = from + key * a.row + 8 * t;
            #pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                x[r][c] = there && (D % 32 == 0 || 32 * c + 8 * t < D) ? *(const uint4*)(at + 32 * c) : uint4{0, 0, 0, 0};
        }
    };
    auto fetch = [&](const u16* from, int tile) {  // into the cache of the GPU
        #pragma unroll
        for (int r = 0; r < 2; ++r)
            #pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                if (old(tile * 16 + 8 * r + g) && 32 * c + 8 * t < D)
                    prefetch(from + (tile * 16 + 8 * r + g) * a.row + 32 * c + 8 * t);
    };
    auto fill = [&](uint4(&x)[2][CHUNKS], int tile, int row) {  // the new row, where it is in the tile
        #pragma unroll
        for (int r = 0; r < 2; ++r)
            if (NEW && fresh >= first && fresh < limit && tile * 16 + 8 * r + g == fresh)
                #pragma unroll
                for (int c = 0; c < CHUNKS; ++c)
                    x[r][c] = *(const uint4*)(s.rows + row * PITCH + 32 * c + 8 * t);
        if (NEW) __syncwarp();
    };

    // Without a cluster, no more splits than there are tiles for their warps.
    const int tiles = (limit + 15) / 16, all = (tiles - first / 16 + WARPS - 1) / WARPS;
    const int splits = cluster || all >= (int)gridDim.x ? gridDim.x : all > 1 ? all : 1;
    const int begin = split < splits ? first / 16 + warp * splits + split : tiles;
    if (begin < tiles) {
        load(k, keys, begin);
        if (AHEAD) load(v, values, begin);
        else fetch(values, begin);
    }
    if (ROPE)
        for (int i = threadIdx.x; i < TURNED / 2; i += THREADS) {
            const float angle = (float)a.positions[b] * FREQUENCY[i];
            float sine, cosine;
            sincosf(angle, &sine, &cosine);
            s.cosine[i] = cosine * FACTOR;
            s.sine[i] = sine * FACTOR;
        }
    allow_next();
    if (EARLY) wait_for_previous();
    if (split >= splits) return;
    __syncthreads();
    stage_rows(s, a, kv, part);
    __syncthreads();
    if (NEW && part == 0 && split == 0 && past >= 0 && past < a.count)
        for (int i = threadIdx.x; i < D / 4; i += THREADS) {
            u16* to = (i < D / 8 ? keys : values) + past * a.row + i % (D / 8) * 8;
            *(uint4*)to = *(const uint4*)(s.rows + (ROWS + i / (D / 8)) * PITCH + i % (D / 8) * 8);
        }

    // The sums are transposed: rows are features, columns are query heads.
    float top[HALVES], total[HALVES], out[HALVES][2 * CHUNKS][4] = {};  // of query heads g and g + 8
    #pragma unroll
    for (int h = 0; h < HALVES; ++h) { top[h] = NONE; total[h] = 0.0f; }

    for (int tile = begin; tile < tiles; tile += WARPS * splits) {
        const int next = tile + WARPS * splits;
        if (AHEAD && tile != begin) load(v, values, tile);
        fill(k, tile, ROWS);
        float score[2][4] = {};
        #pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const u16* at = s.rows + g * PITCH + 32 * c + 8 * t;
            const uint4 q = g < ROWS ? *(const uint4*)at : uint4{0, 0, 0, 0};
            const uint4 w = HALVES == 2 && g + 8 < ROWS ? *(const uint4*)(at + 8 * PITCH) : uint4{0, 0, 0, 0};
            #pragma unroll
            for (int n = 0; n < 2; ++n) {
                mma<T>(score[n], q.x, w.x, q.y, w.y, k[n][c].x, k[n][c].y);
                mma<T>(score[n], q.z, w.z, q.w, w.w, k[n][c].z, k[n][c].w);
            }
        }
        if (!AHEAD && next < tiles) fetch(keys, next);
        if (!AHEAD) {
            settle(score[0]);
            settle(score[1]);
            load(v, values, tile);
        }
        fill(v, tile, ROWS + 1);
        if (AHEAD && next < tiles) load(k, keys, next);
        u32 weights[HALVES][2];
        float shrink[HALVES][2];  // of query heads 2 t and 2 t + 1, and 8 above
        #pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            float p[4], best = top[h];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = tile * 16 + 8 * (i / 2) + 2 * t + i % 2;
                float x = score[i / 2][2 * h + i % 2] * (SOFTCAP > 0 ? SCALE / SOFTCAP : SCALE * LOG2E);
                if (SOFTCAP > 0) x = tanhf(x) * (SOFTCAP * LOG2E);
                p[i] = key >= first && key < limit ? x : NONE;
                best = fmaxf(best, p[i]);
            }
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            const float less = exp2_fast(top[h] - best);
            shrink[h][0] = __shfl_sync(~0u, less, 8 * t);
            shrink[h][1] = __shfl_sync(~0u, less, 8 * t + 4);
            top[h] = best;
            total[h] *= less;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[i] = exp2_fast(p[i] - best);
                total[h] += p[i];
            }
            weights[h][0] = pack<T>(p[0], p[1]);
            weights[h][1] = pack<T>(p[2], p[3]);
        }
        #pragma unroll
        for (int i = 0; i < 2 * CHUNKS; ++i) {
            const uint4 &one = v[0][i / 2], &two = v[1][i / 2];
            const int j = i % 2 * 2;
            const u32 a0 = transposed(word(one, j)), a1 = transposed(word(one, j + 1));
            const u32 a2 = transposed(word(two, j)), a3 = transposed(word(two, j + 1));
            #pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                #pragma unroll
                for (int e = 0; e < 4; ++e) out[h][i][e] *= shrink[h][e % 2];
                mma<T>(out[h][i], a0, a1, a2, a3, weights[h][0], weights[h][1]);
            }
        }
        if (!AHEAD && next < tiles) {
            fetch(values, next);
            load(k, keys, next);
        }
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
        for (int i = 0; i < 2 * CHUNKS; ++i)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = 8 * h + 2 * t + e % 2;
                const int d = 32 * (i / 2) + 8 * (g / 2) + 4 * (i % 2) + 2 * (e / 2) + g % 2;
                if (r < ROWS && (D % 32 == 0 || d < D)) s.sums[warp][r * D + d] = out[h][i][e];
            }
    }
    __syncthreads();
    if (splits > 1) {
        if (cluster) join_in_cluster(s, a, kv, part);
        else join_by_last(s, a, kv, part, splits);
        return;
    }
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        float best, all;
        const float value = of_warps(s, i, best, all);
        finish(a, kv, part, i, value, all);
    }
}
