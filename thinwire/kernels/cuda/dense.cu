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
