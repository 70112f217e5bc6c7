// y = x W^T for 1 to 16 rows of x, on tensor cores: rows of W are the rows of mma, rows of x its
// columns. W is read in its own layout, straight into registers.
//
// A block has neighbouring rows of W, and takes TILES tiles of 16 of them at a time (of GATED, 8 of
// both matrices): a unit. Its warps take the columns in turn, in pieces of which four lanes have
// LANE bytes of a row each. DEPTH pieces of every warp are under way, also across units.
//
// For weights of 16 bits, x is read as they are (DIRECT). For others, every warp puts what it needs
// of x into shared memory, in f16 and in the order in which mma takes it, PHASE columns at a time.
typedef Codes<W> Encoding;
constexpr int THREADS = 32 * WARPS, TILE = GATED ? 8 : 16, UNIT = TILES * TILE;
constexpr int PIECE = 4 * LANE;             // bytes of a row
constexpr int COLUMNS = 8 * PIECE / BITS, PIECES = K / COLUMNS;
constexpr int CHUNKS = LANE / BITS;         // of eight columns: what a lane has of a piece
constexpr int ROUNDS = (PIECES + WARPS * DEPTH - 1) / (WARPS * DEPTH) * DEPTH;  // pieces of a warp
constexpr bool EVEN = PIECES == ROUNDS * WARPS;
constexpr bool DIRECT = BITS == 16;
constexpr int PHASES = DIRECT ? 1 : (ROUNDS + PHASE_ROUNDS - 1) / PHASE_ROUNDS;
constexpr int PHASE = PHASE_ROUNDS * WARPS * COLUMNS;
constexpr int X_BYTES = 2 * (PHASE < K ? PHASE : K) + 64;  // 64, so that rows differ in their banks
constexpr int TOKENS = (ROWS + 7) / 8;      // in eights
constexpr int SUMS = 16 * TILES + 4;        // floats of a row of x in `parts`
constexpr int BUFFERS = ROWS > 4 ? 1 : 2;   // of `parts`; with two, units need one barrier only
constexpr int EACH = (PHASE_ROUNDS * COLUMNS / 8 + 31) / 32;  // eights of a row that a lane stages
constexpr bool KEPT = !DIRECT && PHASES == 1 && ROWS * EACH <= 4;
constexpr int AT_ONCE = KEPT ? ROWS : EACH >= 4 ? 1 : 4;
constexpr bool GROUPS = SCALED && GROUP < K;

struct Shared {
    float *parts, *squares, *peaks, *factor;
    unsigned char* x;
    INLINE explicit Shared(unsigned char* memory) {
        x = memory;
        parts = (float*)(x + (DIRECT ? 0 : ROWS * X_BYTES));  // [BUFFERS][WARPS][ROWS][SUMS]
        squares = parts + BUFFERS * WARPS * ROWS * SUMS;      // [ROWS][WARPS]
        peaks = squares + ROWS * WARPS;                       // [ROWS][WARPS]
        factor = peaks + ROWS * WARPS;                        // [ROWS][WARPS]: of what mma gives
    }
};

// What a lane has of a piece.
struct Slot {
    u32 w[TILES][2][LANE / 4];
    uint4 x[DIRECT ? TOKENS : 1];
    S scale[TILES][2];
    unsigned char zero[TILES][2];
    bool odd[TILES][2];  // whether the zero point is the second of its byte
};

