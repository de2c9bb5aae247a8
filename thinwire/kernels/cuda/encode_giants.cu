// The same as stream_rows for rows of any length, such as whole tensors: many blocks work on one row.
//
// A row is cut into chunks. Candidates are what reaches a cut, one that twice as many as are sent reached in the last call: enough
// are left even if nothing is added to what stays.
//  1. collect  c = residual + gradient, or as momentum.cuh says, to memory; candidates to the row's list, chunk by chunk, and a
//              histogram of them, finest just above the cut.
//  2. decide   (decide_giants.cu) A chunk to a warp: the bin of the keep-th magnitude, how many of the chunk are above it, and the
//              few inside to a list of their own. The block that ends last for a row finds the pattern of the keep-th magnitude
//              among these, where each chunk's entries go in the payload, and the next call's cut.
//  3. send     The entries, in order, one warp to a chunk.
// What happens to rows for which that does not do: giants.cuh.

#include "momentum.cuh"
#include "search.cuh"
#include "giants.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define PER_LANE 16
#define QUADS (PER_LANE / 4)
#define WARP_PART (32 * PER_LANE)
#define SEND_WARPS 4
#if MOMENTUM
#define COLLECT_BLOCKS 3
#else
#define COLLECT_BLOCKS 4
#endif

// Candidates of a chunk, six times the usual number.
#define CROWDED 512

#define SEEN_GRADIENT 1
#define SEEN_BAD 2

// -- collect ----------------------------------------------------------------------------------------------------------

// Where a lane's e-th element is in the warp's part.
template <bool VECTOR>
static __device__ __forceinline__ int place_of(int e, int lane) {
    return VECTOR ? 128 * (e / 4) + 4 * lane + e % 4 : 32 * e + lane;
}

// A lane's elements of a warp's part: from `gradient` and, in memory, from `place` on; the chunk has `left` > 0 more.
template <bool VECTOR>
static __device__ __forceinline__ void compensate_part(
    const Gradient* gradient, float* memory, i64 place, int stride, int left, float scale, const Momentum& correction, float* c,
    bool& had, bool& bad) {
    const int lane = threadIdx.x & 31;
    float* held = memory + place;
    if (VECTOR) {
        float4 old[QUADS], last[QUADS];
        Quad fresh[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            // What is behind the end is read too, from inside: a load that depends on a comparison waits for the one before.
            const int j = min(128 * i + 4 * lane, left - 4);
            old[i] = *reinterpret_cast<const float4*>(held + j);
            fresh[i] = *reinterpret_cast<const Quad*>(gradient + j);
            last[i] = correction.get_quad(place + j);
        }
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const int j = 128 * i + 4 * lane;
            float* mine = c + 4 * i;
            mine[0] = correction.compensate(fresh[i].x, old[i].x, scale, last[i].x, had, bad);
            mine[1] = correction.compensate(fresh[i].y, old[i].y, scale, last[i].y, had, bad);
            mine[2] = correction.compensate(fresh[i].z, old[i].z, scale, last[i].z, had, bad);
            mine[3] = correction.compensate(fresh[i].w, old[i].w, scale, last[i].w, had, bad);
            if (j < left) {
                // Not through held + j, of which the compiler does not see that it is aligned: it would store four times.
                reinterpret_cast<float4*>(held)[32 * i + lane] = make_float4(mine[0], mine[1], mine[2], mine[3]);
                correction.put_quad(place + j, last[i]);
            }
        }
        return;
    }
#pragma unroll
    for (int base = 0; base < PER_LANE; base += BATCH) {
        Gradient fresh[BATCH];
        float last[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const i64 at = (i64)min(32 * (base + b) + lane, left - 1) * stride;
            c[base + b] = held[at];
            fresh[b] = gradient[at];
            last[b] = correction.get(place + at);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int j = 32 * (base + b) + lane;
            const float now = correction.compensate(fresh[b], c[base + b], scale, last[b], had, bad);
            if (j < left) {
                held[(i64)j * stride] = now;
                correction.put(place + (i64)j * stride, last[b]);
            }
            c[base + b] = now;
        }
    }
}

// One bit per element of the lane that reaches the cut; four neighbours are all before the end or all behind it.
template <bool VECTOR>
static __device__ __forceinline__ u32 find_candidates(const float* c, int left, int cut) {
    const int lane = threadIdx.x & 31;
    u32 mask = 0;
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) {
        const u32 bound = place_of<VECTOR>(VECTOR ? e / 4 * 4 : e, lane) < left ? (u32)cut : 0xffffffffu;
        if ((u32)magnitude(c[e]) >= bound) mask |= 1u << e;
    }
    return mask;
}

