// Statistics of whole tensors, for thresholds that are estimated from them: one pass over memory for all slots of a group.
//
//  measure_gradients   c = residual + gradient, written to memory, and the measures of every chunk.
//  measure_held        The measures of what exceeds a limit of each slot, from memory.
//  sum_measures        The measures of a slot, from those of its chunks: always in the same order.
//  count_held          How many elements exceed each of several limits of a slot.
// Reference: TorchLook in thinwire/kernels/looks.py.

#include "collect_chunk.cuh"
#include "slot_state.cuh"

// Of elements whose magnitude exceeds a limit.
struct Measures {
    double count;
    double total;  // of magnitudes
    double squares;
    double sum;  // of the elements themselves
    double smallest;
    double largest;
};
static_assert(LAYOUT_OF_Measures, "fused_estimate.py has other Measures");

static __device__ __forceinline__ Measures no_measures() {
    return {0.0, 0.0, 0.0, 0.0, (double)__int_as_float(INFINITE), 0.0};
}

static __device__ __forceinline__ void include(Measures& mine, const Measures& other) {
    mine.count += other.count;
    mine.total += other.total;
    mine.squares += other.squares;
    mine.sum += other.sum;
    if (other.smallest < mine.smallest) mine.smallest = other.smallest;
    if (other.largest > mine.largest) mine.largest = other.largest;
}

static __device__ __forceinline__ Measures shuffle_measures(const Measures& mine, int step) {
    return {shuffle_double(mine.count, step), shuffle_double(mine.total, step),    shuffle_double(mine.squares, step),
            shuffle_double(mine.sum, step),   shuffle_double(mine.smallest, step), shuffle_double(mine.largest, step)};
}

// The measures of all threads, at thread 0.
static __device__ __forceinline__ Measures include_all(Measures mine, Measures* shared) {
    for (int step = 1; step < 32; step <<= 1) include(mine, shuffle_measures(mine, step));
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < CHUNK_WARPS; ++w) include(mine, shared[w]);
    return mine;
}

// A lane's elements of a warp's part, of which the chunk has `left` from there on.
template <bool VECTOR>
static __device__ __forceinline__ Measures measure_part(const float* c, int left, float limit) {
    const int lane = threadIdx.x & 31;
    Measures mine = no_measures();
    float smallest = __int_as_float(INFINITE), largest = 0.0f;
    int count = 0;
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) {
        const float size = fabsf(c[e]);
        if (place_of<VECTOR>(e, lane) >= left || !(size > limit)) continue;
        const double wide = (double)size;
        ++count;
        mine.total += wide;
        mine.squares += wide * wide;
        mine.sum += (double)c[e];
        smallest = size < smallest ? size : smallest;
        largest = size > largest ? size : largest;
    }
    mine.count = (double)count;
    mine.smallest = (double)smallest;
    mine.largest = (double)largest;
    return mine;
}

template <bool VECTOR>
static __device__ __forceinline__ void load_part(const float* held, int left, float* c) {
    const int lane = threadIdx.x & 31;
    if (VECTOR) {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(held + min(128 * i + 4 * lane, left - 4));
            c[4 * i] = four.x, c[4 * i + 1] = four.y, c[4 * i + 2] = four.z, c[4 * i + 3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) c[e] = held[min(place_of<false>(e, lane), left - 1)];
}

template <bool VECTOR>
static __device__ __forceinline__ Measures measure_gradient(
    const Gradient* bucket, const float* before, float* memory, const Chunk& chunk, float scale, bool& had, bool& bad) {
    const int part = threadIdx.x / 32 * WARP_PART, left = chunk.count - part;
    if (left <= 0) return no_measures();
    float c[PER_LANE];
    compensate_part<VECTOR>(
        bucket + chunk.gradient + part, before, memory, chunk.memory + part, 1, left, scale, {}, c, had, bad);
    return measure_part<VECTOR>(c, left, -1.0f);
}

extern "C" __global__ __launch_bounds__(CHUNK_THREADS) void measure_gradients(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Chunk* chunks, const float* ratio,
    Measures* partial) {
    __shared__ Measures shared[CHUNK_WARPS];
    __shared__ int seen[CHUNK_WARPS];
    const Chunk chunk = chunks[blockIdx.x];
    const float scale = *ratio;
    bool had = false, bad = false;
    const Measures mine = chunk.vector ? measure_gradient<true>(bucket, before, memory, chunk, scale, had, bad)
                                       : measure_gradient<false>(bucket, before, memory, chunk, scale, had, bad);
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if ((threadIdx.x & 31) == 0)
        seen[threadIdx.x / 32] = (any_had ? SEEN_GRADIENT : 0) | (any_bad ? SEEN_BAD : 0);
    const Measures all = include_all(mine, shared);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = all;
        report_all(seen, chunk.slot, payload);
    }
}

