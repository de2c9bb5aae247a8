// Strided rows, which are neighbours in memory: as stream_rows.cu, with one pass over memory in two kernels.
//
//  1. columns_collect   c = residual + gradient (or as momentum.cuh says) goes to memory. Every element that reaches its column's cut
//                       sets a bit. The cut lies somewhat below the threshold of the last step. A thread has one or four
//                       neighbouring columns, and of each the 32 elements whose bits are one word.
//  2. columns_send      The elements whose bits are set are the column's candidates. The threshold is found among them. Entries are
//                       sent in ascending order of index, ties to the lowest. The next cut is computed.
//
// What is sent does not depend on the cut, because every element that reaches it is a candidate: with `keep` of them the others are
// not wanted. A warp has a column. If a column has too few candidates, or more than a warp lists, its block takes it, and looks at
// all elements if need be. Cuts are 0 at first: all elements are candidates.
//
// A warp that sends issues some 500 instructions, and waits for these, not for memory. So candidates are in registers while the
// threshold is looked for, logarithms are those of the hardware, and one table says all that a warp has to know.

#include "momentum.cuh"
#include "candidates.cuh"

#define SEND_THREADS (32 * GROUP)
// Blocks on a multiprocessor: forty warps, because each waits for memory three times. Weights take registers for a fifth of them.
#define SENDING_AT_ONCE (SCALED ? 4 : 5)
// Elements of a column that are loaded at once. With momentum each is three loads. A thread of one column has fewer than one of
// four.
#define ROWS_AT_ONCE(width) ((MOMENTUM ? BATCH / 2 : BATCH) * ((width) == 1 ? 2 : 1))
// The largest growth of a threshold that is expected to go on, in octaves per step.
#define MOST_GROWN 0.14f
// Candidates aimed at.
#define AIM(keep) ((float)CANDIDATES_PER_ENTRY * (float)(keep) + (float)SPARE_CANDIDATES)

// -- 1 ----------------------------------------------------------------------------------------------------------------

// What a block of columns_collect takes: columns of one slot. `stride` of them are neighbours, and the next `stride` lie behind the
// last element of these.
struct ColumnBlock {
    i64 gradient;  // of the first column, as in Row
    i64 memory;
    i64 masks;     // where the slot's words begin
    int length;
    int stride;
    int columns;
    int slot;
    int first;     // number of the first column's row
    int start;     // items before those of this block. An item is what a thread takes: one word of its columns
    int width;     // columns of an item
    int unused;
};
static_assert(LAYOUT_OF_ColumnBlock, "columns.py has another ColumnBlock");

template <class T> struct FourOf;
template <> struct FourOf<float> { typedef float4 type; };
template <> struct FourOf<u16> { typedef ushort4 type; };
template <> struct FourOf<u32> { typedef uint4 type; };

// ONCE: it stays in no cache, which has room for what is read again.
template <bool ONCE, int WIDTH, class T>
static __device__ __forceinline__ void read(const T* from, T (&x)[WIDTH]) {
    if constexpr (WIDTH == 4) {
        const auto* place = reinterpret_cast<const typename FourOf<T>::type*>(from);
        const auto four = ONCE ? __ldcs(place) : *place;
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
        x[0] = ONCE ? __ldcs(from) : *from;
    }
}

// Spelled out, because the compiler makes four stores of an assignment.
template <int WIDTH, class T>
static __device__ __forceinline__ void write(T* to, const T (&x)[WIDTH]) {
    typedef typename FourOf<T>::type Four;
    if constexpr (WIDTH == 4)
        __stcg(reinterpret_cast<Four*>(to), Four{x[0], x[1], x[2], x[3]});
    else
        *to = x[0];
}

