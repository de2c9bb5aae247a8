// Momentum correction: u, beside the residual v that selection chooses from. Order of operations and roundings are those of
// thinwire/memory/momentum.py and thinwire/memory/adam.py.
//
//   MOMENTUM 0   there is none                   v = v + g
//   MOMENTUM 1   u = m u + g                     v = v + u
//   NESTEROV 1   u = m u + g                     v = v + g + m u
//   SCALED 1     u = m u + gain g                v = v + u
//
// MASKING 1: u becomes 0 where something is sent. `kept` has what it was at every entry, in case the step has to be taken back.
// Without momentum all of this compiles to nothing.
//
// SCALED 1: selection compares weights, v / divisor, where the divisor is the root of Adam's second moment + eps. They are nowhere
// stored: kernels that look at memory again divide again. What is sent of an element is cut to `limit` divisors
// (thinwire/select/scaled.py); no limit is an infinite one. COLLECTED 1: u and v are in memory already, as a mean of all ranks had
// to be known before the divisor was. The gradient only tells whether there was one.

#include "row.cuh"

#ifndef MOMENTUM
#define MOMENTUM 0
#define NESTEROV 0
#define MASKING 0
#endif
#ifndef SCALED
#define SCALED 0
#define COLLECTED 0
#endif
// Whether u is read and written.
#define UPDATED (MOMENTUM && !COLLECTED)

#if SCALED
#define MOMENTUM_PARAMETERS \
    , const float* momentum_before, float* momentum, float* kept, const float* momentum_ratio, float momentum_factor, \
        float momentum_gain, const float* second_moment, float eps, float limit, const float* loss_scale
#define MOMENTUM_OF_GROUP \
    {momentum, kept, *momentum_ratio, momentum_factor, momentum_before, memory, momentum_gain, second_moment, eps, limit, loss_scale}
#elif MOMENTUM
#define MOMENTUM_PARAMETERS \
    , const float* momentum_before, float* momentum, float* kept, const float* momentum_ratio, float momentum_factor
#define MOMENTUM_OF_GROUP {momentum, kept, *momentum_ratio, momentum_factor, momentum_before}
#else
#define MOMENTUM_PARAMETERS
#define MOMENTUM_OF_GROUP {}
#endif

struct Momentum {
#if MOMENTUM
    float* u;             // laid out as memory is
    float* kept;          // one per entry of the payload
    float ratio;          // `before` times this is in the units of the gradient
    float factor;         // m
    const float* before;  // u before the step; may be the same buffer
#endif
#if SCALED
    const float* v;
    float gain;
    const float* second;      // moment, laid out as memory is
    float eps;
    float limit;              // in units of the divisor, before gradients are
    const float* loss_scale;  // multiplied with this
#endif

    __device__ __forceinline__ float get(i64 at) const {
#if UPDATED
        return before[at];
#else
        return 0.0f;
#endif
    }

    __device__ __forceinline__ void put(i64 at, float now) const {
#if UPDATED
        u[at] = now;
#endif
    }

    __device__ __forceinline__ float4 get_quad(i64 at) const {
#if UPDATED
        return *reinterpret_cast<const float4*>(before + at);
#else
        return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
    }

    __device__ __forceinline__ void put_quad(i64 at, float4 now) const {
#if UPDATED
        // Not u + at: the compiler does not see that it is aligned, and would store four times.
        reinterpret_cast<float4*>(u)[at / 4] = now;
#endif
    }

    // One or four neighbours.
    template <int WIDTH>
    __device__ __forceinline__ void get_some(i64 at, float (&x)[WIDTH]) const {
        if constexpr (WIDTH == 4) {
            const float4 four = get_quad(at);
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        } else {
            x[0] = get(at);
        }
    }

    template <int WIDTH>
    __device__ __forceinline__ void put_some(i64 at, const float (&x)[WIDTH]) const {
        if constexpr (WIDTH == 4)
            put_quad(at, make_float4(x[0], x[1], x[2], x[3]));
        else
            put(at, x[0]);
    }

    // -- weights: what selection compares. Without a scale that is v itself ---------------------------------------------

    // What `weigh` needs of an element, or of four neighbours.
    __device__ __forceinline__ float get_moment(i64 at) const {
#if SCALED
        return second[at];
#else
        return 0.0f;
#endif
    }

