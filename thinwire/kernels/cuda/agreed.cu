// Values at places that all ranks agree on: out of memory into the message, added up by their owner, and delivered.
//
// A message has `rows` rows of `width` places, row p for rank p where owners add. A place holds a flat position, or one outside the
// group: nothing.

#include "row.cuh"
#include "find_slot.cuh"

struct AgreedForm {
    i64 numel;
    int count, width;  // places of all rows, of one row
    int rank;          // whose row is this rank's own; -1 where no row is anybody's
    int slots;
};
static_assert(LAYOUT_OF_AgreedForm, "agreed.py has another AgreedForm");

static __device__ __forceinline__ bool is_taken(i64 position, const AgreedForm& form) {
    return position >= 0 && position < form.numel;
}

static __device__ __forceinline__ bool is_own(int place, const AgreedForm& form) { return place / form.width == form.rank; }

// One more for every lane; none for those with a number below 0. Neighbours mostly count the same.
static __device__ __forceinline__ void count_lanes(u32* counters, int number) {
    const int first = __shfl_sync(EVERY_LANE, number, 0);
    if (__ballot_sync(EVERY_LANE, number == first) == EVERY_LANE) {
        if (first >= 0 && (threadIdx.x & 31) == 0) atomicAdd(counters + first, 32u);
    } else if (number >= 0) {
        atomicAdd(counters + number, 1u);
    }
}

// To the message, and to `kept`, the values at all places; what rounding leaves of them stays in memory. stats: empty places of others'
// rows, of this rank's own, then the places taken of each slot.
extern "C" __global__ __launch_bounds__(ENTRY_THREADS) void take_entries(
    const i64* places, float* memory, Value* message, Value* kept, const i64* begins, u32* stats, AgreedForm form) {
    const int place = blockIdx.x * ENTRY_THREADS + threadIdx.x;
    int counter = -1;
    if (place < form.count) {
        const i64 position = places[place];
        Value code = 0;
        if (is_taken(position, form)) {
            const float c = memory[position];
            code = round_to_wire(c);
            memory[position] = finite_or_zero(__fsub_rn(c, from_wire(code)));
            counter = 2 + find_slot(position, begins, form.slots);
        } else {
            counter = is_own(place, form) ? 1 : 0;
        }
        message[place] = code;
        kept[place] = code;
    }
    count_lanes(stats, counter);
}

// The rows that arrived, rank 0's first, and what rounding loses of their sum.
extern "C" __global__ __launch_bounds__(ENTRY_THREADS) void add_entries(
    const Value* arrived, Value* sums, float* lost, int width, int world) {
    const int place = blockIdx.x * ENTRY_THREADS + threadIdx.x;
    if (place >= width) return;
    float total = from_wire(arrived[place]);
    for (int rank = 1; rank < world; ++rank) total = __fadd_rn(total, from_wire(arrived[(i64)rank * width + place]));
    const Value code = round_to_wire(total);
    sums[place] = code;
    lost[place] = __fsub_rn(total, from_wire(code));
}

// Means of the sums to `out`, which holds zeros. To memory what rounding lost of this rank's own sums, and what it sent of slots that no
// rank had a gradient for.
extern "C" __global__ __launch_bounds__(ENTRY_THREADS) void deliver_entries(
    const i64* places, const Value* sums, const Value* kept, const float* lost, float* memory, float* out, const i64* begins,
    const i64* into_out, const u8* used, u8* wrong, const float* share, AgreedForm form) {
    const int place = blockIdx.x * ENTRY_THREADS + threadIdx.x;
    if (place >= form.count) return;
    const i64 position = places[place];
    if (!is_taken(position, form)) return;
    const int slot = find_slot(position, begins, form.slots);
    if (!used[slot]) {
        memory[position] = __fadd_rn(memory[position], from_wire(kept[place]));
        return;
    }
    const float mean = __fmul_rn(from_wire(sums[place]), *share);
    out[position + into_out[slot]] = mean;
    if (!is_finite(mean)) raise(wrong);
    if (is_own(place, form))
        memory[position] = __fadd_rn(memory[position], finite_or_zero(lost[place - form.rank * form.width]));
}

// What was sent in one step of one group.
struct AgreedRecord {
    float* memory;
    const i64* places;
    const Value* kept;
    const float* lost;   // null where nothing was given back
    const i64* begins;
    const u8* used;      // null before the update was delivered
    AgreedForm form;
};
static_assert(LAYOUT_OF_AgreedRecord, "agreed.py has another AgreedRecord");
static_assert(MOST_RECORDS * sizeof(AgreedRecord) <= 4000, "a kernel has 4 KB of parameters");

struct AgreedRecords {
    AgreedRecord at[MOST_RECORDS];
};

// All buckets of a step, `blocks_each` blocks for each: what was given back leaves memory again, then what was sent returns.
extern "C" __global__ void undo_entries(IN_PLACE AgreedRecords records, const u8* bad, int blocks_each) {
    if (!*bad) return;
    const AgreedRecord& record = records.at[blockIdx.x / blocks_each];
    const AgreedForm& form = record.form;
    const int threads = blocks_each * blockDim.x;
    for (int place = (blockIdx.x % blocks_each) * blockDim.x + threadIdx.x; place < form.count; place += threads) {
        const i64 position = record.places[place];
        if (!is_taken(position, form)) continue;
        const float sent = from_wire(record.kept[place]);
        float held = record.memory[position];
        if (record.used && !record.used[find_slot(position, record.begins, form.slots)])
            held = __fsub_rn(held, sent);
        else if (record.lost && is_own(place, form))
            held = __fsub_rn(held, finite_or_zero(record.lost[place - form.rank * form.width]));
        record.memory[position] = finite_or_zero(__fadd_rn(held, sent));
    }
}
