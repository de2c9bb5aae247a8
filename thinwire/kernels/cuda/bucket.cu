// Whole buckets: the first look at a gradient, whether all is finite, and how a bad step is marked. Whole memories: what is not
// finite goes.

#include "warp_group.cuh"

// Neighbours in the bucket.
struct BucketPart {
    i64 offset;
    int count;
    int slot;  // that they belong to, where that matters
};
static_assert(LAYOUT_OF_BucketPart, "bucket.py has another BucketPart");

// The largest magnitude of every slot, as a pattern. It is not finite if an element is not. Such elements become 0 in the bucket;
// nothing else is written.
extern "C" __global__ __launch_bounds__(INSPECT_THREADS) void inspect_slots(
    Gradient* bucket, const BucketPart* parts, int* largest) {
    constexpr int EACH = INSPECT_PART / INSPECT_THREADS;
    __shared__ int words[2 * INSPECT_THREADS / 32];
    const BucketPart part = parts[blockIdx.x];
    Gradient* values = bucket + part.offset;
    Gradient raw[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) raw[i] = values[min(i * INSPECT_THREADS + (int)threadIdx.x, part.count - 1)];
    int top = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int bits = magnitude(to_float(raw[i]));
        top = max(top, bits);
        if (bits >= INFINITE) values[min(i * INSPECT_THREADS + (int)threadIdx.x, part.count - 1)] = 0;
    }
    WarpGroup<INSPECT_THREADS / 32> group = {words, 0, (int)threadIdx.x / 32};
    top = group.largest(warp_max(top));
    if (threadIdx.x == 0 && top) atomicMax(&largest[part.slot], top);
}

// The flag goes up if a value is not finite.
extern "C" __global__ void find_non_finite(const Gradient* values, u8* flag, int count) {
    bool bad = false;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        bad |= !is_finite(to_float(values[i]));
    if (bad) raise(flag);
}

// The whole bucket becomes not-a-number if the flag is up, so that every rank skips the step.
extern "C" __global__ void poison(Gradient* bucket, const u8* flag, const BucketPart* parts, int count) {
    if (*flag == 0) return;
#if GRADIENT_CODE == FLOAT32
    const Gradient nothing = __int_as_float(0x7fc00000);
#elif GRADIENT_CODE == BFLOAT16
    const Gradient nothing = 0x7fc0;
#else
    const Gradient nothing = 0x7e00;
#endif
    for (int p = 0; p < count; ++p) {
        const BucketPart part = parts[p];
        Gradient* values = bucket + part.offset;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < part.count; i += gridDim.x * blockDim.x) values[i] = nothing;
    }
}

// Values that are not finite become 0 if the flag is up.
extern "C" __global__ void drop_non_finite(Gradient* values, const u8* flag, int count) {
    if (*flag == 0) return;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        if (!is_finite(to_float(values[i]))) values[i] = 0;
}
