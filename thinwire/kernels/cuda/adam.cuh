// Adam's momentum and Adam's scale. Order of operations and roundings are those of thinwire/memory/adam.py and of
// thinwire/exchange/quantized.py.
//
//   ADAM 0   c = residual + g                             codes stand for c
//   ADAM 1   u = beta u + gain g;  c = residual + u       codes stand for c / divisor,  divisor = sqrt(v) + eps
//
// What is sent is at most `limit` divisors, of a sum `limit_of_sums`; no limit is an infinite one. Without ADAM all of this
// compiles to nothing.

#if ADAM
#define LIMIT_PARAMETERS , const float* loss_scale, float limit, float limit_of_sums, float* limits
#define MOMENTUM_PARAMETERS , const float* momentum_before, float* momentum, const float* momentum_ratio, float beta, float gain
#define MOMENTUM_OF_GROUP {momentum_before, momentum, *momentum_ratio, beta, gain}
#define SCALE_PARAMETERS , const float* second_moment, float eps, const float* limits
#define SCALE_OF_GROUP {second_moment, eps, limits[0], limits[1]}
#define SCALE_OF_RECORD(record) {record.second_moment, record.eps, 0.0f, 0.0f}
#else
#define LIMIT_PARAMETERS
#define MOMENTUM_PARAMETERS
#define MOMENTUM_OF_GROUP {}
#define SCALE_PARAMETERS
#define SCALE_OF_GROUP {}
#define SCALE_OF_RECORD(record) {}
#endif

// A rank's own momentum, laid out as memory is.
struct AdamMomentum {
#if ADAM
    const float* before;  // may be the same buffer as `now`
    float* now;
    float ratio;  // `before` times this is in the units of the gradient
    float beta;
    float gain;
#endif

    __device__ __forceinline__ void load(i64 at, int room, float (&u)[EACH]) const {
#if ADAM
        load_floats(before + at, true, room, u);
#endif
    }

    __device__ __forceinline__ void store(i64 at, int room, const float (&u)[EACH]) const {
#if ADAM
        store_floats(now + at, true, room, u);
#endif
    }

    // c of one element: `held` is the residual. `last` is u and becomes the new u.
    __device__ __forceinline__ float add(float gradient, float held, float held_ratio, float& last) const {
        held = __fmul_rn(held, held_ratio);
#if ADAM
        // torch adds a multiple with one rounding, on the CPU and on CUDA.
        last = fmaf(gradient, gain, __fmul_rn(__fmul_rn(last, ratio), beta));
        const float c = __fadd_rn(held, last);
        // Where u overflows c does too, which tells of it.
        if (!is_finite(last)) last = 0.0f;
        return c;
#else
        return __fadd_rn(held, gradient);
#endif
    }
};

// The scale in which codes are written: what each element is divided by.
struct AdamScale {
#if ADAM
    const float* v;  // laid out as memory is
    float eps;
    float limit;
    float limit_of_sums;
#endif

    // What `divide` and `multiply` need of this lane's elements.
    __device__ __forceinline__ void load(i64 at, int room, float (&of)[EACH]) const {
#if ADAM
        load_floats(v + at, true, room, of);
#endif
    }

    __device__ __forceinline__ void find_divisors(float (&of)[EACH]) const {
#if ADAM
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float divisor = __fadd_rn(__fsqrt_rn(of[i]), eps);
            of[i] = divisor > 0.0f ? divisor : 1.0f;
        }
#endif
    }

    __device__ __forceinline__ float divide(float x, float divisor) const {
#if ADAM
        return __fdiv_rn(x, divisor);
#else
        return x;
#endif
    }

    __device__ __forceinline__ float multiply(float x, float divisor) const {
#if ADAM
        return __fmul_rn(x, divisor);
#else
        return x;
#endif
    }

    // What an owner adds up of its own c: not more than others send, where sums have more bits than what is sent.
    __device__ __forceinline__ float own_part(float c, float divisor) const {
        const float x = divide(c, divisor);
#if ADAM && BITS_OF_SUMS > BITS_SENT
        return fminf(fmaxf(x, -limit), limit);
#else
        return x;
#endif
    }

    // What an owner keeps: of the sum, and what it refused of its own.
    __device__ __forceinline__ float with_refused(float left, float c, float divisor) const {
#if ADAM && BITS_OF_SUMS > BITS_SENT
        return __fadd_rn(left, __fsub_rn(c, multiply(own_part(c, divisor), divisor)));
#else
        return left;
#endif
    }

    // The most that a code may stand for.
    __device__ __forceinline__ float most_sent() const {
#if ADAM
        return limit;
#else
        return NO_LIMIT;
#endif
    }

    __device__ __forceinline__ float most_of_sums() const {
#if ADAM
        return limit_of_sums;
#else
        return NO_LIMIT;
#endif
    }
};
