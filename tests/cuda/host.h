// What the prelude and the kernels use of CUDA, for a host compiler. The blocks of a grid run one
// after the other, those of a cluster together. A block is one thread; where THREADED is defined it
// has those of the launch, which take turns whenever they wait for each other, in a random order.
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <sched.h>
#include <sys/mman.h>
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

// A launch as emulate.py gives it. Of the pages of an operand: how they may be used before a block
// has waited for the kernel in front, and from then on; whether it counts blocks that have ended.
struct Operand { unsigned char* pages; std::size_t nbytes; int before, after, counts; };
struct Launch {
    unsigned grid[3], threads;
    void** arguments;  // as for cuLaunchKernel
    unsigned char* shared;
    std::size_t shared_bytes, operand_count;
    const Operand* operands;
    unsigned waits;  // whether it may start before the kernel in front of it has ended
    std::uint64_t seed;
    const char* failure;  // what the kernel does wrong
};
static Launch* launch;
static jmp_buf host_context, failed;
[[noreturn]] inline void fail(const char* why) {
    launch->failure = why;
    longjmp(failed, 1);
}
inline unsigned random_below(unsigned count) {
    launch->seed = launch->seed * 6364136223846793005u + 1442695040888963407u;
    return (launch->seed >> 33) % count;
}
inline void protect(int Operand::*when) {
    for (std::size_t i = 0; i < launch->operand_count; ++i)
        mprotect(launch->operands[i].pages, launch->operands[i].nbytes, launch->operands[i].*when);
}

// What a copy writes when somebody waits for it; until then its target is poison.
struct LateCopy {
    void *to, *barrier;
    unsigned group, nbytes;
    unsigned char data[16];
    std::vector<unsigned char> more;
    LateCopy(void* to, const void* from, unsigned nbytes, void* barrier, unsigned group = 0)
        : to(to), barrier(barrier), group(group), nbytes(nbytes) {
        if (nbytes > sizeof data) more.resize(nbytes);
        std::memcpy(more.empty() ? data : more.data(), from, nbytes);
    }
    void apply() const { std::memcpy(to, more.empty() ? data : more.data(), nbytes); }
};
static std::vector<LateCopy> late_copies;  // those that count on a barrier
// Ends one of the copies for which `matches`, any of them; whether there was one.
template <typename Matches> bool end_copy(std::vector<LateCopy>& copies, Matches matches) {
    const unsigned count = copies.size(), first = count ? random_below(count) : 0;
    for (unsigned i = 0; i < count; ++i) {
        const auto at = copies.begin() + (first + i) % count;
        if (!matches(*at)) continue;
        at->apply();
        copies.erase(at);
        return true;
    }
    return false;
}

struct Barrier { unsigned members, arrived, phase; };
struct Fiber {  // a thread
    jmp_buf context;
    std::unique_ptr<char[]> stack;
    unsigned thread, cluster_phase;
    Dim3 block;
    bool started, ended, waited, fenced;
    const unsigned* watched;  // it cannot go on while this is `seen`
    unsigned seen, exchanges, groups;
    std::uint64_t given[2][3];  // what it gives to other threads of its warp, in turns
    std::vector<LateCopy> copies;
};
static std::deque<Fiber> fibers;  // of all blocks that run together, and more
static std::vector<Barrier> blocks, warps, previous;  // previous: of blocks
static Barrier cluster;
static unsigned current = 0, running = 0;
static std::uint64_t moves = 0;  // grows whenever a thread goes on
static bool opened = false;

