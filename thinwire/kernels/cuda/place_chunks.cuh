// Where each chunk's entries go in the payload, decided by one block of BINS threads.

#include "chunks.cuh"
#include "histogram.cuh"

// Chunks of a thread that are placed in one round; more would not fit the registers of two blocks on a multiprocessor.
#define PLACED_AT_ONCE 4

// Without a list, the elements of every chunk are its candidates.
static __device__ __forceinline__ void take_all(Section* sections, const Chunk* chunks, int count) {
    for (int number = threadIdx.x; number < count; number += BINS)
        sections[number].start = chunks[number].start, sections[number].count = chunks[number].count;
    __syncthreads();
}

// Sections learn how many of their candidates exceed `low` and how many equal it; `bits_at(i)` is the i-th of the row.
template <class BitsAt>
static __device__ __forceinline__ void count_all(Section* sections, int chunks, int low, const BitsAt& bits_at) {
    constexpr int WARPS = BINS / 32;
    const int lane = threadIdx.x & 31;
    // Neighbours are one warp's, so that it asks once where all of them begin.
    const int each = min((chunks + WARPS - 1) / WARPS, 32);
    for (int base = (int)threadIdx.x / 32 * each; base < chunks; base += WARPS * each) {
        const int here = min(each, chunks - base);
        int start = 0, count = 0, above = 0, tied = 0;
        if (lane < here) start = sections[base + lane].start, count = sections[base + lane].count;
        for (int k = 0; k < here; ++k) {
            const int from = __shfl_sync(EVERY_LANE, start, k), to = from + __shfl_sync(EVERY_LANE, count, k);
            int over = 0, equal = 0;
#pragma unroll 4
            for (int i = from + lane; i < to; i += 32) {
                const int bits = bits_at(i);
                over += bits > low;
                equal += bits == low;
            }
            over = warp_sum(over), equal = warp_sum(equal);
            if (lane == k) above = over, tied = equal;
        }
        if (lane < here) sections[base + lane].place = above, sections[base + lane].ties = tied;
    }
}

// From how many exceed `low` and equal it in each chunk to where its entries begin and how many ties it sends, of `ties` in all.
// A thread has up to PLACED_AT_ONCE neighbours, whose loads are under way at once.
static __device__ __forceinline__ void place_sections(Section* sections, int chunks, int ties, Deciders& group) {
    int tied_before = 0, sent_before = 0;
    for (int base = 0; base < chunks; base += PLACED_AT_ONCE * BINS) {
        const int count = min(chunks - base, PLACED_AT_ONCE * BINS), each = (count + BINS - 1) / BINS;
        const int first = base + each * (int)threadIdx.x, end = min(first + each, base + count);
        int above[PLACED_AT_ONCE], tied[PLACED_AT_ONCE], all_tied = 0, sent = 0, total;
#pragma unroll
        for (int b = 0; b < PLACED_AT_ONCE; ++b) {
            const Section& section = sections[min(first + b, chunks - 1)];
            above[b] = section.place, tied[b] = section.ties;
        }
#pragma unroll
        for (int b = 0; b < PLACED_AT_ONCE; ++b) {
            if (first + b >= end) above[b] = tied[b] = 0;
            all_tied += tied[b];
        }
        int before = tied_before + group.sum_upto(all_tied, total) - all_tied;
        tied_before += total;
#pragma unroll
        for (int b = 0; b < PLACED_AT_ONCE; ++b) {
            const int here = tied[b];
            tied[b] = max(0, min(here, ties - before));
            before += here;
            sent += above[b] + tied[b];
        }
        int place = sent_before + group.sum_upto(sent, total) - sent;
        sent_before += total;
#pragma unroll
        for (int b = 0; b < PLACED_AT_ONCE; ++b) {
            if (first + b < end) sections[first + b].place = place, sections[first + b].ties = tied[b];
            place += above[b] + tied[b];
        }
    }
}
