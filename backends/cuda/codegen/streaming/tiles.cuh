// y = x W^T for 1 to 16 rows of x, on tensor cores: rows of W are the rows of mma, rows of x its
// columns. W is read in its own layout.
//
// A block has neighbouring rows of W, in tiles of 32 (of GATED, 16 of both matrices). A tile is cut
// into strips of 128 bytes of each row, which go round the warps. Every warp has a ring of STAGES
// strips in shared memory, which it fills itself, so that it waits for no other. x lies in shared
// memory, PHASE columns at a time, in the order in which mma takes it.
template <typename A, typename B> struct Different { static constexpr bool value = true; };
template <typename A> struct Different<A, A> { static constexpr bool value = false; };
typedef Codes<W, Operand> Encoding;
constexpr int THREADS = 32 * WARPS, TILE = 32, OUTPUTS = GATED ? 16 : 32;
constexpr int STRIP = 1024 / BITS;       // columns
constexpr int STEP = 32 * LANE / BITS;   // columns of a row that its four lanes take, LANE bytes each
constexpr int CHUNKS = LANE / BITS;      // of eight columns: what a lane has of a step
constexpr int STEPS = STRIP / STEP, STRIPS = K / STRIP;
constexpr int PHASES = (STRIPS + PHASE_STRIPS - 1) / PHASE_STRIPS, PHASE = PHASE_STRIPS * STRIP;
constexpr int X_BYTES = 2 * PHASE + 64;  // of a row of x; 64, so that rows differ in their banks
constexpr int TOKENS = (ROWS + 7) / 8;   // in eights
constexpr int SCALES = SCALED ? (GROUP < STRIP ? STRIP / GROUP : 1) : 1;  // of a row in a strip
constexpr int SLOT = 128 * TILE + (SCALED ? 4 * TILE * SCALES * (ZERO ? 2 : 1) : 0);
constexpr int SUMS = TILE + 4;           // floats of a row of x in `parts`
constexpr int BUFFERS = ROWS > 4 ? 1 : 2;  // of `parts`; with two, tiles need one barrier only
constexpr bool SCALED_X = Different<X, Operand>::value;  // x is bf16, and f16 in mma
constexpr bool BASE = Encoding::base != 0.0f;

struct Shared {
    unsigned char *x, *rings;
    float *parts, *totals, *inverse, *factor;
    u32* peak;
    INLINE explicit Shared(unsigned char* memory) {
        x = memory;
        rings = x + ROWS * X_BYTES;
        parts = (float*)(rings + WARPS * STAGES * SLOT);   // [BUFFERS][WARPS][ROWS][SUMS]
        inverse = parts + BUFFERS * WARPS * ROWS * SUMS;   // [ROWS]: of the norm
        factor = inverse + ROWS;                           // [ROWS]: of what mma gives
        peak = (u32*)(factor + ROWS);                      // [ROWS]
        totals = (float*)(peak + ROWS);                    // [tiles][ROWS][TILE], of several phases
    }
};

INLINE int strips_of(int phase) { return min(PHASE_STRIPS, STRIPS - phase * PHASE_STRIPS); }

// Fills the ring of a warp, strip by strip in the order in which they are used.
struct Ring {
    const Matrix &first, &second;
    unsigned char* slots;
    int begin, end, tiles;
    int phase = 0, tile = 0, strip, filled = 0;
    float scale[SCALES], zero[SCALES];  // of the strip that was asked for last, of row `lane`
    u64 policy;

