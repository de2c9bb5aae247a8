// The candidates of a column: from bits to a list, and the choice among them.

#include "row.cuh"
#include "search.cuh"

static_assert(GROUP * sizeof(u32) == 32, "words of a group of columns fill the unit in which memory is read");
static_assert(WORD_ROWS == 32, "a bit per row");
// A warp lists WARP_LIST candidates, a block GROUP times as many.
#define BLOCK_LIST (GROUP * WARP_LIST)

// -- candidates -------------------------------------------------------------------------------------------------------

// In shared memory.
struct Candidates {
    int* places;    // of each candidate in its column, ascending
    float* values;  // of the chosen ones
    u16* chosen;    // their numbers in `places`
};

// Words of a column that a warp reads at once, 32 neighbours at a time. `starts` is where the bits of each go in the list.
template <int WORDS>
struct Bits {
    u32 some[WORDS];
    int starts[WORDS];

    __device__ __forceinline__ void load(const u32* words, int begin, int end) {
        const int lane = threadIdx.x & 31;
        // The last word first. A load of the first would be common to all sizes, and the compiler would wait for it before the
        // branch on the size.
#pragma unroll
        for (int i = WORDS - 1; i >= 0; --i) some[i] = words[(i64)min(begin + 32 * i + lane, end - 1) * GROUP];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) some[i] = begin + 32 * i + lane < end ? some[i] : 0;
    }

    __device__ __forceinline__ int count() const {
        int mine = 0;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) mine += __popc(some[i]);
        return warp_sum(mine);
    }

    // Find all starts, the first being `next`; returns the end. The counts of two words are added up in one number.
    __device__ __forceinline__ int place(int next) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) {
            const int both = __popc(some[i]) | __popc(some[i + 1]) << 16;
            const int upto = sum_upto(both, lane), total = __shfl_sync(EVERY_LANE, upto, 31);
            starts[i] = next + ((upto - both) & 0xffff);
            next += total & 0xffff;
            starts[i + 1] = next + ((upto - both) >> 16);
            next += total >> 16;
        }
        return next;
    }

    __device__ __forceinline__ void list(int begin, int* places) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int first = (begin + 32 * i + lane) * WORD_ROWS;
            int place = starts[i];
#pragma unroll 1
            for (u32 rest = some[i]; rest; rest &= rest - 1) places[place++] = first + __ffs(rest) - 1;
        }
    }
};

template <int WORDS>
static __device__ __forceinline__ int list_alone(const u32* words, int count, int keep, int* places) {
    Bits<WORDS> bits;
    bits.load(words, 0, count);
    const int listed = bits.place(0);
    if (listed >= keep && listed <= WARP_LIST) bits.list(0, places);
    return listed;
}

// How many bits of a column are set. `places` gets their numbers, unless these are too few or too many.
template <int WARPS>
static __device__ __forceinline__ int list_candidates(const u32* words, const Row& row, WarpGroup<WARPS>& group, int* places) {
    const int count = (row.length + WORD_ROWS - 1) / WORD_ROWS;
    int listed;
    if constexpr (WARPS == 1) {
        listed = count <= 64 ? list_alone<2>(words, count, row.keep, places) : list_alone<LANE_WORDS>(words, count, row.keep, places);
    } else {
        constexpr int WORDS = 4;
        const int part = (count + 32 * WARPS - 1) / (32 * WARPS) * 32, first = group.warp * part, end = min(first + part, count);
        Bits<WORDS> bits;
        int mine = 0;
        for (int begin = first; begin < end; begin += 32 * WORDS) {
            bits.load(words, begin, end);
            mine += bits.count();
        }
        int next = group.before(mine, listed);
        if (listed < row.keep || listed > WARPS * WARP_LIST) return listed;
        for (int begin = first; begin < end; begin += 32 * WORDS) {
            bits.load(words, begin, end);
            next = bits.place(next);
            bits.list(begin, places);
        }
    }
    group.meet();
    return listed;
}

