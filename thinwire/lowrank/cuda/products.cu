// Products of a group's matrices with factors of few columns: one launch for all of them, every element touched once.
//
// A matrix is seen as it lies in memory: `rows` contiguous rows of `columns`. The factor that travels has a line of `width` numbers
// per row ("by rows") or per column. Sums are taken in an order that depends on the matrix alone, so neither the bucketing nor
// the other matrices change a bit.
//   project_rows       travels = c x known
//   project_columns    travels = c^T x known, in parts of CHUNK rows; add_parts adds them up
//   rebuild            the mean of all ranks: travels x known^T or known x travels^T
//   settle             the verdict: what was sent leaves memory, or comes back
// FRESH: the gradient joins memory on the way, and flags are raised. RANK is the most columns a factor has: 4, 8, 16 or 32.

// A block has WARPS warps; a tile has CHUNK rows and SPAN columns. A line of more than WIDE numbers does not fit into registers.
#define THREADS (32 * WARPS)
static_assert(SPAN == 4 * 32, "four columns per lane");
#define DEPTH 4  // rows that a lane loads at once; more would cost registers, and other warps their place
#define QUADS (RANK / 4)
// Rows that a warp takes at a time, and warps of a block, in project_rows.
#define LINES (RANK > WIDE ? WIDE_LINES : 32 / RANK)
#define ROW_WARPS (RANK > WIDE ? WIDE_WARPS : WARPS)

// Written by thinwire/lowrank/cuda/tables.py.
struct Matrix {
    i64 gradient;  // in the bucket
    i64 memory;    // in the group's own buffer
    i64 sent;      // in the buffer of factors that travel
    i64 known;     // among the other factors
    i64 parts;     // among the parts of sums by columns
    int rows;
    int columns;
    int width;
    int slot;
    int by_rows;
    int vector;  // 1: four columns at a time are aligned in bucket and memory
    int lined;   // 1: lines of the known factor are RANK long and aligned
    int unused;
};
static_assert(LAYOUT_OF_Matrix, "tables.py has another Matrix");

struct Tile {
    int matrix;
    int row;
    int column;  // project_rows up to rank WIDE: warps that share a row
};
static_assert(LAYOUT_OF_Tile, "tables.py has another Tile");

// Where a kernel works; the same for all threads of a block.
struct Work {
    const Gradient* bucket;
    const float* before;  // what memory held; the same buffer where it is changed in place, or not at all
    float* memory;
    const float* known;
    float ratio;
    const Matrix& matrix;
};

// -- four elements, and lines of a factor -----------------------------------------------------------------------------

struct Four {
    float at[4];
};

struct FourGradients {
    Gradient at[4];
};

// A line of a factor; zeros behind its width.
struct Line {
    float4 quads[QUADS];
};

// Up to four neighbours; beyond `count` zeros.
static __device__ __forceinline__ Four load(const float* from, int vector, int count) {
    Four four;
    if (vector) {
        const float4 quad = *reinterpret_cast<const float4*>(from);
        four.at[0] = quad.x, four.at[1] = quad.y, four.at[2] = quad.z, four.at[3] = quad.w;
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) four.at[j] = j < count ? from[j] : 0.0f;
    }
    return four;
}

static __device__ __forceinline__ FourGradients load_gradients(const Gradient* from, int vector, int count) {
    FourGradients four;
    if (vector) {
        const Quad quad = *reinterpret_cast<const Quad*>(from);
        four.at[0] = quad.x, four.at[1] = quad.y, four.at[2] = quad.z, four.at[3] = quad.w;
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) four.at[j] = j < count ? from[j] : (Gradient)0;
    }
    return four;
}

