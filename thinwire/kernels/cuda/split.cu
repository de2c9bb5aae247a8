// Split-and-reduce of one group: entries to their owners, the owner's sums, and the winners. Reference: thinwire/exchange/split.py.
//
//  1. count   How many of each CHUNK of picked entries go to each owner.
//  2. place   The entries to the messages, in order, and what is left of them to memory. Only a box that overflows has a block that
//             looks for its largest.
//  (all to all)
//  3. sum     A block has RANGE indices of this rank's region, and the sums in shared memory. Indices rise in every message, so that it
//             finds its part of each. What arrived goes to the slot's list, by rising index.
//  4. decide  The smallest sum of each slot that is sent, and where those of each range go.
//  5. emit    The message of sums.
//  (all gather)
//  6. choose  The smallest sum of each slot that wins. Meanwhile other blocks clear the bucket.
//  7. finish  Winners to the bucket; what was sent and did not win to memory.
// undo takes a step back. That is rare: usually it looks at a flag and returns.

#include "split.cuh"
#include "clear.cuh"

static_assert(CHUNK == BINS, "a thread has an entry");
#define CHUNK_WARPS (BINS / 32)
#define RANGE_WARPS (RANGE_THREADS / 32)
#define LANE_INDICES (RANGE / RANGE_THREADS)
static_assert(32 % LANE_INDICES == 0, "the indices of a thread are in one word");

// What the picking kernels left: exact values, and indices inside rows.
struct Picked {
    const u8* payload;
    const float* values;
    const int* indices;
    const int *bases, *strides;
    const Spot* spots;

    // The owner of an entry, -1 if it is zero on the wire; where it lies and what it is.
    __device__ __forceinline__ int locate(
        const SplitSlot& slot, int entry, int& position, int& index, float& value, Value& code) const {
        value = values[entry];
        position = bases[entry] + indices[entry] * strides[entry];
        const int inside = position - slot.begin;
        const Spot spot = spots[slot.block + (inside >> slot.shift)];
        index = spot.first + (inside & ((1 << slot.shift) - 1));
        code = round_to_wire(value);
        return from_wire(code) != 0.0f ? spot.owner : -1;
    }

    // What stays in memory. A sum that overflowed came as the largest number, and a flag is up: nothing of it stays.
    __device__ __forceinline__ float left(float value, float sent) const {
        const bool bad = reinterpret_cast<const int*>(payload)[HEADER_FLAGS] != 0;
        return bad && fabsf(value) >= 3.4028234663852886e38f ? 0.0f : __fsub_rn(value, sent);
    }
};

#define PICKED_PARAMETERS const u8 *payload, int values_at, int indices_at, const int *bases, const int *strides, const Spot *spots
#define PICKED \
    {payload, reinterpret_cast<const float*>(payload + values_at), reinterpret_cast<const int*>(payload + indices_at), bases, strides, spots}

// The lanes that have the same owner as this one; none if that is -1.
static __device__ __forceinline__ u32 same_owner(int owner) {
    u32 mine = 0, left = __ballot_sync(EVERY_LANE, owner >= 0);
    while (left) {
        const int other = __shfl_sync(EVERY_LANE, owner, __ffs(left) - 1);
        const u32 all = __ballot_sync(EVERY_LANE, owner == other);
        if (owner == other) mine = all;
        left &= ~all;
    }
    return mine;
}

// -- to the owners -----------------------------------------------------------------------------------------------------

// counts: by chunk and owner; one column more tells whether a value is not finite.
extern "C" __global__ __launch_bounds__(BINS) void split_count(
    PICKED_PARAMETERS, const SplitSlot* slots, const PickChunk* chunks, int* counts, int world) {
    __shared__ u32 tally[MOST_OWNERS + 1];
    const Picked picked = PICKED;
    const PickChunk chunk = chunks[blockIdx.x];
    const SplitSlot slot = slots[chunk.slot];
    for (int o = threadIdx.x; o <= world; o += BINS) tally[o] = 0;
    __syncthreads();
    int owner = -1, position, index;
    float value = 0.0f;
    Value code;
    if ((int)threadIdx.x < chunk.count) owner = picked.locate(slot, chunk.entry + (int)threadIdx.x, position, index, value, code);
    const u32 mine = same_owner(owner);
    if (owner >= 0 && lanes_before(mine, threadIdx.x & 31) == 0) atomicAdd(&tally[owner], (u32)__popc(mine));
    if (!is_finite(value)) tally[world] = 1;
    __syncthreads();
    for (int o = threadIdx.x; o <= world; o += BINS) counts[blockIdx.x * (world + 1) + o] = (int)tally[o];
}

