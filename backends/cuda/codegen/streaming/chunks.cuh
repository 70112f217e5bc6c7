// y = x W^T for 1 to 16 rows of x, on tensor cores: rows of W are the rows of mma, rows of x its
// columns. Compute capability 9.0 or newer.
//
// The blocks of a cluster share the columns of W: chunks of 128 bytes of a row, which the warps of a
// block take in turn. A cluster has neighbouring rows of W, and takes STRIPS strips of 16 of them
// at a time (of GATED, 8 of both matrices): a unit. Every warp has a ring of STAGES chunks of a unit
// in shared memory, which copies keep full across units, so that warps wait for each other only to
// add their sums. x lies in shared memory, of every warp the columns that it needs, in the order in
// which mma takes them; for codes, in f16.
typedef Codes<W> Encoding;
constexpr int THREADS = 32 * WARPS, STRIP = GATED ? 8 : 16, UNIT = STRIPS * STRIP;
constexpr int HEIGHT = 16 * STRIPS;         // rows of a chunk
constexpr int CHUNK = 1024 / BITS;          // its columns
constexpr int PIECES = 32 / LANE;           // of a chunk: four lanes have LANE bytes of a row each
constexpr int COLUMNS = CHUNK / PIECES;     // of a piece
constexpr int EIGHTS = LANE / BITS;         // of columns: what a lane has of a row of a piece
constexpr int CHUNKS = (ROW_BYTES + 127) / 128;
constexpr int HELD = (CHUNKS + CLUSTER - 1) / CLUSTER;  // of a block, at most
constexpr int ROUNDS = (HELD + WARPS - 1) / WARPS;      // chunks of a warp, at most
constexpr bool DIRECT = BITS == 16, GROUPS = SCALED && GROUP < K;
constexpr int TOKENS = (ROWS + 7) / 8;      // in eights
constexpr int X_CHUNK = 2 * CHUNK * ROWS;   // bytes of x for a chunk
constexpr int CODE_BYTES = 128 * HEIGHT, WORDS = HEIGHT * PIECES;  // with scales, or zero points
constexpr int STAGE = CODE_BYTES + 4 * WORDS * (GROUPS + ZERO);
constexpr int SUMS = HEIGHT + 4;            // floats of a row of x in `parts`
constexpr int EACH = (ROUNDS * CHUNK / 8 + 31) / 32;  // eights of a lane
constexpr int AT_ONCE = EACH >= 16 ? 1 : ROWS * EACH <= 16 ? ROWS : 16 / EACH;  // rows on their way
// Results are finished in vectors of neighbouring rows of W. Those of a unit are divided among the
// blocks of a cluster, which send their sums to each other.
constexpr int MATRICES = GATED ? 2 : 1;
constexpr int SIZE = UNIT * ROWS / CLUSTER >= 4 * THREADS ? 4 : 2, VECTORS = UNIT / SIZE * ROWS;
constexpr int OWN = (VECTORS + CLUSTER - 1) / CLUSTER, MINE = (OWN + THREADS - 1) / THREADS;
constexpr bool ALONE = CLUSTER == 1;
constexpr int SLOTS = 4;                    // units whose sums may be on their way
constexpr int UNITS = (N / (BLOCKS / CLUSTER) + UNIT) / UNIT;  // of a cluster, at most
typedef Pack<float, SIZE> Vector;