static __device__ __forceinline__ void store(float* to, const Four& four, int vector, int count) {
    if (vector) {
        *reinterpret_cast<float4*>(to) = make_float4(four.at[0], four.at[1], four.at[2], four.at[3]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (j < count) to[j] = four.at[j];
    }
}

static __device__ __forceinline__ float4 read_quad(const float* factor, i64 line, int quad, int width, float weight) {
    const float* from = factor + line * width + 4 * quad;
    const int count = width - 4 * quad;
    return make_float4(
        count > 0 ? __fmul_rn(from[0], weight) : 0.0f, count > 1 ? __fmul_rn(from[1], weight) : 0.0f,
        count > 2 ? __fmul_rn(from[2], weight) : 0.0f, count > 3 ? __fmul_rn(from[3], weight) : 0.0f);
}

// `inside` is whether there is such a line; if not it is zero.
static __device__ __forceinline__ Line read_line(const float* factor, int line, int width, bool inside, float weight) {
    Line found;
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
        found.quads[q] = inside ? read_quad(factor, line, q, width, weight) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return found;
}

static __device__ __forceinline__ void clear(Line* lines, int count) {
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
        for (int q = 0; q < QUADS; ++q) lines[i].quads[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// sum += c x quad
static __device__ __forceinline__ void add_times(float4& sum, float c, const float4& quad) {
    sum.x = fmaf(c, quad.x, sum.x), sum.y = fmaf(c, quad.y, sum.y);
    sum.z = fmaf(c, quad.z, sum.z), sum.w = fmaf(c, quad.w, sum.w);
}

static __device__ __forceinline__ float dot(const Line& left, const Line& right) {
    float sum = 0.0f;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        sum = fmaf(left.quads[q].x, right.quads[q].x, sum), sum = fmaf(left.quads[q].y, right.quads[q].y, sum);
        sum = fmaf(left.quads[q].z, right.quads[q].z, sum), sum = fmaf(left.quads[q].w, right.quads[q].w, sum);
    }
    return sum;
}

// Number `k` of a quad; a constant wherever it is used.
static __device__ __forceinline__ float pick(const float4& quad, int k) {
    return k == 0 ? quad.x : k == 1 ? quad.y : k == 2 ? quad.z : quad.w;
}

// -- c ----------------------------------------------------------------------------------------------------------------

// c of four columns in DEPTH rows from `row` on. All loads are issued before anything is done with them.
template <bool VECTOR>
static __device__ __forceinline__ void take(const Work& work, int row, int column, Four* c, bool& had, bool& bad) {
    const Matrix& matrix = work.matrix;
    const int count = matrix.columns - column, rows = count > 0 ? matrix.rows - row : 0;
    const i64 first = (i64)row * matrix.columns + column;
    const float* held = work.before + matrix.memory + first;
#if FRESH
    float* now = work.memory + matrix.memory + first;
    const Gradient* fresh = work.bucket + matrix.gradient + first;
    FourGradients gradients[DEPTH];
#endif
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        if (i < rows) {
            c[i] = load(held + (i64)i * matrix.columns, VECTOR, count);
#if FRESH
            gradients[i] = load_gradients(fresh + (i64)i * matrix.columns, VECTOR, count);
#endif
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) c[i].at[j] = 0.0f;
        }
    }
#if FRESH
#pragma unroll
    for (int i = 0; i < DEPTH; ++i)
        if (i < rows) {
#pragma unroll
            for (int j = 0; j < 4; ++j) c[i].at[j] = compensate(gradients[i].at[j], c[i].at[j], work.ratio, had, bad);
            store(now + (i64)i * matrix.columns, c[i], VECTOR, count);
        }
#endif
}

// The flags behind the factors: 1 where a slot had a gradient, NaN behind them if one was not finite.
static __device__ __forceinline__ void raise_flags(float* flags, int slots, int slot, bool had, bool bad) {
#if FRESH
    if (__ballot_sync(EVERY_LANE, had) && (threadIdx.x & 31) == 0) {
        volatile float* flag = flags + slot;
        if (*flag != 1.0f) *flag = 1.0f;
    }
    if (__ballot_sync(EVERY_LANE, bad) && (threadIdx.x & 31) == 0) flags[slots] = __int_as_float(0x7fc00000);
#endif
}

// -- what travels -----------------------------------------------------------------------------------------------------

#if RANK <= WIDE

