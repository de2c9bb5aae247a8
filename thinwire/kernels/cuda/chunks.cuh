// Rows cut into chunks, a block or a warp for each: what the kernels that collect, decide and send hand to each other.

#include "row.cuh"

// All that a block has to know before it can load.
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
static_assert(LAYOUT_OF_Chunk, "chunks.py has another Chunk");

// The candidates of a chunk.
struct Section {
    int start;  // in the row's list
    int count;
    int place;  // of the first it sends; before that, how many exceed the pattern of the smallest that is sent
    int ties;   // how many that equal it the chunk sends; before that, how many it has
};
static_assert(LAYOUT_OF_Section, "chunks.py has another Section");

// The candidates of all rows.
struct Lists {
    float* values;
    u16* places;  // in the chunk
};
