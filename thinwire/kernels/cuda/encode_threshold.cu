// Whole tensors of which everything at or above a threshold is sent: one pass over memory for all slots of a group.
//
// Slots are cut into chunks. The entries sent are the `wanted` largest of a slot, where wanted is the number that reach its
// threshold, cut to its places (`keep`); if fewer than `fewest` reach it, wanted is `target`. A slot that selects exactly has
// fewest = target = keep and searches among what reaches a little less than its last threshold; what it finds is the next.
//  1. collect    c = residual + gradient, written to memory; what reaches the threshold goes to the slot's list, chunk by chunk.
//  2. decide     Per slot: how many are wanted, the smallest of them, where each chunk's entries go in the payload; header words.
//  3. send       The entries, in order.
// A slot whose list has too few or too many goes round again between 2 and 3; without one these kernels look at a flag:
//  a. recount    A histogram of the slot's magnitudes.
//  b. rebound    A threshold that as many reach as are wanted, and few more.
//  c. recollect  As 1, from memory.
//  d. decide     As 2. A slot that still has too many (most of its elements are equal) is searched in memory, by one block.
// Where thresholds are estimated from c, measure.cu writes c to memory first, and collect_held takes the place of 1.
// Reference: ThresholdSession.pick_slot in thinwire/select/threshold_reused.py, finish_in_capacity in thinwire/select/finish.py.

#include "collect_chunk.cuh"
#include "place_chunks.cuh"
#include "slot_state.cuh"

// Of the last threshold; the list of a slot that selects exactly has all above it.
#define GUESS 0.9f
// Below every pattern: all candidates are sent.
#define EVERY (-1)

struct SlotGoal {
    Row row;
    int fewest;
    int target;
    int exact;
    int unused;
};
static_assert(LAYOUT_OF_SlotGoal, "fused_threshold.py has another SlotGoal");

// -- candidates -------------------------------------------------------------------------------------------------------

template <bool VECTOR>
static __device__ __forceinline__ void collect_slot(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Chunk& chunk, const SlotGoal& goal, float last,
    SlotState& slot, Section& section, const Lists& lists, float scale, CollectShared& shared) {
    const int exact = goal.exact;
    collect_chunk<VECTOR>(
        bucket, before, memory, payload, chunk, slot, section, lists, scale, {}, shared,
        [=] { return __float_as_int(exact ? __fmul_rn(GUESS, last) : last); }, [](const u16*, int, int) {});
}

extern "C" __global__ __launch_bounds__(CHUNK_THREADS, COLLECT_BLOCKS) void collect(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const SlotGoal* goals, const Chunk* chunks,
    const float* thresholds, const float* ratio, SlotState* slots, Section* sections, float* list_values, u16* list_places) {
    __shared__ CollectShared shared;
    const Chunk chunk = chunks[blockIdx.x];
    const float last = thresholds[chunk.slot], scale = *ratio;
    const SlotGoal& goal = goals[chunk.slot];
    SlotState& slot = slots[chunk.slot];
    Section& section = sections[blockIdx.x];
    const Lists lists = {list_values, list_places};
    if (chunk.vector)
        collect_slot<true>(bucket, before, memory, payload, chunk, goal, last, slot, section, lists, scale, shared);
    else
        collect_slot<false>(bucket, before, memory, payload, chunk, goal, last, slot, section, lists, scale, shared);
}

extern "C" __global__ __launch_bounds__(CHUNK_THREADS) void recount(
    const float* memory, const Chunk* chunks, const SlotState* slots, u32* histograms, const int* flag, int count) {
    if (*flag == 0) return;
    __shared__ u32 histogram[BINS];
    for (int number = blockIdx.x; number < count; number += gridDim.x) {
        const Chunk chunk = chunks[number];
        if (slots[chunk.slot].way != AGAIN) continue;
        const float* held = memory + chunk.memory;
        for (int bin = threadIdx.x; bin < BINS; bin += CHUNK_THREADS) histogram[bin] = 0;
        __syncthreads();
        for (int j = threadIdx.x; j < chunk.count; j += CHUNK_THREADS) atomicAdd(&histogram[magnitude(held[j]) >> COLD_SHIFT], 1u);
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += CHUNK_THREADS)
            if (histogram[bin]) atomicAdd(&histograms[chunk.slot * BINS + bin], histogram[bin]);
        __syncthreads();
    }
}

extern "C" __global__ __launch_bounds__(BINS) void rebound(SlotState* slots, const u32* histograms, const int* flag) {
    if (*flag == 0) return;
    __shared__ DecideShared shared;
    Deciders group = shared.group();
    SlotState& slot = slots[blockIdx.x];
    if (slot.way != AGAIN) return;
    int found, above, inside;
    const int here = (int)histograms[blockIdx.x * BINS + BINS - 1 - threadIdx.x];
    find_bin(here, slot.wanted, found, above, inside, group, shared.answer);
    if (threadIdx.x == 0) {
        slot.low = found << COLD_SHIFT;
        if (above + inside > slot.room) slot.way = SLOW;
    }
}

// As `collect`, from memory: what reaches the pattern `cut`.
static __device__ __forceinline__ void collect_from_memory(
    const float* memory, u8* payload, const Chunk& chunk, SlotState& slot, Section& section, const Lists& lists, int cut,
    CollectShared& shared) {
    const int lane = threadIdx.x & 31, part = threadIdx.x / 32 * WARP_PART, left = chunk.count - part;
    const float* held = memory + chunk.memory + part;
    float c[PER_LANE];
    u32 mask = 0;
    if (left > 0) {
#pragma unroll
        for (int e = 0; e < PER_LANE; ++e) c[e] = held[min(place_of<false>(e, lane), left - 1)];
        mask = find_candidates<false>(c, left, cut);
    }
    list_candidates<false>(
        c, mask, false, false, payload, chunk, slot, section, lists, shared, [](const u16*, int, int) {});
}

