/*
 * One function per legal combination of kinds, so that each is compiled with its kinds known; and tables that find it.
 * Included by kernel_body.h. Each list names the combinations for one function; `fn`, a macro, is applied to each:
 *
 *   SUMS       x, residual, round_sum: rounding changes no bit where the residual is float or absent
 *   SCALES     h, norm, weight, bias, out: the second pass reads h as float or as an operand of out's kind
 *   SCALES_OF_ANY  the same, where norm is ANY and the weight, which may have an offset; or the weight and the bias are rows
 *              of float, for each head or for all
 *   AFFINE_AS_IS   the same, where h, the weight, the bias and out are of one kind
 *   ADDS       x, residual: the sum alone
 *   ONE_KIND   bias, kind, residual, norm: x, residual, h and out are of one kind, and the weight is float
 *
 * With FEW_KINDS, SCALES_OF_ANY serves SCALES and AFFINE_AS_IS too, and sums are of float alone.
 *
 * `bias` is its kind, NONE where the row is not affine. BF16P takes part in combinations of its own alone (see kinds.h). With
 * ROW_BY_ROW, tables of ONE_KIND are empty.
 */
#define SUMS_OF(fn, x)                                                 \
    fn(x, NONE, UNROUNDED) fn(x, F32, UNROUNDED) fn(x, F16, UNROUNDED) \
    fn(x, F16, ROUNDED) fn(x, BF16, UNROUNDED) fn(x, BF16, ROUNDED)
#define SCALES_OF(fn, kind, weight)                                                         \
    fn(F32, NONE, weight, NONE, kind) fn(kind, NONE, weight, NONE, kind)                     \
    fn(F32, kind, weight, NONE, kind) fn(kind, kind, weight, NONE, kind)
#define WITH_OFFSET_OF(fn, kind) fn(kind, NONE, WITH_OFFSET, NONE, kind) fn(kind, kind, WITH_OFFSET, NONE, kind)
#define SCALES_OF_ANY_OF(fn, weight, bias)                                                                         \
    fn(F32, ANY, weight, bias, F32) fn(F32, ANY, weight, bias, F16) fn(F16, ANY, weight, bias, F16)                 \
    fn(F32, ANY, weight, bias, BF16) fn(BF16, ANY, weight, bias, BF16) SCALES_OF_ANY_BY_PARITY(fn, weight, bias)
#define AFFINE_AS_IS_OF(fn, kind) fn(kind, NONE, kind, kind, kind) fn(kind, kind, kind, kind, kind)
#define ADDS_OF(fn, x) fn(x, F32) fn(x, F16) fn(x, BF16)
#define ONE_KIND_OF(fn, bias, kind) \
    fn(bias, kind, NONE, NONE) fn(bias, kind, NONE, kind) fn(bias, kind, kind, NONE) fn(bias, kind, kind, kind)

#if defined(BF16_BY_PARITY)
#define SUMS_BY_PARITY(fn) fn(BF16P, NONE, UNROUNDED) fn(BF16P, BF16P, UNROUNDED) fn(BF16P, BF16P, ROUNDED)
#define SCALES_OF_ANY_BY_PARITY(fn, weight, bias) fn(F32, ANY, weight, bias, BF16P) fn(BF16P, ANY, weight, bias, BF16P)
#define SCALES_IN_ORDER(fn) SCALES_OF(fn, BF16P, F32)
#else
#define SCALES_IN_ORDER(fn)
#define SUMS_BY_PARITY(fn)
#define SCALES_OF_ANY_BY_PARITY(fn, weight, bias)
#endif

#if !defined(REST)
#define SUMS(fn) SUMS_OF(fn, F32) SUMS_OF(fn, F16) SUMS_OF(fn, BF16) SUMS_BY_PARITY(fn)
#define SCALES(fn)                                                                                            \
    fn(F32, NONE, F32, NONE, F32) SCALES_OF(fn, F16, F16) SCALES_OF(fn, ALL_BF16, ALL_BF16)                   \
    SCALES_OF(fn, F16, F32) SCALES_OF(fn, BF16, F32) SCALES_IN_ORDER(fn)                                      \
    fn(F32, NONE, WITH_OFFSET, NONE, F32) WITH_OFFSET_OF(fn, F16) WITH_OFFSET_OF(fn, ALL_BF16)                \
    fn(F32, NONE, NONE, NONE, F32) fn(F16, NONE, NONE, NONE, F16) fn(ALL_BF16, NONE, NONE, NONE, ALL_BF16)