    INLINE Ring(const Matrix& first, const Matrix& second, unsigned char* slots, int begin, int end)
        : first(first), second(second), slots(slots), begin(begin), end(end), policy(read_once()) {
        tiles = (end - begin + OUTPUTS - 1) / OUTPUTS;
        if (tiles == 0) phase = PHASES;
        enter(phase);
    }
    INLINE void enter(int next) {  // the first phase from `next` on with strips of this warp
        phase = next, tile = 0, strip = threadIdx.x / 32;
        while (phase < PHASES && strip >= strips_of(phase)) ++phase;
    }
    INLINE void advance() {
        strip += WARPS;
        if (strip < strips_of(phase)) return;
        strip = threadIdx.x / 32;
        if (++tile == tiles) enter(phase + 1);
    }
    INLINE void fill() {
        if (SCALED && filled > 0) keep_scales(filled - 1);
        if (phase < PHASES) {
            copy();
            if (SCALED) load_scales();
            advance();
        }
        commit_copies();
        ++filled;
    }
    INLINE void copy() {
        const int lane = threadIdx.x % 32, chunk = lane % 8, low = lane / 8;
        const size_t column = (size_t)(phase * PHASE_STRIPS + strip) * 128 + 16 * chunk;
        const int row = begin + tile * OUTPUTS + low;
        unsigned char* to = slot(filled) + 128 * low + 16 * (chunk ^ (low & 1) << 2);
        const unsigned char* from = first.codes + (size_t)row * ROW_BYTES + column;
        const unsigned char* other = second.codes + (size_t)row * ROW_BYTES + column;
        #pragma unroll
        for (int j = 0; j < TILE / 4; ++j) {
            const int in = GATED ? j % 4 : j;
            const unsigned char* source = GATED && j >= 4 ? other : from;
            if (row + 4 * in < end) copy16(to + 512 * j, source + (size_t)4 * in * ROW_BYTES, policy);
        }
    }
    INLINE void load_scales() {
        const int lane = threadIdx.x % 32, column = (phase * PHASE_STRIPS + strip) * STRIP;
        const Matrix& matrix = GATED && lane >= 16 ? second : first;
        const int row = min(begin + tile * OUTPUTS + (GATED ? lane % 16 : lane), end - 1);
        const long long at = (long long)(row / ROW_BLOCK) * (K / GROUP) + column / GROUP;
        #pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            scale[i] = load<S>(matrix.scale, at + i) * Encoding::factor;
            if (ZERO) zero[i] = Encoding::base + load<W>(matrix.zero, at + i);
        }
    }
    INLINE void keep_scales(int number) {  // they have arrived by now
        float* to = (float*)(slot(number) + 128 * TILE) + threadIdx.x % 32;
        #pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            to[TILE * i] = scale[i];
            if (ZERO) to[TILE * (SCALES + i)] = zero[i];
        }
    }
    INLINE unsigned char* slot(int number) const { return slots + number % STAGES * SLOT; }
};

// The vectors of eight numbers of x in a phase, for this thread: visit(token, vector).
template <typename Visit> INLINE void each_vector(int phase, int rows, Visit visit) {
    constexpr int EVERY = (PHASE / 8 + 31) / 32 * 32;  // a warp has vectors of one row
    const int vectors = strips_of(phase) * (STRIP / 8);
    #pragma unroll 4
    for (int i = threadIdx.x; i < rows * EVERY; i += THREADS) visit(i / EVERY, i % EVERY, vectors);
}
INLINE void sum_squares(const X* x, int rows, const Shared& shared) {
    const int warp = threadIdx.x / 32;
    for (int token = 0; token < rows; ++token) {
        float squares = 0.0f, v[8];
        #pragma unroll 4
        for (int i = threadIdx.x; i < K / 8; i += THREADS) {
            elements(load16(x + (size_t)token * K + 8 * i), v);
            #pragma unroll
            for (int k = 0; k < 8; ++k) squares += v[k] * v[k];
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) shared.parts[token * WARPS + warp] = squares;
    }
    __syncthreads();
    if (threadIdx.x < rows) {
        float all = 0.0f;
        for (int i = 0; i < WARPS; ++i) all += shared.parts[threadIdx.x * WARPS + i];
        shared.inverse[threadIdx.x] = rsqrtf(all / K + EPS);
    }
    __syncthreads();
}

