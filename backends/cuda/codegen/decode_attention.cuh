// Attention of one to eight queries per sequence: rope of the new queries and keys, their rows of the
// caches, and softmax(scale q k') v over the visible keys. A row is a query of a query head; a block
// has up to 16 rows of one key head. Its warps take 16 keys at a time, on tensor cores, straight from
// global memory, 8 features a lane. A grid of (splits of the keys, key heads * PARTS, sequences); the
// splits of a head are joined in a cluster, where the kernel is built for one, or by the block that
// ends last, in order.
// Constants come before: T, D, GROUP (query heads of a key head), HEADS (key heads * PARTS), TOKENS
// (queries per sequence, at most), ROWS (in a block), PARTS (of the rows of a key head), WARPS,
// THREADS, EARLY, NEW (writes the caches), NORM (rms_norm of heads), ROPE, INTERLEAVED, ROTARY_DIM,
// FACTOR, FREQUENCY, PAGE (keys of a page of a pool; 0: caches), CAUSAL, WINDOW, LENGTHS, SINKS,
// SCALE, SOFTCAP, SPLITS (of a head, at most), CLUSTER (blocks in one, or 1), AHEAD (loads values and the next keys while it computes).

struct Decode {
    const u16 *q, *k, *v;                  // the new rows of tokens, `*_stride` elements apart
    long long q_stride, k_stride, v_stride;
    const NormType *q_norm, *k_norm;       // [D], the weights of rms_norm of every head
    u16 *keys, *values;                    // see row_of
    long long sequence, head, row;         // elements between sequences (or pages), heads and keys
    int sequences, tokens, count;          // queries and keys of a sequence
    u16* out;                              // [sequences, tokens, query heads * D]
    const PageIndex* pages;                // [sequences, count / PAGE]: pages of `PAGE` keys
    const PastIndex* past;
    const PositionIndex* positions;        // [sequences, tokens]
    const LengthIndex* lengths;
    const SinkType* sinks;                 // [query heads]: scores of keys of value 0
    Quad* partial;                         // per split: QUADS sums, then the top and total of a row
    int* arrived;                          // per head: splits that are done; 0 before and after
};

constexpr int CHUNKS = (D + 31) / 32, PITCH = CHUNKS * 32 + 8;
constexpr int HALVES = ROWS > 8 ? 2 : 1, NEW_ROWS = NEW ? TOKENS : 0;
constexpr int BLOCKS = (D + 63) / 64;  // of features of a value
constexpr int ROW_QUADS = 16 * BLOCKS, QUADS = ROWS * ROW_QUADS;
constexpr float NONE = -1e30f, LOG2E = 1.4426950408889634f;

// Warps that have room for sums of their own; the others add to these.
INLINE constexpr int buffers_of(int warps) {
    return warps > 1 && warps * QUADS > 1536 ? buffers_of(warps / 2) : warps;
}
constexpr int BUFFERS = buffers_of(WARPS);
constexpr bool OWN_BUFFERS = BUFFERS == WARPS;
static_assert(WARPS % BUFFERS == 0, "buffers take turns");

// Tiles `begin` to `end` - 1, of 16 keys, of sequence `b`, for the rows of `head`: one of its splits.
// The keys are `first` to `limit` - 1; the first query is at position `past`.
struct Item { int b, head, split, splits, past, first, limit, begin, end; };

struct DecodeShared {
    alignas(16) u16 rows[(ROWS + 2 * NEW_ROWS) * PITCH];  // queries, new keys, new values
    Quad sums[BUFFERS][QUADS], inbox[CLUSTER > 1 ? QUADS : 1];
    float cosine[TOKENS * (ROTARY_DIM / 2) + 1], sine[TOKENS * (ROTARY_DIM / 2) + 1];
    float tops[WARPS][ROWS], totals[WARPS][ROWS];
    Pack<float, 2> inbox_ends[CLUSTER > 1 ? CLUSTER * ROWS : 1];  // top and total
    Inbox arrived;
    int last;
};

