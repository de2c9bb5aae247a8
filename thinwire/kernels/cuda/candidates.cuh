// The choice of the largest among a column's elements: its candidates as a list, its threshold, and which are taken in which order.

// Columns whose words lie side by side: 32 bytes, the unit in which memory is read. As many warps send them.
#define GROUP 8
#define WORD_ROWS 32
// Candidates that a warp lists; a block lists GROUP times as many.
#define WARP_LIST 512
#define BLOCK_LIST (GROUP * WARP_LIST)
// Words of a lane at once; a column that is a warp's own has no more of them.
#define MOST_WORDS 8
// How far down twice as many reach, until a step has shown it: normal numbers at a density of 1 %.
#define OCTAVES_PER_DOUBLING (1.0f / 7.0f)
// Of a threshold from one step to the next, in octaves.
#define MOST_GROWN 0.14f
#define OCTAVE (1 << 23)
// Probes that go by the counts before halving: halving alone ends for sure. It is also cheaper where few are in between.
#define GUIDED_PROBES 8
#define FEW_BETWEEN 8
// What is no element of the row: not a number reaches no threshold, so that it is never chosen.
#define NO_ELEMENT __int_as_float(0x7fffffff)

// -- about: only speed depends on these -------------------------------------------------------------------------------

static __device__ __forceinline__ float log2_of(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return log2f(x);
#endif
}

static __device__ __forceinline__ float ratio_of(float x, float y) {
#ifdef __CUDA_ARCH__
    float z;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
#else
    return x / y;
#endif
}

// -- the warps of a column --------------------------------------------------------------------------------------------

// One, or the whole block. What they sum is the same in all lanes of a warp.
template <int WARPS>
struct Crew {
    int* words;  // 2 x WARPS in shared memory, used in turn: one barrier per sum is then enough
    int turn, warp;

    __device__ __forceinline__ int member() const { return 32 * warp + (threadIdx.x & 31); }

    // What one has written to shared memory is there for the others.
    __device__ __forceinline__ void meet() const {
        if constexpr (WARPS > 1)
            __syncthreads();
        else
            __syncwarp();
    }

    template <class Each>
    __device__ __forceinline__ void share(int x, Each each) {
        int* all = words + (turn ^= 1) * WARPS;
        if ((threadIdx.x & 31) == 0) all[warp] = x;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; ++w) each(w, all[w]);
    }

    __device__ __forceinline__ int sum(int x) {
        if constexpr (WARPS == 1) return x;
        int total = 0;
        share(x, [&](int, int theirs) { total += theirs; });
        return total;
    }

    // Sum over the warps before this one.
    __device__ __forceinline__ int before(int x, int& total) {
        total = x;
        if constexpr (WARPS == 1) return 0;
        int mine = total = 0;
        share(x, [&](int w, int theirs) { mine += w < warp ? theirs : 0, total += theirs; });
        return mine;
    }

    __device__ __forceinline__ int largest(int x) {
        if constexpr (WARPS == 1) return x;
        share(x, [&](int, int theirs) { x = max(x, theirs); });
        return x;
    }
};

// -- candidates -------------------------------------------------------------------------------------------------------

// In shared memory, ascending: where each is in its column; later the values of the chosen ones and their numbers here.
struct Candidates {
    int* places;
    float* values;
    u16* chosen;
};

// Words of a column that a warp reads at once, 32 neighbours at a time, and where their bits go in the list.
template <int WORDS>
struct Bits {
    u32 some[WORDS];
    int starts[WORDS];

    __device__ __forceinline__ void load(const u32* words, int begin, int end) {
        const int lane = threadIdx.x & 31;
        // From the last one on: the first ones, which fewer words have in common, would be taken and waited for before it is
        // asked how many there are.
#pragma unroll
        for (int i = WORDS - 1; i >= 0; --i) some[i] = words[(i64)min(begin + 32 * i + lane, end - 1) * GROUP];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) some[i] = begin + 32 * i + lane < end ? some[i] : 0;
    }

    __device__ __forceinline__ int count() const {
        int mine = 0;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) mine += __popc(some[i]);
        return warp_sum(mine);
    }

    // How many there are with those before; two words' counts are added at once.
    __device__ __forceinline__ int place(int next) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) {
            const int both = __popc(some[i]) | __popc(some[i + 1]) << 16;
            const int upto = sum_upto(both, lane), total = __shfl_sync(EVERY_LANE, upto, 31);
            starts[i] = next + ((upto - both) & 0xffff);
            next += total & 0xffff;
            starts[i + 1] = next + ((upto - both) >> 16);
            next += total >> 16;
        }
        return next;
    }

    __device__ __forceinline__ void list(int begin, int* places) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int first = (begin + 32 * i + lane) * WORD_ROWS;
            int place = starts[i];
