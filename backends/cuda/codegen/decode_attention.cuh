// Attention of one to eight queries per sequence: rope of the new queries and keys, their rows of the
// caches, and softmax(scale q k') v over the visible keys. A row is a query of a query head; a block
// has up to 16 rows of one key head. Its warps take 16 keys at a time, on tensor cores, straight from
// global memory, 8 features a lane. Either a block has a split of the keys of a head, in a grid of
// (splits, key heads * PARTS, sequences); or the blocks share out the keys of all heads, one after the
// other, by the lengths of the sequences. The splits of a head are joined in a cluster, where the
// kernel is built for one, or by the block that ends last, in order.
// Constants come before: T, D, GROUP (query heads of a key head), HEADS (key heads * PARTS), TOKENS
// (queries per sequence, at most), ROWS (in a block), PARTS (of the rows of a key head), WARPS,
// THREADS, EARLY, NEW (writes the caches), NORM (rms_norm of heads), ROPE, INTERLEAVED, ROTARY_DIM,
// FACTOR, FREQUENCY, PAGE (keys of a page of a pool; 0: caches), CAUSAL, WINDOW, LENGTHS, SINKS,
// SCALE, SOFTCAP, SPLITS (of a head, at most; 0: by lengths), OVERHEAD (tiles that take as long as
// what else a head takes, for shares by lengths), CLUSTER (blocks in one, or 1), AHEAD (loads values
// and the next keys while it computes), KEY_FACTOR and VALUE_FACTOR (what the numbers of caches are
// multiplied by). `Cell` is an element of a cache: the bits of a T, or a code (cache_codes.cuh, with
// CODES defined); `Operand` is what is multiplied.

