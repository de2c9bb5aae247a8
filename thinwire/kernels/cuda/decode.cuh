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

// As read_index, by loads without a branch before them, so that several can be under way at once.
static __device__ __forceinline__ int load_index(const u8* payload, const Row& row, int place) {
    const u32* words = reinterpret_cast<const u32*>(payload);
#if PACKED
    const i64 bit = row.indices + (i64)place * row.width;
    const int shift = (int)(bit & 31);
    const bool both = shift + row.width > 32;
    const u32 low = words[bit >> 5], high = words[(bit >> 5) + both];
    return (int)((low >> shift | (both ? high << (32 - shift) : 0u)) & ((1u << row.width) - 1));
#else
    const i64 byte = row.indices + (i64)place * row.width;
    const u32 word = words[byte >> 2];
    return (int)(row.width == 4 ? word : word >> ((byte & 2) * 8) & 0xffffu);
#endif
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
