// Small tensors that travel whole, cut into stretches. A block takes one and loads all of it at once.

struct Stretch {
    i64 bucket;  // element of its first value in the bucket
    int packed;  // the same on the wire
    int count;   // at least one
};
static_assert(LAYOUT_OF_Stretch, "dense.py has another Stretch");

#define EACH (STRETCH / STRETCH_THREADS)  // elements of a thread
#define RANKS_AT_ONCE 4

// An element of this thread. Behind the end it is the last one again: that costs less than a branch before every load.
static __device__ __forceinline__ int element(const Stretch& stretch, int which) {
    return min((int)threadIdx.x + which * STRETCH_THREADS, stretch.count - 1);
}

// Values are divided before they are summed, as in thinwire/exchange/dense.py.
static __device__ __forceinline__ void send_stretch(
    const Gradient* bucket, float* packed, const Stretch& stretch, int world) {
    float values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) values[i] = to_float(bucket[stretch.bucket + element(stretch, i)]);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        packed[stretch.packed + element(stretch, i)] = __fdiv_rn(values[i], (float)world);
}

// The sum over ranks, in rank order. Tells whether one is not finite.
static __device__ __forceinline__ bool mean_stretch(
    const u8* gathered, float* bucket, const Stretch& stretch, int world, int row_bytes) {
    float sums[EACH];
    for (int ranks = 0; ranks < world; ranks += RANKS_AT_ONCE) {
        float values[RANKS_AT_ONCE][EACH];
#pragma unroll
        for (int r = 0; r < RANKS_AT_ONCE; ++r) {
            const u8* row = gathered + (i64)min(ranks + r, world - 1) * row_bytes;
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                values[r][i] = reinterpret_cast<const float*>(row)[stretch.packed + element(stretch, i)];
        }
#pragma unroll
        for (int r = 0; r < RANKS_AT_ONCE; ++r)
            if (ranks + r < world) {
#pragma unroll
                for (int i = 0; i < EACH; ++i) sums[i] = ranks + r ? __fadd_rn(sums[i], values[r][i]) : values[r][i];
            }
    }
    bool bad = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        bad |= !is_finite(sums[i]);
        bucket[stretch.bucket + element(stretch, i)] = sums[i];
    }
    return bad;
}