    __device__ __forceinline__ float4 get_moment_quad(i64 at) const {
#if SCALED
        return *reinterpret_cast<const float4*>(second + at);
#else
        return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
    }

    template <int WIDTH>
    __device__ __forceinline__ void get_some_moments(i64 at, float (&x)[WIDTH]) const {
        if constexpr (WIDTH == 4) {
            const float4 four = get_moment_quad(at);
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        } else {
            x[0] = get_moment(at);
        }
    }

#if SCALED
    __device__ __forceinline__ float divisor(float moment) const { return __fadd_rn(__fsqrt_rn(moment), eps); }
#endif

    __device__ __forceinline__ float weigh(float value, float moment) const {
#if SCALED
        return __fdiv_rn(value, divisor(moment));
#else
        return value;
#endif
    }

    __device__ __forceinline__ float4 weigh_quad(const float4& x, const float4& moments) const {
        return make_float4(weigh(x.x, moments.x), weigh(x.y, moments.y), weigh(x.z, moments.z), weigh(x.w, moments.w));
    }

    // Of a value that lies at `at` in memory.
    __device__ __forceinline__ float weigh_held(float value, i64 at) const { return weigh(value, get_moment(at)); }

    // -- elements ---------------------------------------------------------------------------------------------------------

    // One element: `last` is u and becomes the new u. Returns the new v. Never contracted to one rounding: the reference rounds
    // twice.
    __device__ __forceinline__ float add(float gradient, float held, float scale, float& last) const {
#if COLLECTED
        return held;
#elif SCALED
        // torch adds a multiple with one rounding, on the CPU and on CUDA.
        last = fmaf(gradient, gain, __fmul_rn(__fmul_rn(last, ratio), factor));
        const float now = __fadd_rn(__fmul_rn(held, scale), last);
        // Where u overflows v does too, which tells of it.
        if (!is_finite(last)) last = 0.0f;
        return now;
#elif MOMENTUM
        last = __fadd_rn(__fmul_rn(__fmul_rn(last, ratio), factor), gradient);
        held = __fmul_rn(held, scale);
#if NESTEROV
        // torch adds a multiple with one rounding, on the CPU and on CUDA.
        const float now = fmaf(last, factor, __fadd_rn(held, gradient));
#else
        const float now = __fadd_rn(held, last);
#endif
        // Where u overflows v does too, which tells of it.
        if (!is_finite(last)) last = 0.0f;
        return now;
#else
        return __fadd_rn(__fmul_rn(held, scale), gradient);
#endif
    }

    // The same of a gradient that may not be finite.
    __device__ __forceinline__ float compensate(Gradient raw, float held, float scale, float& last, bool& had, bool& bad) const {
        return add(finite_gradient(raw, had, bad), held, scale, last);
    }

    // Write one chosen entry, of this weight, to the payload; returns what stays of v.
    __device__ __forceinline__ float send(float weight, int index, int place, const Row& row, u8* payload, bool& bad) const {
#if SCALED
        return send_limited(index, place, row, payload, bad);
#else
        float sent;
        const float left = ::send(weight, index, place, row, payload, sent, bad);
#if MASKING
        const i64 at = row.memory + (i64)index * row.stride;
        kept[row.entry + place] = u[at];
        // What the wire rounds to 0 was not sent.
        if (sent != 0.0f) u[at] = 0.0f;
#endif
        return left;
#endif
    }

#if SCALED
    // What is cut off was not sent, so that it stays.
    __device__ __forceinline__ float send_limited(int index, int place, const Row& row, u8* payload, bool& bad) const {
        const i64 at = row.memory + (i64)index * row.stride;
        const float value = v[at], most = shorten(__fmul_rn(divisor(second[at]), __fmul_rn(limit, *loss_scale)));
        // What is not finite passes, so that it is seen.
        const float part = is_finite(value) ? fminf(fmaxf(value, -most), most) : value;
        float sent;
        ::send(part, index, place, row, payload, sent, bad);
        const float left = __fsub_rn(value, sent);
        return is_finite(left) ? left : 0.0f;
    }

    // With the bits of bfloat16, towards zero.
    static __device__ __forceinline__ float shorten(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }
#endif

    // Undo what `send` masked.
    __device__ __forceinline__ void give_back(i64 at, int place, const Row& row) const {
#if MASKING
        u[at] = kept[row.entry + place];
#endif
    }
};
