// A second moment learns from a mean gradient. Order of operations and roundings are those of `AdamState.refresh` in
// thinwire/memory/adam.py.

#define EACH (MOMENT_PART / MOMENT_THREADS)

// Neighbours of a slot.
struct MomentPart {
    i64 at;
    int count;
    int slot;
};
static_assert(LAYOUT_OF_MomentPart, "second_moment.py has another MomentPart");

// An element of this thread. Behind the end it is the last one again: that costs less than a branch before every load.
static __device__ __forceinline__ int element(const MomentPart& part, int which) {
    return min(which * MOMENT_THREADS + (int)threadIdx.x, part.count - 1);
}

// The flag of every slot that a rank had a gradient for goes up.
extern "C" __global__ __launch_bounds__(MOMENT_THREADS) void find_means(const float* mean, const MomentPart* parts, u8* had) {
    const MomentPart part = parts[blockIdx.x];
    float values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) values[i] = mean[part.at + element(part, i)];
    int any = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) any |= magnitude(values[i]);
    const u32 found = __ballot_sync(EVERY_LANE, any != 0);
    if ((threadIdx.x & 31) == 0 && found) raise(had + part.slot);
}

// v = kept v + learned mean^2 in these slots, unless that overflows; other slots stay as they were. `before` may be `now` itself.
extern "C" __global__ __launch_bounds__(MOMENT_THREADS) void learn_moments(
    const float* before, float* now, const float* mean, const MomentPart* parts, const u8* had, float kept, float learned) {
    const MomentPart part = parts[blockIdx.x];
    float held[EACH], fresh[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        held[i] = before[part.at + element(part, i)];
        fresh[i] = mean[part.at + element(part, i)];
    }
    const bool learns = had[part.slot] != 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = i * MOMENT_THREADS + (int)threadIdx.x;
        // torch adds a multiple with one rounding, on the CPU and on CUDA.
        const float v = fmaf(__fmul_rn(fresh[i], fresh[i]), learned, __fmul_rn(held[i], kept));
        if (at < part.count) now[part.at + at] = learns && is_finite(v) ? v : held[i];
    }
}