template <int WIDTH>
static __device__ __forceinline__ void collect(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const ColumnBlock& mine, const float* cuts,
    u32* masks, float scale, u32* told, const Momentum& correction) {
    constexpr int ROWS = ROWS_AT_ONCE(WIDTH);
    const int across = mine.columns / WIDTH, words = (mine.length + WORD_ROWS - 1) / WORD_ROWS;
    const int wanted = mine.start + (int)threadIdx.x, item = min(wanted, across * words - 1);
    const int column = item % across * WIDTH, word = item / across;
    const i64 strip = column / mine.stride;
    const i64 place = (strip * mine.length + (i64)word * WORD_ROWS) * mine.stride + column % mine.stride;
    // No element behind the end is read. A thread without an item reads the last one and writes nothing.
    const int last = min(WORD_ROWS, mine.length - word * WORD_ROWS) - 1, end = wanted == item ? last : -1;
    const Gradient* gradient = bucket + mine.gradient + place;
    const float* old = before + mine.memory + place;
    float* held = memory + mine.memory + place;
    Gradient fresh[ROWS][WIDTH];
    float c[ROWS][WIDTH], speed[ROWS][WIDTH], moments[ROWS][WIDTH];
    const auto load = [&](int start) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            // No branch, so that all loads leave together.
            const i64 at = (i64)min(start + i, last) * mine.stride;
            read<true>(gradient + at, fresh[i]);
            read<false>(old + at, c[i]);
            correction.get_some(mine.memory + place + at, speed[i]);
            correction.get_some_moments(mine.memory + place + at, moments[i]);
        }
    };
    load(0);
    float cut[WIDTH];
    u32 reaching[WIDTH];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) cut[w] = cuts[mine.first + column + w] * scale, reaching[w] = 0;
    bool had = false, bad = false;
    for (int start = 0;;) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                c[i][w] = correction.compensate(fresh[i][w], c[i][w], scale, speed[i][w], had, bad);
                const float weight = correction.weigh(c[i][w], moments[i][w]);
                reaching[w] |= (u32)(start + i <= last && fabsf(weight) >= cut[w]) << (start + i);
            }
            if (start + i <= end) {
                const i64 at = (i64)(start + i) * mine.stride;
                write(held + at, c[i]);
                correction.put_some(mine.memory + place + at, speed[i]);
            }
        }
        start += ROWS;
        if (start > last) break;
        load(start);
    }
    if (end >= 0) write(masks + mine.masks + ((i64)(column / GROUP) * words + word) * GROUP + column % GROUP, reaching);
    report(had, bad, mine.slot, told, payload);
}

extern "C" __global__ __launch_bounds__(COLLECT_THREADS) void columns_collect(
    const Gradient* bucket, const float* before, float* memory, u8* payload, const ColumnBlock* blocks, const float* cuts,
    u32* masks, const float* ratio MOMENTUM_PARAMETERS) {
    __shared__ u32 told;
    if (threadIdx.x == 0) told = 0;
    __syncthreads();
    const ColumnBlock mine = blocks[blockIdx.x];
    const Momentum correction = MOMENTUM_OF_GROUP;
    if (mine.width == 4)
        collect<4>(bucket, before, memory, payload, mine, cuts, masks, *ratio, &told, correction);
    else
        collect<1>(bucket, before, memory, payload, mine, cuts, masks, *ratio, &told, correction);
}

// -- 2 ----------------------------------------------------------------------------------------------------------------

// What a warp of columns_send takes; nothing if `keep` is 0. The warps of a block have a column each, or all have the same one
// (`together`).
struct __align__(16) Column {
    Row row;
    i64 masks;    // its first word
    int number;   // of its guess and its cut
    int together;
};
static_assert(LAYOUT_OF_Column, "columns.py has another Column");
#define COLUMN_WORDS ((int)(sizeof(Column) / sizeof(int)))

// To shared memory: fields that are needed late take no registers until then.
static __device__ __forceinline__ void fetch_column(const Column* from, Column& to) {
    const int lane = threadIdx.x & 31;
    const int word = lane < COLUMN_WORDS ? reinterpret_cast<const int*>(from)[lane] : 0;
    if (lane < COLUMN_WORDS) reinterpret_cast<int*>(&to)[lane] = word;
    __syncwarp();
}

// The candidates of all warps. For whole columns, places and values together are one room for elements.
struct Sending {
    int places[BLOCK_LIST];
    float values[BLOCK_LIST];
    u16 chosen[BLOCK_LIST];
};

// What columns_send knows of all columns.
struct Columns {
    float* memory;
    u8* payload;
    const u32* masks;
    int* guesses;
    float* cuts;
    float scale;
};

// The cut that about as many as aimed at will reach. The count is taken to grow below the threshold as it did down to the last cut.
// The threshold has grown since `before`; half of that is expected to go on, if it is not much.
static __device__ __forceinline__ float next_cut(const Row& row, float threshold, float before, float cut, int listed) {
    const float aim = AIM(row.keep);
    if (aim >= (float)row.length) return 0.0f;
    const float here = log2_of(threshold), keep = log2_of((float)row.keep);
    float octaves = OCTAVES_PER_DOUBLING;
    if (listed > row.keep && cut > 0.0f && cut < threshold)
        octaves = ratio_of(here - log2_of(cut), log2_of((float)listed) - keep);
    octaves = fminf(fmaxf(octaves, 1.0f / 20.0f), 1.0f / 2.0f);
    const float grown = 0.5f * fminf(fmaxf(here - log2_of(before), 0.0f), MOST_GROWN);
    return exp2f(here + grown - (log2_of(aim) - keep) * octaves);
}

// What is known of a column that has been sent. Guesses and cuts of the next step are computed from it for all columns of a block
// at once.
struct Note {
    int listed;   // candidates, or one of the three below
    int pattern;  // of the threshold
    float before, cut;
};
#define NOTHING_TO_SEND (-2)
#define NOT_SENT (-1)
#define ALL_ELEMENTS 0

static __device__ __forceinline__ void note_next(const Columns& columns, const Column& column, const Note& note) {
    columns.guesses[column.number] = note.pattern;
    columns.cuts[column.number] = next_cut(column.row, __int_as_float(note.pattern), note.before, note.cut, note.listed);
}

