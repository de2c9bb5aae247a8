// Residual add, exact top-k, packing and residual write of contiguous rows of which few elements are sent, in one pass over memory.
//
//  1. c = residual + gradient, or as momentum.cuh says, to memory. On the way the candidates of the row are listed, in ascending
//     order of index: all that reach a cut which somewhat more than `keep` magnitudes are expected to reach. It is that of the
//     last step, moved by how many reached it then.
//  2. Every candidate counts those that are larger. Of `keep` or more it is not sent; the others write their entry, and to memory
//     what is left of it, ties to the lowest index.
//
// Every element that reaches the cut is a candidate, so that what is sent does not depend on the cut. A row that too few or too
// many reach, as in the first step, is searched for its threshold in memory.
//
// Nothing of a row stays in registers, so that one kernel does rows of all lengths. A long row has the TEAM warps of a block, a
// short one a warp; warp w owns the w-th part of the row, so that order is settled inside a warp and by one prefix over the warps.
// Nothing is read from memory while a row is chosen from: there is a queue before it, and a bucket takes three or four turns.

#include "momentum.cuh"
#include "team.cuh"

#define TEAM 4
#define BLOCK_THREADS (32 * TEAM)
// Fours of neighbours that a lane has under way at once; with momentum each is three loads.
#define MOST_FOURS (MOMENTUM ? 2 : 4)
#define BLOCKS_AT_ONCE (MOMENTUM ? 6 : 8)
// Candidates of a warp; places in it are bytes.
#define ROOM 192
// The cut moves by this part of how far the number of candidates was off, both as exponents of two: the number falls with about
// the sixth power of the cut, and what is chance in it should not be followed.
#define FOLLOWED 10
#define POWER 6

// What a warp has in shared memory.
struct Own {
    float4 elements[MOST_FOURS][32];  // those just compensated, a lane's its own: registers cannot be looked up by number
    float values[ROOM];               // its candidates
    u16 places[ROOM];
    u16 larger[ROOM];                 // how many of the row are larger
    Row row;
};

// What a block has. Magnitudes of a row's candidates: those of a long row one warp after the other, a short one has its own place.
struct Shared {
    Own own[TEAM];
    float magnitudes[TEAM * (ROOM + 4)];
    int words[2 * TEAM];
    u32 told;  // as `tell` wants it
};

// -- 1 ----------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ float4 to_floats(const Quad& raw) {
    return make_float4(to_float(raw.x), to_float(raw.y), to_float(raw.z), to_float(raw.w));
}

// How four neighbours lie that begin at `at`. WHOLE: all of them are before `end`; QUADS: all are or none, and aligned.
enum Lie { WHOLE, QUADS, SINGLE };

// No branch, so that all loads leave together; what is outside is read at the end.
template <Lie LIE, class Four, class T>
static __device__ __forceinline__ Four get_four(const T* from, int at, int end) {
    if constexpr (LIE == SINGLE) {
        const int last = end - 1;
        return Four{from[min(at, last)], from[min(at + 1, last)], from[min(at + 2, last)], from[min(at + 3, last)]};
    } else {
        return *reinterpret_cast<const Four*>(from + (LIE == WHOLE ? at : min(at, end - 4)));
    }
}

template <Lie LIE>
static __device__ __forceinline__ void put_four(float* to, int at, int end, const float4& x) {
    if constexpr (LIE == SINGLE) {
        if (at < end) to[at] = x.x;
        if (at + 1 < end) to[at + 1] = x.y;
        if (at + 2 < end) to[at + 2] = x.z;
        if (at + 3 < end) to[at + 3] = x.w;
    } else {
        if (LIE == WHOLE || at < end) *reinterpret_cast<float4*>(to + at) = x;
    }
}

// Which of them reach the cut, a bit each, as far as they are before `end`.
template <Lie LIE>
static __device__ __forceinline__ u32 reach(const float4& x, float cut, int at, int end) {
    u32 bits = 0;
    if (fabsf(x.x) >= cut) bits |= 1;
    if (fabsf(x.y) >= cut) bits |= 2;
    if (fabsf(x.z) >= cut) bits |= 4;
    if (fabsf(x.w) >= cut) bits |= 8;
    if (LIE == WHOLE) return bits;
    if (LIE == QUADS) return at < end ? bits : 0;
    return bits & ((1u << min(max(end - at, 0), 4)) - 1);
}

static __device__ __forceinline__ void drop_infinite(Quad& raw, bool& bad) {
    const auto look = [&](Gradient& gradient) {
        if ((__float_as_int(to_float(gradient)) & 0x7fffffff) < INFINITE) return;
        gradient = 0;
        bad = true;
    };
    look(raw.x), look(raw.y), look(raw.z), look(raw.w);
}

