// The entries of all ranks, added in rank order, averaged, and written as a dense gradient. One write per element, and one launch
// for all work of a bucket: there is little of each kind, and a launch ends when its slowest block does.
//
// Every element belongs to one block, so ranks are added one after the other without atomics. Reference: AllGather.combine in
// thinwire/exchange/all_gather.py.

#include "dense.cuh"
#include "decode.cuh"

// A block does one kind of work:
//   HEADERS  the headers of all ranks
//   MEANS    a stretch of the dense tensors that travel with the payloads
//   ROWS     whole rows that lie one behind the other
//   PIECES   a piece of a row that does not fit
//   TILES    pieces of up to COLUMNS strided rows

#define MEMBERS (THREADS / (RANKS * COLUMNS))  // threads that share the entries of a rank in a column

// What a block needs to know, in one load. Neighbouring rows of a slot have their entries one behind the other.
struct Part {
    Row row;     // the first
    int kind;    // one of these
    int first;   // number of the row, or of the stretch
    int rows;    // so many of them, of one slot
    int start;   // elements of each from here on
    int here;    // so many of them
    int joined;  // 1: strided rows that lie next to each other
};
static_assert(LAYOUT_OF_Part, "decode_parts.py has another Part");

// Headers of all ranks: which slots anybody had a gradient for, and whether anything is wrong. `expected` has the fixed words, then
// the places of each slot.
//   status[0]: some gradient was not finite, or a header is none that this layout writes
//   status[1]: some slot has no gradient on any rank
static __device__ void read_headers(const Reply& reply, const int* expected, u8* used, u8* status, int slots) {
    for (int slot = threadIdx.x; slot < slots; slot += THREADS) {
        bool any = false;
        for (int rank = 0; rank < reply.world; ++rank) {
            const int* words = slot_words(reply.of(rank), slot);
            any |= words[HEADER_HAD] != 0;
            if (words[0] != expected[HEADER_FIXED + slot]) raise(status);
        }
        used[slot] = any;
        if (!any) raise(status + 1);
    }
    for (int i = threadIdx.x; i < reply.world * HEADER_FIXED; i += THREADS) {
        const int word = reinterpret_cast<const int*>(reply.of(i / HEADER_FIXED))[i % HEADER_FIXED];
        if (word != expected[i % HEADER_FIXED]) raise(status);
    }
}

// Whether ranks had a gradient for a slot. Every lane asks another rank, or several if there are more ranks than lanes.
static __device__ __forceinline__ int read_had(const Reply& reply, int slot) {
    const int lane = threadIdx.x % 32;
    int had = load_word(slot_words(reply.of(min(lane, reply.world - 1)), slot) + HEADER_HAD);
#pragma unroll 1
    for (int rank = lane + 32; rank < reply.world; rank += 32) had |= slot_words(reply.of(rank), slot)[HEADER_HAD];
    return had;
}

// Whether any rank had one; whole warps come here.
static __device__ __forceinline__ bool is_used(int had) { return __ballot_sync(EVERY_LANE, had != 0) != 0; }

// A block's sums, which are 0, and what it knows of its slot.
struct Work {
    const Reply& reply;
    const Part& part;
    float* sums;
    float* target;  // element 0 of the first row
    float average;

