// The same as encode_rows for rows that are strided or too long for registers: one block takes up to FIBRES neighbouring rows.
//
//  1. c = residual + gradient, or as momentum.cuh says, to memory; a histogram of the leading bits of every magnitude.
//  2. The bin of the keep-th magnitude; while it holds more than is wanted, a histogram of the next bits inside it.
//  3. One bit per element that reaches the pattern found; walking the bits gives the entries in ascending order, ties cut last.
//
// Neighbouring rows lie next to each other in memory where rows are strided, so that a load of FIBRES lanes is one sector.

#include "momentum.cuh"

#define THREADS 1024
#define BINS 1024
#define TEAM (THREADS / FIBRES)

struct Tile {
    int first;  // row number
    int rows;
};

extern "C" __global__ __launch_bounds__(THREADS) void encode_tiles(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, const Tile* tiles, const float* ratio,
    int words MOMENTUM_PARAMETERS) {
    DYNAMIC_SHARED(u32, shared);
    u32* histogram = shared;             // FIBRES x BINS
    u32* reaching = shared;              // FIBRES x words, when the histograms are done with
    __shared__ int low[FIBRES], above[FIBRES], inside[FIBRES], unfinished;

    const Tile tile = tiles[blockIdx.x];
    const int fibre = threadIdx.x % FIBRES, member = threadIdx.x / FIBRES, lane = threadIdx.x & 31;
    const bool live = fibre < tile.rows;
    const Row row = rows[tile.first + (live ? fibre : 0)];
    const Gradient* gradient = bucket + row.gradient;
    float* held = memory + row.memory;
    const float scale = *ratio;
    const Momentum correction = MOMENTUM_OF_GROUP;
    const int length = live ? row.length : 0;
    bool had = false, bad = false;

    for (int i = threadIdx.x; i < FIBRES * BINS; i += THREADS) histogram[i] = 0;
    if (threadIdx.x < FIBRES) low[threadIdx.x] = 0, above[threadIdx.x] = 0;
    __syncthreads();
    for (int start = member; start < length; start += BATCH * TEAM) {
        Gradient fresh[BATCH];
        float before[BATCH], last[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const i64 at = (i64)min(start + i * TEAM, length - 1) * row.stride;
            fresh[i] = gradient[at];
            before[i] = held[at];
            last[i] = correction.get(row.memory + at);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int j = start + i * TEAM;
            if (j < length) {
                const i64 at = (i64)j * row.stride;
                const float c = correction.compensate(fresh[i], before[i], scale, last[i], had, bad);
                held[at] = c;
                correction.put(row.memory + at, last[i]);
                atomicAdd(&histogram[fibre * BINS + ((__float_as_int(c) & 0x7fffffff) >> 21)], 1u);
            }
        }
    }

    // Bits 30..21, 20..11, 10..1, 0.
    for (int shift = 21;; shift = shift > 10 ? shift - 10 : 0) {
        __syncthreads();
        if (threadIdx.x == 0) unfinished = 0;
        __syncthreads();
        // One warp looks at a fibre at a time: from the top bin down to the one in which the count passes `keep`.
        for (int f = threadIdx.x / 32; f < tile.rows; f += THREADS / 32) {
            const int keep = rows[tile.first + f].keep;
            int taken = above[f];
            for (int top = BINS - 32; top >= 0; top -= 32) {
                const int bin = top + 31 - lane;
                const int here = (int)histogram[f * BINS + bin];
                const int upto = sum_upto(here, lane);
                const u32 passed = __ballot_sync(EVERY_LANE, taken + upto >= keep);
                if (passed) {
                    if (lane == __ffs(passed) - 1) {
                        low[f] |= bin << shift;
                        above[f] = taken + upto - here;
                        inside[f] = here;
                        if (taken + upto > keep && shift) unfinished = 1;
                    }
                    break;
                }
                taken += __shfl_sync(EVERY_LANE, upto, 31);
            }
        }
        __syncthreads();
        if (!unfinished) break;
        for (int i = threadIdx.x; i < FIBRES * BINS; i += THREADS) histogram[i] = 0;
        __syncthreads();
        const int next = shift > 10 ? shift - 10 : 0;
        const int prefix = live ? low[fibre] >> shift : 0;
#pragma unroll 8
        for (int j = member; j < length; j += TEAM) {
            const int bits = __float_as_int(held[(i64)j * row.stride]) & 0x7fffffff;
            if (bits >> shift == prefix) atomicAdd(&histogram[fibre * BINS + ((bits & ((1 << shift) - 1)) >> next)], 1u);
        }
    }

    __syncthreads();
    for (int i = threadIdx.x; i < FIBRES * words; i += THREADS) reaching[i] = 0;
    __syncthreads();
    const float threshold = __int_as_float(live ? low[fibre] : 0);
#pragma unroll 8
    for (int j = member; j < length; j += TEAM)
        if (fabsf(held[(i64)j * row.stride]) >= threshold) atomicOr(&reaching[fibre * words + j / 32], 1u << (j & 31));
    __syncthreads();

    for (int f = threadIdx.x / 32; f < tile.rows; f += THREADS / 32) {
        const Row mine = rows[tile.first + f];
        float* left = memory + mine.memory;
        const float at_least = __int_as_float(low[f]);
        // Everything above the pattern, and as many that equal it as are still wanted: a bin that holds more than that is
        // down to one pattern.
        int wanted_ties = mine.keep - above[f], place = 0;
        const bool all = inside[f] == wanted_ties;
        for (int first = 0; first < words; first += 32) {
            u32 rest = first + lane < words ? reaching[f * words + first + lane] : 0;
            if (!all && __ballot_sync(EVERY_LANE, rest != 0)) {
                u32 ties = 0;
                for (u32 look = rest; look; look &= look - 1) {
                    const int bit = __ffs(look) - 1;
                    if (fabsf(left[(i64)((first + lane) * 32 + bit) * mine.stride]) == at_least) ties |= 1u << bit;
                }
                const int upto = sum_upto(__popc(ties), lane);
                int earlier = upto - __popc(ties);
                for (u32 look = ties; look; look &= look - 1, ++earlier)
                    if (earlier >= wanted_ties) rest &= ~(look & (~look + 1));
                wanted_ties -= min(wanted_ties, __shfl_sync(EVERY_LANE, upto, 31));
            }
            const int upto = sum_upto(__popc(rest), lane);
            int next = place + upto - __popc(rest);
            for (; rest; rest &= rest - 1) {
                const int index = (first + lane) * 32 + __ffs(rest) - 1;
                const i64 at = (i64)index * mine.stride;
                left[at] = correction.send(left[at], index, next++, mine, payload, bad);
            }
            place += __shfl_sync(EVERY_LANE, upto, 31);
        }
    }
    if (had && live) raise(had_word(payload, row.slot));
    if (bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}
