// Small tensors that travel whole: to the wire, and the ranks' mean back into the bucket. Beside a payload they share its buffer,
// its first launch (`open_payload`) and the launch that decodes it (decode.cu).

#include "dense.cuh"

extern "C" __global__ void dense_send(
    const Gradient* bucket, float* packed, const Stretch* stretches, u8* wrong, int world) {
    // Nobody raises it before the ranks' values are there.
    if (blockIdx.x == 0 && threadIdx.x == 0) *wrong = 0;
    const Stretch stretch = stretches[blockIdx.x];
    send_stretch(bucket, packed, stretch, world);
}

// `wrong` goes up if a sum is not finite.
extern "C" __global__ void dense_mean(
    const u8* gathered, float* bucket, const Stretch* stretches, u8* wrong, int world, int row_bytes) {
    const Stretch stretch = stretches[blockIdx.x];
    if (mean_stretch(gathered, bucket, stretch, world, row_bytes)) raise(wrong);
}

// What encoding expects of a payload: header and zeros, both flags of the last step down. The first `copying` blocks do that,
// each of the others a stretch.
extern "C" __global__ void open_payload(
    const float4* blank, float4* payload, const Gradient* bucket, float* packed, const Stretch* stretches, u8* status,
    int quads, int copying, int world) {
    const int block = (int)blockIdx.x;
    if (block >= copying) {
        const Stretch stretch = stretches[block - copying];
        send_stretch(bucket, packed, stretch, world);
        return;
    }
    if (block == 0 && threadIdx.x < 2) status[threadIdx.x] = 0;
    const int at = block * STRETCH_THREADS + (int)threadIdx.x;
    if (at < quads) payload[at] = blank[at];
}

// The means of dense tensors get their momentum: u = m u + mean, the update being u (Nesterov: mean + m u), in the order and with
// the roundings of thinwire/memory/dense_momentum.py. u and `before`, which keeps what it was, lie as on the wire. `wrong` goes up
// if an update is not finite.
extern "C" __global__ void dense_momentum(
    float* bucket, float* u, float* before, const Stretch* stretches, u8* wrong, const float* ratio, float factor,
    int nesterov) {
    const Stretch stretch = stretches[blockIdx.x];
    const float scale = *ratio;
    float means[EACH], held[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        means[i] = bucket[stretch.bucket + element(stretch, i)];
        held[i] = u[stretch.packed + element(stretch, i)];
    }
    bool bad = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = (int)threadIdx.x + i * STRETCH_THREADS;
        // Behind the end are others' elements, which may have changed by now.
        if (at >= stretch.count) break;
        const float last = __fmul_rn(held[i], scale), now = __fadd_rn(__fmul_rn(last, factor), means[i]);
        // torch adds a multiple with one rounding.
        const float update = nesterov ? fmaf(now, factor, means[i]) : now;
        before[stretch.packed + at] = last;
        u[stretch.packed + at] = now;
        bucket[stretch.bucket + at] = update;
        bad |= (__float_as_int(update) & 0x7fffffff) >= INFINITE;
    }
    if (bad) raise(wrong);
}

// A momentum that may have to be again what it was.
struct Trace {
    float* u;
    const float* before;
    i64 count;
};

#define MOST_TRACES 128
struct Traces {
    Trace at[MOST_TRACES];
};

// For all buckets of a step, as many blocks for each; they usually only look.
extern "C" __global__ void restore_all(IN_PLACE Traces traces, const u8* bad, int blocks_each) {
    if (!*bad) return;
    const Trace& trace = traces.at[blockIdx.x / blocks_each];
    const i64 threads = (i64)blocks_each * blockDim.x;
    for (i64 i = (i64)(blockIdx.x % blocks_each) * blockDim.x + threadIdx.x; i < trace.count; i += threads)
        trace.u[i] = trace.before[i];
}