// The chosen candidates to the payload.
template <int WARPS>
static __device__ __forceinline__ void send_chosen(
    const Row& row, const WarpGroup<WARPS>& group, const Candidates& list, float* memory, u8* payload, const Momentum& correction,
    bool& bad) {
    float* held = memory + row.memory;
#pragma unroll 1
    for (int e = group.member(); e < row.keep; e += 32 * WARPS) {
        const int index = list.places[list.chosen[e]];
        held[(i64)index * row.stride] = correction.send(list.values[e], index, e, row, payload, bad);
    }
}

// What selection compares of a column's elements.
static __device__ __forceinline__ auto weights_of(const Row& row, const Momentum& correction) {
    return [&](float c, int i) { return correction.weigh_held(c, row.memory + (i64)i * row.stride); };
}

// One column from its candidates. Not sent if these are too few, or more than the warps list.
template <int WARPS>
static __device__ __forceinline__ Note send_candidates(
    const Columns& columns, const Column& column, WarpGroup<WARPS>& group, const Candidates& list, const Momentum& correction,
    bool& bad) {
    const Row& row = column.row;
    // Loaded early and multiplied late: the loads of candidates should not wait for these.
    const float last_cut = columns.cuts[column.number], last = __int_as_float(columns.guesses[column.number]);
    const int listed = list_candidates(columns.masks + column.masks, row, group, list.places);
    if (listed < row.keep || listed > WARPS * WARP_LIST) return {NOT_SENT};
    const float cut = last_cut * columns.scale, before = last * columns.scale;
    const float* held = columns.memory + row.memory;
    const int pattern =
        choose_candidates(held, weights_of(row, correction), row, listed, cut, __float_as_int(before), group, list);
    send_chosen(row, group, list, columns.memory, columns.payload, correction, bad);
    return {listed, pattern, before, cut};
}

// One column from all its elements.
static __device__ __forceinline__ Note send_whole(
    const Columns& columns, const Column& column, WarpGroup<GROUP>& group, float* room, const Momentum& correction, bool& bad) {
    const Row& row = column.row;
    const float before = __int_as_float(columns.guesses[column.number]) * columns.scale;
    float* held = columns.memory + row.memory;
    const auto weigh = weights_of(row, correction);
    const Elements from = fetch_whole(held, weigh, row, group, room);
    const int pattern = choose_whole(
        row.length, row.keep, __float_as_int(before), group,
        [&](int i) { return SCALED && from.values == held ? weigh(from.at(i), i) : from.at(i); },
        [&](float c, int i, int place) {
            held[(i64)i * row.stride] = correction.send(c, i, place, row, columns.payload, bad);
        });
    return {ALL_ELEMENTS, pattern, before, 0.0f};
}

extern "C" __global__ __launch_bounds__(SEND_THREADS, SENDING_AT_ONCE) void columns_send(
    float* memory, u8* payload, const Column* table, const u32* masks, int* guesses, float* cuts,
    const float* ratio MOMENTUM_PARAMETERS) {
    __shared__ __align__(16) Sending lists;
    __shared__ __align__(16) Column taken[GROUP];
    __shared__ __align__(16) int words[2 * GROUP];
    __shared__ Note notes[GROUP];
    const int warp = threadIdx.x / 32;
    const Columns columns = {memory, payload, masks, guesses, cuts, *ratio};
    const Momentum correction = MOMENTUM_OF_GROUP;
    Column& mine = taken[warp];
    fetch_column(table + blockIdx.x * GROUP + warp, mine);
    bool bad = false;
    Note note = {mine.row.keep && (warp == 0 || !mine.together) ? NOT_SENT : NOTHING_TO_SEND};
    if (mine.row.keep && !mine.together) {
        WarpGroup<1> alone = {words, 0, 0};
        const int first = warp * WARP_LIST;
        note = send_candidates(
            columns, mine, alone, {lists.places + first, lists.values + first, lists.chosen + first}, correction, bad);
    }
    if ((threadIdx.x & 31) == 0) notes[warp] = note;
    __syncthreads();
    WarpGroup<GROUP> group = {words, 0, warp};
    for (int c = 0; c < GROUP; ++c) {
        if (notes[c].listed != NOT_SENT) continue;
        note = send_candidates(columns, taken[c], group, {lists.places, lists.values, lists.chosen}, correction, bad);
        __syncthreads();
        if (note.listed == NOT_SENT)
            note = send_whole(columns, taken[c], group, reinterpret_cast<float*>(&lists), correction, bad);
        if (threadIdx.x == 0) notes[c] = note;
        __syncthreads();
    }
    if (threadIdx.x < GROUP && notes[threadIdx.x].listed != NOTHING_TO_SEND)
        note_next(columns, taken[threadIdx.x], notes[threadIdx.x]);
    if (bad) raise_bad(payload);
}
