// The same as encode_rows for rows of any length, such as whole tensors: many blocks work on one row.
//
// A row is cut into chunks of THREADS * PER_LANE elements. Candidates are what reaches a cut that about twice as many reached in the last call
// as are sent; so many are left even if nothing is added to what stays.
//  1. collect  c = residual + gradient, or as momentum.cuh says, to memory; candidates to the row's list, chunk by chunk, and a
//              histogram of them, finest just above the cut.
//  2. decide   GROUP chunks to a block: the bin of the keep-th magnitude, how many of each chunk are above it, and the few inside
//              to a list of their own. The block that ends last for a row finds the pattern of the keep-th magnitude among these,
//              where each chunk's entries go in the payload, and the next call's cut.
//  3. send     The entries, in order, one warp to a chunk.
// The ways of a row:
//  READY       As above: memory is passed over once.
//  AGAIN       Too many candidates for the list, as in the first call. The histogram has a better cut, `decide` collects again.
//  FEW         Fewer elements than are wanted are not 0. The first zeros are sent too; `send` finds them in memory.
//  SLOW        Too few candidates, or too many that are about equal: one block searches memory for the pattern.

#include "momentum.cuh"
#include "search.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define PER_LANE 16
#define QUADS (PER_LANE / 4)
#define WARP_PART (32 * PER_LANE)
#define GROUP 32
#define SEND_WARPS 4
// Loads of a list that are under way at once.
#define LIST_BATCH 4
#if MOMENTUM
#define COLLECT_BLOCKS 3
#else
#define COLLECT_BLOCKS 4
#endif

#define SEEN_GRADIENT 1
#define SEEN_BAD 2

#define READY 0
#define AGAIN 1
#define FEW 2
#define SLOW 3

// All that `collect` has to know before it can load.
struct Chunk {
    i64 gradient;  // of its first element, in the bucket
    i64 memory;
    int row;
    int start;  // element of the row
    int count;
    int stride;
    int vector;
    int slot;
};

struct Group {
    int row;
    int first;  // chunk
};

struct Giant {
    int first;  // chunk; set by the host, as are those up to the empty line
    int chunks;
    int groups;
    int list;  // where its candidates begin ...
    int room;  // ... and how many fit
    int edge;  // the same for those in the bin of the keep-th magnitude
    int edge_room;

    int cut;  // pattern of the smallest candidate of the next call; up to 1, everything that is not 0
    u32 listed;
    u32 relisted;  // when collecting again
    u32 edges;
    u32 done;  // groups
    int low;   // pattern of the keep-th magnitude
    int way;
};

struct Section {
    int start;  // of the chunk's candidates in the row's list
    int count;
    int place;  // of the first it sends; before that, how many exceed `low`
    int ties;   // how many that equal `low` it sends; before that, how many it has
};

struct Edge {
    int bits;
    int chunk;
};

struct Lists {
    float* values;
    u16* places;  // in the chunk
};

// -- the histogram ----------------------------------------------------------------------------------------------------

#define FINE_BINS 768
#define FINE_SHIFT 13
#define COARSE_SHIFT 20
// 2^-100: 1024 bins of an eighth of an octave from here.
#define COLD_ORIGIN (27 << 23)

// Bins of 1/1024 octave from the cut on, so that few magnitudes are in one, then of 1/8 for what has grown suddenly.
struct Window {
    int cut, origin, fine;

    __device__ __forceinline__ int bin(int bits) const {
        const int past = max(bits - origin, 0), beyond = past - (fine << FINE_SHIFT);
        return beyond < 0 ? past >> FINE_SHIFT : min(fine + (beyond >> COARSE_SHIFT), BINS - 1);
    }

    // Unsigned, because the last bins may begin behind the last pattern.
    __device__ __forceinline__ u32 low(int bin) const {
        if (bin == 0) return (u32)cut;
        return (u32)origin + ((u32)min(bin, fine) << FINE_SHIFT) + ((u32)max(bin - fine, 0) << COARSE_SHIFT);
    }

    __device__ __forceinline__ int high(int bin) const {
        const u32 next = bin < BINS - 1 ? low(bin + 1) : 0x80000000u;
        return (int)(next < 0x80000000u ? next - 1 : 0x7fffffffu);
    }
};

// A new scale of the gradients moves the cut too.
static __device__ __forceinline__ Window window_of(int cut, float scale) {
    if (cut > 1) cut = magnitude(__fmul_rn(__int_as_float(cut), scale));
    if (cut <= 1) return {1, COLD_ORIGIN, 0};
    return {cut, cut, FINE_BINS};
}

// -- collect ----------------------------------------------------------------------------------------------------------

// Where a lane's e-th element is in the warp's part.
template <bool VECTOR>
static __device__ __forceinline__ int place_of(int e, int lane) {
    return VECTOR ? 128 * (e / 4) + 4 * lane + e % 4 : 32 * e + lane;
}

// A lane's elements of a warp's part, which has `left` elements or more; of a bucket and a memory from `gradient` and `place` on.
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

// One bit per element of the lane that reaches the cut.
template <bool VECTOR>
static __device__ __forceinline__ u32 find_candidates(const float* c, int left, int cut) {
    const int lane = threadIdx.x & 31;
    u32 mask = 0;
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e)
        if (magnitude(c[e]) >= cut && place_of<VECTOR>(e, lane) < left) mask |= 1u << e;
    return mask;
}

