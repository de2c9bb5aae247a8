// Quantised sums of a whole bucket: what is sent, the owner's sums, the update, and what may have to be taken back. One launch each.
//
// Reference: thinwire/exchange/quantized.py. A block of threads has a piece, each of its warps AHEAD blocks of it at once.

#include "quantize.cuh"
#include "adam.cuh"

#define AHEAD 4  // blocks that a warp loads at once
static_assert(PIECE_BLOCKS % AHEAD == 0, "warps of a block share a piece");
#define PIECE_THREADS (32 * PIECE_BLOCKS / AHEAD)

// Before a step: no flag is up, and every slot's count goes on. Limits are brought to the units of the gradients.
extern "C" __global__ void quantize_open(
    u8* offer, u8* sums, int* steps, u8* status, IN_PLACE MessageForm form, int world LIMIT_PARAMETERS) {
    for (int rank = 0; rank < world; ++rank)
        for (int i = threadIdx.x; i <= form.slots; i += blockDim.x) offer[(i64)rank * form.row + i] = 0;
    for (int i = threadIdx.x; i < form.slots; i += blockDim.x) ++steps[i];
    if (threadIdx.x < 2) status[threadIdx.x] = 0;
    if (threadIdx.x != 0) return;
    *sums = 0;
#if ADAM
    limits[0] = loss_scale ? __fmul_rn(limit, *loss_scale) : limit;
    limits[1] = loss_scale ? __fmul_rn(limits[0], (float)world) : limit_of_sums;
#endif
}

// -- what is sent ------------------------------------------------------------------------------------------------------

// c of this warp's blocks; 0 where there is no element. The momentum goes to memory.
static __device__ __forceinline__ void compensate_blocks(
    const Gradient* bucket, const float* before, const QuantPiece& piece, float ratio, const AdamMomentum& momentum, float (&x)[AHEAD][EACH],
    bool& had, bool& bad) {
    const int lane = threadIdx.x & 31, first = (int)threadIdx.x / 32 * AHEAD * BLOCK;
    Gradient raw[AHEAD][EACH];
    float u[AHEAD][EACH];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = first + a * BLOCK, room = lane_room(piece, at);
        load_gradients(bucket + piece.bucket + at + EACH * lane, piece.aligned, room, raw[a]);
#if KEEPS
        load_floats(before + piece.memory + at + EACH * lane, true, room, x[a]);
#endif
        momentum.load(piece.memory + at + EACH * lane, room, u[a]);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = first + a * BLOCK, room = lane_room(piece, at);
        if (at >= piece.count) break;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float gradient = finite_gradient(raw[a][i], had, bad);
#if KEEPS
            x[a][i] = momentum.add(gradient, x[a][i], ratio, u[a][i]);
#else
            x[a][i] = gradient;
#endif
            // A sum of finite numbers can overflow; nothing of that may stay.
            if (!is_finite(x[a][i])) {
                bad = true;
                x[a][i] = 0.0f;
            }
        }
        momentum.store(piece.memory + at + EACH * lane, room, u[a]);
    }
}

// Quantise and pack c of this warp's blocks, and write what is left to memory. Blocks of this rank's own are kept as they are, in `own`.
static __device__ __forceinline__ void send_blocks(
    float (&x)[AHEAD][EACH], float (&divisors)[AHEAD][EACH], float* memory, u8* offer, float* own, const QuantPiece& piece,
    const AdamScale& scale, int seed, const MessageForm& form, bool owned) {
    const int lane = threadIdx.x & 31, first = (int)threadIdx.x / 32 * AHEAD * BLOCK;
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = first + a * BLOCK, room = lane_room(piece, at), block = piece.block + at / BLOCK;
        if (at >= piece.count) break;
        if (owned) {
            store_floats(own + (i64)block * BLOCK + EACH * lane, true, EACH, x[a]);
            continue;
        }
        scale.find_divisors(divisors[a]);
        float offered[EACH], values[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) offered[i] = scale.divide(x[a][i], divisors[a][i]);
        SentCode::encode_block(
            offered, min(BLOCK, piece.count - at), scale.most_sent(), seed, piece.place + at, offer + (i64)piece.owner * form.row, form,
            block, values);
#if KEEPS
#pragma unroll
        for (int i = 0; i < EACH; ++i) x[a][i] = __fsub_rn(x[a][i], scale.multiply(values[i], divisors[a][i]));
        store_floats(memory + piece.memory + at + EACH * lane, true, room, x[a]);
#endif
    }
}

