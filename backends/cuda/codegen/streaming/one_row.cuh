// y = x W^T for one row of x, in 16-bit floats; compute capability 9.0 or newer.
//
// Every warp has neighbouring rows of W (of GATED, of both matrices in turn), and a ring of STAGES
// pieces of PIECE columns in shared memory. Its first lane keeps the ring full with bulk copies, so
// that no warp waits for another.
constexpr int THREADS = 32 * WARPS, SIZE = 2 * PIECE, PIECES = K / PIECE;
constexpr int MATRICES = GATED ? 2 : 1;
constexpr int VECTORS = K / 8, EACH = (VECTORS + THREADS - 1) / THREADS;

// x into shared memory, normalised if asked for.
INLINE void stage_x(const X* x, const G* gain, uint4* to, float* parts) {
    uint4 mine[EACH];
    float squares = 0.0f, v[8];
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = threadIdx.x + i * THREADS;
        if (at < VECTORS) mine[i] = load16(x + 8 * at);
    }
    if (NORM) {
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (threadIdx.x + i * THREADS >= VECTORS) continue;
            elements(mine[i], v);
            #pragma unroll
            for (int k = 0; k < 8; ++k) squares += v[k] * v[k];
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
        __syncthreads();
        squares = 0.0f;
        #pragma unroll
        for (int i = 0; i < WARPS; ++i) squares += parts[i];
    }
    const float inverse = rsqrtf(squares / K + EPS);
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = threadIdx.x + i * THREADS;
        if (at >= VECTORS) continue;
        if (NORM) {
            elements(mine[i], v);
            normalize(v, ((const Pack<G, 8>*)gain)[at], inverse);
            mine[i] = {pack<X>(v[0], v[1]), pack<X>(v[2], v[3]), pack<X>(v[4], v[5]),
                       pack<X>(v[6], v[7])};
        }
        to[at] = mine[i];
    }
    __syncthreads();
}

// Eight products into four sums, so that additions do not wait for each other.
INLINE void add_products(float (&sum)[4], const uint4& w, const uint4& x) {
    float a[8], b[8];
    elements(w, a);
    elements(x, b);
    #pragma unroll
    for (int k = 0; k < 8; ++k) sum[k % 4] += a[k] * b[k];
}

INLINE void stream_row(const X* x, const G* gain, const Matrix& first, const Matrix& second,
                       const X* residual, X* y) {
#if defined(EMULATED) || __CUDA_ARCH__ >= 900
    DYNAMIC_SHARED(unsigned char, memory);
    uint4* input = (uint4*)memory;
    unsigned char* rings = memory + (2 * K + 127) / 128 * 128;
    u64* barriers = (u64*)(rings + WARPS * STAGES * SIZE);
    float* parts = (float*)(barriers + WARPS * STAGES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int me = blockIdx.x * WARPS + warp;
    const int begin = first_row<BLOCKS * WARPS>(me);
    const int mine = first_row<BLOCKS * WARPS>(me + 1) - begin;
    const int total = mine * MATRICES * PIECES;
    unsigned char* ring = rings + warp * STAGES * SIZE;
    u64* barrier = barriers + warp * STAGES;

    size_t offset = (size_t)begin * K * 2;  // of the next copy, in the first or the second matrix
    int piece = 0;
    bool in_second = false;
    u64 policy = 0;
    auto copy = [&](int stage) {
        const unsigned char* from = in_second ? second.codes : first.codes;
        bulk_copy(ring + stage * SIZE, from + offset, SIZE, barrier + stage, policy);
        offset += SIZE;
        if (!GATED || ++piece < PIECES) return;
        piece = 0;
        if (!in_second) offset -= 2 * K;
        in_second = !in_second;
    };
    allow_next();
    if (lane == 0) {
        policy = read_once();
        for (int s = 0; s < STAGES; ++s) barrier_init(barrier + s);
        barriers_visible();
        for (int s = 0; s < STAGES && s < total; ++s) copy(s);
    }
    prefetch_gain(gain);
    wait_for_previous();
    stage_x(x, gain, input, parts);  // its barrier makes those of the ring visible to all lanes

    int stage = 0, used = 0;
    u32 parity = 0;
    Added added;
    #pragma unroll 1
    for (int n = 0; n < mine; ++n) {
        if (n % 32 == 0 && n + lane < mine)  // lane i has what row n + i needs
            added = load_added(first, second, residual, begin + n + lane, 0);
        float sums[2] = {};
        #pragma unroll
        for (int matrix = 0; matrix < MATRICES; ++matrix) {
            float sum[4] = {};
            #pragma unroll 1
            for (int p = 0; p < PIECES; ++p, ++used) {
                barrier_wait(barrier + stage, parity);
                const uint4* w = (const uint4*)(ring + stage * SIZE) + lane;
                const uint4* v = input + p * (PIECE / 8) + lane;
                #pragma unroll
                for (int j = 0; j < PIECE / 8; j += 32) add_products(sum, w[j], v[j]);
                __syncwarp();
                if (lane == 0 && used + STAGES < total) copy(stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            sums[matrix] = warp_sum(sum[0] + sum[1] + sum[2] + sum[3]);
        }
        if (lane == n % 32) finish(y, begin + n, 0, sums[0], sums[1], added);
    }
#endif
}
