// A row of a group and its entries in the payload.

// Written by thinwire/kernels/cuda/tables.py. Offsets count elements, those in the payload bytes.
struct Row {
    i64 gradient;  // in the bucket
    i64 memory;    // in the group's own buffer
    i64 values;    // byte of its first value in the payload
    i64 indices;   // byte of its first index in the payload; where they are packed, its bit
    int length;
    int keep;
    int stride;
    int slot;
    int width;   // bytes of an index, 4 or 2; where they are packed, bits
    u16 vector;  // 1: four elements at a time are aligned in bucket and memory
    u16 quads;   // 1: in memory
    int aim;     // candidates that stream_rows aims at; 0 if it has no room for so many
    int entry;   // number of its first entry in the payload
};
static_assert(LAYOUT_OF_Row, "structs.py has another Row");

// Words of the payload header (thinwire/wire/codec.py): HEADER_FIXED at its start, HEADER_FLAGS being one of them, then HEADER_SLOT
// and NOTE_WORDS for each slot, HEADER_HAD being one of these. Python defines them.

#ifndef NOTE_WORDS
#define NOTE_WORDS 0
#endif

static __device__ __forceinline__ const int* slot_words(const u8* payload, int slot) {
    return reinterpret_cast<const int*>(payload) + HEADER_FIXED + slot * (HEADER_SLOT + NOTE_WORDS);
}

static __device__ __forceinline__ int* slot_words(u8* payload, int slot) {
    return reinterpret_cast<int*>(payload) + HEADER_FIXED + slot * (HEADER_SLOT + NOTE_WORDS);
}

static __device__ __forceinline__ int* had_word(u8* payload, int slot) { return slot_words(payload, slot) + HEADER_HAD; }

static __device__ __forceinline__ void raise_bad(u8* payload) { raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS); }

#if VALUE_CODE == FLOAT32
typedef float Value;
#define LARGEST 3.4028234663852886e38f
static __device__ __forceinline__ Value to_wire(float x) { return x; }
static __device__ __forceinline__ float from_wire(Value x) { return x; }
#elif VALUE_CODE == BFLOAT16
typedef u16 Value;
#define LARGEST 3.3895313892515355e38f
static __device__ __forceinline__ Value to_wire(float x) { return to_bf16(x); }
static __device__ __forceinline__ float from_wire(Value x) { return from_bf16(x); }
#else
typedef u16 Value;
#define LARGEST 65504.0f
static __device__ __forceinline__ Value to_wire(float x) { return to_fp16(x); }
static __device__ __forceinline__ float from_wire(Value x) { return from_fp16(x); }
#endif

// Beyond the wire's range is its largest number; what is not a number stays so.
static __device__ __forceinline__ Value round_to_wire(float x) {
#if VALUE_CODE == FLOAT32
    return x != x ? x : fminf(fmaxf(x, -LARGEST), LARGEST);
#else
    if (x != x) return VALUE_CODE == BFLOAT16 ? 0x7fc0 : 0x7e00;
    return to_wire(fminf(fmaxf(x, -LARGEST), LARGEST));
#endif
}

#if PACKED
static __device__ __forceinline__ int read_index(const u8* payload, const Row& row, int place) {
    const i64 bit = row.indices + (i64)place * row.width;
    const u32* words = reinterpret_cast<const u32*>(payload) + (bit >> 5);
    const int shift = (int)(bit & 31);
    u32 field = words[0] >> shift;
    if (shift + row.width > 32) field |= words[1] << (32 - shift);
    return (int)(field & ((1u << row.width) - 1));
}

// The bits of the payload are 0 before. Neighbours share words, hence the atomic.
static __device__ __forceinline__ void write_index(u8* payload, const Row& row, int place, int index) {
    const i64 bit = row.indices + (i64)place * row.width;
    u32* words = reinterpret_cast<u32*>(payload) + (bit >> 5);
    const int shift = (int)(bit & 31);
    if (row.width) atomicOr(words, (u32)index << shift);
    if (shift + row.width > 32) atomicOr(words + 1, (u32)index >> (32 - shift));
}
#else
static __device__ __forceinline__ int read_index(const u8* payload, const Row& row, int place) {
    const u8* at = payload + row.indices;
    return row.width == 4 ? reinterpret_cast<const int*>(at)[place] : reinterpret_cast<const u16*>(at)[place];
}

static __device__ __forceinline__ void write_index(u8* payload, const Row& row, int place, int index) {
    u8* at = payload + row.indices;
    if (row.width == 4)
        reinterpret_cast<int*>(at)[place] = index;
    else
        reinterpret_cast<u16*>(at)[place] = (u16)index;
}
#endif

static __device__ __forceinline__ float finite_or_zero(float x) { return is_finite(x) ? x : 0.0f; }

// Write one chosen entry to the payload. `sent` is what the payload then says; what stays in memory is returned.
static __device__ __forceinline__ float send(
    float c, int index, int place, const Row& row, u8* payload, float& sent, bool& bad) {
    bad |= !is_finite(c);
    Value code = to_wire(fminf(fmaxf(c, -LARGEST), LARGEST));
    reinterpret_cast<Value*>(payload + row.values)[place] = code;
    write_index(payload, row, place, index);
    sent = from_wire(code);
    return finite_or_zero(__fsub_rn(c, sent));
}

// What the lanes of a warp saw, to the payload. Looks and stores queue at one address, and all warps come at about the same time,
// so one warp of a block does it. `told` is in shared memory: 1 + the last slot that the block has reported, 0 at first.
static __device__ __forceinline__ void report(bool had, bool bad, int slot, u32* told, u8* payload) {
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if ((threadIdx.x & 31) != 0) return;
    if (any_had && atomicExch(told, (u32)slot + 1) != (u32)slot + 1) raise(had_word(payload, slot));
    if (any_bad) raise_bad(payload);
}
