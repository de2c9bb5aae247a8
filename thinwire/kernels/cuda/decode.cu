// All ranks' entries added in rank order, averaged, and written as a dense gradient: one write per element.
//
// Every element belongs to one program, so that ranks are added one after the other without atomics. Reference:
// AllGatherFast.combine in thinwire/exchange/gather.py.

// Both flags of the last step go down; the one block of a kernel that reads headers does it.
static __device__ __forceinline__ void clear(u8* status) {
    if (threadIdx.x < 2) status[threadIdx.x] = 0;
    __syncthreads();
}

// Headers of all ranks: which slots anybody had a gradient for, and whether anything is wrong.
//   status[0]: some gradient was not finite, or a header is none that this layout writes
//   status[1]: some slot has no gradient on any rank
extern "C" __global__ void read_headers(
    const u8* gathered, const int* expected, u8* used, u8* status, int world, int payload_bytes, int slots) {
    // `expected`: the fixed words, then the places of each slot.
    const int payload_words = payload_bytes / 4;
    clear(status);
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        bool any = false;
        for (int rank = 0; rank < world; ++rank) {
            const int* words = reinterpret_cast<const int*>(gathered) + (i64)rank * payload_words + HEADER_FIXED + slot * HEADER_SLOT;
            any |= words[HEADER_HAD] != 0;
            if (words[0] != expected[HEADER_FIXED + slot]) raise(status);
        }
        used[slot] = any;
        if (!any) raise(status + 1);
    }
    for (int i = threadIdx.x; i < world * HEADER_FIXED; i += blockDim.x) {
        const int word = reinterpret_cast<const int*>(gathered)[(i64)(i / HEADER_FIXED) * payload_words + i % HEADER_FIXED];
        if (word != expected[i % HEADER_FIXED]) raise(status);
    }
}

static __device__ __forceinline__ bool is_finite(float x) { return (__float_as_int(x) & 0x7fffffff) < INFINITE; }

// Four sums become means; tells whether one is not finite.
static __device__ __forceinline__ bool take_mean(float4& four, float average) {
    four.x = __fmul_rn(four.x, average), four.y = __fmul_rn(four.y, average);
    four.z = __fmul_rn(four.z, average), four.w = __fmul_rn(four.w, average);
    return !(is_finite(four.x) && is_finite(four.y) && is_finite(four.z) && is_finite(four.w));
}

// Short contiguous rows: one warp each, the row in shared memory.
extern "C" __global__ void decode_rows(
    const u8* gathered, float* out, const Row* rows, const u8* used, u8* status, float* share, int world, int payload_bytes,
    int count, int longest, int into_bucket) {
    DYNAMIC_SHARED(float, sums);
    const int lane = threadIdx.x & 31, number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (number >= count) return;
    float* sum = sums + (threadIdx.x / 32) * longest;
    const Row row = rows[number];
    const float average = *share;
    for (int j = lane; j < row.length; j += 32) sum[j] = 0.0f;
    __syncwarp();
    bool bad = false;
    if (used[row.slot])
        for (int rank = 0; rank < world; ++rank) {
            const u8* payload = gathered + (i64)rank * payload_bytes;
            const Value* values = reinterpret_cast<const Value*>(payload + row.values);
            for (int place = lane; place < row.keep; place += 32) {
                const int index = read_index(payload, row, place);
                if (index < 0 || index >= row.length)
                    bad = true;
                else
                    sum[index] = __fadd_rn(sum[index], from_wire(values[place]));
            }
            __syncwarp();
        }
    float* target = out + (into_bucket ? row.gradient : row.memory);
    if (row.vector) {
        for (int j = 4 * lane; j < row.length; j += 128) {
            float4 four = *reinterpret_cast<const float4*>(sum + j);
            bad |= take_mean(four, average);
            *reinterpret_cast<float4*>(target + j) = four;
        }
    } else {
        for (int j = lane; j < row.length; j += 32) {
            const float mean = __fmul_rn(sum[j], average);
            bad |= !is_finite(mean);
            target[j] = mean;
        }
    }
    if (bad) raise(status);
}

struct Piece {
    int first;  // row number
    int rows;   // neighbouring rows in this piece
    int start;  // elements [start, start + PIECE / FIBRES) of each
};

#define THREADS 256
#define PIECE 8192
#define MOST_AT_ONCE 64

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

// Long or strided rows: a block takes a piece of up to FIBRES neighbouring rows and finds its entries by bisection.
extern "C" __global__ void decode_tiles(
    const u8* gathered, float* out, const Row* rows, const Piece* pieces, const u8* used, u8* status, float* share, int world,
    int payload_bytes, int into_bucket) {
    __shared__ __align__(16) float sum[PIECE];
    __shared__ int edges[MOST_AT_ONCE][FIBRES][2];
    const Piece piece = pieces[blockIdx.x];
    const int fibre = threadIdx.x % FIBRES, member = threadIdx.x / FIBRES, span = PIECE / FIBRES, team = THREADS / FIBRES;
    const bool live = fibre < piece.rows;
    const Row row = rows[piece.first + (live ? fibre : 0)];
    const float average = *share;
    bool bad = false;
    for (int i = threadIdx.x; i < PIECE; i += THREADS) sum[i] = 0.0f;
    for (int ranks = 0; ranks < world; ranks += MOST_AT_ONCE) {
        const int here = min(world - ranks, MOST_AT_ONCE);
        // Each bisection waits for memory several times over: those of all ranks run side by side.
        for (int i = threadIdx.x; i < here * FIBRES * 2; i += THREADS) {
            const int which = i / 2 % FIBRES, rank = i / (2 * FIBRES);
            if (which >= piece.rows) continue;
            const Row mine = rows[piece.first + which];
            const u8* payload = gathered + (i64)(ranks + rank) * payload_bytes;
            const int from = piece.start + (i % 2) * span;
            edges[rank][which][i % 2] = from == 0 ? 0 : find_place(payload, mine, from);
            // Bisection finds nothing at or beyond the end of the row; only a corrupt payload has something there.
            if (i % 2 && mine.keep && read_index(payload, mine, mine.keep - 1) >= mine.length) bad = true;
        }
        __syncthreads();
        for (int rank = 0; rank < here; ++rank) {
            if (live && used[row.slot]) {
                const u8* payload = gathered + (i64)(ranks + rank) * payload_bytes;
                const Value* values = reinterpret_cast<const Value*>(payload + row.values);
                for (int place = edges[rank][fibre][0] + member; place < edges[rank][fibre][1]; place += team) {
                    const int index = read_index(payload, row, place), at = index - piece.start;
                    if (at < 0 || at >= span || index >= row.length)
                        bad = true;
                    else
                        sum[at * FIBRES + fibre] = __fadd_rn(sum[at * FIBRES + fibre], from_wire(values[place]));
                }
            }
            __syncthreads();
        }
    }
    float* target = out + (into_bucket ? row.gradient : row.memory);
    if (FIBRES == 1 && row.vector) {
        for (int j = 4 * threadIdx.x; j < span && piece.start + j < row.length; j += 4 * THREADS) {
            float4 four = *reinterpret_cast<const float4*>(sum + j);
            bad |= take_mean(four, average);
            *reinterpret_cast<float4*>(target + piece.start + j) = four;
        }
    } else if (live) {
        for (int j = member; j < span && piece.start + j < row.length; j += team) {
            const float mean = __fmul_rn(sum[j * FIBRES + fibre], average);
            bad |= !is_finite(mean);
            target[(i64)(piece.start + j) * row.stride] = mean;
        }
    }
    if (bad) raise(status);
}
