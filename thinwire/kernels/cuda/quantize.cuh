// Blocks of BLOCK elements and their codes. The bits are those of thinwire/wire/quantize.py.
//
// A warp has a block, a lane EACH neighbours of it.

#define EACH (BLOCK / 32)
#define LARGEST_FLOAT 3.4028234663852886e38
#define SMALLEST_SCALE 1.1754943508222875e-38f
static_assert(BLOCK == 64 || BLOCK == 128 || BLOCK == 256, "a lane has two, four or eight elements");

// Neighbouring blocks of a slot that one rank owns.
struct QuantPiece {
    i64 bucket;  // its first element there
    i64 memory;  // the same in the group's own buffer
    int place;   // elements of the slot that come before
    int count;
    int slot;
    int owner;
    int block;    // its first block among those of its owner
    int aligned;  // four elements at a time are aligned in the bucket
};
static_assert(LAYOUT_OF_QuantPiece, "quantize.py has another QuantPiece");

// Bytes of a message, one row for each rank.
struct MessageForm {
    int row;     // from one rank's to the next
    int scales;  // where they begin
    int codes;
    int slots;
};
static_assert(LAYOUT_OF_MessageForm, "quantize.py has another MessageForm");

// -- sums over a block, in an order that knows nothing of other blocks: neighbours, then neighbouring sums -----------------

static __device__ __forceinline__ double sum_block(const double (&values)[EACH]) {
    double sums[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) sums[i] = values[i];
#pragma unroll
    for (int half = EACH / 2; half; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    }
    double sum = sums[0];
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) sum = sum + shuffle_double(sum, step);
    return sum;
}

#define NO_LIMIT __int_as_float(0x7f800000)

static __device__ __forceinline__ float cut_to_bf16(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

static __device__ __forceinline__ float usable_scale(double mean) {
    const float scale = (float)(mean < LARGEST_FLOAT ? mean : LARGEST_FLOAT);
    return scale < SMALLEST_SCALE ? 0.0f : cut_to_bf16(scale);
}

// -- draws -------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ int scramble(int x) {
    x ^= x >> 15;
    x = (int)((u32)x * 2246822507u);
    x ^= x >> 13;
    x = (int)((u32)x * 3266489909u);
    return x ^ (x >> 16);
}

// The seed of a slot in one step; `stream` says who draws.
static __device__ __forceinline__ int seed_of(int slot_seed, int step, int stream) {
    return scramble((int)((u32)slot_seed + (u32)step * 2654435769u + (u32)stream * 40503u));
}

static __device__ __forceinline__ int draw_bits(int seed, int place) {
    return (scramble((int)((u32)place * 668265263u + (u32)seed)) >> 7) & 0xffff;
}

static __device__ __forceinline__ float draw(int seed, int place) { return (float)draw_bits(seed, place) * 1.52587890625e-5f; }

// -- one block ---------------------------------------------------------------------------------------------------------

// A code of BITS bits. What is sent and the sums may have different ones.
template <int BITS>
struct Code {
    static constexpr int LANE_BITS = EACH * BITS;
    static constexpr int WORDS = BLOCK * BITS / 32;  // of a block's codes
    static constexpr int PEAK = BITS > 1 ? (1 << (BITS - 1)) - 1 : 1;
    static constexpr u32 MASK = (1u << BITS) - 1;
    static constexpr bool HAS_SCALE = BITS < 16;