static __device__ __forceinline__ void load_scale(const AdamScale& scale, const QuantPiece& piece, float (&divisors)[AHEAD][EACH]) {
    const int lane = threadIdx.x & 31, first = (int)threadIdx.x / 32 * AHEAD * BLOCK;
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = first + a * BLOCK;
        scale.load(piece.memory + at + EACH * lane, lane_room(piece, at), divisors[a]);
    }
}

// Every rank is told which slots had a gradient and whether something was not finite. `told` is what the block has told already.
static __device__ __forceinline__ void tell(
    u32 (&told)[2], bool had, bool bad, u8* offer, const QuantPiece& piece, const MessageForm& form, int world) {
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if ((threadIdx.x & 31) != 0) return;
    if (any_had && atomicExch(&told[0], 1) == 0)
        for (int to = 0; to < world; ++to) raise(offer + (i64)to * form.row + piece.slot);
    if (any_bad && atomicExch(&told[1], 1) == 0)
        for (int to = 0; to < world; ++to) raise(offer + (i64)to * form.row + form.slots);
}

static __device__ __forceinline__ int seed_of_slot(const int* seeds, const int* steps, int slot, int stream) {
#if STOCHASTIC
    return seed_of(seeds[slot], steps[slot], stream);
#else
    return 0;
#endif
}

// Compensate, quantise, pack, and write what is left to memory.
extern "C" __global__ __launch_bounds__(PIECE_THREADS) void quantize_send(
    const Gradient* bucket, const float* before, float* memory, u8* offer, float* own, const QuantPiece* pieces, const float* ratio,
    const int* seeds, const int* steps, IN_PLACE MessageForm form, int rank, int world MOMENTUM_PARAMETERS SCALE_PARAMETERS) {
    __shared__ u32 told[2];
    if (threadIdx.x < 2) told[threadIdx.x] = 0;
    __syncthreads();
    const QuantPiece piece = pieces[blockIdx.x];
    const AdamMomentum of_group = MOMENTUM_OF_GROUP;
    const AdamScale scale = SCALE_OF_GROUP;
    const bool owned = piece.owner == rank;
    float x[AHEAD][EACH], divisors[AHEAD][EACH];
    if (!owned) load_scale(scale, piece, divisors);
    bool had = false, bad = false;
    compensate_blocks(bucket, before, piece, *ratio, of_group, x, had, bad);
    const int seed = seed_of_slot(seeds, steps, piece.slot, rank);
    send_blocks(x, divisors, memory, offer, own, piece, scale, seed, form, owned);
    tell(told, had, bad, offer, piece, form, world);
}

#if ADAM
// Where a mean of all ranks has to be known before the scale is, `quantize_send` comes in two parts: c goes to memory,
extern "C" __global__ __launch_bounds__(PIECE_THREADS) void quantize_collect(
    const Gradient* bucket, const float* before, float* memory, u8* offer, const QuantPiece* pieces, const float* ratio,
    IN_PLACE MessageForm form, int world MOMENTUM_PARAMETERS) {
    __shared__ u32 told[2];
    if (threadIdx.x < 2) told[threadIdx.x] = 0;
    __syncthreads();
    const QuantPiece piece = pieces[blockIdx.x];
    const AdamMomentum of_group = MOMENTUM_OF_GROUP;
    const int lane = threadIdx.x & 31, first = (int)threadIdx.x / 32 * AHEAD * BLOCK;
    float x[AHEAD][EACH];
    bool had = false, bad = false;
    compensate_blocks(bucket, before, piece, *ratio, of_group, x, had, bad);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = first + a * BLOCK;
        store_floats(memory + piece.memory + at + EACH * lane, true, lane_room(piece, at), x[a]);
    }
    tell(told, had, bad, offer, piece, form, world);
}

