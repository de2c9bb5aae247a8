// The same as encode_rows for strided rows, which are neighbours in memory: a block of COLUMNS rows loads and stores them
// together, so that memory is read in whole sectors. The rows lie in shared memory, with WARPS warps for each: registers would
// hold them too, but leave room for half as many blocks, and loading has to go on while others search.

#include "momentum.cuh"
#include "team.cuh"

#define ROW_THREADS (32 * WARPS)
#define BLOCK_THREADS (ROW_THREADS * COLUMNS)
#define BLOCKS_AT_ONCE (1024 / BLOCK_THREADS)
static_assert(WARPS == 1 || COLUMNS <= 4, "there are barriers for four teams");

// How far apart columns are in shared memory: a warp that loads 32 / COLUMNS elements of each writes to 32 different banks.
#define COLUMN_PITCH(length) (((length) + 31) / 32 * 32 + 32 / COLUMNS)
#define LOAD_BATCH (MOMENTUM ? BATCH / 2 : BATCH)

typedef RowTeam<WARPS, false> ColumnTeam;

// Choose from one column: `held` is its part of shared memory.
static __device__ __forceinline__ void send_column(
    float* held, const Row& row, int* guess, ColumnTeam& team, u8* payload, const Momentum& correction, bool& bad) {
    const int lane = threadIdx.x & 31;
    // Warp w owns the w-th part, so that order is settled inside a warp and by one prefix over the warps.
    const int part = (row.length + ROW_THREADS - 1) / ROW_THREADS * 32;
    const int begin = team.warp * part, end = min(begin + part, row.length);
    const auto count = [&](int pattern) {
        const float threshold = __int_as_float(pattern);
        int reached = 0;
#pragma unroll 8
        for (int j = begin + lane; j < end; j += 32) reached += fabsf(held[j]) >= threshold;
        return reached;
    };
    const auto largest = [&] {
        int bits = 0;
        for (int j = begin + lane; j < end; j += 32) bits = max(bits, ordered(held[j]));
        return bits;
    };
    int reached;
    const int pattern = search(row, *guess, team, reached, count, largest);
    const float threshold = __int_as_float(pattern);
    const bool exact = reached == row.keep;
    int missing = 0, ties = 0, taken = 0;
    if (exact) {
        if (WARPS > 1) taken = warp_sum(count(pattern));
    } else {
        // Everything above the threshold, and as many that equal it as are still wanted, the first ones.
        int above = 0, tied = 0;
        for (int j = begin + lane; j < end; j += 32) {
            above += fabsf(held[j]) > threshold;
            tied += fabsf(held[j]) == threshold;
        }
        missing = row.keep - team.sum(above);
        ties = team.before(tied);
        taken = warp_sum(above) + min(max(missing - ties, 0), warp_sum(tied));
    }
    int place = team.before(lane == 0 ? taken : 0);

    for (int start = begin; start < end; start += 32) {
        const int j = start + lane;
        const float c = j < end ? held[j] : NO_ELEMENT;
        bool chosen = fabsf(c) >= threshold;
        if (!exact) {
            const bool tie = fabsf(c) == threshold;
            const u32 equal = __ballot_sync(EVERY_LANE, tie);
            chosen &= !tie || ties + lanes_before(equal, lane) < missing;
            ties += __popc(equal);
        }
        const u32 all = __ballot_sync(EVERY_LANE, chosen);
        if (chosen) held[j] = correction.send(c, j, place + lanes_before(all, lane), row, payload, bad);
        place += __popc(all);
    }
    if (team.warp == 0 && lane == 0) *guess = pattern;
}

extern "C" __global__ __launch_bounds__(BLOCK_THREADS, BLOCKS_AT_ONCE) void encode_columns(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, int* guesses,
    const float* ratio MOMENTUM_PARAMETERS) {
    DYNAMIC_SHARED(float, columns);
    __shared__ int words[2 * WARPS * COLUMNS];
    const int local = threadIdx.x / ROW_THREADS, number = blockIdx.x * COLUMNS + local;
    const float scale = *ratio;
    const Momentum correction = MOMENTUM_OF_GROUP;
    // The first row tells where the others are: a block takes rows of one slot that follow each other.
    const Row head = rows[blockIdx.x * COLUMNS];
    const int pitch = COLUMN_PITCH(head.length), column = threadIdx.x % COLUMNS, step = BLOCK_THREADS / COLUMNS;
    bool had = false, bad = false;
    const Gradient* gradient = bucket + head.gradient + column;
    float* old = memory + head.memory + column;
    for (int start = threadIdx.x / COLUMNS; start < head.length; start += LOAD_BATCH * step) {
        Gradient fresh[LOAD_BATCH];
        float before[LOAD_BATCH], last[LOAD_BATCH];
#pragma unroll
        for (int i = 0; i < LOAD_BATCH; ++i) {
            const i64 at = (i64)min(start + i * step, head.length - 1) * head.stride;
            fresh[i] = gradient[at];
            before[i] = old[at];
            last[i] = correction.get(head.memory + column + at);
        }
#pragma unroll
        for (int i = 0; i < LOAD_BATCH; ++i) {
            const int j = start + i * step;
            if (j < head.length) {
                columns[column * pitch + j] = correction.compensate(fresh[i], before[i], scale, last[i], had, bad);
                correction.put(head.memory + column + (i64)j * head.stride, last[i]);
            }
        }
    }
    __syncthreads();
    ColumnTeam team = {words + 2 * WARPS * local, 0, (int)(threadIdx.x % ROW_THREADS) / 32, local};
    const Row row = rows[number];
    send_column(columns + local * pitch, row, guesses + number, team, payload, correction, bad);
    __syncthreads();
    for (int j = threadIdx.x / COLUMNS; j < head.length; j += step) old[(i64)j * head.stride] = columns[column * pitch + j];
    report(had, bad, row, payload);
}
