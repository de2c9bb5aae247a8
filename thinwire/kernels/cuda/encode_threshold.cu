// Whole tensors of which everything at or above a threshold is sent: one pass over memory for all slots of a group.
//
// Slots are cut into chunks. The entries sent are the `wanted` largest of a slot, where wanted is the number that reach its
// threshold, cut to its places (`keep`); if fewer than `fewest` reach it, wanted is `target`. A slot that selects exactly has
// fewest = target = keep and searches among what reaches a little less than its last threshold; what it finds is the next.
//  1. collect    c = residual + gradient, written to memory; what reaches the threshold goes to the slot's list, chunk by chunk.
//  2. decide     Per slot: how many are wanted, the smallest of them, where each chunk's entries go in the payload; header words.
//  3. send       The entries, in order.
// A slot whose list has too few or too many goes round again between 2 and 3; without one these kernels look at a flag:
//  a. recount    A histogram of the slot's magnitudes.
//  b. rebound    A threshold that as many reach as are wanted, and few more.
//  c. recollect  As 1, from memory.
//  d. decide     As 2. A slot that still has too many (most of its elements are equal) is done here, by one block.
// Reference: ThresholdSession.pick_slot in thinwire/select/threshold.py.

#include "search.cuh"

#define THREADS 256
#define PER_LANE 32
#define WARP_PART (32 * PER_LANE)
#define CHUNK (WARP_PART * (THREADS / 32))
#define WARP_CHUNKS 4
// Of the last threshold; the list of a slot that selects exactly has all above it.
#define GUESS 0.9f

struct Aim {
    Row row;
    int fewest;
    int target;
    int exact;
    int unused;
};

struct Chunk {
    int slot;
    int start;
};

#define READY 0
#define AGAIN 1
#define SLOW 2

struct Slot {
    int first;  // chunk; set by the host, as are the three below
    int chunks;
    int list;    // where its candidates begin
    int room;    // how many fit
    u32 listed;  // candidates, also those that did not fit
    int state;
    int wanted;
    int low;    // pattern of the smallest that is sent; while going round again, of the threshold
    int every;  // whether all candidates are sent
    int unused;
};

struct Section {
    int start;  // of the chunk's candidates in the slot's list
    int count;
    int place;  // of the first it sends; before that, how many exceed `low`
    int ties;   // how many that equal `low` it sends; before that, how many it has
};

static __device__ __forceinline__ int* slot_words(u8* payload, int slot) {
    return reinterpret_cast<int*>(payload) + HEADER_FIXED + slot * (HEADER_SLOT + NOTE_WORDS);
}

static __device__ __forceinline__ void flag_bad(u8* payload) { raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS); }

// -- candidates -------------------------------------------------------------------------------------------------------

#define QUADS (PER_LANE / 4)
#define QUADS_AT_ONCE 4

// A lane's elements, c[4 i + q] = element 128 i + 4 lane + q of the warp's part; what is behind the end is 0.
static __device__ __forceinline__ void compensate_part(
    const Gradient* gradient, float* held, int left, bool vector, float scale, float* c, bool& had, bool& bad) {
    const int lane = threadIdx.x & 31;
    if (vector && left >= WARP_PART) {
#pragma unroll
        for (int base = 0; base < QUADS; base += QUADS_AT_ONCE) {
            float4 old[QUADS_AT_ONCE];
            Quad fresh[QUADS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < QUADS_AT_ONCE; ++i) {
                const int j = 128 * (base + i) + 4 * lane;
                old[i] = *reinterpret_cast<const float4*>(held + j);
                fresh[i] = *reinterpret_cast<const Quad*>(gradient + j);
            }
#pragma unroll
            for (int i = 0; i < QUADS_AT_ONCE; ++i) {
                float4 now = old[i];
                now.x = compensate(fresh[i].x, now.x, scale, had, bad), now.y = compensate(fresh[i].y, now.y, scale, had, bad);
                now.z = compensate(fresh[i].z, now.z, scale, had, bad), now.w = compensate(fresh[i].w, now.w, scale, had, bad);
                *reinterpret_cast<float4*>(held + 128 * (base + i) + 4 * lane) = now;
                float* mine = c + 4 * (base + i);
                mine[0] = now.x, mine[1] = now.y, mine[2] = now.z, mine[3] = now.w;
            }
        }
        return;
    }
#pragma unroll
    for (int base = 0; base < PER_LANE; base += BATCH) {
        Gradient fresh[BATCH];
#pragma unroll
        for (int e = base; e < base + BATCH; ++e) {
            const int j = 128 * (e / 4) + 4 * lane + e % 4;
            fresh[e - base] = j < left ? gradient[j] : 0;
            c[e] = j < left ? held[j] : 0.0f;
        }
#pragma unroll
        for (int e = base; e < base + BATCH; ++e) {
            const int j = 128 * (e / 4) + 4 * lane + e % 4;
            c[e] = compensate(fresh[e - base], c[e], scale, had, bad);
            if (j < left) held[j] = c[e];
        }
    }
}

