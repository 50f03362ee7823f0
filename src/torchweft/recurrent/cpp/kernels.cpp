// Matrix products for loops over time: small, of a fixed weight, and many of them.
//
//   pack     a weight, once per call, into panels of NR columns:      [N / NR][K][NR]
//   product  rows of A, up to 12 at a time, against one panel, the sums held in registers:
//
//                    panel            every sum runs over k = 0, 1, 2, ... in that order, whatever the tile, the thread
//              k  [ NR columns ]      or the number of rows. So a product of many steps at once has the same bits as
//        A [ 12 rows ]  [ sums ]      one step after the other, and recomputation gives the same numbers.
//
//   some     the same for the rows of which a mask is true
//   gather   the product that is a weight's gradient: over all rows of all steps, in blocks, so that its error grows
//            at most with the square root of their number
//   columns  the sum of all rows, for a bias
//
// A BLAS would not do: it chooses the order of its sums by the shape of the product, and its calls cost more than the
// products of a step. The panel layout and the register tile are those of Goto and van de Geijn (Anatomy of
// High-Performance Matrix Multiplication, 2008). Threads are those of torch's OpenMP: this file starts none.
//
// Loops to unroll are marked, so that the compiler need not run at its highest and slowest level.

#include <stdlib.h>
#include <sched.h>

// The caller defines TORCHWEFT_BYTES, the width of a vector register, because its layout of panels depends on it too.
// Rows of a tile: the sums and a row of a panel must fit into the vector registers.
#define TALL (TORCHWEFT_BYTES == 64 ? 12 : 6)
#define UNROLL _Pragma("GCC unroll 16")

static const long SHORT = 8;  // length of an inner axis up to which factors are not packed
static const long BLOCK = 256;  // rows that are summed before they are added to the sum of those before

// Unaligned vectors that can alias numbers: rows of the caller's tensors begin anywhere.
template <class R> struct Vector;
#define VECTOR __attribute__((vector_size(TORCHWEFT_BYTES), may_alias
template <> struct Vector<float> { typedef float type VECTOR, aligned(4))); };
template <> struct Vector<double> { typedef double type VECTOR, aligned(8))); };
template <class R> constexpr long lanes() { return TORCHWEFT_BYTES / (long)sizeof(R); }
template <class R> constexpr long wide() { return 2 * lanes<R>(); }  // NR

// One tile: MR rows of A times NP panels, plus `start` if there is one, to c. The columns of both are adjacent. `start`
// is added last: in `gather` it is the sum of all blocks so far, and single products added to such a large number would
// lose their low bits.
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
    // The tile reads `start` before it writes c at the same place: `gather` passes one matrix as both.
    UNROLL for (int i = 0; i < MR; i++)
        UNROLL for (int v = 0; v < 2 * NP; v++) {
            if (start) sums[i][v] += *(const V *)(start + i * s_row + v * W);
            *(V *)(c + i * c_row + v * W) = sums[i][v];
        }
}

// One or two rows take several panels at a time: each sum is a chain of dependent additions, and one panel alone has
// too few of them to keep the processor busy.
template <class R> using Tile = void (*)(long, const R *, long, long, const R *, R *, long, const R *, long);
template <class R> Tile<R> tile_for(long rows, long panels) {
    static const Tile<R> one[] = {
        tile<R, 1, 1>, tile<R, 2, 1>, tile<R, 3, 1>, tile<R, 4, 1>, tile<R, 5, 1>, tile<R, 6, 1>,
#if TORCHWEFT_BYTES == 64
        tile<R, 7, 1>, tile<R, 8, 1>, tile<R, 9, 1>, tile<R, 10, 1>, tile<R, 11, 1>, tile<R, 12, 1>
#endif
    };
    return panels == 1 ? one[rows - 1] : rows == 1 ? tile<R, 1, 4> : tile<R, 2, 2>;
}

