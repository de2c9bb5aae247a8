// Narrow memory: the float32 values of a whole group <-> its bf16 or int8 codes, in one launch each way.
//
// The bits are those of thinwire/memory/storage.py. A warp takes blocks of BLOCK elements, four to a lane. A block never spans two
// slots.

// BLOCK elements share an exponent.
static_assert(BLOCK == 4 * 32, "four to a lane");
// Blocks that a warp loads at once.
#define AHEAD 4

// A piece of a slot; it begins with a block.
struct Piece {
    i64 at;     // of its first element, in the values and in the codes
    int place;  // elements of the slot that come before
    int count;
    int block;  // its first exponent
    int gap;    // elements behind it that belong to no slot
};
static_assert(LAYOUT_OF_Piece, "pack.py has another Piece");

#if PACK_BFLOAT16
typedef u16 Code;
typedef ushort4 CodeQuad;
#define LARGEST_PACKED 3.3895313892515355e38f
#else
typedef signed char Code;
typedef u32 CodeQuad;
#define LARGEST_PACKED 3.3762391092936863e38f  // 127 x 2^121
#endif

// Whether the piece has all of four neighbouring elements from `first` on, and they are aligned.
static __device__ __forceinline__ bool is_whole_quad(const Piece& piece, int first) {
    return first + 4 <= piece.count && (piece.at & 3) == 0;
}

// A hash of an element's bits and place, in [0, 2^16).
static __device__ __forceinline__ int noise(int bits, int place) {
    u32 mixed = (u32)bits * 2654435769u + (u32)place * 668265263u;
    mixed = (mixed ^ (u32)((int)mixed >> 15)) * 2246822507u;
    return ((mixed ^ (u32)((int)mixed >> 13)) >> 7) & 0xffff;
}

static __device__ __forceinline__ void load_values(const float* flat, const Piece& piece, int first, float* x) {
    const float* at = flat + piece.at + first;
    if (is_whole_quad(piece, first)) {
        const float4 quad = *reinterpret_cast<const float4*>(at);
        x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
    } else {
        for (int i = 0; i < 4; ++i) x[i] = first + i < piece.count ? at[i] : 0.0f;
    }
    for (int i = 0; i < 4; ++i) x[i] = is_finite(x[i]) ? fminf(fmaxf(x[i], -LARGEST_PACKED), LARGEST_PACKED) : 0.0f;
}

static __device__ __forceinline__ void store_codes(Code* codes, const Piece& piece, int first, const Code* code) {
    Code* at = codes + piece.at + first;
    if (is_whole_quad(piece, first)) {
#if PACK_BFLOAT16
        CodeQuad quad;
        quad.x = code[0], quad.y = code[1], quad.z = code[2], quad.w = code[3];
#else
        CodeQuad quad = 0;
        for (int i = 0; i < 4; ++i) quad |= (u32)(u8)code[i] << (8 * i);
#endif
        *reinterpret_cast<CodeQuad*>(at) = quad;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i < piece.count) at[i] = code[i];
    }
}

static __device__ __forceinline__ void load_codes(const Code* codes, const Piece& piece, int first, Code* code) {
    const Code* at = codes + piece.at + first;
    if (is_whole_quad(piece, first)) {
        const CodeQuad quad = *reinterpret_cast<const CodeQuad*>(at);
#if PACK_BFLOAT16
        code[0] = quad.x, code[1] = quad.y, code[2] = quad.z, code[3] = quad.w;
#else
        for (int i = 0; i < 4; ++i) code[i] = (Code)(quad >> (8 * i));
#endif
    } else {
        for (int i = 0; i < 4; ++i) code[i] = first + i < piece.count ? at[i] : 0;
    }
}

static __device__ __forceinline__ void store_values(float* flat, const Piece& piece, int first, const float* x) {
    float* at = flat + piece.at + first;
    if (is_whole_quad(piece, first)) {
        *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i < piece.count) at[i] = x[i];
    }
}

// The codes of four elements of a block; all lanes of a warp come here together.
static __device__ __forceinline__ void encode(const float* x, int place, Code* code, signed char* exponent, int lane) {
#if PACK_BFLOAT16
    for (int i = 0; i < 4; ++i) {
        const int bits = __float_as_int(x[i]);
        code[i] = (u16)((u32)(bits + noise(bits, place + i)) >> 16);
    }
#else
    int top = 0;
    for (int i = 0; i < 4; ++i) top = max(top, magnitude(x[i]));
    // The smallest exponent with which nothing is above 127 = 1.984375 x 2^6.
    const int power = max(((warp_max(top) + 0x1ffff) >> 23) - 133, -126);
    const float scale = __int_as_float((127 - power) << 23);
    for (int i = 0; i < 4; ++i) {
        const float chance = (float)noise(__float_as_int(x[i]), place + i) * 1.52587890625e-5f;
        const float rounded = floorf(__fadd_rn(__fmul_rn(x[i], scale), chance));
        code[i] = (Code)fminf(fmaxf(rounded, -127.0f), 127.0f);
    }
    if (lane == 0) *exponent = (signed char)power;
#endif
}

static __device__ __forceinline__ float decode(Code code, float scale) {
#if PACK_BFLOAT16
    return from_bf16(code);
#else
    return __fmul_rn((float)code, scale);
#endif
}

// Nothing happens unless the flag is up.
extern "C" __global__ void pack_slots(
    const float* flat, Code* codes, signed char* exponents, const Piece* pieces, const u8* flag, int count) {
    if (*flag == 0) return;
    const int lane = threadIdx.x & 31, warps = blockDim.x / 32;
    for (int number = blockIdx.x; number < count; number += gridDim.x) {
        const Piece piece = pieces[number];
        for (int first = threadIdx.x / 32 * AHEAD * BLOCK; first < piece.count; first += warps * AHEAD * BLOCK) {
            float x[AHEAD][4];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) load_values(flat, piece, first + i * BLOCK + 4 * lane, x[i]);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int at = first + i * BLOCK;
                if (at >= piece.count) break;
                Code code[4];
                encode(x[i], piece.place + at + 4 * lane, code, exponents + piece.block + at / BLOCK, lane);
                store_codes(codes, piece, at + 4 * lane, code);
            }
        }
    }
}

// Gaps between slots become zero.
extern "C" __global__ void unpack_slots(
    const Code* codes, const signed char* exponents, float* flat, const Piece* pieces, const u8* flag, int count) {
    if (*flag == 0) return;
    const int lane = threadIdx.x & 31, warps = blockDim.x / 32;
    for (int number = blockIdx.x; number < count; number += gridDim.x) {
        const Piece piece = pieces[number];
        for (int i = threadIdx.x; i < piece.gap; i += blockDim.x) flat[piece.at + piece.count + i] = 0.0f;
        for (int first = threadIdx.x / 32 * AHEAD * BLOCK; first < piece.count; first += warps * AHEAD * BLOCK) {
            Code code[AHEAD][4];
            float scale[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int at = first + i * BLOCK;
                load_codes(codes, piece, at + 4 * lane, code[i]);
#if PACK_BFLOAT16
                scale[i] = 1.0f;
#else
                scale[i] = at < piece.count ? __int_as_float((exponents[piece.block + at / BLOCK] + 127) << 23) : 0.0f;
#endif
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                float x[4];
                for (int j = 0; j < 4; ++j) x[j] = decode(code[i][j], scale[i]);
                store_values(flat, piece, first + i * BLOCK + 4 * lane, x);
            }
        }
    }
}
