// Blocks whose threads keep results in registers while they share memory. On the host one thread has
// the results of all, in slots, one after the other.
const int THREADS = 256;
#ifdef ONE_THREAD
const int SLOTS = THREADS;
#else
const int SLOTS = 1;
#endif
const int STEP = THREADS / SLOTS;