// Of all chunks of a slot, and of those before one; a warp comes together.
static __device__ __forceinline__ int count_box(const SplitSlot& slot, const int* counts, int world, int owner, int chunk, int& before) {
    int total = 0, earlier = 0;
    for (int c = threadIdx.x & 31; c < slot.chunks; c += 32) {
        const int here = counts[(slot.chunk + c) * (world + 1) + owner];
        total += here;
        earlier += slot.chunk + c < chunk ? here : 0;
    }
    before = warp_sum(earlier);
    return warp_sum(total);
}

struct PlaceShared {
    int before[MOST_OWNERS], total[MOST_OWNERS];
    int by_warp[CHUNK_WARPS][MOST_OWNERS];
};

static __device__ __forceinline__ void place_chunk(
    const Picked& picked, const SplitSlot* slots, const PickChunk& chunk, int number, const int* counts, float* memory, u8* offer,
    const SplitForm& form, PlaceShared& shared) {
    const SplitSlot slot = slots[chunk.slot];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    for (int o = warp; o < form.world; o += CHUNK_WARPS) {
        int before;
        const int total = count_box(slot, counts, form.world, o, number, before);
        if (lane == 0) shared.before[o] = before, shared.total[o] = total;
    }
    for (int i = threadIdx.x; i < CHUNK_WARPS * form.world; i += BINS) shared.by_warp[i / form.world][i % form.world] = 0;
    __syncthreads();
    int owner = -1, position = 0, index = 0;
    float value = 0.0f;
    Value code = 0;
    const bool live = (int)threadIdx.x < chunk.count;
    if (live) owner = picked.locate(slot, chunk.entry + (int)threadIdx.x, position, index, value, code);
    const u32 mine = same_owner(owner);
    const int turn = lanes_before(mine, lane);
    if (owner >= 0 && turn == 0) shared.by_warp[warp][owner] = __popc(mine);
    __syncthreads();
    for (int o = threadIdx.x; o < form.world; o += BINS) {
        int sum = shared.before[o];
        for (int w = 0; w < CHUNK_WARPS; ++w) {
            const int here = shared.by_warp[w][o];
            shared.by_warp[w][o] = sum;
            sum += here;
        }
    }
    __syncthreads();
    if (!live) return;
    float sent = 0.0f;
    if (owner >= 0) {
        // Another block has this box.
        if (shared.total[owner] > slot.room) return;
        put(offer + (i64)owner * form.row + form.head, form.total, slot.start + shared.by_warp[warp][owner] + turn, index, code);
        sent = from_wire(code);
    }
    memory[position] = picked.left(value, sent);
}

// Empty places of a box; if it overflows, all its entries.
static __device__ __forceinline__ void place_box(
    const Picked& picked, const SplitSlot* slots, int box, const int* counts, int* guesses, float* memory, u8* offer,
    const SplitForm& form, DecideShared& shared) {
    const int owner = box / form.slots;
    const SplitSlot slot = slots[box % form.slots];
    int before, total;
    u8* entries = offer + (i64)owner * form.row + form.head;
    total = count_box(slot, counts, form.world, owner, 0, before);
    if (total <= slot.room) {
        for (int p = total + (int)threadIdx.x; p < slot.room; p += BINS) put(entries, form.total, slot.start + p, NO_ENTRY, 0);
        return;
    }
    Deciders group = shared.group();
    int position, index;
    float value;
    Value code;
    const auto bits_at = [&](int i) {
        int at, where;
        float x;
        Value wire;
        return picked.locate(slot, slot.entry + i, at, where, x, wire) == owner ? magnitude(from_wire(wire)) : -1;
    };
    const Cut cut = find_cut(bits_at, slot.keep, slot.room, guesses + box, group, shared);
    int next = 0;
    for (int base = 0; base < slot.keep; base += BINS) {
        const int i = base + (int)threadIdx.x;
        const bool here = i < slot.keep && picked.locate(slot, slot.entry + i, position, index, value, code) == owner;
        const bool taken = here && cut.takes(magnitude(from_wire(code)), i);
        const u32 all = __ballot_sync(EVERY_LANE, taken);
        int together;
        const int place = next + group.before(__popc(all), together) + lanes_before(all, threadIdx.x & 31);
        next += together;
        if (taken) put(entries, form.total, slot.start + place, index, code);
        if (here) memory[position] = picked.left(value, taken ? from_wire(code) : 0.0f);
    }
}

