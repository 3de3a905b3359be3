/*
 * One function per legal combination of kinds, so that each is compiled with its kinds known; and tables that find it.
 * Included by forward_body.h. Each list names the combinations for one function; `fn`, a macro, is applied to each:
 *
 *   SUMS       x, residual, round_sum: rounding changes no bit where the residual is float or absent
 *   SCALES     h, norm, weight, offset, bias, out: the second pass reads h as float or as an operand of out's kind
 *   AFFINE_SCALES  the same, where the weight and the bias are rows of float, for each head or for all
 *   AFFINE_AS_IS   the same, where h, the weight, the bias and out are of one kind
 *   ADDS       x, residual: the sum alone
 *   ONE_KIND   bias, kind, residual, norm: x, residual, h and out are of one kind, and the weight is float
 *   ONE_KIND_AS_IS  the same, where the weight and a bias are of the same kind too
 *
 * `bias` is its kind, NONE where the row is not affine. BF16P takes part in combinations of its own alone (see kinds.h). With
 * ROW_BY_ROW, tables of ONE_KIND are empty.
 */
#define SUMS_OF(fn, x)                                                 \
    fn(x, NONE, UNROUNDED) fn(x, F32, UNROUNDED) fn(x, F16, UNROUNDED) \
    fn(x, F16, ROUNDED) fn(x, BF16, UNROUNDED) fn(x, BF16, ROUNDED)
#define SCALES_OF_KINDS(fn, norm, weight, offset, bias)                                \
    fn(F32, norm, weight, offset, bias, F32) fn(F32, norm, weight, offset, bias, F16)  \
    fn(F32, norm, weight, offset, bias, BF16) fn(F16, norm, weight, offset, bias, F16) \
    fn(BF16, norm, weight, offset, bias, BF16)
#define SCALES_OF(fn, norm)                                                                      \
    SCALES_OF_KINDS(fn, norm, NONE, NO_OFFSET, NONE)                                             \
    SCALES_OF_KINDS(fn, norm, F32, NO_OFFSET, NONE) SCALES_OF_KINDS(fn, norm, F32, OFFSET, NONE) \
    SCALES_OF_KINDS(fn, norm, F16, NO_OFFSET, NONE) SCALES_OF_KINDS(fn, norm, F16, OFFSET, NONE) \
    SCALES_OF_KINDS(fn, norm, BF16, NO_OFFSET, NONE) SCALES_OF_KINDS(fn, norm, BF16, OFFSET, NONE)
#define AFFINE_SCALES_OF(fn, norm) SCALES_OF_KINDS(fn, norm, F32, NO_OFFSET, F32)
#define AFFINE_AS_IS_OF(fn, kind) \
    fn(kind, NONE, kind, NO_OFFSET, kind, kind) fn(kind, kind, kind, NO_OFFSET, kind, kind)
#define ADDS_OF(fn, x) fn(x, F32) fn(x, F16) fn(x, BF16)
#define ONE_KIND_OF(fn, bias, kind) \
    fn(bias, kind, NONE, NONE) fn(bias, kind, NONE, kind) fn(bias, kind, kind, NONE) fn(bias, kind, kind, kind)

#if defined(BF16_BY_PARITY)
#define SUMS_BY_PARITY(fn) fn(BF16P, NONE, UNROUNDED) fn(BF16P, BF16P, UNROUNDED) fn(BF16P, BF16P, ROUNDED)
#define SCALES_BY_PARITY_OF(fn, weight, offset, bias)                                       \
    fn(F32, NONE, weight, offset, bias, BF16P) fn(BF16P, NONE, weight, offset, bias, BF16P) \
    fn(F32, BF16P, weight, offset, bias, BF16P) fn(BF16P, BF16P, weight, offset, bias, BF16P)
#define SCALES_BY_PARITY(fn)                       \
    SCALES_BY_PARITY_OF(fn, NONE, NO_OFFSET, NONE) \
    SCALES_BY_PARITY_OF(fn, BF16P, NO_OFFSET, NONE) SCALES_BY_PARITY_OF(fn, BF16P, OFFSET, NONE)
#define AFFINE_BY_PARITY(fn) SCALES_BY_PARITY_OF(fn, F32, NO_OFFSET, F32)
#define ONE_KIND_AS_IS(fn) ONE_KIND_OF(fn, BF16P, BF16P)
#else
#define SUMS_BY_PARITY(fn)
#define SCALES_BY_PARITY(fn)
#define AFFINE_BY_PARITY(fn)
#define ONE_KIND_AS_IS(fn)
#endif

#define SUMS(fn) SUMS_OF(fn, F32) SUMS_OF(fn, F16) SUMS_OF(fn, BF16) SUMS_BY_PARITY(fn)
#define SCALES(fn) SCALES_OF(fn, NONE) SCALES_OF(fn, F16) SCALES_OF(fn, BF16) SCALES_BY_PARITY(fn)
#define AFFINE_SCALES(fn) \
    AFFINE_SCALES_OF(fn, NONE) AFFINE_SCALES_OF(fn, F16) AFFINE_SCALES_OF(fn, BF16) AFFINE_BY_PARITY(fn)
