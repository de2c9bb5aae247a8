// Residual add, exact top-k, packing and residual write of rows that fit registers, in one pass over memory.
//
// A row lies in the registers of WARPS warps, ELEMENTS per lane. Warp w owns the w-th part of the row, so that order is
// settled inside a warp and by one prefix over the warps.
//  1. c = residual + gradient, or as momentum.cuh says.
//  2. Find a bit pattern that `keep` magnitudes reach and fewer exceed: start at the pattern of the last call, step away from
//     it until it is between two bounds, then go by the counts at both. Most rows stop at a pattern that exactly `keep`
//     magnitudes reach.
//  3. Write the chosen entries in ascending order of index, ties to the lowest, and the rest back to memory.
//
// COLUMNS is the number of rows per block. Strided rows are neighbours in memory: the block loads and stores them together,
// so that memory is read in whole sectors, and turns them in shared memory.

#include "momentum.cuh"

#define QUADS (ELEMENTS / 4)
#define ROW_THREADS (32 * WARPS)
#if WARPS == 1 && COLUMNS == 1
#define BLOCK_THREADS 128
#else
#define BLOCK_THREADS (ROW_THREADS * COLUMNS)
#endif
// Sixteen to twenty warps on a multiprocessor keep its memory busy and leave each thread a hundred registers.
#define BLOCKS_AT_ONCE (BLOCK_THREADS > 256 ? 1 : (ELEMENTS > 32 ? 512 : 640) / BLOCK_THREADS)
#define FIRST_STEP_WARM (1 << 19)
#define FIRST_STEP_COLD (1 << 21)
// Quads under way at once: with momentum each is three loads, and registers are what a row lies in.
#define QUAD_BATCH (MOMENTUM ? BATCH / 2 : BATCH)
// Probes that go by the counts before halving: halving alone ends for sure.
#define GUIDED_PROBES 6

struct RowTeam {
    int* words;  // 2 x WARPS in shared memory, used in turn: one barrier per sum is then enough
    int turn, warp, team;

    __device__ __forceinline__ int* share(int x) {
        int* mine = words + (turn ^= 1) * WARPS;
        if ((threadIdx.x & 31) == 0) mine[warp] = x;
#if COLUMNS == 1
        __syncthreads();
#else
        static_assert(WARPS == 1 || COLUMNS <= 4, "there are barriers for four teams");
        sync_team(team, ROW_THREADS);
#endif
        return mine;
    }

    __device__ __forceinline__ int sum(int x) {
        x = warp_sum(x);
#if WARPS > 1
        int* all = share(x);
        x = 0;
        for (int w = 0; w < WARPS; ++w) x += all[w];
#endif
        return x;
    }

    // Sum over the warps before this one.
    __device__ __forceinline__ int before(int x) {
#if WARPS > 1
        int* all = share(warp_sum(x));
        x = 0;
        for (int w = 0; w < warp; ++w) x += all[w];
        return x;
#else
        return 0;
#endif
    }

    __device__ __forceinline__ int largest(int x) {
        x = warp_max(x);
#if WARPS > 1
        int* all = share(x);
        for (int w = 0; w < WARPS; ++w) x = max(x, all[w]);
#endif
        return x;
    }
};

static __device__ __forceinline__ int count_reaching(const float (&c)[ELEMENTS], int pattern) {
    float threshold = __int_as_float(pattern);
    // Four sums, so that an addition does not wait for the one before.
    int reached[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) reached[e & 3] += fabsf(c[e]) >= threshold;
    return reached[0] + reached[1] + reached[2] + reached[3];
}

// Where between two patterns `keep` magnitudes are to be expected: their number falls about exponentially.
static __device__ __forceinline__ int expect(int low, int reached, int high, int fewer, int keep) {
    float top = logf((float)reached), bottom = logf((float)fewer + 0.5f), aim = logf((float)keep + 0.25f);
    float share = (top - aim) / (top - bottom);
    share = fminf(fmaxf(share, 0.03f), 0.97f);
    return min(max(low + (int)((float)(high - low) * share), low + 1), high - 1);
}

// (pattern, how many reach it): at least `keep` do, and either exactly `keep` or fewer reach the next pattern.
static __device__ __forceinline__ int search(const float (&c)[ELEMENTS], const Row& row, int guess, RowTeam& team, int& reached) {
    int low = 0, high = INFINITE + 1, fewer = 0, step = FIRST_STEP_WARM, direction = 0, probes = 0;
    reached = row.length;
    if (reached == row.keep) return low;
    if (guess <= 0) {
        int largest = 0;
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) {
            int bits = __float_as_int(c[e]) & 0x7fffffff;
            largest = max(largest, bits <= INFINITE ? bits : 0);
        }
        guess = team.largest(largest);
        high = guess + 1;
        step = FIRST_STEP_COLD;
    }
    bool stepping = true;
    while (reached != row.keep && high - low > 1) {
        int middle;
        if (stepping)
            middle = min(max(guess, low + 1), high - 1);
        else if (probes++ < GUIDED_PROBES)
            middle = expect(low, reached, high, fewer, row.keep);
        else
            middle = low + (high - low) / 2;
        int enough = team.sum(count_reaching(c, middle));
        int went = enough >= row.keep ? 1 : -1;
        if (went > 0) {
            low = middle;
            reached = enough;
        } else {
            high = middle;
            fewer = enough;
        }
        stepping = stepping && (direction == 0 || direction == went);
        direction = went;
        guess = went > 0 ? (high - middle > step ? middle + step : high - 1)
                         : (middle - low > step ? middle - step : low + 1);
        step = step < (1 << 28) ? step * 2 : step;
    }
    return low;
}