struct Decode {
    const u16 *q, *k, *v;                  // the new rows of tokens, `*_stride` elements apart
    long long q_stride, k_stride, v_stride;
    const NormType *q_norm, *k_norm;       // [D], the weights of rms_norm of every head
    Cell *keys, *values;                   // see row_of
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

#ifndef CODES
typedef Pack<u32, 4> Features;  // eight of them
constexpr float CODE_FACTOR = 1.0f;
INLINE uint4 pairs_of(const Features& x) { return {x.item[0], x.item[1], x.item[2], x.item[3]}; }
#endif
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
#ifdef CODES
    float factors[ROWS];  // of queries
#endif
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

// The keys that queries of a sequence see, as the only split of a head.
INLINE Item keys_of(const Decode& a, int b) {
    const int far = 1 << 30, tokens = tokens_of(a);
    long long past = a.past ? (long long)a.past[b] : a.count - tokens;
    past = past < -far ? -far : past > far ? far : past;
    long long limit = CAUSAL && past + tokens < a.count ? past + tokens : a.count;
    if (LENGTHS && (long long)a.lengths[b] < limit) limit = a.lengths[b];
    if (limit < 0) limit = 0;
    const int first = WINDOW && past - WINDOW + 1 > 0 ? (int)past - WINDOW + 1 : 0;
    const int begin = first / 16, end = ((int)limit + 15) / 16;
    return {b, 0, 0, 1, (int)past, first, (int)limit, begin, end > begin ? end : begin};
}

// The item of a block where each has one. Without a cluster, a head has no more splits than tiles for
// their warps, and the other blocks have none.
INLINE Item item_of_block(const Decode& a) {
    Item item = keys_of(a, blockIdx.z);
    const int from = item.begin, tiles = item.end - from, all = (tiles + WARPS - 1) / WARPS;
    item.head = blockIdx.y, item.split = blockIdx.x;
    item.splits = CLUSTER > 1 || all >= SPLITS ? SPLITS : all > 1 ? all : 1;
    item.begin = from + tiles * item.split / item.splits;
    item.end = from + tiles * (item.split + 1) / item.splits;
    if (item.split >= item.splits) item.b = -1;
    return item;
}

// All heads in a row, each with as many units as tiles, and OVERHEAD more. The units of block i are
// those from total * i / blocks on; all blocks have some.
struct Share {
    long long total, from, until;  // of the block
    long long start;               // of the next head
    int b, head;                   // which that is
};
INLINE int units_of(const Item& keys) { return keys.end - keys.begin + OVERHEAD; }
INLINE int block_of(const Share& share, long long unit) {
    return (int)(((unit + 1) * gridDim.x - 1) / share.total);
}
// Of the lanes of a warp up to this one.
INLINE long long sum_of_lanes(long long x) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const long long other = __shfl_sync(~0u, x, (lane - step) & 31);
        if (lane >= step) x += other;
    }
    return x;
}
INLINE Share share_of_block(const Decode& a) {
    const int lane = threadIdx.x % 32;
    auto units = [&](int b) {  // of a sequence
        return b < a.sequences ? (long long)HEADS * units_of(keys_of(a, b)) : 0;
    };
    Share share = {};
    for (int b = lane; b - lane < a.sequences; b += 32)
        share.total += __shfl_sync(~0u, sum_of_lanes(units(b)), 31);
    share.from = share.total * blockIdx.x / gridDim.x;
    share.until = share.total * (blockIdx.x + 1) / gridDim.x;
    for (;; share.b += 32) {
        const long long own = units(share.b + lane), end = share.start + sum_of_lanes(own);
        int before = end <= share.from;  // lanes of which all units are those of earlier blocks
        #pragma unroll
        for (int step = 16; step; step /= 2) before += __shfl_xor_sync(~0u, before, step);
        const long long start = __shfl_sync(~0u, end - own, before & 31);
        share.start = __shfl_sync(~0u, end, 31);
        if (before == 32) continue;
        share.b += before;
        const int each = units_of(keys_of(a, share.b));
        share.head = (int)((share.from - start) / each);
        share.start = start + (long long)share.head * each;
        return share;
    }
}
// The next item of the block; `b` is -1 behind the last one.
INLINE Item next_item(const Decode& a, Share& share) {
    while (share.b < a.sequences && share.start < share.until) {
        Item item = keys_of(a, share.b);
        const int tiles = item.end - item.begin;
        const long long start = share.start, end = start + (tiles > 1 ? tiles : 1);
        item.head = share.head;
        share.start += tiles + OVERHEAD;
        if (++share.head == HEADS) ++share.b, share.head = 0;
        if (end <= share.from) continue;  // what else that head takes
        if (start < share.from || end > share.until) {
            const int first = block_of(share, start);
            item.split = blockIdx.x - first;
            item.splits = block_of(share, end - 1) - first + 1;
            if (end > share.until) item.end = item.begin + (int)(share.until - start);
            if (start < share.from) item.begin += (int)(share.from - start);
        }
        return item;
    }
    return {-1};
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

#ifdef CODES
// The queries as f16, each divided by a power of two of which it is less than 2.
INLINE void scale_rows(DecodeShared& s) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < ROWS; r += WARPS) {
        u16* row = s.rows + r * PITCH;
        u32 most = 0;
        for (int d = lane; d < D; d += 32) most = max(most, (u32)row[d] & 0x7fffu);
        #pragma unroll
        for (int step = 16; step; step /= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
        const float largest = number((u16)most), factor = largest < 1e-30f ? 1.0f : power_of_2(largest);
        for (int d = lane; d < D; d += 32) row[d] = f16::of(number(row[d]) / factor).bits;
        if (lane == 0) s.factors[r] = factor;
    }
    __syncthreads();
}
#endif

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
#ifdef CODES
    scale_rows(s);
#endif
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
        Cell* to = (which ? a.values : a.keys) + row_of(a, item.b, item.head / PARTS, key) + d;
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
    const float weight = total == 0.0f ? 0.0f : VALUE_FACTOR * CODE_FACTOR / total;
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

// Where the part of split `n` of a head is: blocks that share out keys have two places, for a head
// that they end and one that they begin.
INLINE long long part_of(const Item& item, int n) {
    if (SPLITS) return ((long long)item.b * HEADS + item.head) * SPLITS + n;
    return 2 * (blockIdx.x - item.split + n) + (n == 0);
}

