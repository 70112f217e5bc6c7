// Instructions of compute capability 9.0: barriers that count copies, copies of tiles of tensors, and
// products of groups of four warps (wgmma).

#ifndef EMULATED_WARPS
INLINE void barriers_visible() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
INLINE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives; the phase also needs the bytes of copies.
INLINE void barrier_expect(u64* barrier, u32 nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::
                 "r"(shared_address(barrier)), "r"(nbytes) : "memory");
}

// The number of times that a counter was taken before.
INLINE int take(int* counter) { return atomicAdd(counter, 1); }

// What copies of tiles know of a tensor [planes, rows, columns] of 16-bit numbers. A tile has `box`
// rows of 64 columns; its eight parts of a row change places from row to row, as the products need
// them, and what lies outside of the tensor is 0.
struct alignas(128) TensorMap { u64 words[16]; };
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define REPLACE(field, kind, value, how) \
    asm volatile("tensormap.replace.tile." field ".shared::cta.b1024." kind " [%0], " value ";" ::"r"(at), how : "memory")
// By all threads of a warp. `draft` is in shared memory; copies use `map`, which is not.
INLINE void make_map(
    TensorMap* map, TensorMap* draft, const void* start, u32 columns, u32 rows, u32 planes, u32 box
) {
    const u32 at = shared_address(draft), lane = threadIdx.x % 32;
    ((u32*)draft)[lane] = 0;
    __syncwarp();
    if (lane == 0) {
        REPLACE("global_address", "b64", "%1", "l"(start));
        REPLACE("rank", "b32", "%1", "n"(2));
        REPLACE("box_dim", "b32", "0, %1", "r"(64u));
        REPLACE("box_dim", "b32", "1, %1", "r"(box));
        REPLACE("box_dim", "b32", "2, %1", "r"(1u));
        REPLACE("global_dim", "b32", "0, %1", "r"(columns));
        REPLACE("global_dim", "b32", "1, %1", "r"(rows));
        REPLACE("global_dim", "b32", "2, %1", "r"(planes));
        REPLACE("global_stride", "b64", "0, %1", "l"(2ull * columns));
        REPLACE("global_stride", "b64", "1, %1", "l"(2ull * columns * rows));
        REPLACE("element_stride", "b32", "0, %1", "r"(1u));
        REPLACE("element_stride", "b32", "1, %1", "r"(1u));
        REPLACE("element_stride", "b32", "2, %1", "r"(1u));
        REPLACE("elemtype", "b32", "%1", "n"(1));  // u16
        REPLACE("interleave_layout", "b32", "%1", "n"(0));
        REPLACE("swizzle_mode", "b32", "%1", "n"(3));  // in 128 bytes
        REPLACE("fill_mode", "b32", "%1", "n"(0));
    }
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
                 " [%0], [%1], 128;" ::"l"(map), "r"(at) : "memory");
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
INLINE void copy_tile(
    void* to, const TensorMap* map, int column, int row, int plane, u64* barrier
) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)), "l"(map), "r"(column),
                 "r"(row), "r"(plane), "r"(shared_address(barrier)) : "memory");
}
// Threads of this group of four warps have N registers from now on.
template <int N> INLINE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> INLINE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Where 64 columns of rows start, in eights of rows.
INLINE u64 smem_descriptor(const u16* start) {
    return (shared_address(start) & 0x3ffff) >> 4 | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}
#define FOUR(x) "+f"((x)[0]), "+f"((x)[1]), "+f"((x)[2]), "+f"((x)[3])
#define SIXTEEN(x) FOUR((x)[0]), FOUR((x)[1]), FOUR((x)[2]), FOUR((x)[3])
#define SUMS32(x) SIXTEEN(x), SIXTEEN(x + 4)
#define SUMS64(x) SUMS32(x), SUMS32(x + 8)
#define SUMS128(x) SUMS64(x), SUMS64(x + 16)
#define TEN(d) "%" d "0, %" d "1, %" d "2, %" d "3, %" d "4, %" d "5, %" d "6, %" d "7, %" d "8, %" d "9, "
#define NAMES32 TEN("") TEN("1") TEN("2") "%30, %31"
#define NAMES64 TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") "%60, %61, %62, %63"
#define NAMES128 NAMES64 ", %64, %65, %66, %67, %68, %69, " TEN("7") TEN("8") TEN("9") TEN("10") \
    TEN("11") "%120, %121, %122, %123, %124, %125, %126, %127"
// c[64, N] = a[64, 16] b[N, 16]' from shared memory, plus c if `more`. Rows of c are laid out as those
// of mma, 16 per warp.
template <typename T, int N> INLINE void multiply_group(float (&c)[N / 8][4], u64 a, u64 b, u32 more);
#define GROUP(T, KIND, N, COUNT, A, B, MORE) \
template <> INLINE void multiply_group<T, N>(float (&c)[N / 8][4], u64 a, u64 b, u32 more) { \
    asm volatile("{ .reg .pred more; setp.ne.b32 more, " MORE ", 0; " \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND \
                 " {" NAMES##COUNT "}, " A ", " B ", more, 1, 1, 0, 0; }" \
                 : SUMS##COUNT(c) : "l"(a), "l"(b), "r"(more)); \
}
#define GROUPS_OF(T, KIND) \
    GROUP(T, KIND, 64, 32, "%32", "%33", "%34") GROUP(T, KIND, 128, 64, "%64", "%65", "%66") \
    GROUP(T, KIND, 256, 128, "%128", "%129", "%130")
GROUPS_OF(bf16, "bf16")
GROUPS_OF(f16, "f16")
INLINE void begin_group() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all products but those of the last `left` groups.
template <int left> INLINE void wait_for_groups() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}
#endif
#endif
