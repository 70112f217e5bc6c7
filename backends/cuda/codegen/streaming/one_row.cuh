// y = x W^T for one row of x, in 16-bit floats; compute capability 9.0 or newer.
//
// Every warp has rows of W that follow each other in memory, of GATED those of both matrices: a
// stream of bytes. Its first lane keeps a ring of STAGES copies of COPY bytes (of each matrix) full,
// wherever in a row they begin and end, so that no warp waits for another.
//
// A row is summed in CHUNKS of its columns, each by LANES lanes and in the same order whatever K is,
// and then the chunks in pairs: ranks that have half of the columns each compute two subtrees of the
// same tree. What is taken from the ring at once, SEGMENT vectors, is sets of chunks that all lanes
// of a warp sum, or a part of one chunk.
constexpr int THREADS = 32 * WARPS, MATRICES = GATED ? 2 : 1;
constexpr int VECTORS = K / 8, GROUPS = (VECTORS + 31) / 32;  // of eight columns
constexpr int EACH = (VECTORS + THREADS - 1) / THREADS;
constexpr int CHUNK = VECTORS / CHUNKS, SET = 32 / LANES < CHUNKS ? 32 / LANES : CHUNKS;
constexpr int SETS = CHUNKS / SET, TOGETHER = SEGMENT < CHUNK ? 1 : SEGMENT / CHUNK / SET;  // sets
constexpr int RING = STAGES * COPY;  // bytes of one matrix

// The weight of the norm that this thread needs, loaded before x is there.
struct Gain {
    Pack<G, 8> vectors[NORM ? EACH : 1];
    INLINE explicit Gain(const G* gain) {
        #pragma unroll
        for (int i = 0; NORM && i < EACH; ++i) {
            const int at = threadIdx.x + i * THREADS;
            if (at < VECTORS) vectors[i] = ((const Pack<G, 8>*)gain)[at];
        }
    }
};
// The vectors of x that a thread has, normalised. Squares are summed in groups of 32 vectors, in an
// order that does not depend on the number of threads.
INLINE void normalize_all(uint4* mine, const Gain& gain, float* squares) {
    float v[8];
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int group = (threadIdx.x + i * THREADS) / 32;
        if (group >= GROUPS) continue;
        elements(mine[i], v);
        float sum = 0.0f;
        #pragma unroll
        for (int k = 0; k < 8; ++k) sum += v[k] * v[k];
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) squares[group] = sum;
    }
    __syncthreads();
    float total[4] = {};
    #pragma unroll 16
    for (int group = 0; group < GROUPS; ++group) total[group % 4] += squares[group];
    const float inverse = rsqrtf((total[0] + total[1] + total[2] + total[3]) / K + EPS);
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
        elements(mine[i], v);
        normalize(v, gain.vectors[i], inverse);
        mine[i] = {pack<X>(v[0], v[1]), pack<X>(v[2], v[3]), pack<X>(v[4], v[5]),
                   pack<X>(v[6], v[7])};
    }
}
// x into shared memory, normalised if asked for, its words in the order of `add_products`.
INLINE void stage_x(const X* x, const Gain& gain, uint4* to, float* squares) {
    constexpr int MOST = NORM || EACH < 8 ? EACH : 8;  // vectors that are loaded at once
    #pragma unroll 1
    for (int begin = threadIdx.x; begin < THREADS * EACH; begin += MOST * THREADS) {
        uint4 mine[MOST];
        #pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const int at = begin + i * THREADS;
            mine[i] = at < VECTORS ? load16(x + 8 * at) : uint4{0, 0, 0, 0};
        }
        if constexpr (NORM) normalize_all(mine, gain, squares);
        #pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const int at = begin + i * THREADS;
            if (at < VECTORS) to[at] = uint4{mine[i].x, mine[i].z, mine[i].y, mine[i].w};
        }
    }
    __syncthreads();
}