INLINE u32 lows(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
INLINE u32 highs(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
INLINE int tokens_of(const Decode& a) { return TOKENS == 1 ? 1 : a.tokens; }

// Where a key of sequence `b` lies: the key of a sequence of the caches, or of a page; a negative
// page is none. All keys of a tile have one page.
struct Place { long long first; int key; };
INLINE Place place_of(const Decode& a, int b, int key) {
    if (!PAGE) return {b, key};
    const int tile = PAGE % 16 ? key : key & ~15;
    return {a.pages[(long long)b * (a.count / max(PAGE, 1)) + tile / max(PAGE, 1)], key % max(PAGE, 1)};
}
// The elements in front of the row of a key in the caches of key head `kv`; `key` is one of the
// caches. Padding, which may have no page, reads another one.
INLINE long long row_of(const Decode& a, int b, int kv, int key) {
    const Place place = place_of(a, b, key);
    return (PAGE && place.first < 0 ? 0 : place.first) * a.sequence + kv * a.head + place.key * a.row;
}

// The item of the block. Without a cluster, a head has no more splits than tiles for their warps, and
// the others have none.
INLINE Item item_of_block(const Decode& a) {
    const int far = 1 << 30, tokens = tokens_of(a), b = blockIdx.z;
    long long past = a.past ? (long long)a.past[b] : a.count - tokens;
    past = past < -far ? -far : past > far ? far : past;
    long long limit = CAUSAL && past + tokens < a.count ? past + tokens : a.count;
    if (LENGTHS && (long long)a.lengths[b] < limit) limit = a.lengths[b];
    if (limit < 0) limit = 0;
    const int first = WINDOW && past - WINDOW + 1 > 0 ? (int)past - WINDOW + 1 : 0;
    const int from = first / 16, until = ((int)limit + 15) / 16, tiles = until > from ? until - from : 0;
    const int all = (tiles + WARPS - 1) / WARPS, split = blockIdx.x;
    const int splits = CLUSTER > 1 || all >= SPLITS ? SPLITS : all > 1 ? all : 1;
    const int begin = from + tiles * split / splits, end = from + tiles * (split + 1) / splits;
    return {b, (int)blockIdx.y, split, splits, (int)past, first, (int)limit, begin, end};
}

// Cosines and sines of the positions of the new tokens of a sequence.
INLINE void set_angles(DecodeShared& s, const Decode& a, int b) {
    const int tokens = tokens_of(a);
    for (int i = threadIdx.x; i < tokens * (ROTARY_DIM / 2); i += THREADS) {
        const int token = i / max(ROTARY_DIM / 2, 1);
        const float at = (float)a.positions[(long long)b * tokens + token];
        float sine, cosine;
        sincosf(at * FREQUENCY[i % max(ROTARY_DIM / 2, 1)], &sine, &cosine);
        s.cosine[i] = cosine * FACTOR;
        s.sine[i] = sine * FACTOR;
    }
}

// The first `count` rows, queries and new keys, each of its own length 1, times weights.
INLINE void norm_rows(DecodeShared& s, const Decode& a, int count) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < count; r += WARPS) {
        const NormType* weights = r >= ROWS ? a.k_norm : a.q_norm;
        u16* row = s.rows + r * PITCH;
        float sum = 0.0f;
        for (int d = lane; d < D; d += 32) sum += number(row[d]) * number(row[d]);
        const float root = root_of(sum_of_warp(sum));
        for (int d = lane; d < D; d += 32) row[d] = normed(number(row[d]), root, weights[d]).bits;
    }
    __syncthreads();
}

