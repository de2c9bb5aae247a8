// Exact top-k of many rows in one launch: the chosen indices of every row in ascending order, ties to the lowest, and their values.
//
// A row lies in the registers of one warp or of all warps of a block, as patterns of magnitudes: patterns are ordered as magnitudes
// are, and what is not a number comes after infinity. Reference: row_topk_reference in thinwire/kernels/topk.py.

#include "search.cuh"

struct SelectedRow {
    i64 offset;  // of its first element
    i64 place;   // of its first index
    int length;
    int stride;
    int keep;
    int unused;
};
static_assert(LAYOUT_OF_SelectedRow, "row_select.py has another SelectedRow");

// EACH elements to a lane.
template <int WARPS, int EACH>
static __device__ __forceinline__ void select_row(
    const float* from, const SelectedRow& row, i64* indices, float* values, WarpGroup<WARPS> group) {
    const float* elements = from + row.offset;
    // Warp w owns the w-th part, so that order is settled inside a warp and by one prefix over the warps.
    const int first = group.warp * 32 * EACH + (threadIdx.x & 31);
    int bits[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        bits[i] = magnitude(elements[(i64)min(first + 32 * i, row.length - 1) * row.stride]);
#pragma unroll
    for (int i = 0; i < EACH; ++i) bits[i] = first + 32 * i < row.length ? min(bits[i], INFINITE + 1) : -1;
    const auto count = [&](int pattern) {
        int reached = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) reached += bits[i] >= pattern;
        return group.sum(warp_sum(reached));
    };
    const auto largest = [&] {
        int most = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) most = max(most, bits[i]);
        return group.largest(warp_max(most));
    };
    Threshold found = {0, row.length, 0};
    found.search<OCTAVE / 128, 8>(row.keep, 0, count, largest);
    Chooser chooser = {found.missing(row.keep)};
    if constexpr (WARPS > 1) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) chooser.see(bits[i] > found.low, bits[i] == found.low);
        chooser.begin(group);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int place;
        if (!chooser.choose(bits[i] > found.low, bits[i] == found.low, place)) continue;
        const int index = first + 32 * i;
        indices[row.place + place] = index;
        values[row.place + place] = elements[(i64)index * row.stride];
    }
}

// The first `long_rows` rows have a block each, the others a warp. Neighbouring warps have neighbouring rows, which read the same
// memory where rows are strided.
extern "C" __global__ __launch_bounds__(32 * SELECT_WARPS) void select_rows(
    const float* from, const SelectedRow* rows, i64* indices, float* values, int long_rows, int count) {
    __shared__ int words[2 * SELECT_WARPS];
    const int block = (int)blockIdx.x, warp = threadIdx.x / 32, number = long_rows + (block - long_rows) * SELECT_WARPS + warp;
    if (block < long_rows) {
        const SelectedRow row = rows[block];
        select_row<SELECT_WARPS, LANE_ELEMENTS>(from, row, indices, values, {words, 0, warp});
        return;
    }
    if (number >= count) return;
    const SelectedRow row = rows[number];
    if (row.length <= 32 * 4)
        select_row<1, 4>(from, row, indices, values, {words, 0, 0});
    else
        select_row<1, LANE_ELEMENTS>(from, row, indices, values, {words, 0, 0});
}