// The products of LINES rows from `first` on with the columns of one lane; lines of the basis stay in registers.
template <bool VECTOR>
static __device__ __forceinline__ void multiply_rows(
    const Work& work, int first, int column, int step, Line* sums, bool& had, bool& bad) {
    const Matrix& matrix = work.matrix;
    const float* known = work.known + matrix.known;
    for (; column < matrix.columns; column += step) {
        Line basis[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (VECTOR && matrix.lined)
                basis[j] = *reinterpret_cast<const Line*>(known + (i64)(column + j) * RANK);
            else
                basis[j] = read_line(known, column + j, matrix.width, column + j < matrix.columns, 1.0f);
        }
#pragma unroll
        for (int line = 0; line < LINES; line += DEPTH) {
            Four c[DEPTH];
            take<VECTOR>(work, first + line, column, c, had, bad);
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int q = 0; q < QUADS; ++q) add_times(sums[line + d].quads[q], c[d].at[j], basis[j].quads[q]);
        }
    }
}

#else

// The same if lines are too long for registers. All warps go along the row together, and the basis goes through shared memory.
template <bool VECTOR>
static __device__ __forceinline__ void multiply_rows(
    const Work& work, int first, float4 (*basis)[33], Line* sums, bool& had, bool& bad) {
    const Matrix& matrix = work.matrix;
    const int lane = threadIdx.x & 31;
    for (int start = 0; start < matrix.columns; start += SPAN) {
        __syncthreads();
        for (int i = threadIdx.x; i < SPAN * QUADS; i += 32 * ROW_WARPS) {
            const int place = i / QUADS, q = i % QUADS;
            basis[place % 4 * QUADS + q][place / 4] = start + place < matrix.columns
                ? read_quad(work.known + matrix.known, start + place, q, matrix.width, 1.0f)
                : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        Four c[LINES];
        take<VECTOR>(work, first, start + 4 * lane, c, had, bad);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const float4 quad = basis[j * QUADS + q][lane];
#pragma unroll
                for (int line = 0; line < LINES; ++line) add_times(sums[line].quads[q], c[line].at[j], quad);
            }
    }
}

#endif

extern "C" __global__ __launch_bounds__(32 * ROW_WARPS) void project_rows(
    const Gradient* bucket, const float* before, float* memory, const float* known, float* sent, float* flags,
    const float* scale, const Matrix* matrices, const Tile* tiles, int slots) {
    // One more than the lanes: neighbours use different banks.
    __shared__ float own[ROW_WARPS][32][33], partial[ROW_WARPS][32];
    const Tile tile = tiles[blockIdx.x];
    const Matrix matrix = matrices[tile.matrix];
    const Work work = {bucket, before, memory, known, *scale, matrix};
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = RANK > WIDE ? 1 : tile.column, member = warp % warps;
    const int first = tile.row + warp / warps * LINES;
    bool had = false, bad = false;
    Line sums[LINES];
    clear(sums, LINES);
#if RANK <= WIDE
    const int column = 4 * (32 * member + lane);
    if (matrix.vector)
        multiply_rows<true>(work, first, column, SPAN * warps, sums, had, bad);
    else
        multiply_rows<false>(work, first, column, SPAN * warps, sums, had, bad);
#else
    // By quad, then by lane.
    __shared__ float4 basis[4 * QUADS][33];
    if (matrix.vector)
        multiply_rows<true>(work, first, basis, sums, had, bad);
    else
        multiply_rows<false>(work, first, basis, sums, had, bad);
#endif
#pragma unroll
    for (int round = 0; round < LINES * RANK; round += 32) {
#pragma unroll
        for (int i = 0; i < 32; ++i)
            own[warp][i][lane] = pick(sums[(round + i) / RANK].quads[(round + i) % RANK / 4], i % 4);
        __syncwarp();
        // Lane i adds up number i of all lanes; the first of the warps that share a row adds up those of the others.
        float total = 0.0f;
#pragma unroll
        for (int other = 0; other < 32; ++other) total += own[warp][lane][other];
        __syncwarp();
        if (warps > 1) {
            partial[warp][lane] = total;
            __syncthreads();
            total = 0.0f;
            for (int other = 0; other < warps; ++other) total += partial[warp - member + other][lane];
        }
        const int line = first + (round + lane) / RANK, k = (round + lane) % RANK;
        if (member == 0 && line < matrix.rows && k < matrix.width) sent[matrix.sent + (i64)line * matrix.width + k] = total;
    }
    raise_flags(flags, slots, matrix.slot, had, bad);
}

