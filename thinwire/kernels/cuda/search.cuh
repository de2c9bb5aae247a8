// The k-th largest magnitude of a row, found by counting how many reach a guess, and the choice of those that are sent.
//
// Magnitudes are compared by their bit patterns, which are ordered as they are.

#include "warp_group.cuh"

#define OCTAVE (1 << 23)
// How far down twice as many reach, in octaves: normal numbers at a density of 1 %.
#define OCTAVES_PER_DOUBLING (1.0f / 7.0f)
// Probes that go by the counts. After them the search halves, which ends for sure.
#define GUIDED_PROBES 8
// Stands for no element: not a number reaches no threshold, so that it is never chosen.
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

// -- the threshold ----------------------------------------------------------------------------------------------------

// `reached` magnitudes reach the pattern `low`, at least as many as are kept. Unless exactly as many do, `fewer` reach the next.
struct Threshold {
    int low, reached, fewer;

    // Starts from a `low` that is low enough. `count(x)` is how many magnitudes reach pattern x, `largest()` the largest pattern.
    // LEAST_STEP: of a step while one bound is missing. FEW: with no more than so many between the bounds the search halves, which
    // is cheaper than a guess.
    template <int LEAST_STEP, int FEW, class Count, class Largest>
    __device__ __forceinline__ void search(int keep, int guess, Count count, Largest largest) {
        // Nothing reaches this: what is not a number counts as the next after infinity.
        int high = INFINITE + 2;
        if (reached == keep) return;
        if (guess <= 0) guess = largest();
        const float aim = log2_of((float)keep + 0.25f);
        float stretch = 1.0f;
#pragma unroll 1
        for (int probes = 0; reached != keep && high - low > 1; ++probes) {
            const int middle = min(max(guess, low + 1), high - 1), enough = count(middle);
            const bool rise = enough >= keep;
            if (rise)
                low = middle, reached = enough;
            else
                high = middle, fewer = enough;
            const int between = high - low;
            if (probes >= GUIDED_PROBES || (reached - fewer <= FEW && between <= 2 * OCTAVE)) {
                guess = low + between / 2;
                continue;
            }
            const float top = log2_of((float)reached), bottom = log2_of((float)fewer + 0.5f);
            if (between > 2 * OCTAVE) {
                // One bound is missing. How fast counts change is not known either, so that steps grow.
                const float octaves = fabsf((rise ? top : bottom) - aim) * (1.25f * OCTAVES_PER_DOUBLING);
                const float step = fmaxf(octaves * (float)OCTAVE, (float)LEAST_STEP) * stretch;
                const int bounded = min((int)fminf(step, 8.0f * (float)OCTAVE) + OCTAVE / 128, between);
                guess = rise ? low + bounded : high - bounded;
                stretch *= 2.0f;
            } else {
                // Counts fall about exponentially between the bounds.
                const float share = fminf(fmaxf(ratio_of(top - aim, top - bottom), 0.03f), 0.97f);
                guess = low + (int)((float)between * share);
            }
        }
    }

    // How many of those that equal it are taken, the first ones; all of them if nothing is left over.
    __device__ __forceinline__ int missing(int keep) const { return reached == keep ? INFINITE : keep - fewer; }
};

// Which elements are sent and where they go: those above the threshold, and the first `missing` that equal it.
struct Chooser {
    int missing;
    int above, tied;  // seen by this lane; after `begin`, those of the warps before

    __device__ __forceinline__ void see(bool over, bool equal) { above += over, tied += equal; }

    template <int WARPS>
    __device__ __forceinline__ void begin(WarpGroup<WARPS>& group) {
        int total;
        above = group.before(warp_sum(above), total);
        tied = group.before(warp_sum(tied), total);
    }

    // Of 32 neighbours, in order.
    __device__ __forceinline__ bool choose(bool over, bool equal, int& place) {
        const int lane = threadIdx.x & 31;
        const u32 all_over = __ballot_sync(EVERY_LANE, over), all_equal = __ballot_sync(EVERY_LANE, equal);
        const int ties = tied + lanes_before(all_equal, lane);
        place = above + lanes_before(all_over, lane) + min(ties, missing);
        above += __popc(all_over), tied += __popc(all_equal);
        return over || (equal && ties < missing);
    }
};

// Choose `keep` of all elements of a row, of which `at(i)` is the i-th; `send(c, i, place)` gets the chosen ones. Returns the
// pattern of the smallest.
template <int WARPS, class At, class Send>
static __device__ __forceinline__ int choose_whole(
    int length, int keep, int guess, WarpGroup<WARPS>& group, At at, Send send) {
    // Warp w owns the w-th part, so that order is settled inside a warp and by one prefix over the warps.
    const int lane = threadIdx.x & 31, part = (length + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int begin = group.warp * part, end = min(begin + part, length);
    const auto count = [&](int pattern) {
        const float threshold = __int_as_float(pattern);
        int reached = 0;
#pragma unroll 8
        for (int i = begin + lane; i < end; i += 32) reached += fabsf(at(i)) >= threshold;
        return group.sum(warp_sum(reached));
    };
    const auto largest = [&] {
        float most = 0.0f;
#pragma unroll 8
        for (int i = begin + lane; i < end; i += 32) most = fmaxf(most, fabsf(at(i)));
        return group.largest(warp_max(__float_as_int(most)));
    };
    Threshold found = {0, length, 0};
    found.search<OCTAVE / 16, 0>(keep, guess, count, largest);
    const float threshold = __int_as_float(found.low);
    Chooser chooser = {found.missing(keep)};
    if constexpr (WARPS > 1) {
        for (int i = begin + lane; i < end; i += 32) chooser.see(fabsf(at(i)) > threshold, fabsf(at(i)) == threshold);
        chooser.begin(group);
    }
    for (int start = begin; start < end; start += 32) {
        const int i = start + lane;
        const float c = i < end ? at(i) : NO_ELEMENT;
        int place;
        if (chooser.choose(fabsf(c) > threshold, fabsf(c) == threshold, place)) send(c, i, place);
    }
    return found.low;
}
