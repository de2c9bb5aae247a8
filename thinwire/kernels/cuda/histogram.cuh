// The k-th largest magnitude of many, found bin by bin by one block of BINS threads.

#include "warp_group.cuh"

#define BIN_BITS 10
static_assert(BINS == 1 << BIN_BITS, "a bin for every pattern of these bits");
// Bits per bin before anything is known: all exponents in BINS bins.
#define COLD_SHIFT (31 - BIN_BITS)

typedef WarpGroup<BINS / 32> Deciders;

// What such a block has in shared memory.
struct DecideShared {
    u32 histogram[BINS];
    int words[2 * BINS / 32], answer[4];

    __device__ __forceinline__ Deciders group() { return {words, 0, (int)threadIdx.x / 32}; }
};

// From the top bin down: the bin in which the count passes `keep`. Thread t has bin BINS - 1 - t; all get the answer.
static __device__ __forceinline__ void find_bin(
    int here, int keep, int& found, int& above, int& inside, Deciders& group, int* answer) {
    int total;
    const int upto = group.sum_upto(here, total);
    if (upto >= keep && upto - here < keep) {
        answer[0] = BINS - 1 - (int)threadIdx.x;
        answer[1] = upto - here;
        answer[2] = here;
    }
    __syncthreads();
    found = answer[0], above = answer[1], inside = answer[2];
    __syncthreads();
}

// The pattern of the keep-th magnitude, 1 <= keep <= count, and how many exceed it. `bits_at(i)` gives the i-th magnitude, which
// has at most `span` bits, or less than 0 if it does not count. Unless `span` is 0, `tied` is told how many equal it.
template <class BitsAt>
static __device__ __forceinline__ int find_pattern(
    BitsAt bits_at, int count, int keep, int& above, Deciders& group, DecideShared& shared, int span = 31, int* tied = nullptr) {
    int low = 0;
    above = 0;
    while (span) {
        const int next = max(span - BIN_BITS, 0);
        shared.histogram[threadIdx.x] = 0;
        __syncthreads();
        for (int base = 0; base < count; base += BATCH * BINS) {
            int bits[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int i = base + b * BINS + (int)threadIdx.x;
                bits[b] = i < count ? bits_at(i) : -1;
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (bits[b] >= low && (bits[b] - low) >> span == 0) atomicAdd(&shared.histogram[(bits[b] - low) >> next], 1u);
        }
        __syncthreads();
        int found, higher, inside;
        const int here = (int)shared.histogram[BINS - 1 - threadIdx.x];
        find_bin(here, keep - above, found, higher, inside, group, shared.answer);
        low += found << next;
        above += higher;
        if (tied) *tied = inside;
        span = next;
    }
    return low;
}
