// All ranks' entries added in rank order, averaged, and written as a dense gradient: one write per element, and one launch for
// all that a bucket's reply is read for. A launch ends when its slowest block does, and a bucket has little to do of each kind.
//
// Every element belongs to one block, so that ranks are added one after the other without atomics. Reference:
// AllGatherFast.combine in thinwire/exchange/gather.py.

#include "dense.cuh"
#include "decode.cuh"

// What a block does.
#define HEADERS 0
#define MEANS 1   // a stretch of dense tensors beside the payloads
#define PIECES 2  // a piece of a row that does not fit
#define TILES 3   // pieces of strided rows
#define COLUMNS 8  // neighbouring strided rows in a tile: 32 bytes, the unit in which memory is written

struct Part {
    int kind;   // one of these, or the threads that each of several short rows has
    int first;  // row, or stretch
    int rows;   // neighbouring rows
    int start;  // elements from here on of each row, as many as fit
};

// Ranks whose entries are under way at once.
#define RANKS 4
// Blocks on a multiprocessor: as many as registers and shared memory let.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !PACKED
#define BLOCKS_AT_ONCE 5
#else
#define BLOCKS_AT_ONCE 4
#endif

static __device__ __forceinline__ const int* slot_words(const u8* payload, int slot) {
    return reinterpret_cast<const int*>(payload) + HEADER_FIXED + slot * HEADER_SLOT;
}

// Headers of all ranks: which slots anybody had a gradient for, and whether anything is wrong. `expected`: the fixed words, then
// the places of each slot.
//   status[0]: some gradient was not finite, or a header is none that this layout writes
//   status[1]: some slot has no gradient on any rank
static __device__ void read_headers(const Reply& reply, const int* expected, u8* used, u8* status, int slots) {
    for (int slot = threadIdx.x; slot < slots; slot += THREADS) {
        bool any = false;
        for (int rank = 0; rank < reply.world; ++rank) {
            const int* words = slot_words(reply.of(rank), slot);
            any |= words[HEADER_HAD] != 0;
            if (words[0] != expected[HEADER_FIXED + slot]) raise(status);
        }
        used[slot] = any;
        if (!any) raise(status + 1);
    }
    for (int i = threadIdx.x; i < reply.world * HEADER_FIXED; i += THREADS) {
        const int word = reinterpret_cast<const int*>(reply.of(i / HEADER_FIXED))[i % HEADER_FIXED];
        if (word != expected[i % HEADER_FIXED]) raise(status);
    }
}

// What ranks said of having a gradient for a slot: this lane's word of one rank, LANES neighbours reading one each.
template <int LANES>
static __device__ __forceinline__ int read_had(const Reply& reply, int slot) {
    return slot_words(reply.of(min((int)threadIdx.x % LANES, reply.world - 1)), slot)[HEADER_HAD];
}

// Whether anybody had one, decided by whole warps from `had` and, where there are more ranks than LANES, the words of the others.
template <int LANES>
static __device__ __forceinline__ bool is_used(const Reply& reply, int slot, int had) {
#pragma unroll 1
    for (int rank = (int)threadIdx.x % LANES + LANES; rank < reply.world; rank += LANES)
        had |= slot_words(reply.of(rank), slot)[HEADER_HAD];
    const u32 neighbours = LANES < 32 ? ((1u << LANES % 32) - 1) << (threadIdx.x % 32 / LANES * LANES) : EVERY_LANE;
    return (__ballot_sync(EVERY_LANE, had != 0) & neighbours) != 0;
}

static __device__ __forceinline__ float read_value(const u8* payload, const Row& row, int place) {
    return from_wire(reinterpret_cast<const Value*>(payload + row.values)[place]);
}

// One entry of each of RANKS ranks, or so many of one: memory is far away, so that all are under way before one is used. What is not there is
// read at another place, which costs less than a branch before every load.
struct Entries {
    int indices[RANKS];
    float values[RANKS];

    // At the same place of every rank from `first` on.
    __device__ __forceinline__ void load(const Reply& reply, const Row& row, int first, int place) {
#pragma unroll
        for (int r = 0; r < RANKS; ++r) load_one(r, reply.of(min(first + r, reply.world - 1)), row, place);
    }

    __device__ __forceinline__ void load_one(int r, const u8* payload, const Row& row, int place) {
        place = min(place, row.keep - 1);
        indices[r] = load_index(payload, row, place);
        values[r] = read_value(payload, row, place);
    }
};

