// Small tensors that travel whole beside the payloads: to the wire, and the ranks' mean back into the bucket.

struct Stretch {
    i64 bucket;  // element of its first value in the bucket
    int packed;  // the same on the wire
    int count;
};

// Divided before they are summed, as thinwire/exchange/dense.py does.
extern "C" __global__ void dense_send(
    const Gradient* bucket, float* packed, const Stretch* stretches, u8* wrong, int world) {
    const Stretch stretch = stretches[blockIdx.x];
    // Nobody raises it before the ranks' values are there.
    if (blockIdx.x == 0 && threadIdx.x == 0) *wrong = 0;
    for (int i = threadIdx.x; i < stretch.count; i += blockDim.x)
        packed[stretch.packed + i] = __fdiv_rn(to_float(bucket[stretch.bucket + i]), (float)world);
}

// In rank order; `wrong` goes up if a sum is not finite.
extern "C" __global__ void dense_mean(
    const u8* gathered, float* bucket, const Stretch* stretches, u8* wrong, int world, int payload_bytes) {
    const Stretch stretch = stretches[blockIdx.x];
    bool bad = false;
    for (int i = threadIdx.x; i < stretch.count; i += blockDim.x) {
        float sum = reinterpret_cast<const float*>(gathered)[stretch.packed + i];
        for (int rank = 1; rank < world; ++rank)
            sum = __fadd_rn(sum, reinterpret_cast<const float*>(gathered + (i64)rank * payload_bytes)[stretch.packed + i]);
        bad |= (__float_as_int(sum) & 0x7fffffff) >= INFINITE;
        bucket[stretch.bucket + i] = sum;
    }
    if (bad) raise(wrong);
}
