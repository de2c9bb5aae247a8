// Residual add, exact top-k, packing and residual write of contiguous rows of which few elements are sent, in one pass over memory and
// two kernels.
//
//  1. rows_collect   c = residual + gradient, or as momentum.cuh says, to memory, and one bit per element that reaches its row's cut,
//                    which somewhat more than `keep` magnitudes are expected to reach: the cut of the last step, moved by how many
//                    reached it then. A warp has up to 1024 neighbours.
//  2. rows_send      The elements whose bits are set, the row's candidates. Each of them counts those that are larger: of `keep` or
//                    more it is not sent; the others write their entry, and to memory what is left of it, ties to the lowest index.
//
// Every element that reaches the cut is a candidate, so that what is sent does not depend on the cut. A row that too few or too many
// reach, as in the first step, is searched for its threshold in memory.
//
// Two kernels, because choosing takes about as long as loading and needs no memory: where a bucket is loaded in three or four turns
// of all warps, one kernel for both lets memory wait for 16 of 43 us.

#include "momentum.cuh"
#include "team.cuh"

#define COLLECT_THREADS 128
#define COLLECTING_AT_ONCE 4
// Fours of neighbours that a lane has, and how many of these are under way at once: with momentum each is three loads.
#define FOURS 8
#define FOURS_AT_ONCE (MOMENTUM ? 4 : 8)
#define MOST_ELEMENTS (128 * FOURS)
// Warps of a block of rows_send, which a long row has to itself.
#define TEAM 4
#define SENDING_AT_ONCE 10
// Candidates of a warp of rows_send; places in it are bytes.
#define ROOM 192
// The cut moves by this part of how far the number of candidates was off, both as exponents of two: the number falls with about
// the sixth power of the cut, and what is chance in it should not be followed.
#define FOLLOWED 10
#define POWER 6

// -- 1 ----------------------------------------------------------------------------------------------------------------

// What a warp of rows_collect does: up to MOST_ELEMENTS of a row; written by thinwire/kernels/cuda/rows.py.
struct Part {
    i64 gradient;  // where it begins in the bucket
    i64 memory;    // and in memory
    int row;
    int slot;
    int count;
    u16 vector;    // as in Row
    u16 quads;
};

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

// Compensate the `FOURS` x 128 elements of a part from `first` on; returns which of a lane's reach the cut, a bit each. A tensor of an
// odd size moves all that are behind it in the bucket, so that these may lie in another way there.
template <int SOME, Lie LIE, Lie BUCKET_LIE>
static __device__ __forceinline__ u32 compensate_some(
    const Gradient* gradient, float* held, float* momentum, int first, int end, float cut, float scale,
    const Momentum& correction, int& any, bool& bad) {
    const int lane = threadIdx.x & 31;
    float4 c[SOME], last[SOME];
    Quad raw[SOME];
#pragma unroll
    for (int q = 0; q < SOME; ++q) {
        const int at = first + (32 * q + lane) * 4;
        c[q] = get_four<LIE, float4>(held, at, end);
        raw[q] = get_four<BUCKET_LIE, Quad>(gradient, at, end);
#if MOMENTUM
        last[q] = get_four<LIE, float4>(momentum, at, end);
#endif
    }
    // Not a number if one is not finite.
    float none = 0.0f;
#pragma unroll
    for (int q = 0; q < SOME; ++q) {
        const float4 g = to_floats(raw[q]);
        any |= (__float_as_int(g.x) | __float_as_int(g.y) | __float_as_int(g.z) | __float_as_int(g.w)) & 0x7fffffff;
        none = fmaf(g.x, 0.0f, fmaf(g.y, 0.0f, fmaf(g.z, 0.0f, fmaf(g.w, 0.0f, none))));
    }
    if (none != 0.0f) {
#pragma unroll
        for (int q = 0; q < SOME; ++q) drop_infinite(raw[q], bad);
    }
    u32 reaching = 0;
#pragma unroll
    for (int q = 0; q < SOME; ++q) {
        const int at = first + (32 * q + lane) * 4;
        const float4 g = to_floats(raw[q]);
        c[q].x = correction.add(g.x, c[q].x, scale, last[q].x);
        c[q].y = correction.add(g.y, c[q].y, scale, last[q].y);
        c[q].z = correction.add(g.z, c[q].z, scale, last[q].z);
        c[q].w = correction.add(g.w, c[q].w, scale, last[q].w);
        put_four<LIE>(held, at, end, c[q]);
#if MOMENTUM
        put_four<LIE>(momentum, at, end, last[q]);
#endif
        reaching |= reach<LIE>(c[q], cut, at, end) << (4 * q);
    }
    return reaching;
}