#if COLUMNS > 1
// Neighbouring elements of a column are this far apart in shared memory; odd, so that a warp's reads do not collide.
#define COLUMN_PITCH(length) ((length) | 1)
#endif

extern "C" __global__ __launch_bounds__(BLOCK_THREADS, BLOCKS_AT_ONCE) void encode_rows(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, int* guesses, const float* ratio,
    int count MOMENTUM_PARAMETERS) {
    const int lane = threadIdx.x & 31;
    const int local = threadIdx.x / ROW_THREADS, number = blockIdx.x * (blockDim.x / ROW_THREADS) + local;
#if WARPS > 1
    __shared__ int words[2 * WARPS * COLUMNS];
    RowTeam team = {words + 2 * WARPS * local, 0, (int)(threadIdx.x % ROW_THREADS) / 32, local};
#else
    RowTeam team = {nullptr, 0, 0, 0};
#endif
#if COLUMNS == 1
    if (number >= count) return;
#endif
    const bool live = number < count;
    const Row row = rows[live ? number : count - 1];
    const int first = team.warp * 32 * ELEMENTS;
    const float scale = *ratio;
    const Momentum correction = MOMENTUM_OF_GROUP;
    bool had = false, bad = false;
    float c[ELEMENTS];

#if COLUMNS > 1
    DYNAMIC_SHARED(float, columns);
    // The first row tells where the others are: a block takes rows of one slot that follow each other.
    const Row head = rows[blockIdx.x * COLUMNS];
    const int here = min(COLUMNS, head.neighbours), pitch = COLUMN_PITCH(head.length);
    const int column = threadIdx.x % COLUMNS, step = BLOCK_THREADS / COLUMNS;
    if (column < here) {
        const Gradient* gradient = bucket + head.gradient + column;
        const float* old = memory + head.memory + column;
        for (int start = threadIdx.x / COLUMNS; start < head.length; start += BATCH * step) {
            Gradient fresh[BATCH];
            float before[BATCH], last[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const i64 at = (i64)min(start + i * step, head.length - 1) * head.stride;
                fresh[i] = gradient[at];
                before[i] = old[at];
                last[i] = correction.get(head.memory + column + at);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int j = start + i * step;
                if (j < head.length) {
                    columns[column * pitch + j] = correction.compensate(fresh[i], before[i], scale, last[i], had, bad);
                    correction.put(head.memory + column + (i64)j * head.stride, last[i]);
                }
            }
        }
    }
    __syncthreads();
    float* held = columns + local * pitch;
    const bool mine = local < here;
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
        int at = first + ((e / 4) * 32 + lane) * 4 + e % 4;
        c[e] = mine && at < row.length ? held[at] : __int_as_float(0x7fffffff);
    }
    if (mine) {
#else
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
                // Not a number reaches no threshold, so that places outside the row are never chosen.
                if (at >= row.length) c[e] = c[e + 1] = c[e + 2] = c[e + 3] = __int_as_float(0x7fffffff);
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
                                   : __int_as_float(0x7fffffff);
            if (at < row.length) correction.put(row.memory + at, last);
        }
    }
#endif

    int reached;
    const int pattern = search(c, row, guesses[number], team, reached);
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
        for (int q = 0; q < QUADS; ++q) {
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
    for (int q = 0; q < QUADS; ++q) {
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
#if COLUMNS == 1
        if (row.vector) {
            if (at < row.length)
                *reinterpret_cast<float4*>(held + at) = make_float4(c[4 * q], c[4 * q + 1], c[4 * q + 2], c[4 * q + 3]);
            continue;
        }
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i < row.length) held[at + i] = c[4 * q + i];
    }
    if (team.warp == 0 && lane == 0) guesses[number] = pattern;

#if COLUMNS > 1
    }
    __syncthreads();
    if (column < here)
        for (int j = threadIdx.x / COLUMNS; j < head.length; j += step)
            memory[head.memory + (i64)j * head.stride + column] = columns[column * pitch + j];
#endif
    u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if (lane == 0) {
        if (any_had) raise(had_word(payload, row.slot));
        if (any_bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
    }
}
