// Functions for the generated loops. Those of one number have no branch, so that a compiler can vectorize them: the C
// library's exp and tanh would be called number by number. Polynomials and the reduction of the argument are those of
// the Cephes library (S. L. Moshier, 1989). NaN propagates.
//
// Nothing here may be reordered: compile without -ffast-math and with -ffp-contract=off. This text is compiled again
// with every cell. It includes no headers, because reading these would take longer than compiling all of it.

#define F static inline __attribute__((always_inline))
#define METHOD inline __attribute__((always_inline))
#define NAN __builtin_nan("")
#define INFINITY __builtin_inf()
#define memcpy __builtin_memcpy
#define memset __builtin_memset

typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef uint8_t boolean;  // 0 or 1

// Numbers of 16 bits: converted to float when they are read, and rounded to the nearest, ties to even, when written.
// The bits are those of PyTorch's conversions. Native types are not used, because many compilers lack them.
F uint32_t w_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
F float w_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
struct w_bfloat16 {
    uint16_t bits;
    w_bfloat16() = default;
    METHOD w_bfloat16(float x) {
        const uint32_t b = w_bits(x);
        // Half a unit minus one, plus the last bit that stays, carries into that bit exactly if x must be rounded up.
        bits = x != x ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16;
    }
    METHOD operator float() const { return w_float((uint32_t)bits << 16); }
    METHOD w_bfloat16 &operator+=(float x) { return *this = w_bfloat16((float)*this + x); }
};
// By additions of numbers so large that the hardware rounds at the last bit that stays, as in Maratyszcza's FP16
// library. Subnormal numbers need no case of their own that way.
struct w_float16 {
    uint16_t bits;
    w_float16() = default;
    METHOD w_float16(float x) {
        const uint32_t b = w_bits(x), sign = b & 0x80000000u;
        const float y = __builtin_fabsf(x) * 0x1p+112f * 0x1p-110f;
        uint32_t bias = (b << 1) & 0xff000000u;
        bias = bias < 0x71000000u ? 0x71000000u : bias;
        const uint32_t c = w_bits(w_float((bias >> 1) + 0x07800000u) + y);
        bits = sign >> 16 | ((b << 1) > 0xff000000u ? 0x7e00 : (c >> 13 & 0x7c00) + (c & 0x0fff));
    }
    METHOD operator float() const {
        const uint32_t w = (uint32_t)bits << 16, two = w + w;
        const float normal = w_float((two >> 4) + 0x70000000u) * 0x1p-112f;
        const float small = w_float(two >> 17 | 0x3f000000u) - 0.5f;
        return w_float((w & 0x80000000u) | w_bits(two < 0x08000000u ? small : normal));
    }
    METHOD w_float16 &operator+=(float x) { return *this = w_float16((float)*this + x); }
};

F float w_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
F double w_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
F float w_abs(float x) { return __builtin_fabsf(x); }
F double w_abs(double x) { return __builtin_fabs(x); }
F float w_sqrt(float x) { return __builtin_sqrtf(x); }
F double w_sqrt(double x) { return __builtin_sqrt(x); }
template <class I> F I w_abs(I x) { return x < 0 ? -x : x; }
template <class R> F R w_sign(R x) { return x > 0 ? R(1) : x < 0 ? R(-1) : R(0); }
// If a is NaN, `a != a` selects it. If b is NaN, `a > b` is false and b is selected. So NaN propagates, as in PyTorch.
template <class R> F R w_max(R a, R b) { return a > b || a != a ? a : b; }
template <class R> F R w_min(R a, R b) { return a < b || a != a ? a : b; }