struct Shared {
    unsigned char rings[WARPS][STAGES][STAGE];
    unsigned char x[HELD][X_CHUNK];
    Vector sums[SLOTS][CLUSTER][ALONE ? 1 : OWN * MATRICES];  // [][sender]
    float parts[2][WARPS][ROWS][SUMS];  // of the unit before, and of this one
    float squares[WARPS], factor[ROWS][WARPS];  // factor: of what mma gives
    Inbox shared[UNITS], received[ALONE ? 1 : UNITS];  // of a unit: `parts` of all warps, `sums`
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch has as much");

// The first chunk of a block of the cluster.
INLINE int first_chunk(int rank) { return CHUNKS * rank / CLUSTER; }
// Of the 16 bytes `part` of a row of a chunk: exchanged, so that reads meet different banks.
INLINE int turned(int row) {
    constexpr int by = LANE == 16 ? 2 : LANE == 8 ? 1 : 0;
    return (row << by | row % 8 >> (3 - by)) & 7;
}
constexpr int PER_BYTE = BITS == 4 ? 2 : 1;  // zero points
// Which scale, or zero point, a row of W has for a piece of a chunk.
INLINE int index_of(int row, int chunk, int piece) {
    return row / ROW_BLOCK * (K / GROUP) + (chunk * CHUNK + piece * COLUMNS) / GROUP;
}
// The row of W that is a row of a chunk of a unit.
INLINE int row_of(int unit, int row) { return unit + (GATED ? row / 16 * 8 + row % 8 : row); }

// The copies of a warp: its chunks of every unit, one after the other.
struct Copies {
    const Matrix &first, &second;
    unsigned char* ring;
    int unit, end, round, rounds, chunk, stage;
    const unsigned char* from[MATRICES];  // this lane's part of the first chunk of the unit
    INLINE void enter() {
        const int lane = threadIdx.x % 32;
        const size_t offset = (size_t)(unit + lane / 8) * ROW_BYTES + 128 * chunk + lane % 8 * 16;
        from[0] = first.codes + offset;
        if (GATED) from[MATRICES - 1] = second.codes + offset;
    }
    // Starts to copy one chunk, if there is one left.
    INLINE void copy() {
        if (unit < end && rounds > 0) {
            if (unit + UNIT <= end) copy_chunk<true>();
            else copy_chunk<false>();
            if (++round == rounds) {
                round = 0, unit += UNIT;
                enter();
            }
        }
        commit_copies();
        if (++stage == STAGES) stage = 0;
    }
    template <bool whole> INLINE void copy_chunk() const {  // whole: no row is beyond `end`
        const int lane = threadIdx.x % 32, now = chunk + round * WARPS;
        const bool inside = CHUNKS * 128 == ROW_BYTES || 128 * now + lane % 8 * 16 < ROW_BYTES;
        unsigned char* to = ring + stage * STAGE + 128 * (lane / 8);
        unsigned char* const part[2] = {to + 16 * (lane % 8 ^ turned(lane / 8)),
                                        to + 16 * (lane % 8 ^ turned(lane / 8 + 4))};
        #pragma unroll
        for (int i = 0; i < HEIGHT / 4; ++i) {  // row 4 i + lane / 8 of the chunk
            const int row = GATED ? i / 4 * 8 + i % 2 * 4 : 4 * i;
            const unsigned char* codes = from[GATED ? i / 2 % 2 : 0] + round * (128 * WARPS);
            const bool real = inside && (whole || unit + row + lane / 8 < end);
            copy_once<16>(part[i % 2] + 512 * i, codes + (size_t)row * ROW_BYTES, real);
        }
        unsigned char* words = ring + stage * STAGE + CODE_BYTES;
        if (GROUPS) copy_words<whole>(words, now, [&](const Matrix& matrix, int index) {
            return (size_t)(matrix.scale + index);
        });
        words += 4 * WORDS * GROUPS;
        if (ZERO) copy_words<whole>(words, now, [&](const Matrix& matrix, int index) {
            return (size_t)matrix.zero + index / PER_BYTE;
        });
    }
    // The words of memory with what belongs to the pieces of the rows.
    template <bool whole, typename Place>
    INLINE void copy_words(unsigned char* to, int now, Place place) const {
        #pragma unroll
        for (int i = threadIdx.x % 32; i < WORDS; i += 32) {
            const int row = i / PIECES, in = row_of(unit, row), piece = i % PIECES;
            const bool real = (whole || in < end) && now * CHUNK + piece * COLUMNS < K;
            const Matrix& matrix = GATED && row / 8 % 2 ? second : first;
            const size_t at = place(matrix, index_of(in, now, piece));
            copy_once<4>(to + 4 * i, (const void*)(at & ~(size_t)3), real);
        }
    }
};

// x, on its way into shared memory.
struct Input {
    const X* x;
    int rows, warp, lane, begin, held;  // begin, held: the chunks of this block
    Shared& shared;
    Pack<G, 8> gains[NORM ? EACH : 1];