    // The scale of a block of which `length` elements count; the others are 0. All lanes come together. Only signs heed the limit here.
    static __device__ __forceinline__ float scale_of(const float (&x)[EACH], int length, float limit) {
        if constexpr (BITS == 16) {
            return 1.0f;
        } else if constexpr (BITS >= 4) {
            int top = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) top = max(top, magnitude(x[i]));
            const float scale = __fmul_rn(__int_as_float(warp_max(top)), (float)(1.0 / PEAK));
            return cut_to_bf16(fmaxf(scale, SMALLEST_SCALE));
        } else {
            double sizes[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) sizes[i] = (double)fabsf(x[i]);
            const double sum = sum_block(sizes), elements = (double)max(length, 1);
            if constexpr (BITS == 1) return fminf(usable_scale(sum / elements), cut_to_bf16(limit));
            return usable_scale(fit_three_levels(sizes, FIRST_CUT * sum / elements));
        }
    }

    // Lloyd's rounds: the mean magnitude of what is not nearer to zero.
    static __device__ __forceinline__ double fit_three_levels(const double (&sizes)[EACH], double cut) {
        double fitted = 0.0;
        for (int round = 0; round < LLOYD_ROUNDS; ++round) {
            double above[EACH];
            int count = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const bool counts = sizes[i] > cut;
                above[i] = counts ? sizes[i] : 0.0;
                count += counts;
            }
            fitted = sum_block(above) / (double)max(warp_sum(count), 1);
            cut = fitted * 0.5;
        }
        return fitted;
    }

    // The code of one element, and what it stands for.
    static __device__ __forceinline__ int code_of(float x, float scale, float inverse, int seed, int place, float& value) {
        if constexpr (BITS == 16) {
            const float inside = fminf(fmaxf(x, -3.3895313892515355e38f), 3.3895313892515355e38f);
#if STOCHASTIC
            const int code = (int)((u32)(__float_as_int(inside) + draw_bits(seed, place)) >> 16);
#else
            const int code = to_bf16(inside);
#endif
            value = from_bf16((u16)code);
            return code;
        } else if constexpr (BITS == 1) {
#if STOCHASTIC
            const int code = __fmul_rn(x, inverse) < __fadd_rn(2.0f * draw(seed, place), -1.0f);
#else
            const int code = x < 0.0f;
#endif
            value = code ? -scale : scale;
            return code;
        } else {
            float rounded;
#if STOCHASTIC
            rounded = floorf(__fadd_rn(__fmul_rn(x, inverse), draw(seed, place)));
#else
            if constexpr (BITS == 2)
                rounded = 2.0f * fabsf(x) > scale && scale > 0.0f ? (x < 0.0f ? -1.0f : 1.0f) : 0.0f;
            else
                rounded = rintf(__fmul_rn(x, inverse));
#endif
            const float code = fminf(fmaxf(rounded, -(float)PEAK), (float)PEAK);
            value = __fmul_rn(code, scale);
            return (int)code & (int)MASK;
        }
    }

    static __device__ __forceinline__ float value_of(int code, float scale) {
        if constexpr (BITS == 16) return from_bf16((u16)code);
        if constexpr (BITS == 1) return code ? -scale : scale;
        return __fmul_rn((float)((int)((u32)code << (32 - BITS)) >> (32 - BITS)), scale);
    }

    // Of signs what is sent is cut, of other codes the elements: those within the limit then get the finer steps.
    static __device__ __forceinline__ void cut(const float (&x)[EACH], float limit, float (&offered)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) offered[i] = BITS == 1 || limit == NO_LIMIT ? x[i] : fminf(fmaxf(x[i], -limit), limit);
    }

    // Write a block's codes and scale, and tell what they stand for, which is at most `limit`. All lanes come together.
    static __device__ __forceinline__ void encode_block(
        const float (&given)[EACH], int length, float limit, int seed, int place, u8* message, const MessageForm& form, int block,
        float (&values)[EACH]) {
        const int lane = threadIdx.x & 31;
        float x[EACH];
        cut(given, limit, x);
        const float scale = scale_of(x, length, limit);
        const float inverse = BITS >= 4 || scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
        u32 codes[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) codes[i] = (u32)code_of(x[i], scale, inverse, seed, place + EACH * lane + i, values[i]);
        u32* words = reinterpret_cast<u32*>(message + form.codes) + (i64)block * WORDS;
        if constexpr (LANE_BITS >= 32) {
            constexpr int PER_WORD = 32 / BITS;
#pragma unroll
            for (int word = 0; word < LANE_BITS / 32; ++word) {
                u32 packed = 0;
#pragma unroll
                for (int i = 0; i < PER_WORD; ++i) packed |= codes[word * PER_WORD + i] << (i * BITS);
                words[lane * (LANE_BITS / 32) + word] = packed;
            }
        } else {
            constexpr int LANES = 32 / LANE_BITS;
            u32 packed = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) packed |= codes[i] << (i * BITS);
            packed <<= lane % LANES * LANE_BITS;
#pragma unroll
            for (int step = 1; step < LANES; step <<= 1) packed |= (u32)__shfl_xor_sync(EVERY_LANE, (int)packed, step);
            if (lane % LANES == 0) words[lane / LANES] = packed;
        }
        if constexpr (HAS_SCALE)
            if (lane == 0) reinterpret_cast<u16*>(message + form.scales)[block] = (u16)(__float_as_uint(scale) >> 16);
    }

    // What this lane's codes of a block stand for.
    static __device__ __forceinline__ void decode_block(const u8* message, const MessageForm& form, int block, float (&values)[EACH]) {
        const int lane = threadIdx.x & 31;
        const u32* words = reinterpret_cast<const u32*>(message + form.codes) + (i64)block * WORDS;
        float scale = 1.0f;
        if constexpr (HAS_SCALE) scale = from_bf16(reinterpret_cast<const u16*>(message + form.scales)[block]);
        if constexpr (LANE_BITS >= 32) {
            constexpr int PER_WORD = 32 / BITS;
#pragma unroll
            for (int word = 0; word < LANE_BITS / 32; ++word) {
                const u32 packed = words[lane * (LANE_BITS / 32) + word];
#pragma unroll
                for (int i = 0; i < PER_WORD; ++i)
                    values[word * PER_WORD + i] = value_of((int)((packed >> (i * BITS)) & MASK), scale);
            }
        } else {
            constexpr int LANES = 32 / LANE_BITS;
            const u32 packed = words[lane / LANES] >> (lane % LANES * LANE_BITS);
#pragma unroll
            for (int i = 0; i < EACH; ++i) values[i] = value_of((int)((packed >> (i * BITS)) & MASK), scale);
        }
    }
};

