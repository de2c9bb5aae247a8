// Contiguous rows of which few elements are sent: residual add, exact top-k, packing and residual write in one pass over memory.
//
//  1. c = residual + gradient (or as momentum.cuh says) goes to memory. On the way the candidates of the row are listed in ascending
//     order of index. Candidates are all elements that reach a cut. The cut is that of the last step, moved so that somewhat more
//     than `keep` magnitudes are expected to reach it.
//  2. Every candidate counts those that are larger. It is sent if these are fewer than `keep`, ties to the lowest index. What is
//     left of it goes to memory.
//
// What is sent does not depend on the cut, because every element that reaches it is a candidate. If too few or too many do, as in
// the first step, the row is searched for its threshold in memory.
//
// Nothing of a row stays in registers, so one kernel does rows of all lengths. A long row has all STREAM_WARPS warps of a block, a
// short row has one. Warp w owns the w-th part of the row: order is settled inside a warp and by one prefix over the warps. While a
// row is chosen from, nothing is read from memory: a read would queue behind those of other rows.

#include "momentum.cuh"
#include "search.cuh"

#define BLOCK_THREADS (32 * STREAM_WARPS)
// Fours of neighbours that a lane loads at once. With momentum each is three loads, in a scale four.
#define MOST_FOURS (MOMENTUM ? 2 : 4)
#define BLOCKS_AT_ONCE (MOMENTUM ? 6 : 8)
static_assert(WARP_ROOM < 256, "places in a warp's list are bytes");
// The number of candidates falls with about the sixth power of the cut. The cut follows a tenth of how far the number was off, both
// as exponents of two: part of that is chance.
#define POWER 6
#define FOLLOWED 10

// What a warp has in shared memory.
struct WarpShared {
    float4 elements[MOST_FOURS][32];  // just compensated, by four and lane: registers cannot be looked up by number
    float values[WARP_ROOM];          // of its candidates
    u16 places[WARP_ROOM];
    u16 larger[WARP_ROOM];  // how many of the row are larger
    Row row;
};

// What a block has in shared memory.
struct Shared {
    WarpShared own[STREAM_WARPS];
    // Of a row's candidates. A long row has all places, one warp's candidates after the other's; a short row has its warp's part.
    float magnitudes[STREAM_WARPS * (WARP_ROOM + 4)];
    int words[2 * STREAM_WARPS];
    u32 told;  // as `report` wants it
};

// -- 1 ----------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ float4 to_floats(const Quad& raw) {
    return make_float4(to_float(raw.x), to_float(raw.y), to_float(raw.z), to_float(raw.w));
}

// What is known of four neighbours. QUADS: they are aligned, and all before the end or none. WHOLE: all before the end too.
enum Fours { WHOLE, QUADS, SINGLE };

// There is no branch, so that all loads leave together. Behind the end the last ones are read again.
template <Fours KNOWN, class Four, class T>
static __device__ __forceinline__ Four get_four(const T* from, int at, int end) {
    if constexpr (KNOWN == SINGLE) {
        const int last = end - 1;
        return Four{from[min(at, last)], from[min(at + 1, last)], from[min(at + 2, last)], from[min(at + 3, last)]};
    } else {
        return *reinterpret_cast<const Four*>(from + (KNOWN == WHOLE ? at : min(at, end - 4)));
    }
}

template <Fours KNOWN>
static __device__ __forceinline__ void put_four(float* to, int at, int end, const float4& x) {
    if constexpr (KNOWN == SINGLE) {
        if (at < end) to[at] = x.x;
        if (at + 1 < end) to[at + 1] = x.y;
        if (at + 2 < end) to[at + 2] = x.z;
        if (at + 3 < end) to[at + 3] = x.w;
    } else {
        if (KNOWN == WHOLE || at < end) *reinterpret_cast<float4*>(to + at) = x;
    }
}

// A bit for each of them that reaches the cut and is before `end`.
template <Fours KNOWN>
static __device__ __forceinline__ u32 reach(const float4& x, float cut, int at, int end) {
    u32 bits = 0;
    if (fabsf(x.x) >= cut) bits |= 1;
    if (fabsf(x.y) >= cut) bits |= 2;
    if (fabsf(x.z) >= cut) bits |= 4;
    if (fabsf(x.w) >= cut) bits |= 8;
    if (KNOWN == WHOLE) return bits;
    if (KNOWN == QUADS) return at < end ? bits : 0;
    return bits & ((1u << min(max(end - at, 0), 4)) - 1);
}

static __device__ __forceinline__ void drop_infinite(Quad& raw, bool& bad) {
    const auto look = [&](Gradient& gradient) {
        if (is_finite(to_float(gradient))) return;
        gradient = 0;
        bad = true;
    };
    look(raw.x), look(raw.y), look(raw.z), look(raw.w);
}

