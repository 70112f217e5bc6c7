// The heads of new tokens before their attention: rms_norm and rope of queries and keys, and keys
// and values into the caches. A block has one token, a warp one head at a time; a lane has four
// features that turn together. Constants come before: T, D and DV (features of a head of k and v),
// HEADS, KEY_HEADS, NORM, ROPE, INTERLEAVED, ROTARY_DIM, FACTOR, FREQUENCY and WARPS.

constexpr int THREADS = 32 * WARPS, GROUPS_OF_4 = (D + 127) / 128;

struct Angles {
    float cosine[ROTARY_DIM / 2 + 1], sine[ROTARY_DIM / 2 + 1];
};

template <typename Weight>
INLINE void write_head(const Angles& s, const u16* from, u16* to, const Weight* weights) {
    const int lane = threadIdx.x % 32;
    float x[GROUPS_OF_4][4], sum = 0.0f;
    int one[GROUPS_OF_4], two[GROUPS_OF_4];
    #pragma unroll
    for (int n = 0; n < GROUPS_OF_4; ++n) {
        const int i = lane + 32 * n;
        const bool apart = 4 * i < ROTARY_DIM && !INTERLEAVED;
        one[n] = apart ? 2 * i : 4 * i;
        two[n] = apart ? 2 * i + ROTARY_DIM / 2 : 4 * i + 2;
        if (4 * i >= D) continue;
        const u32 first = *(const u32*)(from + one[n]), second = *(const u32*)(from + two[n]);
        x[n][0] = number((u16)first), x[n][1] = number((u16)(first >> 16));
        x[n][2] = number((u16)second), x[n][3] = number((u16)(second >> 16));
        for (int e = 0; e < 4; ++e) sum += x[n][e] * x[n][e];
    }
    const float root = NORM ? root_of(sum_of_warp(sum)) : 1.0f;
    #pragma unroll
    for (int n = 0; n < GROUPS_OF_4; ++n) {
        const int i = lane + 32 * n;
        if (4 * i >= D) continue;
        if (NORM)
            for (int e = 0; e < 4; ++e)
                x[n][e] = (float)normed(x[n][e], root, weights[(e < 2 ? one[n] : two[n]) + e % 2]);
        if (4 * i < ROTARY_DIM) {
            const float *c = s.cosine + 2 * i, *z = s.sine + 2 * i;
            rotate(x[n][0], x[n][INTERLEAVED ? 1 : 2], c[0], z[0]);
            rotate(x[n][INTERLEAVED ? 2 : 1], x[n][3], c[1], z[1]);
        }
        *(u32*)(to + one[n]) = pack<T>(x[n][0], x[n][1]);
        *(u32*)(to + two[n]) = pack<T>(x[n][2], x[n][3]);
    }
}

// The rows of the token that come from q, k and v; `queries` is that of the result, `keys` and
// `values` those of key head 0 in the caches, whose heads are `capacity` rows apart.
template <typename Position, typename Weight>
INLINE void rope_and_cache(
    const u16* q, const u16* k, const u16* v, const Position* position, const Weight* q_norm,
    const Weight* k_norm, u16* queries, u16* keys, u16* values, bool kept, ix capacity
) {
    SHARED(Angles, s);
    if (ROPE) {
        for (int i = threadIdx.x; i < ROTARY_DIM / 2; i += THREADS) {
            const float angle = mul((float)*position, FREQUENCY[i]);
            s.cosine[i] = mul(cos(angle), FACTOR);
            s.sine[i] = mul(sin(angle), FACTOR);
        }
        __syncthreads();
    }
    for (int h = threadIdx.x / 32; h < HEADS + 2 * KEY_HEADS; h += WARPS) {
        const int key = h - HEADS, value = key - KEY_HEADS;
        if (key < 0) {
            write_head(s, q + h * D, queries + h * D, q_norm);
        } else if (kept && value < 0) {
            write_head(s, k + key * D, keys + key * capacity * D, k_norm);
        } else if (kept) {
            for (int i = threadIdx.x % 32 * 2; i < DV; i += 64)
                *(u32*)(values + value * capacity * DV + i) = *(const u32*)(v + value * DV + i);
        }
    }
}