    // All entries of all rows of the part, rank by rank: `add(row, index, value)`, rows counted from the first.
    template <class Add>
    __device__ __forceinline__ void add_all(const Add& add) const {
        const Row& row = part.row;
        const int count = part.rows * row.keep, number = threadIdx.x;
        const bool few = count <= THREADS, mine = number < count;
        Entries entries;
        if (few && mine) entries.load(reply, row, 0, number);
        const int had = read_had(reply, row.slot), which = (u32)number / (u32)row.keep;
        const bool used = is_used(had);
        __syncthreads();
        if (!used) return;
        if (few) {
#pragma unroll 1
            for (int ranks = 0; ranks < reply.world; ranks += RANKS) {
                if (ranks && mine) entries.load(reply, row, ranks, number);
#pragma unroll
                for (int r = 0; r < RANKS; ++r) {
                    if (ranks + r >= reply.world) break;
                    if (mine) add(which, entries.index(r, row, number), entries.value(r));
                    __syncthreads();
                }
            }
            return;
        }
#pragma unroll 1
        for (int rank = 0; rank < reply.world; ++rank) {
            const u8* payload = reply.of(rank);
#pragma unroll 1
            for (int first = number; first < count; first += RANKS * THREADS) {
                entries.load_apart(payload, row, first, THREADS, count - 1);
#pragma unroll
                for (int i = 0; i < RANKS; ++i) {
                    const int one = first + i * THREADS;
                    if (one < count) add((u32)one / (u32)row.keep, entries.index(i, row, one), entries.value(i));
                }
            }
            __syncthreads();
        }
    }
};

// Contiguous rows that fit. Tells whether something was wrong.
static __device__ __forceinline__ bool decode_rows(const Work& work) {
    const Row& row = work.part.row;
    const int shift = misplaced(work.target), count = work.part.rows * row.length;
    float* sums = work.sums;
    bool bad = false;
    work.add_all([&](int which, int index, float value) {
        float* sum = sums + shift + which * row.length;
        if ((u32)index < (u32)row.length)
            sum[index] = __fadd_rn(sum[index], value);
        else
            bad = true;
    });
    return write_means(work.target, sums, shift, count, work.average) | bad;
}

// A piece of a contiguous row. If a row has no more entries than threads, every thread reads one and looks whether it belongs here.
// Otherwise the piece finds its own first.
static __device__ __forceinline__ bool decode_piece(const Work& work, int (*edges)[2]) {
    const Reply& reply = work.reply;
    const Row& row = work.part.row;
    const int start = work.part.start, here = work.part.here;
    float* target = work.target + start;
    const int shift = misplaced(target);
    float* sum = work.sums + shift;
    const bool all = row.keep <= THREADS;
    bool bad = false;
    const auto add = [&](int index, float value) {
        const u32 at = (u32)index - (u32)start;
        if (at < (u32)here)
            sum[at] = __fadd_rn(sum[at], value);
        else
            bad |= !all || (u32)index >= (u32)row.length;
    };
    if (all) {
        work.add_all([&](int, int index, float value) { add(index, value); });
    } else {
        const int had = read_had(reply, row.slot);
        for (int before = 0; before < reply.world; before += MOST_AT_ONCE) {
            const int together = min(reply.world - before, MOST_AT_ONCE);
            for (int rank = threadIdx.x / 32; rank < together; rank += THREADS / 32) {
                int begin, end;
                find_edges<32>(reply.of(before + rank), row, 0, row.keep, start, start + here, begin, end);
                bad |= end < begin;
                edges[rank][0] = begin, edges[rank][1] = end;
            }
            __syncthreads();
            if (!is_used(had)) break;
            add_between(reply, row, before, together, edges, add);
        }
    }
    return write_means(target, work.sums, shift, here, work.average) | bad;
}

// The means of a tile. Tells whether something was wrong.
static __device__ __forceinline__ bool write_tile(const Work& work, const Row* rows, bool into_bucket) {
    const Part& part = work.part;
    const int here = part.here;
    const i64 stride = part.row.stride;
    Means means(work.average);
    if (part.joined && part.rows % 4 == 0 && stride % 4 == 0 && misplaced(work.target) == 0) {
        const int column = threadIdx.x % (COLUMNS / 4) * 4;
        if (column >= part.rows) return false;
        float* target = work.target + column;
#pragma unroll 4
        for (int j = threadIdx.x / (COLUMNS / 4); j < here; j += THREADS / (COLUMNS / 4))
            means.write(target + (part.start + j) * stride, work.sums + j * COLUMNS + column);
    } else {
        const int column = threadIdx.x % COLUMNS;
        if (column >= part.rows) return false;
        const Row& first = part.row;
        const Row& mine = rows[part.first + column];
        float* target = work.target + (into_bucket ? mine.gradient - first.gradient : mine.memory - first.memory);
#pragma unroll 4
        for (int j = threadIdx.x / COLUMNS; j < here; j += THREADS / COLUMNS)
            target[(part.start + j) * stride] = means.of(work.sums[j * COLUMNS + column]);
    }
    return means.bad();
}

