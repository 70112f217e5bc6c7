// The heads of new tokens before their attention: rms_norm and rope of queries and keys, and keys
// and values into the caches. A block has one token, a warp one head at a time; a lane has four
// features that turn together. Constants come before: T, D and DV (features of a head of k and v),
// HEADS, KEY_HEADS, NORM, EPS, OFFSET, ROPE, INTERLEAVED, TURNED, FACTOR, FREQUENCY and WARPS.

constexpr int THREADS = 32 * WARPS, FOURS = (D + 127) / 128;

struct Angles {
    float cosine[TURNED / 2 + 1], sine[TURNED / 2 + 1];
};

INLINE float low(u32 pair) { return (float)T{(u16)pair}; }
INLINE float high(u32 pair) { return (float)T{(u16)(pair >> 16)}; }

// Turns the pair of x and y.
INLINE void turn(const Angles& s, int pair, float& x, float& y) {
    const float c = s.cosine[pair], n = s.sine[pair], left = x;
    x = sub(mul(x, c), mul(y, n));
    y = add(mul(y, c), mul(left, n));
}

template <typename Gain>
INLINE void write_head(const Angles& s, const u16* from, u16* to, const Gain* gain) {
    const int lane = threadIdx.x % 32;
    float x[FOURS][4], sum = 0.0f;
    int one[FOURS], two[FOURS];
    #pragma unroll
    for (int n = 0; n < FOURS; ++n) {
        const int i = lane + 32 * n;
        const bool apart = 4 * i < TURNED && !INTERLEAVED;
        one[n] = apart ? 2 * i : 4 * i;
        two[n] = apart ? 2 * i + TURNED / 2 : 4 * i + 2;
        if (4 * i >= D) continue;
        const u32 first = *(const u32*)(from + one[n]), second = *(const u32*)(from + two[n]);
        x[n][0] = low(first), x[n][1] = high(first), x[n][2] = low(second), x[n][3] = high(second);
        for (int e = 0; e < 4; ++e) sum += x[n][e] * x[n][e];
    }
    if (NORM)
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float root = sqrtf(add(sum / D, EPS));
    #pragma unroll
    for (int n = 0; n < FOURS; ++n) {
        const int i = lane + 32 * n;
        if (4 * i >= D) continue;
        if (NORM)
            for (int e = 0; e < 4; ++e) {
                const float weight = add((float)gain[(e < 2 ? one[n] : two[n]) + e % 2], OFFSET);
                x[n][e] = (float)T::of(mul(x[n][e] / root, weight));
            }
        if (4 * i < TURNED) {
            turn(s, 2 * i, x[n][0], x[n][INTERLEAVED ? 1 : 2]);
            turn(s, 2 * i + 1, x[n][INTERLEAVED ? 2 : 1], x[n][3]);
        }
        *(u32*)(to + one[n]) = pack<T>(x[n][0], x[n][1]);
        *(u32*)(to + two[n]) = pack<T>(x[n][2], x[n][3]);
    }
}

// The rows of the token that come from q, k and v; `queries` is that of the result, `keys` and
// `values` those of key head 0 in the caches, whose heads are `capacity` rows apart.
template <typename Position, typename Gain>
INLINE void head_rows(
    const u16* q, const u16* k, const u16* v, const Position* position, const Gain* q_gain,
    const Gain* k_gain, u16* queries, u16* keys, u16* values, bool kept, ix capacity
) {
    SHARED(Angles, s);
    if (ROPE) {
        for (int i = threadIdx.x; i < TURNED / 2; i += THREADS) {
            const float angle = mul((float)*position, FREQUENCY[i]);
            s.cosine[i] = mul(cos(angle), FACTOR);
            s.sine[i] = mul(sin(angle), FACTOR);
        }
        __syncthreads();
    }
    for (int h = threadIdx.x / 32; h < HEADS + 2 * KEY_HEADS; h += WARPS) {
        const int key = h - HEADS, value = key - KEY_HEADS;
        if (key < 0) {
            write_head(s, q + h * D, queries + h * D, q_gain);
        } else if (kept && value < 0) {
            write_head(s, k + key * D, keys + key * capacity * D, k_gain);
        } else if (kept) {
            for (int i = threadIdx.x % 32 * 2; i < DV; i += 64)
                *(u32*)(values + value * capacity * DV + i) = *(const u32*)(v + value * DV + i);
        }
    }
}