// 2^n by its bit pattern; n must be an exponent of a normal number.
F float w_power_of_two(int32_t n) {
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
F double w_power_of_two(int64_t n) {
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

// e^x = 2^n e^r with |r| <= ln(2) / 2. ln(2) is subtracted in two parts: the first one has few bits, so that its
// product with n is exact, and r keeps all its bits. 2^n is two factors of 2^(n/2), because 2^n itself can be out of
// range where the result is not, and subnormal results would become zero. Comparisons clamp x, and let NaN pass.
F float w_exp(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    float c = x > 89.0f ? 89.0f : x;
    c = c < -104.0f ? -104.0f : c;
    const float z = w_fma(c, 1.44269504088896341f, magic), n = z - magic;
    float r = w_fma(n, -0.693359375f, c);
    r = w_fma(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = w_fma(p, r, 1.3981999507e-3f);
    p = w_fma(p, r, 8.3334519073e-3f);
    p = w_fma(p, r, 4.1665795894e-2f);
    p = w_fma(p, r, 1.6666665459e-1f);
    p = w_fma(p, r, 5.0000001201e-1f);
    p = w_fma(p, r * r, r) + 1.0f;
    int32_t bits;
    memcpy(&bits, &z, 4);
    const int32_t whole = bits - 0x4b400000, half = whole >> 1;
    return p * w_power_of_two(half) * w_power_of_two(whole - half);
}
F double w_exp(double x) {
    const double magic = 6755399441055744.0;
    double c = x > 710.0 ? 710.0 : x;
    c = c < -746.0 ? -746.0 : c;
    const double z = w_fma(c, 1.4426950408889634073599, magic), n = z - magic;
    double r = w_fma(n, -6.93145751953125e-1, c);
    r = w_fma(n, -1.42860682030941723212e-6, r);
    const double s = r * r;
    double p = 1.26177193074810590878e-4;
    p = w_fma(p, s, 3.02994407707441961300e-2);
    p = w_fma(p, s, 9.99999999999999999910e-1) * r;
    double q = 3.00198505138664455042e-6;
    q = w_fma(q, s, 2.52448340349684104192e-3);
    q = w_fma(q, s, 2.27265548208155028766e-1);
    q = w_fma(q, s, 2.00000000000000000005e0);
    const double e = 1.0 + 2.0 * (p / (q - p));
    int64_t bits;
    memcpy(&bits, &z, 8);
    const int64_t whole = bits - 0x4338000000000000ll, half = whole >> 1;
    return e * w_power_of_two(half) * w_power_of_two(whole - half);
}
template <class R> F R w_sigmoid(R x) { return 1 / (1 + w_exp(-x)); }

// Near zero, 1 - 2 / (e^2x + 1) would cancel, so a polynomial takes its place. Both are computed: a branch would keep
// the compiler from vectorizing. The sign is copied, which also preserves -0.
F float w_tanh(float x) {
    const float a = w_abs(x), s = x * x;
    float p = -5.70498872745e-3f;
    p = w_fma(p, s, 2.06390887954e-2f);
    p = w_fma(p, s, -5.37397155531e-2f);
    p = w_fma(p, s, 1.33314422036e-1f);
    p = w_fma(p, s, -3.33332819422e-1f);
    const float small = w_fma(p * s, x, x), large = 1.0f - 2.0f / (w_exp(a + a) + 1.0f);
    return __builtin_copysignf(a < 0.625f ? small : large, x);
}
F double w_tanh(double x) {
    const double a = w_abs(x), s = x * x;
    double p = -9.64399179425052238628e-1;
    p = w_fma(p, s, -9.92877231001918586564e1);
    p = w_fma(p, s, -1.61468768441708447952e3);
    double q = s + 1.12811678491632931402e2;
    q = w_fma(q, s, 2.23548839060100448583e3);
    q = w_fma(q, s, 4.84406305325125486048e3);
    const double small = w_fma(s * (p / q), x, x), large = 1.0 - 2.0 / (w_exp(a + a) + 1.0);
    return __builtin_copysign(a < 0.625 ? small : large, x);
}

// The functions below are the C library's: precise, but one number at a time.
#define LIBRARY(name, function)                                                                                        \
    F float w_##name(float x) { return __builtin_##function##f(x); }                                                   \
    F double w_##name(double x) { return __builtin_##function(x); }
#define LIBRARY2(name, function)                                                                                       \
    F float w_##name(float x, float y) { return __builtin_##function##f(x, y); }                                       \
    F double w_##name(double x, double y) { return __builtin_##function(x, y); }
LIBRARY(exp2, exp2) LIBRARY(expm1, expm1) LIBRARY(log, log) LIBRARY(log2, log2) LIBRARY(log10, log10)
LIBRARY(log1p, log1p) LIBRARY(sin, sin) LIBRARY(cos, cos) LIBRARY(tan, tan) LIBRARY(asin, asin) LIBRARY(acos, acos)
LIBRARY(atan, atan) LIBRARY(sinh, sinh) LIBRARY(cosh, cosh) LIBRARY(erf, erf) LIBRARY(erfc, erfc)
LIBRARY(floor, floor) LIBRARY(ceil, ceil) LIBRARY(trunc, trunc) LIBRARY(round, rint) LIBRARY2(atan2, atan2)
LIBRARY2(pow, pow) LIBRARY2(fmod, fmod)
// The remainder with the sign of b, as in Python. w_fmod has the sign of a.
template <class R> F R w_remainder(R a, R b) {
    const R rest = w_fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// Sums of adjacent numbers, in a vector of LANES partial sums that is folded in halves. The order is spelled out rather
// than left to the compiler: a value that is computed again, in another loop, must have the same bits. For that reason
// the vectors have 64 bytes on every machine, wherever the compiler splits them.
template <class R> struct Lanes;
template <> struct Lanes<float> { typedef float type __attribute__((vector_size(64), aligned(4), may_alias)); };
template <> struct Lanes<double> { typedef double type __attribute__((vector_size(64), aligned(8), may_alias)); };
template <class R> F R w_fold(typename Lanes<R>::type lanes) {
    R sums[64 / sizeof(R)];
    memcpy(sums, &lanes, sizeof sums);
    for (long half = 32 / sizeof(R); half; half /= 2)
        for (long l = 0; l < half; l++) sums[l] += sums[l + half];
    return sums[0];
}
template <class R> F R w_sum(long n, const R *x) {
    typedef typename Lanes<R>::type V;
    const long LANES = 64 / sizeof(R);
    R sum = 0;
    long i = 0;
    if (n >= LANES) {
        V lanes = *(const V *)x;
        for (i = LANES; i + LANES <= n; i += LANES) lanes += *(const V *)(x + i);
        sum = w_fold<R>(lanes);
    }
    for (; i < n; i++) sum += x[i];
    return sum;
}
template <class R> F R w_dot(long n, const R *x, const R *y) {
    typedef typename Lanes<R>::type V;
    const long LANES = 64 / sizeof(R);
    R sum = 0;
    long i = 0;
    if (n >= LANES) {
        V lanes = *(const V *)x * *(const V *)y;
        for (i = LANES; i + LANES <= n; i += LANES) lanes += *(const V *)(x + i) * *(const V *)(y + i);
        sum = w_fold<R>(lanes);
    }
    for (; i < n; i++) sum += x[i] * y[i];
    return sum;
}

// C = start + A B of two matrices that both change from step to step, as in attention. All callers share one copy of
// the code (noinline, noclone): specialized copies, for a known size, could order the sums in another way. The three
// cases depend only on strides, which are the same wherever a value is computed.
template <class R>
static __attribute__((noinline, noclone)) void w_small(long M, long N, long K, const R *a, long a_row, long a_col,
                                                       const R *b, long b_row, long b_col, R *c, long c_row, long c_col,
                                                       const R *start, long s_row, long s_col) {
    for (long i = 0; i < M; i++)
        for (long j = 0; j < N; j++) c[i * c_row + j * c_col] = start ? start[i * s_row + j * s_col] : 0;
    if (b_col == 1 && c_col == 1) {  // add rows of B to a row of C
        for (long i = 0; i < M; i++)
            for (long k = 0; k < K; k++) {
                const R value = a[i * a_row + k * a_col], *from = b + k * b_row;
                R *to = c + i * c_row;
#pragma GCC ivdep
                for (long j = 0; j < N; j++) to[j] += value * from[j];
            }
    } else if (a_col == 1 && b_row == 1) {  // dot products of rows of A and columns of B, both without gaps
        for (long i = 0; i < M; i++)
            for (long j = 0; j < N; j++) c[i * c_row + j * c_col] += w_dot(K, a + i * a_row, b + j * b_col);
    } else {
        for (long i = 0; i < M; i++)
            for (long j = 0; j < N; j++) {
                R sum = c[i * c_row + j * c_col];
                for (long k = 0; k < K; k++) sum += a[i * a_row + k * a_col] * b[k * b_row + j * b_col];
                c[i * c_row + j * c_col] = sum;
            }
    }
}

// The kernels of kernels.cpp, under one name for both types of number. They are compiled once, with other flags, in a
// library of their own. `torchweft_bind` receives their addresses.
#define PACK(R) (long K, long N, const R *b, long row, long col, R *to)
#define PRODUCT(R)                                                                                                     \
    (long M, long N, long K, const R *a, long a_row, long a_col, const R *b, R *c, long c_row, long c_col, const R *s, \
     long s_row, long s_col, long first, long last)
#define GATHER(R)                                                                                                      \
    (long M, long N, long K, const R *a, long a_row, long a_col, const R *b, long b_row, long b_col, R *c, long c_row, \
     long c_col, R *room, long thread, long threads, const boolean *live, long step_rows, long used_rows)
#define SOME(R)                                                                                                        \
    (long M, long N, long K, const R *a, long a_row, long a_col, const R *b, R *c, long c_row, long c_col, const R *s, \
     long s_row, long s_col, long first, long last, const boolean *live)
#define COLUMNS(R)                                                                                                     \
    (long M, long N, const R *a, long a_row, R *c, long thread, long threads, long step_rows, long used_rows)

struct Kernels {  // in the order of `torchweft_kernels` in kernels.cpp
    void(*pack_f) PACK(float);
    void(*pack_d) PACK(double);
    void(*product_f) PRODUCT(float);
    void(*product_d) PRODUCT(double);
    void(*some_f) SOME(float);
    void(*some_d) SOME(double);
    void(*gather_f) GATHER(float);
    void(*gather_d) GATHER(double);
    void(*columns_f) COLUMNS(float);
    void(*columns_d) COLUMNS(double);
    void (*meet)(int *gate, long threads);
};
static Kernels kernels;
extern "C" void torchweft_bind(const Kernels *table) { kernels = *table; }

#define EITHER(name, ARGUMENTS, ...)                                                                                   \
    F void w_##name ARGUMENTS(float) { kernels.name##_f(__VA_ARGS__); }                                                \
    F void w_##name ARGUMENTS(double) { kernels.name##_d(__VA_ARGS__); }
EITHER(pack, PACK, K, N, b, row, col, to)
EITHER(product, PRODUCT, M, N, K, a, a_row, a_col, b, c, c_row, c_col, s, s_row, s_col, first, last)
EITHER(some, SOME, M, N, K, a, a_row, a_col, b, c, c_row, c_col, s, s_row, s_col, first, last, live)
EITHER(gather, GATHER, M, N, K, a, a_row, a_col, b, b_row, b_col, c, c_row, c_col, room, thread, threads, live,
       step_rows, used_rows)
EITHER(columns, COLUMNS, M, N, a, a_row, c, thread, threads, step_rows, used_rows)

F char *w_align(char *at) { return (char *)(((uintptr_t)at + 63) & ~(uintptr_t)63); }
