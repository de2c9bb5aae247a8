// Random places of many tensors: one thread per place. Reference: Drawing.draw in thinwire/select/random.py.

struct DrawnSlot {
    i64 length;
    i64 keep;
};
static_assert(LAYOUT_OF_DrawnSlot, "draw.py has another DrawnSlot");

static __device__ __forceinline__ u32 mix(u32 x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// A place in a stratum, which runs from stratum x length / keep to where the next one begins.
static __device__ __forceinline__ i64 inside(i64 stratum, u32 seed, const DrawnSlot& slot) {
    const i64 begin = stratum * slot.length / slot.keep, size = (stratum + 1) * slot.length / slot.keep - begin;
    return begin + (((i64)mix(seed + 2u + (u32)stratum) * size) >> 32);
}

extern "C" __global__ void draw(
    const DrawnSlot* slots, const i64* seeds, const i64* steps, const int* entry_slots, const int* entry_places, i64* places,
    int count) {
    const int entry = blockIdx.x * blockDim.x + threadIdx.x;
    if (entry >= count) return;
    const int number = entry_slots[entry];
    const DrawnSlot slot = slots[number];
    const u32 seed = mix((u32)seeds[number] + mix((u32)steps[number]));
    const i64 shift = 1 + (((i64)seed << 30) ^ (i64)mix(seed + 1u)) % slot.length, first = slot.length - shift;
    const i64 cut = ((first + 1) * slot.keep - 1) / slot.length;
    const i64 turned = slot.keep - 1 - cut + (inside(cut, seed, slot) >= first ? 1 : 0);
    const i64 stratum = entry_places[entry] - turned;
    const bool beyond = stratum < 0;
    const i64 drawn = inside(beyond ? stratum + slot.keep : stratum, seed, slot) + shift;
    places[entry] = beyond ? drawn - slot.length : drawn;
}