// One phase of x into shared memory, normalised if asked for.
INLINE void stage_x(const X* x, const G* gain, int rows, int phase, const Shared& shared) {
    auto read = [&](int token, int vector, float (&v)[8]) {
        const int at = phase * PHASE + 8 * vector;
        elements(load16(x + (size_t)token * K + at), v);
        if (!NORM) return;
        normalize(v, gain, at, shared.inverse[token]);
        #pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = to_x(v[k]);
    };
    if (NORM && phase == 0) sum_squares(x, rows, shared);
    if (SCALED_X) {  // by a power of two, so that f16 has room for all numbers of the row
        if (threadIdx.x < ROWS) shared.peak[threadIdx.x] = 0;
        __syncthreads();
        each_vector(phase, rows, [&](int token, int vector, int vectors) {
            float v[8], most = 0.0f;
            if (vector < vectors) {
                read(token, vector, v);
                #pragma unroll
                for (int k = 0; k < 8; ++k) most = fmaxf(most, fabsf(v[k]));
            }
            const u32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
            if (threadIdx.x % 32 == 0) atomicMax(shared.peak + token, bits);
        });
        __syncthreads();
    }
    auto exponent = [&](int token) { return max(shared.peak[token] >> 23, 15u); };
    each_vector(phase, rows, [&](int token, int vector, int vectors) {
        if (vector >= vectors) return;
        float v[8];
        read(token, vector, v);
        if (SCALED_X) {
            const float by = __uint_as_float((268u - exponent(token)) << 23);
            #pragma unroll
            for (int k = 0; k < 8; ++k) v[k] *= by;
        }
        const int in = vector % (STEP / 8), next = BITS == 4 ? 4 : 1, every = BITS == 4 ? 1 : 2;
        const int to = vector - in + in % CHUNKS * 4 + in / CHUNKS;
        uint4 packed = {pack<Operand>(v[0], v[next]), pack<Operand>(v[every], v[every + next]),
                        pack<Operand>(v[2 * every], v[2 * every + next]),
                        pack<Operand>(v[3 * every], v[3 * every + next])};
        *(uint4*)(shared.x + token * X_BYTES + 16 * to) = packed;
    });
    if (threadIdx.x < rows)
        shared.factor[threadIdx.x] =
            SCALED_X ? __uint_as_float((exponent(threadIdx.x) - 14u) << 23) : 1.0f;
    __syncthreads();
}

// Sums of a warp: [half of the tile][eight rows of x][...] as mma has them.
typedef float Sums[2][TOKENS][4];

// One strip: `x` points to this lane's part of it, for every eight rows of x.
INLINE void multiply(const unsigned char* slot, const unsigned char* const (&x)[TOKENS],
                     Sums (&c)[2], Sums& sums) {
    constexpr int EACH = STEPS / SCALES;  // steps of a scale
    constexpr u32 ONES = Different<Operand, f16>::value ? 0x3f803f80u : 0x3c003c00u;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float* scales = (const float*)(slot + 128 * TILE);
    #pragma unroll
    for (int group = 0; group < SCALES; ++group) {
        float ones[TOKENS][4] = {};
        #pragma unroll
        for (int step = group * EACH; step < (group + 1) * EACH; ++step) {
            u32 raw[4][LANE / 4];
            const int at = 4 * LANE * step + LANE * t;
            #pragma unroll
            for (int part = 0; part < 4; ++part) {
                const unsigned char* from = slot + 128 * (8 * part + g) + (at ^ (g & 1) << 6);
                *(Pack<u32, LANE / 4>*)raw[part] = *(const Pack<u32, LANE / 4>*)from;
            }
            #pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
                uint4 v[TOKENS];
                #pragma unroll
                for (int n = 0; n < TOKENS; ++n) v[n] = load16(x[n] + 2 * STEP * step + 64 * j);
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 low[4], high[4];
                    constexpr int WORDS = BITS / 4;
                    Encoding::pairs(raw[2 * half] + WORDS * j, low);
                    Encoding::pairs(raw[2 * half + 1] + WORDS * j, high);
                    #pragma unroll
                    for (int n = 0; n < TOKENS; ++n) {
                        mma<Operand>(c[0][half][n], low[0], high[0], low[1], high[1], v[n].x, v[n].y);
                        mma<Operand>(c[1][half][n], low[2], high[2], low[3], high[3], v[n].z, v[n].w);
                    }
                }
                if (!BASE) continue;
                #pragma unroll
                for (int n = 0; n < TOKENS; ++n) {  // the sums of x, which the base adds too often
                    mma<Operand>(ones[n], ONES, ONES, ONES, ONES, v[n].x, v[n].y);
                    mma<Operand>(ones[n], ONES, ONES, ONES, ONES, v[n].z, v[n].w);
                }
            }
        }
        if (!SCALED) continue;
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int row = 16 * half + 8 * (k / 2) + g;
                const float scale = scales[TILE * group + row];
                const float base = ZERO ? scales[TILE * (SCALES + group) + row] : Encoding::base;
                #pragma unroll
                for (int n = 0; n < TOKENS; ++n) {
                    float sum = c[0][half][n][k] + c[1][half][n][k];
                    if (BASE) sum -= base * ones[n][k % 2];
                    sums[half][n][k] += scale * sum;
                    c[0][half][n][k] = c[1][half][n][k] = 0.0f;
                }
            }
    }
}