typedef Code<BITS_SENT> SentCode;
typedef Code<BITS_OF_SUMS> SumCode;

// -- elements of a piece -----------------------------------------------------------------------------------------------

// How many elements of the piece come from this lane's first one on; may be negative. Never cut to 0..EACH by min and max: a compiler was
// seen to take such a count of 0 for EACH and write into the next slot (benchmarks/LOG.md).
static __device__ __forceinline__ int lane_room(const QuantPiece& piece, int first) {
    return piece.count - first - EACH * (int)(threadIdx.x & 31);
}

static __device__ __forceinline__ void load_floats(const float* from, bool aligned, int room, float (&x)[EACH]) {
#if EACH % 4 == 0
    if (aligned && room >= EACH) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            const float4 quad = *reinterpret_cast<const float4*>(from + i);
            x[i] = quad.x, x[i + 1] = quad.y, x[i + 2] = quad.z, x[i + 3] = quad.w;
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] = i < room ? from[i] : 0.0f;
}

static __device__ __forceinline__ void store_floats(float* to, bool aligned, int room, const float (&x)[EACH]) {
#if EACH % 4 == 0
    if (aligned && room >= EACH) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4) *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (i < room) to[i] = x[i];
}

static __device__ __forceinline__ void load_gradients(const Gradient* from, bool aligned, int room, Gradient (&x)[EACH]) {
#if EACH % 4 == 0
    if (aligned && room >= EACH) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            const Quad quad = *reinterpret_cast<const Quad*>(from + i);
            x[i] = quad.x, x[i + 1] = quad.y, x[i + 2] = quad.z, x[i + 3] = quad.w;
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] = i < room ? from[i] : (Gradient)0;
}
