// What all kernels share: the row table, magnitudes as bits, wire floats.
//
// The same sources run on the CPU in the tests (tests/kernels/cuda_on_cpu.h), so they use plain C++ and a few warp functions.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

// Parameters where they lie, so that a block reads its own part of a long one there and no thread has a copy of all.
#ifdef __CUDACC_RTC__
#define IN_PLACE const __grid_constant__
#else
#define IN_PLACE
#endif

#define EVERY_LANE 0xffffffffu
#define INFINITE 0x7f800000

// One row of a group; written by thinwire/kernels/cuda/tables.py. Offsets of elements, except in the payload.
struct Row {
    i64 gradient;  // in the bucket
    i64 memory;    // in the group's own buffer
    i64 values;    // byte of its first value in the payload
    i64 indices;   // byte of its first index in the payload; where they are packed, its bit
    int length;
    int keep;
    int stride;
    int slot;
    int width;       // bytes of an index, 4 or 2; where they are packed, bits
    u16 vector;      // 1: four elements at a time are aligned in bucket and memory
    u16 quads;       // 1: in memory
    int aim;         // candidates that stream_rows wants of it; 0: it has no room for so many
    int entry;  // number of its first entry in the payload
};

// Words of the payload header, as in thinwire/wire/codec.py.
#define HEADER_FLAGS 1
#define HEADER_FIXED 5
#define HEADER_SLOT 2
#define HEADER_HAD 1

static __device__ __forceinline__ int* had_word(u8* payload, int slot) {
    return reinterpret_cast<int*>(payload) + HEADER_FIXED + slot * HEADER_SLOT + HEADER_HAD;
}

// -- wire floats: integer arithmetic, so that a cast needs no header and is the same everywhere ------------------------

static __device__ __forceinline__ u16 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static __device__ __forceinline__ float from_bf16(u16 code) { return __uint_as_float((u32)code << 16); }

static __device__ __forceinline__ u16 to_fp16(float x) {
    u32 bits = __float_as_uint(x), sign = (bits >> 16) & 0x8000, m = bits & 0x7fffffff;
    if (m >= 0x38800000) {  // a normal number of fp16
        m += 0xfff + ((m >> 13) & 1);
        return (u16)(sign | ((m - 0x38000000) >> 13));
    }
    if (m < 0x33000000) return (u16)sign;  // below half of the smallest
    u32 exponent = m >> 23, mantissa = (m & 0x7fffff) | 0x800000, shift = 126 - exponent;
    u32 kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1));
    return (u16)(sign | kept);
}

static __device__ __forceinline__ float from_fp16(u16 code) {
    u32 sign = (u32)(code & 0x8000) << 16, exponent = (code >> 10) & 31, mantissa = code & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | (mantissa << 13));
    if (exponent) return __uint_as_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
    // A subnormal: mantissa x 2^-24, exact in float32.
    return __uint_as_float(__float_as_uint((float)mantissa * 5.9604644775390625e-8f) | sign);
}

#if VALUE_CODE == 0
typedef float Value;
#define LARGEST 3.4028234663852886e38f
static __device__ __forceinline__ Value to_wire(float x) { return x; }
static __device__ __forceinline__ float from_wire(Value x) { return x; }
#elif VALUE_CODE == 1
typedef u16 Value;
#define LARGEST 3.3895313892515355e38f
static __device__ __forceinline__ Value to_wire(float x) { return to_bf16(x); }
static __device__ __forceinline__ float from_wire(Value x) { return from_bf16(x); }
#else
typedef u16 Value;
#define LARGEST 65504.0f
static __device__ __forceinline__ Value to_wire(float x) { return to_fp16(x); }
static __device__ __forceinline__ float from_wire(Value x) { return from_fp16(x); }
#endif

#if GRADIENT_CODE == 0
typedef float Gradient;
typedef float4 Quad;
static __device__ __forceinline__ float to_float(Gradient x) { return x; }
#elif GRADIENT_CODE == 1
typedef u16 Gradient;
typedef ushort4 Quad;
static __device__ __forceinline__ float to_float(Gradient x) { return from_bf16(x); }
#else
typedef u16 Gradient;
typedef ushort4 Quad;
static __device__ __forceinline__ float to_float(Gradient x) { return from_fp16(x); }
#endif

#if PACKED
static __device__ __forceinline__ int read_index(const u8* payload, const Row& row, int place) {
    const i64 bit = row.indices + (i64)place * row.width;
    const u32* words = reinterpret_cast<const u32*>(payload) + (bit >> 5);
    const int shift = (int)(bit & 31);
    u32 field = words[0] >> shift;
    if (shift + row.width > 32) field |= words[1] << (32 - shift);
    return (int)(field & ((1u << row.width) - 1));
}

