// What is left in memory where a sum of finite numbers overflowed.

#include "row.cuh"

// It can overflow in more places than were sent, and nothing of that may stay. `first` is one of `step` threads that share the row.
static __device__ __forceinline__ void drop_overflow(float* memory, const Row& row, int first, int step) {
    for (i64 base = first; base < row.length; base += BATCH * step) {
        float held[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) held[b] = memory[row.memory + min(base + b * step, (i64)row.length - 1) * row.stride];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const i64 i = base + b * step;
            if (i < row.length && !is_finite(held[b])) memory[row.memory + i * row.stride] = 0.0f;
        }
    }
}