// The products of 32 vectors of w and of x, on tensor cores: what four lanes have is a column of one
// operand and of the other a row, whose second half is row + 8. The diagonals count: rows 0 to 7 of
// the first sums, 8 to 15 of the second.
typedef float Sums[MATRICES][2][4];
INLINE void add_products(float (&sum)[2][4], const uint4& w, const uint4& x) {
    mma<X>(sum[0], x.x, x.y, x.z, x.w, w.x, w.y);
    mma<X>(sum[1], x.x, x.y, x.z, x.w, w.z, w.w);
}
// What a lane has of the diagonals: lane 4 r + r / 2 that of row r, others nothing of use.
INLINE float diagonal(const float (&sum)[2][4]) {
    const float even = sum[0][0] + sum[1][2], odd = sum[0][1] + sum[1][3];
    return threadIdx.x / 4 % 2 ? odd : even;
}
// The sum of a diagonal, neighbours first, for the lanes that have some of it.
INLINE float sum_of(float value) {
    #pragma unroll
    for (int i = 0; i < 3; ++i)  // row r ^ (1 << i)
        value += __shfl_xor_sync(0xffffffffu, value, (4 << i) + i);
    return value;
}
// The sum of SETS numbers in pairs, then pairs of pairs, which come one after the other.
struct Tree {
    float waiting[3], total;  // waiting[i]: the sum of 2^i numbers
    INLINE void add(int number, float value) {
        bool alone = false;
        #pragma unroll
        for (int i = 0; 1 << i < SETS; ++i) {
            if (alone) continue;
            alone = !(number >> i & 1);
            if (alone) waiting[i] = value;
            else value = waiting[i] + value;
        }
        total = value;
    }
};

// The weights of a warp on their way through its ring.
struct Ring {
    unsigned char* memory;  // [MATRICES][RING]
    u64* barriers;          // [MATRICES][STAGES]
    const unsigned char* from[2];
    u64 policy;
    int left;               // bytes of a matrix that no copy has been started for
    int at = 0, ready = 0;  // where the next bytes lie, and how many of those there have come
    int next = 0, done = 0; // the stages that come next, and that are filled again next
    u32 parity = 0;

