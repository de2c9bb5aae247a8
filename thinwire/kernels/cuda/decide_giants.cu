// The second step of encode_giants.cu: which candidates are sent, and where they go in the payload.

#include "search.cuh"
#include "giants.cuh"

// Chunks of a thread that are placed in one round; more would not fit the registers of two blocks on a multiprocessor.
#define PLACED_AT_ONCE 4

// So few are compared each with each, which is faster than two rounds of a histogram.
#define FEW_EDGES 256

struct Verdict {
    int way;
    int low, high;  // the keep-th magnitude is one of these patterns ...
    int above;      // ... and so many are above them
    int cut;        // of the next call
};

// So many shall reach the next call's cut. The more is sent, the less is held back, and thresholds follow the gradient's norm.
static __device__ __forceinline__ int target_of(const Row& row) {
    const i64 wanted = (row.keep > row.length / 32 ? 3 : 2) * (i64)row.keep + 64;
    const int middle = row.keep + (row.length - row.keep) / 2;
    return wanted < middle ? (int)wanted : middle;
}

// A lower cut where fewer than that reached this one; `total` > 0. By experience the number grows with the eighth power.
static __device__ __forceinline__ int lower_cut(int cut, int total, int target) {
    const float missing = (float)(target - total) / (float)total;
    return cut - (int)(fminf(missing, 2.0f) * (float)(1 << 21));
}

