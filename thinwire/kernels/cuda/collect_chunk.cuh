// Candidates of a chunk to a list, by a block, and entries of a chunk to the payload, by a warp.

#include "momentum.cuh"
#include "chunks.cuh"

#define CHUNK_WARPS (CHUNK_THREADS / 32)
#define PER_LANE 16
#define QUADS (PER_LANE / 4)
#define WARP_PART (32 * PER_LANE)
static_assert(CHUNK_ROOM == CHUNK_THREADS * PER_LANE, "registers for a chunk");
// Blocks on a multiprocessor.
#define COLLECT_BLOCKS (MOMENTUM ? 3 : 4)
// Loads of a list that are under way at once.
#define LIST_BATCH 4

#define SEEN_GRADIENT 1
#define SEEN_BAD 2

// -- a lane's elements ------------------------------------------------------------------------------------------------

// Where a lane's e-th element is in the warp's part.
template <bool VECTOR>
static __device__ __forceinline__ int place_of(int e, int lane) {
    return VECTOR ? 128 * (e / 4) + 4 * lane + e % 4 : 32 * e + lane;
}

// Compensate a lane's elements of a warp's part, which begins at `gradient` and in memory at `place`. From there on the chunk has
// `left` > 0 elements. The residual is read from `before`, which may be `memory` itself.
template <bool VECTOR>
static __device__ __forceinline__ void compensate_part(
    const Gradient* gradient, const float* before, float* memory, i64 place, int stride, int left, float scale,
    const Momentum& correction, float* c, bool& had, bool& bad) {
    const int lane = threadIdx.x & 31;
    const float* past = before + place;
    float* held = memory + place;
    if (VECTOR) {
        float4 old[QUADS], last[QUADS], moments[QUADS];
        Quad fresh[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            // Behind the end the last ones are read again: a load that depends on a comparison would wait for the one before.
            const int j = min(128 * i + 4 * lane, left - 4);
            old[i] = *reinterpret_cast<const float4*>(past + j);
            fresh[i] = *reinterpret_cast<const Quad*>(gradient + j);
            last[i] = correction.get_quad(place + j);
            moments[i] = correction.get_moment_quad(place + j);
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
                // Not held + j: the compiler does not see that it is aligned, and would store four times.
                reinterpret_cast<float4*>(held)[32 * i + lane] = make_float4(mine[0], mine[1], mine[2], mine[3]);
                correction.put_quad(place + j, last[i]);
            }
#if SCALED
            const float4 weights = correction.weigh_quad(make_float4(mine[0], mine[1], mine[2], mine[3]), moments[i]);
            mine[0] = weights.x, mine[1] = weights.y, mine[2] = weights.z, mine[3] = weights.w;
#endif
        }
        return;
    }
#pragma unroll
    for (int base = 0; base < PER_LANE; base += BATCH) {
        Gradient fresh[BATCH];
        float last[BATCH], moments[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const i64 at = (i64)min(32 * (base + b) + lane, left - 1) * stride;
            c[base + b] = past[at];
            fresh[b] = gradient[at];
            last[b] = correction.get(place + at);
            moments[b] = correction.get_moment(place + at);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int j = 32 * (base + b) + lane;
            const float now = correction.compensate(fresh[b], c[base + b], scale, last[b], had, bad);
            if (j < left) {
                held[(i64)j * stride] = now;
                correction.put(place + (i64)j * stride, last[b]);
            }
            c[base + b] = correction.weigh(now, moments[b]);
        }
    }
}

// A bit for each of the lane's elements that reaches the cut. Four neighbours of a vector are all before the end, or none is.
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

// A warp's elements to shared memory, where they can be looked up by place; registers cannot.
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
        // A lane has four neighbours at a time. One number has a byte for each four, so one sum over the lanes does them all.
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

// -- the list ---------------------------------------------------------------------------------------------------------

struct __align__(16) CollectShared {
    float values[CHUNK_ROOM];
    u16 places[CHUNK_ROOM];  // of a warp's candidates, from its part on
    int counts[CHUNK_WARPS], seen[CHUNK_WARPS], begin;
};

// Where a chunk's candidates go in the list. -1 if they do not fit; then they are only counted.
template <class State>
static __device__ __forceinline__ int allot(State& state, Section& section, const int* counts) {
    const int list = state.list, room = state.room;
    int total = 0;
    for (int w = 0; w < CHUNK_WARPS; ++w) total += counts[w];
    const int start = total ? (int)atomicAdd(&state.listed, (u32)total) : 0;
    section.start = start, section.count = total;
    return start + total <= room ? list + start : -1;
}

