// What a product reads and writes, and what becomes of its sums. X is the type of x and of results.

// The weights of one product, with a scale (and a zero point) per ROW_BLOCK rows and GROUP columns.
struct Matrix {
    const unsigned char* codes;
    const S* scale;
    const W* zero;
    const X* bias;
};
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
// Brings the weight of the norm into the L2 cache; before `wait_for_previous`.
INLINE void prefetch_gain(const G* gain) {
    if (!NORM) return;
    for (int at = threadIdx.x * 128; at < K * (int)sizeof(G); at += blockDim.x * 128)
        prefetch((const char*)gain + at);
}

INLINE float activated(float x) {
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    switch (ACTIVATION) {
        case 0: return x * sigmoid(x);
        case 1: return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
        case 2: return 0.5f * x * (1.0f + tanhf(inner));
        case 3: return x * sigmoid(1.702f * x);
        case 4: return maximum(x, 0.0f);
        case 5: return maximum(x, 0.0f) * maximum(x, 0.0f);
        default: return sigmoid(x);
    }
}
// What one result needs besides its sums; loaded long before it is used.
struct Added { float bias, second_bias, residual, scale, second_scale; };
INLINE Added load_added(const Matrix& first, const Matrix& second, const X* residual, int row,
                        int token) {
    Added found = {0.0f, 0.0f, 0.0f, 1.0f, 1.0f};
    if (SCALED && GROUP == K) found.scale = load<S>(first.scale, row / ROW_BLOCK);
    if (SCALED && GROUP == K && GATED) found.second_scale = load<S>(second.scale, row / ROW_BLOCK);
    if (BIAS) found.bias = load<X>(first.bias, row);
    if (BIAS && GATED) found.second_bias = load<X>(second.bias, row);
    if (RESIDUAL) found.residual = load<X>(residual, (long long)token * N + row);
    return found;
}
// Rounded after every operation that the kernel does for the graph, unless other ranks add to it.
INLINE void finish(X* y, int row, int token, float first, float second, const Added& added) {
    first = first * added.scale + added.bias;
    if (UNROUNDED) return store<f32>((f32*)y, (long long)token * N + row, first);
    float value = to_x(first);
    second = second * added.second_scale + added.second_bias;
    if (GATED) value = to_x(to_x(activated(value)) * to_x(second));
    if (RESIDUAL) value = to_x(value + added.residual);
    store<X>(y, (long long)token * N + row, value);
}