// -- the choice -------------------------------------------------------------------------------------------------------

// Choose among the candidates, EACH of which a lane has in registers; `weigh(c, i)` is what is compared of the column's
// i-th element. The list gets the chosen ones. Returns the pattern of the
// smallest.
template <int EACH, int WARPS, class Weigh>
static __device__ __forceinline__ int choose(
    const float* held, const Weigh& weigh, const Row& row, int listed, float cut, int guess, WarpGroup<WARPS>& group,
    const Candidates& list) {
    // Warp w owns the w-th part, so that order is settled inside a warp and by one prefix over the warps.
    const int part = WARPS == 1 ? listed : (listed + 32 * WARPS - 1) / (32 * WARPS) * 32, begin = group.warp * part;
    const int first = begin + (threadIdx.x & 31), end = min(begin + part, listed);
    float c[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int number = list.places[min(first + 32 * i, listed - 1)];
        c[i] = weigh(held[(i64)number * row.stride], number);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) c[i] = first + 32 * i < end ? c[i] : NO_ELEMENT;
    const auto count = [&](int pattern) {
        const float threshold = __int_as_float(pattern);
        int reached = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if constexpr (EACH <= 2)
                reached += __popc(__ballot_sync(EVERY_LANE, fabsf(c[i]) >= threshold));
            else
                reached += fabsf(c[i]) >= threshold;
        return group.sum(EACH <= 2 ? reached : warp_sum(reached));
    };
    const auto largest = [&] {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) most = fmaxf(most, fabsf(c[i]));
        return group.largest(warp_max(__float_as_int(most)));
    };
    Threshold found = {cut > 0.0f ? __float_as_int(cut) : 0, listed, 0};
    found.search<OCTAVE / 128, 8>(row.keep, guess, count, largest);
    const float threshold = __int_as_float(found.low);
    Chooser chooser = {found.missing(row.keep)};
    if constexpr (WARPS > 1) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) chooser.see(fabsf(c[i]) > threshold, fabsf(c[i]) == threshold);
        chooser.begin(group);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int place;
        if (chooser.choose(fabsf(c[i]) > threshold, fabsf(c[i]) == threshold, place))
            list.values[place] = c[i], list.chosen[place] = (u16)(first + 32 * i);
    }
    group.meet();
    return found.low;
}

template <int WARPS, class Weigh>
static __device__ __forceinline__ int choose_candidates(
    const float* held, const Weigh& weigh, const Row& row, int listed, float cut, int guess, WarpGroup<WARPS>& group,
    const Candidates& list) {
    if (WARPS == 1 && listed <= 64) return choose<2>(held, weigh, row, listed, cut, guess, group, list);
    if (listed <= 128 * WARPS) return choose<4>(held, weigh, row, listed, cut, guess, group, list);
    return choose<16>(held, weigh, row, listed, cut, guess, group, list);
}

// -- all elements -----------------------------------------------------------------------------------------------------

struct Elements {
    const float* values;
    i64 step;

    __device__ __forceinline__ float at(int i) const { return values[i * step]; }
};

// What is compared of a column's elements, in shared memory, if that fits the `room` of 2 x BLOCK_LIST; otherwise the column as it is.
template <class Weigh>
static __device__ __forceinline__ Elements fetch_whole(
    const float* held, const Weigh& weigh, const Row& row, const WarpGroup<GROUP>& group, float* room) {
    if (row.length > 2 * BLOCK_LIST) return {held, row.stride};
    for (int start = group.member(); start < row.length; start += BATCH * 32 * GROUP) {
        float some[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int number = min(start + i * 32 * GROUP, row.length - 1);
            some[i] = weigh(held[(i64)number * row.stride], number);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (start + i * 32 * GROUP < row.length) room[start + i * 32 * GROUP] = some[i];
    }
    group.meet();
    return {room, 1};
}