static __device__ __forceinline__ void read_part(const float* held, int left, float* c) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) {
        const int j = 128 * (e / 4) + 4 * lane + e % 4;
        c[e] = j < left ? held[j] : 0.0f;
    }
}

// Append what reaches `guess` to the slot's list, in order within the chunk; `words` has THREADS / 32 + 1 places.
static __device__ __forceinline__ void append(
    const float* c, int part, int left, float guess, Slot& slot, Section& section, int* list_bits, int* list_index, int* words) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    u32 mask = 0;
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e)
        // Nothing behind the end is a candidate, be the threshold 0.
        if (fabsf(c[e]) >= guess && 128 * (e / 4) + 4 * lane + e % 4 < left) mask |= 1u << e;
    const int mine = warp_sum(__popc(mask));
    if (lane == 0) words[warp] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        int total = 0;
        for (int w = 0; w < THREADS / 32; ++w) total += words[w];
        section.start = (int)atomicAdd(&slot.listed, (u32)total);
        section.count = total;
        words[THREADS / 32] = section.start + total <= slot.room ? slot.list + section.start : -1;
    }
    __syncthreads();
    int next = words[THREADS / 32];
    if (next < 0) return;
    for (int w = 0; w < warp; ++w) next += words[w];
    const u32 below = (1u << lane) - 1;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const u32 four = mask >> (4 * i);
        int at = next;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const u32 ballot = __ballot_sync(EVERY_LANE, (four >> q) & 1);
            at += __popc(ballot & below);
            next += __popc(ballot);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q)
            if ((four >> q) & 1) {
                list_bits[at] = magnitude(c[4 * i + q]);
                list_index[at++] = part + 128 * i + 4 * lane + q;
            }
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void collect(
    const Gradient* bucket, float* memory, u8* payload, const Aim* aims, const Chunk* chunks, const float* thresholds,
    const float* ratio, Slot* slots, Section* sections, int* list_bits, int* list_index) {
    __shared__ int words[THREADS / 32 + 1];
    const Chunk chunk = chunks[blockIdx.x];
    const Aim& aim = aims[chunk.slot];
    const Row row = aim.row;
    const float last = thresholds[chunk.slot];
    const float guess = aim.exact ? __fmul_rn(GUESS, last) : last;
    const int part = chunk.start + (threadIdx.x / 32) * WARP_PART, left = row.length - part;
    float c[PER_LANE];
    bool had = false, bad = false;
    compensate_part(bucket + row.gradient + part, memory + row.memory + part, left, row.vector, *ratio, c, had, bad);
    append(c, part, left, guess, slots[chunk.slot], sections[blockIdx.x], list_bits, list_index, words);
    if (had) raise(slot_words(payload, chunk.slot) + HEADER_HAD);
    if (bad) flag_bad(payload);
}

extern "C" __global__ void recount(
    const float* memory, const Aim* aims, const Chunk* chunks, const Slot* slots, u32* histograms, const int* flag, int count) {
    if (*flag == 0) return;
    __shared__ u32 histogram[BINS];
    for (int number = blockIdx.x; number < count; number += gridDim.x) {
        const Chunk chunk = chunks[number];
        if (slots[chunk.slot].state != AGAIN) continue;
        const float* held = memory + aims[chunk.slot].row.memory + chunk.start;
        const int left = min(aims[chunk.slot].row.length - chunk.start, CHUNK);
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0;
        __syncthreads();
        for (int j = threadIdx.x; j < left; j += THREADS) atomicAdd(&histogram[magnitude(held[j]) >> COLD_SHIFT], 1u);
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
            if (histogram[bin]) atomicAdd(&histograms[chunk.slot * BINS + bin], histogram[bin]);
        __syncthreads();
    }
}

