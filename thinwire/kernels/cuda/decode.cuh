// What kernels share that read payloads: replies, sums in shared memory, means, and where the entries of a piece lie.

#include "row.cuh"

#define THREADS DECODE_THREADS
// A block adds up PIECE elements in shared memory.
#define MOST_AT_ONCE 64
// Entries that a thread loads at once.
#define RANKS 4
// Blocks on a multiprocessor: as many as registers and shared memory allow.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BLOCKS_AT_ONCE (PACKED ? 5 : 6)
#else
#define BLOCKS_AT_ONCE 4
#endif

// What all ranks sent, one row each.
struct Reply {
    const u8* gathered;
    int world;
    int payload_bytes;  // from one row to the next

    __device__ __forceinline__ const u8* of(int rank) const { return gathered + (i64)rank * payload_bytes; }
};

// A load that stays where it is written. The compiler moves a plain one behind the branch that uses it, where it waits alone.
static __device__ __forceinline__ u32 load_word(const void* at) {
#ifdef __CUDA_ARCH__
    u32 word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at));
    return word;
#else
    return *reinterpret_cast<const u32*>(at);
#endif
}

// The word with an index, and the index in it. Only the second waits for memory.
#if PACKED
static __device__ __forceinline__ u32 load_index_word(const u8* payload, const Row& row, int place) {
    const i64 bit = row.indices + (i64)place * row.width;
    const u32* words = reinterpret_cast<const u32*>(payload) + (bit >> 5);
    const int shift = (int)(bit & 31);
    const bool both = shift + row.width > 32;
    const u32 low = load_word(words), high = load_word(words + both);
    return (low >> shift | (both ? high << (32 - shift) : 0u)) & ((1u << row.width) - 1);
}

static __device__ __forceinline__ int index_in(u32 word, const Row&, int) { return (int)word; }
#else
// A payload's bytes are counted with 31 bits.
static __device__ __forceinline__ u32 index_byte(const Row& row, int place) {
    return (u32)row.indices + (u32)place * (u32)row.width;
}

static __device__ __forceinline__ u32 load_index_word(const u8* payload, const Row& row, int place) {
    return load_word(payload + (index_byte(row, place) & ~3u));
}

static __device__ __forceinline__ int index_in(u32 word, const Row& row, int place) {
    return (int)(row.width == 4 ? word : word >> ((index_byte(row, place) & 2) * 8) & 0xffffu);
}
#endif

static __device__ __forceinline__ Value load_code(const u8* payload, const Row& row, int place) {
    const u8* at = payload + ((u32)row.values + (u32)place * (u32)sizeof(Value));
#if VALUE_CODE == FLOAT32
    return __uint_as_float(load_word(at));
#elif defined(__CUDA_ARCH__)
    Value code;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(code) : "l"(at));
    return code;
#else
    return *reinterpret_cast<const Value*>(at);
#endif
}

// Where the entries with indices in [from, to) lie among `count` places from `first` on. Indices ascend there. LANES neighbours
// look together, and all lanes of a warp equally often.
//
// In a corrupt payload indices may not ascend. Then the end may come before the begin, which the caller reports. If it never does,
// every place still belongs to one piece: the end of one piece is found as the begin of the next.
template <int LANES>
static __device__ __forceinline__ void find_edges(
    const u8* payload, const Row& row, int first, int count, int from, int to, int& begin, int& end) {
    constexpr int EACH_LOOKS = 2;  // at so many places at once
    const int member = threadIdx.x % LANES, team = threadIdx.x % 32 / LANES * LANES;
    const u32 mates = LANES < 32 ? (1u << LANES % 32) - 1 : EVERY_LANE;
    begin = end = 0;
#pragma unroll 1
    for (int unknown = count; unknown > 0;) {
        const int step = unknown / (EACH_LOOKS * LANES + 1) + 1;
        const bool apart = begin != end;
        const auto place_of = [&](int since, int i) { return since + (member + i * LANES + 1) * step - 1; };
        const auto look = [&](int since, int i) {
            return load_index_word(payload, row, first + min(place_of(since, i), count - 1));
        };
        const auto is_below = [&](u32 word, int since, int i, int index) {
            const int place = place_of(since, i);
            return (place < count) & (index_in(word, row, first + place) < index);
        };
        u32 low[EACH_LOOKS], high[EACH_LOOKS], below_from = 0, below_to = 0;
#pragma unroll
        for (int i = 0; i < EACH_LOOKS; ++i) low[i] = look(begin, i);
        if (apart) {
#pragma unroll
            for (int i = 0; i < EACH_LOOKS; ++i) high[i] = look(end, i);
        }
#pragma unroll
        for (int i = 0; i < EACH_LOOKS; ++i) {
            below_from += __popc(__ballot_sync(EVERY_LANE, is_below(low[i], begin, i, from)) >> team & mates);
            below_to += __popc(__ballot_sync(EVERY_LANE, is_below(apart ? high[i] : low[i], end, i, to)) >> team & mates);
        }
        begin += step * below_from, end += step * below_to;
        unknown = step - 1;
    }
    // Only a corrupt payload has something before the row or behind it, and whoever is nearest finds it.
    if (from == 0) begin = 0;
    if (to >= row.length) end = count;
}