#define SCALES_OF_ANY(fn) SCALES_OF_ANY_OF(fn, ANY, NONE) SCALES_OF_ANY_OF(fn, F32, F32)
#define AFFINE_AS_IS(fn) AFFINE_AS_IS_OF(fn, F16) AFFINE_AS_IS_OF(fn, ALL_BF16)
#if FEW_KINDS
#undef SUMS
#undef SCALES
#undef AFFINE_AS_IS
#define SUMS(fn) fn(F32, NONE, UNROUNDED) fn(F32, F32, UNROUNDED)
#define SCALES(fn)
#define AFFINE_AS_IS(fn)
#endif
#define ADDS(fn) ADDS_OF(fn, F32) ADDS_OF(fn, F16) ADDS_OF(fn, BF16)
#if ROW_BY_ROW
#define ONE_KIND(fn, bias)
#else
#define ONE_KIND(fn, bias)                             \
    fn(bias, F32, NONE, NONE) fn(bias, F32, F32, NONE) \
    ONE_KIND_OF(fn, bias, F16) ONE_KIND_OF(fn, bias, ALL_BF16)
#endif
#else
#if ADDS_F16
#define IF_ADDS_F16(...) __VA_ARGS__
#else
#define IF_ADDS_F16(...)
#endif
#define SUMS(fn) IF_ADDS_F16(fn(F16, F16, ROUNDED)) SUMS_BY_PARITY(fn)
#define SCALES(fn) SCALES_OF(fn, BF16P, BF16P) SCALES_IN_ORDER(fn) WITH_OFFSET_OF(fn, BF16P) fn(BF16P, NONE, NONE, NONE, BF16P)
#define SCALES_OF_ANY(fn) SCALES_OF_ANY_BY_PARITY(fn, ANY, NONE)
#define AFFINE_AS_IS(fn)
#define ONE_KIND(fn, bias) IF_ADDS_F16(fn(bias, F16, F16, NONE) fn(bias, F16, F16, F16)) ONE_KIND_OF(fn, bias, BF16P)
#endif
#if AFFINE
#define SHORTS(fn) ONE_KIND(fn, NONE) ONE_KIND(fn, F32)
#else
#define SHORTS(fn) ONE_KIND(fn, NONE)
#endif
#if OVERLAPS_AS_IS
#define OVERLAPS(fn) SHORTS(fn) ONE_KIND_OF(fn, BF16P, BF16P)
#else
#define OVERLAPS(fn) SHORTS(fn)
#endif

#if FN_FAMILY & FN_NORMS
#define SUM(x, residual, round_sum)                                                                         \
    static void sum_##x##_##residual##_##round_sum(const struct fn_forward_job *job, struct batch *batch) { \
        sum_rows(x, residual, round_sum, job, batch);                                                       \
    }
#define SUM_ENTRY(x, residual, round_sum) [x][residual][round_sum] = sum_##x##_##residual##_##round_sum,
SUMS(SUM)
static sum_fn *const sums[KINDS][KINDS][2] = {SUMS(SUM_ENTRY)};

#define SCALE(h, norm, weight, bias, out)                                                       \
    static void scale_##h##_##norm##_##weight##_##bias##_##out(const struct fn_forward_job *job, \
                                                               const struct batch *batch) {      \
        scale_rows(h, norm, weight, bias, out, job, batch);                                      \
    }
#define SCALE_ENTRY(h, norm, weight, bias, out) \
    .of[norm][weight][out][h == out] = scale_##h##_##norm##_##weight##_##bias##_##out,
#define ANY_ENTRY(h, norm, weight, bias, out) \
    .of_any[bias != NONE][out][h == out] = scale_##h##_##norm##_##weight##_##bias##_##out,