// A whole part, bit 4 q + i of a lane being that of element (32 q + lane) x 4 + i.
template <int SOME, Lie LIE, Lie BUCKET_LIE>
static __device__ __forceinline__ u32 compensate_part(
    const Gradient* bucket, float* memory, const Part& part, float cut, float scale, const Momentum& correction, int& any,
    bool& bad) {
    u32 reaching = 0;
    float* momentum = nullptr;
#if MOMENTUM
    momentum = correction.u + part.memory;
#endif
#pragma unroll 1
    for (int q = 0; q * 128 < part.count; q += SOME)
        reaching |= compensate_some<SOME, LIE, BUCKET_LIE>(
                        bucket + part.gradient, memory + part.memory, momentum, 128 * q, part.count, cut, scale, correction, any,
                        bad)
                    << (4 * q);
    return reaching;
}

extern "C" __global__ __launch_bounds__(COLLECT_THREADS, COLLECTING_AT_ONCE) void rows_collect(
    const Gradient* bucket, float* memory, u8* payload, const Part* parts, const int* guesses, u32* masks, const float* ratio,
    int count MOMENTUM_PARAMETERS) {
    const int lane = threadIdx.x & 31, number = blockIdx.x * (COLLECT_THREADS / 32) + threadIdx.x / 32;
    if (number >= count) return;
    const Part part = parts[number];
    const Momentum correction = MOMENTUM_OF_GROUP;
    const float scale = *ratio;
    const int guess = guesses[part.row];
    // Before anything is known of a row, nothing is a candidate.
    const float cut = guess > 0 ? __int_as_float(guess) * scale : __int_as_float(INFINITE);
    int any = 0;
    bool bad = false;
    u32 reaching;
    if (part.vector && part.count == MOST_ELEMENTS)
        reaching = compensate_part<FOURS_AT_ONCE, WHOLE, WHOLE>(bucket, memory, part, cut, scale, correction, any, bad);
    else if (part.vector && part.count > 256)
        reaching = compensate_part<FOURS_AT_ONCE, QUADS, QUADS>(bucket, memory, part, cut, scale, correction, any, bad);
    else if (part.vector)
        reaching = compensate_part<2, QUADS, QUADS>(bucket, memory, part, cut, scale, correction, any, bad);
    else if (part.quads)
        reaching = compensate_part<4, QUADS, SINGLE>(bucket, memory, part, cut, scale, correction, any, bad);
    else
        reaching = compensate_part<2, SINGLE, SINGLE>(bucket, memory, part, cut, scale, correction, any, bad);
    masks[32 * number + lane] = reaching;
    report(any != 0, bad, part.slot, payload);
}

// -- 2 ----------------------------------------------------------------------------------------------------------------

// The candidates of a row that has WARPS warps, in shared memory. Each warp lists its own, and reads only those.
template <int WARPS>
struct Listed {
    float magnitudes[WARPS * ROOM + 4];  // of all warps, one after the other
    u16 places[WARPS][ROOM];
    u16 larger[WARPS][ROOM];             // how many of the row are larger
};

// How many of a lane's 4 x 8 bits are set in every four of them, in a byte each: those of the even and of the odd fours.
static __device__ __forceinline__ void count_fours(u32 bits, u32& even, u32& odd) {
    bits -= (bits >> 1) & 0x55555555;
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333);
    even = bits & 0x0f0f0f0f;
    odd = (bits >> 4) & 0x0f0f0f0f;
}

// The places of the elements whose bits are set, appended to a list that has `listed` of them; returns how many it has then, or
// would have. Bit 4 q + i is that of element `first` + (32 q + lane) x 4 + i.
static __device__ __forceinline__ int append(u32 bits, int first, u16* places, int listed) {
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
        const int before = __popc((bits >> (4 * four)) & ((1u << (bit % 4)) - 1));
        places[listed + start + before] = (u16)(first + 128 * four + 4 * lane + bit % 4);
    }
    return listed + more;
}

