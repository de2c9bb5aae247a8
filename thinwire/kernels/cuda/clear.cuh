// The slots of a group in the bucket, cut into pieces that are set to zero.

// Elements of the bucket that one block clears.
struct Cleared {
    i64 bucket;
    int count;
    int unused;
};
static_assert(LAYOUT_OF_Cleared, "clear.py has another Cleared");

static __device__ __forceinline__ void clear(float* to, int count) {
    const int missing = min((int)((16 - (reinterpret_cast<unsigned long long>(to) & 15)) / 4 & 3), count), quads = (count - missing) / 4;
    const int thread = threadIdx.x, tail = missing + 4 * quads;
    if (thread < missing) to[thread] = 0.0f;
    float4* quad = reinterpret_cast<float4*>(to + missing);
    for (int i = thread; i < quads; i += blockDim.x) quad[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (thread < count - tail) to[tail + thread] = 0.0f;
}