// Contiguous rows that fit, LANES threads each. Tells whether something was wrong.
template <int LANES>
static __device__ __forceinline__ bool decode_rows(
    const Reply& reply, const Part& part, const Row* rows, float* sums, float* out, float average, bool into_bucket) {
    constexpr int ASKING = LANES < 32 ? LANES : 32;
    const int team = threadIdx.x / LANES, member = threadIdx.x % LANES;
    const bool live = team < part.rows;
    const Row row = rows[part.first + (live ? team : 0)];
    Entries entries;
    entries.load(reply, row, 0, member);
    const int had = read_had<ASKING>(reply, row.slot);
    float* sum = sums + team * (PIECE / THREADS * LANES);
    const auto meet = [&] {
        if (LANES <= 32)
            __syncwarp();
        else
            sync_team(team, LANES);
    };
    for (int j = 4 * member; j < row.length; j += 4 * LANES)
        *reinterpret_cast<float4*>(sum + j) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int keep = is_used<ASKING>(reply, row.slot, had) && live ? row.keep : 0;
    bool bad = false;
    const auto add = [&](int index, float value) {
        if (index < 0 || index >= row.length)
            bad = true;
        else
            sum[index] = __fadd_rn(sum[index], value);
    };
    meet();
    // Neighbouring rows of one warp go the same way.
    if (__ballot_sync(EVERY_LANE, row.keep > LANES) == 0) {
        for (int ranks = 0; ranks < reply.world; ranks += RANKS) {
            if (ranks) entries.load(reply, row, ranks, member);
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                if (ranks + r >= reply.world) break;
                if (member < keep) add(entries.indices[r], entries.values[r]);
                meet();
            }
        }
    } else {
        for (int rank = 0; rank < reply.world; ++rank) {
            const u8* payload = reply.of(rank);
            for (int place = member; place < keep; place += RANKS * LANES) {
#pragma unroll
                for (int i = 0; i < RANKS; ++i) entries.load_one(i, payload, row, place + i * LANES);
#pragma unroll
                for (int i = 0; i < RANKS; ++i)
                    if (place + i * LANES < keep) add(entries.indices[i], entries.values[i]);
            }
            meet();
        }
    }
    if (!live) return false;
    float* target = out + (into_bucket ? row.gradient : row.memory);
    if (row.vector) {
        for (int j = 4 * member; j < row.length; j += 4 * LANES) {
            float4 four = *reinterpret_cast<const float4*>(sum + j);
            bad |= take_mean(four, average);
            *reinterpret_cast<float4*>(target + j) = four;
        }
    } else {
        for (int j = member; j < row.length; j += LANES) {
            const float mean = __fmul_rn(sum[j], average);
            bad |= !is_finite(mean);
            target[j] = mean;
        }
    }
    return bad;
}

// Pieces of a row are as long as each other, but for the last; as in `piece_span` of decode_parts.py.
static __device__ __forceinline__ int piece_span(int length, int most) {
    const int pieces = (length + most - 1) / most;
    return ((length + pieces - 1) / pieces + 3) / 4 * 4;
}