inline void yield() {
    if (!_setjmp(fibers[current].context)) _longjmp(host_context, 1);
}
inline void release_if_complete(Barrier& barrier) {
    if (barrier.arrived < barrier.members || !barrier.arrived) return;
    barrier.arrived = 0;
    ++barrier.phase;
}
inline unsigned arrive(Barrier& barrier) {
    const unsigned phase = barrier.phase;
    ++barrier.arrived, ++moves;
    release_if_complete(barrier);
    return phase;
}
inline void wait_behind(const Barrier& barrier, unsigned phase) {
    fibers[current].watched = &barrier.phase;
    fibers[current].seen = phase;
    while (barrier.phase == phase) yield();
    fibers[current].watched = nullptr;
    ++moves;
}
inline void leave(Barrier& barrier) {
    --barrier.members;
    release_if_complete(barrier);
}
inline Barrier& own_warp() {
    return warps[current / blockDim.x * ((blockDim.x + 31) / 32) + threadIdx.x / 32];
}
inline void __syncthreads() {
    if (blockDim.x == 1) return;
    Barrier& own = blocks[current / blockDim.x];
    wait_behind(own, arrive(own));
}
inline void __syncwarp(unsigned mask = 0) {
    if (blockDim.x == 1) return;
    Barrier& own = own_warp();
    wait_behind(own, arrive(own));
}
// The threads of the first block wait together, unless the kernel in front has ended before.
inline void wait_for_kernel_in_front() {
    fibers[current].waited = true;
    if (opened) return;
    if (blockDim.x > 1) {
        Barrier& own = previous[current / blockDim.x];
        wait_behind(own, arrive(own));
    }
    if (opened) return;
    opened = true;
    protect(&Operand::after);
    for (Barrier& barrier : previous) barrier.arrived = 0, ++barrier.phase;
}
template <typename T> T from_lane(T x, unsigned lane) {
    const unsigned first = current - threadIdx.x % 32, turn = fibers[current].exchanges++ % 2;
    std::memcpy(fibers[current].given[turn], &x, sizeof x);
    __syncwarp();
    if (lane < 32) std::memcpy(&x, fibers[first + lane].given[turn], sizeof x);
    return x;
}
template <typename T> T __shfl_down_sync(unsigned, T x, unsigned step) {
    return from_lane(x, threadIdx.x % 32 + step);
}
template <typename T> T __shfl_xor_sync(unsigned, T x, unsigned step) {
    return from_lane(x, threadIdx.x % 32 ^ step);
}
template <typename T> T __shfl_sync(unsigned, T x, unsigned lane) { return from_lane(x, lane); }
inline void __threadfence() { fibers[current].fenced = true; }
// What the threads of a block wrote is seen by the blocks that find it counted.
inline void check_count(const void* p) {
    const unsigned first = current / blockDim.x * blockDim.x;
    for (unsigned i = 0; i < launch->operand_count; ++i) {
        const Operand& operand = launch->operands[i];
        if (!operand.counts || p < operand.pages || p >= operand.pages + operand.nbytes) continue;
        for (unsigned thread = first; thread < first + blockDim.x; ++thread)
            if (!fibers[thread].fenced) fail("a block is counted in front of __threadfence");
    }
}
template <typename T> T __ldg(const T* p) { return *p; }

template <typename T> T atomicAdd(T* p, T x) {
    check_count(p);
    T old = *p;
    *p = old + x;
    return old;
}
template <typename T> T atomicMax(T* p, T x) { T old = *p; *p = std::max(old, x); return old; }
template <typename T> T atomicMin(T* p, T x) { T old = *p; *p = std::min(old, x); return old; }
template <typename T> T atomicExch(T* p, T x) { T old = *p; *p = x; return old; }
template <typename T> T atomicCAS(T* p, T is, T x) { T old = *p; if (old == is) *p = x; return old; }