// The bits of the payload are 0 before; neighbours share words.
static __device__ __forceinline__ void write_index(u8* payload, const Row& row, int place, int index) {
    const i64 bit = row.indices + (i64)place * row.width;
    u32* words = reinterpret_cast<u32*>(payload) + (bit >> 5);
    const int shift = (int)(bit & 31);
    if (row.width) atomicOr(words, (u32)index << shift);
    if (shift + row.width > 32) atomicOr(words + 1, (u32)index >> (32 - shift));
}
#else
static __device__ __forceinline__ int read_index(const u8* payload, const Row& row, int place) {
    const u8* at = payload + row.indices;
    return row.width == 4 ? reinterpret_cast<const int*>(at)[place] : reinterpret_cast<const u16*>(at)[place];
}

static __device__ __forceinline__ void write_index(u8* payload, const Row& row, int place, int index) {
    u8* at = payload + row.indices;
    if (row.width == 4)
        reinterpret_cast<int*>(at)[place] = index;
    else
        reinterpret_cast<u16*>(at)[place] = (u16)index;
}
#endif

// -- warps ------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ int warp_sum(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(EVERY_LANE, x, step);
    return x;
#else
    return __reduce_add_sync(EVERY_LANE, x);
#endif
}

static __device__ __forceinline__ int warp_max(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    for (int step = 16; step; step >>= 1) x = max(x, __shfl_xor_sync(EVERY_LANE, x, step));
    return x;
#else
    return __reduce_max_sync(EVERY_LANE, x);
#endif
}

static __device__ __forceinline__ int lanes_before(u32 ballot, int lane) {
    return __popc(ballot & ((1u << lane) - 1));
}

// Inclusive sum over the lanes up to this one.
static __device__ __forceinline__ int sum_upto(int x, int lane) {
    for (int step = 1; step < 32; step <<= 1) {
        int other = __shfl_up_sync(EVERY_LANE, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

// One element of the gradient; what is not finite counts as none and is reported.
static __device__ __forceinline__ float finite_gradient(Gradient raw, bool& had, bool& bad) {
    float gradient = to_float(raw);
    int bits = __float_as_int(gradient) & 0x7fffffff;
    had |= bits != 0;
    if (bits >= INFINITE) {
        bad = true;
        gradient = 0.0f;
    }
    return gradient;
}

// One compensated element.
static __device__ __forceinline__ float compensate(Gradient raw, float held, float ratio, bool& had, bool& bad) {
    // Never contracted to one rounding: the reference rounds twice.
    return __fadd_rn(__fmul_rn(held, ratio), finite_gradient(raw, had, bad));
}

// The same without looking: `any` and `top` tell afterwards whether there was a gradient and whether one was not finite.
static __device__ __forceinline__ float compensate_unseen(Gradient raw, float held, float ratio, int& any, int& top) {
    float gradient = to_float(raw);
    int bits = __float_as_int(gradient) & 0x7fffffff;
    any |= bits;
    top = max(top, bits);
    return __fadd_rn(__fmul_rn(held, ratio), gradient);
}

// Loads that are under way at once: memory is far away, and a loop that waits for each of them is many times slower.
#define BATCH 8

// Write one chosen entry to the payload; `sent` is what it says there, what stays in memory is returned.
static __device__ __forceinline__ float send(
    float c, int index, int place, const Row& row, u8* payload, float& sent, bool& bad) {
    bad |= (__float_as_int(c) & 0x7fffffff) >= INFINITE;
    Value code = to_wire(fminf(fmaxf(c, -LARGEST), LARGEST));
    reinterpret_cast<Value*>(payload + row.values)[place] = code;
    write_index(payload, row, place, index);
    sent = from_wire(code);
    float left = __fsub_rn(c, sent);
    return (__float_as_int(left) & 0x7fffffff) >= INFINITE ? 0.0f : left;
}

// Raise a flag that many threads may raise at once. Looking first keeps them from queueing at one address, if it is the cache of a
// multiprocessor that is looked at: it has nothing of what was there before the launch.
template <class Flag>
static __device__ __forceinline__ void raise(Flag* flag) {
    if (*flag != 1) *flag = 1;
}

// What the lanes of a warp saw, to the payload. Looks and stores queue at one address, and all warps come at about the same time: of
// those of a block one does. `told`, 0 at first, is the slot that was last told of, and one more.
static __device__ __forceinline__ void tell(bool had, bool bad, int slot, u32* told, u8* payload) {
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if ((threadIdx.x & 31) != 0) return;
    if (any_had && atomicExch(told, (u32)slot + 1) != (u32)slot + 1) raise(had_word(payload, slot));
    if (any_bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
}
