// The same as encode_rows for strided rows, which are neighbours in memory: a block of COLUMNS rows loads and stores them
// together, so that memory is read in whole sectors, and turns them in shared memory.

#include "momentum.cuh"
#include "registers.cuh"

#define ROW_THREADS (32 * WARPS)
#define BLOCK_THREADS (ROW_THREADS * COLUMNS)
#define BLOCKS_AT_ONCE (BLOCK_THREADS > 256 ? 1 : (ELEMENTS > 32 ? 512 : 640) / BLOCK_THREADS)
static_assert(WARPS == 1 || COLUMNS <= 4, "there are barriers for four teams");

// Neighbouring elements of a column are this far apart in shared memory; odd, so that a warp's reads do not collide.
#define COLUMN_PITCH(length) ((length) | 1)

extern "C" __global__ __launch_bounds__(BLOCK_THREADS, BLOCKS_AT_ONCE) void encode_columns(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, int* guesses, const float* ratio,
    int count MOMENTUM_PARAMETERS) {
    const int lane = threadIdx.x & 31, local = threadIdx.x / ROW_THREADS, number = blockIdx.x * COLUMNS + local;
    __shared__ int words[2 * WARPS * COLUMNS];
    RowTeam<WARPS, false> team = {words + 2 * WARPS * local, 0, (int)(threadIdx.x % ROW_THREADS) / 32, local};
    const Row row = rows[number < count ? number : count - 1];
    const int first = team.warp * 32 * ELEMENTS;
    const float scale = *ratio;
    const Momentum correction = MOMENTUM_OF_GROUP;
    bool had = false, bad = false;
    float c[ELEMENTS];

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
        c[e] = mine && at < row.length ? held[at] : NO_ELEMENT;
    }
    if (mine) send_row(c, row, guesses + number, team, held, false, payload, correction, bad);
    __syncthreads();
    if (column < here)
        for (int j = threadIdx.x / COLUMNS; j < head.length; j += step)
            memory[head.memory + (i64)j * head.stride + column] = columns[column * pitch + j];
    report(had, bad, row, payload);
}