    // visit(i, column, chunk, place) for the eights of columns that a lane has.
    template <typename Visit> INLINE void each(Visit visit) const {
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = i * 32 + lane, round = at / (CHUNK / 8), in = at % (CHUNK / 8);
            const int chunk = round * WARPS + warp;
            if (chunk >= held) continue;
            // lanes of mma have EIGHTS neighbouring ones of a piece
            const int piece = in / (4 * EIGHTS), of = in % (4 * EIGHTS);
            const int place = piece * 4 * EIGHTS + of % EIGHTS * 4 + of / EIGHTS;
            visit(i, (begin + chunk) * CHUNK + 8 * in, shared.x[chunk], place);
        }
    }
    INLINE void load_gains(const G* gain) {  // before x is there
        if (NORM) each([&](int i, int column, unsigned char*, int) {
            if (column < K) gains[i] = *(const Pack<G, 8>*)(gain + column);
        });
    }
    // Normalises what is loaded of the only row.
    INLINE void normalise(uint4 (&loaded)[EACH]) {
        float squares = 0.0f, v[8];
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            elements(loaded[i], v);
            #pragma unroll
            for (int k = 0; k < 8; ++k) squares += v[k] * v[k];
        }
        shared.squares[warp] = warp_sum(squares);
        __syncthreads();
        squares = 0.0f;
        #pragma unroll
        for (int i = 0; i < WARPS; ++i) squares += shared.squares[i];
        const float inverse = rsqrtf(squares / K + EPS);
        each([&](int i, int column, unsigned char*, int) {
            if (column >= K) return;
            elements(loaded[i], v);
            normalize(v, gains[i], inverse);
            loaded[i] = {pack<X>(v[0], v[1]), pack<X>(v[2], v[3]), pack<X>(v[4], v[5]),
                         pack<X>(v[6], v[7])};
        });
    }
    INLINE static void put(unsigned char* chunk, int place, int token, const uint4& words) {
        *(uint4*)(chunk + token * 2 * CHUNK + 16 * (place ^ token % 2 * 4)) = words;
    }
    // What is loaded of a row, times a power of two with which f16 has room for all numbers.
    INLINE void store_scaled(const uint4 (&loaded)[EACH], int token) const {
        float peak = 0.0f, v[8];
        #pragma unroll
        for (int i = 0; SCALED_X && i < EACH; ++i) {
            elements(loaded[i], v);
            #pragma unroll
            for (int k = 0; k < 8; ++k) peak = fmaxf(peak, fabsf(v[k]));
        }
        #pragma unroll
        for (int step = 16; SCALED_X && step; step >>= 1)
            peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, step));
        const u32 exponent = SCALED_X ? max(__float_as_uint(peak) >> 23, 15u) : 141u;
        const float scale = __uint_as_float((268u - exponent) << 23);
        shared.factor[token][warp] = __uint_as_float((exponent - 14u) << 23);
        each([&](int i, int, unsigned char* chunk, int place) {
            elements(loaded[i], v);
            #pragma unroll
            for (int k = 0; k < 8; ++k) v[k] *= scale;
            constexpr int next = BITS == 4 ? 4 : 1, every = BITS == 4 ? 1 : 2;
            put(chunk, place, token,
                {pack<f16>(v[0], v[next]), pack<f16>(v[every], v[every + next]),
                 pack<f16>(v[2 * every], v[2 * every + next]),
                 pack<f16>(v[3 * every], v[3 * every + next])});
        });
    }
    // All of it into shared memory.
    INLINE void stage() {
        __syncwarp();
        #pragma unroll 1
        for (int from = 0; from < rows; from += AT_ONCE) {
            uint4 loaded[AT_ONCE][EACH] = {};
            #pragma unroll
            for (int t = 0; t < AT_ONCE; ++t)
                if (from + t < rows) each([&](int i, int column, unsigned char*, int) {
                    if (column < K) loaded[t][i] = load16(x + (size_t)(from + t) * K + column);
                });
            if (NORM) normalise(loaded[0]);
            #pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                if (from + t >= rows) continue;
                if (!DIRECT) store_scaled(loaded[t], from + t);
                else each([&](int i, int, unsigned char* chunk, int place) {
                    put(chunk, place, from + t, loaded[t][i]);
                });
            }
        }
        __syncwarp();
    }
};

// Sums of a warp: [strip][eight rows of x][...] as mma has them.
typedef float Sums[STRIPS][TOKENS][4];

// Where this lane's part of x is, and of a row of a chunk.
struct Lane {
    int x[TOKENS], codes, odd;
    INLINE Lane() {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        #pragma unroll
        for (int n = 0; n < TOKENS; ++n) x[n] = min(8 * n + g, ROWS - 1) * 2 * CHUNK + 16 * t;
        odd = min(g, ROWS - 1) % 2 * 64;
        codes = 128 * g + (t * LANE ^ 16 * turned(g));
    }
};