#define AFFINE_AS_IS(fn) AFFINE_AS_IS_OF(fn, F16) AFFINE_AS_IS_OF(fn, ALL_BF16)
#define ADDS(fn) ADDS_OF(fn, F32) ADDS_OF(fn, F16) ADDS_OF(fn, BF16)
#if ROW_BY_ROW
#define ONE_KIND(fn, bias)
#else
#define ONE_KIND(fn, bias)                             \
    fn(bias, F32, NONE, NONE) fn(bias, F32, F32, NONE) \
    ONE_KIND_OF(fn, bias, F16) ONE_KIND_OF(fn, bias, ALL_BF16)
#endif
#define SHORTS(fn) ONE_KIND(fn, NONE) ONE_KIND(fn, F32)
#define OVERLAPS(fn) ONE_KIND(fn, NONE) ONE_KIND(fn, F32) ONE_KIND_AS_IS(fn)

typedef void sum_fn(const struct fn_forward_job *, struct batch *);
#define SUM(x, residual, round_sum)                                                                         \
    static void sum_##x##_##residual##_##round_sum(const struct fn_forward_job *job, struct batch *batch) { \
        sum_rows(x, residual, round_sum, job, batch);                                                       \
    }
#define SUM_ENTRY(x, residual, round_sum) [x][residual][round_sum] = sum_##x##_##residual##_##round_sum,
SUMS(SUM)
static sum_fn *const sums[KINDS][KINDS][2] = {SUMS(SUM_ENTRY)};

typedef void scale_fn(const struct fn_forward_job *, const struct batch *);
#define SCALE(h, norm, weight, offset, bias, out)                                                           \
    static void scale_##h##_##norm##_##weight##_##offset##_##bias##_##out(const struct fn_forward_job *job, \
                                                                            const struct batch *batch) {    \
        scale_rows(h, norm, weight, offset, bias, out, job, batch);                                         \
    }
#define SCALE_ENTRY(h, norm, weight, offset, bias, out) \
    [norm][weight][offset][out][h == out] = scale_##h##_##norm##_##weight##_##offset##_##bias##_##out,
#define AFFINE_SCALE_ENTRY(h, norm, weight, offset, bias, out) \
    [norm][out][h == out] = scale_##h##_##norm##_##weight##_##offset##_##bias##_##out,
#define AS_IS_ENTRY(h, norm, weight, offset, bias, out) \
    [norm][out] = scale_##h##_##norm##_##weight##_##offset##_##bias##_##out,
SCALES(SCALE) AFFINE_SCALES(SCALE) AFFINE_AS_IS(SCALE)
static scale_fn *const scales[KINDS][KINDS][2][KINDS][2] = {SCALES(SCALE_ENTRY)};
static scale_fn *const affine_scales[KINDS][KINDS][2] = {AFFINE_SCALES(AFFINE_SCALE_ENTRY)};
static scale_fn *const affine_as_is[KINDS][KINDS] = {AFFINE_AS_IS(AS_IS_ENTRY)};

typedef void overlap_fn(const struct fn_forward_job *, int64_t, int64_t, struct scale *, char *, const struct affine *);
#define OVERLAP(bias, kind, residual, norm)                                                                         \
    static void overlap_##bias##_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin,      \
                                                                int64_t end, struct scale *previous, char *scratch, \
                                                                const struct affine *a) {                           \
        overlap_rows(kind, residual, norm, bias, job, begin, end, previous, scratch, a);                            \
    }
#define OVERLAP_ENTRY(bias, kind, residual, norm) \
    [kind][residual != NONE][norm != NONE][bias] = overlap_##bias##_##kind##_##residual##_##norm,
OVERLAPS(OVERLAP)
static overlap_fn *const overlaps[KINDS][2][2][KINDS] = {[NONE] = {{{NULL}}}, OVERLAPS(OVERLAP_ENTRY)};

typedef void add_fn(const struct fn_forward_job *, int64_t, int64_t);
#define ADD(x, residual)                                                                             \
    static void add_##x##_##residual(const struct fn_forward_job *job, int64_t begin, int64_t end) { \
        add_rows(x, residual, job, begin, end);                                                      \
    }
#define ADD_ENTRY(x, residual) [x][residual] = add_##x##_##residual,
ADDS(ADD)
static add_fn *const adds[KINDS][KINDS] = {ADDS(ADD_ENTRY)};

/* The most frequent lengths of heads are known to the compiler. */
typedef void short_fn(const struct fn_forward_job *, int64_t, int64_t, const void *, const struct affine *);
#define SHORT(bias, kind, residual, norm)                                                                                 \
    static void short_##bias##_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin, int64_t end, \
                                                              const void *weight, const struct affine *a) {               \
        if (job->hidden == 64) short_rows(kind, residual, norm, bias, 64, job, begin, end, weight, a);                    \
        else if (job->hidden == 128) short_rows(kind, residual, norm, bias, 128, job, begin, end, weight, a);             \
        else if (job->hidden == 256) short_rows(kind, residual, norm, bias, 256, job, begin, end, weight, a);             \
        else short_rows(kind, residual, norm, bias, job->hidden, job, begin, end, weight, a);                             \
    }
#define SHORT_ENTRY(bias, kind, residual, norm) \
    [kind][residual != NONE][norm != NONE][bias != NONE] = short_##bias##_##kind##_##residual##_##norm,
SHORTS(SHORT)
static short_fn *const shorts[KINDS][2][2][2] = {[NONE] = {{{NULL}}}, SHORTS(SHORT_ENTRY)};
