// A slot as one row, cut into chunks, on its way through the kernels of encode_threshold.cu.

#define READY 0
#define AGAIN 1
#define SLOW 2

struct SlotState {
    int first;  // chunk; set by the host, as are the three below
    int chunks;
    int list;    // where its candidates begin
    int room;    // how many fit
    u32 listed;  // candidates, also those that did not fit
    int way;     // one of the three above
    int wanted;
    int low;  // pattern of the smallest that is sent, or EVERY; while going round again, of the threshold
};
static_assert(LAYOUT_OF_SlotState, "fused_threshold.py has another SlotState");