// Flags, and what is counted: stats[0] bytes of empty places, as float; [2] 0; from [3] on the entries sent of each slot.
static __device__ __forceinline__ void write_head(
    const u8* payload, const SplitSlot* slots, const int* counts, u8* offer, int* stats, u8* status, int* damaged,
    const SplitForm& form, int chunks, float empty_bytes, DecideShared& shared) {
    const int lane = threadIdx.x & 31;
    Deciders group = shared.group();
    int wrong = reinterpret_cast<const int*>(payload)[HEADER_FLAGS] != 0;
    for (int c = threadIdx.x; c < chunks; c += BINS) wrong |= counts[c * (form.world + 1) + form.world];
    wrong = group.largest(warp_max(wrong));
    for (int i = threadIdx.x; i < form.head; i += BINS) {
        const int flag = i == 0 ? wrong : i <= form.slots ? slot_words(payload, i - 1)[HEADER_HAD] != 0 : 0;
        for (int to = 0; to < form.world; ++to) offer[(i64)to * form.row + i] = (u8)flag;
    }
    for (int i = form.head + (4 + (int)sizeof(Value)) * form.total + (int)threadIdx.x; i < form.row; i += BINS)
        for (int to = 0; to < form.world; ++to) offer[(i64)to * form.row + i] = 0;
    int empty = 0;
    for (int s = threadIdx.x / 32; s < form.slots; s += CHUNK_WARPS) {
        const SplitSlot slot = slots[s];
        int sent = 0;
        for (int o = 0; o < form.world; ++o) {
            int before;
            const int here = min(count_box(slot, counts, form.world, o, 0, before), slot.room);
            sent += here;
            empty += o == form.rank ? 0 : slot.room - here;
        }
        if (lane == 0) stats[3 + s] = sent;
    }
    empty = group.sum(empty);
    if (threadIdx.x != 0) return;
    stats[0] = __float_as_int((float)empty * empty_bytes);
    stats[2] = 0;
    status[0] = 0;
    *damaged = 0;
}

extern "C" __global__ __launch_bounds__(BINS) void split_place(
    PICKED_PARAMETERS, const SplitSlot* slots, const PickChunk* chunks, const int* counts, int* guesses, float* memory, u8* offer,
    int* stats, u8* status, int* damaged, IN_PLACE SplitForm form, int count, float empty_bytes) {
    __shared__ union {
        PlaceShared place;
        DecideShared decide;
    } shared;
    const Picked picked = PICKED;
    const int block = blockIdx.x, boxes = form.world * form.slots;
    if (block < count)
        place_chunk(picked, slots, chunks[block], block, counts, memory, offer, form, shared.place);
    else if (block < count + boxes)
        place_box(picked, slots, block - count, counts, guesses, memory, offer, form, shared.decide);
    else
        write_head(payload, slots, counts, offer, stats, status, damaged, form, count, empty_bytes, shared.decide);
}

// -- the owner ---------------------------------------------------------------------------------------------------------