// A tile at the edge, or one whose columns are not adjacent, by way of a buffer on the stack. A tile always stores
// whole vectors, so without the buffer it would write beyond the last column.
template <class R>
__attribute__((noinline)) void edge(Tile<R> whole, long rows, long columns, long K, const R *a, long a_row, long a_col,
                                    const R *panels, R *c, long c_row, long c_col, const R *start, long s_row,
                                    long s_col) {
    constexpr long WIDE = 4 * wide<R>();
    R buffer[TALL * WIDE];
    if (start)
        for (long i = 0; i < rows; i++)
            for (long j = 0; j < WIDE; j++) buffer[i * WIDE + j] = j < columns ? start[i * s_row + j * s_col] : 0;
    whole(K, a, a_row, a_col, panels, buffer, WIDE, start ? buffer : 0, WIDE);
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j++) c[i * c_row + j * c_col] = buffer[i * WIDE + j];
}

// C[M x N] = A[M x K] B + start, for the panels from `first` to `last` of B. Tiles get equally many rows: 13 rows are 7
// and 6, because 12 and 1 would leave the second tile slow.
template <class R>
void product(long M, long N, long K, const R *a, long a_row, long a_col, const R *packed, R *c, long c_row, long c_col,
             const R *start, long s_row, long s_col, long first, long last) {
    constexpr long NR = wide<R>();
    const long tiles = (M + TALL - 1) / TALL, most = M == 1 ? 4 : M == 2 ? 2 : 1;
    const bool adjacent = c_col == 1 && (!start || s_col == 1);
    // Panels outside, rows inside: a panel stays in the cache while all rows pass it.
    for (long j = first; j < last;) {
        const long panels = j + most <= last && (j + most) * NR <= N ? most : 1;
        const long columns = (j + panels) * NR <= N ? panels * NR : N - j * NR;
        const R *panel = packed + j * NR * K;
        for (long i = 0, n = 0; n < tiles; n++) {
            const long rows = M / tiles + (n < M % tiles);
            const Tile<R> whole = tile_for<R>(rows, panels);
            const R *from = a + i * a_row, *begin = start ? start + i * s_row + j * NR * s_col : 0;
            R *to = c + i * c_row + j * NR * c_col;
            if (adjacent && columns == panels * NR) whole(K, from, a_row, a_col, panel, to, c_row, begin, s_row);
            else edge<R>(whole, rows, columns, K, from, a_row, a_col, panel, to, c_row, c_col, begin, s_row, s_col);
            i += rows;
        }
        j += panels;
    }
}

// Copy `count` numbers with a stride to adjacent places, and fill up to SIZE with zeros: the padding of panels must be
// finite, because tiles multiply it too.
template <class R, long SIZE> inline void copy_padded(long count, const R *from, long stride, R *to) {
    if (count == SIZE && stride == 1) __builtin_memcpy(to, from, SIZE * sizeof(R));
    else
        for (long n = 0; n < SIZE; n++) to[n] = n < count ? from[n * stride] : 0;
}

// Memory of one thread, which is freed when the thread ends.
struct Scratch {
    void *at = 0;
    size_t size = 0;
    void *at_least(size_t bytes) {
        if (bytes > size) free(at), at = malloc(size = bytes);
        return at;
    }
    ~Scratch() { free(at); }
};
static thread_local Scratch packed_rows;

// Copy `count` numbers, of at most SIZE, from one stride to another.
template <class R, long SIZE> inline void copy_strided(long count, const R *from, long stride, R *to, long to_stride) {
    if (count == SIZE && stride == 1 && to_stride == 1) __builtin_memcpy(to, from, SIZE * sizeof(R));
    else
        for (long n = 0; n < count; n++) to[n * to_stride] = from[n * stride];
}

