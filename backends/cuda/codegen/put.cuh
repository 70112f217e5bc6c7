// put(pointer, index, value) stores one element of any dtype. Elements of four bits share a byte with
// a neighbour, which another thread may write.
template <typename T, typename I> INLINE void put_half(T* p, I i, typename T::register_type x) {
    int shift = (int)(i % 8) * 4;
#ifdef EMULATED
    unsigned char* byte = (unsigned char*)p + i / 2;
    *byte = (unsigned char)((*byte & ~(15u << shift % 8)) | T::encoded(x) << shift % 8);
#else
    u32* word = (u32*)p + i / 8;
    atomicAnd(word, ~(15u << shift));
    atomicOr(word, T::encoded(x) << shift);
#endif
}
template <typename T, typename I, typename V> INLINE void put(T* p, I i, V x) { store(p, i, x); }
template <typename I, typename V> INLINE void put(i4* p, I i, V x) { put_half(p, i, x); }
template <typename I, typename V> INLINE void put(u4* p, I i, V x) { put_half(p, i, x); }
template <typename I, typename V> INLINE void put(f4e2m1* p, I i, V x) { put_half(p, i, x); }