// In place of `collect` where measure.cu has written c to memory, to find thresholds.
extern "C" __global__ __launch_bounds__(CHUNK_THREADS, COLLECT_BLOCKS) void collect_held(
    const float* memory, u8* payload, const Chunk* chunks, const float* thresholds, SlotState* slots, Section* sections,
    float* list_values, u16* list_places) {
    __shared__ CollectShared shared;
    const Chunk chunk = chunks[blockIdx.x];
    const float limit = thresholds[chunk.slot];
    // Everything reaches what is not above 0, nothing what is not a number.
    const int cut = limit <= 0.0f ? 0 : __float_as_int(limit);
    collect_from_memory(
        memory, payload, chunk, slots[chunk.slot], sections[blockIdx.x], {list_values, list_places}, cut, shared);
}

extern "C" __global__ __launch_bounds__(CHUNK_THREADS) void recollect(
    const float* memory, u8* payload, const Chunk* chunks, SlotState* slots, Section* sections, float* list_values,
    u16* list_places, const int* flag, int count) {
    if (*flag == 0) return;
    __shared__ CollectShared shared;
    for (int number = blockIdx.x; number < count; number += gridDim.x) {
        const Chunk chunk = chunks[number];
        SlotState& slot = slots[chunk.slot];
        if (slot.way != AGAIN) continue;
        collect_from_memory(memory, payload, chunk, slot, sections[number], {list_values, list_places}, slot.low, shared);
        __syncthreads();
    }
}

// -- decisions --------------------------------------------------------------------------------------------------------

// Header words of a slot; a slot that selects exactly remembers its smallest entry as the threshold of the turns to come.
static __device__ __forceinline__ void note(
    u8* payload, const SlotGoal& goal, int slot, int wanted, int low, float* thresholds, float tolerance) {
    int* words = slot_words(payload, slot);
    words[0] = wanted;
    const float old = thresholds[slot], found = goal.exact ? __int_as_float(low) : old;
    if (goal.exact) thresholds[slot] = found;
#if NOTE_WORDS
    float drift = -1.0f;
    if (goal.exact) {
        const float moved = fabsf(__fsub_rn(old, found));
        // A threshold that is not a number is none: this is the first.
        drift = old != old || moved == 0.0f ? 0.0f : moved / __fmul_rn(tolerance, old);
    }
    words[HEADER_SLOT] = __float_as_int(found);
    words[HEADER_SLOT + 1] = __float_as_int(drift);
#endif
}

extern "C" __global__ __launch_bounds__(BINS) void decide(
    const float* memory, u8* payload, const SlotGoal* goals, const Chunk* chunks, const int* header, SlotState* slots,
    Section* sections, const float* list_values, u32* histograms, float* thresholds, const float* tolerance, int* flag, int again) {
    __shared__ DecideShared shared;
    Deciders group = shared.group();
    SlotState& slot = slots[blockIdx.x];
    const SlotGoal& goal = goals[blockIdx.x];
    if (again && slot.way == READY) return;
    if (!again && blockIdx.x == 0 && threadIdx.x < HEADER_FIXED && threadIdx.x != HEADER_FLAGS)
        reinterpret_cast<int*>(payload)[threadIdx.x] = header[threadIdx.x];
    const int listed = (int)slot.listed;
    int wanted = listed < goal.fewest ? goal.target : min(listed, goal.row.keep);
    if (again) wanted = slot.wanted;
    const bool slowly = again && slot.way == SLOW;
    __syncthreads();
    if (threadIdx.x == 0) slot.listed = 0;
    if (!again && (listed < wanted || listed > slot.room)) {
        histograms[blockIdx.x * BINS + threadIdx.x] = 0;
        if (threadIdx.x == 0) {
            slot.way = AGAIN, slot.wanted = wanted;
            raise(flag);
        }
        return;
    }
    const float* values = slowly ? memory + goal.row.memory : list_values + slot.list;
    const auto bits_at = [=](int i) { return magnitude(values[i]); };
    sections += slot.first;
    if (slowly) take_all(sections, chunks + slot.first, slot.chunks);
    int low = EVERY, above = wanted;
    if (slowly || goal.exact || wanted < listed) {
        low = find_pattern(bits_at, slowly ? goal.row.length : listed, wanted, above, group, shared);
        count_all(sections, slot.chunks, low, bits_at);
    } else {
        for (int number = threadIdx.x; number < slot.chunks; number += BINS)
            sections[number].place = sections[number].count, sections[number].ties = 0;
    }
    if (threadIdx.x == 0) {
        slot.way = slowly ? SLOW : READY;
        slot.low = low;
        note(payload, goal, blockIdx.x, wanted, low, thresholds, *tolerance);
    }
    __syncthreads();
    place_sections(sections, slot.chunks, wanted - above, group);
}

// One warp per chunk.
extern "C" __global__ __launch_bounds__(32 * SEND_WARPS) void send_lists(
    float* memory, u8* payload, const SlotGoal* goals, const Chunk* chunks, const SlotState* slots, const Section* sections,
    const float* list_values, const u16* list_places, int* flag, int count) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *flag = 0;
    const int number = blockIdx.x * SEND_WARPS + threadIdx.x / 32;
    if (number >= count) return;
    const Section section = sections[number];
    const Chunk chunk = chunks[number];
    const Row row = goals[chunk.slot].row;
    const SlotState& slot = slots[chunk.slot];
    const int start = slot.list + section.start;
    send_chunk(
        memory, payload, row, chunk, section, list_values + start, list_places + start, slot.low, slot.way == SLOW, {});
}
