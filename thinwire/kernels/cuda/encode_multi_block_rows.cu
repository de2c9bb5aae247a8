// Rows of any length, such as whole tensors: as stream_rows.cu, with many blocks for one row.
//
// A row is cut into chunks. Candidates are what reaches a cut. About twice as many as are sent reached it in the last call, so
// enough are left even if nothing is added to what stays.
//  1. collect  c = residual + gradient (or as momentum.cuh says) goes to memory. Candidates go to the row's list, chunk by chunk, and
//              to a histogram that is finest just above the cut.
//  2. decide   (decide_multi_block_rows.cu) A warp has a chunk. It knows the bin of the keep-th magnitude, counts the candidates of
//              the chunk above it, and lists the few inside. The last block of a row finds the keep-th magnitude among these, where
//              each chunk's entries go in the payload, and the next call's cut.
//  3. send     The entries, in order, one warp to a chunk.
// Rows that this does not fit go another way: multi_block_rows.cuh.

#include "collect_chunk.cuh"
#include "multi_block_rows.cuh"

// Candidates of a chunk: six times the usual number.
#define CROWDED 512

// A chunk's candidates to the histogram. Many would queue at its bins, so that a block counts them in shared memory first.
static __device__ __forceinline__ void tell_histogram(
    const float* values, const u16* places, int mine, int total, const Window& window, u32* histogram, u32* near) {
    const int lane = threadIdx.x & 31;
    if (total <= CROWDED) {
#pragma unroll 1
        for (int i = lane; i < mine; i += 32) atomicAdd(&histogram[window.bin(magnitude(values[places[i]]))], 1u);
        return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS; i += CHUNK_THREADS) near[i] = 0;
    __syncthreads();
    for (int i = lane; i < mine; i += 32) atomicAdd(&near[window.bin(magnitude(values[places[i]]))], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += CHUNK_THREADS)
        if (near[i]) atomicAdd(&histogram[i], near[i]);
}

template <bool VECTOR>
static __device__ __forceinline__ void collect(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Chunk& chunk, RowState& state,
    Section& section, u32* histograms, const Lists& lists, float scale, const Momentum& correction, CollectShared& shared,
    u32* near) {
    const int cut = state.cut;
    collect_chunk<VECTOR>(
        bucket, before, memory, payload, chunk, state, section, lists, scale, correction, shared,
        [=] { return window_of(cut, scale).cut; },
        [&](const u16* places, int mine, int total) {
            // Found as late as that, because registers are scarce until then.
            u32* histogram = histograms + (i64)(state.histogram + ((int)blockIdx.x & (state.copies - 1))) * BINS;
            tell_histogram(shared.values, places, mine, total, window_of(cut, scale), histogram, near);
        });
}

extern "C" __global__ __launch_bounds__(CHUNK_THREADS, COLLECT_BLOCKS) void multi_block_collect(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Chunk* chunks, RowState* states,
    Section* sections, u32* histograms, float* list_values, u16* list_places, const float* ratio MOMENTUM_PARAMETERS) {
    __shared__ CollectShared shared;
    __shared__ u32 near[BINS];
    const Chunk chunk = chunks[blockIdx.x];
    const float scale = *ratio;
    const Momentum correction = MOMENTUM_OF_GROUP;
    RowState& state = states[chunk.row];
    Section& section = sections[blockIdx.x];
    const Lists lists = {list_values, list_places};
    if (chunk.vector)
        collect<true>(bucket, before, memory, payload, chunk, state, section, histograms, lists, scale, correction, shared, near);
    else
        collect<false>(bucket, before, memory, payload, chunk, state, section, histograms, lists, scale, correction, shared, near);
}

extern "C" __global__ __launch_bounds__(32 * SEND_WARPS) void multi_block_send(
    float* memory, u8* payload, const Row* rows, const Chunk* chunks, const RowState* states, const Section* sections,
    const float* list_values, const u16* list_places, int count MOMENTUM_PARAMETERS) {
    const int number = blockIdx.x * SEND_WARPS + threadIdx.x / 32;
    if (number >= count) return;
    const Section section = sections[number];
    const Chunk chunk = chunks[number];
    const Row row = rows[chunk.row];
    const RowState& state = states[chunk.row];
    // Zeros are in no list.
    const bool walks = state.way == SLOW || (state.low == 0 && section.ties);
    const int start = state.list + section.start;
    const Momentum correction = MOMENTUM_OF_GROUP;
    send_chunk(
        memory, payload, row, chunk, section, list_values + start, list_places + start, state.low, walks, correction);
}
