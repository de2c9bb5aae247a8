// A row in the registers of ROW_WARPS warps, LANE_ELEMENTS per lane: the search for its threshold, and what is written from it.
//
// Warp w owns the w-th part of the row, so that order is settled inside a warp and by one prefix over the warps. A lane has four
// neighbours at a time: element e is at ((e / 4) x 32 + lane) x 4 + e % 4 of the warp's part.

#define FIRST_STEP_WARM (1 << 19)
#define FIRST_STEP_COLD (1 << 21)
// Probes that go by the counts before halving: halving alone ends for sure.
#define GUIDED_PROBES 6
// What is no element of the row: not a number reaches no threshold, so that it is never chosen.
#define NO_ELEMENT __int_as_float(0x7fffffff)

// The warps of one row. ALONE: they are the whole block.
template <int ROW_WARPS, bool ALONE>
struct RowTeam {
    int* words;  // 2 x ROW_WARPS in shared memory, used in turn: one barrier per sum is then enough
    int turn, warp, team;

    __device__ __forceinline__ int* share(int x) {
        int* mine = words + (turn ^= 1) * ROW_WARPS;
        if ((threadIdx.x & 31) == 0) mine[warp] = x;
        if (ALONE)
            __syncthreads();
        else
            sync_team(team, 32 * ROW_WARPS);
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

    __device__ __forceinline__ int largest(int x) {
        x = warp_max(x);
        if constexpr (ROW_WARPS > 1) {
            int* all = share(x);
            for (int w = 0; w < ROW_WARPS; ++w) x = max(x, all[w]);
        }
        return x;
    }
};

template <int LANE_ELEMENTS>
static __device__ __forceinline__ int count_reaching(const float (&c)[LANE_ELEMENTS], int pattern) {
    float threshold = __int_as_float(pattern);
    // Four sums, so that an addition does not wait for the one before.
    int reached[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < LANE_ELEMENTS; ++e) reached[e & 3] += fabsf(c[e]) >= threshold;
    return reached[0] + reached[1] + reached[2] + reached[3];
}

// Where between two patterns `keep` magnitudes are to be expected: their number falls about exponentially.
static __device__ __forceinline__ int expect(int low, int reached, int high, int fewer, int keep) {
    float top = logf((float)reached), bottom = logf((float)fewer + 0.5f), aim = logf((float)keep + 0.25f);
    float share = (top - aim) / (top - bottom);
    share = fminf(fmaxf(share, 0.03f), 0.97f);
    return min(max(low + (int)((float)(high - low) * share), low + 1), high - 1);
}

// (pattern, how many reach it): at least `keep` do, and either exactly `keep` or fewer reach the next pattern.
template <int LANE_ELEMENTS, class Team>
static __device__ __forceinline__ int search(const float (&c)[LANE_ELEMENTS], const Row& row, int guess, Team& team, int& reached) {
    int low = 0, high = INFINITE + 1, fewer = 0, step = FIRST_STEP_WARM, direction = 0, probes = 0;
    reached = row.length;
    if (reached == row.keep) return low;
    if (guess <= 0) {
        int largest = 0;
#pragma unroll
        for (int e = 0; e < LANE_ELEMENTS; ++e) {
            int bits = __float_as_int(c[e]) & 0x7fffffff;
            largest = max(largest, bits <= INFINITE ? bits : 0);
        }
        guess = team.largest(largest);
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
        int enough = team.sum(count_reaching(c, middle));
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

// Choose from the elements that the team's lanes have in `c`: entries to the payload in ascending order of index, ties to the
// lowest, the rest to `held` (`quads`: four at a time are aligned there). `guess` is where the search starts, and ends.
template <int LANE_ELEMENTS, class Team>
static __device__ __forceinline__ void send_row(
    float (&c)[LANE_ELEMENTS], const Row& row, int* guess, Team& team, float* held, bool quads, u8* payload,
    const Momentum& correction, bool& bad) {
    const int lane = threadIdx.x & 31, first = team.warp * 32 * LANE_ELEMENTS;
    int reached;
    const int pattern = search(c, row, *guess, team, reached);
    const float threshold = __int_as_float(pattern);
    const bool exact = reached == row.keep;
    int missing = 0, ties_before = 0;
    if (!exact) {
        int above = 0, tied = 0;
#pragma unroll
        for (int e = 0; e < LANE_ELEMENTS; ++e) {
            above += fabsf(c[e]) > threshold;
            tied += fabsf(c[e]) == threshold;
        }
        missing = row.keep - team.sum(above);
        ties_before = team.before(tied);
    }
    // Which elements of this lane are sent, one bit each.
    static_assert(LANE_ELEMENTS <= 64, "two words would not be enough");
    u32 chosen[2] = {0, 0};
    if (exact) {
#pragma unroll
        for (int e = 0; e < LANE_ELEMENTS; ++e) chosen[e / 32] |= (u32)(fabsf(c[e]) >= threshold) << (e % 32);
    } else {
#pragma unroll
        for (int q = 0; q < LANE_ELEMENTS / 4; ++q) {
            int earlier = ties_before;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 ballot = __ballot_sync(EVERY_LANE, fabsf(c[4 * q + i]) == threshold);
                earlier += lanes_before(ballot, lane);
                ties_before += __popc(ballot);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int e = 4 * q + i;
                const bool tie = fabsf(c[e]) == threshold;
                chosen[e / 32] |= (u32)(tie ? earlier < missing : fabsf(c[e]) > threshold) << (e % 32);
                earlier += tie;
            }
        }
    }
    int place = team.before(__popc(chosen[0]) + __popc(chosen[1]));

#pragma unroll
    for (int q = 0; q < LANE_ELEMENTS / 4; ++q) {
        const u32 four = (chosen[4 * q / 32] >> (4 * q % 32)) & 15;
        if (__ballot_sync(EVERY_LANE, four != 0)) {
            int lower = 0, all = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 ballot = __ballot_sync(EVERY_LANE, (four >> i) & 1);
                lower += lanes_before(ballot, lane);
                all += __popc(ballot);
            }
            int next = place + lower;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if ((four >> i) & 1)
                    c[4 * q + i] = correction.send(c[4 * q + i], first + (q * 32 + lane) * 4 + i, next++, row, payload, bad);
            place += all;
        }
        int at = first + (q * 32 + lane) * 4;
        if (quads) {
            if (at < row.length)
                *reinterpret_cast<float4*>(held + at) = make_float4(c[4 * q], c[4 * q + 1], c[4 * q + 2], c[4 * q + 3]);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i < row.length) held[at + i] = c[4 * q + i];
    }
    if (team.warp == 0 && lane == 0) *guess = pattern;
}

// What the lanes of a warp saw, to the payload.
static __device__ __forceinline__ void report(bool had, bool bad, const Row& row, u8* payload) {
    const u32 any_had = __ballot_sync(EVERY_LANE, had), any_bad = __ballot_sync(EVERY_LANE, bad);
    if ((threadIdx.x & 31) == 0) {
        if (any_had) raise(had_word(payload, row.slot));
        if (any_bad) raise(reinterpret_cast<int*>(payload) + HEADER_FLAGS);
    }
}
