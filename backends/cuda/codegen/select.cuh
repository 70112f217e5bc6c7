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

// Packs `first` to `until` of `N` elements of a row, which `read` reads. `elements` calls a function
// with each element of a thread and its place, in ascending order, `keys` with its key.
template <typename T, int N, typename Read> struct Slice {
    ix first, until;
    const Read& read;
    template <typename Visit> INLINE void elements(Visit visit) const {
        for (ix at = first + threadIdx.x; at < until; at += 4 * blockDim.x) {
            #pragma unroll
            for (int k = 0; k < 4; ++k) {  // a pack is read again in place of one behind the end
                const ix next = at + k * blockDim.x, pack = next < until ? next : at;
                T x[N];
                read(pack, x);
                #pragma unroll
                for (int i = 0; i < N; ++i)
                    if (next < until) visit(x[i], pack * N + i);
            }
        }
    }
    template <typename Visit> INLINE void keys(Visit visit) const {
        elements([&](T x, ix i) { visit(Key{ordered(x), ~(u32)i}); });
    }
    // The largest of a thread's elements; `least` is not larger than any.
    INLINE Key largest(T least) const {
        T best = least;
        ix place = (first + threadIdx.x) * N;
        elements([&](T x, ix i) {
            const bool more = !(x <= best) && best == best;
            best = more ? x : best;
            place = more ? i : place;
        });
        return {ordered(best), ~(u32)place};
    }
};
// Keys `first` to `until` in memory.
struct Found {
    const i64* value;
    const i32* place;
    ix first, until;
    template <typename Visit> INLINE void keys(Visit visit) const {
        for (ix i = first + threadIdx.x; i < until; i += blockDim.x)
            visit(Key{(u64)load(value, i), (u32)load(place, i)});
    }
};
// Writes the largest of the threads' keys, whose values have `BYTES` bytes.
template <int BYTES> INLINE void keep_largest(Key mine, Key* chosen) {
    if (BYTES == 4) {
        const u64 best = block_reduce(mine.value << 32 | mine.place, Max());
        mine = {best >> 32, (u32)best};
    } else {
        mine = block_reduce(mine, LargerKey());
    }
    if (threadIdx.x == 0) *chosen = mine;
    __syncthreads();
}

// The `count` largest keys of `all`, in any order: the block counts the values of one byte of the
// keys after the other, which tells how the last key that it wants begins.
template <int BYTES, typename Keys>
INLINE void select_largest(int count, const Keys& all, Key* chosen) {
    if (count == 1) {
        Key best = {0, 0};
        all.keys([&](Key key) { best = LargerKey()(best, key); });
        return keep_largest<BYTES>(best, chosen);
    }
    __shared__ int bins[256], groups[16], last, rest, same, found;
    Key begin = {0, 0}, mask = {0, 0};
    for (int byte = BYTES + 3, wanted = count; byte >= 0; --byte) {
        const int shift = 8 * (byte < 4 ? byte : byte - 4);
        for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
        __syncthreads();
        all.keys([&](Key key) {
            const Key m = masked(key, mask);
            if (m.value == begin.value && m.place == begin.place)
                atomicAdd(bins + (int)((byte < 4 ? key.place : key.value) >> shift & 255), 1);
        });
        __syncthreads();
        for (int g = threadIdx.x; g < 16; g += blockDim.x) {
            groups[g] = 0;
            for (int b = 16 * g; b < 16 * g + 16; ++b) groups[g] += bins[b];
        }
        __syncthreads();
        for (int b = threadIdx.x; b < 256; b += blockDim.x) {
            int above = 0;
            for (int other = b + 1; other % 16; ++other) above += bins[other];
            for (int g = b / 16 + 1; g < 16; ++g) above += groups[g];
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
    all.keys([&](Key key) {
        if (!larger(begin, masked(key, mask))) chosen[atomicAdd(&found, 1)] = key;
    });
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
