// Contiguous rows that fit registers, and of which too many elements are sent for stream_rows.cu: residual add, exact top-k,
// packing and residual write in one pass over memory. Rows of all shapes are one launch: a bucket has few rows of each shape, and a
// launch ends when its slowest block does.
//
//  1. c = residual + gradient, or as momentum.cuh says. The residual is read from `before`, which may be `memory` itself.
//  2. Find a pattern that `keep` magnitudes reach and fewer exceed, from that of the last call on. Most rows stop at one that exactly
//     `keep` magnitudes reach.
//  3. Write the chosen entries in ascending order of index, ties to the lowest, and the rest back to memory. Where weights are in
//     the registers (momentum.cuh), c went to memory in step 1 already.
//
// A row lies in the registers of one warp, or of all BLOCK_WARPS warps of a block. Warp w owns the w-th part of the row: order is
// settled inside a warp and by one prefix over the warps. A lane has four neighbours at a time: its element e is at
// ((e / 4) x 32 + lane) x 4 + e % 4 of the warp's part.
//
// SHAPES says which shapes there are. Bit i: rows of one warp with 4 (i + 1) elements per lane. Bit LONG_SHAPES + i: the same for
// rows of BLOCK_WARPS warps.

#include "momentum.cuh"
#include "search.cuh"

#define BLOCK_THREADS (32 * BLOCK_WARPS)
// Whether a lane has more than 32 elements of some row.
#define MANY_ELEMENTS ((SHAPES & 0xff00ff00) != 0)
static_assert(LONG_SHAPES == 16, "shapes of long rows are the upper half of the bits");
// Sixteen to twenty warps on a multiprocessor keep its memory busy and leave each thread a hundred registers.
#define BLOCKS_AT_ONCE (BLOCK_THREADS > 256 ? 1 : (MANY_ELEMENTS ? 512 : 640) / BLOCK_THREADS)
// Quads that are loaded at once. With momentum each is three loads, in a scale four, and registers are scarce.
#define QUAD_BATCH (SCALED ? BATCH / 4 : MOMENTUM ? BATCH / 2 : BATCH)

// Rows of one shape that a block takes: one long row, or a short row per warp.
struct RowBlock {
    int shape;  // its bit in SHAPES
    int first;  // row number
    int rows;
};
static_assert(LAYOUT_OF_RowBlock, "register_rows.py has another RowBlock");

// One compensated element, without a look at it: `any` and `top` tell afterwards whether there was a gradient, and the largest.
static __device__ __forceinline__ float compensate_unseen(Gradient raw, float held, float ratio, int& any, int& top) {
    float gradient = to_float(raw);
    int bits = magnitude(gradient);
    any |= bits;
    top = max(top, bits);
    return __fadd_rn(__fmul_rn(held, ratio), gradient);
}

template <int ELEMENTS>
static __device__ __forceinline__ int count_reaching(const float (&c)[ELEMENTS], int pattern) {
    float threshold = __int_as_float(pattern);
    // Four sums, so that an addition does not wait for the one before.
    int reached[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) reached[e & 3] += fabsf(c[e]) >= threshold;
    return reached[0] + reached[1] + reached[2] + reached[3];
}

