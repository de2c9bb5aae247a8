// Orthonormal bases of all factors of a group in one launch: `cholesky_orthogonalise` in thinwire/lowrank/basis.py for few columns.
//
// One block has one factor, so that the order of additions is fixed and every rank computes the same bits.
//  1. Scale every column by its largest magnitude. Columns that are zero or not finite are replaced by spare ones.
//  2. The Cholesky factor of X^T X shows what each column adds to those before it. A column that adds nothing is replaced too.
//  3. X = Q R with R from the Cholesky factor of X^T X, twice: the second time removes what rounding left over.
// RANK is the most columns a factor has: 4 or 8. For more of them there is orthogonalise_wide.cu.

#include "factorise.cuh"

#define PAIRS (RANK * (RANK + 1) / 2)
// The sums of all threads have to fit into shared memory.
#define THREADS BASIS_THREADS
#define WARPS (THREADS / 32)

// How rows are read; the same for all threads of a block.
struct Reading {
    const float* factor;
    const float* spare;
    int width;
    u32 alive;  // one bit per column; the others are spare ones
    double inverse[RANK];
};

static __device__ __forceinline__ void read_row(const Reading& reading, int row, double* values) {
#pragma unroll
    for (int k = 0; k < RANK; ++k) {
        values[k] = 0.0;
        if (k < reading.width) {
            const i64 at = (i64)row * reading.width + k;
            values[k] = reading.alive >> k & 1 ? reading.factor[at] * reading.inverse[k] : (double)reading.spare[at];
        }
    }
}

// values <- turn x values for a lower triangle.
static __device__ __forceinline__ void turn_by(const double (*turn)[RANK], double* values) {
#pragma unroll
    for (int a = RANK - 1; a >= 0; --a) {
        double sum = 0.0;
#pragma unroll
        for (int b = 0; b <= a; ++b) sum += turn[a][b] * values[b];
        values[a] = sum;
    }
}

// X^T X of all rows, each turned first, to `gram` in shared memory.
static __device__ void add_up(const Reading& reading, int length, const double (*turn)[RANK], double (*gram)[RANK]) {
    // An odd number of words per thread: neighbours use different banks.
    __shared__ double own[THREADS][PAIRS | 1], of_warp[WARPS][PAIRS];
    double sums[PAIRS];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) sums[pair] = 0.0;
    for (int row = threadIdx.x; row < length; row += THREADS) {
        double values[RANK];
        read_row(reading, row, values);
        if (turn) turn_by(turn, values);
        int pair = 0;
#pragma unroll
        for (int a = 0; a < RANK; ++a)
#pragma unroll
            for (int b = 0; b <= a; ++b) sums[pair++] += values[a] * values[b];
    }
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) own[threadIdx.x][pair] = sums[pair];
    __syncthreads();
    for (int i = threadIdx.x; i < WARPS * PAIRS; i += THREADS) {
        const int warp = i / PAIRS, pair = i % PAIRS;
        double total = 0.0;
#pragma unroll 8
        for (int member = 0; member < 32; ++member) total += own[32 * warp + member][pair];
        of_warp[warp][pair] = total;
    }
    __syncthreads();
    if (threadIdx.x < PAIRS) {
        double total = 0.0;
        for (int warp = 0; warp < WARPS; ++warp) total += of_warp[warp][threadIdx.x];
        int a = 0;
        while ((a + 1) * (a + 2) / 2 <= threadIdx.x) ++a;
        gram[a][threadIdx.x - a * (a + 1) / 2] = total;
    }
    __syncthreads();
}

// Largest magnitudes as bits, which order like magnitudes, with infinity and NaN on top.
static __device__ void find_largest(const float* factor, int length, int width, int* largest) {
    __shared__ int partial[WARPS][RANK];
    int found[RANK];
#pragma unroll
    for (int k = 0; k < RANK; ++k) found[k] = 0;
    for (int row = threadIdx.x; row < length; row += THREADS)
#pragma unroll
        for (int k = 0; k < RANK; ++k)
            if (k < width) found[k] = max(found[k], magnitude(factor[(i64)row * width + k]));
#pragma unroll
    for (int k = 0; k < RANK; ++k) {
        found[k] = warp_max(found[k]);
        if ((threadIdx.x & 31) == 0) partial[threadIdx.x / 32][k] = found[k];
    }
    __syncthreads();
    if (threadIdx.x < RANK) {
        int top = 0;
        for (int warp = 0; warp < WARPS; ++warp) top = max(top, partial[warp][threadIdx.x]);
        largest[threadIdx.x] = top;
    }
    __syncthreads();
}

// `status` is raised if a factor is not finite, or the number at `watched`, a place in `flat` (-1: none).
extern "C" __global__ __launch_bounds__(THREADS) void orthogonalise(
    const float* flat, const float* spares, float* bases, const Factor* factors, u8* status, int watched) {
    __shared__ int largest[RANK];
    __shared__ double gram[RANK][RANK], first[RANK][RANK], second[RANK][RANK], added[RANK];
    const Factor mine = factors[blockIdx.x];
    Reading reading = {flat + mine.offset, spares + mine.offset, mine.width, 0, {}};
    find_largest(reading.factor, mine.length, mine.width, largest);
    bool bad = blockIdx.x == 0 && watched >= 0 && !is_finite(flat[max(watched, 0)]);
#pragma unroll
    for (int k = 0; k < RANK; ++k) {
        reading.inverse[k] = 0.0;
        bad |= largest[k] >= INFINITE;
        if (largest[k] > 0 && largest[k] < INFINITE) {
            reading.alive |= 1u << k;
            reading.inverse[k] = 1.0 / (double)__int_as_float(largest[k]);
        }
    }
    if (bad && threadIdx.x == 0) raise(status);

    add_up(reading, mine.length, nullptr, gram);
    if (threadIdx.x < 32) factorise(gram, mine.width, first, added);
    __syncthreads();
    double most = 0.0;
    for (int k = 0; k < mine.width; ++k) most = added[k] > most ? added[k] : most;
    u32 kept = reading.alive;
    for (int k = 0; k < mine.width; ++k)
        if (!(added[k] > 4 * RIDGE * most)) kept &= ~(1u << k);
    if (kept != reading.alive) {
        reading.alive = kept;
        add_up(reading, mine.length, nullptr, gram);
        if (threadIdx.x < 32) factorise(gram, mine.width, first, added);
        __syncthreads();
    }
    add_up(reading, mine.length, first, gram);
    if (threadIdx.x < 32) factorise(gram, mine.width, second, added);
    __syncthreads();
    for (int row = threadIdx.x; row < mine.length; row += THREADS) {
        double values[RANK];
        read_row(reading, row, values);
        turn_by(first, values);
        turn_by(second, values);
#pragma unroll
        for (int k = 0; k < RANK; ++k)
            if (k < mine.width) bases[mine.offset + (i64)row * mine.width + k] = (float)values[k];
    }
}