// How many bits are set in each four of a lane's 32. `even` has a byte for each four of an even number, `odd` for the others.
static __device__ __forceinline__ void count_fours(u32 bits, u32& even, u32& odd) {
    bits -= (bits >> 1) & 0x55555555;
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333);
    even = bits & 0x0f0f0f0f;
    odd = (bits >> 4) & 0x0f0f0f0f;
}

// Append the elements whose bits are set to a list that has `listed` elements. Bit 4 q + i is that of element
// `first` + (32 q + lane) x 4 + i. Returns how many the list would have; if these do not fit, it stays as it is.
static __device__ __forceinline__ int append(u32 bits, int first, WarpShared& own, int listed) {
    const int lane = threadIdx.x & 31, more = warp_sum(__popc(bits));
    if (more == 0 || listed + more > WARP_ROOM) return listed + more;
    u32 even, odd;
    count_fours(bits, even, odd);
    const u32 even_upto = (u32)sum_upto((int)even, lane), odd_upto = (u32)sum_upto((int)odd, lane);
    const u32 all_even = (u32)__shfl_sync(EVERY_LANE, (int)even_upto, 31);
    const u32 all_odd = (u32)__shfl_sync(EVERY_LANE, (int)odd_upto, 31);
    // A byte for each four: how many come before it. None overflows, because the list is that short.
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

// The part of a row that a warp has.
struct RowPart {
    const Gradient* gradient;
    const float* before;  // the residual; may be `held` itself
    float* held;
    i64 memory;  // where the row begins in it
    int begin, end;
    float cut, scale;
};

// Compensate COUNT x 128 elements from `first` on. Returns the bits of those that reach the cut, as `append` wants them. A tensor
// of an odd size moves all tensors behind it in the bucket, so alignment may differ there.
template <int COUNT, Fours HELD, Fours BUCKET>
static __device__ __forceinline__ u32 compensate_some(
    const RowPart& row, int first, WarpShared& own, const Momentum& correction, int& any, bool& bad) {
    const int lane = threadIdx.x & 31;
    float4 c[COUNT], last[COUNT], moments[COUNT];
    Quad raw[COUNT];
#pragma unroll
    for (int q = 0; q < COUNT; ++q) {
        const int at = first + (32 * q + lane) * 4;
        c[q] = get_four<HELD, float4>(row.before, at, row.end);
        raw[q] = get_four<BUCKET, Quad>(row.gradient, at, row.end);
#if UPDATED
        last[q] = get_four<HELD, float4>(correction.before + row.memory, at, row.end);
#endif
#if SCALED
        moments[q] = get_four<HELD, float4>(correction.second + row.memory, at, row.end);
#endif
    }
    // Stays 0 if all are finite.
    float none = 0.0f;
#pragma unroll
    for (int q = 0; q < COUNT; ++q) {
        const float4 g = to_floats(raw[q]);
        any |= (__float_as_int(g.x) | __float_as_int(g.y) | __float_as_int(g.z) | __float_as_int(g.w)) & 0x7fffffff;
        none = fmaf(g.x, 0.0f, fmaf(g.y, 0.0f, fmaf(g.z, 0.0f, fmaf(g.w, 0.0f, none))));
    }
    if (none != 0.0f) {
#pragma unroll
        for (int q = 0; q < COUNT; ++q) drop_infinite(raw[q], bad);
    }
    u32 reaching = 0;
#pragma unroll
    for (int q = 0; q < COUNT; ++q) {
        const int at = first + (32 * q + lane) * 4;
        const float4 g = to_floats(raw[q]);
        c[q].x = correction.add(g.x, c[q].x, row.scale, last[q].x);
        c[q].y = correction.add(g.y, c[q].y, row.scale, last[q].y);
        c[q].z = correction.add(g.z, c[q].z, row.scale, last[q].z);
        c[q].w = correction.add(g.w, c[q].w, row.scale, last[q].w);
        put_four<HELD>(row.held, at, row.end, c[q]);
#if SCALED
        c[q] = correction.weigh_quad(c[q], moments[q]);
#endif
        own.elements[q][lane] = c[q];
#if UPDATED
        put_four<HELD>(correction.u + row.memory, at, row.end, last[q]);
#endif
        reaching |= reach<HELD>(c[q], row.cut, at, row.end) << (4 * q);
    }
    return reaching;
}

// The whole part. Returns how many reach the cut, and lists them if they fit.
template <int COUNT, Fours HELD, Fours BUCKET>
static __device__ __forceinline__ int stream(
    const RowPart& row, WarpShared& own, const Momentum& correction, bool& had, bool& bad) {
    int listed = 0, any = 0, first = row.begin;
    if (HELD == QUADS && BUCKET == QUADS) {
        for (; first + 128 * COUNT <= row.end; first += 128 * COUNT)
            listed = append(compensate_some<COUNT, WHOLE, WHOLE>(row, first, own, correction, any, bad), first, own, listed);
    }
    for (; first < row.end; first += 128 * COUNT)
        listed = append(compensate_some<COUNT, HELD, BUCKET>(row, first, own, correction, any, bad), first, own, listed);
    had |= any != 0;
    return listed;
}

// -- 2 ----------------------------------------------------------------------------------------------------------------

// Send from the `listed` candidates of a row. This warp has `mine` of them, the warps before it have `before`.
template <int WARPS>
static __device__ __forceinline__ void send_listed(
    WarpShared& own, float* magnitudes, int listed, int mine, int before, const Row& row, WarpGroup<WARPS>& group, float* held,
    u8* payload, const Momentum& correction, bool& bad) {
    const int lane = threadIdx.x & 31, keep = row.keep;
    for (int i = lane; i < mine; i += 32) magnitudes[before + i] = fabsf(own.values[i]);
    // Four are compared at a time; those behind the last one are larger than none.
    if (32 * group.warp + lane < 4) magnitudes[listed + lane] = 0.0f;
    group.meet();
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
    int total, place = group.before(sent, total), last = listed, earlier = 0;
    if (total > keep) {
        // Too many equal the smallest that is sent. Exactly `last` are larger than each of these.
        last = group.largest(warp_max(most));
        int tied = 0, all;
        for (int i = lane; i < mine; i += 32) tied += own.larger[i] == last;
        tied = warp_sum(tied);
        earlier = group.before(tied, all);
        place = group.before(sent - tied + min(max(keep - last - earlier, 0), tied), total);
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

template <int WARPS>
static __device__ __forceinline__ void encode_row(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Row* rows, int number, int* guesses,
    float scale, Shared& shared, const Momentum& correction) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    WarpGroup<WARPS> group = {shared.words, 0, WARPS > 1 ? warp : 0};
    WarpShared& own = shared.own[warp];
    const int words = sizeof(Row) / sizeof(int);
    if (lane < words) reinterpret_cast<int*>(&own.row)[lane] = reinterpret_cast<const int*>(rows + number)[lane];
    const int guess = __float_as_int(__int_as_float(guesses[number]) * scale);
    __syncwarp();
    const Row& row = own.row;
    const int length = row.length, part = (length + 4 * WARPS - 1) / (4 * WARPS) * 4, begin = min(group.warp * part, length);
    // Before anything is known of a row, nothing is a candidate.
    const float cut = __int_as_float(guess > 0 ? guess : INFINITE);
    float* held = memory + row.memory;
    const RowPart stretch = {
        bucket + row.gradient, before + row.memory, held, row.memory, begin, min(begin + part, length), cut, scale};
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
    const int earlier = group.before(mine <= WARP_ROOM ? mine : WARPS * WARP_ROOM + 1, listed);
    if (WARPS == 1) __syncwarp();
    if (listed >= row.keep && listed <= WARPS * WARP_ROOM) {
        next = guess + (__float_as_int((float)listed) - __float_as_int((float)row.aim)) / FOLLOWED;
        float* magnitudes = shared.magnitudes + (WARPS > 1 ? 0 : warp * (WARP_ROOM + 4));
        send_listed(own, magnitudes, listed, mine, earlier, row, group, held, payload, correction, bad);
    } else {
        const int pattern = choose_whole(
            row.length, row.keep, guess, group, [&](int i) { return correction.weigh_held(held[i], row.memory + i); },
            [&](float c, int i, int place) { held[i] = correction.send(c, i, place, row, payload, bad); });
        next = pattern ? pattern - (__float_as_int((float)row.aim) - __float_as_int((float)row.keep)) / POWER : 0;
    }
    if (group.warp == 0 && lane == 0) guesses[number] = max(next, 0);
    report(had, bad, row.slot, &shared.told, payload);
}

// The first `long_rows` rows have a block each, the others a warp.
extern "C" __global__ __launch_bounds__(BLOCK_THREADS, BLOCKS_AT_ONCE) void stream_rows(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const Row* rows, int* guesses, const float* ratio,
    int long_rows, int count MOMENTUM_PARAMETERS) {
    __shared__ __align__(16) Shared shared;
    if (threadIdx.x == 0) shared.told = 0;
    __syncthreads();
    const Momentum correction = MOMENTUM_OF_GROUP;
    const int block = (int)blockIdx.x, number = long_rows + (block - long_rows) * STREAM_WARPS + (int)threadIdx.x / 32;
    if (block < long_rows)
        encode_row<STREAM_WARPS>(bucket, before, memory, payload, rows, block, guesses, *ratio, shared, correction);
    else if (number < count)
        encode_row<1>(bucket, before, memory, payload, rows, number, guesses, *ratio, shared, correction);
}