static __device__ __forceinline__ void report_all(const int* seen, int slot, u8* payload) {
    int all = 0;
    for (int w = 0; w < CHUNK_WARPS; ++w) all |= seen[w];
    if (all & SEEN_GRADIENT) raise(had_word(payload, slot));
    if (all & SEEN_BAD) raise_bad(payload);
}

// The elements whose bits are set in `mask`, in order, to the list of their row, if they fit. While that waits for memory,
// `meanwhile(places, mine, total)` runs: this warp has `mine` candidates of `total`, at `places` in shared.values.
template <bool VECTOR, class State, class Meanwhile>
static __device__ __forceinline__ void list_candidates(
    const float* c, u32 mask, bool had, bool bad, u8* payload, const Chunk& chunk, State& state, Section& section,
    const Lists& lists, CollectShared& shared, Meanwhile meanwhile) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, part = warp * WARP_PART;
    put_down<VECTOR>(c, shared.values + part);
    const u16* places = shared.places + part;
    const int mine = list_places<VECTOR>(mask, part, shared.places + part);
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if (lane == 0) {
        shared.counts[warp] = mine;
        shared.seen[warp] = (any_had ? SEEN_GRADIENT : 0) | (any_bad ? SEEN_BAD : 0);
    }
    __syncthreads();
    // Two threads wait for memory; meanwhile the others count.
    if (threadIdx.x == 0) shared.begin = allot(state, section, shared.counts);
    if (threadIdx.x == 32) report_all(shared.seen, chunk.slot, payload);
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < CHUNK_WARPS; ++w) before += w < warp ? shared.counts[w] : 0, total += shared.counts[w];
    meanwhile(places, mine, total);
    __syncthreads();
    if (shared.begin < 0) return;
#pragma unroll 1
    for (int i = lane; i < mine; i += 32) {
        const int place = places[i], at = shared.begin + before + i;
        lists.values[at] = shared.values[place], lists.places[at] = (u16)place;
    }
}

// Compensate a chunk and list its candidates. `find_cut()` is called when the elements are there, so that they do not wait for it.
template <bool VECTOR, class State, class FindCut, class Meanwhile>
static __device__ __forceinline__ void collect_chunk(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Chunk& chunk, State& state, Section& section,
    const Lists& lists, float scale, const Momentum& correction, CollectShared& shared, FindCut find_cut, Meanwhile meanwhile) {
    const int part = threadIdx.x / 32 * WARP_PART, left = chunk.count - part;
    float c[PER_LANE];
    u32 mask = 0;
    bool had = false, bad = false;
    if (left > 0) {
        const i64 at = (i64)part * chunk.stride;
        compensate_part<VECTOR>(
            bucket + chunk.gradient + at, before, memory, chunk.memory + at, chunk.stride, left, scale, correction, c, had, bad);
        mask = find_candidates<VECTOR>(c, left, find_cut());
    }
    list_candidates<VECTOR>(c, mask, had, bad, payload, chunk, state, section, lists, shared, meanwhile);
}

// -- entries ----------------------------------------------------------------------------------------------------------

// A warp sends the entries of a chunk: those above `low`, and as many that equal it as the section says. They are in the list, or
// `walks` and they are looked for in memory.
static __device__ __forceinline__ void send_chunk(
    float* memory, u8* payload, const Row& row, const Chunk& chunk, const Section& section, const float* values,
    const u16* places, int low, bool walks, const Momentum& correction) {
    const int lane = threadIdx.x & 31, end = walks ? chunk.count : section.count;
    float* held = memory + chunk.memory;
    int place = section.place, allowed = section.ties;
    bool bad = false;
    for (int base = 0; base < end; base += 32 * LIST_BATCH) {
        float c[LIST_BATCH];
        int at[LIST_BATCH];
#pragma unroll
        for (int b = 0; b < LIST_BATCH; ++b) {
            const int i = min(base + 32 * b + lane, end - 1);
            const i64 step = (i64)i * row.stride;
            c[b] = walks ? correction.weigh_held(held[step], chunk.memory + step) : values[i];
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
    if (bad) raise_bad(payload);
}
