// What heads of new tokens go through in front of their attention: rms_norm, then rope. Constants
// come before: T (bf16 or f16), D (features of a head), EPS and OFFSET (rms_norm).

INLINE float number(u16 bits) { return (float)T{bits}; }

// The sum of the 32 numbers of a warp, in every lane.
INLINE float sum_of_warp(float x) {
    #pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The root mean square of a head of which the sum of squares is known.
INLINE float root_of(float squares) { return sqrtf(add(squares / D, EPS)); }

template <typename Weight> INLINE T normed(float x, float root, Weight weight) {
    return T::of(mul(x / root, add((float)weight, OFFSET)));
}

// The pair of x and y, rotated.
INLINE float rotated_first(float x, float y, float cosine, float sine) {
    return sub(mul(x, cosine), mul(y, sine));
}
INLINE float rotated_second(float x, float y, float cosine, float sine) {
    return add(mul(y, cosine), mul(x, sine));
}
INLINE void rotate(float& x, float& y, float cosine, float sine) {
    const float before = x;
    x = rotated_first(x, y, cosine, sine);
    y = rotated_second(before, y, cosine, sine);
}