static void (*run_thread)();
static void fiber_main() {
    for (;;) {
        run_thread();
        Fiber& me = fibers[current];
        if (launch->waits && !me.waited) fail("a thread ends without wait_for_previous");
        me.ended = true;
        ++moves, --running;
        leave(blocks[current / blockDim.x]);
        leave(own_warp());
        leave(cluster);
        leave(previous[current / blockDim.x]);
        yield();
    }
}
static void resume(unsigned number) {
    Fiber& fiber = fibers[current = number];
    if (fiber.ended || (fiber.watched && *fiber.watched == fiber.seen)) return;
    threadIdx.x = fiber.thread;
    blockIdx = fiber.block;
    if (_setjmp(host_context)) return;
    if (fiber.started) _longjmp(fiber.context, 1);
    fiber.started = true;
    ucontext_t context;
    const unsigned room = 1 << 17;
    getcontext(&context);
    if (!fiber.stack) fiber.stack.reset(new char[room]);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = room;
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
}
// Runs the threads of some blocks: a warp as far as it can, then another one.
static void run_together(Dim3 first, unsigned block_count) {
    const unsigned threads = blockDim.x, in_block = (threads + 31) / 32;
    running = block_count * threads;
    for (unsigned i = 0; i < running; ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread = i % threads;
        fiber.block = {first.x + i / threads, first.y, first.z};
        fiber.ended = fiber.groups = fiber.exchanges = 0;
        fiber.watched = nullptr;
        fiber.copies.clear();
    }
    blocks.assign(block_count, {threads, 0, 0});
    previous = blocks;
    warps.assign(block_count * in_block, {0, 0, 0});
    for (unsigned w = 0; w < warps.size(); ++w)
        warps[w].members = min(32u, threads - w % in_block * 32);
    cluster = {running, 0, 0};
    std::vector<unsigned> order(warps.size());
    std::vector<bool> last(warps.size());  // those that go on only when no other can
    const unsigned late = random_below(4) ? random_below(block_count) : block_count;
    for (unsigned w = 0; w < warps.size(); ++w) {
        order[w] = w;
        last[w] = block_count > 1 ? w / in_block == late : !late && random_below(2);
    }
    auto run_warp = [&](unsigned w) {
        const unsigned lanes = min(32u, threads - w % in_block * 32);
        for (std::uint64_t before = moves - 1; before != moves && warps[w].members;) {
            before = moves;
            const unsigned start = random_below(lanes), step = random_below(2) ? 1 : lanes - 1;
            for (unsigned i = 0; i < lanes; ++i)
                resume(w / in_block * threads + w % in_block * 32 + (start + i * step) % lanes);
            if (random_below(16) == 0) break;
        }
    };
    while (running) {
        const std::uint64_t before = moves;
        for (unsigned i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
        for (unsigned w : order)
            if (!last[w]) run_warp(w);
        for (unsigned w : order)
            if (last[w] && (moves == before || block_count == 1 && random_below(8) == 0)) run_warp(w);
        if (moves == before) fail("all threads wait, and nothing ends that");
    }
    threadIdx.x = current = 0;
}

template <typename... A> struct Call {
    static void (*kernel)(A...);
    template <std::size_t... I> static void once(std::index_sequence<I...>) {
        kernel(*(A*)launch->arguments[I]...);
    }
    static void once() { once(std::index_sequence_for<A...>()); }
};
template <typename... A> void (*Call<A...>::kernel)(A...);

static void poison_shared_memory();
// Runs all blocks of a kernel.
template <typename... A>
void run_grid(void (*kernel)(A...), Launch* all, unsigned threads, bool cluster = false) {
    Call<A...>::kernel = kernel;
    run_thread = Call<A...>::once;
    launch = all;
    dynamic_shared = all->shared;
    gridDim = {all->grid[0], all->grid[1], all->grid[2]};
    blockDim = {threads, 1, 1};
    for (Fiber& fiber : fibers) fiber.started = false;  // the last run may not have ended
    while (fibers.size() < threads * (cluster ? gridDim.x : 1)) fibers.emplace_back();
    late_copies.clear();
    if (setjmp(failed)) return;
    for (unsigned z = 0; z < gridDim.z; ++z)
        for (unsigned y = 0; y < gridDim.y; ++y)
            for (unsigned x = 0; x < gridDim.x; x += cluster ? gridDim.x : 1) {
                blockIdx = {x, y, z};
                opened = !all->waits || random_below(3) == 0;  // that kernel may have ended
                protect(opened ? &Operand::after : &Operand::before);
                poison_shared_memory();
                for (Fiber& fiber : fibers) fiber.waited = fiber.fenced = false;
                if (threads == 1)
                    run_thread();
                else
                    run_together(blockIdx, cluster ? gridDim.x : 1);
                if (all->waits && !fibers[0].waited) fail("a block ends without wait_for_previous");
                if (!late_copies.empty()) fail("a block ends before its copies have ended");
            }
}
