// What encode_multi_block_rows.cu and decide_multi_block_rows.cu hand to each other.
//
// A row goes one of these ways:
//  READY  The usual one: one pass over memory.
//  AGAIN  Too many candidates for the list, as in the first call. The histogram tells a better cut, and `decide` collects again.
//  FEW    Fewer elements than are wanted are not 0. The first zeros are sent too; `send` finds them in memory.
//  SLOW   Too few candidates, or too many that are about equal. One block searches memory.

#include "chunks.cuh"

#define READY 0
#define AGAIN 1
#define FEW 2
#define SLOW 3

// Chunks of a row that one block decides about.
struct ChunkGroup {
    int row;
    int first;  // chunk
};
static_assert(LAYOUT_OF_ChunkGroup, "multi_block_rows.py has another ChunkGroup");
static_assert(GROUP_CHUNKS == BINS / 32, "a warp for each chunk of a group");

struct RowState {
    // Set by the host.
    int first;  // chunk
    int chunks;
    int groups;
    int list;  // where its candidates begin
    int room;  // how many fit
    int edge;  // where its edges begin
    int edge_room;
    int histogram;  // the first of its histograms
    int copies;     // how many it has, a power of two: chunks that share one queue at its bins

    // Kept by the kernels; counts are 0 between calls.
    int cut;  // pattern of the smallest candidate of the next call. Up to 1, everything that is not 0 is one
    u32 listed;
    u32 relisted;  // when collecting again
    u32 edges;
    u32 done;  // groups
    int low;   // pattern of the keep-th magnitude
    int way;
};
static_assert(LAYOUT_OF_RowState, "multi_block_rows.py has another RowState");

// A candidate in the bin of the keep-th magnitude.
struct Edge {
    int bits;
    int chunk;
};
static_assert(LAYOUT_OF_Edge, "multi_block_rows.py has another Edge");

// -- the histogram ----------------------------------------------------------------------------------------------------

#define FINE_BINS 768
#define FINE_SHIFT 13
#define COARSE_SHIFT 20
// 2^-100. BINS bins of an eighth of an octave reach from here to infinity.
#define COLD_ORIGIN (27 << 23)

// What the bins of a histogram stand for. The first ones, from the cut on, are 1/1024 octave wide, so that few magnitudes are in
// one. The others are 1/8 octave wide, for what has grown suddenly. Without a cut all are.
struct Window {
    int cut, origin, fine;

    __device__ __forceinline__ int bin(int bits) const {
        const int past = max(bits - origin, 0), beyond = past - (fine << FINE_SHIFT);
        return beyond < 0 ? past >> FINE_SHIFT : min(fine + (beyond >> COARSE_SHIFT), BINS - 1);
    }

    // The smallest pattern of a bin. Unsigned, because the last bins may begin behind the last pattern.
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