#define AS_IS_ENTRY(h, norm, weight, bias, out) .affine_as_is[norm][out] = scale_##h##_##norm##_##weight##_##bias##_##out,
SCALES(SCALE) SCALES_OF_ANY(SCALE) AFFINE_AS_IS(SCALE)
struct second_passes {
    scale_fn *of[KINDS][WEIGHTS][KINDS][2], *of_any[2][KINDS][2], *affine_as_is[KINDS][KINDS];
};
extern const struct second_passes FN_OF(second_passes);
const struct second_passes FN_OF(second_passes) = {SCALES(SCALE_ENTRY) SCALES_OF_ANY(ANY_ENTRY) AFFINE_AS_IS(AS_IS_ENTRY)};
#if defined(REST)
extern const struct second_passes FN_JOIN(fn_second_passes, REST);
#define second_passes_to(out) ((out) == BF16P ? &FN_OF(second_passes) : &FN_JOIN(fn_second_passes, REST))
#else
#define second_passes_to(out) (&FN_OF(second_passes))

typedef void add_fn(const struct fn_forward_job *, int64_t, int64_t);
#define ADD(x, residual)                                                                             \
    static void add_##x##_##residual(const struct fn_forward_job *job, int64_t begin, int64_t end) { \
        add_rows(x, residual, job, begin, end);                                                      \
    }
#define ADD_ENTRY(x, residual) [x][residual] = add_##x##_##residual,
ADDS(ADD)
static add_fn *const adds[KINDS][KINDS] = {[NONE] = {NULL}, ADDS(ADD_ENTRY)};
#endif
#endif

typedef void overlap_fn(const struct fn_forward_job *, int64_t, int64_t, struct scale *, char *, const struct affine *);
typedef void short_fn(const struct fn_forward_job *, int64_t, int64_t, const void *, const struct affine *);
extern overlap_fn *const FN_OF(overlaps)[KINDS][2][2][KINDS];
extern short_fn *const FN_OF(shorts)[KINDS][2][2][2];

#if FN_FAMILY & FN_ROWS_OF_ONE_KIND
#define OVERLAP(bias, kind, residual, norm)                                                                         \
    static void overlap_##bias##_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin,      \
                                                                int64_t end, struct scale *previous, char *scratch, \
                                                                const struct affine *a) {                           \
        overlap_rows(kind, residual, norm, bias, job, begin, end, previous, scratch, a);                            \
    }
#define OVERLAP_ENTRY(bias, kind, residual, norm) \
    [kind][residual != NONE][norm != NONE][bias] = overlap_##bias##_##kind##_##residual##_##norm,
OVERLAPS(OVERLAP)
overlap_fn *const FN_OF(overlaps)[KINDS][2][2][KINDS] = {[NONE] = {{{NULL}}}, OVERLAPS(OVERLAP_ENTRY)};

/* The most frequent lengths of heads are known to the compiler; with a residual they gain 2 %, with a bias 6, in as much code again. */
#define SHORT_OF(length, bias, kind, residual, norm) short_rows(kind, residual, norm, bias, length, job, begin, end, weight, a)
#define SHORT(bias, kind, residual, norm)                                                                                 \
    static void short_##bias##_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin, int64_t end, \
                                                              const void *weight, const struct affine *a) {               \
        const int64_t known = residual == NONE && bias == NONE ? job->hidden : 0;                                         \
        if (known == 64) SHORT_OF(64, bias, kind, residual, norm);                                                        \
        else if (known == 128) SHORT_OF(128, bias, kind, residual, norm);                                                 \
        else if (known == 256) SHORT_OF(256, bias, kind, residual, norm);                                                 \
        else SHORT_OF(job->hidden, bias, kind, residual, norm);                                                           \
    }
#define SHORT_ENTRY(bias, kind, residual, norm) \
    [kind][residual != NONE][norm != NONE][bias != NONE] = short_##bias##_##kind##_##residual##_##norm,
SHORTS(SHORT)
short_fn *const FN_OF(shorts)[KINDS][2][2][2] = {[NONE] = {{{NULL}}}, SHORTS(SHORT_ENTRY)};
#endif