// The sums of a warp into `parts`.
INLINE void share(const Sums (&c)[2], const Sums& sums, float* parts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        #pragma unroll
        for (int n = 0; n < TOKENS; ++n)
            #pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int token = 8 * n + 2 * t + k % 2, row = 16 * half + 8 * (k / 2) + g;
                const float sum =
                    SCALED ? sums[half][n][k] : c[0][half][n][k] + c[1][half][n][k];
                if (token < ROWS) parts[(warp * ROWS + token) * SUMS + row] = sum;
            }
}

INLINE void stream_tiles(const X* x, const G* gain, const Matrix& first, const Matrix& second,
                         const X* residual, X* y, int rows) {
    DYNAMIC_SHARED(unsigned char, memory);
    const Shared shared(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = (long long)N * blockIdx.x / gridDim.x;
    const int end = (long long)N * (blockIdx.x + 1) / gridDim.x;
    Ring ring(first, second, shared.rings + warp * STAGES * SLOT, begin, end);
    allow_next();
    prefetch_gain(gain);
    #pragma unroll 1
    for (int i = 0; i < STAGES; ++i) ring.fill();
    wait_for_previous();
    if (rows <= 0) return wait_copies<0>();

    constexpr int RESULTS = OUTPUTS * ROWS, MINE = (RESULTS + THREADS - 1) / THREADS;
    int used = 0;
    const unsigned char* mine[TOKENS];
    #pragma unroll
    for (int n = 0; n < TOKENS; ++n)
        mine[n] = shared.x + min(8 * n + lane / 4, rows - 1) * X_BYTES + 16 * (lane % 4);
    #pragma unroll 1
    for (int phase = 0; phase < PHASES; ++phase) {
        stage_x(x, gain, rows, phase, shared);
        const bool last = phase == PHASES - 1;
        #pragma unroll 1
        for (int tile = 0; tile < ring.tiles; ++tile) {
            Added added[MINE];
            #pragma unroll
            for (int i = 0; i < MINE; ++i) {
                const int e = threadIdx.x + i * THREADS, token = e / OUTPUTS;
                const int row = begin + tile * OUTPUTS + e % OUTPUTS;
                if (last && token < rows && row < end)
                    added[i] = load_added(first, second, residual, row, token);
            }
            Sums c[2] = {}, sums = {};
            #pragma unroll 1
            for (int strip = warp; strip < strips_of(phase); strip += WARPS, ++used) {
                wait_copies<STAGES - 1>();
                __syncwarp();
                const unsigned char* from[TOKENS];
                #pragma unroll
                for (int n = 0; n < TOKENS; ++n) from[n] = mine[n] + 2 * STRIP * strip;
                multiply(ring.slot(used), from, c, sums);
                __syncwarp();
                ring.fill();
            }
            float* parts = shared.parts + tile % BUFFERS * (WARPS * ROWS * SUMS);
            share(c, sums, parts);
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < MINE; ++i) {
                const int e = threadIdx.x + i * THREADS, token = e / OUTPUTS;
                const int row = begin + tile * OUTPUTS + e % OUTPUTS;
                if (token >= rows || row >= end) continue;
                float value[2] = {};
                #pragma unroll
                for (int m = 0; m < (GATED ? 2 : 1); ++m) {
                    const float* from = parts + token * SUMS + 16 * m + e % OUTPUTS;
                    for (int w = 0; w < WARPS; ++w) value[m] += from[w * ROWS * SUMS];
                    value[m] *= shared.factor[token];
                    float* total = shared.totals + (tile * ROWS + token) * TILE + 16 * m;
                    if (PHASES > 1 && phase > 0) value[m] += total[e % OUTPUTS];
                    if (PHASES > 1) total[e % OUTPUTS] = value[m];
                }
                if (last) finish(y, row, token, value[0], value[1], added[i]);
            }
            if (BUFFERS == 1) __syncthreads();
        }
        if (BUFFERS == 2) __syncthreads();
    }
}
