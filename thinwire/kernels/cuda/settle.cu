// What has to be taken back: rare, so that the usual answer is one look at a flag and no traffic.

#include "momentum.cuh"

// Entries return to memory: those of slots that somebody had a gradient for if the step turned bad, those of the others if there
// are any.
extern "C" __global__ void give_back(
    float* memory, const u8* payload, const Row* rows, const u8* used, const u8* bad, const u8* unused,
    int count MOMENTUM_PARAMETERS) {
    const bool used_ones = *bad, other_ones = *unused;
    if (!used_ones && !other_ones) return;
    const Momentum correction = MOMENTUM_OF_GROUP;
    const int lane = threadIdx.x & 31, warps = gridDim.x * blockDim.x / 32;
    for (int number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; number < count; number += warps) {
        const Row row = rows[number];
        if (!(used[row.slot] ? used_ones : other_ones)) continue;
        for (int place = lane; place < row.keep; place += 32) {
            const i64 at = row.memory + (i64)read_index(payload, row, place) * row.stride;
            memory[at] = __fadd_rn(memory[at], from_wire(reinterpret_cast<const Value*>(payload + row.values)[place]));
            correction.give_back(at, place, row);
        }
    }
}

// The flag goes up if a value is not finite.
extern "C" __global__ void look(const Gradient* values, u8* flag, int count) {
    bool bad = false;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        bad |= (__float_as_int(to_float(values[i])) & 0x7fffffff) >= INFINITE;
    if (bad) raise(flag);
}

// The whole bucket becomes not-a-number if the flag is up, so that every rank skips the step.
extern "C" __global__ void poison(Gradient* bucket, const u8* flag, int count) {
    if (*flag == 0) return;
#if GRADIENT_CODE == 0
    const Gradient nothing = __int_as_float(0x7fc00000);
#elif GRADIENT_CODE == 1
    const Gradient nothing = 0x7fc0;
#else
    const Gradient nothing = 0x7e00;
#endif
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) bucket[i] = nothing;
}