// Choose among the candidates of a row, `listed` of them, of which this warp has `mine` and the warps before it have `before`.
template <int WARPS>
static __device__ __forceinline__ void send_listed(
    Listed<WARPS>& list, int listed, int mine, int before, const Row& row, RowTeam<WARPS>& team, float* held, u8* payload,
    const Momentum& correction, bool& bad) {
    const int lane = threadIdx.x & 31;
    const u16* places = list.places[team.warp];
    u16* larger = list.larger[team.warp];
    for (int i = lane; i < mine; i += 32) list.magnitudes[before + i] = fabsf(held[places[i]]);
    // What is behind the last one is larger than none.
    if (32 * team.warp + lane < 4) list.magnitudes[listed + lane] = 0.0f;
    team.meet();
    const float4* fours = reinterpret_cast<const float4*>(list.magnitudes);
    int sent = 0, most = 0;
    for (int i = lane; i < mine; i += 32) {
        const float own = list.magnitudes[before + i];
        int above = 0;
#pragma unroll 4
        for (int j = 0; j < listed; j += 4) {
            const float4 four = fours[j / 4];
            above += four.x > own;
            above += four.y > own;
            above += four.z > own;
            above += four.w > own;
        }
        larger[i] = (u16)above;
        if (above < row.keep) ++sent, most = max(most, above);
    }
    sent = warp_sum(sent);
    int total, place = team.before_all(sent, total), last = row.length, earlier = 0;
    if (total > row.keep) {
        // Those that are equal to the smallest of them are too many: `last` are larger than each of these.
        last = team.largest(most);
        int tied = 0, all;
        for (int i = lane; i < mine; i += 32) tied += larger[i] == last;
        tied = warp_sum(tied);
        earlier = team.before_all(tied, all);
        place = team.before_all(sent - tied + min(max(row.keep - last - earlier, 0), tied), total);
    }
    for (int first = 0; first < mine; first += 32) {
        const int i = first + lane, above = i < mine ? larger[i] : row.length;
        const u32 ties = __ballot_sync(EVERY_LANE, above == last);
        const bool late = above == last && last + earlier + lanes_before(ties, lane) >= row.keep;
        const bool chosen = above < row.keep && !late;
        const u32 all = __ballot_sync(EVERY_LANE, chosen);
        if (chosen) {
            const int index = places[i];
            held[index] = correction.send(held[index], index, place + lanes_before(all, lane), row, payload, bad);
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

// What all rows have in common.
struct Launch {
    float* memory;
    u8* payload;
    const Row* rows;
    const int* firsts;  // number of a row's first part
    const u32* masks;
    int* guesses;
    float scale;
};

template <int WARPS>
static __device__ __forceinline__ void send_row(const Launch& launch, int number, const Momentum& correction) {
    __shared__ int words[2 * WARPS];
    __shared__ __align__(16) Listed<WARPS> lists[TEAM / WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    RowTeam<WARPS> team = {words, 0, WARPS > 1 ? warp : 0};
    Listed<WARPS>& list = lists[WARPS > 1 ? 0 : warp];
    const Row row = launch.rows[number];
    const int guess = __float_as_int(__int_as_float(launch.guesses[number]) * launch.scale);
    const u32* masks = launch.masks + (i64)32 * launch.firsts[number] + lane;
    float* held = launch.memory + row.memory;
    // As `part_length` of rows.py.
    const int parts = (row.length + MOST_ELEMENTS - 1) / MOST_ELEMENTS, size = ((row.length + parts - 1) / parts + 3) / 4 * 4;
    const int each = (parts + WARPS - 1) / WARPS, begin = min(team.warp * each, parts), end = min(begin + each, parts);
    int mine = 0;
    for (int part = begin; part < end; part += BATCH) {
        u32 reaching[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) reaching[i] = part + i < end ? masks[32 * (part + i)] : 0;
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (part + i < end) mine = append(reaching[i], (part + i) * size, list.places[team.warp], mine);
    }
    int listed, next;
    bool bad = false;
    const int before = team.before_all(mine <= ROOM ? mine : WARPS * ROOM + 1, listed);
    if (WARPS == 1) __syncwarp();
    if (listed >= row.keep && listed <= WARPS * ROOM) {
        next = guess + (__float_as_int((float)listed) - __float_as_int((float)row.aim)) / FOLLOWED;
        send_listed(list, listed, mine, before, row, team, held, launch.payload, correction, bad);
    } else {
        const int pattern = send_searched(
            row, guess, min(begin * size, row.length), min(end * size, row.length), team, held, launch.payload, correction, bad);
        next = pattern ? pattern - (__float_as_int((float)row.aim) - __float_as_int((float)row.keep)) / POWER : 0;
    }
    if (team.warp == 0 && lane == 0) launch.guesses[number] = max(next, 0);
    report(false, bad, row.slot, launch.payload);
}

// The first `long_rows` rows have a block each, the others a warp.
extern "C" __global__ __launch_bounds__(32 * TEAM, SENDING_AT_ONCE) void rows_send(
    float* memory, u8* payload, const Row* rows, const int* firsts, const u32* masks, int* guesses, const float* ratio,
    int long_rows, int count MOMENTUM_PARAMETERS) {
    const Momentum correction = MOMENTUM_OF_GROUP;
    const Launch launch = {memory, payload, rows, firsts, masks, guesses, *ratio};
    const int block = (int)blockIdx.x, number = long_rows + (block - long_rows) * TEAM + (int)threadIdx.x / 32;
    if (block < long_rows)
        send_row<TEAM>(launch, block, correction);
    else if (number < count)
        send_row<1>(launch, number, correction);
}
