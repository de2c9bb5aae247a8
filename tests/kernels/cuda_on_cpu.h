// Runs a CUDA kernel on the CPU, one fibre per thread: tests execute the very sources that run on a GPU.
//
// A fibre runs until it reaches a barrier or a warp function and yields; when all threads that take part have come, the last one
// computes what each of them gets. A GPU promises no order of blocks, warps and threads, and here it is drawn: two blocks run at a
// time, in turns, and a thread may have to wait at an atomic function. Shared memory is noise until a kernel writes there. So a
// kernel without a barrier that it needs gives other bits than torch.
#include <setjmp.h>
#include <ucontext.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __global__
#define __device__
#define __forceinline__ inline
// Where there are no initial values, so that two blocks can take turns in that memory; what must stay is put elsewhere.
#define __shared__ static
#define STAYS static __attribute__((section("stays")))
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
STAYS Dim threadIdx, blockIdx, blockDim, gridDim;

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

// -- fibres -----------------------------------------------------------------------------------------------------------

struct Meeting { int come = 0, turn = 0; int values[32]; int results[32]; void (*compute)(Meeting&) = nullptr; };
struct Fibre { jmp_buf place; bool begun, done; Meeting* waits; int turn; };
#define MOST_THREADS 1024
#define STACK_BYTES (1 << 16)
// A place for a block that runs. Its fibres serve one block after the other.
struct Seat {
    int block;
    int alive;
    int alive_in_warp[MOST_THREADS / 32];
    Meeting all;
    Meeting warps[MOST_THREADS / 32];
    Fibre fibres[MOST_THREADS];
    char* shared;  // while the other one has its turn
};
#define SEATS 2
STAYS Seat* seats;
STAYS Seat* here;
STAYS jmp_buf scheduler;
STAYS int running;

// The linker's names for the memory without initial values.
extern char __bss_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));

STAYS unsigned drawn, launches;
static unsigned draw() {
    drawn ^= drawn << 13, drawn ^= drawn >> 17, drawn ^= drawn << 5;
    return drawn >> 8;
}

// Jumps cost no system call, as swapcontext does.
static __attribute__((noinline)) void give_way() {
    if (!_setjmp(here->fibres[running].place)) _longjmp(scheduler, 1);
}

static void others_may_come() { if (draw() % 4 == 0) give_way(); }
static void __threadfence() { others_may_come(); }
static unsigned atomicAdd(unsigned* at, unsigned x) { others_may_come(); unsigned old = *at; *at += x; return old; }
static int atomicMax(int* at, int x) { others_may_come(); int old = *at; *at = max(*at, x); return old; }
static unsigned atomicExch(unsigned* at, unsigned x) { others_may_come(); unsigned old = *at; *at = x; return old; }
static unsigned atomicOr(unsigned* at, unsigned x) { others_may_come(); unsigned old = *at; *at |= x; return old; }

static void wait_for(Meeting& meeting, int turn) {
    here->fibres[running].waits = &meeting, here->fibres[running].turn = turn;
    give_way();
}

// Whether all that are expected have come. Threads that have ended are expected nowhere.
static bool end_if_complete(Meeting& m, int expected) {
    if (!m.come || m.come < expected) return false;
    if (m.compute) m.compute(m);
    m.come = 0;
    ++m.turn;
    return true;
}

static void __syncthreads() {
    Meeting& m = here->all;
    int turn = m.turn;
    ++m.come;
    if (!end_if_complete(m, here->alive)) wait_for(m, turn);
}

static int meet(int value, void (*compute)(Meeting&)) {
    int lane = running % 32;
    Meeting& m = here->warps[running / 32];
    int turn = m.turn;
    m.values[lane] = value;
    m.compute = compute;
    ++m.come;
    if (!end_if_complete(m, here->alive_in_warp[running / 32])) wait_for(m, turn);
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
    return lane >= step ? here->warps[running / 32].results[lane - step] : x;
}
static int __shfl_xor_sync(unsigned, int x, int mask) {
    int lane = running % 32;
    meet(x, [](Meeting& m) { memcpy(m.results, m.values, sizeof m.values); });
    return here->warps[running / 32].results[lane ^ mask];
}
static int __shfl_sync(unsigned, int x, int from) {
    meet(x, [](Meeting& m) { memcpy(m.results, m.values, sizeof m.values); });
    return here->warps[running / 32].results[from];
}

