// Attention by one block: `ROWS` queries that share the keys `low` to `high` - 1, with a softmax
// that is corrected as larger scores appear (online softmax). query(row, d), key(j, d) and
// value(j, c) are elements; visible(row, j) and change(row, j, product) are about one score.

const int ACROSS = 16, KEYS = 32, CHUNK = 32;

// kept: whether the queries stay in shared memory; else they are read again for every tile of keys.
template <typename R, int ROWS, int D, int DV, bool kept> struct Attention {
    static const int OWN = ROWS / (THREADS / ACROSS), PAIR = KEYS / ACROSS;
    static const int COLUMNS = (DV + ACROSS - 1) / ACROSS, WIDE = COLUMNS * ACROSS;
    static const int ROOM = KEYS * (CHUNK + 1), FIT = ROOM / WIDE > 0 ? ROOM / WIDE : 1;
    static const int VALUES = FIT < KEYS ? FIT : KEYS;  // rows of v in shared memory
    static const int QUERY = (kept ? D : CHUNK) + 1;
    struct Shared {
        R query[ROWS][QUERY], keys[ROOM > VALUES * WIDE ? ROOM : VALUES * WIDE];
        R weights[ROWS][KEYS], top[ROWS], fade[ROWS];
    };
    struct Own {  // of every thread
        R sums[OWN][COLUMNS], total[OWN], scores[OWN][PAIR];
    };
    Shared& shared;
    Own own[SLOTS];

    INLINE static R infinity() { return (R)__uint_as_float(0x7f800000u); }
    INLINE static R base(R top) { return top == -infinity() ? (R)0 : top; }
    INLINE static int row_of(int slot, int i) {
        return (threadIdx.x + slot * STEP) / ACROSS * OWN + i;
    }
    INLINE static int column_of(int slot, int c) {
        return (threadIdx.x + slot * STEP) % ACROSS + c * ACROSS;
    }

    template <class Query> INLINE void read_queries(int d0, ix rows, Query query) {
        const int count = QUERY - 1;
        for (int e = threadIdx.x; e < ROWS * count; e += STEP) {
            int row = e / count, d = e % count;
            shared.query[row][d] = row < rows && d0 + d < D ? query((ix)row, (ix)(d0 + d)) : (R)0;
        }
    }

    template <class Query, class Key>
    INLINE void products(ix j0, ix rows, ix high, Query query, Key key) {
        for (int slot = 0; slot < SLOTS; ++slot)
            #pragma unroll
            for (int i = 0; i < OWN; ++i)
                #pragma unroll
                for (int c = 0; c < PAIR; ++c) own[slot].scores[i][c] = 0;
        for (int d0 = 0; d0 < D; d0 += CHUNK) {
            if (!kept) read_queries(d0, rows, query);
            #pragma unroll
            for (int e = threadIdx.x; e < KEYS * CHUNK; e += STEP) {
                int j = e / CHUNK, d = e % CHUNK;
                shared.keys[j * (CHUNK + 1) + d] =
                    j0 + j < high && d0 + d < D ? key(j0 + j, (ix)(d0 + d)) : (R)0;
            }
            __syncthreads();
            const int first = kept ? d0 : 0, count = D - d0 < CHUNK ? D - d0 : CHUNK;
            for (int slot = 0; slot < SLOTS; ++slot)
                for (int d = 0; d < count; ++d)
                    #pragma unroll
                    for (int c = 0; c < PAIR; ++c) {
                        R k = shared.keys[column_of(slot, c) * (CHUNK + 1) + d];
                        #pragma unroll
                        for (int i = 0; i < OWN; ++i)
                            own[slot].scores[i][c] += shared.query[row_of(slot, i)][first + d] * k;
                    }
            __syncthreads();
        }
    }

    // Scores become weights relative to the largest score so far; earlier sums fade with it.
    template <class Visible, class Change>
    INLINE void weigh(ix j0, ix rows, ix high, Visible visible, Change change) {
        for (int slot = 0; slot < SLOTS; ++slot)
            #pragma unroll
            for (int i = 0; i < OWN; ++i)
                #pragma unroll
                for (int c = 0; c < PAIR; ++c) {
                    int row = row_of(slot, i), j = column_of(slot, c);
                    R& s = own[slot].scores[i][c];
                    bool seen = row < rows && j0 + j < high && visible((ix)row, j0 + j);
                    s = seen ? change((ix)row, j0 + j, s) : -infinity();
                    shared.weights[row][j] = s;
                }
        __syncthreads();
        for (int row = threadIdx.x; row < ROWS; row += STEP) {
            R top = shared.top[row];
            for (int j = 0; j < KEYS; ++j) {  // from another place in every row, for its bank
                R s = shared.weights[row][(j + row) % KEYS];
                top = s > top ? s : top;
            }
            shared.fade[row] = exp(shared.top[row] - base(top));
            shared.top[row] = top;
        }
        __syncthreads();
        for (int slot = 0; slot < SLOTS; ++slot)
            #pragma unroll
            for (int i = 0; i < OWN; ++i) {
                int row = row_of(slot, i);
                R fade = shared.fade[row], top = base(shared.top[row]);
                own[slot].total[i] *= fade;
                #pragma unroll
                for (int c = 0; c < COLUMNS; ++c) own[slot].sums[i][c] *= fade;
                #pragma unroll
                for (int c = 0; c < PAIR; ++c)
                    shared.weights[row][column_of(slot, c)] = exp(own[slot].scores[i][c] - top);
            }
    }

    template <class Value> INLINE void add_values(ix j0, ix high, Value value) {
        for (int first = 0; first < KEYS; first += VALUES) {
            #pragma unroll
            for (int e = threadIdx.x; e < VALUES * WIDE; e += STEP) {
                int j = first + e / WIDE, c = e % WIDE;
                bool inside = j < KEYS && j0 + j < high && c < DV;
                shared.keys[e] = inside ? value(j0 + j, (ix)c) : (R)0;
            }
            __syncthreads();
            const int count = KEYS - first < VALUES ? KEYS - first : VALUES;
            for (int slot = 0; slot < SLOTS; ++slot)
                for (int j = 0; j < count; ++j)
                    #pragma unroll
                    for (int i = 0; i < OWN; ++i) {
                        R weight = shared.weights[row_of(slot, i)][first + j];
                        if (weight == (R)0) continue;  // the value of such a key may be NaN
                        own[slot].total[i] += weight;
                        const R* row = shared.keys + j * WIDE;
                        #pragma unroll
                        for (int c = 0; c < COLUMNS; ++c)
                            own[slot].sums[i][c] += weight * row[column_of(slot, c)];
                    }
            __syncthreads();
        }
    }

    template <class Query, class Key, class Value, class Visible, class Change, class Out>
    INLINE void run(
        ix rows, ix low, ix high, Query query, Key key, Value value, Visible visible, Change change,
        Out out
    ) {
        for (int slot = 0; slot < SLOTS; ++slot) own[slot] = Own{};
        for (int row = threadIdx.x; row < ROWS; row += STEP) shared.top[row] = -infinity();
        if (kept) read_queries(0, rows, query);
        __syncthreads();
        for (ix j0 = low; j0 < high; j0 += KEYS) {
            products(j0, rows, high, query, key);
            weigh(j0, rows, high, visible, change);
            add_values(j0, high, value);
        }
        for (int slot = 0; slot < SLOTS; ++slot)
            #pragma unroll
            for (int i = 0; i < OWN; ++i) {
                R total = own[slot].total[i];
                #pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    int row = row_of(slot, i), column = column_of(slot, c);
                    R sum = own[slot].sums[i][c];
                    if (row < rows && column < DV)
                        out((ix)row, (ix)column, total > (R)0 ? sum / total : sum);
                }
            }
    }
};