// A piece of up to COLUMNS neighbouring rows of one slot. As for pieces, all entries are read if they are few.
static __device__ __forceinline__ bool decode_tile(const Work& work, const Row* rows, bool into_bucket) {
    const Reply& reply = work.reply;
    const Row& row = work.part.row;
    const int start = work.part.start, here = work.part.here, keep = row.keep, count = work.part.rows * keep;
    const bool all = count <= THREADS;
    float* sums = work.sums;
    bool bad = false;
    const auto add = [&](int column, int index, float value) {
        const u32 at = (u32)index - (u32)start;
        float* sum = sums + at * COLUMNS + column;
        if (at < (u32)here)
            *sum = __fadd_rn(*sum, value);
        else
            bad |= !all || (u32)index >= (u32)row.length;
    };
    if (all) {
        work.add_all(add);
    } else {
        const int had = read_had(reply, row.slot);
        const int member = threadIdx.x % MEMBERS, column = threadIdx.x / MEMBERS % COLUMNS;
        const int turn = threadIdx.x / (MEMBERS * COLUMNS);
        const int first = min(column, work.part.rows - 1) * keep;
        for (int ranks = 0; ranks < reply.world; ranks += RANKS) {
            const u8* payload = reply.of(min(ranks + turn, reply.world - 1));
            int begin, end;
            find_edges<MEMBERS>(payload, row, first, keep, start, start + here, begin, end);
            bad |= end < begin;
            if (column >= work.part.rows) end = 0;
            int place = begin + member;
            Entries entries;
            entries.load_apart(payload, row, first + place, MEMBERS, first + keep - 1);
            __syncthreads();
            if (!is_used(had)) break;
#pragma unroll 1
            for (int r = 0; r < min(RANKS, reply.world - ranks); ++r) {
                if (r == turn) {
#pragma unroll 1
                    for (;; place += RANKS * MEMBERS) {
#pragma unroll
                        for (int i = 0; i < RANKS; ++i) {
                            const int one = place + i * MEMBERS;
                            if (one < end) add(column, entries.index(i, row, first + one), entries.value(i));
                        }
                        if (place + RANKS * MEMBERS >= end) break;
                        entries.load_apart(payload, row, first + place + RANKS * MEMBERS, MEMBERS, first + keep - 1);
                    }
                }
                __syncthreads();
            }
        }
    }
    return write_tile(work, rows, into_bucket) | bad;
}

// `dense` is what was gathered of the dense tensors, its rows as far apart as the payloads, or the one row of their sum. Encoding
// has put both flags down.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_AT_ONCE) void decode(
    const u8* gathered, const u8* dense, float* out, const Row* rows, const Part* parts, const Stretch* stretches,
    const int* expected, u8* used, u8* status, const float* share, int world, int dense_world, int payload_bytes, int slots,
    int into_bucket) {
    __shared__ __align__(16) float sums[ROOM];
    __shared__ int edges[MOST_AT_ONCE][2];
    const Part part = parts[blockIdx.x];
    const float average = *share;
    clear_sums(sums);
    const Reply reply = {gathered, world, payload_bytes};
    const Work work = {reply, part, sums, out + (into_bucket ? part.row.gradient : part.row.memory), average};
    bool bad = false;
    switch (part.kind) {
        case HEADERS: read_headers(reply, expected, used, status, slots); break;
        case MEANS: {
            const Stretch stretch = stretches[part.first];
            bad = mean_stretch(dense, out, stretch, dense_world, payload_bytes);
            break;
        }
        case ROWS: bad = decode_rows(work); break;
        case PIECES: bad = decode_piece(work, edges); break;
        case TILES: bad = decode_tile(work, rows, into_bucket); break;
    }
    if (bad) raise(status);
}
