// Sums over the ranks of a group in memory that all of them write: each rank pushes its numbers into
// the memory of every other one, waits for theirs, and adds all of them in the order of ranks, so
// that every rank has the same bits.
//
// Memory that has not come is all ones, which no number sent is (a NaN loses its payload), and words
// of four bytes are written whole: so data is its own flag. Whoever has read a word sets it to ones
// again.
//
// A block meets the blocks of its number on other ranks only, in memory of its own, in two halves
// that take turns. Two halves are enough: rank A writes half h for call n + 2 after A has read what
// B sent in call n + 1, which B sent after its kernel of call n had ended, and that kernel had read
// half h and set it to ones. A block pushes before it waits, and the grid fits on the GPU at once, so
// no rank waits for a block that cannot start.

const int ALL_REDUCE_BLOCKS = 64, ALL_REDUCE_PACKS = 1024;  // at most, and packs of a block at most
const u32 NOT_THERE = 0xffffffffu, TURNS = 1u << 12;  // reads between two looks at `stop`
struct alignas(16) Words { u32 word[4]; };

// What a rank knows of its group: peers.py fills it.
struct Peers {
    const u32* stop;  // in memory of the host, not 0 once the run has failed
    u64 rank;
    Words* memory[8];  // of every rank
    u32 calls[ALL_REDUCE_BLOCKS];  // so far, per block
};

#ifdef EMULATED
INLINE Words read_words(const Words* from) {
    Words found;
    sched_yield();
    for (int w = 0; w < 4; ++w) found.word[w] = __atomic_load_n(&from->word[w], __ATOMIC_SEQ_CST);
    return found;
}
INLINE void write_words(Words* to, const Words& x) {
    for (int w = 0; w < 4; ++w) __atomic_store_n(&to->word[w], x.word[w], __ATOMIC_SEQ_CST);
}
#else
INLINE Words read_words(const Words* from) {
    Words x;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "l"(from) : "memory");
    return x;
}
INLINE void write_words(Words* to, const Words& x) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
                 : "memory");
}
#endif
INLINE bool is_there(const Words& x) {
    bool found = true;
    #pragma unroll
    for (int w = 0; w < 4; ++w) found &= x.word[w] != NOT_THERE;
    return found;
}

// Pack `at` of `count` numbers, 0 behind the last one; no word of it is NOT_THERE.
template <typename T> INLINE Words pack_of(const T* x, ix at, ix count) {
    const int size = 16 / sizeof(T);
    union Both { Words words; Pack<T, size> pack; INLINE Both() {} } found;
    if ((at + 1) * size <= count) {
        found.words = read_words((const Words*)x + at);
    } else {
        #pragma unroll
        for (int k = 0; k < size; ++k)
            found.pack.item[k] = at * size + k < count ? x[at * size + k] : T::of(0.0f);
    }
    #pragma unroll
    for (int w = 0; w < 4; ++w)
        if (found.words.word[w] == NOT_THERE) found.words.word[w] = 0x7fffffffu;
    return found.words;
}

template <int RANKS, bool RESIDUAL, typename T>
INLINE void all_reduce(const T* x, const T* residual, T* out, Peers* peers, ix count) {
    const int size = 16 / sizeof(T);
    union Both { Words words; Pack<T, size> pack; INLINE Both() {} };
    const ix packs = (count + size - 1) / size, each = (packs + gridDim.x - 1) / gridDim.x;
    const ix first = (ix)blockIdx.x * each, mine = packs - first < each ? packs - first : each;
    const u32 call = peers->calls[blockIdx.x], rank = (u32)peers->rank;
    const u32 half = (call & 1) * ALL_REDUCE_BLOCKS + blockIdx.x;
    Words* memory[RANKS];
    #pragma unroll
    for (int r = 0; r < RANKS; ++r)
        memory[r] = peers->memory[r] + (u64)half * RANKS * ALL_REDUCE_PACKS;

    for (ix i = threadIdx.x; i < mine; i += blockDim.x) {
        const Words words = pack_of(x, first + i, count);
        #pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank) write_words(memory[r] + rank * ALL_REDUCE_PACKS + i, words);
    }

    Words* own = memory[0];
    #pragma unroll
    for (int r = 1; r < RANKS; ++r)
        if (r == rank) own = memory[r];
    for (ix i = threadIdx.x; i < mine; i += blockDim.x) {
        const Words kept = pack_of(x, first + i, count);
        Both rest, found[RANKS];
        if (RESIDUAL) rest.words = pack_of(residual, first + i, count);
        bool all = false;
        for (u32 turn = 1; !all; ++turn) {
            all = true;
            #pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                found[r].words = r == rank ? kept : read_words(own + r * ALL_REDUCE_PACKS + i);
                all &= is_there(found[r].words);
            }
            if (turn % TURNS == 0 && *(volatile const u32*)peers->stop) break;
        }
        Both total;
        #pragma unroll
        for (int k = 0; k < size; ++k) {
            float sum = (float)found[0].pack.item[k];
            #pragma unroll
            for (int r = 1; r < RANKS; ++r) sum = add(sum, (float)found[r].pack.item[k]);
            total.pack.item[k] = T::of(sum);
            if (RESIDUAL)
                total.pack.item[k] =
                    T::of(add((float)total.pack.item[k], (float)rest.pack.item[k]));
        }
        if ((first + i + 1) * size <= count) {
            ((Pack<T, size>*)out)[first + i] = total.pack;
        } else {
            #pragma unroll
            for (int k = 0; k < size; ++k)
                if ((first + i) * size + k < count) out[(first + i) * size + k] = total.pack.item[k];
        }
        #pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank)
                write_words(own + r * ALL_REDUCE_PACKS + i,
                            Words{NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE});
    }
    __syncthreads();
    if (threadIdx.x == 0) peers->calls[blockIdx.x] = call + 1;
}