// The candidates of a warp's part, which begins at `part` in its chunk, to the list from `next` on, in order.
template <bool VECTOR>
static __device__ __forceinline__ void append(const float* c, u32 mask, int part, int next, const Lists& lists) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        u32 ballots[4];
        int at = next;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            ballots[q] = __ballot_sync(EVERY_LANE, (mask >> (4 * i + q)) & 1);
            // Four neighbours are one lane's.
            if (VECTOR) at += lanes_before(ballots[q], lane);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int e = 4 * i + q, mine = VECTOR ? at : next + lanes_before(ballots[q], lane);
            if ((mask >> e) & 1) {
                lists.values[mine] = c[e];
                lists.places[mine] = (u16)(part + place_of<VECTOR>(e, lane));
                ++at;
            }
            next += __popc(ballots[q]);
        }
    }
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

struct CollectShared {
    u32 histogram[BINS];
    int counts[WARPS], seen[WARPS], begin;
};

template <bool VECTOR>
static __device__ __forceinline__ void collect_chunk(
    const Gradient* bucket, float* memory, u8* payload, const Chunk& chunk, Giant& giant, Section& section, u32* histogram,
    const Lists& lists, float scale, const Momentum& correction, CollectShared& shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, part = warp * WARP_PART, left = chunk.count - part;
    const Window window = window_of(giant.cut, scale);
#pragma unroll
    for (int i = 0; i < BINS / THREADS; ++i) shared.histogram[i * THREADS + threadIdx.x] = 0;
    float c[PER_LANE];
    u32 mask = 0;
    bool had = false, bad = false;
    if (left > 0) {
        const i64 at = (i64)part * chunk.stride;
        compensate_part<VECTOR>(
            bucket + chunk.gradient + at, memory, chunk.memory + at, chunk.stride, left, scale, correction, c, had, bad);
        mask = find_candidates<VECTOR>(c, left, window.cut);
    }
    const int mine = warp_sum(__popc(mask));
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if (lane == 0) {
        shared.counts[warp] = mine;
        shared.seen[warp] = (any_had ? SEEN_GRADIENT : 0) | (any_bad ? SEEN_BAD : 0);
    }
    __syncthreads();
    // Two that wait for memory; meanwhile the others count.
    if (threadIdx.x == 0) shared.begin = allot(giant, section, shared.counts);
    if (threadIdx.x == 32) report(shared.seen, chunk.slot, payload);
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e)
        if ((mask >> e) & 1) atomicAdd(&shared.histogram[window.bin(magnitude(c[e]))], 1u);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BINS / THREADS; ++i) {
        const u32 here = shared.histogram[i * THREADS + threadIdx.x];
        if (here) atomicAdd(&histogram[i * THREADS + threadIdx.x], here);
    }
    if (shared.begin < 0 || mine == 0) return;
    int next = shared.begin;
    for (int w = 0; w < warp; ++w) next += shared.counts[w];
    append<VECTOR>(c, mask, part, next, lists);
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
    u32* histogram = histograms + (i64)chunk.row * BINS;
    const Lists lists = {list_values, list_places};
    if (chunk.vector)
        collect_chunk<true>(bucket, memory, payload, chunk, giant, section, histogram, lists, scale, correction, shared);
    else
        collect_chunk<false>(bucket, memory, payload, chunk, giant, section, histogram, lists, scale, correction, shared);
}

// -- decide -----------------------------------------------------------------------------------------------------------

struct Verdict {
    int way;
    int low, high;  // the keep-th magnitude is one of these patterns ...
    int above;      // ... and so many are above them
    int cut;        // of the next call
};

// So many shall reach the next call's cut.
static __device__ __forceinline__ int target_of(const Row& row) {
    const i64 twice = 2 * (i64)row.keep + 64;
    const int middle = row.keep + (row.length - row.keep) / 2;
    return twice < middle ? (int)twice : middle;
}

// A lower cut where fewer than that reached this one; `total` > 0. By experience the number grows with the eighth power.
static __device__ __forceinline__ int lower_cut(int cut, int total, int target) {
    const float missing = (float)(target - total) / (float)total;
    return cut - (int)(fminf(missing, 2.0f) * (float)(1 << 21));
}

// The same for all blocks of a row, from the histogram of its candidates. `answer` has 4 places.
static __device__ __forceinline__ Verdict judge(
    const Row& row, const Giant& giant, const Window& window, const u32* histogram, int* words, int* answer) {
    const int bin = BINS - 1 - (int)threadIdx.x, here = (int)histogram[bin], target = target_of(row);
    int total;
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
static __device__ __forceinline__ void place_sections(Section* sections, int chunks, int ties, int* words) {
    const int each = (chunks + BINS - 1) / BINS, first = min(each * (int)threadIdx.x, chunks), end = min(first + each, chunks);
    int tied = 0, sent = 0, total;
    for (int i = first; i < end; ++i) tied += sections[i].ties;
    int before = block_sum_upto(tied, words, total) - tied;
    for (int i = first; i < end; ++i) {
        const int here = sections[i].ties, allowed = max(0, min(here, ties - before));
        before += here;
        sections[i].ties = allowed;
        sent += sections[i].place + allowed;
    }
    int place = block_sum_upto(sent, words, total) - sent;
    for (int i = first; i < end; ++i) {
        const int here = sections[i].place + sections[i].ties;
        sections[i].place = place;
        place += here;
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
        low = first + find_pattern([=](int i) { return edges[i].bits - first; }, count, wanted, above, histogram, words, answer, span);
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
    u32* counted = histograms + (i64)group.row * BINS;
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
    counted[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        giant.cut = max(1, verdict.way == SLOW ? low - (1 << 21) : min(verdict.cut, low));
        giant.listed = giant.relisted = giant.edges = giant.done = 0;
        giant.low = low, giant.way = verdict.way;
    }
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
