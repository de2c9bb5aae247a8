// The same as encode_rows for rows of any length, such as whole tensors: many blocks work on one row.
//
// A row is cut into chunks of CHUNK elements.
//  1. count      c = residual + gradient, or as momentum.cuh says, to memory; a histogram of the leading bits in every chunk.
//  2. bound      The bin of the keep-th magnitude, and where each chunk's candidates (that bin and above) begin in a list.
//  3. collect    The candidates, in order. About as many as are wanted, so that nothing after this reads the whole row.
//  4. search     The exact pattern of the keep-th magnitude among the candidates, bin by bin.
//  5. tally      Per chunk: how many exceed it, how many equal it.
//  6. place      Where each chunk's entries go in the payload, and how many ties it may send.
//  7. send       The entries, in order.
// A row whose candidates do not fit the list (most of its elements are equal) is done by `fallback`, one block per row, slower.

#include "momentum.cuh"
#include "search.cuh"

#define CHUNK 16384
#define COPIES 4
#define COUNT_THREADS 512
#define ROW_THREADS 1024
#define WARP_PART (CHUNK / (COUNT_THREADS / 32))

struct Chunk {
    int row;
    int first;  // chunk number of the row's first chunk
    i64 start;  // element
};

struct Giant {
    int chunks;     // set by the host, as are the two below
    int list;       // where the row's candidates begin
    int capacity;   // how many fit
    int base;       // the histogram's first bin begins here, 12 octaves below the pattern found in the last call ...
    int shift;      // ... and each bin is this many bits wide; 0 octaves and 21 bits in the first call
    int low;        // pattern of the keep-th magnitude
    int span;       // it is known up to this many bits ...
    int ceiling;    // ... and to be below this
    int above;      // how many exceed it
    int listed;     // candidates
    int reached;    // how many reach `low`
    int overflow;
    int ties;       // how many that equal `low` are wanted
};

#define WINDOW_BELOW (12 << 23)
#define WINDOW_SHIFT 17

// The bin of a magnitude; what is outside the window is in the first or the last one.
static __device__ __forceinline__ int bin_of(int bits, int base, int shift) {
    return min(max((bits - base) >> shift, 0), BINS - 1);
}

