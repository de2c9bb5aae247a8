// Payloads of whole tensors whose header tells how many places of each slot are taken. The other places are never looked at.

#include "decode.cuh"
#include "overflow.cuh"

struct SlotPiece {
    int slot;
    int start;  // elements [start, start + PIECE)
};
static_assert(LAYOUT_OF_SlotPiece, "fused_threshold.py has another SlotPiece");

struct SlotGoal {
    Row row;
    int fewest, target, exact, unused;  // not looked at here
};
static_assert(LAYOUT_OF_SlotGoal, "fused_threshold.py has another SlotGoal");

// Entries of a slot in one rank's payload. A header may say more than there are places; `read_counts` reports it.
static __device__ __forceinline__ int count_of(const u8* payload, const Row& row) {
    return max(0, min(slot_words(payload, row.slot)[0], row.keep));
}

// Both flags of the last step go down. The one block of `read_counts` does it.
static __device__ __forceinline__ void clear(u8* status) {
    if (threadIdx.x < 2) status[threadIdx.x] = 0;
    __syncthreads();
}

// As read_headers of decode.cu, with counts up to the places of each slot.
extern "C" __global__ void read_counts(
    const u8* gathered, const int* header, const SlotGoal* goals, u8* used, u8* status, int world, int payload_bytes, int slots) {
    clear(status);
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        bool any = false;
        for (int rank = 0; rank < world; ++rank) {
            const int* words = slot_words(gathered + (i64)rank * payload_bytes, slot);
            any |= words[HEADER_HAD] != 0;
            if (words[0] < 0 || words[0] > goals[slot].row.keep) raise(status);
        }
        used[slot] = any;
        if (!any) raise(status + 1);
    }
    for (int i = threadIdx.x; i < world * HEADER_FIXED; i += blockDim.x) {
        const u8* payload = gathered + (i64)(i / HEADER_FIXED) * payload_bytes;
        if (reinterpret_cast<const int*>(payload)[i % HEADER_FIXED] != header[i % HEADER_FIXED]) raise(status);
    }
}

// As decode_piece of decode.cu, a block for each piece of a slot.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_AT_ONCE) void decode_counted(
    const u8* gathered, float* out, const SlotGoal* goals, const SlotPiece* pieces, const u8* used, u8* status, float* share, int world,
    int payload_bytes, int into_bucket) {
    __shared__ __align__(16) float sums[ROOM];
    __shared__ int edges[MOST_AT_ONCE][2];
    const SlotPiece piece = pieces[blockIdx.x];
    const Row row = goals[piece.slot].row;
    clear_sums(sums);
    const Reply reply = {gathered, world, payload_bytes};
    const int start = piece.start, here = min(row.length - start, PIECE);
    float* target = out + (into_bucket ? row.gradient : row.memory) + start;
    const int shift = misplaced(target);
    float* sum = sums + shift;
    const bool live = used[row.slot];
    bool bad = false;
    const auto add = [&](int index, float value) {
        const u32 at = (u32)index - (u32)start;
        if (at < (u32)here)
            sum[at] = __fadd_rn(sum[at], value);
        else
            bad = true;
    };
    for (int before = 0; live && before < world; before += MOST_AT_ONCE) {
        const int together = min(world - before, MOST_AT_ONCE);
        for (int rank = threadIdx.x / 32; rank < together; rank += THREADS / 32) {
            const u8* payload = reply.of(before + rank);
            int begin, end;
            find_edges<32>(payload, row, 0, count_of(payload, row), start, start + here, begin, end);
            bad |= end < begin;
            edges[rank][0] = begin, edges[rank][1] = end;
        }
        __syncthreads();
        add_between(reply, row, before, together, edges, add);
    }
    __syncthreads();
    if (write_means(target, sums, shift, here, *share) | bad) raise(status);
}

// As give_back of settle.cu, all blocks on one slot after the other.
extern "C" __global__ void give_back_counted(
    float* memory, const u8* payload, const SlotGoal* goals, const u8* used, const u8* bad, const u8* unused, int slots) {
    const bool used_ones = *bad, other_ones = *unused;
    if (!used_ones && !other_ones) return;
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int slot = 0; slot < slots; ++slot) {
        const Row row = goals[slot].row;
        // What was sent left something finite behind, so that no thread waits for another.
        if (used_ones) drop_overflow(memory, row, first, step);
        if (!(used[slot] ? used_ones : other_ones)) continue;
        const int count = count_of(payload, row);
        for (int place = first; place < count; place += step) {
            float* at = memory + row.memory + read_index(payload, row, place);
            *at = __fadd_rn(*at, from_wire(reinterpret_cast<const Value*>(payload + row.values)[place]));
        }
    }
}
