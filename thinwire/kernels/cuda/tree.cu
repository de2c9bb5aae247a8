// Merges of two lists of one group. Reference: thinwire/exchange/tree.py.
//
//  (count and place of split.cu make the first list, with one owner who has everything)
//  1. merge   A thread has an entry of one of two lists, and finds by halving how many of the other come before it.
//             Both together are a list with holes: where a place is in both, the second has one.
//  (decide of split.cu finds the smallest sum of each slot that stays)
//  2. emit    What stays to the next message. What is left over stays in the list, for memory.
//  (choose and finish of split.cu write the last list into the bucket)
//  3. bank    What is left over to memory, and out of it again if the step is discarded.

#include "split.cuh"

// Two lists side by side, as one sees an entry of one of them.
struct Pair {
    const u8 *own, *other;
    int total, room, start;

    __device__ __forceinline__ const int* indices() const { return indices_of(own) + start; }
    __device__ __forceinline__ const int* others() const { return indices_of(other) + start; }
    __device__ __forceinline__ float value(int i) const { return from_wire(values_of(own, total)[start + i]); }
    __device__ __forceinline__ float others_value(int i) const { return from_wire(values_of(other, total)[start + i]); }
};

// The last block has no entries: it says which slots were used and whether something was wrong. Empty places come last, in the merged
// list too.
extern "C" __global__ __launch_bounds__(MERGE_THREADS) void tree_merge(
    const u8* mine, const u8* theirs, const float* flags, const SplitSlot* slots, const int* place_slots, int* list_indices,
    float* list_sums, u8* used, u8* status, int* damaged, IN_PLACE SplitForm form) {
    if (blockIdx.x == gridDim.x - 1) {
        for (int s = threadIdx.x; s < form.slots; s += MERGE_THREADS) used[s] = flags[s] > 0.0f;
        if (threadIdx.x == 0 && flags[form.slots] > 0.0f) raise(status);
        return;
    }
    const int item = blockIdx.x * MERGE_THREADS + threadIdx.x;
    if (item >= 2 * form.total) return;
    const bool arrived = item >= form.total;
    const int place = arrived ? item - form.total : item;
    const int number = place_slots[place];
    const SplitSlot slot = slots[number];
    const Pair lists = {arrived ? theirs : mine, arrived ? mine : theirs, form.total, slot.room, slot.start};
    const int i = place - slot.start, index = lists.indices()[i];
    const bool there = index != NO_ENTRY;
    if (arrived && there) {
        const bool rises = i == 0 || (u32)lists.indices()[i - 1] < (u32)index;
        if (!rises || index < slot.edge || index >= slot.last) raise(damaged);
    }
    const int* others = lists.others();
    int at = first_from(others, slot.room, index);
    const bool twice = there && at < slot.room && others[at] == index;
    float sum = __fadd_rn(0.0f, lists.value(i));
    if (twice && !arrived) sum = __fadd_rn(sum, lists.others_value(at));
    // Of equal ones this rank's come first.
    if (arrived) at = there ? at + twice : slot.room;
    const int to = 2 * slot.start + i + at;
    list_indices[to] = there && flags[number] > 0.0f && !(twice && arrived) ? index : NO_ENTRY;
    list_sums[to] = sum;
}

// A warp has a piece of the merged list. stats[1] is told the bytes of empty places, as float.
extern "C" __global__ __launch_bounds__(32 * EMIT_WARPS) void tree_emit(
    const SplitSlot* slots, const SumRange* pieces, const RangeState* states, const int* list_indices, float* list_sums,
    const Cut* cuts, const int* damaged, u8* message, int* stats, IN_PLACE SplitForm form, int count, int keeps, float entry_bytes) {
    const int number = blockIdx.x * EMIT_WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        stats[1] = __float_as_int((float)stats[2] * entry_bytes);
        for (int i = (4 + (int)sizeof(Value)) * form.total; i % 4; ++i) message[i] = 0;
    }
    if (number >= count) return;
    const SumRange piece = pieces[number];
    const SplitSlot slot = slots[piece.slot];
    const Cut cut = cuts[piece.slot];
    const int base = 2 * slot.start;
    int next = slot.start + states[number].place;
    if (*damaged) {
        // Something that is no number stays everywhere.
        for (int i = piece.begin + lane; i < piece.end; i += 32) list_sums[i] = 0.0f;
        if (number != slot.range) return;
        for (int p = lane; p < slot.room; p += 32)
            put(message, form.total, slot.start + p, p ? NO_ENTRY : slot.edge, round_to_wire(p ? 0.0f : __int_as_float(0x7fc00000)));
        return;
    }
    for (int begin = piece.begin; begin < piece.end; begin += 32) {
        const int i = begin + lane, index = i < piece.end ? list_indices[i] : NO_ENTRY;
        const float exact = index < 0 ? 0.0f : list_sums[i];
        const bool stays = index >= 0 && cut.takes(sum_bits(exact), i - base);
        const u32 all = __ballot_sync(EVERY_LANE, stays);
        const Value code = round_to_wire(exact);
        if (stays) put(message, form.total, next + lanes_before(all, lane), index, code);
        next += __popc(all);
        if (!keeps || i >= piece.end) continue;
        const float left = stays ? __fsub_rn(exact, from_wire(code)) : keeps == KEEP_ALL ? exact : 0.0f;
        list_sums[i] = index < 0 ? 0.0f : finite_or_zero(left);
    }
    if (number != slot.range + slot.ranges - 1) return;
    for (int p = next + lane; p < slot.start + slot.room; p += 32) put(message, form.total, p, NO_ENTRY, 0);
}

// `sign` is 1 or -1. A place is there once.
extern "C" __global__ __launch_bounds__(MERGE_THREADS) void tree_bank(
    const int* list_indices, const float* amounts, float* memory, const u8* flag, float sign, int count) {
    const int i = blockIdx.x * MERGE_THREADS + threadIdx.x;
    if (!*flag || i >= count || amounts[i] == 0.0f) return;
    float* held = memory + list_indices[i];
    *held = __fadd_rn(*held, sign * amounts[i]);
}
