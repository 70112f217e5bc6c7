// Sums and shards of the ranks of a group in memory that all of them write: each rank pushes its
// numbers into the memory of every other one and waits for theirs. All add them in pairs of ranks,
// then pairs of pairs, so that every rank has the same bits, and those of a rank alone that adds
// chunks of columns in this tree (one_row.cuh).
//
// Words of four bytes are written whole, and one that has not come is all ones, which no rank sends
// (in sums a NaN loses its payload): so data is its own flag. Whoever has read a word sets it to
// ones again.
//
// A block meets the blocks of its number on other ranks only, in memory of its own, in two halves
// that take turns. Two halves are enough: rank A writes half h for call n + 2 after A has read what
// B sent in call n + 1, which B sent after its kernel of call n had ended, and that kernel had read
// half h and set it to ones. A block pushes before it waits, and the grid fits on the GPU at once, so
// no rank waits for a block that cannot start.

const int PEER_BLOCKS = 64, PEER_PACKS = 1024;  // at most, and packs of a block at most
const u32 NOT_THERE = 0xffffffffu, TURNS = 1u << 12;  // reads between two looks at `stop`
struct alignas(16) Words { u32 word[4]; };

// What a rank knows of its group: peers.py fills it.
struct Peers {
    const u32* stop;  // in memory of the host, not 0 once the run has failed
    u64 rank;
    Words* memory[8];  // of every rank
    u32 calls[PEER_BLOCKS];  // so far, per block
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

// One call of a block: its memory on all ranks, and what is sent as number `i` of it.
template <int RANKS> struct Call {
    Peers* peers;
    u32 rank, number;
    Words *memory[RANKS], *own;

    INLINE explicit Call(Peers* all) : peers(all), rank(all->rank), number(all->calls[blockIdx.x]) {
        const u32 block = (number & 1) * PEER_BLOCKS + blockIdx.x;
        #pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            memory[r] = peers->memory[r] + (u64)block * RANKS * PEER_PACKS;
            if (r == rank) own = memory[r];
        }
    }
    INLINE void send(ix i, const Words& x) {
        #pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank) write_words(memory[r] + rank * PEER_PACKS + i, x);
    }
    // What all ranks sent, with `mine` of this one. Once the run has failed, whatever lies there:
    // the step goes on with it, into caches too, and peers.py says why nobody reads them.
    INLINE void receive(ix i, const Words& mine, Words (&found)[RANKS]) {
        bool all = false;
        for (u32 turn = 1; !all; ++turn) {
            all = true;
            #pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                found[r] = r == rank ? mine : read_words(own + r * PEER_PACKS + i);
                all &= is_there(found[r]);
            }
            if (turn % TURNS == 0 && *(volatile const u32*)peers->stop) break;
        }
        #pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank)
                write_words(own + r * PEER_PACKS + i,
                            Words{NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE});
    }
    INLINE void end() {
        __syncthreads();
        if (threadIdx.x == 0) peers->calls[blockIdx.x] = number + 1;
    }
};

// Calls `use(i, number of the pack)` for each of `packs` that a thread of this block has.
template <typename Use> INLINE void each_pack(ix packs, Use use) {
    const ix each = (packs + gridDim.x - 1) / gridDim.x, first = (ix)blockIdx.x * each;
    const ix count = packs - first < each ? packs - first : each;
    for (ix i = threadIdx.x; i < count; i += blockDim.x) use(i, first + i);
}

// ---- sums ----------------------------------------------------------------------------------------

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

// Sums of T, rounded to R before the residual is added.
template <int RANKS, bool RESIDUAL, typename T, typename R>
INLINE void all_reduce(const T* x, const R* residual, R* out, Peers* peers, ix count) {
    const int size = 16 / sizeof(T);
    typedef Pack<R, size> Results;
    const ix packs = (count + size - 1) / size;
    Call<RANKS> call(peers);
    each_pack(packs, [&](ix i, ix at) { call.send(i, pack_of(x, at, count)); });
    each_pack(packs, [&](ix i, ix at) {
        const bool whole = (at + 1) * size <= count;
        union Both { Words words; Pack<T, size> pack; INLINE Both() {} } part;
        Words found[RANKS];
        Results rest, total;
        const Words mine = pack_of(x, at, count);
        if (RESIDUAL && whole) rest = ((const Results*)residual)[at];
        call.receive(i, mine, found);
        float sums[RANKS][size];
        #pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            part.words = found[r];
            #pragma unroll
            for (int k = 0; k < size; ++k) sums[r][k] = (float)part.pack.item[k];
        }
        #pragma unroll
        for (int step = 1; step < RANKS; step *= 2)
            #pragma unroll
            for (int r = 0; r + step < RANKS; r += 2 * step)
                #pragma unroll
                for (int k = 0; k < size; ++k) sums[r][k] = add(sums[r][k], sums[r + step][k]);
        #pragma unroll
        for (int k = 0; k < size; ++k) {
            const ix place = at * size + k;
            R& item = total.item[k];
            item = R::of(sums[0][k]);
            if (RESIDUAL && !whole && place < count) rest.item[k] = residual[place];
            if (RESIDUAL) item = R::of(add((float)item, (float)rest.item[k]));
            if (!whole && place < count) out[place] = item;
        }
        if (whole) ((Results*)out)[at] = total;
    });
    call.end();
}

// ---- shards of all ranks, one behind the other ---------------------------------------------------
// `count` numbers of four bytes each, which may be any: a word has half of one.

template <int RANKS> INLINE void all_gather(const volatile u32* x, u32* out, Peers* peers, ix count) {
    Call<RANKS> call(peers);
    auto halves = [&](ix at) {
        const u32 first = x[2 * at], second = 2 * at + 1 < count ? x[2 * at + 1] : 0;
        return Words{first & 0xffffu, first >> 16, second & 0xffffu, second >> 16};
    };
    each_pack((count + 1) / 2, [&](ix i, ix at) { call.send(i, halves(at)); });
    each_pack((count + 1) / 2, [&](ix i, ix at) {
        Words found[RANKS];
        call.receive(i, halves(at), found);
        #pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            u32* to = out + (long long)r * count + 2 * at;
            to[0] = found[r].word[0] | found[r].word[1] << 16;
            if (2 * at + 1 < count) to[1] = found[r].word[2] | found[r].word[3] << 16;
        }
    });
    call.end();
}
