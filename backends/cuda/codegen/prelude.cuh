// What every kernel starts with: the dtypes in memory, rounding, arithmetic as the operations define
// it, reductions over a block, and the order between kernels. NVRTC compiles it without headers.
// For tests it is also compiled for the host (EMULATED), where a block is one thread.

#ifndef ix
#define ix int  // the type of indices: long long where a value has 2^30 elements or more
#endif
#define INLINE __device__ __forceinline__

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- bits of a float ---------------------------------------------------------------------------

// 2^power as a float, for a power of -126 to 127.
INLINE constexpr u32 power_bits(int power) { return (u32)(127 + power) << 23; }

// The nearest number of `mantissa` bits, halves to even; below 2^normal, the nearest multiple of the
// distance there.
template <int mantissa, int normal> INLINE float rounded(float x) {
    u32 bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return x;
    if (size < power_bits(normal)) {
        float many = x * __uint_as_float(power_bits(mantissa - normal));
        return copysignf(rintf(many) * __uint_as_float(power_bits(normal - mantissa)), x);
    }
    bits += (1u << (22 - mantissa)) - 1u + ((bits >> (23 - mantissa)) & 1u);
    return __uint_as_float(bits & ~((1u << (23 - mantissa)) - 1u));
}

// A float of `width` bits. 2^normal is the least normal number, and `special` the first code that
// is no finite number; `over` is what larger numbers become, `nan` what NaN becomes.
template <int width, int mantissa, int normal, u32 special, u32 over, u32 nan> struct Narrow {
    static const u32 sign = 1u << (width - 1);
    INLINE static float decoded(u32 code) {
        u32 rest = code & (sign - 1u);
        float size = __uint_as_float((rest << (23 - mantissa)) + power_bits(normal - 1));
        if (rest < (1u << mantissa)) size = rest * __uint_as_float(power_bits(normal - mantissa));
        if (rest >= special)
            size = __uint_as_float(rest == over && nan != over ? 0x7f800000u : 0x7fc00000u);
        return code & sign ? -size : size;
    }
    INLINE static u32 encoded(float x) {
        u32 bits = __float_as_uint(rounded<mantissa, normal>(x)), size = bits & 0x7fffffffu;
        u32 code = (size - power_bits(normal - 1)) >> (23 - mantissa);
        if (size < power_bits(normal))
            code = (u32)(__uint_as_float(size) * __uint_as_float(power_bits(mantissa - normal)));
        if (code >= special) code = over;
        if (size > 0x7f800000u) code = nan;
        return code | (bits >> 31 ? sign : 0u);
    }
};
typedef Narrow<16, 10, -14, 0x7c00, 0x7c00, 0x7e00> NarrowF16;
typedef Narrow<8, 3, -6, 0x7f, 0x7f, 0x7f> NarrowF8e4m3;
typedef Narrow<8, 2, -14, 0x7c, 0x7c, 0x7e> NarrowF8e5m2;
#if __CUDA_ARCH__ >= 890
template <> INLINE float NarrowF8e4m3::decoded(u32 code) {
    u32 pair;
    float x;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)code));
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)pair));
    return x;
}
template <> INLINE u32 NarrowF8e4m3::encoded(float x) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return fabsf(x) > 464.0f ? 0x7fu | pair : pair;  // what rounds to more than 448 is NaN
}
#endif
typedef Narrow<4, 1, 0, 8, 7, 0> NarrowF4e2m1;

// ---- dtypes in memory ----------------------------------------------------------------------------
// Each converts to its type in registers, and `of` makes it from that.

template <typename Memory, typename Register> struct Plain {
    typedef Register register_type;
    Memory value;
    INLINE operator Register() const { return (Register)value; }
    INLINE static Plain of(Register x) { return Plain{(Memory)x}; }
};
typedef Plain<double, double> f64;
typedef Plain<float, float> f32;
typedef Plain<long long, long long> i64;
typedef Plain<int, int> i32;
typedef Plain<short, int> i16;
typedef Plain<signed char, int> i8;
typedef Plain<unsigned char, int> u8;