// The queries, with `fresh` the new keys, rotated, and the new values, in shared memory; zeros behind
// D and the last token.
INLINE void stage_rows(DecodeShared& s, const Decode& a, const Item& item, bool fresh) {
    constexpr int VECTORS = 4 * CHUNKS, COUNT = (ROWS + 2 * NEW_ROWS) * VECTORS;
    constexpr int EACH = (COUNT + THREADS - 1) / THREADS;
    const int kv = item.head / PARTS, part = item.head % PARTS, tokens = tokens_of(a);
    const long long token = (long long)item.b * tokens;
    uint4 mine[EACH];  // all of them are under way at once
    #pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const int i = threadIdx.x + n * THREADS, r = i / VECTORS, d = i % VECTORS * 8;
        const int pair = part * ROWS + r, other = r - ROWS, key = other % max(NEW_ROWS, 1);
        const u16* from = r < ROWS
            ? a.q + (token + pair / GROUP) * a.q_stride + (kv * GROUP + pair % GROUP) * D
            : other < NEW_ROWS ? a.k + (token + key) * a.k_stride + kv * D
                               : a.v + (token + key) * a.v_stride + kv * D;
        const bool real = i < COUNT && d < D && (r < ROWS ? pair < GROUP * tokens : fresh && key < tokens);
        mine[n] = real ? *(const uint4*)(from + d) : uint4{0, 0, 0, 0};
    }
    #pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const int i = threadIdx.x + n * THREADS;
        if (i < COUNT) *(uint4*)(s.rows + i / VECTORS * PITCH + i % VECTORS * 8) = mine[n];
    }
    __syncthreads();
    const int turned = ROWS + (fresh ? NEW_ROWS : 0);
    if (NORM) norm_rows(s, a, turned);
    if (!ROPE) return;
    for (int i = threadIdx.x; i < turned * (ROTARY_DIM / 2); i += THREADS) {
        const int pair = i % (ROTARY_DIM / 2), r = i / (ROTARY_DIM / 2);
        const int one = INTERLEAVED ? 2 * pair : pair;
        const int own = TOKENS == 1 ? 0 : r < ROWS ? (part * ROWS + r) / GROUP : r - ROWS;
        if (own >= tokens) continue;
        u16 *x = s.rows + r * PITCH + one, *y = x + (INTERLEAVED ? 1 : ROTARY_DIM / 2);
        const float c = s.cosine[own * (ROTARY_DIM / 2) + pair], z = s.sine[own * (ROTARY_DIM / 2) + pair];
        const float left = number(*x), right = number(*y);
        *x = T::of(rotated_first(left, right, c, z)).bits;
        *y = T::of(rotated_second(left, right, c, z)).bits;
    }
    __syncthreads();
}

// The staged new keys and values into the caches, but for positions beyond the capacity.
INLINE void write_rows(const DecodeShared& s, const Decode& a, const Item& item) {
    constexpr int VECTORS = D / 8;
    for (int i = threadIdx.x; i < 2 * VECTORS * tokens_of(a); i += THREADS) {
        const int d = i % VECTORS * 8, which = i / VECTORS % 2, token = i / VECTORS / 2;
        const int key = item.past + token;
        if (key < 0 || key >= a.count || place_of(a, item.b, key).first < 0) continue;
        u16* to = (which ? a.values : a.keys) + row_of(a, item.b, item.head / PARTS, key) + d;
        *(uint4*)to = *(const uint4*)(s.rows + (ROWS + which * NEW_ROWS + token) * PITCH + d);
    }
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

INLINE void finish(const Decode& a, const Item& item, int i, const Quad& value, float top, float total) {
    const int r = item.head % PARTS * ROWS + i / ROW_QUADS, d = i % ROW_QUADS * 4, tokens = tokens_of(a);
    if (r >= GROUP * tokens || d >= D) return;
    const int head = item.head / PARTS * GROUP + r % GROUP;
    const long long token = (long long)item.b * tokens + r / GROUP;
    if (SINKS) total += exp2_fast((float)a.sinks[head] * LOG2E - top);
    const float weight = total == 0.0f ? 0.0f : 1.0f / total;
    Pack<u16, 4> done;
    #pragma unroll
    for (int k = 0; k < 4; ++k) done.item[k] = T::of(value.item[k] * weight).bits;
    *(Pack<u16, 4>*)(a.out + (token * (HEADS / PARTS * GROUP) + head) * D + d) = done;
}

// Quad i of the sums of a block, with the top and the total of its row.
INLINE Quad sum_of_block(const DecodeShared& s, int i, float& top, float& total) {
    const int r = i / ROW_QUADS;
    if (OWN_BUFFERS)
        return joined(
            WARPS, [&](int w) { return s.tops[w][r]; }, [&](int w) { return s.totals[w][r]; },
            [&](int w) { return s.sums[w][i]; }, top, total);
    Quad sum = s.sums[0][i];
    #pragma unroll
    for (int n = 1; n < BUFFERS; ++n)
        #pragma unroll
        for (int k = 0; k < 4; ++k) sum.item[k] += s.sums[n][i].item[k];
    top = s.tops[0][r], total = s.totals[0][r];
    return sum;
}

// Joins the splits through shared memory: every block owns a share of the result.
INLINE void join_in_cluster(DecodeShared& s, const Decode& a, const Item& item) {
    constexpr int SHARE = QUADS / CLUSTER;
    float top, total;
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        const Quad value = sum_of_block(s, i, top, total);
        send(&s.inbox[item.split * SHARE + i % SHARE], &s.arrived, i / SHARE, value);
        if (i % ROW_QUADS < CLUSTER) {
            const Pack<float, 2> both = {top, total};
            send(&s.inbox_ends[item.split * ROWS + i / ROW_QUADS], &s.arrived, i % ROW_QUADS, both);
        }
    }
    await(&s.arrived);
    for (int i = threadIdx.x; i < SHARE; i += THREADS) {
        const int at = item.split * SHARE + i, r = at / ROW_QUADS;
        const Quad value = joined(
            CLUSTER, [&](int n) { return s.inbox_ends[n * ROWS + r].item[0]; },
            [&](int n) { return s.inbox_ends[n * ROWS + r].item[1]; },
            [&](int n) { return s.inbox[n * SHARE + i]; }, top, total);
        finish(a, item, at, value, top, total);
    }
}