// How many of a lane's 4 x 8 bits are set in every four of them, in a byte each: those of the even and of the odd fours.
static __device__ __forceinline__ void count_fours(u32 bits, u32& even, u32& odd) {
    bits -= (bits >> 1) & 0x55555555;
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333);
    even = bits & 0x0f0f0f0f;
    odd = (bits >> 4) & 0x0f0f0f0f;
}

// The elements whose bits are set, appended to a list that has `listed` of them; returns how many it has then, or would have. Bit
// 4 q + i is that of element `first` + (32 q + lane) x 4 + i.
static __device__ __forceinline__ int append(u32 bits, int first, Own& own, int listed) {
    const int lane = threadIdx.x & 31, more = warp_sum(__popc(bits));
    if (more == 0 || listed + more > ROOM) return listed + more;
    u32 even, odd;
    count_fours(bits, even, odd);
    const u32 even_upto = (u32)sum_upto((int)even, lane), odd_upto = (u32)sum_upto((int)odd, lane);
    const u32 all_even = (u32)__shfl_sync(EVERY_LANE, (int)even_upto, 31);
    const u32 all_odd = (u32)__shfl_sync(EVERY_LANE, (int)odd_upto, 31);
    // Of all lanes' fours before this one, in a byte each; the list is short enough that none of them overflows.
    const u32 earlier = (all_even + all_odd) * 0x01010100u;
    const u32 even_start = earlier + even_upto - even, odd_start = earlier + all_even + odd_upto - odd;
    for (u32 rest = bits; rest; rest &= rest - 1) {
        const int bit = __ffs(rest) - 1, four = bit / 4;
        const int start = (int)((four % 2 ? odd_start : even_start) >> (four / 2 * 8)) & 255;
        const int place = listed + start + __popc((bits >> (4 * four)) & ((1u << (bit % 4)) - 1));
        own.values[place] = reinterpret_cast<const float*>(&own.elements[four][lane])[bit % 4];
        own.places[place] = (u16)(first + 128 * four + 4 * lane + bit % 4);
    }
    return listed + more;
}

// What a warp does of a row, from where to where, and in which units.
struct Stretch {
    const Gradient* gradient;
    float* held;
    i64 memory;  // where the row begins in it
    int begin, end;
    float cut, scale;
};

// Compensate `FOURS` x 128 elements from `first` on; returns which of a lane's reach the cut, as `append` wants it. A tensor of an odd
// size moves all that are behind it in the bucket, so that these may lie in another way there.
template <int FOURS, Lie LIE, Lie BUCKET_LIE>
static __device__ __forceinline__ u32 compensate_some(
    const Stretch& row, int first, Own& own, const Momentum& correction, int& any, bool& bad) {
    const int lane = threadIdx.x & 31;
    float4 c[FOURS], last[FOURS];
    Quad raw[FOURS];
#pragma unroll
    for (int q = 0; q < FOURS; ++q) {
        const int at = first + (32 * q + lane) * 4;
        c[q] = get_four<LIE, float4>(row.held, at, row.end);
        raw[q] = get_four<BUCKET_LIE, Quad>(row.gradient, at, row.end);
#if MOMENTUM
        last[q] = get_four<LIE, float4>(correction.u + row.memory, at, row.end);
#endif
    }
    // Not a number if one is not finite.
    float none = 0.0f;
#pragma unroll
    for (int q = 0; q < FOURS; ++q) {
        const float4 g = to_floats(raw[q]);
        any |= (__float_as_int(g.x) | __float_as_int(g.y) | __float_as_int(g.z) | __float_as_int(g.w)) & 0x7fffffff;
        none = fmaf(g.x, 0.0f, fmaf(g.y, 0.0f, fmaf(g.z, 0.0f, fmaf(g.w, 0.0f, none))));
    }
    if (none != 0.0f) {
#pragma unroll
        for (int q = 0; q < FOURS; ++q) drop_infinite(raw[q], bad);
    }
    u32 reaching = 0;
#pragma unroll
    for (int q = 0; q < FOURS; ++q) {
        const int at = first + (32 * q + lane) * 4;
        const float4 g = to_floats(raw[q]);
        c[q].x = correction.add(g.x, c[q].x, row.scale, last[q].x);
        c[q].y = correction.add(g.y, c[q].y, row.scale, last[q].y);
        c[q].z = correction.add(g.z, c[q].z, row.scale, last[q].z);
        c[q].w = correction.add(g.w, c[q].w, row.scale, last[q].w);
        put_four<LIE>(row.held, at, row.end, c[q]);
        own.elements[q][lane] = c[q];
#if MOMENTUM
        put_four<LIE>(correction.u + row.memory, at, row.end, last[q]);
#endif
        reaching |= reach<LIE>(c[q], row.cut, at, row.end) << (4 * q);
    }
    return reaching;
}

