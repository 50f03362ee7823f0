// Matrix products for loops over time: small, of a fixed weight, and many of them.
//
//   pack     a weight, once per call, into panels of NR columns:      [N / NR][K][NR]
//   product  rows of A, up to 12 at a time, against one panel, the sums held in registers:
//
//                    panel            every sum runs over k = 0, 1, 2, ... in that order, whatever the tile, the thread
//              k  [ NR columns ]      or the number of rows; so a product of many steps at once has the same bits as
//        A [ 12 rows ]  [ sums ]      one step after the other, and recomputation gives the same numbers
//
//   gather   the product that is a weight's gradient: over all rows of all steps, in blocks, so that its error grows
//            with the square root of their number at most
//   columns  the sum of all rows, for a bias
//
// The panel layout and the register tile are those of Goto and van de Geijn (Anatomy of High-Performance Matrix
// Multiplication, 2008). Threads are those of torch's OpenMP: this file starts none.
//
// The compiler is told what to unroll, so that it need not be asked for its highest and slowest level.

#include <stdlib.h>
#include <sched.h>

// WEFT_BYTES, the width of a vector register, is defined by the caller, whose layout of panels depends on it too.
#define TALL (WEFT_BYTES == 64 ? 12 : 6)  // rows of a tile: the sums and two panels' row fit into the registers
#define UNROLL _Pragma("GCC unroll 16")

static const long BLOCK = 256;  // so many rows are summed before they are added to the sum of those before

template <class R> struct Vector;
template <> struct Vector<float> { typedef float type __attribute__((vector_size(WEFT_BYTES), aligned(4), may_alias)); };
template <> struct Vector<double> { typedef double type __attribute__((vector_size(WEFT_BYTES), aligned(8), may_alias)); };
template <class R> constexpr long lanes() { return WEFT_BYTES / (long)sizeof(R); }
template <class R> constexpr long wide() { return 2 * lanes<R>(); }  // NR

// One tile: MR rows of A times NP panels, plus `start` if there is one, to c. The columns of both are neighbours.
template <class R, int MR, int NP>
__attribute__((noinline)) void tile(long K, const R *a, long a_row, long a_col, const R *panels, R *c, long c_row,
                                    const R *start, long s_row) {
    typedef typename Vector<R>::type V;
    constexpr long W = lanes<R>(), NR = wide<R>();
    V sums[MR][2 * NP];
    UNROLL for (int i = 0; i < MR; i++)
        UNROLL for (int v = 0; v < 2 * NP; v++) sums[i][v] = V{};
    for (long k = 0; k < K; k++) {
        V b[2 * NP];
        UNROLL for (int p = 0; p < NP; p++)
            UNROLL for (int v = 0; v < 2; v++) b[2 * p + v] = *(const V *)(panels + (p * K + k) * NR + v * W);
        UNROLL for (int i = 0; i < MR; i++) {
            const R value = a[i * a_row + k * a_col];
            UNROLL for (int v = 0; v < 2 * NP; v++) sums[i][v] += value * b[v];
        }
    }
    UNROLL for (int i = 0; i < MR; i++)
        UNROLL for (int v = 0; v < 2 * NP; v++) {
            if (start) sums[i][v] += *(const V *)(start + i * s_row + v * W);
            *(V *)(c + i * c_row + v * W) = sums[i][v];
        }
}

// One or two rows take several panels at a time, since one alone would not keep the processor busy.
template <class R> using Tile = void (*)(long, const R *, long, long, const R *, R *, long, const R *, long);
template <class R> Tile<R> tile_for(long rows, long panels) {
    static const Tile<R> one[] = {
        tile<R, 1, 1>, tile<R, 2, 1>, tile<R, 3, 1>, tile<R, 4, 1>, tile<R, 5, 1>, tile<R, 6, 1>,
#if WEFT_BYTES == 64
        tile<R, 7, 1>, tile<R, 8, 1>, tile<R, 9, 1>, tile<R, 10, 1>, tile<R, 11, 1>, tile<R, 12, 1>
#endif
    };
    return panels == 1 ? one[rows - 1] : rows == 1 ? tile<R, 1, 4> : tile<R, 2, 2>;
}