// A warp's elements to shared memory, from where they are taken by place: those of a lane's registers cannot be.
template <bool VECTOR>
static __device__ __forceinline__ void put_down(const float* c, float* values) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const float* mine = c + 4 * i;
        if (VECTOR)
            reinterpret_cast<float4*>(values)[32 * i + lane] = make_float4(mine[0], mine[1], mine[2], mine[3]);
        else
            for (int q = 0; q < 4; ++q) values[place_of<VECTOR>(4 * i + q, lane)] = mine[q];
    }
}

// The places of a warp's candidates, in order; returns how many there are.
template <bool VECTOR>
static __device__ __forceinline__ int list_places(u32 mask, int part, u16* places) {
    const int lane = threadIdx.x & 31;
    int next = 0;
    if (VECTOR) {
        // Four neighbours are one lane's: a byte for each four, and one sum over the lanes for all bytes.
        int counts = 0;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) counts |= __popc((mask >> (4 * i)) & 15) << (8 * i);
        const int upto = sum_upto(counts, lane), total = __shfl_sync(EVERY_LANE, upto, 31);
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            int at = next + (((u32)(upto - counts) >> (8 * i)) & 255);
#pragma unroll 1
            for (u32 rest = (mask >> (4 * i)) & 15; rest; rest &= rest - 1)
                places[at++] = (u16)(part + place_of<VECTOR>(4 * i, lane) + __ffs(rest) - 1);
            next += ((u32)total >> (8 * i)) & 255;
        }
        return next;
    }
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) {
        const u32 ballot = __ballot_sync(EVERY_LANE, (mask >> e) & 1);
        if ((mask >> e) & 1) places[next + lanes_before(ballot, lane)] = (u16)(part + place_of<VECTOR>(e, lane));
        next += __popc(ballot);
    }
    return next;
}

// Where a chunk's candidates go in the list; -1 if they do not fit, and then they are only counted.
static __device__ __forceinline__ int allot(Giant& giant, Section& section, const int* counts) {
    const int list = giant.list, room = giant.room;
    int total = 0;
    for (int w = 0; w < WARPS; ++w) total += counts[w];
    const int start = total ? (int)atomicAdd(&giant.listed, (u32)total) : 0;
    section.start = start, section.count = total;
    return start + total <= room ? list + start : -1;
}

static __device__ __forceinline__ void report(const int* seen, int slot, u8* payload) {
    int all = 0;
    for (int w = 0; w < WARPS; ++w) all |= seen[w];
    if (all & SEEN_GRADIENT) raise(had_word(payload, slot));
    if (all & SEEN_BAD) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}

struct __align__(16) CollectShared {
    float values[THREADS * PER_LANE];
    u16 places[THREADS * PER_LANE];  // of a warp's candidates, from its part on
    u32 histogram[BINS];
    int counts[WARPS], seen[WARPS], begin;
};

// A chunk's candidates to the histogram. Few go there by themselves; where they are many, they would queue at its bins.
static __device__ __forceinline__ void tell_histogram(
    const float* values, const u16* places, int mine, int total, const Window& window, u32* histogram, u32* near) {
    const int lane = threadIdx.x & 31;
    if (total <= CROWDED) {
#pragma unroll 1
        for (int i = lane; i < mine; i += 32) atomicAdd(&histogram[window.bin(magnitude(values[places[i]]))], 1u);
        return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < BINS; i += THREADS) near[i] = 0;
    __syncthreads();
    for (int i = lane; i < mine; i += 32) atomicAdd(&near[window.bin(magnitude(values[places[i]]))], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (near[i]) atomicAdd(&histogram[i], near[i]);
}

template <bool VECTOR>
static __device__ __forceinline__ void collect_chunk(
    const Gradient* bucket, float* memory, u8* payload, const Chunk& chunk, Giant& giant, Section& section, u32* histogram,
    const Lists& lists, float scale, const Momentum& correction, CollectShared& shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, part = warp * WARP_PART, left = chunk.count - part;
    // Looked at when the elements are there: they are not to wait for it.
    const int cut = giant.cut;
    float c[PER_LANE];
    u32 mask = 0;
    bool had = false, bad = false;
    if (left > 0) {
        const i64 at = (i64)part * chunk.stride;
        compensate_part<VECTOR>(
            bucket + chunk.gradient + at, memory, chunk.memory + at, chunk.stride, left, scale, correction, c, had, bad);
        mask = find_candidates<VECTOR>(c, left, window_of(cut, scale).cut);
    }
    put_down<VECTOR>(c, shared.values + part);
    const u16* places = shared.places + part;
    const int mine = list_places<VECTOR>(mask, part, shared.places + part);
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if (lane == 0) {
        shared.counts[warp] = mine;
        shared.seen[warp] = (any_had ? SEEN_GRADIENT : 0) | (any_bad ? SEEN_BAD : 0);
    }
    __syncthreads();
    // Two that wait for memory; meanwhile the others count.
    if (threadIdx.x == 0) shared.begin = allot(giant, section, shared.counts);
    if (threadIdx.x == 32) report(shared.seen, chunk.slot, payload);
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) before += w < warp ? shared.counts[w] : 0, total += shared.counts[w];
    tell_histogram(shared.values, places, mine, total, window_of(cut, scale), histogram, shared.histogram);
    __syncthreads();
    if (shared.begin < 0) return;
#pragma unroll 1
    for (int i = lane; i < mine; i += 32) {
        const int place = places[i], at = shared.begin + before + i;
        lists.values[at] = shared.values[place], lists.places[at] = (u16)place;
    }
}

