// Payloads whose slots are whole tensors and tell in the header how many of their places are taken.
//
// The places behind are left over: they hold 0 at index 0 and are never looked at. Indices ascend before them.

#include "decode.cuh"

struct Piece {
    int first;  // slot
    int start;  // elements [start, start + PIECE)
};

struct Aim {
    Row row;
    int unused[4];
};

static __device__ __forceinline__ const int* words_of(const u8* payload, int slot) {
    return reinterpret_cast<const int*>(payload) + HEADER_FIXED + slot * (HEADER_SLOT + NOTE_WORDS);
}

// Entries of a slot in one rank's payload; a header that says more than there are places marks the step as bad elsewhere.
static __device__ __forceinline__ int count_of(const u8* payload, const Row& row) {
    return max(0, min(words_of(payload, row.slot)[0], row.keep));
}

// Both flags of the last step go down; the one block of a kernel that reads headers does it.
static __device__ __forceinline__ void clear(u8* status) {
    if (threadIdx.x < 2) status[threadIdx.x] = 0;
    __syncthreads();
}

// As read_headers of decode.cu, with counts up to the places of each slot.
extern "C" __global__ void read_counts(
    const u8* gathered, const int* header, const Aim* aims, u8* used, u8* status, int world, int payload_bytes, int slots) {
    clear(status);
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        bool any = false;
        for (int rank = 0; rank < world; ++rank) {
            const int* words = words_of(gathered + (i64)rank * payload_bytes, slot);
            any |= words[HEADER_HAD] != 0;
            if (words[0] < 0 || words[0] > aims[slot].row.keep) raise(status);
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
    const u8* gathered, float* out, const Aim* aims, const Piece* pieces, const u8* used, u8* status, float* share, int world,
    int payload_bytes, int into_bucket) {
    __shared__ __align__(16) float sums[ROOM];
    __shared__ int edges[MOST_AT_ONCE][2];
    const Piece piece = pieces[blockIdx.x];
    const Row row = aims[piece.first].row;
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
    float* memory, const u8* payload, const Aim* aims, const u8* used, const u8* bad, const u8* unused, int slots) {
    const bool used_ones = *bad, other_ones = *unused;
    if (!used_ones && !other_ones) return;
    for (int slot = 0; slot < slots; ++slot) {
        if (!(used[slot] ? used_ones : other_ones)) continue;
        const Row row = aims[slot].row;
        const int count = count_of(payload, row);
        for (int place = blockIdx.x * blockDim.x + threadIdx.x; place < count; place += gridDim.x * blockDim.x) {
            float* at = memory + row.memory + read_index(payload, row, place);
            *at = __fadd_rn(*at, from_wire(reinterpret_cast<const Value*>(payload + row.values)[place]));
        }
    }
}