extern "C" __global__ __launch_bounds__(BINS) void rebound(Slot* slots, const u32* histograms, const int* flag) {
    if (*flag == 0) return;
    __shared__ int words[32], answer[3];
    Slot& slot = slots[blockIdx.x];
    if (slot.state != AGAIN) return;
    int found, above, inside;
    find_bin((int)histograms[blockIdx.x * BINS + BINS - 1 - threadIdx.x], slot.wanted, found, above, inside, words, answer);
    if (threadIdx.x == 0) {
        slot.low = found << COLD_SHIFT;
        if (above + inside > slot.room) slot.state = SLOW;
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void recollect(
    const float* memory, const Aim* aims, const Chunk* chunks, Slot* slots, Section* sections, int* list_bits, int* list_index,
    const int* flag, int count) {
    if (*flag == 0) return;
    __shared__ int words[THREADS / 32 + 1];
    for (int number = blockIdx.x; number < count; number += gridDim.x) {
        const Chunk chunk = chunks[number];
        Slot& slot = slots[chunk.slot];
        if (slot.state != AGAIN) continue;
        const Row& row = aims[chunk.slot].row;
        const int part = chunk.start + (threadIdx.x / 32) * WARP_PART, left = row.length - part;
        float c[PER_LANE];
        read_part(memory + row.memory + part, left, c);
        append(c, part, left, __int_as_float(slot.low), slot, sections[number], list_bits, list_index, words);
        __syncthreads();
    }
}

// -- decisions --------------------------------------------------------------------------------------------------------

// Where each chunk's entries go. `ties` of those that equal `low` are wanted.
static __device__ __forceinline__ void place_sections(
    const Slot& slot, Section* sections, const int* bits, bool every, int low, int ties, int* words) {
    if (!every) {
        const int lane = threadIdx.x & 31;
        for (int number = threadIdx.x / 32; number < slot.chunks; number += BINS / 32) {
            Section& section = sections[slot.first + number];
            int above = 0, tied = 0;
            for (int i = lane; i < section.count; i += 32) {
                above += bits[section.start + i] > low;
                tied += bits[section.start + i] == low;
            }
            above = warp_sum(above), tied = warp_sum(tied);
            if (lane == 0) section.place = above, section.ties = tied;
        }
        __syncthreads();
    }
    int places = 0, taken = 0, total;
    for (int base = 0; base < slot.chunks; base += BINS) {
        const bool live = base + (int)threadIdx.x < slot.chunks;
        Section& section = sections[slot.first + (live ? base + (int)threadIdx.x : 0)];
        const int above = !live ? 0 : every ? section.count : section.place;
        const int tied = live && !every ? section.ties : 0;
        const int before = taken + block_sum_upto(tied, words, total) - tied;
        taken += total;
        const int allowed = max(0, min(tied, ties - before));
        const int place = places + block_sum_upto(above + allowed, words, total) - above - allowed;
        places += total;
        if (live) section.place = place, section.ties = allowed;
    }
}

// A slot without a list: everything from memory, in order, by one block.
static __device__ __forceinline__ void send_slowly(float* held, u8* payload, const Row& row, int wanted, int low, int ties, int* words) {
    int place = 0, total;
    float sent;
    bool bad = false;
    for (int base = 0; base < row.length && place < wanted; base += BINS) {
        const int j = base + (int)threadIdx.x;
        const float c = j < row.length ? held[j] : 0.0f;
        const int bits = j < row.length ? magnitude(c) : -1, tie = bits == low;
        const int before = block_sum_upto(tie, words, total) - tie;
        const int take = bits > low || (tie && before < ties);
        ties -= min(ties, total);
        const int upto = block_sum_upto(take, words, total);
        if (take) held[j] = send(c, j, place + upto - 1, row, payload, sent, bad);
        place += total;
    }
    if (bad) flag_bad(payload);
}

// Header words of a slot; a slot that selects exactly remembers its smallest entry as the threshold of the turns to come.
static __device__ __forceinline__ void note(u8* payload, const Aim& aim, int slot, int wanted, int low, float* thresholds, float tolerance) {
    int* words = slot_words(payload, slot);
    words[0] = wanted;
    const float old = thresholds[slot], found = aim.exact ? __int_as_float(low) : old;
    if (aim.exact) thresholds[slot] = found;
#if NOTE_WORDS
    float drift = -1.0f;
    if (aim.exact) {
        const float moved = fabsf(__fsub_rn(old, found));
        // A threshold that is not a number is none: this is the first.
        drift = old != old || moved == 0.0f ? 0.0f : moved / __fmul_rn(tolerance, old);
    }
    words[HEADER_SLOT] = __float_as_int(found);
    words[HEADER_SLOT + 1] = __float_as_int(drift);
#endif
}

extern "C" __global__ __launch_bounds__(BINS) void decide(
    float* memory, u8* payload, const Aim* aims, const int* header, Slot* slots, Section* sections, const int* list_bits,
    u32* histograms, float* thresholds, const float* tolerance, int* flag, int again) {
    __shared__ u32 histogram[BINS];
    __shared__ int words[32], answer[3];
    Slot& slot = slots[blockIdx.x];
    const Aim& aim = aims[blockIdx.x];
    if (again && slot.state == READY) return;
    if (!again && blockIdx.x == 0 && threadIdx.x < HEADER_FIXED && threadIdx.x != HEADER_FLAGS)
        reinterpret_cast<int*>(payload)[threadIdx.x] = header[threadIdx.x];
    const int listed = (int)slot.listed;
    int wanted = listed < aim.fewest ? aim.target : min(listed, aim.row.keep);
    if (again) wanted = slot.wanted;
    const bool slowly = again && slot.state == SLOW;
    __syncthreads();
    if (threadIdx.x == 0) slot.listed = 0;
    if (!again && (listed < wanted || listed > slot.room)) {
        histograms[blockIdx.x * BINS + threadIdx.x] = 0;
        if (threadIdx.x == 0) {
            slot.state = AGAIN, slot.wanted = wanted;
            raise(flag);
        }
        return;
    }
    const bool every = !slowly && !aim.exact && wanted == listed;
    const int* bits = list_bits + slot.list;
    float* held = memory + aim.row.memory;
    int low = 0, above = 0;
    if (slowly)
        low = find_pattern([=](int i) { return magnitude(held[i]); }, aim.row.length, wanted, above, histogram, words, answer);
    else if (!every)
        low = find_pattern([=](int i) { return bits[i]; }, listed, wanted, above, histogram, words, answer);
    if (slowly)
        send_slowly(held, payload, aim.row, wanted, low, wanted - above, words);
    else
        place_sections(slot, sections, bits, every, low, wanted - above, words);
    if (threadIdx.x == 0) {
        slot.state = slowly ? SLOW : READY;
        slot.low = low, slot.every = every;
        note(payload, aim, blockIdx.x, wanted, low, thresholds, *tolerance);
    }
}

// One warp per chunk.
extern "C" __global__ void send_lists(
    float* memory, u8* payload, const Aim* aims, const Chunk* chunks, const Slot* slots, const Section* sections,
    const int* list_bits, const int* list_index, int* flag, int count) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *flag = 0;
    const int number = blockIdx.x * WARP_CHUNKS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (number >= count) return;
    const Slot& slot = slots[chunks[number].slot];
    if (slot.state == SLOW) return;
    const Row row = aims[chunks[number].slot].row;
    const Section section = sections[number];
    const int* all_bits = list_bits + slot.list + section.start;
    const int* all_index = list_index + slot.list + section.start;
    int place = section.place, allowed = section.ties;
    float sent;
    bool bad = false;
    for (int base = 0; base < section.count; base += 32) {
        const int i = base + lane;
        const int bits = i < section.count ? all_bits[i] : -1;
        const bool tie = !slot.every && bits == slot.low;
        const u32 ties = __ballot_sync(EVERY_LANE, tie);
        const bool take = slot.every ? bits >= 0 : bits > slot.low || (tie && lanes_before(ties, lane) < allowed);
        const u32 taken = __ballot_sync(EVERY_LANE, take);
        if (take) {
            const int index = all_index[i];
            float* at = memory + row.memory + index;
            *at = send(*at, index, place + lanes_before(taken, lane), row, payload, sent, bad);
        }
        place += __popc(taken);
        allowed -= min(allowed, __popc(ties));
    }
    if (bad) flag_bad(payload);
}