extern "C" __global__ __launch_bounds__(THREADS, COLLECT_BLOCKS) void giants_collect(
    const Gradient* bucket, float* memory, u8* payload, const Chunk* chunks, Giant* giants, Section* sections, u32* histograms,
    float* list_values, u16* list_places, const float* ratio MOMENTUM_PARAMETERS) {
    __shared__ CollectShared shared;
    const Chunk chunk = chunks[blockIdx.x];
    const float scale = *ratio;
    const Momentum correction = MOMENTUM_OF_GROUP;
    Giant& giant = giants[chunk.row];
    Section& section = sections[blockIdx.x];
    u32* histogram = histograms + (i64)(giant.histogram + ((int)blockIdx.x & (giant.copies - 1))) * BINS;
    const Lists lists = {list_values, list_places};
    if (chunk.vector)
        collect_chunk<true>(bucket, memory, payload, chunk, giant, section, histogram, lists, scale, correction, shared);
    else
        collect_chunk<false>(bucket, memory, payload, chunk, giant, section, histogram, lists, scale, correction, shared);
}

// -- send -------------------------------------------------------------------------------------------------------------

extern "C" __global__ __launch_bounds__(32 * SEND_WARPS) void giants_send(
    float* memory, u8* payload, const Row* rows, const Chunk* chunks, const Giant* giants, const Section* sections,
    const float* list_values, const u16* list_places, int count MOMENTUM_PARAMETERS) {
    const int number = blockIdx.x * SEND_WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (number >= count) return;
    const Section section = sections[number];
    const Chunk chunk = chunks[number];
    const Row row = rows[chunk.row];
    const int low = giants[chunk.row].low;
    // Zeros are in no list.
    const bool walks = giants[chunk.row].way == SLOW || (low == 0 && section.ties);
    const int end = walks ? chunk.count : section.count;
    const Momentum correction = MOMENTUM_OF_GROUP;
    float* held = memory + chunk.memory;
    const float* values = list_values + giants[chunk.row].list + section.start;
    const u16* places = list_places + giants[chunk.row].list + section.start;
    int place = section.place, allowed = section.ties;
    bool bad = false;
    for (int base = 0; base < end; base += 32 * LIST_BATCH) {
        float c[LIST_BATCH];
        int at[LIST_BATCH];
#pragma unroll
        for (int b = 0; b < LIST_BATCH; ++b) {
            const int i = min(base + 32 * b + lane, end - 1);
            c[b] = walks ? held[(i64)i * row.stride] : values[i];
            at[b] = walks ? i : places[i];
        }
#pragma unroll
        for (int b = 0; b < LIST_BATCH; ++b) {
            const int bits = base + 32 * b + lane < end ? magnitude(c[b]) : -1;
            const u32 ties = __ballot_sync(EVERY_LANE, bits == low);
            const bool take = bits > low || (bits == low && lanes_before(ties, lane) < allowed);
            const u32 taken = __ballot_sync(EVERY_LANE, take);
            if (take)
                held[(i64)at[b] * row.stride] =
                    correction.send(c[b], chunk.start + at[b], place + lanes_before(taken, lane), row, payload, bad);
            place += __popc(taken);
            allowed -= min(allowed, __popc(ties));
        }
    }
    if (bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}