// A tile at the edge, or one whose columns lie apart: by way of a tile of our own.
template <class R>
__attribute__((noinline)) void edge(Tile<R> whole, long rows, long columns, long K, const R *a, long a_row, long a_col,
                                    const R *panels, R *c, long c_row, long c_col, const R *start, long s_row,
                                    long s_col) {
    constexpr long WIDE = 4 * wide<R>();
    R own[TALL * WIDE];
    if (start)
        for (long i = 0; i < rows; i++)
            for (long j = 0; j < WIDE; j++) own[i * WIDE + j] = j < columns ? start[i * s_row + j * s_col] : 0;
    whole(K, a, a_row, a_col, panels, own, WIDE, start ? own : 0, WIDE);
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j++) c[i * c_row + j * c_col] = own[i * WIDE + j];
}

// C[M x N] = A[M x K] B + start, for the panels from `first` to `last` of B. Rows are shared out evenly over tiles.
template <class R>
void product(long M, long N, long K, const R *a, long a_row, long a_col, const R *packed, R *c, long c_row, long c_col,
             const R *start, long s_row, long s_col, long first, long last) {
    constexpr long NR = wide<R>();
    const long tiles = (M + TALL - 1) / TALL, most = M == 1 ? 4 : M == 2 ? 2 : 1;
    const bool near = c_col == 1 && (!start || s_col == 1);
    for (long j = first; j < last;) {
        const long panels = j + most <= last && (j + most) * NR <= N ? most : 1;
        const long columns = (j + panels) * NR <= N ? panels * NR : N - j * NR;
        const R *panel = packed + j * NR * K;
        for (long i = 0, n = 0; n < tiles; n++) {
            const long rows = M / tiles + (n < M % tiles);
            const Tile<R> whole = tile_for<R>(rows, panels);
            const R *from = a + i * a_row, *begin = start ? start + i * s_row + j * NR * s_col : 0;
            R *to = c + i * c_row + j * NR * c_col;
            if (near && columns == panels * NR) whole(K, from, a_row, a_col, panel, to, c_row, begin, s_row);
            else edge<R>(whole, rows, columns, K, from, a_row, a_col, panel, to, c_row, c_col, begin, s_row, s_col);
            i += rows;
        }
        j += panels;
    }
}

// `count` of at most SIZE numbers, `apart` from each other, one behind the other; zeros up to SIZE.
template <class R, long SIZE> inline void take(long count, const R *from, long apart, R *to) {
    if (count == SIZE && apart == 1) __builtin_memcpy(to, from, SIZE * sizeof(R));
    else
        for (long n = 0; n < SIZE; n++) to[n] = n < count ? from[n * apart] : 0;
}

// Memory of one thread, which goes with it.
struct Room {
    void *at = 0;
    size_t size = 0;
    void *of(size_t wanted) {
        if (wanted > size) free(at), at = malloc(size = wanted);
        return at;
    }
    ~Room() { free(at); }
};
static thread_local Room packed_rows;

// `count` of at most SIZE numbers from one place to another.
template <class R, long SIZE> inline void move(long count, const R *from, long apart, R *to, long there) {
    if (count == SIZE && apart == 1 && there == 1) __builtin_memcpy(to, from, SIZE * sizeof(R));
    else
        for (long n = 0; n < count; n++) to[n * there] = from[n * apart];
}