// One chunk: of W at `stage`, of x at `x`; of the unit `unit`, and its number among chunks.
INLINE void multiply(const unsigned char* stage, const unsigned char* x, const Lane& lane, int unit,
                     int now, Sums& sums) {
    const int g = threadIdx.x % 32 / 4;
    const u32* words = (const u32*)(stage + CODE_BYTES);
    #pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        Sums inner = {};
        Sums& c = GROUPS ? inner : sums;
        u32 w[STRIPS][2][LANE / 4], zero[STRIPS][2] = {};
        #pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * strip + 8 * half;
                load_words(w[strip][half], stage + 128 * row + (lane.codes ^ piece * 4 * LANE));
                if (!ZERO) continue;
                const int index = index_of(row_of(unit, row + g), now, piece);
                const u32 word = words[WORDS * GROUPS + (row + g) * PIECES + piece];
                const u32 code = word >> index / PER_BYTE % 4 * 8 >> index % PER_BYTE * 4;
                zero[strip][half] = (code & (1 << BITS) - 1) * 0x00010001u;
            }
        #pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
            const int place = piece * 4 * EIGHTS + 4 * j;  // of the eights of columns of four lanes
            uint4 v[TOKENS];
            #pragma unroll
            for (int n = 0; n < TOKENS; ++n)
                v[n] = load16(x + 16 * place + (place % 8 ? lane.x[n] - lane.odd : lane.x[n] + lane.odd));
            #pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
                u32 low[4], high[4];
                Encoding::pairs(w[strip][0] + BITS / 4 * j, zero[strip][0], low);
                Encoding::pairs(w[strip][1] + BITS / 4 * j, zero[strip][1], high);
                #pragma unroll
                for (int n = 0; n < TOKENS; ++n) {
                    mma<Operand>(c[strip][n], low[0], high[0], low[1], high[1], v[n].x, v[n].y);
                    mma<Operand>(c[strip][n], low[2], high[2], low[3], high[3], v[n].z, v[n].w);
                }
            }
        }
        #pragma unroll
        for (int strip = 0; GROUPS && strip < STRIPS; ++strip)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * strip + 8 * half + g;
                const int in = index_of(row_of(unit, row), now, piece) % (4 / sizeof(S));
                const float scale = *((const S*)(words + row * PIECES + piece) + in);
                #pragma unroll
                for (int n = 0; n < TOKENS; ++n)
                    #pragma unroll
                    for (int k = 2 * half; k < 2 * half + 2; ++k)
                        sums[strip][n][k] += scale * inner[strip][n][k];
            }
    }
}

// The sums of a warp into `parts`.
INLINE void share(const Sums& sums, Shared& shared, int warp, int slot) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int n = 0; n < TOKENS; ++n)
        #pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int token = 8 * n + 2 * t + k;
            if (token >= ROWS) continue;
            const float by = SCALED_X ? shared.factor[token][warp] : 1.0f;
            #pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip)
                #pragma unroll
                for (int half = 0; half < 2; ++half)
                    shared.parts[slot][warp][token][16 * strip + 8 * half + g] =
                        sums[strip][n][2 * half + k] * by;
        }
}
INLINE void add_vector(Vector& sum, const Vector& more) {
    #pragma unroll
    for (int k = 0; k < SIZE; ++k) sum.item[k] += more.item[k];
}
// The sums of all warps for some results.
INLINE void add_parts(const Shared& shared, int slot, int vector, Vector (&sums)[MATRICES]) {
    const int token = vector / (UNIT / SIZE), in = vector % (UNIT / SIZE) * SIZE;
    #pragma unroll
    for (int m = 0; m < MATRICES; ++m) {
        const int row = GATED ? in / 8 * 16 + 8 * m + in % 8 : in;
        sums[m] = *(const Vector*)&shared.parts[slot][0][token][row];
        #pragma unroll
        for (int w = 1; w < WARPS; ++w)
            add_vector(sums[m], *(const Vector*)&shared.parts[slot][w][token][row]);
    }
}

// The results that a block finishes.
struct Results {
    const Matrix &first, &second;
    const X* residual;
    X* y;
    int begin, end, rows, rank, own;  // own: vectors of a unit
    Shared& shared;
    Added added[MINE][SIZE];