// The last block has no range: it says which slots were used and whether something was wrong.
extern "C" __global__ __launch_bounds__(RANGE_THREADS) void split_sum(
    const u8* arrived, int stride, const SplitSlot* slots, const SumRange* ranges, RangeState* states, int* list_indices,
    float* list_sums, u8* used, u8* status, int* damaged, IN_PLACE SplitForm form, int count) {
    __shared__ float sums[RANGE];
    __shared__ u32 seen[RANGE / 32];
    __shared__ int low[MOST_OWNERS], high[MOST_OWNERS];
    __shared__ int words[2 * RANGE_WARPS];
    if ((int)blockIdx.x == count) {
        for (int i = threadIdx.x; i <= form.slots; i += RANGE_THREADS) {
            bool any = false;
            for (int from = 0; from < form.world; ++from) any |= arrived[(i64)from * stride + i] != 0;
            if (i) used[i - 1] = any;
            else if (any) raise(status);
        }
        return;
    }
    const SumRange range = ranges[blockIdx.x];
    const SplitSlot slot = slots[range.slot];
    const u8* entries = arrived + form.head;
    for (int i = threadIdx.x; i < 2 * form.world; i += RANGE_THREADS) {
        const int* indices = indices_of(entries + (i64)(i / 2) * stride) + slot.start;
        const int at = first_from(indices, slot.room, i & 1 ? range.end : range.begin);
        (i & 1 ? high : low)[i / 2] = at;
        // What is before the first range or behind the last is in no slot.
        if (range.begin == slot.edge && (i & 1) == 0 && at != 0) raise(damaged);
        if (range.end == slot.last && (i & 1) && at < slot.room && indices[at] != NO_ENTRY) raise(damaged);
    }
    for (int i = threadIdx.x; i < RANGE; i += RANGE_THREADS) sums[i] = 0.0f;
    for (int i = threadIdx.x; i < RANGE / 32; i += RANGE_THREADS) seen[i] = 0;
    __syncthreads();
    int list = form.world * slot.start, end = list;
    for (int from = 0; from < form.world; ++from) {
        const u8* row = entries + (i64)from * stride;
        const int* indices = indices_of(row) + slot.start;
        const Value* values = values_of(row, form.total) + slot.start;
        const int begin = low[from], behind = high[from];
        list += begin, end += max(begin, behind);
        for (int i = begin + (int)threadIdx.x; i < behind; i += RANGE_THREADS) {
            const int index = indices[i], at = index - range.begin;
            if ((u32)at >= (u32)(range.end - range.begin) || (i > begin && indices[i - 1] >= index)) {
                raise(damaged);
                continue;
            }
            sums[at] = __fadd_rn(sums[at], from_wire(values[i]));
            atomicOr(&seen[at / 32], 1u << (at & 31));
        }
        // The next rank's come after all of this one's.
        __syncthreads();
    }
    WarpGroup<RANGE_WARPS> group = {words, 0, (int)threadIdx.x / 32};
    const int first = LANE_INDICES * (int)threadIdx.x;
    u32 mine = seen[first / 32] >> (first & 31) & (0xffffffffu >> (32 - LANE_INDICES));
    int total;
    int next = list + group.sum_upto(__popc(mine), total) - __popc(mine);
    for (; mine; mine &= mine - 1, ++next) {
        const int at = first + __ffs(mine) - 1;
        list_indices[next] = range.begin + at;
        list_sums[next] = sums[at];
    }
    for (int i = list + total + (int)threadIdx.x; i < end; i += RANGE_THREADS) list_indices[i] = NO_ENTRY;
    if (threadIdx.x == 0) states[blockIdx.x] = {list, total, end, 0};
}

extern "C" __global__ __launch_bounds__(BINS) void split_decide(
    const SplitSlot* slots, RangeState* states, const int* list_indices, const float* list_sums, int* guesses, Cut* cuts, int* stats,
    int world) {
    __shared__ DecideShared shared;
    Deciders group = shared.group();
    const SplitSlot slot = slots[blockIdx.x];
    RangeState* mine = states + slot.range;
    const int base = world * slot.start, lane = threadIdx.x & 31;
    list_indices += base, list_sums += base;
    const auto bits_at = [=](int i) { return list_indices[i] < 0 ? -1 : sum_bits(list_sums[i]); };
    const Cut cut = find_cut(bits_at, mine[slot.ranges - 1].end - base, slot.back_room, guesses + blockIdx.x, group, shared);
    for (int r = threadIdx.x / 32; r < slot.ranges; r += CHUNK_WARPS) {
        const int begin = mine[r].list - base, end = begin + mine[r].count;
        int taken = 0;
#pragma unroll 4
        for (int i = begin + lane; i < end; i += 32) taken += cut.takes(bits_at(i), i);
        taken = warp_sum(taken);
        if (lane == 0) mine[r].place = taken;
    }
    __syncthreads();
    int next = 0;
    for (int first = 0; first < slot.ranges; first += BINS) {
        const int r = first + (int)threadIdx.x, taken = r < slot.ranges ? mine[r].place : 0;
        int total;
        const int place = next + group.sum_upto(taken, total) - taken;
        if (r < slot.ranges) mine[r].place = place;
        next += total;
    }
    if (threadIdx.x != 0) return;
    cuts[blockIdx.x] = cut;
    atomicAdd(reinterpret_cast<u32*>(stats + 2), (u32)(slot.back_room - next));
}