// The whole stretch; returns how many reach the cut, and lists these if they fit.
template <int FOURS, Lie LIE, Lie BUCKET_LIE>
static __device__ __forceinline__ int stream(
    const Stretch& row, Own& own, const Momentum& correction, bool& had, bool& bad) {
    int listed = 0, any = 0, first = row.begin;
    if (LIE == QUADS && BUCKET_LIE == QUADS) {
        for (; first + 128 * FOURS <= row.end; first += 128 * FOURS)
            listed = append(compensate_some<FOURS, WHOLE, WHOLE>(row, first, own, correction, any, bad), first, own, listed);
    }
    for (; first < row.end; first += 128 * FOURS)
        listed = append(compensate_some<FOURS, LIE, BUCKET_LIE>(row, first, own, correction, any, bad), first, own, listed);
    had |= any != 0;
    return listed;
}

// -- 2 ----------------------------------------------------------------------------------------------------------------

// Choose among the candidates of a row, `listed` of them, of which this warp has `mine` and the warps before it have `before`.
template <int WARPS>
static __device__ __forceinline__ void send_listed(
    Own& own, float* magnitudes, int listed, int mine, int before, const Row& row, RowTeam<WARPS>& team, float* held,
    u8* payload, const Momentum& correction, bool& bad) {
    const int lane = threadIdx.x & 31, keep = row.keep;
    for (int i = lane; i < mine; i += 32) magnitudes[before + i] = fabsf(own.values[i]);
    // What is behind the last one is larger than none.
    if (32 * team.warp + lane < 4) magnitudes[listed + lane] = 0.0f;
    team.meet();
    const float4* fours = reinterpret_cast<const float4*>(magnitudes);
    int sent = 0, most = 0;
    for (int i = lane; i < mine; i += 32) {
        const float magnitude = fabsf(own.values[i]);
        int above = 0;
#pragma unroll 4
        for (int j = 0; j < listed; j += 4) {
            const float4 four = fours[j / 4];
            above += four.x > magnitude;
            above += four.y > magnitude;
            above += four.z > magnitude;
            above += four.w > magnitude;
        }
        own.larger[i] = (u16)above;
        if (above < keep) ++sent, most = max(most, above);
    }
    sent = warp_sum(sent);
    int total, place = team.before_all(sent, total), last = listed, earlier = 0;
    if (total > keep) {
        // Those that are equal to the smallest of them are too many: `last` are larger than each of these.
        last = team.largest(most);
        int tied = 0, all;
        for (int i = lane; i < mine; i += 32) tied += own.larger[i] == last;
        tied = warp_sum(tied);
        earlier = team.before_all(tied, all);
        place = team.before_all(sent - tied + min(max(keep - last - earlier, 0), tied), total);
    }
    for (int first = 0; first < mine; first += 32) {
        const int i = first + lane, above = i < mine ? own.larger[i] : listed;
        const u32 ties = __ballot_sync(EVERY_LANE, above == last);
        const bool late = above == last && last + earlier + lanes_before(ties, lane) >= keep;
        const bool chosen = above < keep && !late;
        const u32 all = __ballot_sync(EVERY_LANE, chosen);
        if (chosen) {
            const int index = own.places[i];
            held[index] = correction.send(own.values[i], index, place + lanes_before(all, lane), row, payload, bad);
        }
        earlier += __popc(ties);
        place += __popc(all);
    }
}

