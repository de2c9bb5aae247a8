// What all kernels share that read payloads: replies, means, and where the entries of a piece begin.

#define THREADS 256
#define PIECE 8192  // elements that a block adds up in shared memory
#define MOST_AT_ONCE 64

// What all ranks sent, one row each.
struct Reply {
    const u8* gathered;
    int world;
    int payload_bytes;  // from one row to the next

    __device__ __forceinline__ const u8* of(int rank) const { return gathered + (i64)rank * payload_bytes; }
};

static __device__ __forceinline__ bool is_finite(float x) { return (__float_as_int(x) & 0x7fffffff) < INFINITE; }

// Four sums become means; tells whether one is not finite.
static __device__ __forceinline__ bool take_mean(float4& four, float average) {
    four.x = __fmul_rn(four.x, average), four.y = __fmul_rn(four.y, average);
    four.z = __fmul_rn(four.z, average), four.w = __fmul_rn(four.w, average);
    return !(is_finite(four.x) && is_finite(four.y) && is_finite(four.z) && is_finite(four.w));
}

// The first place whose index is not below `index`; indices ascend inside a row.
static __device__ __forceinline__ int find_place(const u8* payload, const Row& row, int index) {
    int low = 0, high = row.keep;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (read_index(payload, row, middle) < index)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}
