// What the kernels of encode_giants.cu and decide_giants.cu hand to each other.
//
// The ways of a row:
//  READY  The usual one: memory is passed over once.
//  AGAIN  Too many candidates for the list, as in the first call. The histogram has a better cut, `decide` collects again.
//  FEW    Fewer elements than are wanted are not 0. The first zeros are sent too; `send` finds them in memory.
//  SLOW   Too few candidates, or too many that are about equal: one block searches memory for the pattern.

// Loads of a list that are under way at once.
#define LIST_BATCH 4

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
    int histogram;  // the first of its histograms ...
    int copies;     // ... of which each chunk has one, so that fewer queue at a bin: 1, 2, 4 ...

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