// As product, but for the rows that are `live`: the others are what their sums start with. Live rows are packed one behind
// the other, so that tiles are full wherever they lie.
template <class R>
void some(long M, long N, long K, const R *a, long a_row, long a_col, const R *packed, R *c, long c_row, long c_col,
          const R *start, long s_row, long s_col, long first, long last, const unsigned char *live) {
    constexpr long NR = wide<R>(), MANY = 4 * TALL;
    static const R zeros[NR] = {};
    long count = 0, at[MANY];
    for (long i = 0; i < M; i++) count += live[i];
    R *const own_a = count < M ? (R *)packed_rows.of(MANY * K * sizeof(R)) : 0;
    if (!own_a) return product<R>(M, N, K, a, a_row, a_col, packed, c, c_row, c_col, start, s_row, s_col, first, last);
    const auto begun = [&](long i, long j) { return start ? start + i * s_row + j * s_col : zeros; };
    for (long i = 0; i < M;) {
        long n = 0;
        for (; i < M && n < MANY; i++) {
            if (!live[i])
                for (long p = first, j = p * NR; p < last; p++, j += NR)
                    move<R, NR>(N - j < NR ? N - j : NR, begun(i, j), start ? s_col : 1, c + i * c_row + j * c_col, c_col);
            else {
                const R *from = a + i * a_row;
                if (a_col == 1) __builtin_memcpy(own_a + n * K, from, K * sizeof(R));
                else
                    for (long k = 0; k < K; k++) own_a[n * K + k] = from[k * a_col];
                at[n++] = i;
            }
        }
        const long tiles = (n + TALL - 1) / TALL;
        for (long p = first, j = p * NR; n && p < last; p++, j += NR) {
            const long columns = N - j < NR ? N - j : NR;
            for (long tile = 0, m = 0; tile < tiles; tile++) {
                const long rows = n / tiles + (tile < n % tiles);
                alignas(64) R own[TALL * NR];
                if (start)
                    for (long r = 0; r < rows; r++) move<R, NR>(columns, begun(at[m + r], j), s_col, own + r * NR, 1);
                tile_for<R>(rows, 1)(K, own_a + m * K, K, 1, packed + j * K, own, NR, start ? own : 0, NR);
                for (long r = 0; r < rows; r++)
                    move<R, NR>(columns, own + r * NR, 1, c + at[m + r] * c_row + j * c_col, c_col);
                m += rows;
            }
        }
    }
}

// B[K x N] into panels.
template <class R> void pack(long K, long N, const R *b, long row, long col, R *panels) {
    constexpr long NR = wide<R>();
    for (long j = 0; j < N; j += NR)
        for (long k = 0; k < K; k++) take<R, NR>(N - j < NR ? N - j : NR, b + k * row + j * col, col, panels + j * K + k * NR);
}

// C += A B over a long inner axis: in blocks of it, each packed. `room` holds BLOCK x (N + NR) + BLOCK x TALL numbers
// of this thread's own. Rows of C are shared out over threads. With `live`, only so much of the inner axis counts; of
// every `each` of it only the first `count`: the others repeat a row, and would move the bounds of the blocks.
template <class R>
void gather(long M, long N, long K, const R *a, long a_row, long a_col, const R *b, long b_row, long b_col, R *c,
            long c_row, long c_col, R *room, long thread, long threads, const unsigned char *live, long each, long count) {
    constexpr long NR = wide<R>();
    const long panels = (N + NR - 1) / NR, tiles = (M + TALL - 1) / TALL;
    const long from = tiles * thread / threads, to = tiles * (thread + 1) / threads;
    R *const packed_a = room + BLOCK * panels * NR;
    for (long k = 0, row = 0; k < K && from < to;) {
        long inner = 0, at[BLOCK];
        for (; k < K && inner < BLOCK; k++, row = row + 1 < each ? row + 1 : 0)
            if (row < count && (!live || live[k])) at[inner++] = k;
        for (long j = 0; j < N; j += NR)
            for (long q = 0; q < inner; q++)
                take<R, NR>(N - j < NR ? N - j : NR, b + at[q] * b_row + j * b_col, b_col, room + j * inner + q * NR);
        for (long n = from; n < to && inner; n++) {
            const long i = n * TALL, rows = M - i < TALL ? M - i : TALL;
            const R *const begin = a + i * a_row;
            for (long q = 0; q < inner; q++) take<R, TALL>(rows, begin + at[q] * a_col, a_row, packed_a + q * TALL);
            R *const sum = c + i * c_row;
            product<R>(rows, N, inner, packed_a, 1, TALL, room, sum, c_row, c_col, sum, c_row, c_col, 0, panels);
        }
    }
}

