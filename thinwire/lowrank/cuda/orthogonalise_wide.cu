// As orthogonalise.cu, for factors of 16 or 32 columns (RANK). Their rows are spread over blocks.
//
// The host launches `add_up` and `find_turn` for each of three steps, then `turn_rows`:
//  0. Scale every column to length 1 and find those that are zero, not finite, or add nothing to those before them.
//  1. If there are any, find the Cholesky factor with spare columns in their place.
//  2. The same again for the rows that result. That removes what rounding left over.

// A block has PIECE rows.
#define THREADS BASIS_THREADS
#define STAGE 32   // rows that are in shared memory at a time
#define SIDE 16    // threads along each side of a Gram matrix
#define EACH (RANK / SIDE)
#define PITCH (RANK + 1)
// A sum of squares of float32 above this is not finite.
#define HUGE_SUM 1e300

struct Piece {
    int factor;
    int row;
};
static_assert(LAYOUT_OF_Piece, "kernels.py has another Piece");

// What is known of a factor so far.
struct State {
    double scale[RANK];       // of its columns; 0: a spare one instead
    double turn[RANK][RANK];  // lower triangle; turned rows are orthonormal, nearly so after the first time
    int replaces;             // whether there are spare ones
    int unused;
};
static_assert(sizeof(State) == STATE_WORDS * sizeof(double), "kernels.py makes room for another State");

#include "factorise.cuh"

// Rows from `start` on, scaled unless `raw`, zeros behind `end`.
static __device__ __forceinline__ void read_rows(
    const float* flat, const float* spares, const Factor& factor, const State& state, int start, int end, bool raw, double (*rows)[PITCH]) {
    for (int i = threadIdx.x; i < STAGE * RANK; i += THREADS) {
        const int row = start + i / RANK, k = i % RANK;
        const i64 at = factor.offset + (i64)row * factor.width + k;
        double value = 0.0;
        if (row < end && k < factor.width) {
            const double scale = raw ? 1.0 : state.scale[k];
            value = scale != 0.0 ? flat[at] * scale : (double)spares[at];
        }
        rows[i / RANK][k] = value;
    }
}

static __device__ __forceinline__ void read_turn(const State& state, double (*turn)[PITCH]) {
    for (int i = threadIdx.x; i < RANK * RANK; i += THREADS) turn[i / RANK][i % RANK] = state.turn[i / RANK][i % RANK];
}

static __device__ __forceinline__ double turned(const double (*turn)[PITCH], const double* row, int a) {
    double sum = 0.0;
    for (int b = 0; b <= a; ++b) sum += turn[a][b] * row[b];
    return sum;
}

// Parts of X^T X. Step 0: columns as they are; 1: with spare ones, if there are any; 2: with turned rows.
extern "C" __global__ __launch_bounds__(THREADS) void add_up(
    const float* flat, const float* spares, const Factor* factors, const Piece* pieces, const State* states, double* parts, int step) {
    __shared__ double rows[STAGE][PITCH], turned_rows[STAGE][PITCH], turn[RANK][PITCH];
    const Piece piece = pieces[blockIdx.x];
    const Factor factor = factors[piece.factor];
    const State& state = states[piece.factor];
    if (step == 1 && !state.replaces) return;
    if (step == 2) read_turn(state, turn);
    const int a = threadIdx.x / SIDE * EACH, b = threadIdx.x % SIDE * EACH, end = min(piece.row + PIECE, factor.length);
    double sums[EACH][EACH];
#pragma unroll
    for (int i = 0; i < EACH * EACH; ++i) sums[i / EACH][i % EACH] = 0.0;
    for (int start = piece.row; start < end; start += STAGE) {
        __syncthreads();
        read_rows(flat, spares, factor, state, start, end, step == 0, rows);
        __syncthreads();
        if (step == 2) {
            for (int i = threadIdx.x; i < STAGE * RANK; i += THREADS)
                turned_rows[i / RANK][i % RANK] = turned(turn, rows[i / RANK], i % RANK);
            __syncthreads();
        }
        const double (*used)[PITCH] = step == 2 ? turned_rows : rows;
#pragma unroll 4
        for (int row = 0; row < STAGE; ++row)
#pragma unroll
            for (int i = 0; i < EACH * EACH; ++i) sums[i / EACH][i % EACH] += used[row][a + i / EACH] * used[row][b + i % EACH];
    }
    double* part = parts + (i64)blockIdx.x * RANK * RANK;
#pragma unroll
    for (int i = 0; i < EACH * EACH; ++i) part[(a + i / EACH) * RANK + b + i % EACH] = sums[i / EACH][i % EACH];
}

