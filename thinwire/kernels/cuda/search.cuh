// The k-th largest magnitude of many, found bin by bin by one block of BINS threads.

#define BINS 1024
#define BIN_BITS 10
// Bits per bin before anything is known: all exponents in 1024 bins.
#define COLD_SHIFT 21

static __device__ __forceinline__ int magnitude(float x) { return __float_as_int(x) & 0x7fffffff; }

// Inclusive sum over the threads of a block up to this one; `words` has one place per warp.
static __device__ __forceinline__ int block_sum_upto(int x, int* words, int& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = sum_upto(x, lane);
    __syncthreads();
    if (lane == 31) words[warp] = x;
    __syncthreads();
    // Every warp sums up the others for itself: faster than one after the other, and no further barrier.
    const int upto = sum_upto(lane < warps ? words[lane] : 0, lane);
    const int before = __shfl_sync(EVERY_LANE, upto, max(warp - 1, 0));
    total = __shfl_sync(EVERY_LANE, upto, 31);
    return warp ? x + before : x;
}

// From the top bin down: the bin in which the count passes `keep`. Thread t has bin BINS - 1 - t; all get the answer.
static __device__ __forceinline__ void find_bin(int here, int keep, int& found, int& above, int& inside, int* words, int* answer) {
    int total;
    const int upto = block_sum_upto(here, words, total);
    if (upto >= keep && upto - here < keep) {
        answer[0] = BINS - 1 - (int)threadIdx.x;
        answer[1] = upto - here;
        answer[2] = here;
    }
    __syncthreads();
    found = answer[0], above = answer[1], inside = answer[2];
    __syncthreads();
}

// The pattern of the keep-th magnitude, 1 <= keep <= count, and how many exceed it; `bits_at(i)` gives the i-th magnitude, which
// has at most `span` bits, or less than 0 if it does not count.
template <class BitsAt>
static __device__ __forceinline__ int find_pattern(BitsAt bits_at, int count, int keep, int& above, u32* histogram, int* words, int* answer, int span = 31) {
    int low = 0;
    above = 0;
    while (span) {
        const int next = max(span - BIN_BITS, 0);
        histogram[threadIdx.x] = 0;
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
                if (bits[b] >= low && (bits[b] - low) >> span == 0) atomicAdd(&histogram[(bits[b] - low) >> next], 1u);
        }
        __syncthreads();
        int found, higher, inside;
        find_bin((int)histogram[BINS - 1 - threadIdx.x], keep - above, found, higher, inside, words, answer);
        low += found << next;
        above += higher;
        span = next;
    }
    return low;
}
