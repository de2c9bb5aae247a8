// The second step of encode_multi_block_rows.cu: which candidates are sent, and where they go in the payload.

#include "momentum.cuh"
#include "place_chunks.cuh"
#include "multi_block_rows.cuh"

// Loads of a list that are under way at once.
#define TALLY_BATCH 4
// Up to so many edges are compared each with each: that is faster than two rounds of a histogram.
#define FEW_EDGES 256

struct Verdict {
    int way;
    int low, high;  // bounds of the keep-th magnitude
    int above;      // how many are above `high`
    int cut;        // of the next call
};

// How many should reach the next call's cut. Where much is sent little is held back, and thresholds follow the gradient's norm
// more.
static __device__ __forceinline__ int target_of(const Row& row) {
    const i64 wanted = (row.keep > row.length / 32 ? 3 : 2) * (i64)row.keep + 64;
    const int middle = row.keep + (row.length - row.keep) / 2;
    return wanted < middle ? (int)wanted : middle;
}

// A lower cut, if only `total` > 0 reached this one. By experience the number grows with the eighth power.
static __device__ __forceinline__ int lower_cut(int cut, int total, int target) {
    const float missing = (float)(target - total) / (float)total;
    return cut - (int)(fminf(missing, 2.0f) * (float)(1 << 21));
}

// From the histograms of a row's candidates; all its blocks come to the same. `answer` has 4 places.
static __device__ __forceinline__ Verdict judge(
    const Row& row, const RowState& state, const Window& window, const u32* histogram, Deciders& group, int* answer) {
    const int bin = BINS - 1 - (int)threadIdx.x, target = target_of(row);
    int here = 0, total;
#pragma unroll 4
    for (int copy = 0; copy < state.copies; ++copy) here += (int)histogram[copy * BINS + bin];
    const int upto = group.sum_upto(here, total), before = upto - here;
    if (upto >= row.keep && before < row.keep) answer[0] = bin, answer[1] = before, answer[2] = here;
    if (upto >= target && before < target) {
        // A bin's magnitudes are taken to be spread evenly.
        const int low = (int)window.low(bin), high = window.high(bin);
        answer[3] = low + (int)((float)(high - low) * ((float)(upto - target) / (float)here));
    }
    __syncthreads();
    Verdict verdict = {};
    verdict.cut = total >= target ? answer[3] : lower_cut(window.cut, max(total, 1), target);
    if (total < row.keep) {
        verdict.way = window.cut <= 1 ? FEW : SLOW;
        verdict.above = total;
        return verdict;
    }
    verdict.low = (int)window.low(answer[0]), verdict.high = window.high(answer[0]), verdict.above = answer[1];
    verdict.way = total <= state.room ? READY : answer[1] + answer[2] <= state.room ? AGAIN : SLOW;
    return verdict;
}

// A warp lists what reaches `low` in a chunk.
static __device__ __forceinline__ void collect_again(
    const float* memory, const Chunk chunk, int low, RowState& state, Section& section, const Lists& lists,
    const Momentum& correction) {
    const int lane = threadIdx.x & 31;
    const auto weight_at = [&](int j) {
        const i64 at = chunk.memory + (i64)j * chunk.stride;
        return correction.weigh_held(memory[at], at);
    };
    int mine = 0;
#pragma unroll 8
    for (int j = lane; j < chunk.count; j += 32) mine += magnitude(weight_at(j)) >= low;
    section.count = warp_sum(mine);
    if (lane == 0) section.start = (int)atomicAdd(&state.relisted, (u32)section.count);
    section.start = __shfl_sync(EVERY_LANE, section.start, 0);
    int next = state.list + section.start;
    for (int base = lane; base - lane < chunk.count; base += 32 * BATCH) {
        float c[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) c[b] = weight_at(min(base + 32 * b, chunk.count - 1));
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const bool candidate = base + 32 * b < chunk.count && magnitude(c[b]) >= low;
            const u32 ballot = __ballot_sync(EVERY_LANE, candidate);
            const int at = next + lanes_before(ballot, lane);
            if (candidate) lists.values[at] = c[b], lists.places[at] = (u16)(base + 32 * b);
            next += __popc(ballot);
        }
    }
    __syncwarp();
}

// A warp counts the candidates of a chunk that are above the bin, and lists those inside.
static __device__ __forceinline__ int tally(
    const float* values, int count, const Verdict& verdict, int number, RowState& state, Edge* edges) {
    const int lane = threadIdx.x & 31, room = state.edge_room;
    edges += state.edge;
    int above = 0;
    for (int base = lane; base - lane < count; base += 32 * TALLY_BATCH) {
        int bits[TALLY_BATCH];
#pragma unroll
        for (int b = 0; b < TALLY_BATCH; ++b) bits[b] = magnitude(values[min(base + 32 * b, count - 1)]);
#pragma unroll
        for (int b = 0; b < TALLY_BATCH; ++b) {
            const bool live = base + 32 * b < count, inside = live && bits[b] >= verdict.low && bits[b] <= verdict.high;
            above += live && bits[b] > verdict.high;
            const u32 ballot = __ballot_sync(EVERY_LANE, inside);
            if (ballot == 0) continue;
            int at = 0;
            if (lane == 0) at = (int)atomicAdd(&state.edges, (u32)__popc(ballot));
            at = __shfl_sync(EVERY_LANE, at, 0) + lanes_before(ballot, lane);
            if (inside && at < room) edges[at] = {bits[b], number};
        }
    }
    return warp_sum(above);
}