// Where this lane's rows are: rows g of the tiles, and rows g + 8 (of GATED, g of the second
// matrix).
struct Source {
    const Matrix matrix[2];
    const unsigned char* codes[TILES][2];
    int group[TILES][2];
    INLINE Source(const Matrix& first, const Matrix& second)
        : matrix{first, GATED ? second : first} {}
    INLINE void enter(int begin, int end) {
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int in = tile * TILE + threadIdx.x % 32 / 4 + (GATED ? 0 : 8 * half);
                const int row = min(begin + in, end - 1);
                codes[tile][half] =
                    matrix[half].codes + (size_t)row * ROW_BYTES + threadIdx.x % 4 * LANE;
                group[tile][half] = row / ROW_BLOCK * (K / GROUP);
            }
    }
    INLINE void load(Slot& slot, int piece) const {
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                load_once(slot.w[tile][half], codes[tile][half] + piece * PIECE);
                const int number = group[tile][half] + piece / (GROUP / COLUMNS);
                if (GROUPS) slot.scale[tile][half] = matrix[half].scale[number];
                if (!ZERO) continue;
                slot.odd[tile][half] = number % 2;
                const unsigned char* zero = (const unsigned char*)matrix[half].zero;
                slot.zero[tile][half] = zero[BITS == 4 ? number / 2 : number];
            }
    }
};

// The pieces of a warp: neighbours in pairs (PAIR), so that it reads 128 bytes of a row.
INLINE int piece_of(int round, int d = 0) {
    return round * WARPS + (int)threadIdx.x / 32 * PAIR + d / PAIR * (WARPS * PAIR) + d % PAIR;
}

// x, of every warp the columns that it needs, on its way into shared memory.
struct Input {
    const X* x;
    const G* gain;
    int rows;
    const Shared& shared;
    Pack<G, 8> gains[NORM && PHASES == 1 ? EACH : 1];
    uint4 kept[KEPT ? ROWS * EACH : 1];

    // visit(i, column) for the vectors of eight columns that a lane has of a phase.
    template <typename Visit> INLINE void each(int phase, Visit visit) {
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = i * 32 + threadIdx.x % 32, d = at / (COLUMNS / 8);
            const int piece = piece_of(phase * PHASE_ROUNDS, d);
            if (d < PHASE_ROUNDS && piece < PIECES)
                visit(i, piece * COLUMNS + at % (COLUMNS / 8) * 8);
        }
    }
    INLINE void load_gain() {  // before x is there
        if (!NORM || PHASES > 1) return;
        each(0, [&](int i, int column) { gains[i] = *(const Pack<G, 8>*)(gain + column); });
    }
    INLINE uint4 load(int token, int column) const {
        return load16(x + (size_t)min(token, rows - 1) * K + column);
    }
    INLINE void normalized(float (&v)[8], int i, int column, float inverse) const {
        normalize(v, PHASES == 1 ? gains[i] : *(const Pack<G, 8>*)(gain + column), inverse);
    }
    // The sums of squares of rows, and their greatest numbers but for the norm.
    INLINE void measure() {
        #pragma unroll
        for (int token = 0; KEPT && token < ROWS; ++token)
            each(0, [&](int i, int column) { kept[token * EACH + i] = load(token, column); });
        #pragma unroll AT_ONCE
        for (int token = 0; token < ROWS; ++token) {
            float squares = 0.0f, peak = 0.0f;
            for (int phase = 0; phase < PHASES; ++phase)
                each(phase, [&](int i, int column) {
                    float v[8];
                    elements(KEPT ? kept[token * EACH + i] : load(token, column), v);
                    #pragma unroll
                    for (int k = 0; k < 8; ++k) squares += v[k] * v[k];
                    if (NORM) normalized(v, i, column, 1.0f);
                    #pragma unroll
                    for (int k = 0; k < 8; ++k) peak = fmaxf(peak, fabsf(v[k]));
                });
            #pragma unroll
            for (int step = 16; step; step >>= 1) {
                if (NORM) squares += __shfl_xor_sync(0xffffffffu, squares, step);
                peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, step));
            }
            shared.squares[token * WARPS + threadIdx.x / 32] = squares;
            shared.peaks[token * WARPS + threadIdx.x / 32] = peak;
        }
        if (NORM) __syncthreads();
        else __syncwarp();
    }
    // One phase into shared memory, normalised if asked for, and times a power of two, so that f16
    // has room for all numbers.
    INLINE void stage(int phase) {
        const int warp = threadIdx.x / 32;
        __syncwarp();
        #pragma unroll AT_ONCE
        for (int token = 0; token < ROWS; ++token) {
            float squares = 0.0f;
            #pragma unroll
            for (int i = 0; NORM && i < WARPS; ++i) squares += shared.squares[token * WARPS + i];
            const float inverse = NORM ? rsqrtf(squares / K + EPS) : 1.0f;
            const float peak = shared.peaks[token * WARPS + warp] * inverse;
            const u32 exponent = SCALED_X ? max(__float_as_uint(peak) >> 23, 15u) : 141u;
            const float scale = __uint_as_float((268u - exponent) << 23);
            shared.factor[token * WARPS + warp] = __uint_as_float((exponent - 14u) << 23);
            each(phase, [&](int index, int column) {
                float v[8];
                elements(KEPT ? kept[token * EACH + index] : load(token, column), v);
                if (NORM) normalized(v, index, column, inverse);
                #pragma unroll
                for (int k = 0; k < 8; ++k) v[k] = (NORM ? to_x(v[k]) : v[k]) * scale;
                const int i = (column - phase * PHASE) / 8, in = i % (COLUMNS / 8);
                const int to = i - in + in % CHUNKS * 4 + in / CHUNKS;
                const int next = BITS == 4 ? 4 : 1, every = BITS == 4 ? 1 : 2;
                const uint4 packed = {
                    pack<f16>(v[0], v[next]), pack<f16>(v[every], v[every + next]),
                    pack<f16>(v[2 * every], v[2 * every + next]),
                    pack<f16>(v[3 * every], v[3 * every + next])};
                *(uint4*)(shared.x + token * X_BYTES + 16 * to) = packed;
            });
        }
        __syncwarp();
    }
};