struct alignas(2) bf16 {
    typedef float register_type;
    u16 bits;
    INLINE operator float() const { return __uint_as_float((u32)bits << 16); }
#ifdef EMULATED
    INLINE static bf16 of(float x) {
        u32 b = __float_as_uint(x);
        bool nan = (b & 0x7fffffffu) > 0x7f800000u;
        b = nan ? (b | 0x00400000u) : b + 0x7fffu + ((b >> 16) & 1u);
        return bf16{(u16)(b >> 16)};
    }
#else
    INLINE static bf16 of(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
#endif
};
struct alignas(2) f16 {
    typedef float register_type;
    u16 bits;
#ifdef EMULATED
    INLINE operator float() const { return NarrowF16::decoded(bits); }
    INLINE static f16 of(float x) { return f16{(u16)NarrowF16::encoded(x)}; }
#else
    INLINE operator float() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
    INLINE static f16 of(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
#endif
};
template <typename Format> struct Byte {
    typedef float register_type;
    unsigned char bits;
    INLINE operator float() const { return Format::decoded(bits); }
    INLINE static Byte of(float x) { return Byte{(unsigned char)Format::encoded(x)}; }
};
typedef Byte<NarrowF8e4m3> f8e4m3;
typedef Byte<NarrowF8e5m2> f8e5m2;

// Powers of two only: halves are rounded up; NaN for what is not a positive number in range.
struct f8e8m0 {
    typedef float register_type;
    unsigned char bits;
    INLINE operator float() const {
        u32 b = bits == 0 ? 0x00400000u : bits == 255 ? 0x7fc00000u : (u32)bits << 23;
        return __uint_as_float(b);
    }
    INLINE static f8e8m0 of(float x) {
        u32 b = __float_as_uint(x);
        if (b == 0 || b >= 0x7f800000u) return f8e8m0{255};
        return f8e8m0{(unsigned char)(b <= 0x00400000u ? 0 : (b + 0x00400000u) >> 23)};
    }
};

// Two elements of four bits in a byte, the first in the low half.
struct i4 {
    typedef int register_type;
    unsigned char pair;
    INLINE static int decoded(u32 code) { return (int)(code ^ 8u) - 8; }
    INLINE static u32 encoded(int x) { return (u32)x & 15u; }
};
struct u4 {
    typedef int register_type;
    unsigned char pair;
    INLINE static int decoded(u32 code) { return (int)code; }
    INLINE static u32 encoded(int x) { return (u32)x & 15u; }
};
struct f4e2m1 {
    typedef float register_type;
    unsigned char pair;
    INLINE static float decoded(u32 code) { return NarrowF4e2m1::decoded(code); }
    INLINE static u32 encoded(float x) { return NarrowF4e2m1::encoded(x); }
};

// Several elements in one access.
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T item[N]; };

// ---- loads and stores ----------------------------------------------------------------------------

template <typename T> struct Memory {
    typedef typename T::register_type value;
    template <typename I> INLINE static value load(const T* p, I i) { return (value)p[i]; }
    template <typename I> INLINE static void store(T* p, I i, value x) { p[i] = T::of(x); }
    INLINE static T of(value x) { return T::of(x); }
};
template <> struct Memory<bool> {
    typedef bool value;
    template <typename I> INLINE static value load(const bool* p, I i) {
        return ((const unsigned char*)p)[i] != 0;
    }
    template <typename I> INLINE static void store(bool* p, I i, value x) { p[i] = x; }
    INLINE static bool of(value x) { return x; }
};
template <typename T, typename Register> struct Unsigned {
    typedef Register value;
    template <typename I> INLINE static value load(const T* p, I i) { return (value)p[i]; }
    template <typename I> INLINE static void store(T* p, I i, value x) { p[i] = (T)x; }
    INLINE static T of(value x) { return (T)x; }
};
template <> struct Memory<u16> : Unsigned<u16, int> {};
template <> struct Memory<u32> : Unsigned<u32, u32> {};
template <> struct Memory<u64> : Unsigned<u64, u64> {};
template <typename T> struct Halves {
    typedef typename T::register_type value;
    template <typename I> INLINE static value load(const T* p, I i) {
        return T::decoded(i & 1 ? p[i >> 1].pair >> 4 : p[i >> 1].pair & 15);
    }
    // One half of a byte whose other half another thread may write.
    template <typename I> INLINE static void store(T* p, I i, value x) {
        u64 address = (u64)(p + (i >> 1));
        u32* word = (u32*)(address & ~3ull);
        int shift = (int)(address & 3) * 8 + (int)(i & 1) * 4;
        u32 seen = *word, was;
        do {
            was = seen;
            seen = atomicCAS(word, was, (was & ~(15u << shift)) | (T::encoded(x) << shift));
        } while (seen != was);
    }
};
template <> struct Memory<i4> : Halves<i4> {};
template <> struct Memory<u4> : Halves<u4> {};
template <> struct Memory<f4e2m1> : Halves<f4e2m1> {};

template <typename T, typename I> INLINE typename Memory<T>::value load(const T* p, I i) {
    return Memory<T>::load(p, i);
}
template <typename T, typename I> INLINE void store(T* p, I i, typename Memory<T>::value x) {
    Memory<T>::store(p, i, x);
}

// ---- rounding to a dtype -------------------------------------------------------------------------

INLINE float round_f16(float x) { return f16::of(x); }
INLINE float round_f16(double x) {  // not through float, which would round twice
    if (!(fabs(x) < 65536.0)) return f16::of((float)x);
    double unit = fabs(x) < 0x1p-14 ? 0x1p-24 : 0.0;
    if (unit > 0.0) return (float)(rint(x / unit) * unit);
    u64 bits = (u64)__double_as_longlong(x);
    bits += (1ull << 41) - 1ull + ((bits >> 42) & 1ull);
    return f16::of((float)__longlong_as_double((long long)(bits & ~((1ull << 42) - 1ull))));
}
INLINE float round_bf16(float x) { return bf16::of(x); }
INLINE float round_f8e4m3(float x) { return f8e4m3::of(x); }
INLINE float round_f8e5m2(float x) { return f8e5m2::of(x); }
INLINE float round_f8e8m0(float x) { return f8e8m0::of(x); }
INLINE float round_f4e2m1(float x) { return f4e2m1::decoded(f4e2m1::encoded(x)); }
INLINE int round_i16(int x) { return (short)x; }
INLINE int round_i8(int x) { return (signed char)x; }
INLINE int round_i4(int x) { return i4::decoded(i4::encoded(x)); }
INLINE int round_u16(int x) { return (u16)x; }
INLINE int round_u8(int x) { return (unsigned char)x; }
INLINE int round_u4(int x) { return x & 15; }
template <typename To, typename From> INLINE To bits_as(From x) {
    union { From from; To to; } bits;
    bits.from = x;
    return bits.to;
}

// ---- arithmetic ----------------------------------------------------------------------------------
// Integers wrap around. A product is never contracted with a sum, so that results do not depend on
// what is fused.

INLINE float add(float x, float y) { return __fadd_rn(x, y); }
INLINE double add(double x, double y) { return __dadd_rn(x, y); }
INLINE int add(int x, int y) { return (int)((u32)x + (u32)y); }
INLINE long long add(long long x, long long y) { return (long long)((u64)x + (u64)y); }
INLINE u32 add(u32 x, u32 y) { return x + y; }
INLINE u64 add(u64 x, u64 y) { return x + y; }
INLINE float sub(float x, float y) { return __fadd_rn(x, -y); }
INLINE double sub(double x, double y) { return __dadd_rn(x, -y); }
INLINE int sub(int x, int y) { return (int)((u32)x - (u32)y); }
INLINE long long sub(long long x, long long y) { return (long long)((u64)x - (u64)y); }
INLINE u32 sub(u32 x, u32 y) { return x - y; }
INLINE u64 sub(u64 x, u64 y) { return x - y; }
INLINE float mul(float x, float y) { return __fmul_rn(x, y); }
INLINE double mul(double x, double y) { return __dmul_rn(x, y); }
INLINE int mul(int x, int y) { return (int)((u32)x * (u32)y); }
INLINE long long mul(long long x, long long y) { return (long long)((u64)x * (u64)y); }
INLINE u32 mul(u32 x, u32 y) { return x * y; }
INLINE u64 mul(u64 x, u64 y) { return x * y; }

// NaN where one is NaN.
template <typename T> INLINE T minimum(T x, T y) { return x != x ? x : y != y ? y : y < x ? y : x; }
template <typename T> INLINE T maximum(T x, T y) { return x != x ? x : y != y ? y : x < y ? y : x; }
template <typename T> INLINE T sign(T x) { return x != x ? x : (T)((x > (T)0) - (x < (T)0)); }
template <typename T> INLINE T absolute(T x) { return x < (T)0 ? sub((T)0, x) : x; }
template <> INLINE float absolute(float x) { return fabsf(x); }
template <> INLINE double absolute(double x) { return fabs(x); }

// Division rounded down, and its remainder with the sign of the divisor, as in Python. Integers
// divided by 0 give 0.
template <typename T> INLINE T floor_div_integers(T x, T y) {
    if (y == 0) return 0;
    if (y == -1) return sub((T)0, x);
    return x / y - (T)(x % y != 0 && (x % y < 0) != (y < 0));
}
template <typename T> INLINE T mod_integers(T x, T y) {
    if (y == 0 || y == -1) return 0;
    T rest = x % y;
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}
INLINE int floor_div(int x, int y) { return floor_div_integers(x, y); }
INLINE long long floor_div(long long x, long long y) { return floor_div_integers(x, y); }
INLINE u32 floor_div(u32 x, u32 y) { return y ? x / y : 0; }
INLINE u64 floor_div(u64 x, u64 y) { return y ? x / y : 0; }
INLINE int mod(int x, int y) { return mod_integers(x, y); }
INLINE long long mod(long long x, long long y) { return mod_integers(x, y); }
INLINE u32 mod(u32 x, u32 y) { return y ? x % y : 0; }
INLINE u64 mod(u64 x, u64 y) { return y ? x % y : 0; }
template <typename T> INLINE T mod_floats(T x, T y) {
    T rest = fmod(x, y);
    if (y == (T)0) return rest;
    if (rest == (T)0) return copysign((T)0, y);
    return (rest < (T)0) != (y < (T)0) ? add(rest, y) : rest;
}
template <typename T> INLINE T floor_div_floats(T x, T y) {
    if (y == (T)0) return x / y;
    T rest = fmod(x, y);
    T count = sub(x, rest) / y;
    if (rest != (T)0 && (rest < (T)0) != (y < (T)0)) count = sub(count, (T)1);
    if (count == (T)0) return copysign((T)0, x / y);
    T down = floor(count);
    return sub(count, down) > (T)0.5 ? add(down, (T)1) : down;
}
INLINE float mod(float x, float y) { return mod_floats(x, y); }
INLINE double mod(double x, double y) { return mod_floats(x, y); }
INLINE float floor_div(float x, float y) { return floor_div_floats(x, y); }
INLINE double floor_div(double x, double y) { return floor_div_floats(x, y); }

// A quotient that may be off by two units in the last place.
INLINE float divided_fast(float x, float y) { return __fdividef(x, y); }
INLINE double divided_fast(double x, double y) { return x / y; }

// Functions of floats, in the steps of the operations that they are named for.
template <typename T> INLINE T sigmoid(T x) {  // the exponent is never positive
    T small = exp(-fabs(x));
    return divided_fast(x >= (T)0 ? (T)1 : small, add((T)1, small));
}
template <typename T> INLINE T silu(T x) { return mul(x, sigmoid(x)); }
template <typename T> INLINE T quick_gelu(T x) { return mul(x, sigmoid(mul((T)1.702, x))); }
template <typename T> INLINE T relu(T x) { return maximum(x, (T)0); }
template <typename T> INLINE T squared_relu(T x) { return mul(relu(x), relu(x)); }
template <typename T> INLINE T softplus(T x) { return add(relu(x), log1p(exp(-fabs(x)))); }
template <typename T> INLINE T gelu(T x) {
    return mul(mul((T)0.5, x), add((T)1, erf(mul(x, (T)0.7071067811865476))));
}
template <typename T> INLINE T gelu_tanh(T x) {
    T cube = mul(mul(mul((T)0.044715, x), x), x);
    return mul(mul((T)0.5, x), add((T)1, tanh(mul((T)0.7978845608028654, add(x, cube)))));
}

// ---- reductions over a block ---------------------------------------------------------------------
// A block has one thread, or whole warps. Every thread gets the result; the order is the same in
// every run. Every thread of the block has to call it.

template <typename T, typename Combine> INLINE T block_reduce(T value, Combine combine) {
    if (blockDim.x == 1) return value;
    const int words = (sizeof(T) + 3) / 4;
    union Words { u32 word[words]; T value; INLINE Words() {} };
    #pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        Words mine, other;
        mine.value = value;
        #pragma unroll
        for (int w = 0; w < words; ++w)
            other.word[w] = __shfl_down_sync(0xffffffffu, mine.word[w], step);
        value = combine(value, other.value);
    }
    __shared__ Words parts[32];
    __syncthreads();
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5].value = value;
    __syncthreads();
    value = parts[0].value;
    for (int warp = 1; warp < blockDim.x / 32; ++warp) value = combine(value, parts[warp].value);
    return value;
}
struct Add { template <typename T> INLINE T operator()(T x, T y) const { return add(x, y); } };
struct Mul { template <typename T> INLINE T operator()(T x, T y) const { return mul(x, y); } };
struct Max { template <typename T> INLINE T operator()(T x, T y) const { return maximum(x, y); } };
struct Min { template <typename T> INLINE T operator()(T x, T y) const { return minimum(x, y); } };
template <typename T> INLINE T block_sum(T value) { return block_reduce(value, Add()); }
template <typename T> INLINE T block_max(T value) { return block_reduce(value, Max()); }

// Dynamic shared memory of the block as `type* name`.
#ifndef EMULATED
extern __shared__ __align__(128) unsigned char dynamic_shared[];
#endif
#define DYNAMIC_SHARED(type, name) type* name = (type*)dynamic_shared

// ---- order between kernels -----------------------------------------------------------------------
// With programmatic launch a kernel starts before the one in front of it has ended. It may read what
// no kernel writes in a step before `wait_for_previous`, and everything else after it only; every
// thread calls it, also where it leaves early. `allow_next` lets the next kernel start.

INLINE void wait_for_previous() {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
INLINE void allow_next() {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
