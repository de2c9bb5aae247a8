// Around an exchange that is torch code on entries: memory before it, the update after it, and parts of a gradient to select from.

#include "clear.cuh"
#include "find_slot.cuh"

// Neighbours of a slot that one block has.
struct EntryPiece {
    i64 bucket, memory;
    int count, slot;
};
static_assert(LAYOUT_OF_EntryPiece, "entries.py has another EntryPiece");

// Gradient and memory become c, in memory. flags: a byte for each slot that had a gradient, then one for what is not finite, which
// becomes 0.
extern "C" __global__ __launch_bounds__(PIECE_THREADS) void open_memory(
    const Gradient* bucket, const float* before, float* memory, const EntryPiece* pieces, const float* ratio, u8* flags, int slots) {
    const EntryPiece piece = pieces[blockIdx.x];
    const float scale = *ratio;
    bool had = false, bad = false;
    for (int base = threadIdx.x; base < piece.count; base += BATCH * PIECE_THREADS) {
        Gradient raw[BATCH];
        float held[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = min(base + b * PIECE_THREADS, piece.count - 1);
            raw[b] = bucket[piece.bucket + i];
            held[b] = before[piece.memory + i];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = base + b * PIECE_THREADS;
            if (i >= piece.count) break;
            const float c = compensate(raw[b], held[b], scale, had, bad);
            // A sum of finite numbers can overflow; nothing of that may stay.
            bad |= !is_finite(c);
            memory[piece.memory + i] = is_finite(c) ? c : 0.0f;
        }
    }
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if ((threadIdx.x & 31) != 0) return;
    if (any_had) raise(flags + piece.slot);
    if (any_bad) raise(flags + slots);
}

extern "C" __global__ void clear_bucket(float* bucket, const Cleared* pieces, u8* wrong) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *wrong = 0;
    const Cleared piece = pieces[blockIdx.x];
    clear(bucket + piece.bucket, piece.count);
}

// Means of sums at flat positions, each once, to the bucket, which holds zeros. A position outside the group is nowhere.
extern "C" __global__ void write_entries(
    const i64* positions, const float* sums, float* bucket, const i64* begins, const i64* into_bucket, u8* wrong, const float* share,
    int count, int slots, int numel) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const i64 position = positions[i];
    if (position < 0 || position >= numel) return;
    const float mean = __fmul_rn(sums[i], *share);
    bucket[position + into_bucket[find_slot(position, begins, slots)]] = mean;
    if (!is_finite(mean)) raise(wrong);
}

// Blocks of one size, a power of two, that one block of threads takes.
struct TakenBlocks {
    int first, count;  // blocks
    int shift;         // log2 of their size
    int place;         // where their elements go
};
static_assert(LAYOUT_OF_TakenBlocks, "entries.py has another TakenBlocks");

// The elements of some blocks of a flat tensor, block after block; zeros from `ends` on.
extern "C" __global__ __launch_bounds__(PIECE_THREADS) void take_blocks(
    const float* flat, float* taken, const TakenBlocks* pieces, const i64* starts, const i64* ends) {
    const TakenBlocks piece = pieces[blockIdx.x];
    const int count = piece.count << piece.shift, mask = (1 << piece.shift) - 1;
    for (int i = threadIdx.x; i < count; i += PIECE_THREADS) {
        const int block = piece.first + (i >> piece.shift);
        const i64 at = starts[block] + (i & mask);
        taken[piece.place + i] = at < ends[block] ? flat[at] : 0.0f;
    }
}