// Sums of a warp: [tile][eight rows of x][...] as mma has them.
typedef float Sums[TILES][TOKENS][4];

// One piece: `x` points to this lane's part of it in shared memory, for every eight rows of x.
INLINE void multiply(const Slot& slot, const unsigned char* const (&x)[TOKENS], int offset,
                     Sums& sums) {
    Sums inner = {};
    Sums& c = GROUPS ? inner : sums;
    u32 zero[TILES][2] = {};
    #pragma unroll
    for (int tile = 0; ZERO && tile < TILES; ++tile)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 code = slot.zero[tile][half] >> (BITS == 4 && slot.odd[tile][half] ? 4 : 0);
            zero[tile][half] = (BITS == 4 ? code & 15u : code) * 0x00010001u;
        }
    #pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        uint4 v[TOKENS];
        #pragma unroll
        for (int n = 0; n < TOKENS; ++n) v[n] = DIRECT ? slot.x[n] : load16(x[n] + offset + 64 * j);
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            u32 low[4], high[4];
            Encoding::pairs(slot.w[tile][0] + BITS / 4 * j, zero[tile][0], low);
            Encoding::pairs(slot.w[tile][1] + BITS / 4 * j, zero[tile][1], high);
            #pragma unroll
            for (int n = 0; n < TOKENS; ++n) {
                mma<Operand>(c[tile][n], low[0], high[0], low[1], high[1], v[n].x, v[n].y);
                mma<Operand>(c[tile][n], low[2], high[2], low[3], high[3], v[n].z, v[n].w);
            }
        }
    }
    if (!GROUPS) return;
    #pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        #pragma unroll
        for (int n = 0; n < TOKENS; ++n)
            #pragma unroll
            for (int k = 0; k < 4; ++k)
                sums[tile][n][k] += (float)slot.scale[tile][k / 2] * inner[tile][n][k];
}

// The sums of a warp into `parts`.
INLINE void share(const Sums& sums, float* parts, const float* factor) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        #pragma unroll
        for (int n = 0; n < TOKENS; ++n)
            #pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int token = 8 * n + 2 * t + k % 2, row = 16 * tile + 8 * (k / 2) + g;
                if (token >= ROWS) continue;
                const float by = SCALED_X ? factor[token * WARPS + warp] : 1.0f;
                parts[(warp * ROWS + token) * SUMS + row] = sums[tile][n][k] * by;
            }
}

