// What the prelude and the kernels use of CUDA, for a host compiler. The blocks of a grid run one
// after the other, those of a cluster together. A block is one thread; where THREADED is defined it
// has those of the launch, which take turns whenever they wait for each other.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <sched.h>
#include <ucontext.h>
#include <utility>
#include <vector>

#define EMULATED
#ifndef THREADED
#define ONE_THREAD
#endif
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
inline float __fdividef(float x, float y) { return x / y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }

// A thread: where it stands, and how often it has waited for its block, its warp and its cluster.
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    unsigned thread;
    Dim3 block;
    unsigned blocks, warps, clusters;
    bool ended;
    unsigned long long given[3];  // what it gives to other threads of its warp
};
static std::vector<Fiber> fibers;  // of all blocks that run together
static unsigned current = 0;
static ucontext_t host_context;

// Lets others run until `count` threads from `first` on have waited as often as this one.
inline void wait_for(unsigned Fiber::*times, unsigned first, unsigned count) {
    unsigned me = current, mine = fibers[me].*times;
    for (unsigned other = first; other < first + count && other < fibers.size();)
        if (fibers[other].ended || fibers[other].*times >= mine)
            ++other;
        else
            swapcontext(&fibers[me].context, &host_context);
}
inline void __syncthreads() {
    if (blockDim.x == 1) return;
    ++fibers[current].blocks;
    wait_for(&Fiber::blocks, current - threadIdx.x, blockDim.x);
}
inline void __syncwarp(unsigned mask = 0) {
    if (blockDim.x == 1) return;
    ++fibers[current].warps;
    unsigned lane = threadIdx.x % 32;
    wait_for(&Fiber::warps, current - lane, min(32u, blockDim.x - threadIdx.x + lane));
}
template <typename T> T from_lane(T x, unsigned lane) {
    unsigned first = current - threadIdx.x % 32;
    std::memcpy(fibers[current].given, &x, sizeof x);
    __syncwarp();
    if (lane < 32) std::memcpy(&x, fibers[first + lane].given, sizeof x);
    __syncwarp();
    return x;
}
template <typename T> T __shfl_down_sync(unsigned, T x, unsigned step) {
    return from_lane(x, threadIdx.x % 32 + step);
}
template <typename T> T __shfl_xor_sync(unsigned, T x, unsigned step) {
    return from_lane(x, threadIdx.x % 32 ^ step);
}
template <typename T> T __shfl_sync(unsigned, T x, unsigned lane) { return from_lane(x, lane); }
inline void __threadfence() {}
template <typename T> T __ldg(const T* p) { return *p; }

template <typename T> T atomicAdd(T* p, T x) { T old = *p; *p = old + x; return old; }
template <typename T> T atomicMax(T* p, T x) { T old = *p; *p = std::max(old, x); return old; }
template <typename T> T atomicMin(T* p, T x) { T old = *p; *p = std::min(old, x); return old; }
template <typename T> T atomicExch(T* p, T x) { T old = *p; *p = x; return old; }
template <typename T> T atomicCAS(T* p, T is, T x) { T old = *p; if (old == is) *p = x; return old; }

// Runs all blocks of a kernel; `arguments` point to its arguments, as for cuLaunchKernel.
template <typename... A> struct Call {
    static void (*kernel)(A...);
    static void** arguments;
    template <std::size_t... I> static void once(std::index_sequence<I...>) {
        kernel(*(A*)arguments[I]...);
    }
    static void once() { once(std::index_sequence_for<A...>()); }
    static void as_fiber() {
        once();
        fibers[current].ended = true;
        setcontext(&host_context);
    }
    static void together(Dim3 first, unsigned blocks, unsigned threads) {
        const unsigned room = 1 << 17;
        fibers.resize(blocks * threads);
        for (unsigned i = 0; i < fibers.size(); ++i) {
            Fiber& each = fibers[i];
            getcontext(&each.context);
            if (!each.stack) each.stack.reset(new char[room]);
            each.thread = i % threads;
            each.block = {first.x + i / threads, first.y, first.z};
            each.blocks = each.warps = each.clusters = each.ended = 0;
            each.context.uc_stack.ss_sp = each.stack.get();
            each.context.uc_stack.ss_size = room;
            makecontext(&each.context, as_fiber, 0);
        }
        for (bool running = true; running;) {
            running = false;
            for (current = 0; current < fibers.size(); ++current)
                if (!fibers[current].ended) {
                    running = true;
                    threadIdx.x = fibers[current].thread;
                    blockIdx = fibers[current].block;
                    swapcontext(&host_context, &fibers[current].context);
                }
        }
        threadIdx.x = current = 0;
    }
};
template <typename... A> void (*Call<A...>::kernel)(A...);
template <typename... A> void** Call<A...>::arguments;

template <typename... A>
void run_grid(void (*kernel)(A...), const unsigned* grid, unsigned threads, void** arguments,
              unsigned char* shared, bool cluster = false) {
    typedef Call<A...> call;
    call::kernel = kernel;
    call::arguments = arguments;
    dynamic_shared = shared;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0]; x += cluster ? grid[0] : 1) {
                blockIdx = {x, y, z};
                if (threads == 1)
                    call::once();
                else
                    call::together(blockIdx, cluster ? grid[0] : 1, threads);
            }
}