extern "C" __global__ void giants_count(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, const Chunk* chunks, const Giant* giants, u16* histograms,
    const float* ratio MOMENTUM_PARAMETERS) {
    __shared__ u32 histogram[COPIES * BINS];
    const Chunk chunk = chunks[blockIdx.x];
    const Row row = rows[chunk.row];
    const Gradient* gradient = bucket + row.gradient + chunk.start * row.stride;
    const int count = (int)(row.length - chunk.start < CHUNK ? row.length - chunk.start : CHUNK);
    const float scale = *ratio;
    const Momentum correction = MOMENTUM_OF_GROUP;
    const i64 place = row.memory + chunk.start * row.stride;
    const int base = giants[chunk.row].base, shift = giants[chunk.row].shift;
    float* held = memory + place;
    u32* mine = histogram + (threadIdx.x % COPIES) * BINS;
    bool had = false, bad = false;
    for (int i = threadIdx.x; i < COPIES * BINS; i += COUNT_THREADS) histogram[i] = 0;
    __syncthreads();
    if (row.vector) {
        for (int j = 4 * threadIdx.x; j < count; j += 4 * COUNT_THREADS) {
            float4 old = *reinterpret_cast<const float4*>(held + j);
            const Quad fresh = *reinterpret_cast<const Quad*>(gradient + j);
            float4 last = correction.get_quad(place + j);
            old.x = correction.compensate(fresh.x, old.x, scale, last.x, had, bad);
            old.y = correction.compensate(fresh.y, old.y, scale, last.y, had, bad);
            old.z = correction.compensate(fresh.z, old.z, scale, last.z, had, bad);
            old.w = correction.compensate(fresh.w, old.w, scale, last.w, had, bad);
            *reinterpret_cast<float4*>(held + j) = old;
            correction.put_quad(place + j, last);
            atomicAdd(&mine[bin_of(magnitude(old.x), base, shift)], 1u);
            atomicAdd(&mine[bin_of(magnitude(old.y), base, shift)], 1u);
            atomicAdd(&mine[bin_of(magnitude(old.z), base, shift)], 1u);
            atomicAdd(&mine[bin_of(magnitude(old.w), base, shift)], 1u);
        }
    } else {
        for (int j = threadIdx.x; j < count; j += COUNT_THREADS) {
            const i64 at = (i64)j * row.stride;
            float last = correction.get(place + at);
            const float c = correction.compensate(gradient[at], held[at], scale, last, had, bad);
            held[at] = c;
            correction.put(place + at, last);
            atomicAdd(&mine[bin_of(magnitude(c), base, shift)], 1u);
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += COUNT_THREADS) {
        u32 sum = 0;
        for (int copy = 0; copy < COPIES; ++copy) sum += histogram[copy * BINS + bin];
        histograms[(i64)blockIdx.x * BINS + bin] = (u16)sum;
    }
    if (had) raise(had_word(payload, row.slot));
    if (bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}

static __device__ __forceinline__ bool is_within(int bits, int low, int span, int ceiling) {
    return bits >= low && bits < ceiling && (bits - low) >> span == 0;
}

// The next call's histogram is finest around what this one found.
static __device__ __forceinline__ void aim(Giant& giant, int low) {
    giant.base = max(0, min(low - WINDOW_BELOW, 0x7fffffff - (BINS << WINDOW_SHIFT)));
    giant.shift = WINDOW_SHIFT;
}

extern "C" __global__ __launch_bounds__(ROW_THREADS) void giants_bound(
    const Row* rows, const int* first_chunks, Giant* giants, const u16* histograms, int* starts) {
    __shared__ int words[32], answer[3];
    const Row row = rows[blockIdx.x];
    Giant& giant = giants[blockIdx.x];
    const int first = first_chunks[blockIdx.x], bin = BINS - 1 - threadIdx.x, lane = threadIdx.x & 31;
    int here = 0;
#pragma unroll 8
    for (int chunk = 0; chunk < giant.chunks; ++chunk) here += histograms[(i64)(first + chunk) * BINS + bin];
    int found, above, inside;
    find_bin(here, row.keep, found, above, inside, words, answer);
    const int candidates = above + inside;
    if (threadIdx.x == 0) {
        // The first bin also has all that is below the window, the last all that is above.
        giant.low = found ? giant.base + (found << giant.shift) : 0;
        giant.span = found && found < BINS - 1 ? giant.shift : 31;
        giant.ceiling = found < BINS - 1 ? giant.base + ((found + 1) << giant.shift) : 0x7fffffff;
        giant.above = above;
        giant.listed = giant.reached = candidates;
        giant.overflow = candidates > giant.capacity;
    }
    // Candidates of each chunk, one warp per chunk, then where they begin.
    for (int chunk = threadIdx.x / 32; chunk < giant.chunks; chunk += ROW_THREADS / 32) {
        int sum = 0;
        for (int b = found + lane; b < BINS; b += 32) sum += histograms[(i64)(first + chunk) * BINS + b];
        sum = warp_sum(sum);
        if (lane == 0) starts[first + chunk] = sum;
    }
    __syncthreads();
    int before = 0;
    for (int base = 0; base < giant.chunks; base += ROW_THREADS) {
        const int chunk = base + threadIdx.x;
        const int count = chunk < giant.chunks ? starts[first + chunk] : 0;
        int total;
        const int upto = block_sum_upto(count, words, total);
        if (chunk < giant.chunks) starts[first + chunk] = giant.list + before + upto - count;
        before += total;
    }
}

extern "C" __global__ void giants_collect(
    const float* memory, const Row* rows, const Chunk* chunks, const Giant* giants, const int* starts, int* list_bits, int* list_index) {
    __shared__ int words[COUNT_THREADS / 32];
    const Chunk chunk = chunks[blockIdx.x];
    const Giant giant = giants[chunk.row];
    if (giant.overflow) return;
    const Row row = rows[chunk.row];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const i64 part = chunk.start + warp * WARP_PART;
    const float* held = memory + row.memory;
    const float threshold = __int_as_float(giant.low);
    // Twice over the warp's part, the second time from the cache: first how many, then where.
    int mine = 0;
    for (int j = lane; j < WARP_PART; j += 32)
        if (part + j < row.length) mine += fabsf(held[(part + j) * row.stride]) >= threshold;
    mine = warp_sum(mine);
    if (lane == 0) words[warp] = mine;
    __syncthreads();
    int next = starts[blockIdx.x];
    for (int w = 0; w < warp; ++w) next += words[w];
    for (int j = lane; j < WARP_PART; j += 32) {
        const bool inside = part + j < row.length;
        const float c = inside ? held[(part + j) * row.stride] : 0.0f;
        const bool candidate = inside && fabsf(c) >= threshold;
        const u32 ballot = __ballot_sync(EVERY_LANE, candidate);
        if (candidate) {
            const int at = next + lanes_before(ballot, lane);
            list_bits[at] = magnitude(c);
            list_index[at] = (int)(part + j);
        }
        next += __popc(ballot);
    }
}

extern "C" __global__ __launch_bounds__(ROW_THREADS) void giants_search(const Row* rows, Giant* giants, const int* list_bits) {
    __shared__ u32 histogram[BINS];
    __shared__ int words[32], answer[3];
    Giant& giant = giants[blockIdx.x];
    if (giant.overflow) return;
    const int keep = rows[blockIdx.x].keep, count = giant.listed;
    const int* bits = list_bits + giant.list;
    int low = giant.low, above = giant.above, reached = count, span = giant.span;
    const int ceiling = giant.ceiling;
    while (reached != keep && span) {
        const int next = span > 10 ? span - 10 : 0;
        histogram[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += ROW_THREADS)
            if (is_within(bits[i], low, span, ceiling)) atomicAdd(&histogram[(bits[i] - low) >> next], 1u);
        __syncthreads();
        int found, higher, inside;
        find_bin((int)histogram[BINS - 1 - threadIdx.x], keep - above, found, higher, inside, words, answer);
        low += found << next;
        above += higher;
        reached = above + inside;
        span = next;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        giant.low = low;
        giant.above = above;
        giant.ties = keep - above;
        giant.reached = reached;
        aim(giant, low);
    }
}

// A chunk's candidates end where those of the row's next chunk begin.
static __device__ __forceinline__ int end_of(int number, const Chunk& chunk, const Giant& giant, const int* starts) {
    return number + 1 < chunk.first + giant.chunks ? starts[number + 1] : giant.list + giant.listed;
}

// One warp per chunk: tallies[chunk] = (entries above the pattern, entries that equal it or, where all are wanted, reach it).
extern "C" __global__ void giants_tally(
    const Row* rows, const Chunk* chunks, const Giant* giants, const int* starts, const int* list_bits, int* tallies, int count) {
    const int number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (number >= count) return;
    const Giant giant = giants[chunks[number].row];
    if (giant.overflow) return;
    const bool all = giant.reached == rows[chunks[number].row].keep;
    int above = 0, tied = 0;
    const int end = end_of(number, chunks[number], giant, starts);
    for (int i = starts[number] + lane; i < end; i += 32) {
        above += all ? list_bits[i] >= giant.low : list_bits[i] > giant.low;
        tied += !all && list_bits[i] == giant.low;
    }
    above = warp_sum(above), tied = warp_sum(tied);
    if (lane == 0) tallies[2 * number] = above, tallies[2 * number + 1] = tied;
}

// tallies[chunk] becomes (first place in the payload, ties it may send).
extern "C" __global__ __launch_bounds__(ROW_THREADS) void giants_place(const int* first_chunks, const Giant* giants, int* tallies) {
    __shared__ int words[32];
    const Giant giant = giants[blockIdx.x];
    if (giant.overflow) return;
    int places = 0, ties = 0, total;
    for (int base = 0; base < giant.chunks; base += ROW_THREADS) {
        const int chunk = base + threadIdx.x;
        int* mine = tallies + 2 * (first_chunks[blockIdx.x] + chunk);
        const bool live = chunk < giant.chunks;
        const int above = live ? mine[0] : 0, tied = live ? mine[1] : 0;
        const int before = ties + block_sum_upto(tied, words, total) - tied;
        ties += total;
        const int allowed = max(0, min(tied, giant.ties - before));
        const int place = places + block_sum_upto(above + allowed, words, total) - above - allowed;
        places += total;
        if (live) mine[0] = place, mine[1] = allowed;
    }
}

extern "C" __global__ void giants_send(
    float* memory, u8* payload, const Row* rows, const Chunk* chunks, const Giant* giants, const int* starts,
    const int* list_bits, const int* list_index, const int* tallies, int count MOMENTUM_PARAMETERS) {
    const int number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (number >= count) return;
    const Giant giant = giants[chunks[number].row];
    if (giant.overflow) return;
    const Row row = rows[chunks[number].row];
    const Momentum correction = MOMENTUM_OF_GROUP;
    const bool all = giant.reached == row.keep;
    int place = tallies[2 * number], allowed = tallies[2 * number + 1];
    bool bad = false;
    const int end = end_of(number, chunks[number], giant, starts);
    for (int base = starts[number]; base < end; base += 32) {
        const int i = base + lane;
        const int bits = i < end ? list_bits[i] : -1;
        const bool tie = !all && bits == giant.low;
        const u32 ties = __ballot_sync(EVERY_LANE, tie);
        const bool take = (all ? bits >= giant.low : bits > giant.low) || (tie && lanes_before(ties, lane) < allowed);
        const u32 taken = __ballot_sync(EVERY_LANE, take);
        if (take) {
            const int index = list_index[i];
            float* at = memory + row.memory + (i64)index * row.stride;
            *at = correction.send(*at, index, place + lanes_before(taken, lane), row, payload, bad);
        }
        place += __popc(taken);
        allowed -= min(allowed, __popc(ties));
    }
    if (bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}

extern "C" __global__ __launch_bounds__(ROW_THREADS) void giants_fallback(
    float* memory, u8* payload, const Row* rows, Giant* giants MOMENTUM_PARAMETERS) {
    if (!giants[blockIdx.x].overflow) return;
    const Momentum correction = MOMENTUM_OF_GROUP;
    __shared__ u32 histogram[BINS];
    __shared__ int words[32], answer[3];
    const Row row = rows[blockIdx.x];
    float* held = memory + row.memory;
    Giant& giant = giants[blockIdx.x];
    int low = giant.low, above = giant.above, reached = giant.reached, span = giant.span;
    const int ceiling = giant.ceiling;
    while (reached != row.keep && span) {
        const int next = span > 10 ? span - 10 : 0;
        histogram[threadIdx.x] = 0;
        __syncthreads();
        for (i64 j = threadIdx.x; j < row.length; j += ROW_THREADS) {
            const int bits = magnitude(held[j * row.stride]);
            if (is_within(bits, low, span, ceiling)) atomicAdd(&histogram[(bits - low) >> next], 1u);
        }
        __syncthreads();
        int found, higher, inside;
        find_bin((int)histogram[BINS - 1 - threadIdx.x], row.keep - above, found, higher, inside, words, answer);
        low += found << next;
        above += higher;
        reached = above + inside;
        span = next;
    }
    __syncthreads();
    if (threadIdx.x == 0) aim(giant, low);
    const bool all = reached == row.keep;
    int wanted = all ? 0 : row.keep - above, place = 0, total;
    bool bad = false;
    // Nothing is left to send behind the last entry: constant rows end after their first elements.
    for (i64 base = 0; base < row.length && place < row.keep; base += ROW_THREADS) {
        const i64 j = base + threadIdx.x;
        const float c = j < row.length ? held[j * row.stride] : 0.0f;
        const int bits = j < row.length ? magnitude(c) : -1;
        const int tie = !all && bits == low;
        const int before = block_sum_upto(tie, words, total) - tie;
        const bool take = (all ? bits >= low : bits > low) || (tie && before < wanted);
        wanted -= min(wanted, total);
        const int upto = block_sum_upto(take, words, total);
        if (take) held[j * row.stride] = correction.send(c, (int)j, place + upto - 1, row, payload, bad);
        place += total;
    }
    if (bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}