extern "C" __global__ __launch_bounds__(CHUNK_THREADS) void measure_held(
    const float* memory, const Chunk* chunks, const float* limits, Measures* partial) {
    __shared__ Measures shared[CHUNK_WARPS];
    const Chunk chunk = chunks[blockIdx.x];
    const int part = threadIdx.x / 32 * WARP_PART, left = chunk.count - part;
    const float* held = memory + chunk.memory + part;
    const float limit = limits[chunk.slot];
    Measures mine = no_measures();
    float c[PER_LANE];
    if (left > 0 && chunk.vector) {
        load_part<true>(held, left, c);
        mine = measure_part<true>(c, left, limit);
    } else if (left > 0) {
        load_part<false>(held, left, c);
        mine = measure_part<false>(c, left, limit);
    }
    const Measures all = include_all(mine, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

// One block per slot.
extern "C" __global__ __launch_bounds__(CHUNK_THREADS) void sum_measures(
    const SlotState* slots, const Measures* partial, Measures* measures) {
    __shared__ Measures shared[CHUNK_WARPS];
    const int first = slots[blockIdx.x].first, chunks = slots[blockIdx.x].chunks;
    Measures mine = no_measures();
    for (int number = threadIdx.x; number < chunks; number += CHUNK_THREADS) include(mine, partial[first + number]);
    const Measures all = include_all(mine, shared);
    if (threadIdx.x == 0) measures[blockIdx.x] = all;
}

extern "C" __global__ __launch_bounds__(CHUNK_THREADS) void count_held(
    const float* memory, const Chunk* chunks, const float* limits, u32* counts, int each) {
    __shared__ int shared[CHUNK_WARPS];
    const Chunk chunk = chunks[blockIdx.x];
    const int lane = threadIdx.x & 31, part = threadIdx.x / 32 * WARP_PART, left = chunk.count - part;
    const float* held = memory + chunk.memory + part;
    float c[PER_LANE];
    // The order in a warp does not matter, so that vectors need no other order than single elements: what lies behind the end counts
    // as below every limit.
    if (left > 0) {
        if (chunk.vector)
            load_part<true>(held, left, c);
        else
            load_part<false>(held, left, c);
    }
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) {
        const int place = chunk.vector ? place_of<true>(e, lane) : place_of<false>(e, lane);
        c[e] = place < left ? fabsf(c[e]) : -__int_as_float(INFINITE);
    }
    for (int i = 0; i < each; ++i) {
        const float limit = limits[chunk.slot * each + i];
        int count = 0;
#pragma unroll
        for (int e = 0; e < PER_LANE; ++e) count += c[e] > limit;
        count = warp_sum(count);
        if (lane == 0) shared[threadIdx.x / 32] = count;
        __syncthreads();
        if (threadIdx.x == 0) {
            int total = 0;
            for (int w = 0; w < CHUNK_WARPS; ++w) total += shared[w];
            if (total) atomicAdd(&counts[chunk.slot * each + i], (u32)total);
        }
        __syncthreads();
    }
}
