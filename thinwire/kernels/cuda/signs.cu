// Signs of many elements as planes of bits: "not negative", and "not zero" where zeros do not vote. One thread per byte of a plane.
// Reference: thinwire/exchange/majority.py, TorchSigns in thinwire/compress/signs.py.

// A rank's share of a plane has `share` bytes. Behind `count` elements there are zeros.
extern "C" __global__ __launch_bounds__(SIGN_THREADS) void write_signs(
    const float* values, u8* planes, int count, int share, int bytes, int abstain) {
    const int at = blockIdx.x * SIGN_THREADS + threadIdx.x;
    if (at >= bytes) return;
    const int rank = at / share, place = at - rank * share;
    u32 plus = 0, voted = 0;
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
        const i64 element = 8 * (i64)at + bit;
        const float x = element < count ? values[element] : 0.0f;
        plus |= (u32)(x >= 0.0f) << bit;
        voted |= (u32)(x != 0.0f) << bit;
    }
    u8* row = planes + (i64)rank * share * (abstain ? 2 : 1);
    row[place] = (u8)plus;
    if (abstain) row[share + place] = (u8)voted;
}

// What most ranks say of a share. Rows of `ballots` are ranks.
extern "C" __global__ __launch_bounds__(SIGN_THREADS) void count_votes(
    const u8* ballots, u8* verdict, int share, int world, int abstain) {
    const int at = blockIdx.x * SIGN_THREADS + threadIdx.x;
    if (at >= share) return;
    const i64 row = (i64)share * (abstain ? 2 : 1);
    int tally[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int rank = 0; rank < world; ++rank) {
        const u32 plus = ballots[rank * row + at], voted = abstain ? ballots[rank * row + share + at] : 255u;
#pragma unroll
        for (int bit = 0; bit < 8; ++bit)
            if ((voted >> bit) & 1) tally[bit] += (plus >> bit) & 1 ? 1 : -1;
    }
    u32 plus = 0, voted = 0;
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
        plus |= (u32)(tally[bit] >= 0) << bit;
        voted |= (u32)(tally[bit] != 0) << bit;
    }
    verdict[at] = (u8)plus;
    if (abstain) verdict[share + at] = (u8)voted;
}

// -1, 0 or 1 for every element, from the verdicts of all ranks on their shares.
extern "C" __global__ __launch_bounds__(SIGN_THREADS) void read_signs(
    const u8* planes, float* values, int count, int share, int bytes, int abstain) {
    const int at = blockIdx.x * SIGN_THREADS + threadIdx.x;
    if (at >= bytes) return;
    const int rank = at / share, place = at - rank * share;
    const u8* row = planes + (i64)rank * share * (abstain ? 2 : 1);
    const u32 plus = row[place], voted = abstain ? row[share + place] : 255u;
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
        const i64 element = 8 * (i64)at + bit;
        const float sign = (plus >> bit) & 1 ? 1.0f : -1.0f;
        if (element < count) values[element] = (voted >> bit) & 1 ? sign : 0.0f;
    }
}

// Neighbours of a slot in the group's buffer; they begin at a multiple of 8.
struct SignPart {
    i64 offset;
    int count;
    int slot;
};
static_assert(LAYOUT_OF_SignPart, "signs.py has another SignPart");

// Adds the signs of all rows, each times its scale of the slot, in the order of rows. One block per part, which is not read where all
// scales are 0.
extern "C" __global__ __launch_bounds__(SIGN_THREADS) void add_signs(
    float* flat, const u8* signs, const float* scales, const SignPart* parts, int rows, int bytes, int slots) {
    const SignPart part = parts[blockIdx.x];
    bool any = false;
    for (int row = 0; row < rows; ++row) any |= scales[row * slots + part.slot] != 0.0f;
    if (!any) return;
    for (int i = threadIdx.x; i < part.count; i += SIGN_THREADS) {
        const i64 element = part.offset + i;
        float sum = flat[element];
        for (int row = 0; row < rows; ++row) {
            const float scale = scales[row * slots + part.slot];
            const bool plus = (signs[(i64)row * bytes + element / 8] >> (element % 8)) & 1;
            sum = __fadd_rn(sum, plus ? scale : -scale);
        }
        flat[element] = sum;
    }
}
