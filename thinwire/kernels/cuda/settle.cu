// Entries that have to be taken back. That is rare: usually the kernels look at a flag and return.

#include "momentum.cuh"
#include "overflow.cuh"

// Whether c may have overflowed in places that were not sent. The largest of a row are sent: then all of those overflowed too, and went
// out as the largest number of the code. In a scale others may be the largest.
static __device__ __forceinline__ bool may_have_overflowed(const u8* payload, const Row& row) {
    return SCALED || row.keep == 0 || fabsf(from_wire(reinterpret_cast<const Value*>(payload + row.values)[0])) >= LARGEST;
}

// Return entries of one payload to memory: those of used slots (some rank had a gradient) if the step turned bad, those of the
// other slots if there are any. `warp` is one of `warps` that share the rows.
static __device__ __forceinline__ void return_entries(
    float* memory, const u8* payload, const Row* rows, const u8* used, bool bad, bool unused, int count, int warp, int warps,
    const Momentum& correction) {
    for (int number = warp; number < count; number += warps) {
        const Row row = rows[number];
        if (bad && may_have_overflowed(payload, row)) {
            drop_overflow(memory, row, threadIdx.x & 31, 32);
            __syncwarp();
        }
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
struct PayloadRecord {
    float* memory;
    const u8* payload;
    const Row* rows;
    const u8* used;
    const u8* unused;
    i64 count;
    float* momentum;
    float* kept;
};
static_assert(LAYOUT_OF_PayloadRecord, "fused_topk.py has another PayloadRecord");
static_assert(MOST_RECORDS * sizeof(PayloadRecord) <= 4000, "a kernel has 4 KB of parameters");

struct PayloadRecords {
    PayloadRecord at[MOST_RECORDS];
};

// All buckets of a step, `blocks_each` blocks for each.
extern "C" __global__ void give_back_all(IN_PLACE PayloadRecords records, const u8* bad, int blocks_each) {
    const PayloadRecord& record = records.at[blockIdx.x / blocks_each];
    if (!*bad && !*record.unused) return;
#if MOMENTUM
    const Momentum correction = {record.momentum, record.kept};
#else
    const Momentum correction = {};
#endif
    const int each = blockDim.x / 32, warp = blockIdx.x % blocks_each * each + threadIdx.x / 32;
    return_entries(
        record.memory, record.payload, record.rows, record.used, *bad, *record.unused, (int)record.count, warp, blocks_each * each, correction);
}