// Choose from the elements that the group's lanes have in `c`. Entries go to the payload, the rest to `held`, four at a time if
// these are aligned (`quads`). The search starts at `guess`, which becomes the pattern found.
template <int ELEMENTS, int WARPS>
static __device__ __forceinline__ void send_row(
    float (&c)[ELEMENTS], const Row& row, int* guess, WarpGroup<WARPS>& group, float* held, bool quads, u8* payload,
    const Momentum& correction, bool& bad) {
    const int lane = threadIdx.x & 31, first = group.warp * 32 * ELEMENTS;
    const auto count = [&](int pattern) { return group.sum(warp_sum(count_reaching(c, pattern))); };
    const auto largest = [&] {
        float most = 0.0f;
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) most = fmaxf(most, fabsf(c[e]));
        return group.largest(warp_max(__float_as_int(most)));
    };
    Threshold found = {0, row.length, 0};
    found.search<OCTAVE / 16, 0>(row.keep, *guess, count, largest);
    const float threshold = __int_as_float(found.low);
    const bool exact = found.reached == row.keep;
    const int missing = found.missing(row.keep);
    int ties_before = 0;
    if (!exact && WARPS > 1) {
        int tied = 0;
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) tied += fabsf(c[e]) == threshold;
        ties_before = group.before_lanes(tied);
    }
    // Which elements of this lane are sent, one bit each.
    static_assert(ELEMENTS <= 64, "two words would not be enough");
    u32 chosen[2] = {0, 0};
    if (exact) {
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) chosen[e / 32] |= (u32)(fabsf(c[e]) >= threshold) << (e % 32);
    } else {
#pragma unroll
        for (int q = 0; q < ELEMENTS / 4; ++q) {
            int earlier = ties_before;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 ballot = __ballot_sync(EVERY_LANE, fabsf(c[4 * q + i]) == threshold);
                earlier += lanes_before(ballot, lane);
                ties_before += __popc(ballot);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int e = 4 * q + i;
                const bool tie = fabsf(c[e]) == threshold;
                chosen[e / 32] |= (u32)(tie ? earlier < missing : fabsf(c[e]) > threshold) << (e % 32);
                earlier += tie;
            }
        }
    }
    int place = group.before_lanes(__popc(chosen[0]) + __popc(chosen[1]));

#pragma unroll
    for (int q = 0; q < ELEMENTS / 4; ++q) {
        const u32 four = (chosen[4 * q / 32] >> (4 * q % 32)) & 15;
        if (__ballot_sync(EVERY_LANE, four != 0)) {
            int lower = 0, all = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 ballot = __ballot_sync(EVERY_LANE, (four >> i) & 1);
                lower += lanes_before(ballot, lane);
                all += __popc(ballot);
            }
            int next = place + lower;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if ((four >> i) & 1) {
                    const int index = first + (q * 32 + lane) * 4 + i;
                    c[4 * q + i] = correction.send(c[4 * q + i], index, next++, row, payload, bad);
                    if (SCALED) held[index] = c[4 * q + i];
                }
            place += all;
        }
        if (SCALED) continue;
        int at = first + (q * 32 + lane) * 4;
        if (quads) {
            if (at < row.length)
                *reinterpret_cast<float4*>(held + at) = make_float4(c[4 * q], c[4 * q + 1], c[4 * q + 2], c[4 * q + 3]);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i < row.length) held[at + i] = c[4 * q + i];
    }
    if (group.warp == 0 && lane == 0) *guess = found.low;
}

