// What has to be taken back: rare, so that the usual answer is one look at a flag and no traffic.

#include "momentum.cuh"

// Entries of one payload return to memory: those of slots that somebody had a gradient for if the step turned bad, those of the
// others if there are any. `warp` is one of `warps` that share the rows.
static __device__ __forceinline__ void return_entries(
    float* memory, const u8* payload, const Row* rows, const u8* used, bool bad, bool unused, int count, int warp, int warps,
    const Momentum& correction) {
    for (int number = warp; number < count; number += warps) {
        const Row row = rows[number];
        if (!(used[row.slot] ? bad : unused)) continue;
        for (int place = threadIdx.x & 31; place < row.keep; place += 32) {
            const i64 at = row.memory + (i64)read_index(payload, row, place) * row.stride;
            memory[at] = __fadd_rn(memory[at], from_wire(reinterpret_cast<const Value*>(payload + row.values)[place]));
            correction.give_back(at, place, row);
        }
    }
}

extern "C" __global__ void give_back(
    float* memory, const u8* payload, const Row* rows, const u8* used, const u8* bad, const u8* unused,
    int count MOMENTUM_PARAMETERS) {
    if (!*bad && !*unused) return;
    const Momentum correction = MOMENTUM_OF_GROUP;
    const int each = blockDim.x / 32, warp = blockIdx.x * each + threadIdx.x / 32;
    return_entries(memory, payload, rows, used, *bad, *unused, count, warp, gridDim.x * each, correction);
}

// What one bucket may have to take back.
struct Book {
    float* memory;
    const u8* payload;
    const Row* rows;
    const u8* used;
    const u8* unused;
    i64 count;
    float* momentum;
    float* kept;
};

#define MOST_BOOKS 60  // a kernel's parameters are at most 4 KB
struct Books {
    Book at[MOST_BOOKS];
};

// The same for all buckets of a step, as many blocks for each: they are many, and all of them usually only look.
extern "C" __global__ void give_back_all(IN_PLACE Books books, const u8* bad, int blocks_each) {
    const Book& book = books.at[blockIdx.x / blocks_each];
    if (!*bad && !*book.unused) return;
#if MOMENTUM
    const Momentum correction = {book.momentum, book.kept};
#else
    const Momentum correction = {};
#endif
    const int each = blockDim.x / 32, warp = blockIdx.x % blocks_each * each + threadIdx.x / 32;
    return_entries(
        book.memory, book.payload, book.rows, book.used, *bad, *book.unused, (int)book.count, warp, blocks_each * each, correction);
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