// The same for all blocks of a row, from the histograms of its candidates. `answer` has 4 places.
static __device__ __forceinline__ Verdict judge(
    const Row& row, const Giant& giant, const Window& window, const u32* histogram, int* words, int* answer) {
    const int bin = BINS - 1 - (int)threadIdx.x, target = target_of(row);
    int here = 0, total;
#pragma unroll 4
    for (int copy = 0; copy < giant.copies; ++copy) here += (int)histogram[copy * BINS + bin];
    const int upto = block_sum_upto(here, words, total), before = upto - here;
    if (upto >= row.keep && before < row.keep) answer[0] = bin, answer[1] = before, answer[2] = here;
    if (upto >= target && before < target) {
        // As if a bin's magnitudes were spread evenly.
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
    verdict.way = total <= giant.room ? READY : answer[1] + answer[2] <= giant.room ? AGAIN : SLOW;
    return verdict;
}

// A warp lists what reaches `low` in a chunk.
static __device__ __forceinline__ void collect_again(
    const float* memory, const Chunk chunk, int low, Giant& giant, Section& section, const Lists& lists) {
    const int lane = threadIdx.x & 31;
    const float* held = memory + chunk.memory;
    int mine = 0;
#pragma unroll 8
    for (int j = lane; j < chunk.count; j += 32) mine += magnitude(held[(i64)j * chunk.stride]) >= low;
    section.count = warp_sum(mine);
    if (lane == 0) section.start = (int)atomicAdd(&giant.relisted, (u32)section.count);
    section.start = __shfl_sync(EVERY_LANE, section.start, 0);
    int next = giant.list + section.start;
    for (int base = lane; base - lane < chunk.count; base += 32 * BATCH) {
        float c[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) c[b] = held[(i64)min(base + 32 * b, chunk.count - 1) * chunk.stride];
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
    const float* values, int count, const Verdict& verdict, int number, Giant& giant, Edge* edges) {
    const int lane = threadIdx.x & 31, room = giant.edge_room;
    edges += giant.edge;
    int above = 0;
    for (int base = lane; base - lane < count; base += 32 * LIST_BATCH) {
        int bits[LIST_BATCH];
#pragma unroll
        for (int b = 0; b < LIST_BATCH; ++b) bits[b] = magnitude(values[min(base + 32 * b, count - 1)]);
#pragma unroll
        for (int b = 0; b < LIST_BATCH; ++b) {
            const bool live = base + 32 * b < count, inside = live && bits[b] >= verdict.low && bits[b] <= verdict.high;
            above += live && bits[b] > verdict.high;
            const u32 ballot = __ballot_sync(EVERY_LANE, inside);
            if (ballot == 0) continue;
            int at = 0;
            if (lane == 0) at = (int)atomicAdd(&giant.edges, (u32)__popc(ballot));
            at = __shfl_sync(EVERY_LANE, at, 0) + lanes_before(ballot, lane);
            if (inside && at < room) edges[at] = {bits[b], number};
        }
    }
    return warp_sum(above);
}

// Sections learn how many of theirs exceed `low` and how many equal it, as the chunk's first `count(i)` of `bits_at(i, j)` say.
template <class Count, class BitsAt>
static __device__ __forceinline__ void count_all(const Giant& giant, Section* sections, int low, Count count, BitsAt bits_at) {
    const int lane = threadIdx.x & 31;
    for (int number = giant.first + (int)threadIdx.x / 32; number < giant.first + giant.chunks; number += BINS / 32) {
        const int end = count(number);
        int above = 0, tied = 0;
#pragma unroll 8
        for (int j = lane; j < end; j += 32) {
            const int bits = bits_at(number, j);
            above += bits > low;
            tied += bits == low;
        }
        above = warp_sum(above), tied = warp_sum(tied);
        if (lane == 0) sections[number].place = above, sections[number].ties = tied;
    }
}

// From how many exceed `low` and equal it in each chunk to where its entries begin and how many ties it sends, of `ties` in all.
// A thread has up to PLACED_AT_ONCE neighbours, whose loads are under way at once.
static __device__ __forceinline__ void place_sections(Section* sections, int chunks, int ties, int* words) {
    int tied_before = 0, sent_before = 0;
    for (int base = 0; base < chunks; base += PLACED_AT_ONCE * BINS) {
        const int count = min(chunks - base, PLACED_AT_ONCE * BINS), each = (count + BINS - 1) / BINS;
        const int first = base + each * (int)threadIdx.x, end = min(first + each, base + count);
        int above[PLACED_AT_ONCE], tied[PLACED_AT_ONCE], all_tied = 0, sent = 0, total;
#pragma unroll
        for (int b = 0; b < PLACED_AT_ONCE; ++b) {
            const Section& section = sections[min(first + b, chunks - 1)];
            above[b] = section.place, tied[b] = section.ties;
        }
#pragma unroll
        for (int b = 0; b < PLACED_AT_ONCE; ++b) {
            if (first + b >= end) above[b] = tied[b] = 0;
            all_tied += tied[b];
        }
        int before = tied_before + block_sum_upto(all_tied, words, total) - all_tied;
        tied_before += total;
#pragma unroll
        for (int b = 0; b < PLACED_AT_ONCE; ++b) {
            const int here = tied[b];
            tied[b] = max(0, min(here, ties - before));
            before += here;
            sent += above[b] + tied[b];
        }
        int place = sent_before + block_sum_upto(sent, words, total) - sent;
        sent_before += total;
#pragma unroll
        for (int b = 0; b < PLACED_AT_ONCE; ++b) {
            if (first + b < end) sections[first + b].place = place, sections[first + b].ties = tied[b];
            place += above[b] + tied[b];
        }
    }
}

// Whether this block is the last of its row to come here; it then sees what the others wrote.
static __device__ __forceinline__ bool is_last(Giant& giant, int* answer) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *answer = atomicAdd(&giant.done, 1u) == (u32)giant.groups - 1;
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
        // All whose rank it is are equal.
        if (more < wanted && more + same >= wanted) answer[0] = mine, answer[1] = more;
    }
    __syncthreads();
    above = answer[1];
    return answer[0];
}

