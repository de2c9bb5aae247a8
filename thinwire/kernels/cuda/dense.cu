// Small tensors that travel whole: to the wire, and the mean of all ranks back into the bucket. With a payload they share its
// buffer, its first launch (`open_payload`) and its decoding (decode.cu).

#include "dense.cuh"

extern "C" __global__ void dense_send(
    const Gradient* bucket, float* packed, const Stretch* stretches, u8* wrong, int world) {
    // It is raised only after the exchange.
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

// Make a payload what encoding expects: header and zeros, and both flags of the last step down. The first `copying` blocks do that,
// each of the others sends a stretch.
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

// Momentum of dense tensors: u = m u + mean, and the update is u (Nesterov: mean + m u). Order and roundings are those of
// thinwire/compress/dense_momentum.py. u lies as on the wire; what it was is in `before`, which may be the same buffer. `wrong` goes
// up if an update is not finite.
extern "C" __global__ void dense_momentum(
    float* bucket, const float* before, float* u, const Stretch* stretches, u8* wrong, const float* ratio, float factor,
    int nesterov) {
    const Stretch stretch = stretches[blockIdx.x];
    const float scale = *ratio;
    float means[EACH], held[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        means[i] = bucket[stretch.bucket + element(stretch, i)];
        held[i] = before[stretch.packed + element(stretch, i)];
    }
    bool bad = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = (int)threadIdx.x + i * STRETCH_THREADS;
        // Behind the end are elements of others, which may have changed them by now.
        if (at >= stretch.count) break;
        const float now = __fadd_rn(__fmul_rn(__fmul_rn(held[i], scale), factor), means[i]);
        // torch adds a multiple with one rounding.
        const float update = nesterov ? fmaf(now, factor, means[i]) : now;
        u[stretch.packed + at] = now;
        bucket[stretch.bucket + at] = update;
        bad |= !is_finite(update);
    }
    if (bad) raise(wrong);
}