// Add up the parts of a step: factor f has parts firsts[f] to firsts[f + 1]. `status` is raised as in orthogonalise.cu.
extern "C" __global__ __launch_bounds__(THREADS) void find_turn(
    const float* flat, const Factor* factors, const int* firsts, const double* parts, State* states, u8* status, int watched, int step) {
    __shared__ double gram[RANK][RANK], inverse[RANK][RANK], before[RANK][RANK], added[RANK], scale[RANK];
    const int width = factors[blockIdx.x].width;
    State& state = states[blockIdx.x];
    if (step == 1 && !state.replaces) return;
    for (int i = threadIdx.x; i < RANK * RANK; i += THREADS) {
        double total = 0.0;
        for (int part = firsts[blockIdx.x]; part < firsts[blockIdx.x + 1]; ++part) total += parts[(i64)part * RANK * RANK + i];
        gram[i / RANK][i % RANK] = total;
        before[i / RANK][i % RANK] = step == 2 ? state.turn[i / RANK][i % RANK] : 0.0;
    }
    __syncthreads();
    if (step == 0) {
        if (threadIdx.x < width) {
            const double squares = gram[threadIdx.x][threadIdx.x];
            if (!(squares < HUGE_SUM)) raise(status);
            scale[threadIdx.x] = squares > 0.0 && squares < HUGE_SUM ? 1.0 / sqrt(squares) : 0.0;
        }
        if (blockIdx.x == 0 && threadIdx.x == 0 && watched >= 0 && !is_finite(flat[watched]))
            raise(status);
        __syncthreads();
        // A dead column counts as a unit vector until a spare one takes its place.
        for (int i = threadIdx.x; i < width * width; i += THREADS) {
            const int a = i / width, b = i % width;
            const bool alive = scale[a] != 0.0 && scale[b] != 0.0;
            gram[a][b] = alive ? gram[a][b] * scale[a] * scale[b] : a == b ? 1.0 : 0.0;
        }
        __syncthreads();
    }
    if (threadIdx.x < 32) factorise(gram, width, inverse, added);
    __syncthreads();
    if (step == 0 && threadIdx.x == 0) {
        double most = 0.0;
        for (int k = 0; k < width; ++k) most = added[k] > most ? added[k] : most;
        bool replaces = false;
        for (int k = 0; k < width; ++k) {
            state.scale[k] = added[k] > 4 * RIDGE * most ? scale[k] : 0.0;
            replaces |= state.scale[k] == 0.0;
        }
        state.replaces = replaces;
    }
    for (int i = threadIdx.x; i < RANK * RANK; i += THREADS) {
        const int a = i / RANK, b = i % RANK;
        double sum = step == 2 ? 0.0 : inverse[a][b];
        for (int c = b; c <= a && step == 2; ++c) sum += inverse[a][c] * before[c][b];
        state.turn[a][b] = sum;
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void turn_rows(
    const float* flat, const float* spares, float* bases, const Factor* factors, const Piece* pieces, const State* states) {
    __shared__ double rows[STAGE][PITCH], turn[RANK][PITCH];
    const Piece piece = pieces[blockIdx.x];
    const Factor factor = factors[piece.factor];
    const State& state = states[piece.factor];
    read_turn(state, turn);
    const int end = min(piece.row + PIECE, factor.length);
    for (int start = piece.row; start < end; start += STAGE) {
        __syncthreads();
        read_rows(flat, spares, factor, state, start, end, false, rows);
        __syncthreads();
        for (int i = threadIdx.x; i < STAGE * RANK; i += THREADS) {
            const int row = start + i / RANK, k = i % RANK;
            if (row < end && k < factor.width)
                bases[factor.offset + (i64)row * factor.width + k] = (float)turned(turn, rows[i / RANK], k);
        }
    }
}