INLINE void stream_tiles(const X* x, const G* gain, const Matrix& first, const Matrix& second,
                         const X* residual, X* y, int rows) {
    DYNAMIC_SHARED(unsigned char, memory);
    const Shared shared(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = first_row<BLOCKS>(blockIdx.x), end = first_row<BLOCKS>(blockIdx.x + 1);
    auto mine = [&](int round, int d) { return EVEN || piece_of(round, d) < PIECES; };
    Source source(first, second);
    Slot slots[DEPTH];
    const unsigned char* from[TOKENS];  // this lane's part of x
    auto load_x = [&](Slot& slot, int piece) {
        #pragma unroll
        for (int n = 0; DIRECT && n < TOKENS; ++n) slot.x[n] = load16(from[n] + piece * PIECE);
    };
    allow_next();
    source.enter(begin, end);
    #pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (mine(0, d)) source.load(slots[d], piece_of(0, d));
    Input input{x, gain, rows, shared};
    input.load_gain();
    wait_for_previous();
    if (rows <= 0) return;
    #pragma unroll
    for (int n = 0; n < TOKENS; ++n) {
        const int token = min(8 * n + lane / 4, rows - 1);
        const unsigned char* row = (const unsigned char*)(x + (size_t)token * K);
        from[n] = (DIRECT ? row : shared.x + token * X_BYTES) + 16 * (lane % 4);
    }
    #pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (mine(0, d)) load_x(slots[d], piece_of(0, d));
    if (!DIRECT) input.measure();
    if (!DIRECT && PHASES == 1) input.stage(0);

    constexpr int RESULTS = UNIT * ROWS, MINE = (RESULTS + THREADS - 1) / THREADS;
    #pragma unroll 1
    for (int unit = begin; unit < end; unit += UNIT) {
        Added added[MINE];
        #pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int e = threadIdx.x + i * THREADS, token = e / UNIT, row = unit + e % UNIT;
            if (token < rows && row < end)
                added[i] = load_added(first, second, residual, row, token);
        }
        Sums sums = {};
        #pragma unroll 1
        for (int round = 0; round < ROUNDS; round += DEPTH) {
            const int phase = PHASES > 1 ? round / PHASE_ROUNDS : 0;
            if (PHASES > 1 && round % PHASE_ROUNDS == 0) input.stage(phase);
            const bool last = round + DEPTH == ROUNDS;
            const int next = last ? 0 : round + DEPTH;
            if (last && unit + UNIT < end) source.enter(unit + UNIT, end);
            #pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int in = piece_of(round, d) - phase * PHASE_ROUNDS * WARPS;
                if (mine(round, d)) multiply(slots[d], from, 2 * COLUMNS * in, sums);
                if (last && unit + UNIT >= end) continue;
                if (!mine(next, d)) continue;
                source.load(slots[d], piece_of(next, d));
                load_x(slots[d], piece_of(next, d));
            }
        }
        float* parts = shared.parts + (unit - begin) / UNIT % BUFFERS * (WARPS * ROWS * SUMS);
        share(sums, parts, shared.factor);
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int e = threadIdx.x + i * THREADS, token = e / UNIT, in = e % UNIT;
            const int row = unit + in;
            if (token >= rows || row >= end) continue;
            float value[2] = {};
            #pragma unroll
            for (int half = 0; half < (GATED ? 2 : 1); ++half) {
                const int sum = GATED ? in / 8 * 16 + 8 * half + in % 8 : in;
                const float* part = parts + token * SUMS + sum;
                #pragma unroll
                for (int w = 0; w < WARPS; ++w) value[half] += part[w * ROWS * SUMS];
                value[half] *= Encoding::factor;
            }
            finish(y, row, token, value[0], value[1], added[i]);
        }
        if (BUFFERS == 1) __syncthreads();
    }
}