// and is sent from there.
extern "C" __global__ __launch_bounds__(PIECE_THREADS) void quantize_send_collected(
    float* memory, u8* offer, float* own, const QuantPiece* pieces, const int* seeds, const int* steps, IN_PLACE MessageForm form,
    int rank SCALE_PARAMETERS) {
    const QuantPiece piece = pieces[blockIdx.x];
    const AdamScale scale = SCALE_OF_GROUP;
    const int lane = threadIdx.x & 31, first = (int)threadIdx.x / 32 * AHEAD * BLOCK;
    const bool owned = piece.owner == rank;
    float x[AHEAD][EACH], divisors[AHEAD][EACH];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = first + a * BLOCK;
        load_floats(memory + piece.memory + at + EACH * lane, true, lane_room(piece, at), x[a]);
    }
    if (!owned) load_scale(scale, piece, divisors);
    const int seed = seed_of_slot(seeds, steps, piece.slot, rank);
    send_blocks(x, divisors, memory, offer, own, piece, scale, seed, form, owned);
}
#endif

// -- sums --------------------------------------------------------------------------------------------------------------

// Whether some rank had a gradient for a slot, or (slot = slots) something that is not finite.
static __device__ __forceinline__ bool any_rank(const u8* arrived, const MessageForm& form, int slot, int world) {
    bool any = false;
    for (int from = 0; from < world; ++from) any |= arrived[(i64)from * form.row + slot] != 0;
    return any;
}

// The sums of this rank's own blocks: in rank order, quantised once more, and what that leaves goes to memory. The last block of
// threads has no piece: it says which slots were used and whether something was wrong.
extern "C" __global__ __launch_bounds__(PIECE_THREADS) void quantize_sum(
    const u8* arrived, const float* own, float* memory, u8* sums, const QuantPiece* pieces, const int* seeds, const int* steps,
    u8* used, u8* status, IN_PLACE MessageForm form, IN_PLACE MessageForm sums_form, int rank, int world, int count SCALE_PARAMETERS) {
    if ((int)blockIdx.x == count) {
        for (int slot = threadIdx.x; slot < form.slots; slot += blockDim.x) {
            used[slot] = any_rank(arrived, form, slot, world);
            if (!used[slot]) raise(status + 1);
        }
        if (threadIdx.x == 0 && any_rank(arrived, form, form.slots, world)) raise(status);
        return;
    }
    const QuantPiece piece = pieces[blockIdx.x];
    const AdamScale scale = SCALE_OF_GROUP;
    const int lane = threadIdx.x & 31, first = (int)threadIdx.x / 32 * AHEAD * BLOCK;
    const bool known = any_rank(arrived, form, piece.slot, world);
    const int seed = seed_of_slot(seeds, steps, piece.slot, world);
    float c[AHEAD][EACH], total[AHEAD][EACH], divisors[AHEAD][EACH];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = min(first + a * BLOCK, piece.count - 1) / BLOCK * BLOCK;
        load_floats(own + (i64)(piece.block + at / BLOCK) * BLOCK + EACH * lane, true, EACH, c[a]);
    }
    load_scale(scale, piece, divisors);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) scale.find_divisors(divisors[a]);
    for (int from = 0; from < world; ++from) {
        const u8* row = arrived + (i64)from * form.row;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int at = min(first + a * BLOCK, piece.count - 1) / BLOCK * BLOCK;
            float values[EACH];
            if (from == rank) {
#pragma unroll
                for (int i = 0; i < EACH; ++i) values[i] = scale.own_part(c[a][i], divisors[a][i]);
            } else {
                SentCode::decode_block(row, form, piece.block + at / BLOCK, values);
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) total[a][i] = from ? __fadd_rn(total[a][i], values[i]) : values[i];
        }
    }
    bool overflow = false;
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = first + a * BLOCK, room = lane_room(piece, at);
        if (at >= piece.count) break;
        float values[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool finite = is_finite(total[a][i]);
            overflow |= !finite && i < room;
            if (!finite || !known || i >= room) total[a][i] = 0.0f;
        }
        SumCode::encode_block(
            total[a], min(BLOCK, piece.count - at), scale.most_of_sums(), seed, piece.place + at, sums, sums_form,
            piece.block + at / BLOCK, values);
#if KEEPS
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float left = scale.multiply(__fsub_rn(total[a][i], values[i]), divisors[a][i]);
            values[i] = known ? scale.with_refused(left, c[a][i], divisors[a][i]) : c[a][i];
        }
        store_floats(memory + piece.memory + at + EACH * lane, true, room, values);
