// What all kernels share: types, floats on the wire, sums over a warp.
//
// The same sources run on the CPU in the tests (tests/kernels/cuda_on_cpu.h), so they use plain C++ and a few warp functions.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

// A long parameter stays where the driver puts it. Otherwise every thread would have a copy of all of it.
#ifdef __CUDACC_RTC__
#define IN_PLACE const __grid_constant__
#else
#define IN_PLACE
#endif

// Whether a field of a structure lies at a place. Older NVRTCs cannot tell; newer ones, and the compiler of the tests, can.
#ifdef __has_builtin
#if __has_builtin(__builtin_offsetof)
#define LIES_AT(structure, field, place) (__builtin_offsetof(structure, field) == place)
#endif
#endif
#ifndef LIES_AT
#define LIES_AT(structure, field, place) true
#endif

#define EVERY_LANE 0xffffffffu
#define INFINITE 0x7f800000

// The pattern of |x|. Patterns are ordered as magnitudes are; those from INFINITE on are not finite.
static __device__ __forceinline__ int magnitude(float x) { return __float_as_int(x) & 0x7fffffff; }

static __device__ __forceinline__ bool is_finite(float x) { return magnitude(x) < INFINITE; }

// -- floats of 16 bits: by integer arithmetic, so that casts need no header and are the same everywhere ----------------

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

#if GRADIENT_CODE == FLOAT32
typedef float Gradient;
typedef float4 Quad;
static __device__ __forceinline__ float to_float(Gradient x) { return x; }
#elif GRADIENT_CODE == BFLOAT16
typedef u16 Gradient;
typedef ushort4 Quad;
static __device__ __forceinline__ float to_float(Gradient x) { return from_bf16(x); }
#else
typedef u16 Gradient;
typedef ushort4 Quad;
static __device__ __forceinline__ float to_float(Gradient x) { return from_fp16(x); }
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

// What the lane has whose number differs in the bit `step`.
static __device__ __forceinline__ double shuffle_double(double x, int step) {
    const i64 bits = __double_as_longlong(x);
    const u32 low = (u32)__shfl_xor_sync(EVERY_LANE, (int)bits, step);
    const u32 high = (u32)__shfl_xor_sync(EVERY_LANE, (int)(bits >> 32), step);
    return __longlong_as_double((i64)(((unsigned long long)high << 32) | low));
}

static __device__ __forceinline__ int lanes_before(u32 ballot, int lane) {
    return __popc(ballot & ((1u << lane) - 1));
}

// Sum over the lanes up to this one, which counts too.
static __device__ __forceinline__ int sum_upto(int x, int lane) {
    for (int step = 1; step < 32; step <<= 1) {
        int other = __shfl_up_sync(EVERY_LANE, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

// One element of the gradient. What is not finite becomes 0 and is reported.
static __device__ __forceinline__ float finite_gradient(Gradient raw, bool& had, bool& bad) {
    float gradient = to_float(raw);
    int bits = magnitude(gradient);
    had |= bits != 0;
    if (bits >= INFINITE) {
        bad = true;
        gradient = 0.0f;
    }
    return gradient;
}

// One compensated element. Never contracted to one rounding: the reference rounds twice.
static __device__ __forceinline__ float compensate(Gradient raw, float held, float ratio, bool& had, bool& bad) {
    return __fadd_rn(__fmul_rn(held, ratio), finite_gradient(raw, had, bad));
}

// Loads that are under way at once. Memory is far away: a loop that waits for each load is many times slower.
#define BATCH 8

// Raise a flag that many threads may raise at once. They look first, because stores queue at one address. A look costs little: the
// cache of the multiprocessor answers.
template <class Flag>
static __device__ __forceinline__ void raise(Flag* flag) {
    if (*flag != 1) *flag = 1;
}
