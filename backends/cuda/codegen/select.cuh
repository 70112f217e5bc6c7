// The largest of many elements, by keys: larger elements have larger keys, and of equal ones the
// first has.
struct Key { u64 value; u32 place; };  // `place` is ~i of element i
INLINE bool larger(const Key& a, const Key& b) {
    return a.value > b.value || (a.value == b.value && a.place > b.place);
}
struct LargerKey {
    INLINE Key operator()(const Key& a, const Key& b) const { return larger(a, b) ? a : b; }
};
INLINE Key masked(const Key& a, const Key& mask) { return {a.value & mask.value, a.place & mask.place}; }

// NaN has the largest key, as in numpy; both zeros have one.
INLINE u64 ordered(float x) {
    const u32 bits = __float_as_uint(x == 0 ? 0.0f : x);
    return x != x ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
}
INLINE u64 ordered(double x) {
    const u64 bits = (u64)__double_as_longlong(x == 0 ? 0.0 : x);
    return x != x ? ~0ull : bits >> 63 ? ~bits : bits | 1ull << 63;
}
INLINE u64 ordered(int x) { return (u32)x ^ 1u << 31; }
INLINE u64 ordered(u32 x) { return x; }
INLINE u64 ordered(u64 x) { return x; }
INLINE u64 ordered(long long x) { return (u64)x ^ 1ull << 63; }

// The `count` largest of key(i) for i from `first` on, in any order: the block counts the values of
// one byte of the keys after the other, which tells how the last key that it wants begins.
template <int BYTES, typename KeyOf>
INLINE void select_largest(int count, ix first, ix until, KeyOf key, Key* chosen) {
    if (count == 1) {
        Key best = {0, 0};
        for (ix i = first + threadIdx.x; i < until; i += blockDim.x) best = LargerKey()(best, key(i));
        best = block_reduce(best, LargerKey());
        if (threadIdx.x == 0) *chosen = best;
        return __syncthreads();
    }
    __shared__ int bins[256], last, rest, same, found;
    Key begin = {0, 0}, mask = {0, 0};
    for (int byte = BYTES + 3, wanted = count; byte >= 0; --byte) {
        const int shift = 8 * (byte < 4 ? byte : byte - 4);
        for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
        __syncthreads();
        for (ix i = first + threadIdx.x; i < until; i += blockDim.x) {
            const Key k = key(i), m = masked(k, mask);
            if (m.value == begin.value && m.place == begin.place)
                atomicAdd(bins + (int)((byte < 4 ? k.place : k.value) >> shift & 255), 1);
        }
        __syncthreads();
        for (int b = threadIdx.x; b < 256; b += blockDim.x) {
            int above = 0;
            for (int other = b + 1; other < 256; ++other) above += bins[other];
            if (above >= wanted || above + bins[b] < wanted) continue;
            last = b;
            rest = wanted - above;
            same = bins[b];
        }
        __syncthreads();
        if (byte < 4) begin.place |= (u32)last << shift, mask.place |= 255u << shift;
        else begin.value |= (u64)last << shift, mask.value |= 255ull << shift;
        wanted = rest;
        if (wanted == same) break;
    }
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    for (ix i = first + threadIdx.x; i < until; i += blockDim.x) {
        const Key k = key(i);
        if (!larger(begin, masked(k, mask))) chosen[atomicAdd(&found, 1)] = k;
    }
    __syncthreads();
}

// How many of the chosen keys are larger than number i.
INLINE int rank_of(int i, int count, const Key* chosen) {
    int rank = 0;
    for (int j = 0; j < count; ++j) rank += larger(chosen[j], chosen[i]);
    return rank;
}

// Whether the block comes here as the last of `parts`; `arrived` is 0 before the first of them and
// behind the last, which reads what the others wrote.
INLINE bool is_last_block(int* arrived, int parts) {
    __shared__ int is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1) == parts - 1;
    __syncthreads();
    if (!is_last) return false;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    return true;
}