    INLINE void copy(int stage) {
        const int nbytes = min(COPY, left);
        #pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            unsigned char* to = memory + m * RING + stage * COPY;
            bulk_copy(to, from[m], nbytes, barriers + m * STAGES + stage, policy);
            from[m] += nbytes;
        }
        left -= nbytes;
    }
    INLINE void start() {
        policy = read_once();
        for (int i = 0; i < MATRICES * STAGES; ++i) barrier_init(barriers + i);
        barriers_visible();
        for (int s = 0; s < STAGES && left; ++s) copy(s);
    }
    // Calls `use` once the next NBYTES have come, which are no more than a copy has.
    template <int NBYTES, typename Use> INLINE void take(Use use) {
        static_assert(NBYTES <= COPY, "");
        const int before = ready;
        if (before < NBYTES) {
            #pragma unroll
            for (int m = 0; m < MATRICES; ++m) barrier_wait(barriers + m * STAGES + next, parity);
            if (++next == STAGES) next = 0, parity ^= 1;
            ready += COPY;
        }
        use();
        ready -= NBYTES;
        at += NBYTES;
        if (at >= RING) at -= RING;
        if (ready && (!before || before >= NBYTES)) return;  // the stage is still in use
        __syncwarp();
        if (threadIdx.x % 32 == 0 && left) copy(done);
        if (++done == STAGES) done = 0;
    }
    // Adds the products of COUNT vectors of each chunk of a set, which begins `begin` vectors on in
    // the ring, with those of x.
    template <int COUNT> INLINE void add(const uint4* x, int begin, Sums& sums) const {
        const int lane = threadIdx.x % 32, mine = lane / LANES * CHUNK + lane % LANES;
        #pragma unroll
        for (int first = 0; first < COUNT; first += LANES) {
            const bool real = (SET * LANES == 32 || lane < SET * LANES) &&
                              (first + LANES <= COUNT || lane % LANES < COUNT - first);
            u32 place = at + 16 * (begin + first + mine);
            place = min(place, place - RING);  // of unsigned numbers: behind the end is the start
            uint4 v = {0, 0, 0, 0};
            if (real) v = x[first + mine];
            #pragma unroll
            for (int m = 0; m < MATRICES; ++m) {
                uint4 w = {0, 0, 0, 0};
                if (real) w = load16(memory + m * RING + place);
                add_products(sums[m], w, v);
            }
        }
    }
    // The sums of the next row, for all lanes.
    INLINE void add_row(const uint4* x, float (&total)[2]) {
        Tree trees[MATRICES];
        float last[TOGETHER][MATRICES];  // of which the sums are computed beside the next products
        auto add_last = [&](int set) {
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                #pragma unroll
                for (int m = 0; m < MATRICES; ++m) trees[m].add(set + i, sum_of(last[i][m]));
        };
        #pragma unroll 1
        for (int set = 0; set < SETS; set += TOGETHER) {
            Sums sums[TOGETHER] = {};
            if (SEGMENT < CHUNK) {
                constexpr int PART = SEGMENT < CHUNK ? SEGMENT : CHUNK, REST = CHUNK % PART;
                #pragma unroll 1
                for (int i = 0; i < CHUNK / PART; ++i, x += PART)
                    take<16 * PART>([&] { add<PART>(x, 0, sums[0]); });
                if (REST) take<16 * REST>([&] { add<REST>(x, 0, sums[0]); });
                x += REST;
            } else {
                take<16 * SEGMENT>([&] {
                    #pragma unroll
                    for (int i = 0; i < TOGETHER; ++i, x += SET * CHUNK)
                        add<CHUNK>(x, i * SET * CHUNK, sums[i]);
                });
            }
            if (set) add_last(set - TOGETHER);
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                #pragma unroll
                for (int m = 0; m < MATRICES; ++m) last[i][m] = diagonal(sums[i][m]);
        }
        add_last(SETS - TOGETHER);
        #pragma unroll
        for (int m = 0; m < MATRICES; ++m)
            total[m] = __shfl_sync(0xffffffffu, trees[m].total, 0);
    }
};

INLINE void stream_row(const X* x, const G* gain, const Matrix& first, const Matrix& second,
                       const X* residual, X* y) {
#if defined(EMULATED) || __CUDA_ARCH__ >= 900
    DYNAMIC_SHARED(unsigned char, memory);
    uint4* input = (uint4*)memory;
    unsigned char* rings = memory + (2 * K + 127) / 128 * 128;
    u64* barriers = (u64*)(rings + WARPS * MATRICES * RING);
    float* squares = (float*)(barriers + WARPS * MATRICES * STAGES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int me = blockIdx.x * WARPS + warp;
    const int begin = first_row<BLOCKS * WARPS>(me);
    const int mine = first_row<BLOCKS * WARPS>(me + 1) - begin;

    Ring ring;
    ring.memory = rings + warp * MATRICES * RING;
    ring.barriers = barriers + warp * MATRICES * STAGES;
    ring.from[0] = first.codes + (size_t)begin * K * 2;
    ring.from[1] = second.codes + (size_t)begin * K * 2;
    ring.left = mine * K * 2;
    allow_next();
    if (lane == 0) ring.start();
    const Gain gains(gain);
    wait_for_previous();
    stage_x(x, gains, input, squares);  // its barrier makes those of the rings visible to all lanes

    Added added;
    #pragma unroll 1
    for (int n = 0; n < mine; ++n) {
        if (n % 32 == 0 && n + lane < mine)  // lane i has what row n + i needs
            added = load_added(first, second, residual, begin + n + lane, 0);
        float sums[2] = {};
        ring.add_row(input, sums);
        if (lane == n % 32) finish(y, begin + n, 0, sums[0], sums[1], added);
    }
#endif
}