// c[j] += the sum of a[i][j] over the M rows, for the columns of this thread, a few vectors of columns at a time. Of
// every `each` rows only the first `count` are read.
template <class R>
void columns(long M, long N, const R *a, long a_row, R *c, long thread, long threads, long each, long count) {
    typedef typename Vector<R>::type V;
    constexpr long W = lanes<R>(), MANY = 8;
    const long end = N * (thread + 1) / threads;
    for (long m = 0, row = 0; m < M;) {
        const R *block[BLOCK];
        long rows = 0;
        for (; m < M && rows < BLOCK; m++, row = row + 1 < each ? row + 1 : 0)
            if (row < count) block[rows++] = a + m * a_row;
        long j = N * thread / threads;
        for (; j + MANY * W <= end; j += MANY * W) {
            V sums[MANY] = {};
            for (long i = 0; i < rows; i++)
                UNROLL for (int v = 0; v < MANY; v++) sums[v] += *(const V *)(block[i] + j + v * W);
            UNROLL for (int v = 0; v < MANY; v++) *(V *)(c + j + v * W) += sums[v];
        }
        for (; j < end; j++) {
            R sum = 0;
            for (long i = 0; i < rows; i++) sum += block[i][j];
            c[j] += sum;
        }
    }
}

#define API(R, X)                                                                                                      \
    extern "C" void weft_pack_##X(long K, long N, const R *b, long row, long col, R *panels) {                         \
        pack<R>(K, N, b, row, col, panels);                                                                            \
    }                                                                                                                  \
    extern "C" void weft_product_##X(long M, long N, long K, const R *a, long a_row, long a_col, const R *packed,      \
                                     R *c, long c_row, long c_col, const R *start, long s_row, long s_col, long first, \
                                     long last) {                                                                      \
        product<R>(M, N, K, a, a_row, a_col, packed, c, c_row, c_col, start, s_row, s_col, first, last);               \
    }                                                                                                                  \
    extern "C" void weft_some_##X(long M, long N, long K, const R *a, long a_row, long a_col, const R *packed, R *c,   \
                                  long c_row, long c_col, const R *start, long s_row, long s_col, long first,          \
                                  long last, const unsigned char *live) {                                              \
        some<R>(M, N, K, a, a_row, a_col, packed, c, c_row, c_col, start, s_row, s_col, first, last, live);            \
    }                                                                                                                  \
    extern "C" void weft_gather_##X(long M, long N, long K, const R *a, long a_row, long a_col, const R *b,            \
                                    long b_row, long b_col, R *c, long c_row, long c_col, R *room, long thread,        \
                                    long threads, const unsigned char *live, long each, long count) {                  \
        gather<R>(M, N, K, a, a_row, a_col, b, b_row, b_col, c, c_row, c_col, room, thread, threads, live, each,       \
                  count);                                                                                              \
    }                                                                                                                  \
    extern "C" void weft_columns_##X(long M, long N, const R *a, long a_row, R *c, long thread, long threads,          \
                                     long each, long count) {                                                          \
        columns<R>(M, N, a, a_row, c, thread, threads, each, count);                                                   \
    }
API(float, f)
API(double, d)

// All threads wait for each other; `gate` is {arrived, round}, zero at first. A thread that waits long gives way.
extern "C" void weft_meet(int *gate, long threads) {
    if (threads == 1) return;
    const int round = __atomic_load_n(gate + 1, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(gate, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(gate, 0, __ATOMIC_RELAXED);
        __atomic_store_n(gate + 1, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (long n = 0; __atomic_load_n(gate + 1, __ATOMIC_ACQUIRE) == round; n++)
        if (n > 4000) sched_yield();
}

// Run the body once on each thread of torch's own OpenMP, whose threads wait for work spinning: threads beside them would
// compete for the cores. Without OpenMP, the caller's thread runs it alone.
typedef void (*Body)(long thread, long threads, long steps, void **values, int *gate);
typedef void (*Parallel)(void (*member)(void *), void *given, unsigned threads, unsigned flags);
struct Call { Body body; long steps; void **values; int gate[2]; };
static struct { Parallel parallel; int (*thread)(), (*threads)(); } openmp;

extern "C" void weft_bind_openmp(void **found) {
    openmp = {(Parallel)found[0], (int (*)())found[1], (int (*)())found[2]};
}

static void member(void *given) {
    Call *call = (Call *)given;
    call->body(openmp.thread(), openmp.threads(), call->steps, call->values, call->gate);
}

extern "C" void weft_run(Body body, long threads, long steps, void **values) {
    Call call{body, steps, values, {0, 0}};
    if (threads <= 1 || !openmp.parallel) body(0, 1, steps, values, call.gate);
    else openmp.parallel(member, &call, (unsigned)threads, 0);
}