// Joins the splits through global memory, in the block that ends last.
INLINE void join_by_last(DecodeShared& s, const Decode& a, const Item& item) {
    constexpr int SIZE = QUADS + ROWS;
    const long long head = (long long)item.b * HEADS + item.head;
    Quad* all = a.partial + head * SPLITS * SIZE;
    Quad* mine = all + (long long)item.split * SIZE;
    float top, total;
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        mine[i] = sum_of_block(s, i, top, total);
        if (i % ROW_QUADS == 0) mine[QUADS + i / ROW_QUADS] = {top, total, 0.0f, 0.0f};
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) s.last = atomicAdd(a.arrived + head, 1) == item.splits - 1;
    __syncthreads();
    if (!s.last) return;
    __threadfence();
    if (threadIdx.x == 0) a.arrived[head] = 0;
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        const Quad* ends = all + QUADS + i / ROW_QUADS;
        const Quad value = joined(
            item.splits, [&](int n) { return ends[n * SIZE].item[0]; },
            [&](int n) { return ends[n * SIZE].item[1]; },
            [&](int n) { return all[n * SIZE + i]; }, top, total);
        finish(a, item, i, value, top, total);
    }
}

INLINE void decode_attention(const Decode& a) {
    SHARED(DecodeShared, s);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr bool cluster = CLUSTER > 1;
    const int tokens = tokens_of(a);
    if (cluster) {
        if (threadIdx.x == 0) expect(&s.arrived, sizeof s.inbox + sizeof s.inbox_ends);
        cluster_arrive();
    }
    if (!EARLY) wait_for_previous();
    const Item item = item_of_block(a);

    // Of keys g and g + 8 of a tile, features 32 c + 8 t to + 7; of the values of keys 2 t, 2 t + 1,
    // 2 t + 8 and 2 t + 9, features 64 c + 8 g to + 7.
    uint4 k[2][CHUNKS], v[4][BLOCKS];
    auto key_of = [&](int tile, int i) { return tile * 16 + 8 * i + g; };
    auto value_of = [&](int tile, int i) { return tile * 16 + 8 * (i / 2) + 2 * t + i % 2; };
    auto seen = [&](int key) { return key >= item.first && key < item.limit; };
    auto fresh = [&](int key) {
        if (TOKENS == 1) return NEW && key == item.past;
        return NEW && key >= item.past && key - item.past < tokens;
    };
    auto load = [&](const u16* from, int key, int d) {  // the last features may be missing
        if (!seen(key) || fresh(key) || d >= D) return uint4{0, 0, 0, 0};
        return *(const uint4*)(from + row_of(a, item.b, item.head / PARTS, key) + d);
    };
    auto load_keys = [&](int tile) {
        #pragma unroll
        for (int i = 0; i < 2 * CHUNKS; ++i)
            k[i / CHUNKS][i % CHUNKS] =
                load(a.keys, key_of(tile, i / CHUNKS), 32 * (i % CHUNKS) + 8 * t);
    };
    auto load_values = [&](int tile) {
        #pragma unroll
        for (int i = 0; i < 4 * BLOCKS; ++i)
            v[i / BLOCKS][i % BLOCKS] =
                load(a.values, value_of(tile, i / BLOCKS), 64 * (i % BLOCKS) + 8 * g);
    };
    auto fetch = [&](int tile) {  // into the cache of the GPU
        constexpr int LINES = (2 * D + 127) / 128;
        for (int i = lane; i < 16 * LINES; i += 32) {
            const int key = tile * 16 + i / LINES;
            if (!seen(key) || fresh(key)) continue;
            const long long at = row_of(a, item.b, item.head / PARTS, key) + i % LINES * 64;
            prefetch(a.keys + at);
            prefetch(a.values + at);
        }
    };
    // Whether new keys are among those of some tiles.
    auto has_new = [&](int begin, int end) {
        return NEW && begin * 16 < item.past + tokens && item.past < end * 16;
    };
    auto new_row = [&](int which, int key, int d) {
        const u16* row = s.rows + (ROWS + which * NEW_ROWS + key - item.past) * PITCH;
        return *(const uint4*)(row + d);
    };

    const int begin = item.split < item.splits ? item.begin + warp : item.end;
    if (begin < item.end) {
        load_keys(begin);
        if (AHEAD) load_values(begin);
        else fetch(begin);
    }
    if (ROPE) set_angles(s, a, item.b);
    allow_next();
    if (cluster) cluster_wait();  // all of its blocks expect what the others send
    if (EARLY) wait_for_previous();
    if (item.split >= item.splits) return;
    const bool is_last = item.split == item.splits - 1;
    stage_rows(s, a, item, NEW && (is_last || has_new(item.begin, item.end)));
    if (NEW && is_last && item.head % PARTS == 0) write_rows(s, a, item);

    int lows_of[HALVES], limits[HALVES];  // of the keys of rows g and g + 8
    #pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        const int at = item.past + (item.head % PARTS * ROWS + g + 8 * h) / GROUP;
        lows_of[h] = TOKENS > 1 && WINDOW && at - WINDOW + 1 > 0 ? at - WINDOW + 1 : item.first;
        limits[h] = TOKENS > 1 && CAUSAL && at + 1 < item.limit ? at + 1 : item.limit;
    }
    // The sums are transposed: rows are features, columns are rows of queries.
    float top[HALVES], total[HALVES], out[HALVES][4 * BLOCKS][4] = {};  // of rows g and g + 8
    #pragma unroll
    for (int h = 0; h < HALVES; ++h) { top[h] = NONE; total[h] = 0.0f; }

    for (int tile = begin; tile < item.end; tile += WARPS) {
        const int next = tile + WARPS;
        if (AHEAD && tile != begin) load_values(tile);
        if (!AHEAD && next < item.end) fetch(next);
        const bool patched = has_new(tile, tile + 1);
        if (patched) {
            #pragma unroll
            for (int i = 0; i < 2 * CHUNKS; ++i) {
                const int key = key_of(tile, i / CHUNKS);
                if (fresh(key) && seen(key))
                    k[i / CHUNKS][i % CHUNKS] = new_row(0, key, 32 * (i % CHUNKS) + 8 * t);
            }
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
        if (patched) {
            #pragma unroll
            for (int i = 0; i < 4 * BLOCKS; ++i) {
                const int key = value_of(tile, i / BLOCKS), d = 64 * (i % BLOCKS) + 8 * g;
                if (fresh(key) && seen(key) && d < D) v[i / BLOCKS][i % BLOCKS] = new_row(1, key, d);
            }
            __syncwarp();
        }
        if (AHEAD && next < item.end) load_keys(next);
        u32 weights[HALVES][2];
        float rescale[HALVES][2];  // of rows 2 t and 2 t + 1, and 8 above
        #pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            float p[4], best = top[h];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = tile * 16 + 8 * (i / 2) + 2 * t + i % 2;
                const float scale = SOFTCAP > 0 ? SCALE / SOFTCAP : SCALE * LOG2E;
                float x = score[i / 2][2 * h + i % 2] * scale;
                if (SOFTCAP > 0) x = tanhf(x) * (SOFTCAP * LOG2E);
                p[i] = key >= lows_of[h] && key < limits[h] ? x : NONE;
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
                p[i] = p[i] == NONE ? 0.0f : exp2_fast(p[i] - best);
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
        if (!AHEAD && next < item.end) load_keys(next);
    }

    #pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
        if (t == 0 && g + 8 * h < ROWS) {
            s.tops[warp][g + 8 * h] = top[h];
            s.totals[warp][g + 8 * h] = total[h];
        }
    }
    float factors[HALVES][2] = {};  // of rows 2 t and 2 t + 1, and 8 above
    if (!OWN_BUFFERS) {
        __syncthreads();
        #pragma unroll
        for (int n = 0; n < 2 * HALVES; ++n) {
            const int r = 8 * (n / 2) + 2 * t + n % 2;
            float best = NONE;
            #pragma unroll
            for (int w = 0; w < WARPS && r < ROWS; ++w) best = fmaxf(best, s.tops[w][r]);
            if (r < ROWS) factors[n / 2][n % 2] = exp2_fast(s.tops[warp][r] - best);
        }
        __syncthreads();
        for (int r = threadIdx.x; r < ROWS; r += THREADS) {  // that of warp 0 becomes that of all
            float best = NONE, all = 0.0f;
            #pragma unroll
            for (int w = 0; w < WARPS; ++w) best = fmaxf(best, s.tops[w][r]);
            #pragma unroll
            for (int w = 0; w < WARPS; ++w) all += s.totals[w][r] * exp2_fast(s.tops[w][r] - best);
            s.tops[0][r] = best, s.totals[0][r] = all;
        }
    }
    #pragma unroll 1
    for (int round = 0; round < WARPS / BUFFERS; ++round) {
        if (round) __syncthreads();
        if (warp / BUFFERS != round) continue;
        #pragma unroll
        for (int n = 0; n < 4 * BLOCKS * HALVES; ++n) {
            const int h = n / (4 * BLOCKS), m = n % (4 * BLOCKS);
            const int r = 8 * h + 2 * t + m % 2, half = m / 2 % 2 ^ g / 4;  // all banks at once
            auto sum_of = [&](int i) {
                const int at = m / 4 * 4 + i / 2, e = i % 2 * 2 + m % 2;
                const float sum = half ? out[h][at + 2][e] : out[h][at][e];
                return OWN_BUFFERS ? sum : sum * factors[h][m % 2];
            };
            if (r >= ROWS) continue;
            Quad& place = s.sums[warp % BUFFERS][r * ROW_QUADS + m / 4 * 16 + 2 * g + half];
            Quad sum = {sum_of(0), sum_of(1), sum_of(2), sum_of(3)};
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                if (round) sum.item[i] += place.item[i];
            place = sum;
        }
    }
    __syncthreads();
    if (cluster) return join_in_cluster(s, a, item);
    if (SPLITS > 1 && item.splits > 1) return join_by_last(s, a, item);
    for (int i = threadIdx.x; i < QUADS; i += THREADS) {
        float best, all;
        const Quad value = sum_of_block(s, i, best, all);
        finish(a, item, i, value, best, all);
    }
}