// Whether this block is the last of its row to come here. If so, it sees what the others wrote.
static __device__ __forceinline__ bool is_last(RowState& state, int* answer) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *answer = atomicAdd(&state.done, 1u) == (u32)state.groups - 1;
        __threadfence();
    }
    __syncthreads();
    return *answer != 0;
}

// The pattern of the `wanted`-th of up to FEW_EDGES magnitudes, and how many exceed it.
static __device__ __forceinline__ int rank_edges(const Edge* edges, int count, int wanted, int& above, u32* near, int* answer) {
    const int mine = (int)threadIdx.x < count ? edges[threadIdx.x].bits : -1;
    if (threadIdx.x < FEW_EDGES) near[threadIdx.x] = (u32)mine;
    __syncthreads();
    if (mine >= 0) {
        int more = 0, same = 0;
#pragma unroll 4
        for (int i = 0; i < count; ++i) more += (int)near[i] > mine, same += (int)near[i] == mine;
        // Several threads may answer, all with the same.
        if (more < wanted && more + same >= wanted) answer[0] = mine, answer[1] = more;
    }
    __syncthreads();
    above = answer[1];
    return answer[0];
}

// The pattern of the keep-th magnitude. Sections learn how many of theirs exceed and equal it; `ties` is how many that equal it are
// sent.
static __device__ __forceinline__ int find_low(
    const float* memory, const Row& row, const Chunk* chunks, const RowState& state, Section* sections, const float* values,
    const Edge* edges, const Verdict& verdict, int& ties, Deciders& group, DecideShared& shared, const Momentum& correction) {
    if (verdict.way == FEW) {
        ties = row.keep - verdict.above;
        return 0;
    }
    const bool slow = verdict.way == SLOW;
    const int first = slow ? 0 : verdict.low, last = slow ? 0x7fffffff : verdict.high;
    const int wanted = slow ? row.keep : row.keep - verdict.above, count = (int)state.edges;
    int above, low, span = 0;
    while (span < 31 && (last - first) >> span) ++span;
    if (!slow && count <= state.edge_room) {
        edges += state.edge;
        const auto bits_at = [=](int i) { return edges[i].bits - first; };
        if (count <= FEW_EDGES)
            low = rank_edges(edges, count, wanted, above, shared.histogram, shared.answer);
        else
            low = first + find_pattern(bits_at, count, wanted, above, group, shared, span);
        for (int i = threadIdx.x; i < count; i += BINS) {
            if (edges[i].bits > low) atomicAdd(reinterpret_cast<u32*>(&sections[edges[i].chunk].place), 1u);
            if (edges[i].bits == low) atomicAdd(reinterpret_cast<u32*>(&sections[edges[i].chunk].ties), 1u);
        }
    } else {
        const int listed = slow ? row.length : (int)(verdict.way == AGAIN ? state.relisted : state.listed);
        const i64 stride = slow ? row.stride : 1;
        values = slow ? memory + row.memory : values + state.list;
        sections += state.first;
        if (slow) take_all(sections, chunks + state.first, state.chunks);
        // What is listed are weights already.
        const auto bits_at = [=](int i) {
            const float value = values[i * stride];
            return magnitude(SCALED && slow ? correction.weigh_held(value, row.memory + i * stride) : value);
        };
        const auto inside = [=](int i) {
            const int bits = bits_at(i);
            return bits >= first && bits <= last ? bits - first : -1;
        };
        low = first + find_pattern(inside, listed, wanted, above, group, shared, span);
        count_all(sections, state.chunks, low, bits_at);
    }
    ties = wanted - above;
    return low;
}

extern "C" __global__ __launch_bounds__(BINS) void multi_block_decide(
    const float* memory, const Row* rows, const Chunk* chunks, const ChunkGroup* groups, RowState* states, Section* sections,
    u32* histograms, float* list_values, u16* list_places, Edge* edges,
    const float* ratio MOMENTUM_PARAMETERS) {
    __shared__ DecideShared shared;
    Deciders deciders = shared.group();
    const Momentum correction = MOMENTUM_OF_GROUP;
    const ChunkGroup mine = groups[blockIdx.x];
    const Row row = rows[mine.row];
    RowState& state = states[mine.row];
    u32* counted = histograms + (i64)state.histogram * BINS;
    const int number = mine.first + (int)threadIdx.x / 32;
    const bool live = number < state.first + state.chunks;
    Section section = sections[live ? number : mine.first];
    const Verdict verdict = judge(row, state, window_of(state.cut, *ratio), counted, deciders, shared.answer);

    if (live && verdict.way != SLOW) {
        if (verdict.way == AGAIN)
            collect_again(memory, chunks[number], verdict.low, state, section, {list_values, list_places}, correction);
        section.place = section.count, section.ties = 0;
        if (verdict.way == FEW)
            section.ties = chunks[number].count - section.count;
        else
            section.place = tally(list_values + state.list + section.start, section.count, verdict, number, state, edges);
        if ((threadIdx.x & 31) == 0) sections[number] = section;
    }
    if (!is_last(state, shared.answer)) return;

    int ties;
    const int low = find_low(
        memory, row, chunks, state, sections, list_values, edges, verdict, ties, deciders, shared, correction);
    __syncthreads();
    place_sections(sections + state.first, state.chunks, ties, deciders);
    for (int copy = 0; copy < state.copies; ++copy) counted[copy * BINS + threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        state.cut = max(1, verdict.way == SLOW ? low - (1 << 21) : min(verdict.cut, low));
        state.listed = state.relisted = state.edges = state.done = 0;
        state.low = low, state.way = verdict.way;
    }
}