#define ROOM (PIECE + 4)  // sums of a piece, wherever in a vector it begins

// All of them, so that nobody waits to know how many are needed.
static __device__ __forceinline__ void clear_sums(float* sums) {
    float4* fours = reinterpret_cast<float4*>(sums);
#pragma unroll
    for (int first = 0; first < PIECE / 4; first += THREADS) fours[first + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (threadIdx.x == 0) fours[PIECE / 4] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Means of sums, and whether all were finite: what is not makes `trace` not a number for good.
struct Means {
    float average, trace;

    __device__ __forceinline__ explicit Means(float average) : average(average), trace(0.0f) {}

    __device__ __forceinline__ float of(float sum) {
        const float mean = __fmul_rn(sum, average);
        trace = mean * 0.0f + trace;
        return mean;
    }

    // Of four neighbours. Spelled out, because the compiler would store four times.
    __device__ __forceinline__ void write(float* target, const float* sums) {
        const float4 four = *reinterpret_cast<const float4*>(sums);
        const float a = of(four.x), b = of(four.y), c = of(four.z), d = of(four.w);
#ifdef __CUDA_ARCH__
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(a), "f"(b), "f"(c), "f"(d));
#else
        *reinterpret_cast<float4*>(target) = make_float4(a, b, c, d);
#endif
    }

    __device__ __forceinline__ bool bad() const { return !(trace == 0.0f); }
};

// How many elements a place in memory is behind the last aligned one.
static __device__ __forceinline__ int misplaced(const float* target) {
    return (int)(reinterpret_cast<unsigned long long>(target) / sizeof(float) % 4);
}

// Write the means of `count` neighbours. Their sums begin at `shift`, as many elements as `target` is misplaced, so that both are
// aligned alike. Tells whether a mean is not finite.
static __device__ __forceinline__ bool write_means(float* target, const float* sums, int shift, int count, float average) {
    float* aligned = target - shift;
    // Whole vectors are in [begin, end).
    const int begin = shift ? 4 : 0, end = (shift + count) & ~3, lane = threadIdx.x;
    Means means(average);
#pragma unroll 4
    for (int j = begin + 4 * lane; j < end; j += 4 * THREADS) means.write(aligned + j, sums + j);
    if (lane < 4) {
        if (shift && lane >= shift && lane < shift + count) aligned[lane] = means.of(sums[lane]);
        if (end >= begin && end + lane < shift + count) aligned[end + lane] = means.of(sums[end + lane]);
    }
    return means.bad();
}

// One entry of each of RANKS ranks, or so many entries of one rank. What is not there is read at another place: that costs less
// than a branch before every load.
struct Entries {
    u32 words[RANKS];
    Value codes[RANKS];

    // At the same place of every rank from `rank` on.
    __device__ __forceinline__ void load(const Reply& reply, const Row& row, int rank, int place) {
#pragma unroll
        for (int r = 0; r < RANKS; ++r) load_one(r, reply.of(min(rank + r, reply.world - 1)), row, place);
    }

    // Of one rank, so many places apart, `last` being the last there is.
    __device__ __forceinline__ void load_apart(const u8* payload, const Row& row, int place, int apart, int last) {
#pragma unroll
        for (int i = 0; i < RANKS; ++i) load_one(i, payload, row, min(place + i * apart, last));
    }

    __device__ __forceinline__ void load_one(int which, const u8* payload, const Row& row, int place) {
        words[which] = load_index_word(payload, row, place);
        codes[which] = load_code(payload, row, place);
    }

    __device__ __forceinline__ int index(int which, const Row& row, int place) const { return index_in(words[which], row, place); }

    __device__ __forceinline__ float value(int which) const { return from_wire(codes[which]); }
};

// All threads call `add(index, value)` for the entries between the edges of each rank, one rank after the other.
template <class Add>
static __device__ __forceinline__ void add_between(
    const Reply& reply, const Row& row, int before, int together, const int (*edges)[2], const Add& add) {
    Entries entries;
    for (int ranks = 0; ranks < together; ranks += RANKS) {
        bool few = true;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            const int* mine = edges[min(ranks + r, together - 1)];
            few &= mine[1] - mine[0] <= THREADS;
        }
        if (few) {
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                const int rank = min(ranks + r, together - 1);
                entries.load_one(r, reply.of(before + rank), row, min(edges[rank][0] + (int)threadIdx.x, row.keep - 1));
            }
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                if (ranks + r >= together) break;
                const int* mine = edges[ranks + r];
                const int place = mine[0] + threadIdx.x;
                if (place < mine[1]) add(entries.index(r, row, place), entries.value(r));
                __syncthreads();
            }
            continue;
        }
#pragma unroll 1
        for (int rank = ranks; rank < min(ranks + RANKS, together); ++rank) {
            const u8* payload = reply.of(before + rank);
            const int end = edges[rank][1];
#pragma unroll 1
            for (int place = edges[rank][0] + threadIdx.x; place < end; place += RANKS * THREADS) {
                entries.load_apart(payload, row, place, THREADS, end - 1);
#pragma unroll
                for (int i = 0; i < RANKS; ++i)
                    if (place + i * THREADS < end) add(entries.index(i, row, place + i * THREADS), entries.value(i));
            }
            __syncthreads();
        }
    }
}
