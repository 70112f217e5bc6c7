// Instructions of a warp and of a cluster, for 16-bit floats T (bf16 or f16), in pairs of a register.

typedef Pack<float, 4> Quad;

#ifndef EMULATED_WARPS
INLINE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <typename T> INLINE u32 pack(float first, float second);
template <> INLINE u32 pack<bf16>(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
template <> INLINE u32 pack<f16>(float first, float second) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// c[16, 8] += a[16, 16] b[16, 8] on tensor cores. With g = lane / 4, t = lane % 4: a0, a2 are row g
// and a1, a3 row g + 8 of a; b0, b1 are column g of b. Of the 16 that are summed, a0, a1 and b0 hold
// 2 t and 2 t + 1, the others 2 t + 8 and 2 t + 9. c[0], c[1] are columns 2 t, 2 t + 1 of row g, and
// c[2], c[3] of row g + 8.
template <typename T>
INLINE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
template <>
INLINE void mma<bf16>(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
INLINE void mma<f16>(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

INLINE void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}
// Loads that come later in the code start after these numbers are there, which saves registers.
INLINE void settle(float (&x)[4]) {
    asm volatile("" : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])::"memory");
}

INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// An inbox in shared memory, which the blocks of a cluster fill: a barrier that counts their bytes.
typedef u64 Inbox;
#if __CUDA_ARCH__ >= 900
constexpr bool CLUSTERS = true;
// Phases of a barrier are told apart by their parity. The phase in front of the first one, of parity
// 1, is over at the start.
INLINE void barrier_init(u64* barrier, u32 arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals) : "memory");
}
INLINE void barrier_wait(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    } while (!done);
}
INLINE u32 in_block(const void* mine, u32 rank) {  // the same place in block `rank` of the cluster
    u32 here = shared_address(mine), there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}
// By one thread, before cluster_arrive: the bytes that will come.
INLINE void expect(Inbox* inbox, u32 nbytes) {
    barrier_init(inbox);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::
                 "r"(shared_address(inbox)), "r"(nbytes) : "memory");
}
// All inboxes of the cluster expect bytes once every thread has arrived.
INLINE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// Writes to the place of `mine` in block `rank`, whose inbox counts the bytes.
INLINE void send(const Pack<float, 2>* mine, Inbox* inbox, u32 rank, Pack<float, 2> value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
        ::"r"(in_block(mine, rank)), "f"(value.item[0]), "f"(value.item[1]),
          "r"(in_block(inbox, rank)) : "memory");
}
INLINE void send(const Quad* mine, Inbox* inbox, u32 rank, Quad value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];"
        ::"r"(in_block(mine, rank)), "f"(value.item[0]), "f"(value.item[1]), "f"(value.item[2]),
          "f"(value.item[3]), "r"(in_block(inbox, rank)) : "memory");
}
// Waits until all bytes of this block are there.
INLINE void await(Inbox* inbox) { barrier_wait(inbox, 0); }
#else
constexpr bool CLUSTERS = false;
INLINE void expect(Inbox*, u32) {}
INLINE void cluster_arrive() {}
INLINE void cluster_wait() {}
template <typename V> INLINE void send(const V*, Inbox*, u32, V) {}
INLINE void await(Inbox*) {}
#endif
#define SHARED(type, name) __shared__ type name  // static shared memory of the block
#endif

INLINE u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
