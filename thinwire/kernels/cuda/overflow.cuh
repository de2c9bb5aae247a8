// What is left in memory where a sum of finite numbers overflowed.

#include "row.cuh"

// It can overflow in more places than were sent, and nothing of that may stay. `first` is one of `step` threads that share the row.
static __device__ __forceinline__ void drop_overflow(float* memory, const Row& row, int first, int step) {
    for (int i = first; i < row.length; i += step) {
        float& held = memory[row.memory + (i64)i * row.stride];
        if (!is_finite(held)) held = 0.0f;
    }
}
