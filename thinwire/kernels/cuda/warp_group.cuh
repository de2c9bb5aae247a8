// WarpGroup: the warps that work on one row together. One warp, or all of a block.

template <int WARPS>
struct WarpGroup {
    int* words;  // 2 x WARPS in shared memory. Sums use one half in turn, so that one barrier each is enough.
    int turn, warp;

    __device__ __forceinline__ int member() const { return 32 * warp + (threadIdx.x & 31); }

    // What a thread has written to shared memory is there for the others.
    __device__ __forceinline__ void meet() const {
        if constexpr (WARPS > 1)
            __syncthreads();
        else
            __syncwarp();
    }

    // The functions below take what is the same in all lanes of a warp.

    __device__ __forceinline__ int sum(int x) {
        if constexpr (WARPS == 1) return x;
        int total = 0;
        share(x, [&](int, int theirs) { total += theirs; });
        return total;
    }

    // Sum over the warps before this one, and over all of them.
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

    // The same of what every lane has.
    __device__ __forceinline__ int before_lanes(int x) {
        if constexpr (WARPS == 1) return 0;
        int total;
        return before(warp_sum(x), total);
    }

    // Sum over the threads of the group up to this one, and over all of them.
    __device__ __forceinline__ int sum_upto(int x, int& total) {
        const int lane = threadIdx.x & 31;
        x = ::sum_upto(x, lane);
        int* all = words + (turn ^= 1) * WARPS;
        if (lane == 31) all[warp] = x;
        meet();
        // Every warp sums up the others for itself: faster than one after the other, and no further barrier.
        const int upto = ::sum_upto(lane < WARPS ? all[lane] : 0, lane);
        total = __shfl_sync(EVERY_LANE, upto, 31);
        const int before = __shfl_sync(EVERY_LANE, upto, max(warp - 1, 0));
        return warp ? x + before : x;
    }

  private:
    template <class Each>
    __device__ __forceinline__ void share(int x, Each each) {
        int* all = words + (turn ^= 1) * WARPS;
        if ((threadIdx.x & 31) == 0) all[warp] = x;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; ++w) each(w, all[w]);
    }
};
