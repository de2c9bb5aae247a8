// What a skipped step has changed becomes what it was. That is rare: usually the kernel looks at a flag and returns.

// A stretch of memory and what it has to be again.
struct RestoreRecord {
    u8* now;
    const u8* before;
    i64 bytes;
};
static_assert(LAYOUT_OF_RestoreRecord, "restore.py has another RestoreRecord");
static_assert(MOST_RECORDS * sizeof(RestoreRecord) <= 4000, "a kernel has 4 KB of parameters");

struct RestoreRecords {
    RestoreRecord at[MOST_RECORDS];
};

// `blocks_each` blocks for each record.
extern "C" __global__ void restore_all(IN_PLACE RestoreRecords records, const u8* bad, int blocks_each) {
    if (!*bad) return;
    const RestoreRecord& record = records.at[blockIdx.x / blocks_each];
    const i64 threads = (i64)blocks_each * blockDim.x, first = (i64)(blockIdx.x % blocks_each) * blockDim.x + threadIdx.x;
    const bool aligned = (((i64)record.now | (i64)record.before) & 15) == 0;
    const i64 quads = aligned ? record.bytes / 16 : 0;
    for (i64 i = first; i < quads; i += threads)
        reinterpret_cast<float4*>(record.now)[i] = reinterpret_cast<const float4*>(record.before)[i];
    for (i64 i = 16 * quads + first; i < record.bytes; i += threads) record.now[i] = record.before[i];
}