STAYS void (*body)();
static void run_fibre() {
    for (;;) {
        body();
        here->fibres[running].done = true;
        end_if_complete(here->warps[running / 32], --here->alive_in_warp[running / 32]);
        end_if_complete(here->all, --here->alive);
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
    Fibre& fibre = here->fibres[thread];
    if (fibre.begun) _longjmp(fibre.place, 1);
    fibre.begun = true;
    begin_fibre();
}

static void enter(Seat* seat) {
    const size_t bytes = _end - __bss_start;
    if (seat != here) {
        if (here) memcpy(here->shared, __bss_start, bytes);
        memcpy(__bss_start, seat->shared, bytes);
    }
    here = seat;
    blockIdx = {(unsigned)seat->block, 0, 0};
}

static void begin_block(Seat& seat, int block, int threads) {
    const size_t bytes = _end - __bss_start;
    seat.block = block, seat.alive = threads, seat.all = Meeting();
    for (int w = 0; w < threads / 32; ++w) seat.warps[w] = Meeting(), seat.alive_in_warp[w] = 32;
    for (int t = 0; t < threads; ++t) seat.fibres[t].done = false, seat.fibres[t].waits = nullptr;
    if (!seat.shared) seat.shared = (char*)malloc(bytes);
    enter(&seat);
    for (size_t i = 0; i + sizeof(unsigned) <= bytes; i += sizeof(unsigned)) {
        const unsigned noise = draw();
        memcpy(__bss_start + i, &noise, sizeof noise);
    }
}

// Each of `count` once, from anywhere on, in strides.
struct Shuffle {
    unsigned long long at, stride;
    int count;
    explicit Shuffle(int count) : at(draw()), count(count) {
        static const int primes[] = {1, 3, 31, 1031, 2053, 65537};
        do stride = primes[draw() % 6]; while (stride > 1 && count % stride == 0);
    }
    int next() { return (int)((at += stride) % count); }
};

static void run_grid(int grid, int threads, void (*kernel)(), int order) {
    body = kernel;
    drawn = 2654435761u * (1000 * order + ++launches) | 1;
    blockDim = {(unsigned)threads, 1, 1}, gridDim = {(unsigned)grid, 1, 1};
    // In some launches some warps and threads stay far behind. That takes longer.
    const bool uneven = draw() % 4 == 0;
    const unsigned slow_warps = uneven ? draw() & draw() : 0, slow_lanes = uneven ? draw() & draw() & draw() : 0;
    Shuffle blocks(grid);
    int begun = 0;
    here = nullptr;
    if (!seats) seats = (Seat*)calloc(SEATS, sizeof(Seat));
    for (int s = 0; s < SEATS && begun < grid; ++s, ++begun) begin_block(seats[s], blocks.next(), threads);
    for (int idle = 0;;) {
        Seat* seat = &seats[draw() % SEATS];
        if (!seat->alive && begun == grid) seat = &seats[seat == seats];
        if (!seat->alive && begun == grid) return;
        if (seat->alive) enter(seat);
        else ++begun, begin_block(*seat, blocks.next(), threads);
        Shuffle turns(threads);
        for (int i = 0; i < threads; ++i) {
            const int thread = turns.next();
            Fibre& fibre = seat->fibres[thread];
            if (fibre.done || (fibre.waits && fibre.waits->turn == fibre.turn)) continue;
            idle = 0;
            const bool slow = (slow_warps >> (thread / 32 % 24) | slow_lanes >> (thread % 24)) & 1;
            if (slow && draw() % 8) continue;
            fibre.waits = nullptr;
            resume(thread);
        }
        if (++idle > 64) fputs("A kernel waits for threads that never come.\n", stderr), abort();
    }
}
