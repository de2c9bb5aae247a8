// The same as stream_rows for strided rows, which are neighbours in memory: one pass over memory in two kernels.
//
//  1. columns_collect   c = residual + gradient, or as momentum.cuh says, to memory, and one bit per element that reaches its
//                       column's cut, which lies somewhat below the threshold of the last step. A thread has one or four
//                       neighbouring columns and the 32 elements of each whose bits are one word.
//  2. columns_send      The elements whose bits are set, the column's candidates; the threshold among them; the entries in
//                       ascending order of index, ties to the lowest; the next cut.
//
// Every element that reaches the cut is a candidate, so that `keep` of them are enough to know the others are not wanted: what
// is sent does not depend on the cut. A warp has a column. One that has too few candidates, because its magnitudes fell, or
// more than a warp lists is left to its block, which looks at all elements if need be. Cuts are 0 at first: all are candidates.
//
// A warp that sends issues some 500 instructions, and these, not memory, are what it waits for: so candidates are in registers
// while the threshold is looked for, logarithms are those of the hardware, and one table says all that a warp has to know.

#include "momentum.cuh"
#include "candidates.cuh"

#define COLLECT_THREADS 128
#define SEND_THREADS (32 * GROUP)
// Forty warps on a multiprocessor, which wait for memory three times in a row.
#define SENDING_AT_ONCE 5
// Elements of a column under way at once; with momentum each is three loads, and one column has a quarter of four.
#define ROWS_AT_ONCE(width) ((MOMENTUM ? BATCH / 2 : BATCH) * ((width) == 1 ? 2 : 1))
// Candidates aimed at: enough that chance does not make them too few, not more than are read for nothing.
#define AIM(keep) (2.0f * (float)(keep) + 16.0f)

// -- 1 ----------------------------------------------------------------------------------------------------------------

// What a block of columns_collect needs to know: columns of one slot. `stride` of them are neighbours, and the next `stride`
// lie behind the last element of these.
struct Field {
    i64 gradient;  // of the first column, as in Row
    i64 memory;
    i64 masks;     // where the slot's words begin
    int length;
    int stride;
    int columns;
    int slot;
    int first;     // number of the first column's row
    int start;     // items before those of this block; an item is what a thread does, its neighbour the next columns
    int width;     // columns of an item
    int unused;
};

template <class T> struct FourOf;
template <> struct FourOf<float> { typedef float4 type; };
template <> struct FourOf<u16> { typedef ushort4 type; };
template <> struct FourOf<u32> { typedef uint4 type; };

// ONCE: what is read stays in no cache, so that there is room for what is read again.
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

// Said outright, because the compiler makes four stores of an assignment.
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
    const Gradient* bucket, float* memory, u8* payload, const Field& field, const float* cuts, u32* masks, float scale,
    u32* told, const Momentum& correction) {
    constexpr int ROWS = ROWS_AT_ONCE(WIDTH);
    const int across = field.columns / WIDTH, words = (field.length + WORD_ROWS - 1) / WORD_ROWS;
    const int wanted = field.start + (int)threadIdx.x, item = min(wanted, across * words - 1);
    const int column = item % across * WIDTH, word = item / across;
    const i64 block = column / field.stride;
    const i64 place = (block * field.length + (i64)word * WORD_ROWS) * field.stride + column % field.stride;
    // No element behind the end is read; a thread without an item writes nothing.
    const int last = min(WORD_ROWS, field.length - word * WORD_ROWS) - 1, end = wanted == item ? last : -1;
    const Gradient* gradient = bucket + field.gradient + place;
    float* held = memory + field.memory + place;
    Gradient fresh[ROWS][WIDTH];
    float c[ROWS][WIDTH], speed[ROWS][WIDTH];
    const auto load = [&](int start) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            // No branch, so that all loads leave together.
            const i64 at = (i64)min(start + i, last) * field.stride;
            read<true>(gradient + at, fresh[i]);
            read<false>(held + at, c[i]);
            correction.get_some(field.memory + place + at, speed[i]);
        }
    };
    load(0);
    float cut[WIDTH];
    u32 reaching[WIDTH];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) cut[w] = cuts[field.first + column + w] * scale, reaching[w] = 0;
    bool had = false, bad = false;
    for (int start = 0;;) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                c[i][w] = correction.compensate(fresh[i][w], c[i][w], scale, speed[i][w], had, bad);
                reaching[w] |= (u32)(start + i <= last && fabsf(c[i][w]) >= cut[w]) << (start + i);
            }
            if (start + i <= end) {
                const i64 at = (i64)(start + i) * field.stride;
                write(held + at, c[i]);
                correction.put_some(field.memory + place + at, speed[i]);
            }
        }
        start += ROWS;
        if (start > last) break;
        load(start);
    }
    if (end >= 0) write(masks + field.masks + ((i64)(column / GROUP) * words + word) * GROUP + column % GROUP, reaching);
    tell(had, bad, field.slot, told, payload);
}

extern "C" __global__ __launch_bounds__(COLLECT_THREADS) void columns_collect(
    const Gradient* bucket, float* memory, u8* payload, const Field* fields, const float* cuts, u32* masks,
    const float* ratio MOMENTUM_PARAMETERS) {
    __shared__ u32 told;
    if (threadIdx.x == 0) told = 0;
    __syncthreads();
    const Field field = fields[blockIdx.x];
    const Momentum correction = MOMENTUM_OF_GROUP;
    if (field.width == 4)
        collect<4>(bucket, memory, payload, field, cuts, masks, *ratio, &told, correction);
    else
        collect<1>(bucket, memory, payload, field, cuts, masks, *ratio, &told, correction);
}

// -- 2 ----------------------------------------------------------------------------------------------------------------

