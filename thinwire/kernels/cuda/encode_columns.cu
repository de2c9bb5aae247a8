// The same as encode_rows for strided rows, which are neighbours in memory: one pass over memory in two kernels.
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

#include "momentum.cuh"
#include "team.cuh"

// Columns whose words lie side by side: 32 bytes, the unit in which memory is read. As many warps send them.
#define GROUP 8
#define COLLECT_THREADS 128
#define SEND_THREADS (32 * GROUP)
// Forty warps on a multiprocessor, which wait for memory three times in a row.
#define SENDING_AT_ONCE 5
#define WORD_ROWS 32
// Elements of a column under way at once; with momentum each is three loads, and one column has a quarter of four.
#define ROWS_AT_ONCE(width) ((MOMENTUM ? BATCH / 2 : BATCH) * ((width) == 1 ? 2 : 1))
// Candidates that a warp lists, and that a block does.
#define WARP_LIST 512
#define BLOCK_LIST (GROUP * WARP_LIST)
// Candidates aimed at: enough that chance does not make them too few, not more than are read for nothing.
#define AIM(keep) (2.5f * (float)(keep) + 16.0f)
// The count grows by this power as a cut falls, until a step has shown it: normal numbers at a density of 1 %.
#define USUAL_POWER 7.0f
#define MOST_GROWN 1.1f

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
    const Momentum& correction) {
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
    if (had) raise(had_word(payload, field.slot));
    if (bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}

extern "C" __global__ __launch_bounds__(COLLECT_THREADS) void columns_collect(
    const Gradient* bucket, float* memory, u8* payload, const Field* fields, const float* cuts, u32* masks,
    const float* ratio MOMENTUM_PARAMETERS) {
    const Field field = fields[blockIdx.x];
    const Momentum correction = MOMENTUM_OF_GROUP;
    if (field.width == 4)
        collect<4>(bucket, memory, payload, field, cuts, masks, *ratio, correction);
    else
        collect<1>(bucket, memory, payload, field, cuts, masks, *ratio, correction);
}

// -- 2 ----------------------------------------------------------------------------------------------------------------

// What a block of columns_send takes: up to GROUP columns, a warp for each, or one column, which has them all.
struct Part {
    int first;    // row number
    int columns;
    int words;    // of each
    int unused;
    i64 masks;    // the first column's first word
};

// Some elements of a column, ascending: all, or those at `places`.
struct Elements {
    const float* values;
    i64 step;
    const int* places;
    int count;

    __device__ __forceinline__ float at(int i) const { return values[i * step]; }
    __device__ __forceinline__ int index(int i) const { return places ? places[i] : i; }
};

// How many bits of a column are set; unless these are too few or too many, `places` gets their numbers.
template <int WARPS>
static __device__ __forceinline__ int list_candidates(
    const u32* words, int count, int keep, int room, RowTeam<WARPS>& team, int* places) {
    const int lane = threadIdx.x & 31, part = (count + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int begin = team.warp * part, end = min(begin + part, count);
    int mine = 0;
    for (int start = begin + lane; start < end; start += BATCH * 32) {
        u32 some[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) some[i] = words[(i64)min(start + 32 * i, end - 1) * GROUP];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (start + 32 * i < end) mine += __popc(some[i]);
    }
    const int listed = team.sum(mine);
    if (listed < keep || listed > room) return listed;
    int next = team.before(mine);
    for (int start = begin; start < end; start += 32) {
        const int word = start + lane;
        u32 rest = word < end ? words[(i64)word * GROUP] : 0;
        const int upto = sum_upto(__popc(rest), lane);
        int place = next + upto - __popc(rest);
        for (; rest; rest &= rest - 1) places[place++] = word * WORD_ROWS + __ffs(rest) - 1;
        next += __shfl_sync(EVERY_LANE, upto, 31);
    }
    team.meet();
    return listed;
}

// Elements of a column come nearer.
template <int WARPS>
static __device__ __forceinline__ void fetch(
    const float* held, int stride, const int* places, int count, const RowTeam<WARPS>& team, float* values) {
    const int threads = 32 * WARPS, member = 32 * team.warp + (threadIdx.x & 31);
    for (int start = member; start < count; start += BATCH * threads) {
        float some[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = min(start + i * threads, count - 1);
            some[i] = held[(i64)(places ? places[at] : at) * stride];
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (start + i * threads < count) values[start + i * threads] = some[i];
    }
    team.meet();
}

// Choose from the elements that may be wanted; returns the pattern found.
template <int WARPS>
static __device__ __forceinline__ int send_elements(
    const Elements& from, const Row& row, int guess, RowTeam<WARPS>& team, float* held, u8* payload,
    const Momentum& correction, bool& bad) {
    const int lane = threadIdx.x & 31;
    // Warp w owns the w-th part, so that order is settled inside a warp and by one prefix over the warps.
    const int part = (from.count + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int begin = team.warp * part, end = min(begin + part, from.count);
    const auto count = [&](int pattern) {
        const float threshold = __int_as_float(pattern);
        int reached = 0;
#pragma unroll 8
        for (int i = begin + lane; i < end; i += 32) reached += fabsf(from.at(i)) >= threshold;
        return reached;
    };
    const auto largest = [&] {
        int bits = 0;
        for (int i = begin + lane; i < end; i += 32) bits = max(bits, ordered(from.at(i)));
        return bits;
    };
    Row some = row;
    some.length = from.count;
    int reached;
    const int pattern = search(some, guess, team, reached, count, largest);
    const float threshold = __int_as_float(pattern);
    const bool exact = reached == row.keep;
    int missing = 0, ties = 0, taken = 0;
    if (exact) {
        if (WARPS > 1) taken = warp_sum(count(pattern));
    } else {
        // Everything above the threshold, and as many that equal it as are still wanted, the first ones.
        int above = 0, tied = 0;
        for (int i = begin + lane; i < end; i += 32) {
            above += fabsf(from.at(i)) > threshold;
            tied += fabsf(from.at(i)) == threshold;
        }
        missing = row.keep - team.sum(above);
        ties = team.before(tied);
        taken = warp_sum(above) + min(max(missing - ties, 0), warp_sum(tied));
    }
    int place = team.before(lane == 0 ? taken : 0);

    for (int start = begin; start < end; start += 32) {
        const int i = start + lane;
        const float c = i < end ? from.at(i) : NO_ELEMENT;
        bool chosen = fabsf(c) >= threshold;
        if (!exact) {
            const bool tie = fabsf(c) == threshold;
            const u32 equal = __ballot_sync(EVERY_LANE, tie);
            chosen &= !tie || ties + lanes_before(equal, lane) < missing;
            ties += __popc(equal);
        }
        const u32 all = __ballot_sync(EVERY_LANE, chosen);
        if (chosen) {
            const int index = from.index(i);
            held[(i64)index * row.stride] = correction.send(c, index, place + lanes_before(all, lane), row, payload, bad);
        }
        place += __popc(all);
    }
    return pattern;
}

// The cut that about as many as aimed at will reach, by the power with which the count grew from the threshold down to the
// last cut. What has grown since the threshold `before` may go on: half of that is taken for granted, if it is not much.
static __device__ __forceinline__ float next_cut(const Row& row, float threshold, float before, float cut, int listed) {
    const float aim = AIM(row.keep);
    if (aim >= (float)row.length) return 0.0f;
    float power = USUAL_POWER;
    if (listed > row.keep && cut > 0.0f && cut < threshold)
        power = logf((float)listed / (float)row.keep) / logf(threshold / cut);
    power = fminf(fmaxf(power, 2.0f), 20.0f);
    const float grown = sqrtf(fminf(fmaxf(threshold / before, 1.0f), MOST_GROWN));
    return threshold * grown * expf(-logf(aim / (float)row.keep) / power);
}

// What columns_send knows of all columns.
struct Columns {
    float* memory;
    u8* payload;
    const Row* rows;
    int* guesses;
    float* cuts;
    float scale;
};

// One column by the warps of a team; false if its candidates are too few, or do not fit `room` places. WHOLE: then all its
// elements are looked at.
template <bool WHOLE, int WARPS>
static __device__ __forceinline__ bool send_column(
    const Columns& columns, int number, const u32* words, int count, RowTeam<WARPS>& team, int* list,
    const Momentum& correction, bool& bad) {
    const int room = WARPS * WARP_LIST;
    const Row row = columns.rows[number];
    const int guess = __float_as_int(__int_as_float(columns.guesses[number]) * columns.scale);
    float* held = columns.memory + row.memory;
    // Values in front, places behind them.
    float* values = reinterpret_cast<float*>(list);
    int* places = list + room;
    const float cut = columns.cuts[number] * columns.scale;
    int listed = list_candidates(words, count, row.keep, room, team, places);
    Elements from = {values, 1, places, listed};
    if (listed < row.keep || listed > room) {
        if (!WHOLE) return false;
        listed = 0;
        from = {held, row.stride, nullptr, row.length};
        if (row.length <= 2 * room) {
            fetch(held, row.stride, nullptr, row.length, team, values);
            from.values = values, from.step = 1;
        }
    } else {
        fetch(held, row.stride, places, listed, team, values);
    }
    const int pattern = send_elements(from, row, guess, team, held, columns.payload, correction, bad);
    if (team.warp == 0 && (threadIdx.x & 31) == 0) {
        // A search that had all it was given as an answer has not looked for a pattern.
        const float threshold = listed ? fmaxf(__int_as_float(pattern), cut) : __int_as_float(pattern);
        columns.guesses[number] = __float_as_int(threshold);
        columns.cuts[number] = next_cut(row, threshold, __int_as_float(guess), cut, listed);
    }
    return true;
}

extern "C" __global__ __launch_bounds__(SEND_THREADS, SENDING_AT_ONCE) void columns_send(
    float* memory, u8* payload, const Row* rows, const Part* parts, const u32* masks, int* guesses, float* cuts,
    const float* ratio MOMENTUM_PARAMETERS) {
    __shared__ int list[2 * BLOCK_LIST], words[2 * GROUP], left[GROUP];
    const Part part = parts[blockIdx.x];
    const int warp = threadIdx.x / 32;
    const Columns columns = {memory, payload, rows, guesses, cuts, *ratio};
    const Momentum correction = MOMENTUM_OF_GROUP;
    bool bad = false, done = false;
    if (part.columns > 1 && warp < part.columns) {
        RowTeam<1> alone = {words, 0, 0};
        done = send_column<false>(
            columns, part.first + warp, masks + part.masks + warp, part.words, alone, list + 2 * WARP_LIST * warp, correction, bad);
    }
    if ((threadIdx.x & 31) == 0) left[warp] = !done;
    __syncthreads();
    RowTeam<GROUP> together = {words, 0, warp};
    for (int c = 0; c < part.columns; ++c) {
        if (!left[c]) continue;
        send_column<true>(
            columns, part.first + c, masks + part.masks + c, part.words, together, list, correction, bad);
        __syncthreads();
    }
    if (bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}