// A piece of up to FIBRES neighbouring rows of one slot. Tells whether something was wrong.
//
// If a row has no more entries than threads, everybody reads one and looks whether it belongs here; otherwise a piece finds its
// own by bisection.
template <int FIBRES>
static __device__ __forceinline__ bool decode_piece(
    const Reply& reply, const Part& part, const Row* rows, float* sum, int (*edges)[COLUMNS][2], float* out, float average,
    bool into_bucket) {
    const int fibre = threadIdx.x % FIBRES, member = threadIdx.x / FIBRES, team = THREADS / FIBRES;
    const bool live = fibre < part.rows;
    const Row row = rows[part.first + (live ? fibre : 0)];
    const int here = min(piece_span(row.length, PIECE / FIBRES), row.length - part.start);
    const bool bisect = row.keep > team;
    Entries entries;
    if (!bisect) entries.load(reply, row, 0, member);
    const int had = read_had<32>(reply, row.slot);
    for (int i = 4 * threadIdx.x; i < here * FIBRES; i += 4 * THREADS)
        *reinterpret_cast<float4*>(sum + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const bool taken = is_used<32>(reply, row.slot, had) && live;
    bool bad = false;
    const auto add = [&](int index, float value) {
        const int at = index - part.start;
        if (at >= 0 && at < here)
            sum[at * FIBRES + fibre] = __fadd_rn(sum[at * FIBRES + fibre], value);
        else
            bad |= bisect || index < 0 || index >= row.length;
    };
    if (!bisect) {
        __syncthreads();
        for (int ranks = 0; ranks < reply.world; ranks += RANKS) {
            if (ranks) entries.load(reply, row, ranks, member);
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                if (ranks + r >= reply.world) break;
                if (taken && member < row.keep) add(entries.indices[r], entries.values[r]);
                __syncthreads();
            }
        }
    }
    for (int before = 0; bisect && before < reply.world; before += MOST_AT_ONCE) {
        const int together = min(reply.world - before, MOST_AT_ONCE);
        // Each bisection waits for memory several times over: those of all ranks run side by side.
        for (int i = threadIdx.x; i < together * FIBRES * 2; i += THREADS) {
            const int which = i / 2 % FIBRES, rank = i / (2 * FIBRES);
            if (which >= part.rows) continue;
            const Row mine = rows[part.first + which];
            const int from = part.start + (i % 2) * here;
            // What is behind the end of the row is the last piece's: only a corrupt payload has something there, and it shows.
            edges[rank][which][i % 2] = from == 0                ? 0
                                        : from >= mine.length ? mine.keep
                                                              : find_place(reply.of(before + rank), mine, from);
        }
        __syncthreads();
        for (int ranks = 0; ranks < together; ranks += RANKS) {
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                const int rank = min(ranks + r, together - 1);
                entries.load_one(r, reply.of(before + rank), row, (live ? edges[rank][fibre][0] : 0) + member);
            }
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                if (ranks + r >= together) break;
                if (taken) {
                    const int end = edges[ranks + r][fibre][1];
                    int place = edges[ranks + r][fibre][0] + member;
                    if (place < end) add(entries.indices[r], entries.values[r]);
                    const u8* payload = reply.of(before + ranks + r);
#pragma unroll 1
                    for (place += team; place < end; place += team)
                        add(load_index(payload, row, place), read_value(payload, row, place));
                }
                __syncthreads();
            }
        }
    }
    if (!live) return false;
    float* target = out + (into_bucket ? row.gradient : row.memory);
    if (FIBRES == 1 && row.vector) {
        for (int j = 4 * threadIdx.x; j < here; j += 4 * THREADS) {
            float4 four = *reinterpret_cast<const float4*>(sum + j);
            bad |= take_mean(four, average);
            *reinterpret_cast<float4*>(target + part.start + j) = four;
        }
    } else {
        for (int j = member; j < here; j += team) {
            const float mean = __fmul_rn(sum[j * FIBRES + fibre], average);
            bad |= !is_finite(mean);
            target[(i64)(part.start + j) * row.stride] = mean;
        }
    }
    return bad;
}

// `dense`: what was gathered of the dense tensors, rows as far apart as the payloads, or the one row of their sum. Encoding has put
// both flags down.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_AT_ONCE) void decode(
    const u8* gathered, const u8* dense, float* out, const Row* rows, const Part* parts, const Stretch* stretches,
    const int* expected, u8* used, u8* status, const float* share, int world, int dense_world, int payload_bytes, int slots,
    int into_bucket) {
    __shared__ __align__(16) float sums[PIECE];
    __shared__ int edges[MOST_AT_ONCE][COLUMNS][2];
    const Part part = parts[blockIdx.x];
    const Reply reply = {gathered, world, payload_bytes};
    const float average = *share;
    bool bad = false;
    switch (part.kind) {
        case HEADERS: read_headers(reply, expected, used, status, slots); break;
        case MEANS: {
            const Stretch stretch = stretches[part.first];
            bad = mean_stretch(dense, out, stretch, dense_world, payload_bytes);
            break;
        }
        case PIECES: bad = decode_piece<1>(reply, part, rows, sums, edges, out, average, into_bucket); break;
        case TILES: bad = decode_piece<COLUMNS>(reply, part, rows, sums, edges, out, average, into_bucket); break;
        case 8: bad = decode_rows<8>(reply, part, rows, sums, out, average, into_bucket); break;
        case 32: bad = decode_rows<32>(reply, part, rows, sums, out, average, into_bucket); break;
        case 64: bad = decode_rows<64>(reply, part, rows, sums, out, average, into_bucket); break;
        case 128: bad = decode_rows<128>(reply, part, rows, sums, out, average, into_bucket); break;
        default: bad = decode_rows<256>(reply, part, rows, sums, out, average, into_bucket); break;
    }
    if (bad) raise(status);
}