// What a warp of columns_send takes; `keep` is 0 if nothing. The warps of a block have a column each, or all have the same one.
struct __align__(16) Column {
    Row row;
    i64 masks;    // its first word
    int number;   // of its guess and its cut
    int together;
};
#define COLUMN_WORDS ((int)(sizeof(Column) / sizeof(int)))

// In shared memory: fields that are needed late take no registers until then.
static __device__ __forceinline__ void fetch_column(const Column* from, Column& to) {
    const int lane = threadIdx.x & 31;
    const int word = lane < COLUMN_WORDS ? reinterpret_cast<const int*>(from)[lane] : 0;
    if (lane < COLUMN_WORDS) reinterpret_cast<int*>(&to)[lane] = word;
    __syncwarp();
}

// Where whole columns are looked at, places and values are one room for their elements.
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

// The cut that about as many as aimed at will reach, by the power with which the count grew from the threshold down to the
// last cut. What has grown since the threshold `before` may go on: half of that is taken for granted, if it is not much.
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

// What is known of a column that has been sent. The next step's numbers are made from it for all columns of a block at once.
struct Note {
    int listed;   // candidates, or one of those below
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

// The chosen ones, whose numbers in the list are `chosen`, to the payload.
template <int WARPS>
static __device__ __forceinline__ void send_chosen(
    const Row& row, const Crew<WARPS>& crew, const Candidates& list, float* memory, u8* payload, const Momentum& correction,
    bool& bad) {
    float* held = memory + row.memory;
#pragma unroll 1
    for (int e = crew.member(); e < row.keep; e += 32 * WARPS) {
        const int index = list.places[list.chosen[e]];
        held[(i64)index * row.stride] = correction.send(list.values[e], index, e, row, payload, bad);
    }
}

// One column from its candidates; not if these are too few, or more than the warps list.
template <int WARPS>
static __device__ __forceinline__ Note send_candidates(
    const Columns& columns, const Column& column, Crew<WARPS>& crew, const Candidates& list, const Momentum& correction,
    bool& bad) {
    const Row& row = column.row;
    // Multiplied only when the candidates are listed: the loads of these are not to wait for it.
    const float last_cut = columns.cuts[column.number], last = __int_as_float(columns.guesses[column.number]);
    const int listed = list_candidates(columns.masks + column.masks, row, crew, list.places);
    if (listed < row.keep || listed > WARPS * WARP_LIST) return {NOT_SENT};
    const float cut = last_cut * columns.scale, before = last * columns.scale;
    const float* held = columns.memory + row.memory;
    const int pattern = choose_candidates(held, row, listed, cut, __float_as_int(before), crew, list);
    send_chosen(row, crew, list, columns.memory, columns.payload, correction, bad);
    return {listed, pattern, before, cut};
}

// One column from all its elements.
static __device__ __forceinline__ Note send_whole(
    const Columns& columns, const Column& column, Crew<GROUP>& crew, float* room, const Momentum& correction, bool& bad) {
    const Row& row = column.row;
    const int lane = threadIdx.x & 31;
    const float before = __int_as_float(columns.guesses[column.number]) * columns.scale;
    float* held = columns.memory + row.memory;
    const Elements from = fetch_whole(held, row, crew, room);
    // Warp w owns the w-th part, so that order is settled inside a warp and by one prefix over the warps.
    const int part = (row.length + SEND_THREADS - 1) / SEND_THREADS * 32;
    const int begin = crew.warp * part, end = min(begin + part, row.length);
    const auto count = [&](float threshold) {
        int reached = 0;
#pragma unroll 8
        for (int i = begin + lane; i < end; i += 32) reached += fabsf(from.at(i)) >= threshold;
        return crew.sum(warp_sum(reached));
    };
    const auto largest = [&] {
        float most = 0.0f;
        for (int i = begin + lane; i < end; i += 32) most = fmaxf(most, fabsf(from.at(i)));
        return crew.largest(warp_max(__float_as_int(most)));
    };
    Threshold found = {0, row.length, 0};
    found.search(row.keep, __float_as_int(before), count, largest);
    const float threshold = __int_as_float(found.low);
    Taking taking = {threshold, found.missing(row.keep)};
    for (int i = begin + lane; i < end; i += 32) taking.see(from.at(i));
    taking.begin(crew);
    for (int start = begin; start < end; start += 32) {
        const int i = start + lane;
        const float c = i < end ? from.at(i) : NO_ELEMENT;
        int place;
        if (taking.take(c, place)) held[(i64)i * row.stride] = correction.send(c, i, place, row, columns.payload, bad);
    }
    return {ALL_ELEMENTS, found.low, before, 0.0f};
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
        Crew<1> alone = {words, 0, 0};
        const int first = warp * WARP_LIST;
        note = send_candidates(
            columns, mine, alone, {lists.places + first, lists.values + first, lists.chosen + first}, correction, bad);
    }
    if ((threadIdx.x & 31) == 0) notes[warp] = note;
    __syncthreads();
    Crew<GROUP> crew = {words, 0, warp};
    for (int c = 0; c < GROUP; ++c) {
        if (notes[c].listed != NOT_SENT) continue;
        note = send_candidates(columns, taken[c], crew, {lists.places, lists.values, lists.chosen}, correction, bad);
        __syncthreads();
        if (note.listed == NOT_SENT)
            note = send_whole(columns, taken[c], crew, reinterpret_cast<float*>(&lists), correction, bad);
        if (threadIdx.x == 0) notes[c] = note;
        __syncthreads();
    }
    if (threadIdx.x < GROUP && notes[threadIdx.x].listed != NOTHING_TO_SEND)
        note_next(columns, taken[threadIdx.x], notes[threadIdx.x]);
    if (bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}
