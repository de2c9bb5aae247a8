// Which slot a flat position belongs to: the last that begins at or before it.
static __device__ __forceinline__ int find_slot(i64 position, const i64* begins, int slots) {
    int slot = 0, behind = slots;
    while (behind - slot > 1) {
        const int middle = (slot + behind) / 2;
        if (begins[middle] <= position)
            slot = middle;
        else
            behind = middle;
    }
    return slot;
}
