// Residual add, exact top-k, packing and residual write of contiguous rows that fit registers and of which too many elements are sent
// for stream_rows, in one pass over memory; rows of all shapes in one launch, because a bucket has few rows of each and a launch ends
// when its slowest block does.
//
//  1. c = residual + gradient, or as momentum.cuh says.
//  2. Find a bit pattern that `keep` magnitudes reach and fewer exceed: start at the pattern of the last call, step away from
//     it until it is between two bounds, then go by the counts at both. Most rows stop at a pattern that exactly `keep`
//     magnitudes reach.
//  3. Write the chosen entries in ascending order of index, ties to the lowest, and the rest back to memory.
//
// A row lies in the registers of one warp or TEAM, ELEMENTS per lane. Warp w owns the w-th part of the row, so that order is
// settled inside a warp and by one prefix over the warps. A lane has four neighbours at a time: its element e is at
// ((e / 4) x 32 + lane) x 4 + e % 4 of the warp's part.
//
// TEAM is how many warps the long rows have; in a block of four warps four short rows take the place of a long one.
// SHAPES says which shapes there are: bit i for rows of one warp with 4 (i + 1) elements per lane, bit 16 + i for those of TEAM.

#include "momentum.cuh"
#include "team.cuh"

#define BLOCK_THREADS (32 * TEAM)
#define MANY_ELEMENTS ((SHAPES & 0xff00ff00) != 0)
// Sixteen to twenty warps on a multiprocessor keep its memory busy and leave each thread a hundred registers.
#define BLOCKS_AT_ONCE (BLOCK_THREADS > 256 ? 1 : (MANY_ELEMENTS ? 512 : 640) / BLOCK_THREADS)
// Quads under way at once: with momentum each is three loads, and registers are what a row lies in.
#define QUAD_BATCH (MOMENTUM ? BATCH / 2 : BATCH)

struct Part {
    int shape;  // its bit in SHAPES
    int first;  // row number
    int rows;
};

template <int ELEMENTS>
static __device__ __forceinline__ int count_reaching(const float (&c)[ELEMENTS], int pattern) {
    float threshold = __int_as_float(pattern);
    // Four sums, so that an addition does not wait for the one before.
    int reached[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) reached[e & 3] += fabsf(c[e]) >= threshold;
    return reached[0] + reached[1] + reached[2] + reached[3];
}

// Choose from the elements that the team's lanes have in `c`: entries to the payload in ascending order of index, ties to the
// lowest, the rest to `held` (`quads`: four at a time are aligned there). `guess` is where the search starts, and ends.
template <int ELEMENTS, class Team>
static __device__ __forceinline__ void send_row(
    float (&c)[ELEMENTS], const Row& row, int* guess, Team& team, float* held, bool quads, u8* payload,
    const Momentum& correction, bool& bad) {
    const int lane = threadIdx.x & 31, first = team.warp * 32 * ELEMENTS;
    int reached;
    const auto count = [&](int pattern) { return count_reaching(c, pattern); };
    const auto largest = [&] {
        int bits = 0;
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) bits = max(bits, ordered(c[e]));
        return bits;
    };
    const int pattern = search(row, *guess, team, reached, count, largest);
    const float threshold = __int_as_float(pattern);
    const bool exact = reached == row.keep;
    int missing = 0, ties_before = 0;
    if (!exact) {
        int above = 0, tied = 0;
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) {
            above += fabsf(c[e]) > threshold;
            tied += fabsf(c[e]) == threshold;
        }
        missing = row.keep - team.sum(above);
        ties_before = team.before(tied);
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
    int place = team.before(__popc(chosen[0]) + __popc(chosen[1]));

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
                if ((four >> i) & 1)
                    c[4 * q + i] = correction.send(c[4 * q + i], first + (q * 32 + lane) * 4 + i, next++, row, payload, bad);
            place += all;
        }
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
    if (team.warp == 0 && lane == 0) *guess = pattern;
}

template <int WARPS, int ELEMENTS>
static __device__ __forceinline__ void encode_part(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, const Part& part, int* guesses, const float* ratio,
    const Momentum& correction) {
    constexpr int QUADS = ELEMENTS / 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    __shared__ int words[2 * WARPS];
    RowTeam<WARPS> team = {words, 0, WARPS > 1 ? warp : 0};
    const int local = WARPS > 1 ? 0 : warp, number = part.first + local;
    if (local >= part.rows) return;
    const Row row = rows[number];
    const int first = team.warp * 32 * ELEMENTS;
    const float scale = *ratio;
    bool had = false, bad = false;
    float c[ELEMENTS];

    const Gradient* gradient = bucket + row.gradient;
    float* held = memory + row.memory;
    bool plain = !row.vector;
    if (row.vector) {
        int any = 0, top = 0;
#pragma unroll
        for (int start = 0; start < QUADS; start += QUAD_BATCH) {
            float4 old[QUAD_BATCH], last[QUAD_BATCH];
            Quad fresh[QUAD_BATCH];
#pragma unroll
            for (int i = 0; i < QUAD_BATCH && start + i < QUADS; ++i) {
                // No branch, so that all loads leave together; places outside the row read its end.
                const int at = min(first + ((start + i) * 32 + lane) * 4, row.length - 4);
                old[i] = *reinterpret_cast<const float4*>(held + at);
                fresh[i] = *reinterpret_cast<const Quad*>(gradient + at);
                last[i] = correction.get_quad(row.memory + at);
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
        }
    }
    send_row(c, row, guesses + number, team, held, row.vector, payload, correction, bad);
    report(had, bad, row.slot, payload);
}

// The shapes from SHAPE on; only those that there are become code.
template <int SHAPE>
static __device__ __forceinline__ void encode_shape(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, const Part& part, int* guesses, const float* ratio,
    const Momentum& correction) {
    if constexpr (SHAPE < 32) {
        if constexpr ((((u32)SHAPES >> SHAPE) & 1) != 0) {
            if (part.shape == SHAPE) {
                encode_part<(SHAPE < 16 ? 1 : TEAM), 4 * (SHAPE % 16 + 1)>(
                    bucket, memory, payload, rows, part, guesses, ratio, correction);
                return;
            }
        }
        encode_shape<SHAPE + 1>(bucket, memory, payload, rows, part, guesses, ratio, correction);
    }
}

extern "C" __global__ __launch_bounds__(BLOCK_THREADS, BLOCKS_AT_ONCE) void encode_rows(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, const Part* parts, int* guesses,
    const float* ratio MOMENTUM_PARAMETERS) {
    const Momentum correction = MOMENTUM_OF_GROUP;
    encode_shape<0>(bucket, memory, payload, rows, parts[blockIdx.x], guesses, ratio, correction);
}