// As product, but for the rows that are `live`: the others get only the start of their sums. Live rows are packed one
// after the other, so that tiles are full wherever these rows are. By the order of sums above, packing changes no bit.
template <class R>
void some(long M, long N, long K, const R *a, long a_row, long a_col, const R *packed, R *c, long c_row, long c_col,
          const R *start, long s_row, long s_col, long first, long last, const unsigned char *live) {
    constexpr long NR = wide<R>(), MANY = 4 * TALL;
    static const R zeros[NR] = {};
    long count = 0, at[MANY];
    for (long i = 0; i < M; i++) count += live[i];
    // If all rows are live, or memory is short, the plain product is right too: it only does more work.
    R *const rows_a = count < M ? (R *)packed_rows.at_least(MANY * K * sizeof(R)) : 0;
    if (!rows_a) return product<R>(M, N, K, a, a_row, a_col, packed, c, c_row, c_col, start, s_row, s_col, first, last);
    const auto start_of = [&](long i, long j) { return start ? start + i * s_row + j * s_col : zeros; };
    for (long i = 0; i < M;) {
        long n = 0;
        for (; i < M && n < MANY; i++) {
            if (!live[i])
                for (long p = first, j = p * NR; p < last; p++, j += NR)
                    copy_strided<R, NR>(N - j < NR ? N - j : NR, start_of(i, j), start ? s_col : 1,
                                        c + i * c_row + j * c_col, c_col);
            else {
                const R *from = a + i * a_row;
                if (a_col == 1) __builtin_memcpy(rows_a + n * K, from, K * sizeof(R));
                else
                    for (long k = 0; k < K; k++) rows_a[n * K + k] = from[k * a_col];
                at[n++] = i;
            }
        }
        const long tiles = (n + TALL - 1) / TALL;
        for (long p = first, j = p * NR; n && p < last; p++, j += NR) {
            const long columns = N - j < NR ? N - j : NR;
            for (long tile = 0, m = 0; tile < tiles; tile++) {
                const long rows = n / tiles + (tile < n % tiles);
                alignas(64) R buffer[TALL * NR];
                if (start)
                    for (long r = 0; r < rows; r++)
                        copy_strided<R, NR>(columns, start_of(at[m + r], j), s_col, buffer + r * NR, 1);
                tile_for<R>(rows, 1)(K, rows_a + m * K, K, 1, packed + j * K, buffer, NR, start ? buffer : 0, NR);
                for (long r = 0; r < rows; r++)
                    copy_strided<R, NR>(columns, buffer + r * NR, 1, c + at[m + r] * c_row + j * c_col, c_col);
                m += rows;
            }
        }
    }
}

// B[K x N] into panels.
template <class R> void pack(long K, long N, const R *b, long row, long col, R *panels) {
    constexpr long NR = wide<R>();
    for (long j = 0; j < N; j += NR)
        for (long k = 0; k < K; k++)
            copy_padded<R, NR>(N - j < NR ? N - j : NR, b + k * row + j * col, col, panels + j * K + k * NR);
}

// C += A B over a long inner axis: in blocks of it, each packed. `room` holds BLOCK x (N + NR) + BLOCK x TALL numbers
// of this thread. With `live`, only the live places of the inner axis count.
//
// Of every `step_rows` places only the first `used_rows` are read: a batch of fewer rows than the plan has is filled up
// with copies of a row. Skipped places do not move the bounds of the blocks, so the bits are those of a plan for
// exactly these rows. Zeros in their place would move them.
//
// Threads share the rows of C, never the inner axis: the order of each sum does not depend on their number.
template <class R>
void gather(long M, long N, long K, const R *a, long a_row, long a_col, const R *b, long b_row, long b_col, R *c,
            long c_row, long c_col, R *room, long thread, long threads, const unsigned char *live, long step_rows,
            long used_rows) {
    constexpr long NR = wide<R>();
    const long panels = (N + NR - 1) / NR, tiles = (M + TALL - 1) / TALL;
    const long from = tiles * thread / threads, to = tiles * (thread + 1) / threads;
    R *const packed_a = room + BLOCK * panels * NR;
    // A short inner axis, as of a sequence of one step, is not worth packing. The order of each sum is the same.
    if (K / step_rows * used_rows <= SHORT && b_col == 1 && c_col == 1) {
        const long end = to * TALL < M ? to * TALL : M;
        for (long i = from * TALL; i < end; i++)
            for (long k = 0, row = 0; k < K; k++, row = row + 1 < step_rows ? row + 1 : 0) {
                if (row >= used_rows || (live && !live[k])) continue;
                const R factor = a[i * a_row + k * a_col], *const from_b = b + k * b_row;
                R *const sum = c + i * c_row;
                for (long j = 0; j < N; j++) sum[j] += factor * from_b[j];
            }
        return;
    }
    for (long k = 0, row = 0; k < K && from < to;) {
        long inner = 0, at[BLOCK];
        for (; k < K && inner < BLOCK; k++, row = row + 1 < step_rows ? row + 1 : 0)
            if (row < used_rows && (!live || live[k])) at[inner++] = k;
        for (long j = 0; j < N; j += NR)
            for (long q = 0; q < inner; q++)
                copy_padded<R, NR>(N - j < NR ? N - j : NR, b + at[q] * b_row + j * b_col, b_col,
                                   room + j * inner + q * NR);
        for (long n = from; n < to && inner; n++) {
            const long i = n * TALL, rows = M - i < TALL ? M - i : TALL;
            const R *const begin = a + i * a_row;
            for (long q = 0; q < inner; q++)
                copy_padded<R, TALL>(rows, begin + at[q] * a_col, a_row, packed_a + q * TALL);
            R *const sum = c + i * c_row;
            product<R>(rows, N, inner, packed_a, 1, TALL, room, sum, c_row, c_col, sum, c_row, c_col, 0, panels);
        }
    }
}