// Joins the splits through global memory, in the block that ends last.
INLINE void join_by_last(DecodeShared& s, const Decode& a, const Item& item) {
    constexpr int SIZE = QUADS + ROWS;
    const long long head = (long long)item.b * HEADS + item.head;
    auto part = [&](int n) { return a.partial + part_of(item, n) * SIZE; };
    Quad* mine = part(item.split);
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
        const int ends = QUADS + i / ROW_QUADS;
        const Quad value = joined(
            item.splits, [&](int n) { return part(n)[ends].item[0]; },
            [&](int n) { return part(n)[ends].item[1]; },
            [&](int n) { return part(n)[i]; }, top, total);
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
    Share share = {};
    if (!SPLITS) share = share_of_block(a);
    Item item = SPLITS ? item_of_block(a) : next_item(a, share);

    // Of keys g and g + 8 of a tile, features 32 c + 8 t to + 7; of the values of keys 2 t, 2 t + 1,
    // 2 t + 8 and 2 t + 9, features 64 c + 8 g to + 7.
    Features k[2][CHUNKS], v[4][BLOCKS];
    auto key_of = [&](int tile, int i) { return tile * 16 + 8 * i + g; };
    auto value_of = [&](int tile, int i) { return tile * 16 + 8 * (i / 2) + 2 * t + i % 2; };
    auto seen = [&](int key) { return key >= item.first && key < item.limit; };
    auto fresh = [&](int key) {
        if (TOKENS == 1) return NEW && key == item.past;
        return NEW && key >= item.past && key - item.past < tokens;
    };
    auto load = [&](const Cell* from, int key, int d) {  // the last features may be missing
        if (!seen(key) || fresh(key) || d >= D) return Features{};
        return *(const Features*)(from + row_of(a, item.b, item.head / PARTS, key) + d);
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
        constexpr int LINE = 128 / sizeof(Cell), LINES = (D + LINE - 1) / LINE;
        for (int i = lane; i < 16 * LINES; i += 32) {
            const int key = tile * 16 + i / LINES;
            if (!seen(key) || fresh(key)) continue;
            const long long at = row_of(a, item.b, item.head / PARTS, key) + i % LINES * LINE;
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
        return *(const Features*)(row + d);
    };

    auto load_first = [&] {
        const int tile = item.begin + warp;
        if (item.b < 0 || tile >= item.end) return;
        load_keys(tile);
        if (AHEAD) load_values(tile);
        else fetch(tile);
    };
    load_first();
    if (ROPE && item.b >= 0) set_angles(s, a, item.b);
    allow_next();
    if (cluster) cluster_wait();  // all of its blocks expect what the others send
    if (EARLY) wait_for_previous();
    while (item.b >= 0) {
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

        const int begin = item.begin + warp;
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
                    const uint4 x = pairs_of(k[n][c]);
                    mma<Operand>(score[n], q.x, w.x, q.y, w.y, x.x, x.y);
                    mma<Operand>(score[n], q.z, w.z, q.w, w.w, x.z, x.w);
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
                    const float scale = (SOFTCAP > 0 ? SCALE / SOFTCAP : SCALE * LOG2E) * (KEY_FACTOR * CODE_FACTOR);
                    float x = score[i / 2][2 * h + i % 2] * scale;
#ifdef CODES
                    x *= s.factors[min(g + 8 * h, ROWS - 1)];
#endif
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
                weights[h][0] = pack<Operand>(p[0], p[1]);
                weights[h][1] = pack<Operand>(p[2], p[3]);
            }
            #pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                uint4 x[4];
                #pragma unroll
                for (int n = 0; n < 4; ++n) x[n] = pairs_of(v[n][block]);
                #pragma unroll
                for (int j = 0; j < 4; ++j) {  // rows g and g + 8 are features 2 i and 2 i + 1
                    const int i = 4 * block + j;
                    auto pair = [&](int n) { return word(x[n], j); };
                    const u32 a0 = lows(pair(0), pair(1)), a1 = highs(pair(0), pair(1));
                    const u32 a2 = lows(pair(2), pair(3)), a3 = highs(pair(2), pair(3));
                    #pragma unroll
                    for (int h = 0; h < HALVES; ++h) {
                        #pragma unroll
                        for (int e = 0; e < 4; ++e) out[h][i][e] *= rescale[h][e % 2];
                        mma<Operand>(out[h][i], a0, a1, a2, a3, weights[h][0], weights[h][1]);
                    }
                }
            }
            if (!AHEAD && next < item.end) load_keys(next);
        }

        const Item done = item;
        if (SPLITS) item.b = -1;
        else item = next_item(a, share);
        load_first();
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
        if (cluster) {
            join_in_cluster(s, a, done);
        } else if (SPLITS != 1 && done.splits > 1) {
            join_by_last(s, a, done);
        } else {
            for (int i = threadIdx.x; i < QUADS; i += THREADS) {
                float best, all;
                const Quad value = sum_of_block(s, i, best, all);
                finish(a, done, i, value, best, all);
            }
        }
        if (item.b < 0) return;
        if (ROPE && item.b != done.b) set_angles(s, a, item.b);
        __syncthreads();
    }
}
