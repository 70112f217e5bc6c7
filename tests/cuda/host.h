// What the prelude and the kernels use of CUDA, for a host compiler. A block is one thread, and the
// blocks of a grid run one after the other.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define EMULATED
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __grid_constant__

using std::ceil; using std::copysign; using std::cos; using std::erf; using std::exp;
using std::fabs; using std::floor; using std::fmod; using std::log; using std::log1p;
using std::max; using std::min; using std::pow; using std::rint; using std::sin; using std::sqrt;
using std::tanh;

struct Dim3 { unsigned x, y, z; };
static Dim3 blockIdx = {0, 0, 0}, threadIdx = {0, 0, 0}, blockDim = {1, 1, 1}, gridDim = {1, 1, 1};
static unsigned char* dynamic_shared = nullptr;

template <typename To, typename From> To same_bits(From x) {
    To y;
    static_assert(sizeof x == sizeof y, "as many bits");
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline void __syncthreads() {}
inline void __syncwarp(unsigned mask = 0) {}
inline void __threadfence() {}
template <typename T> T __ldg(const T* p) { return *p; }

template <typename T> T atomicAdd(T* p, T x) { T old = *p; *p = old + x; return old; }
template <typename T> T atomicMax(T* p, T x) { T old = *p; *p = std::max(old, x); return old; }
template <typename T> T atomicMin(T* p, T x) { T old = *p; *p = std::min(old, x); return old; }
template <typename T> T atomicExch(T* p, T x) { T old = *p; *p = x; return old; }
template <typename T> T atomicCAS(T* p, T is, T x) { T old = *p; if (old == is) *p = x; return old; }

// Runs all blocks of a kernel; `arguments` point to its arguments, as for cuLaunchKernel.
template <typename... A, std::size_t... I>
void run_grid(void (*kernel)(A...), const unsigned* grid, void** arguments, unsigned char* shared,
              std::index_sequence<I...>) {
    dynamic_shared = shared;
    gridDim = {grid[0], grid[1], grid[2]};
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0]; ++x) {
                blockIdx = {x, y, z};
                kernel(*(A*)arguments[I]...);
            }
}
template <typename... A>
void run_grid(void (*kernel)(A...), const unsigned* grid, void** arguments, unsigned char* shared) {
    run_grid(kernel, grid, arguments, shared, std::index_sequence_for<A...>());
}