// c[j] += the sum of a[i][j] over the M rows, for the columns of this thread, a few vectors of columns at a time. Of
// every `step_rows` rows only the first `used_rows` are read, see gather. Blocks bound the rounding error as they do
// there.
template <class R>
void columns(long M, long N, const R *a, long a_row, R *c, long thread, long threads, long step_rows, long used_rows) {
    typedef typename Vector<R>::type V;
    constexpr long W = lanes<R>(), MANY = 8;
    const long end = N * (thread + 1) / threads;
    for (long m = 0, row = 0; m < M;) {
        const R *block[BLOCK];
        long rows = 0;
        for (; m < M && rows < BLOCK; m++, row = row + 1 < step_rows ? row + 1 : 0)
            if (row < used_rows) block[rows++] = a + m * a_row;
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

// All threads wait for each other. `gate` is {arrived, round}, zero at first.
//
// The last thread resets `arrived` before it releases the next round: a fast thread can arrive at the next meeting
// while slow ones still leave this one, and must find the count at zero. The release of the round publishes all memory
// that the threads wrote before. A thread that waits long yields, because the others can need its core.
extern "C" void torchweft_meet(int *gate, long threads) {
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

// The kernels, in the order of `Kernels` in loops.h. A table instead of exported names: templates have none in C, and a
// wrapper for each of them would repeat all parameters.
extern "C" void *const *torchweft_kernels() {
    static void *const table[] = {(void *)pack<float>,    (void *)pack<double>,    (void *)product<float>,
                                  (void *)product<double>, (void *)some<float>,    (void *)some<double>,
                                  (void *)gather<float>,  (void *)gather<double>,  (void *)columns<float>,
                                  (void *)columns<double>, (void *)torchweft_meet};
    return table;
}

// Run the body once on each thread of torch's own OpenMP. Its idle threads spin, so other threads next to them would
// compete for the cores. Without OpenMP, the caller's thread runs the body alone.
typedef void (*Body)(long thread, long threads, long steps, void **values, int *gate);
typedef void (*Parallel)(void (*member)(void *), void *call, unsigned threads, unsigned flags);
struct Call { Body body; long steps; void **values; int gate[2]; };
static struct { Parallel parallel; int (*thread)(), (*threads)(); } openmp;

extern "C" void torchweft_bind_openmp(void **functions) {
    openmp = {(Parallel)functions[0], (int (*)())functions[1], (int (*)())functions[2]};
}

// OpenMP can start fewer threads than requested, so the body gets the number of those that run.
static void member(void *data) {
    Call *call = (Call *)data;
    call->body(openmp.thread(), openmp.threads(), call->steps, call->values, call->gate);
}

extern "C" void torchweft_run(Body body, long threads, long steps, void **values) {
    Call call{body, steps, values, {0, 0}};
    if (threads <= 1 || !openmp.parallel) body(0, 1, steps, values, call.gate);
    else openmp.parallel(member, &call, (unsigned)threads, 0);
}