// A warp has a range. stats[1] is told the bytes of places that are empty, or hold no winner on average, as float.
extern "C" __global__ __launch_bounds__(32 * EMIT_WARPS) void split_emit(
    const SplitSlot* slots, const SumRange* ranges, const RangeState* states, const int* list_indices, const float* list_sums,
    const Cut* cuts, const int* damaged, u8* sums, float* lost, int* mates, int* stats, IN_PLACE SplitForm form, int count,
    float spare, float entry_bytes) {
    const int number = blockIdx.x * EMIT_WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        stats[1] = __float_as_int(fmaxf((float)stats[2], spare) * entry_bytes);
        for (int i = (4 + (int)sizeof(Value)) * form.back; i % 4; ++i) sums[i] = 0;
    }
    if (number >= count) return;
    const RangeState state = states[number];
    const int slot_number = ranges[number].slot;
    const SplitSlot slot = slots[slot_number];
    const Cut cut = cuts[slot_number];
    const int base = form.world * slot.start;
    int next = slot.back_start + state.place;
    const auto write = [&](int place, int index, float exact) {
        const Value code = round_to_wire(exact);
        put(sums, form.back, place, index, code);
#if NARROW
        lost[place] = __fsub_rn(exact, from_wire(code));
        mates[place] = -1;
#endif
    };
    if (*damaged) {
        // Something that is no number wins everywhere, and every rank knows.
        if (number != slot.range) return;
        for (int p = lane; p < slot.back_room; p += 32)
            write(slot.back_start + p, p ? NO_ENTRY : slot.edge, p ? 0.0f : __int_as_float(0x7fc00000));
        return;
    }
    for (int begin = state.list; begin < state.list + state.count; begin += 32) {
        const int i = begin + lane;
        const bool live = i < state.list + state.count;
        const float exact = live ? list_sums[i] : 0.0f;
        const bool taken = live && cut.takes(sum_bits(exact), i - base);
        const u32 all = __ballot_sync(EVERY_LANE, taken);
        if (taken) write(next + lanes_before(all, lane), list_indices[i], exact);
        next += __popc(all);
    }
    if (number != slot.range + slot.ranges - 1) return;
    for (int p = next + lane; p < slot.back_start + slot.back_room; p += 32) write(p, NO_ENTRY, 0.0f);
}

// -- everybody ---------------------------------------------------------------------------------------------------------

extern "C" __global__ __launch_bounds__(BINS) void split_choose(
    const u8* gathered, int stride, const SplitSlot* slots, const u8* used, int* guesses, Cut* cuts, float* bucket,
    const Cleared* pieces, IN_PLACE SplitForm form) {
    __shared__ DecideShared shared;
    if ((int)blockIdx.x >= form.slots) {
        const Cleared piece = pieces[blockIdx.x - form.slots];
        clear(bucket + piece.bucket, piece.count);
        return;
    }
    Deciders group = shared.group();
    const SplitSlot slot = slots[blockIdx.x];
    const int total = form.back;
    const auto bits_at = [=](int i) {
        const int owner = i / slot.back_room, place = slot.back_start + i - owner * slot.back_room;
        const u8* row = gathered + (i64)owner * stride;
        return indices_of(row)[place] < 0 ? -1 : sum_bits(from_wire(values_of(row, total)[place]));
    };
    // A slot that no rank had a gradient for keeps nothing.
    const int keep = used[blockIdx.x] ? slot.winners : 0;
    const Cut cut = find_cut(bits_at, form.world * slot.back_room, keep, guesses + blockIdx.x, group, shared);
    if (threadIdx.x == 0) cuts[blockIdx.x] = cut;
}

