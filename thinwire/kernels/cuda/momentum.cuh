// Momentum correction: u, beside the residual v that selection chooses from. Order of operations and roundings are those of
// thinwire/memory/momentum.py.
//
//   MOMENTUM 0   there is none                   v = v + g
//   MOMENTUM 1   u = m u + g                     v = v + u
//   NESTEROV 1   u = m u + g                     v = v + g + m u
//
// MASKING 1: u becomes 0 where something is sent. `kept` has what it was at every entry, in case the step has to be taken back.
// Without momentum all of this compiles to nothing.

#include "row.cuh"

#ifndef MOMENTUM
#define MOMENTUM 0
#define NESTEROV 0
#define MASKING 0
#endif

#if MOMENTUM
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

    __device__ __forceinline__ float get(i64 at) const {
#if MOMENTUM
        return before[at];
#else
        return 0.0f;
#endif
    }

    __device__ __forceinline__ void put(i64 at, float now) const {
#if MOMENTUM
        u[at] = now;
#endif
    }

    __device__ __forceinline__ float4 get_quad(i64 at) const {
#if MOMENTUM
        return *reinterpret_cast<const float4*>(before + at);
#else
        return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
    }

    __device__ __forceinline__ void put_quad(i64 at, float4 now) const {
#if MOMENTUM
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

    // One element: `last` is u and becomes the new u. Returns the new v. Never contracted to one rounding: the reference rounds
    // twice.
    __device__ __forceinline__ float add(float gradient, float held, float scale, float& last) const {
#if MOMENTUM
        last = __fadd_rn(__fmul_rn(__fmul_rn(last, ratio), factor), gradient);
        held = __fmul_rn(held, scale);
#if NESTEROV
        // torch adds a multiple with one rounding, on the CPU and on CUDA.
        return fmaf(last, factor, __fadd_rn(held, gradient));
#else
        return __fadd_rn(held, last);
#endif
#else
        return __fadd_rn(__fmul_rn(held, scale), gradient);
#endif
    }

    // The same of a gradient that may not be finite.
    __device__ __forceinline__ float compensate(Gradient raw, float held, float scale, float& last, bool& had, bool& bad) const {
        return add(finite_gradient(raw, had, bad), held, scale, last);
    }

    // Write one chosen entry to the payload; returns what stays of v.
    __device__ __forceinline__ float send(float c, int index, int place, const Row& row, u8* payload, bool& bad) const {
        float sent;
        const float left = ::send(c, index, place, row, payload, sent, bad);
#if MOMENTUM
        const i64 at = row.memory + (i64)index * row.stride;
        float now = u[at];
        // A sum of finite numbers can overflow, and nothing of that may stay. Where u is infinite v is too, and is sent: looking
        // here is enough.
        if (!is_finite(now)) u[at] = now = 0.0f;
#if MASKING
        kept[row.entry + place] = now;
        // What the wire rounds to 0 was not sent.
        if (sent != 0.0f) u[at] = 0.0f;
#endif
#endif
        return left;
    }

    // Undo what `send` masked.
    __device__ __forceinline__ void give_back(i64 at, int place, const Row& row) const {
#if MASKING
        u[at] = kept[row.entry + place];
#endif
    }
};