#pragma unroll 1
            for (u32 rest = some[i]; rest; rest &= rest - 1) places[place++] = first + __ffs(rest) - 1;
        }
    }
};

template <int WORDS>
static __device__ __forceinline__ int list_alone(const u32* words, int count, int keep, int* places) {
    Bits<WORDS> bits;
    bits.load(words, 0, count);
    const int listed = bits.place(0);
    if (listed >= keep && listed <= WARP_LIST) bits.list(0, places);
    return listed;
}

// How many bits of a column are set; unless these are too few or too many, `places` gets their numbers.
template <int WARPS>
static __device__ __forceinline__ int list_candidates(const u32* words, const Row& row, Crew<WARPS>& crew, int* places) {
    const int count = (row.length + WORD_ROWS - 1) / WORD_ROWS;
    int listed;
    if constexpr (WARPS == 1) {
        listed = count <= 64 ? list_alone<2>(words, count, row.keep, places) : list_alone<MOST_WORDS>(words, count, row.keep, places);
    } else {
        constexpr int WORDS = 4;
        const int part = (count + 32 * WARPS - 1) / (32 * WARPS) * 32, first = crew.warp * part, end = min(first + part, count);
        Bits<WORDS> bits;
        int mine = 0;
        for (int begin = first; begin < end; begin += 32 * WORDS) {
            bits.load(words, begin, end);
            mine += bits.count();
        }
        int next = crew.before(mine, listed);
        if (listed < row.keep || listed > WARPS * WARP_LIST) return listed;
        for (int begin = first; begin < end; begin += 32 * WORDS) {
            bits.load(words, begin, end);
            next = bits.place(next);
            bits.list(begin, places);
        }
    }
    crew.meet();
    return listed;
}

// -- the threshold ----------------------------------------------------------------------------------------------------

// `reached` reach the pattern `low`, at least as many as are kept; `fewer` reach the next one, unless exactly `keep` reach this.
struct Threshold {
    int low, reached, fewer;

    // From a `low` that is low enough. `count(x)` is how many magnitudes reach x, `largest()` the largest as bits.
    template <class Count, class Largest>
    __device__ __forceinline__ void search(int keep, int guess, Count count, Largest largest) {
        int high = INFINITE + 1;
        if (reached == keep) return;
        if (guess <= 0) guess = largest();
        const float aim = log2_of((float)keep + 0.25f);
#pragma unroll 1
        for (int probes = 0; reached != keep && high - low > 1; ++probes) {
            const int middle = min(max(guess, low + 1), high - 1), enough = count(__int_as_float(middle));
            if (enough >= keep)
                low = middle, reached = enough;
            else
                high = middle, fewer = enough;
            if (probes < GUIDED_PROBES && (reached - fewer > FEW_BETWEEN || high - low > 2 * OCTAVE))
                guess = expect(high, enough >= keep, aim);
            else
                guess = low + (high - low) / 2;
        }
    }

    // Where as many as are kept are to be expected: their number falls about exponentially.
    __device__ __forceinline__ int expect(int high, bool rise, float aim) const {
        const float top = log2_of((float)reached), bottom = log2_of((float)fewer + 0.5f);
        // One of the bounds is no more than that.
        if (high - low > 2 * OCTAVE) {
            const float octaves = (rise ? top - aim : bottom - aim) * (1.25f * OCTAVES_PER_DOUBLING);
            const int step = (int)(fminf(fmaxf(octaves, -8.0f), 8.0f) * (float)OCTAVE);
            return rise ? low + step + OCTAVE / 128 : high + step - OCTAVE / 128;
        }
        const float share = fminf(fmaxf(ratio_of(top - aim, top - bottom), 0.03f), 0.97f);
        return low + (int)((float)(high - low) * share);
    }

    // How many of those that equal it are taken, the first ones; all of them if nothing is left over.
    __device__ __forceinline__ int missing(int keep) const { return reached == keep ? INFINITE : keep - fewer; }
};