// The products of a warp's rows of a chunk with the columns of one lane.
template <bool VECTOR>
static __device__ __forceinline__ void multiply_columns(
    const Work& work, const Tile& tile, int column, const Line* lines, Line* sums, bool& had, bool& bad) {
    const int first = threadIdx.x / 32 * (CHUNK / WARPS);
#pragma unroll 1
    for (int i = first; i < first + CHUNK / WARPS; i += DEPTH) {
        Four c[DEPTH];
        take<VECTOR>(work, tile.row + i, column, c, had, bad);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const float4 quad = lines[i + d].quads[q];
#pragma unroll
                for (int j = 0; j < 4; ++j) add_times(sums[j].quads[q], c[d].at[j], quad);
            }
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void project_columns(
    const Gradient* bucket, const float* before, float* memory, const float* known, float* parts, float* flags,
    const float* scale, const Matrix* matrices, const Tile* tiles, int slots) {
    __shared__ Line lines[CHUNK];
    __shared__ float partial[WARPS][16][32];
    const Tile tile = tiles[blockIdx.x];
    const Matrix matrix = matrices[tile.matrix];
    const Work work = {bucket, before, memory, known, *scale, matrix};
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, column = tile.column + 4 * lane;
    bool had = false, bad = false;
    for (int i = threadIdx.x; i < CHUNK; i += THREADS)
        lines[i] = read_line(known + matrix.known, tile.row + i, matrix.width, tile.row + i < matrix.rows, 1.0f);
    __syncthreads();
    Line sums[4];
    clear(sums, 4);
    if (matrix.vector)
        multiply_columns<true>(work, tile, column, lines, sums, had, bad);
    else
        multiply_columns<false>(work, tile, column, lines, sums, had, bad);
    float* part = parts + matrix.parts + (i64)(tile.row / CHUNK) * matrix.columns * matrix.width;
    // Four numbers of every column at a time: all would not fit.
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        if (q) __syncthreads();
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int k = 0; k < 4; ++k) partial[warp][4 * j + k][lane] = pick(sums[j].quads[q], k);
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * 32; i += THREADS) {
            const int number = i / 32, place = tile.column + 4 * (i % 32) + number / 4, k = 4 * q + number % 4;
            if (place < matrix.columns && k < matrix.width) {
                float total = 0.0f;
#pragma unroll
                for (int other = 0; other < WARPS; ++other) total += partial[other][number][i % 32];
                part[(i64)place * matrix.width + k] = total;
            }
        }
    }
    raise_flags(flags, slots, matrix.slot, had, bad);
}

// A tile begins at number `row` of what a matrix sends.
extern "C" __global__ __launch_bounds__(THREADS) void add_parts(
    const float* parts, float* sent, const Matrix* matrices, const Tile* tiles) {
    const Tile tile = tiles[blockIdx.x];
    const Matrix matrix = matrices[tile.matrix];
    const int numbers = matrix.columns * matrix.width, number = tile.row + threadIdx.x;
    if (number >= numbers) return;
    float total = 0.0f;
    const float* part = parts + matrix.parts + number;
#pragma unroll 4
    for (int row = 0; row < matrix.rows; row += CHUNK, part += numbers) total += *part;
    sent[matrix.sent + number] = total;
}

// -- what comes of it -------------------------------------------------------------------------------------------------

// The factors of a tile: `lines` of its rows in shared memory, `basis` of this lane's four columns. `weight` is for the factor that
// travelled.
static __device__ __forceinline__ void read_factors(
    const float* sent, const float* known, const Matrix& matrix, const Tile& tile, float weight, Line* lines, Line* basis) {
    const float* of_rows = matrix.by_rows ? sent + matrix.sent : known + matrix.known;
    const float* of_columns = matrix.by_rows ? known + matrix.known : sent + matrix.sent;
    const float row_weight = matrix.by_rows ? weight : 1.0f, column_weight = matrix.by_rows ? 1.0f : weight;
    for (int i = threadIdx.x; i < CHUNK; i += THREADS)
        lines[i] = read_line(of_rows, tile.row + i, matrix.width, tile.row + i < matrix.rows, row_weight);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int column = tile.column + 4 * (threadIdx.x & 31) + j;
        basis[j] = read_line(of_columns, column, matrix.width, column < matrix.columns, column_weight);
    }
    __syncthreads();
}