template <int WARPS, int ELEMENTS>
static __device__ __forceinline__ void encode_part(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Row* rows, const RowBlock& part, int* guesses, const float* ratio,
    u32* told, const Momentum& correction) {
    constexpr int QUADS = ELEMENTS / 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    __shared__ int words[2 * WARPS];
    WarpGroup<WARPS> group = {words, 0, WARPS > 1 ? warp : 0};
    const int local = WARPS > 1 ? 0 : warp, number = part.first + local;
    if (local >= part.rows) return;
    const Row row = rows[number];
    const int first = group.warp * 32 * ELEMENTS;
    const float scale = *ratio;
    bool had = false, bad = false;
    float c[ELEMENTS];

    const Gradient* gradient = bucket + row.gradient;
    const float* held = before + row.memory;
    bool plain = !row.vector;
    if (row.vector) {
        int any = 0, top = 0;
#pragma unroll
        for (int start = 0; start < QUADS; start += QUAD_BATCH) {
            float4 old[QUAD_BATCH], last[QUAD_BATCH], moments[QUAD_BATCH];
            Quad fresh[QUAD_BATCH];
#pragma unroll
            for (int i = 0; i < QUAD_BATCH && start + i < QUADS; ++i) {
                // No branch, so that all loads leave together; places outside the row read its end.
                const int at = min(first + ((start + i) * 32 + lane) * 4, row.length - 4);
                old[i] = *reinterpret_cast<const float4*>(held + at);
                fresh[i] = *reinterpret_cast<const Quad*>(gradient + at);
                last[i] = correction.get_quad(row.memory + at);
                moments[i] = correction.get_moment_quad(row.memory + at);
            }
#pragma unroll
            for (int i = 0; i < QUAD_BATCH && start + i < QUADS; ++i) {
                const int e = 4 * (start + i), at = first + ((start + i) * 32 + lane) * 4;
#if MOMENTUM
                // The new momentum is written before all of the row has been seen, so every element is looked at.
                c[e] = correction.compensate(fresh[i].x, old[i].x, scale, last[i].x, had, bad);
                c[e + 1] = correction.compensate(fresh[i].y, old[i].y, scale, last[i].y, had, bad);
                c[e + 2] = correction.compensate(fresh[i].z, old[i].z, scale, last[i].z, had, bad);
                c[e + 3] = correction.compensate(fresh[i].w, old[i].w, scale, last[i].w, had, bad);
                if (at < row.length) correction.put_quad(row.memory + at, last[i]);
#if SCALED
                const float4 four = make_float4(c[e], c[e + 1], c[e + 2], c[e + 3]);
                if (UPDATED && at < row.length) reinterpret_cast<float4*>(memory)[(row.memory + at) / 4] = four;
                const float4 weights = correction.weigh_quad(four, moments[i]);
                c[e] = weights.x, c[e + 1] = weights.y, c[e + 2] = weights.z, c[e + 3] = weights.w;
#endif
#else
                c[e] = compensate_unseen(fresh[i].x, old[i].x, scale, any, top);
                c[e + 1] = compensate_unseen(fresh[i].y, old[i].y, scale, any, top);
                c[e + 2] = compensate_unseen(fresh[i].z, old[i].z, scale, any, top);
                c[e + 3] = compensate_unseen(fresh[i].w, old[i].w, scale, any, top);
#endif
                if (at >= row.length) c[e] = c[e + 1] = c[e + 2] = c[e + 3] = NO_ELEMENT;
            }
        }
        had |= any != 0;
        plain = __ballot_sync(EVERY_LANE, top >= INFINITE) != 0;
    }
    if (plain) {
        // Unaligned, or an element is not finite: one by one.
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) {
            int at = first + ((e / 4) * 32 + lane) * 4 + e % 4;
            float last = at < row.length ? correction.get(row.memory + at) : 0.0f;
            c[e] = at < row.length ? correction.compensate(gradient[at], held[at], scale, last, had, bad)
                                   : NO_ELEMENT;
            if (at < row.length) correction.put(row.memory + at, last);
#if SCALED
            if (at < row.length) {
                if (UPDATED) memory[row.memory + at] = c[e];
                c[e] = correction.weigh_held(c[e], row.memory + at);
            }
#endif
        }
    }
    send_row(c, row, guesses + number, group, memory + row.memory, row.vector, payload, correction, bad);
    report(had, bad, row.slot, told, payload);
}

// The shapes from SHAPE on; only those that there are become code.
template <int SHAPE>
static __device__ __forceinline__ void encode_shape(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Row* rows, const RowBlock& part, int* guesses, const float* ratio,
    u32* told, const Momentum& correction) {
    if constexpr (SHAPE < 32) {
        if constexpr ((((u32)SHAPES >> SHAPE) & 1) != 0) {
            if (part.shape == SHAPE) {
                encode_part<(SHAPE < LONG_SHAPES ? 1 : BLOCK_WARPS), 4 * (SHAPE % LONG_SHAPES + 1)>(
                    bucket, before, memory, payload, rows, part, guesses, ratio, told, correction);
                return;
            }
        }
        encode_shape<SHAPE + 1>(bucket, before, memory, payload, rows, part, guesses, ratio, told, correction);
    }
}

extern "C" __global__ __launch_bounds__(BLOCK_THREADS, BLOCKS_AT_ONCE) void encode_rows(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Row* rows, const RowBlock* parts, int* guesses,
    const float* ratio MOMENTUM_PARAMETERS) {
    __shared__ u32 told;
    if (threadIdx.x == 0) told = 0;
    __syncthreads();
    const Momentum correction = MOMENTUM_OF_GROUP;
    encode_shape<0>(bucket, before, memory, payload, rows, parts[blockIdx.x], guesses, ratio, &told, correction);
}