    template <typename Visit> INLINE void each(int unit, Visit visit) {  // visit(i, k, row, token)
        #pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int vector = threadIdx.x + i * THREADS, of = rank * OWN + vector;
            #pragma unroll
            for (int k = 0; k < SIZE; ++k) {
                const int token = of / (UNIT / SIZE), row = unit + of % (UNIT / SIZE) * SIZE + k;
                if (vector < own && token < rows && row < end) visit(i, k, row, token);
            }
        }
    }
    INLINE void load(int unit) {
        each(unit, [&](int i, int k, int row, int token) {
            added[i][k] = load_added(first, second, residual, row, token);
        });
    }
    // Adds the sums of the warps, once all are there, and sends them to the blocks that finish them.
    INLINE void add_unit(int unit) {
        const int number = (unit - begin) / UNIT;
        await_arrivals(&shared.shared[number]);
        if (ALONE) return finish_unit(unit);
        for (int vector = threadIdx.x; vector < VECTORS; vector += THREADS) {
            Vector sums[MATRICES];
            add_parts(shared, number % 2, vector, sums);
            #pragma unroll
            for (int m = 0; m < MATRICES; ++m)
                send(&shared.sums[number % SLOTS][rank][vector % OWN * MATRICES + m],
                     &shared.received[number], vector / OWN, sums[m]);
        }
    }
    INLINE void finish_unit(int unit) {
        const int number = (unit - begin) / UNIT;
        Vector sums[MINE][MATRICES];
        if (!ALONE) await(&shared.received[number]);
        #pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int vector = threadIdx.x + i * THREADS;
            if (vector >= own) continue;
            if (ALONE) add_parts(shared, number % 2, vector, sums[i]);
            #pragma unroll
            for (int m = 0; !ALONE && m < MATRICES; ++m) {
                const auto& sent = shared.sums[number % SLOTS];
                sums[i][m] = sent[0][vector * MATRICES + m];
                #pragma unroll
                for (int from = 1; from < CLUSTER; ++from)
                    add_vector(sums[i][m], sent[from][vector * MATRICES + m]);
            }
        }
        each(unit, [&](int i, int k, int row, int token) {
            finish(y, row, token, sums[i][0].item[k] * Encoding::factor,
                   sums[i][MATRICES - 1].item[k] * Encoding::factor, added[i][k]);
        });
    }
};

INLINE void stream_chunks(const X* x, const G* gain, const Matrix& first, const Matrix& second,
                         const X* residual, X* y, int rows) {
    constexpr int CLUSTERED = BLOCKS / CLUSTER;
    const int cluster = blockIdx.y % CLUSTERED;
    TILES(Shared, shared);
    const int warp = threadIdx.x / 32, rank = ALONE ? 0 : blockIdx.x;
    const int begin = first_row<CLUSTERED>(cluster);
    const int end = first_row<CLUSTERED>(cluster + 1);
    const int start = first_chunk(rank), held = first_chunk(rank + 1) - start;
    const int rounds = (held - warp + WARPS - 1) / WARPS;
    allow_next();
    Copies copies{first, second, shared.rings[warp][0], begin, end, 0, rounds, start + warp, 0};
    copies.enter();
    #pragma unroll 1
    for (int s = 0; s < STAGES; ++s) copies.copy();
    const int own = max(min(OWN, VECTORS - rank * OWN), 0);  // vectors that this block finishes
    for (int i = threadIdx.x; i < UNITS; i += THREADS) {
        expect_arrivals(&shared.shared[i], WARPS);
        if (!ALONE)
            expect(&shared.received[i], own * (int)(CLUSTER * MATRICES * sizeof(Vector)));
    }
    if (ALONE) __syncthreads();
    else cluster_arrive();
    Input input{x, rows, warp, (int)threadIdx.x % 32, start, held, shared};
    input.load_gains(gain);
    wait_for_previous();
    input.stage();
    if (!ALONE) cluster_wait();  // all blocks expect what the others send

    Results results{first, second, residual, y, begin, end, rows, rank, own, shared};
    const Lane lane;
    int stage = 0;
    #pragma unroll 1
    for (int unit = begin; unit < end; unit += UNIT) {
        Sums sums = {};
        #pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
            wait_for_copies<STAGES - 1>();
            __syncwarp();
            multiply(shared.rings[warp][stage], shared.x[round * WARPS + warp], lane, unit,
                     start + warp + round * WARPS, sums);
            __syncwarp();
            copies.copy();
            if (++stage == STAGES) stage = 0;
        }
        // What is left to do of a unit is done while the next ones are multiplied: a warp adds its
        // part of the sums of the unit before, and finishes the results of the one before that.
        // So all warps have read `parts` of a unit when they have shared those of the next one, and
        // all blocks `sums` when they have sent those of the third behind it.
        if (!ALONE && unit > begin + UNIT) results.finish_unit(unit - 2 * UNIT);
        if (unit > begin) {
            if (!ALONE) results.load(unit - UNIT);
            results.add_unit(unit - UNIT);
        }
        const int number = (unit - begin) / UNIT;
        share(sums, shared, warp, number % 2);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&shared.shared[number]);
        if (ALONE) results.load(unit);
    }
    if (begin == end) return;
    const int last = begin + (end - begin - 1) / UNIT * UNIT;
    if (!ALONE && last > begin) results.finish_unit(last - UNIT);
    if (!ALONE) results.load(last);
    results.add_unit(last);
    if (!ALONE) results.finish_unit(last);
}