// `had` counts the ranks that had a gradient, per slot; without any there is no update. `share` is 1 / world.
extern "C" __global__ __launch_bounds__(THREADS) void rebuild(
    float* out, const float* total, const float* known, const float* had, const float* share, u8* status, const Matrix* matrices,
    const Tile* tiles, int into_bucket) {
    __shared__ Line lines[CHUNK];
    const Tile tile = tiles[blockIdx.x];
    const Matrix matrix = matrices[tile.matrix];
    const int column = tile.column + 4 * (threadIdx.x & 31), count = matrix.columns - column, warp = threadIdx.x / 32;
    const bool used = had[matrix.slot] > 0.0f;
    Line basis[4];
    read_factors(total, known, matrix, tile, *share, lines, basis);
    if (count <= 0) return;
    bool bad = false;
    float* target = out + (into_bucket ? matrix.gradient : matrix.memory) + column;
    const int end = min(CHUNK, matrix.rows - tile.row);
#pragma unroll 2
    for (int i = warp; i < end; i += WARPS) {
        Four four;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            four.at[j] = used ? dot(lines[i], basis[j]) : 0.0f;
            bad |= !is_finite(four.at[j]);
        }
        store(target + (i64)(tile.row + i) * matrix.columns, four, matrix.vector, count);
    }
    if (bad) raise(status);
}

static __device__ __forceinline__ void exchange(float* here, float* there, i64 first, int count) {
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const float kept = here[first + i];
        here[first + i] = there[first + i];
        there[first + i] = kept;
    }
}

// The verdict on a step. If it is good, what this rank sent leaves memory, and old and renewed bases swap. With `again` the other way
// round, if the step has turned bad since `before`. What is not finite becomes 0.
extern "C" __global__ __launch_bounds__(THREADS) void settle(
    float* memory, const float* sent, const float* known, float* bases, float* renewed, const float* had, const u8* bad_now,
    const u8* before, const Matrix* matrices, const Tile* tiles, int again) {
    __shared__ Line lines[CHUNK];
    const Tile tile = tiles[blockIdx.x];
    const Matrix matrix = matrices[tile.matrix];
    const int column = tile.column + 4 * (threadIdx.x & 31), count = matrix.columns - column, warp = threadIdx.x / 32;
    const bool used = had[matrix.slot] > 0.0f, bad = *bad_now != 0;
    const bool moves = used && (again ? bad && *before == 0 : !bad);
    if (again && !moves) return;
    Line basis[4];
    if (moves) {
        read_factors(sent, known, matrix, tile, again ? 1.0f : -1.0f, lines, basis);
        const i64 line = matrix.by_rows ? tile.row : tile.column;
        const int of_tile = matrix.by_rows ? min(CHUNK, matrix.rows - tile.row) : min(SPAN, matrix.columns - tile.column);
        if (matrix.by_rows ? tile.column == 0 : tile.row == 0)
            exchange(bases, renewed, matrix.sent + line * matrix.width, of_tile * matrix.width);
    }
    if (count <= 0) return;
    float* held = memory + matrix.memory + column;
    const int end = min(CHUNK, matrix.rows - tile.row);
#pragma unroll 1
    for (int i = warp; i < end; i += WARPS * DEPTH) {
        Four c[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (i + d * WARPS < end) c[d] = load(held + (i64)(tile.row + i + d * WARPS) * matrix.columns, matrix.vector, count);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (i + d * WARPS >= end) continue;
            bool changed = moves;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (moves) c[d].at[j] = __fadd_rn(c[d].at[j], dot(lines[i + d * WARPS], basis[j]));
                if (!is_finite(c[d].at[j])) c[d].at[j] = 0.0f, changed = true;
            }
            if (changed) store(held + (i64)(tile.row + i + d * WARPS) * matrix.columns, c[d], matrix.vector, count);
        }
    }
}