// The pattern of the keep-th magnitude; sections know how many of theirs exceed and equal it, `ties` how many of these are sent.
static __device__ __forceinline__ int find_low(
    const float* memory, const Row& row, const Chunk* chunks, const Giant& giant, Section* sections, const float* values,
    const Edge* edges, const Verdict& verdict, int& ties, u32* histogram, int* words, int* answer) {
    int above, low;
    if (verdict.way == FEW) {
        ties = row.keep - verdict.above;
        return 0;
    }
    if (verdict.way == SLOW) {
        const float* held = memory + row.memory;
        low = find_pattern(
            [=](int i) { return magnitude(held[(i64)i * row.stride]); }, row.length, row.keep, above, histogram, words, answer);
        ties = row.keep - above;
        count_all(
            giant, sections, low, [=](int number) { return chunks[number].count; },
            [=](int number, int j) { return magnitude(held[(i64)(chunks[number].start + j) * row.stride]); });
        return low;
    }
    const int first = verdict.low, last = verdict.high, wanted = row.keep - verdict.above, count = (int)giant.edges;
    int span = 0;
    while ((last - first) >> span) ++span;
    if (count <= giant.edge_room) {
        edges += giant.edge;
        const auto bits_at = [=](int i) { return edges[i].bits - first; };
        if (count <= FEW_EDGES)
            low = rank_edges(edges, count, wanted, above, histogram, answer);
        else
            low = first + find_pattern(bits_at, count, wanted, above, histogram, words, answer, span);
        for (int i = threadIdx.x; i < count; i += BINS) {
            if (edges[i].bits > low) atomicAdd(reinterpret_cast<u32*>(&sections[edges[i].chunk].place), 1u);
            if (edges[i].bits == low) atomicAdd(reinterpret_cast<u32*>(&sections[edges[i].chunk].ties), 1u);
        }
    } else {
        const int listed = (int)(verdict.way == AGAIN ? giant.relisted : giant.listed);
        values += giant.list;
        const auto inside = [=](int i) {
            const int bits = magnitude(values[i]);
            return bits >= first && bits <= last ? bits - first : -1;
        };
        low = first + find_pattern(inside, listed, wanted, above, histogram, words, answer, span);
        count_all(
            giant, sections, low, [=](int number) { return sections[number].count; },
            [=](int number, int j) { return magnitude(values[sections[number].start + j]); });
    }
    ties = wanted - above;
    return low;
}

extern "C" __global__ __launch_bounds__(BINS) void giants_decide(
    const float* memory, const Row* rows, const Chunk* chunks, const Group* groups, Giant* giants, Section* sections,
    u32* histograms, float* list_values, u16* list_places, Edge* edges, const float* ratio) {
    __shared__ u32 histogram[BINS];
    __shared__ int words[32], answer[4];
    const Group group = groups[blockIdx.x];
    const Row row = rows[group.row];
    Giant& giant = giants[group.row];
    u32* counted = histograms + (i64)giant.histogram * BINS;
    const int number = group.first + (int)threadIdx.x / 32;
    const bool live = number < giant.first + giant.chunks;
    Section section = sections[live ? number : group.first];
    const Verdict verdict = judge(row, giant, window_of(giant.cut, *ratio), counted, words, answer);

    if (live && verdict.way != SLOW) {
        if (verdict.way == AGAIN)
            collect_again(memory, chunks[number], verdict.low, giant, section, {list_values, list_places});
        section.place = section.count, section.ties = 0;
        if (verdict.way == FEW)
            section.ties = chunks[number].count - section.count;
        else
            section.place = tally(list_values + giant.list + section.start, section.count, verdict, number, giant, edges);
        if ((threadIdx.x & 31) == 0) sections[number] = section;
    }
    if (!is_last(giant, answer)) return;

    int ties;
    const int low = find_low(
        memory, row, chunks, giant, sections, list_values, edges, verdict, ties, histogram, words, answer);
    __syncthreads();
    place_sections(sections + giant.first, giant.chunks, ties, words);
    for (int copy = 0; copy < giant.copies; ++copy) counted[copy * BINS + threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        giant.cut = max(1, verdict.way == SLOW ? low - (1 << 21) : min(verdict.cut, low));
        giant.listed = giant.relisted = giant.edges = giant.done = 0;
        giant.low = low, giant.way = verdict.way;
    }
}