// Which magnitudes are taken, and where they go: those above the threshold and the first `missing` that equal it.
struct Taking {
    float threshold;
    int missing;
    int above, tied;  // seen by this lane; then those of the warps before

    __device__ __forceinline__ void see(float c) { above += fabsf(c) > threshold, tied += fabsf(c) == threshold; }

    template <int WARPS>
    __device__ __forceinline__ void begin(Crew<WARPS>& crew) {
        int total;
        above = crew.before(warp_sum(above), total);
        tied = crew.before(warp_sum(tied), total);
    }

    // Of 32 neighbours, in order.
    __device__ __forceinline__ bool take(float c, int& place) {
        const int lane = threadIdx.x & 31;
        const u32 over = __ballot_sync(EVERY_LANE, fabsf(c) > threshold), equal = __ballot_sync(EVERY_LANE, fabsf(c) == threshold);
        const int ties = tied + lanes_before(equal, lane);
        place = above + lanes_before(over, lane) + min(ties, missing);
        above += __popc(over), tied += __popc(equal);
        return fabsf(c) > threshold || (fabsf(c) == threshold && ties < missing);
    }
};

// -- the choice -------------------------------------------------------------------------------------------------------

// `EACH` candidates to a lane: the numbers and values of the chosen ones to the list; returns their threshold's pattern.
template <int EACH, int WARPS>
static __device__ __forceinline__ int choose(
    const float* held, const Row& row, int listed, float cut, int guess, Crew<WARPS>& crew, const Candidates& list) {
    // Warp w owns the w-th part, so that order is settled inside a warp and by one prefix over the warps.
    const int part = WARPS == 1 ? listed : (listed + 32 * WARPS - 1) / (32 * WARPS) * 32, begin = crew.warp * part;
    const int first = begin + (threadIdx.x & 31), end = min(begin + part, listed);
    float c[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) c[i] = held[(i64)list.places[min(first + 32 * i, listed - 1)] * row.stride];
#pragma unroll
    for (int i = 0; i < EACH; ++i) c[i] = first + 32 * i < end ? c[i] : NO_ELEMENT;
    const auto count = [&](float threshold) {
        int reached = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if constexpr (EACH <= 2)
                reached += __popc(__ballot_sync(EVERY_LANE, fabsf(c[i]) >= threshold));
            else
                reached += fabsf(c[i]) >= threshold;
        return crew.sum(EACH <= 2 ? reached : warp_sum(reached));
    };
    const auto largest = [&] {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) most = fmaxf(most, fabsf(c[i]));
        return crew.largest(warp_max(__float_as_int(most)));
    };
    Threshold found = {cut > 0.0f ? __float_as_int(cut) : 0, listed, 0};
    found.search(row.keep, guess, count, largest);
    Taking taking = {__int_as_float(found.low), found.missing(row.keep)};
    if constexpr (WARPS > 1) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) taking.see(c[i]);
        taking.begin(crew);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int place;
        if (taking.take(c[i], place)) list.values[place] = c[i], list.chosen[place] = (u16)(first + 32 * i);
    }
    crew.meet();
    return found.low;
}

template <int WARPS>
static __device__ __forceinline__ int choose_candidates(
    const float* held, const Row& row, int listed, float cut, int guess, Crew<WARPS>& crew, const Candidates& list) {
    if (WARPS == 1 && listed <= 64) return choose<2>(held, row, listed, cut, guess, crew, list);
    if (listed <= 128 * WARPS) return choose<4>(held, row, listed, cut, guess, crew, list);
    return choose<16>(held, row, listed, cut, guess, crew, list);
}

// -- all elements -----------------------------------------------------------------------------------------------------

struct Elements {
    const float* values;
    i64 step;

    __device__ __forceinline__ float at(int i) const { return values[i * step]; }
};

// Those of a column come nearer, if there is `room` for them: that of 2 x BLOCK_LIST.
static __device__ __forceinline__ Elements fetch_whole(const float* held, const Row& row, const Crew<GROUP>& crew, float* room) {
    if (row.length > 2 * BLOCK_LIST) return {held, row.stride};
    for (int start = crew.member(); start < row.length; start += BATCH * 32 * GROUP) {
        float some[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) some[i] = held[(i64)min(start + i * 32 * GROUP, row.length - 1) * row.stride];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (start + i * 32 * GROUP < row.length) room[start + i * 32 * GROUP] = some[i];
    }
    crew.meet();
    return {room, 1};
}
