// The warps that work on one row together, the search for its threshold, and what they report.

#define FIRST_STEP_WARM (1 << 19)
#define FIRST_STEP_COLD (1 << 21)
// Probes that go by the counts before halving: halving alone ends for sure.
#define GUIDED_PROBES 6
// What is no element of the row: not a number reaches no threshold, so that it is never chosen.
#define NO_ELEMENT __int_as_float(0x7fffffff)

// The warps of one row: one, or the whole block.
template <int ROW_WARPS>
struct RowTeam {
    int* words;  // 2 x ROW_WARPS in shared memory, used in turn: one barrier per sum is then enough
    int turn, warp;

    // What one has written to shared memory is there for the others.
    __device__ __forceinline__ void meet() const {
        if constexpr (ROW_WARPS > 1)
            __syncthreads();
        else
            __syncwarp();
    }

    __device__ __forceinline__ int* share(int x) {
        int* mine = words + (turn ^= 1) * ROW_WARPS;
        if ((threadIdx.x & 31) == 0) mine[warp] = x;
        meet();
        return mine;
    }

    __device__ __forceinline__ int sum(int x) {
        x = warp_sum(x);
        if constexpr (ROW_WARPS > 1) {
            int* all = share(x);
            x = 0;
            for (int w = 0; w < ROW_WARPS; ++w) x += all[w];
        }
        return x;
    }

    // Sum over the warps before this one.
    __device__ __forceinline__ int before(int x) {
        if constexpr (ROW_WARPS > 1) {
            int* all = share(warp_sum(x));
            x = 0;
            for (int w = 0; w < warp; ++w) x += all[w];
            return x;
        }
        return 0;
    }

    // The same of what is already the warp's, and the sum over all of them.
    __device__ __forceinline__ int before_all(int x, int& total) {
        total = x;
        if constexpr (ROW_WARPS > 1) {
            int* all = share(x);
            x = total = 0;
            for (int w = 0; w < ROW_WARPS; ++w) {
                if (w == warp) x = total;
                total += all[w];
            }
            return x;
        }
        return 0;
    }

    __device__ __forceinline__ int largest(int x) {
        x = warp_max(x);
        if constexpr (ROW_WARPS > 1) {
            int* all = share(x);
            for (int w = 0; w < ROW_WARPS; ++w) x = max(x, all[w]);
        }
        return x;
    }
};

// As bits, which are ordered as magnitudes are; 0 for what is not a number.
static __device__ __forceinline__ int ordered(float x) {
    const int bits = __float_as_int(x) & 0x7fffffff;
    return bits <= INFINITE ? bits : 0;
}

// Where between two patterns `keep` magnitudes are to be expected: their number falls about exponentially.
static __device__ __forceinline__ int expect(int low, int reached, int high, int fewer, int keep) {
    float top = logf((float)reached), bottom = logf((float)fewer + 0.5f), aim = logf((float)keep + 0.25f);
    float share = (top - aim) / (top - bottom);
    share = fminf(fmaxf(share, 0.03f), 0.97f);
    return min(max(low + (int)((float)(high - low) * share), low + 1), high - 1);
}

// (pattern, how many reach it): at least `keep` do, and either exactly `keep` or fewer reach the next pattern. `count(pattern)`
// is how many of this lane's magnitudes reach it, `largest()` the largest of them, as bits.
template <class Team, class Count, class Largest>
static __device__ __forceinline__ int search(
    const Row& row, int guess, Team& team, int& reached, Count count, Largest largest) {
    int low = 0, high = INFINITE + 1, fewer = 0, step = FIRST_STEP_WARM, direction = 0, probes = 0;
    reached = row.length;
    if (reached == row.keep) return low;
    if (guess <= 0) {
        guess = team.largest(largest());
        high = guess + 1;
        step = FIRST_STEP_COLD;
    }
    bool stepping = true;
    while (reached != row.keep && high - low > 1) {
        int middle;
        if (stepping)
            middle = min(max(guess, low + 1), high - 1);
        else if (probes++ < GUIDED_PROBES)
            middle = expect(low, reached, high, fewer, row.keep);
        else
            middle = low + (high - low) / 2;
        int enough = team.sum(count(middle));
        int went = enough >= row.keep ? 1 : -1;
        if (went > 0) {
            low = middle;
            reached = enough;
        } else {
            high = middle;
            fewer = enough;
        }
        stepping = stepping && (direction == 0 || direction == went);
        direction = went;
        guess = went > 0 ? (high - middle > step ? middle + step : high - 1)
                         : (middle - low > step ? middle - step : low + 1);
        step = step < (1 << 28) ? step * 2 : step;
    }
    return low;
}

// What the lanes of a warp saw, to the payload.
static __device__ __forceinline__ void report(bool had, bool bad, int slot, u8* payload) {
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if ((threadIdx.x & 31) == 0) {
        if (any_had) raise(had_word(payload, slot));
        if (any_bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
    }
}