// The first `gathered_blocks` blocks have what was gathered, the others what this rank sent. `settled`: slots of which nothing returns.
extern "C" __global__ __launch_bounds__(FINISH_THREADS) void split_finish(
    const u8* gathered, int stride, u8* offer, float* memory, float* out, const SplitSlot* slots, const int* place_slots,
    const int* back_slots, const int* starts, const Cut* cuts, const u8* settled, float* lost, int* mates, u8* status,
    const float* share, IN_PLACE SplitForm form, int gathered_blocks, int into_bucket) {
    const bool sent = (int)blockIdx.x >= gathered_blocks;
    const i64 item = (i64)(blockIdx.x - (sent ? gathered_blocks : 0)) * FINISH_THREADS + threadIdx.x;
    const int total = sent ? form.total : form.back;
    if (item >= (i64)form.world * total) return;
    const int owner = (int)(item / total), place = (int)(item % total);
    const int slot_number = (sent ? place_slots : back_slots)[place];
    const SplitSlot slot = slots[slot_number];
    const Cut cut = cuts[slot_number];
    const u8* row = gathered + (i64)owner * stride;
    const Value* values = values_of(row, form.back);
    const auto wins = [&](int p) {
        return cut.takes(sum_bits(from_wire(values[p])), owner * slot.back_room + p - slot.back_start);
    };
    if (!sent) {
        const int index = indices_of(row)[place];
        bool won = index >= slot.edge && index < slot.last && wins(place);
        const int position = won ? position_of(slot, starts, form, owner, index) : 0;
        if ((index != NO_ENTRY && (index < slot.edge || index >= slot.last)) || (won && (position < slot.begin || position >= slot.end))) {
            raise(status);
            won = false;
        }
        if (won) {
            const float mean = __fmul_rn(from_wire(values[place]), *share);
            out[position + (into_bucket ? slot.bucket : 0)] = mean;
            if (!is_finite(mean)) raise(status);
        }
#if NARROW
        if (owner != form.rank) return;
        if (won && is_finite(lost[place]))
            memory[position] = __fadd_rn(memory[position], lost[place]);
        else
            lost[place] = 0.0f;
#endif
        return;
    }
    u8* entries = offer + (i64)owner * form.row + form.head;
    const int index = indices_of(entries)[place];
    if (index < 0 || settled[slot_number]) return;
    const int* theirs = indices_of(row) + slot.back_start;
    const int at = first_from(theirs, slot.back_room, index);
    if (at < slot.back_room && theirs[at] == index && wins(slot.back_start + at)) {
#if NARROW
        if (owner == form.rank) mates[slot.back_start + at] = place;
#endif
        return;
    }
    const int position = position_of(slot, starts, form, owner, index);
    memory[position] = __fadd_rn(memory[position], from_wire(values_of(entries, form.total)[place]));
    reinterpret_cast<int*>(entries)[place] = -2 - index;
}

// What one bucket may have to take back.
struct SplitRecord {
    float* memory;
    const u8* offer;
    const u8* sums;
    const float* lost;
    const int* mates;
    const SplitSlot* slots;
    const int* place_slots;
    const int* back_slots;
    const int* starts;
    i64 numel;
    SplitForm form;
};
static_assert(LAYOUT_OF_SplitRecord, "split_tables.py has another SplitRecord");
static_assert(MOST_RECORDS * sizeof(SplitRecord) <= 4000, "a kernel has 4 KB of parameters");

struct SplitRecords {
    SplitRecord at[MOST_RECORDS];
};

// All buckets of a step, `blocks_each` blocks for each: what was given back leaves memory again, then what was sent returns. Sums that
// overflowed and were never selected go too.
extern "C" __global__ void split_undo(IN_PLACE SplitRecords records, const u8* bad, int blocks_each) {
    if (!*bad) return;
    const SplitRecord& record = records.at[blockIdx.x / blocks_each];
    const SplitForm& form = record.form;
    const i64 threads = (i64)blocks_each * blockDim.x, thread = (i64)(blockIdx.x % blocks_each) * blockDim.x + threadIdx.x;
    float* memory = record.memory;
    for (i64 i = thread; i < record.numel; i += threads)
        if (!is_finite(memory[i])) memory[i] = 0.0f;
    for (i64 item = thread; item < (i64)form.world * form.total; item += threads) {
        const int owner = (int)(item / form.total), place = (int)(item % form.total);
        const u8* entries = record.offer + (i64)owner * form.row + form.head;
        const int index = indices_of(entries)[place];
        if (index == NO_ENTRY) continue;
        const bool returned = index < 0;
#if NARROW
        // The thread of the sum has it.
        if (!returned && owner == form.rank && record.mates) continue;
#endif
        const SplitSlot slot = record.slots[record.place_slots[place]];
        const int position = position_of(slot, record.starts, form, owner, returned ? -2 - index : index);
        const float value = from_wire(values_of(entries, form.total)[place]);
        const float held = returned ? __fsub_rn(memory[position], value) : memory[position];
        memory[position] = finite_or_zero(__fadd_rn(held, value));
    }
#if NARROW
    if (!record.mates) return;
    const u8* mine = record.offer + (i64)form.rank * form.row + form.head;
    for (int place = (int)thread; place < form.back; place += (int)threads) {
        const int mate = record.mates[place], index = indices_of(record.sums)[place];
        if (index < 0 || (mate < 0 && record.lost[place] == 0.0f)) continue;
        const SplitSlot slot = record.slots[record.back_slots[place]];
        const int position = position_of(slot, record.starts, form, form.rank, index);
        float held = __fsub_rn(memory[position], record.lost[place]);
        if (mate >= 0) held = __fadd_rn(held, from_wire(values_of(mine, form.total)[mate]));
        memory[position] = finite_or_zero(held);
    }
#endif
}
