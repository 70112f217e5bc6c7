// Sums of a block's numbers from that of thread 0 to that of the caller, and of all in front of the
// caller, and of all. It may be called again at once.
template <typename T> INLINE T block_scan(T value, T* before, T* total) {
    __shared__ T sums[1024];
    const int me = threadIdx.x, threads = blockDim.x;
    sums[me] = value;
    __syncthreads();
    for (int step = 1; step < threads; step *= 2) {
        T other = me >= step ? sums[me - step] : (T)0;
        __syncthreads();
        sums[me] = add(other, sums[me]);
        __syncthreads();
    }
    *before = me > 0 ? sums[me - 1] : (T)0;
    *total = sums[threads - 1];
    value = sums[me];
    __syncthreads();
    return value;
}