// The same of a row whose candidates are not known: by the threshold, which is returned as a pattern.
template <int WARPS>
static __device__ __forceinline__ int send_searched(
    const Row& row, int guess, int begin, int end, RowTeam<WARPS>& team, float* held, u8* payload,
    const Momentum& correction, bool& bad) {
    const int lane = threadIdx.x & 31;
    const auto count = [&](int pattern) {
        const float threshold = __int_as_float(pattern);
        int reached = 0;
#pragma unroll 8
        for (int i = begin + lane; i < end; i += 32) reached += fabsf(held[i]) >= threshold;
        return reached;
    };
    const auto largest = [&] {
        int bits = 0;
#pragma unroll 8
        for (int i = begin + lane; i < end; i += 32) bits = max(bits, ordered(held[i]));
        return bits;
    };
    int reached;
    const int pattern = search(row, guess, team, reached, count, largest);
    const float threshold = __int_as_float(pattern);
    int above = 0, tied = 0, all;
    for (int i = begin + lane; i < end; i += 32) {
        above += fabsf(held[i]) > threshold;
        tied += fabsf(held[i]) == threshold;
    }
    above = warp_sum(above), tied = warp_sum(tied);
    int total, place = team.before_all(above, total), earlier = team.before_all(tied, all);
    // As many of those that are equal as are still wanted, the first ones.
    const int wanted = row.keep - total;
    place += min(earlier, wanted);
    for (int first = begin; first < end; first += 32) {
        const int i = first + lane;
        const float c = i < end ? held[i] : NO_ELEMENT;
        const u32 ties = __ballot_sync(EVERY_LANE, fabsf(c) == threshold);
        const bool late = earlier + lanes_before(ties, lane) >= wanted;
        const bool chosen = fabsf(c) > threshold || (fabsf(c) == threshold && !late);
        const u32 sent = __ballot_sync(EVERY_LANE, chosen);
        if (chosen) held[i] = correction.send(c, i, place + lanes_before(sent, lane), row, payload, bad);
        earlier += __popc(ties);
        place += __popc(sent);
    }
    return pattern;
}

template <int WARPS>
static __device__ __forceinline__ void encode_row(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, int number, int* guesses, float scale, Shared& shared,
    const Momentum& correction) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    RowTeam<WARPS> team = {shared.words, 0, WARPS > 1 ? warp : 0};
    Own& own = shared.own[warp];
    const int words = sizeof(Row) / sizeof(int);
    if (lane < words) reinterpret_cast<int*>(&own.row)[lane] = reinterpret_cast<const int*>(rows + number)[lane];
    const int guess = __float_as_int(__int_as_float(guesses[number]) * scale);
    __syncwarp();
    const Row& row = own.row;
    const int length = row.length, part = (length + 4 * WARPS - 1) / (4 * WARPS) * 4, begin = min(team.warp * part, length);
    // Before anything is known of a row, nothing is a candidate.
    const float cut = __int_as_float(guess > 0 ? guess : INFINITE);
    float* held = memory + row.memory;
    const Stretch stretch = {bucket + row.gradient, held, row.memory, begin, min(begin + part, length), cut, scale};
    bool had = false, bad = false;
    int mine;
    if (row.vector && part <= 256)
        mine = stream<2, QUADS, QUADS>(stretch, own, correction, had, bad);
    else if (row.vector)
        mine = stream<MOST_FOURS, QUADS, QUADS>(stretch, own, correction, had, bad);
    else if (row.quads)
        mine = stream<MOST_FOURS, QUADS, SINGLE>(stretch, own, correction, had, bad);
    else
        mine = stream<2, SINGLE, SINGLE>(stretch, own, correction, had, bad);

    int listed, next;
    const int before = team.before_all(mine <= ROOM ? mine : WARPS * ROOM + 1, listed);
    if (WARPS == 1) __syncwarp();
    if (listed >= row.keep && listed <= WARPS * ROOM) {
        next = guess + (__float_as_int((float)listed) - __float_as_int((float)row.aim)) / FOLLOWED;
        float* magnitudes = shared.magnitudes + (WARPS > 1 ? 0 : warp * (ROOM + 4));
        send_listed(own, magnitudes, listed, mine, before, row, team, held, payload, correction, bad);
    } else {
        const int pattern = send_searched(row, guess, begin, stretch.end, team, held, payload, correction, bad);
        next = pattern ? pattern - (__float_as_int((float)row.aim) - __float_as_int((float)row.keep)) / POWER : 0;
    }
    if (team.warp == 0 && lane == 0) guesses[number] = max(next, 0);
    tell(had, bad, row.slot, &shared.told, payload);
}

// The first `long_rows` rows have a block each, the others a warp.
extern "C" __global__ __launch_bounds__(BLOCK_THREADS, BLOCKS_AT_ONCE) void stream_rows(
    const Gradient* bucket, float* memory, u8* payload, const Row* rows, int* guesses, const float* ratio, int long_rows,
    int count MOMENTUM_PARAMETERS) {
    __shared__ __align__(16) Shared shared;
    if (threadIdx.x == 0) shared.told = 0;
    __syncthreads();
    const Momentum correction = MOMENTUM_OF_GROUP;
    const int block = (int)blockIdx.x, number = long_rows + (block - long_rows) * TEAM + (int)threadIdx.x / 32;
    if (block < long_rows)
        encode_row<TEAM>(bucket, memory, payload, rows, block, guesses, *ratio, shared, correction);
    else if (number < count)
        encode_row<1>(bucket, memory, payload, rows, number, guesses, *ratio, shared, correction);
}
