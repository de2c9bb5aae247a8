// What the kernels of split-and-reduce share: where slots and places lie, and the largest of many.

#include "row.cuh"
#include "histogram.cuh"

// No entry is in a place. One that was given back is -2 - its index.
#define NO_ENTRY (-1)
#define EVERYTHING 0x7fffffff

// A slot and its places. Positions count elements of the group's own buffer, indices those of an owner's region.
struct SplitSlot {
    i64 bucket;        // from a position to the element of the bucket
    int begin, end;    // positions
    int block;         // its first block, of all blocks
    int first;         // the same in a region
    int edge, last;    // its first index, and the one behind its last
    int shift;         // log2 of its block size
    int start, room;   // its places in a message to an owner
    int entry, keep;   // its entries
    int back_start, back_room;  // its places in a message of sums
    int winners;       // sums that are kept, of all owners together
    int chunk, chunks; // its entries, CHUNK at a time
    int range, ranges; // its part of a region, or of a list of sums, cut into pieces
};
static_assert(LAYOUT_OF_SplitSlot, "split_tables.py has another SplitSlot");

// Entries that one block has.
struct PickChunk {
    int entry, count, slot;
};
static_assert(LAYOUT_OF_PickChunk, "split_tables.py has another PickChunk");

// Indices of a region that one block has.
struct SumRange {
    int begin, end, slot;
};
static_assert(LAYOUT_OF_SumRange, "split_tables.py has another SumRange");

// The sums of a range: a part of the list of its slot.
struct RangeState {
    int list, count, end;  // where it begins, how many there are, and where the next range's begin
    int place;             // of the first that is sent
};
static_assert(LAYOUT_OF_RangeState, "split_tables.py has another RangeState");

// The owner of a block, and where it begins in the owner's region.
struct Spot {
    int owner, first;
};
static_assert(LAYOUT_OF_Spot, "split_tables.py has another Spot");

// Bytes of a message to an owner: flags, then indices, then values. Messages of sums have no flags.
struct SplitForm {
    int head, total, row;  // bytes of flags, places, bytes of all
    int back;              // places of a message of sums
    int slots, blocks;     // blocks of a region
    int rank, world;
};
static_assert(LAYOUT_OF_SplitForm, "split_tables.py has another SplitForm");

static __device__ __forceinline__ const int* indices_of(const u8* entries) { return reinterpret_cast<const int*>(entries); }
static __device__ __forceinline__ const Value* values_of(const u8* entries, int total) {
    return reinterpret_cast<const Value*>(entries + 4 * (i64)total);
}

static __device__ __forceinline__ void put(u8* entries, int total, int place, int index, Value value) {
    reinterpret_cast<int*>(entries)[place] = index;
    reinterpret_cast<Value*>(entries + 4 * (i64)total)[place] = value;
}

// Of a sum: 0 counts as the smallest number.
static __device__ __forceinline__ int sum_bits(float x) { return max(magnitude(x), 1); }

static __device__ __forceinline__ int position_of(const SplitSlot& slot, const int* starts, const SplitForm& form, int owner, int index) {
    const int local = index - slot.edge;
    return starts[owner * form.blocks + slot.first + (local >> slot.shift)] + (local & ((1 << slot.shift) - 1));
}

// The first place of `count` rising indices that is not below `index`; empty places are last.
static __device__ __forceinline__ int first_from(const int* indices, int count, int index) {
    int low = 0;
    while (count > 0) {
        const int half = count / 2;
        if ((u32)indices[low + half] < (u32)index)
            low += half + 1, count -= half + 1;
        else
            count = half;
    }
    return low;
}

// What is taken: magnitudes above `low`, and those that equal it up to place `last`.
struct Cut {
    int low, last;

    __device__ __forceinline__ bool takes(int bits, int at) const { return bits > low || (bits == low && at <= last); }
};
static_assert(LAYOUT_OF_Cut, "split_tables.py has another Cut");

// The place of the `wanted`-th of those that equal `low`, in order.
template <class BitsAt>
static __device__ __forceinline__ int find_tie(const BitsAt& bits_at, int count, int low, int wanted, Deciders& group, int* answer) {
    const int lane = threadIdx.x & 31;
    int seen = 0;
    for (int base = 0; base < count && seen < wanted; base += BINS) {
        const int i = base + (int)threadIdx.x;
        const bool equal = i < count && bits_at(i) == low;
        const u32 all = __ballot_sync(EVERY_LANE, equal);
        int total;
        const int before = seen + group.before(__popc(all), total) + lanes_before(all, lane);
        if (equal && before == wanted - 1) answer[0] = i;
        seen += total;
    }
    __syncthreads();
    const int found = answer[0];
    __syncthreads();
    return found;
}

// Takes `keep` of `count`, ties to the first, or all if there are no more. `bits_at(i)` is at least 1, or below 0 where nothing is. Only
// speed depends on the guess, which is left as the next call needs it. A block of BINS threads comes together.
template <class BitsAt>
static __device__ __forceinline__ Cut find_cut(
    const BitsAt& bits_at, int count, int keep, int* guess, Deciders& group, DecideShared& shared) {
    if (count <= keep) return {0, -1};
    const int about = *guess;
    int top = 0, present = 0, reached = 0;
    for (int base = 0; base < count; base += BATCH * BINS) {
        int bits[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = base + b * BINS + (int)threadIdx.x;
            bits[b] = i < count ? bits_at(i) : -1;
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) top = max(top, bits[b]), present += bits[b] >= 0, reached += bits[b] >= about;
    }
    top = group.largest(warp_max(top));
    present = group.sum(warp_sum(present));
    reached = group.sum(warp_sum(reached));
    if (keep <= 0) return {EVERYTHING, -1};
    if (present <= keep) return {0, -1};
    const bool guessed = about > 0 && reached >= keep;
    const int first = guessed ? about : 0;
    int span = 0, above, tied = guessed ? reached : present;
    while (span < 31 && (top - first) >> span) ++span;
    const auto from_first = [&](int i) {
        const int bits = bits_at(i);
        return bits >= first ? bits - first : -1;
    };
    const int low = first + find_pattern(from_first, count, keep, above, group, shared, span, &tied);
    // After the last look at it above.
    if (threadIdx.x == 0) *guess = max(1, low - (1 << 21));
    if (tied <= keep - above) return {low, EVERYTHING};
    return {low, find_tie(bits_at, count, low, keep - above, group, shared.answer)};
}
