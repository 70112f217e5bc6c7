// What a product reads and writes, and what becomes of its sums. X is the type of x and of results;
// `activated` is the activation of the first sum, if any (ACTIVATED).

// The weights of one product, with a scale (and a zero point) per ROW_BLOCK rows and GROUP columns.
struct Matrix {
    const unsigned char* codes;
    const S* scale;
    const W* zero;
    const X* bias;
};
// The first row of W that one of PARTS workers has, who have as many each, or one more.
template <int PARTS> INLINE int first_row(int part) {
    return N / PARTS * part + min(part, N % PARTS);
}
INLINE float to_x(float value) { return X::of(value); }
INLINE void elements(const uint4& words, float (&x)[8]) {
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
        x[2 * k] = X{(u16)word(words, k)};
        x[2 * k + 1] = X{(u16)(word(words, k) >> 16)};
    }
}
// rms_norm of eight numbers, for 1 / sqrt(mean(x^2) + EPS).
INLINE void normalize(float (&x)[8], const Pack<G, 8>& gains, float inverse) {
    #pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = x[k] * inverse * ((float)gains.item[k] + GAIN_OFFSET);
}
// What one result needs besides its sums; loaded long before it is used, and converted then, so
// that nothing waits for it.
struct Added { X bias[2], residual; S scale[2]; };
INLINE Added load_added(const Matrix& first, const Matrix& second, const X* residual, int row,
                        int token) {
    Added found;
    #pragma unroll
    for (int i = 0; i < (GATED ? 2 : 1); ++i) {
        const Matrix& matrix = i ? second : first;
        if (BIAS) found.bias[i] = matrix.bias[row];
        if (SCALED && GROUP == K) found.scale[i] = matrix.scale[row / ROW_BLOCK];
    }
    if (RESIDUAL) found.residual = residual[(size_t)token * N + row];
    return found;
}
// Rounded after every operation that the kernel does for the graph, unless other ranks add to it.
INLINE void finish(X* y, int row, int token, float first, float second, const Added& added) {
    if (SCALED && GROUP == K) first *= added.scale[0], second *= added.scale[1];
    if (BIAS) first += added.bias[0], second += added.bias[1];
    if (UNROUNDED) return store<f32>((f32*)y, (long long)token * N + row, first);
    float value = to_x(first);
    if (ACTIVATED) value = to_x(activated(value));
    if (GATED) value = to_x(value * to_x(second));
    if (RESIDUAL) value = to_x(value + added.residual);
    store<X>(y, (long long)token * N + row, value);
}
