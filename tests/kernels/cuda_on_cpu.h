// Runs a CUDA kernel on the CPU, one block at a time, one fibre per thread: tests execute the very sources that run on a GPU.
//
// A fibre runs until it reaches a barrier or a warp function and yields; when all threads that take part have come, the last one
// computes what each of them gets.
#include <setjmp.h>
#include <ucontext.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(type, name) static type name[1 << 16]
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }

// Aligned as on a GPU, where a load from another place is an error.
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

template <class To, class From> static inline To bits_as(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
static inline int __float_as_int(float x) { return bits_as<int>(x); }
static inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static inline float __int_as_float(int x) { return bits_as<float>(x); }
static inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }
static inline double __longlong_as_double(long long x) { return bits_as<double>(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
template <class T> static inline T __ldcs(const T* from) { return *from; }
template <class T> static inline void __stcg(T* to, T x) { *to = x; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
static inline unsigned atomicAdd(unsigned* at, unsigned x) { unsigned old = *at; *at += x; return old; }
static inline int atomicMax(int* at, int x) { int old = *at; *at = max(*at, x); return old; }
static inline unsigned atomicExch(unsigned* at, unsigned x) { unsigned old = *at; *at = x; return old; }
static inline unsigned atomicOr(unsigned* at, unsigned x) { unsigned old = *at; *at |= x; return old; }

// Blocks run one after the other.
static inline void __threadfence() {}

// -- fibres -----------------------------------------------------------------------------------------------------------

struct Meeting { int come = 0, turn = 0; int values[32]; int results[32]; };
struct Fibre { jmp_buf place; bool begun, done; Meeting* waits; int turn; };
#define MOST_THREADS 1024
#define STACK_BYTES (1 << 16)
static Fibre fibres[MOST_THREADS];
static Meeting warps[MOST_THREADS / 32];
static Meeting block_meeting;
static jmp_buf scheduler;
static int running, alive;
static int alive_in_warp[MOST_THREADS / 32];

// Jumps cost no system call, as swapcontext does.
static __attribute__((noinline)) void give_way() {
    if (!_setjmp(fibres[running].place)) _longjmp(scheduler, 1);
}

static void wait_for(Meeting& meeting, int turn) {
    fibres[running].waits = &meeting, fibres[running].turn = turn;
    give_way();
}

static void __syncthreads() {
    Meeting& m = block_meeting;
    int turn = m.turn;
    if (++m.come == alive) { m.come = 0; ++m.turn; return; }
    wait_for(m, turn);
}

template <class Compute> static int meet(int value, Compute compute) {
    int lane = running % 32;
    Meeting& m = warps[running / 32];
    int turn = m.turn;
    m.values[lane] = value;
    if (++m.come == alive_in_warp[running / 32]) {
        compute(m);
        m.come = 0;
        ++m.turn;
    } else {
        wait_for(m, turn);
    }
    return m.results[lane];
}

static void __syncwarp() { meet(0, [](Meeting&) {}); }
static unsigned __ballot_sync(unsigned, bool x) {
    return (unsigned)meet(x, [](Meeting& m) {
        unsigned all = 0;
        for (int i = 0; i < 32; ++i) all |= (unsigned)(m.values[i] != 0) << i;
        for (int& r : m.results) r = (int)all;
    });
}
static int __reduce_add_sync(unsigned, int x) {
    return meet(x, [](Meeting& m) {
        int sum = 0;
        for (int v : m.values) sum += v;
        for (int& r : m.results) r = sum;
    });
}
static int __reduce_max_sync(unsigned, int x) {
    return meet(x, [](Meeting& m) {
        int top = m.values[0];
        for (int v : m.values) top = max(top, v);
        for (int& r : m.results) r = top;
    });
}
static int __shfl_up_sync(unsigned, int x, int step) {
    int lane = running % 32;
    meet(x, [](Meeting& m) { memcpy(m.results, m.values, sizeof m.values); });
    return lane >= step ? warps[running / 32].results[lane - step] : x;
}
static int __shfl_xor_sync(unsigned, int x, int mask) {
    int lane = running % 32;
    meet(x, [](Meeting& m) { memcpy(m.results, m.values, sizeof m.values); });
    return warps[running / 32].results[lane ^ mask];
}
static int __shfl_sync(unsigned, int x, int from) {
    meet(x, [](Meeting& m) { memcpy(m.results, m.values, sizeof m.values); });
    return warps[running / 32].results[from];
}

static void (*body)();
// A fibre serves its thread in one block after the other.
static void run_fibre() {
    for (;;) {
        body();
        fibres[running].done = true;
        --alive;
        --alive_in_warp[running / 32];
        if (alive && block_meeting.come == alive) { block_meeting.come = 0; ++block_meeting.turn; }
        give_way();
    }
}

static void begin_fibre() {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = malloc(STACK_BYTES);
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, run_fibre, 0);
    setcontext(&context);
}

static __attribute__((noinline)) void resume(int thread) {
    running = thread;
    threadIdx = {(unsigned)thread, 0, 0};
    if (_setjmp(scheduler)) return;
    if (fibres[thread].begun) _longjmp(fibres[thread].place, 1);
    fibres[thread].begun = true;
    begin_fibre();
}

static void run_grid(int grid, int block, void (*kernel)()) {
    body = kernel;
    for (int b = 0; b < grid; ++b) {
        blockIdx = {(unsigned)b, 0, 0}, blockDim = {(unsigned)block, 1, 1}, gridDim = {(unsigned)grid, 1, 1};
        alive = block;
        block_meeting = Meeting();
        for (int w = 0; w < block / 32; ++w) warps[w] = Meeting(), alive_in_warp[w] = 32;
        for (int t = 0; t < block; ++t) fibres[t].done = false, fibres[t].waits = nullptr;
        while (alive) {
            for (int t = 0; t < block; ++t) {
                if (fibres[t].done || (fibres[t].waits && fibres[t].waits->turn == fibres[t].turn)) continue;
                fibres[t].waits = nullptr;
                resume(t);
            }
        }
    }
}