#endif
    }
    if (overflow) raise(sums);
}

// The mean of all ranks, into the bucket or into a buffer laid out as memory is.
extern "C" __global__ __launch_bounds__(PIECE_THREADS) void quantize_deliver(
    const u8* gathered, float* out, const QuantPiece* pieces, u8* status, const float* share, IN_PLACE MessageForm form, int stride,
    int world, int into_bucket SCALE_PARAMETERS) {
    if (blockIdx.x == 0)
        for (int from = threadIdx.x; from < world; from += blockDim.x)
            if (gathered[(i64)from * stride]) raise(status);
    const QuantPiece piece = pieces[blockIdx.x];
    const AdamScale scale = SCALE_OF_GROUP;
    const int lane = threadIdx.x & 31, first = (int)threadIdx.x / 32 * AHEAD * BLOCK;
    const u8* row = gathered + (i64)piece.owner * stride;
    float* to = out + (into_bucket ? piece.bucket : piece.memory);
    const bool aligned = into_bucket ? piece.aligned : true;
    const float factor = *share;
    float values[AHEAD][EACH], divisors[AHEAD][EACH];
    load_scale(scale, piece, divisors);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = min(first + a * BLOCK, piece.count - 1) / BLOCK;
        SumCode::decode_block(row, form, piece.block + at, values[a]);
    }
    bool bad = false;
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int at = first + a * BLOCK, room = lane_room(piece, at);
        scale.find_divisors(divisors[a]);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            values[a][i] = __fmul_rn(scale.multiply(values[a][i], divisors[a][i]), factor);
            bad |= !is_finite(values[a][i]);
        }
        store_floats(to + at + EACH * lane, aligned, room, values[a]);
    }
    if (bad) raise(status);
}

// -- what may have to be taken back ------------------------------------------------------------------------------------

// What one bucket may have to take back.
struct QuantRecord {
    float* memory;
    const u8* offer;
    const float* own;
    const QuantPiece* pieces;
    const u8* used;
    const u8* unused;
    const float* second_moment;
    MessageForm form;
    int count;
    int rank;
    float eps;
};
static_assert(LAYOUT_OF_QuantRecord, "quantize.py has another QuantRecord");
static_assert(MOST_RECORDS * sizeof(QuantRecord) <= 4000, "a kernel has 4 KB of parameters");

struct QuantRecords {
    QuantRecord at[MOST_RECORDS];
};

// All buckets of a step, `blocks_each` blocks for each. What was sent to others returns: that of used slots if the step turned bad, that
// of the other slots if there are any. Of a bad step this rank's own blocks become what they were.
extern "C" __global__ void quantize_return(IN_PLACE QuantRecords records, const u8* bad, int blocks_each) {
    const QuantRecord& record = records.at[blockIdx.x / blocks_each];
    if (!*bad && !*record.unused) return;
    const AdamScale scale = SCALE_OF_RECORD(record);
    const int lane = threadIdx.x & 31, warps = blockDim.x / 32;
    for (int number = blockIdx.x % blocks_each; number < record.count; number += blocks_each) {
        const QuantPiece piece = record.pieces[number];
        const bool owned = piece.owner == record.rank;
        if (!(owned || record.used[piece.slot] ? *bad : *record.unused)) continue;
        for (int at = (int)threadIdx.x / 32 * BLOCK; at < piece.count; at += warps * BLOCK) {
            const int room = lane_room(piece, at), block = piece.block + at / BLOCK;
            float* to = record.memory + piece.memory + at + EACH * lane;
            float x[EACH], values[EACH], divisors[EACH];
            if (owned) {
                load_floats(record.own + (i64)block * BLOCK + EACH * lane, true, EACH, x);
            } else {
                load_floats(to, true, room, x);
                scale.load(piece.memory + at + EACH * lane, room, divisors);
                scale.find_divisors(divisors);
                SentCode::decode_block(record.offer + (i64)piece.owner * record.form.row, record.form, block, values);
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    x[i] = __fadd_rn(x[i], scale.multiply(values[i], divisors[i]));
                    // What a code stands for can overflow in a scale; nothing of that may stay.
                    if (!is_finite(x[i])) x[i] = 0.0f;
                }
            }
            store_floats(to, true, room, x);
        }
    }
}
