/*
 * One function per legal combination of kinds, so that each is compiled with its kinds known; and tables that find it.
 * Included by forward_body.h. Each list names the combinations for one function; `fn`, a macro, is applied to each:
 *
 *   SUMS       x, residual, round_sum: rounding changes no bit where the residual is float or absent
 *   SCALES     h, norm, weight, offset, out: the second pass reads h as float or as an operand of out's kind
 *   AFFINE_SCALES  h, norm, out: the weight and the bias are rows of float, for each head or for all
 *   AFFINE_AS_IS   kind, norm: h, the weight, the bias and out are of one kind
 *   ADDS       x, residual: the sum alone
 *   ONE_KIND   kind, residual, norm: x, residual, h and out are of one kind, and the weight is float
 *   ONE_KIND_AS_IS  the same, where the weight and a bias may be of the same kind too
 *
 * BF16P takes part in combinations of its own alone (see kinds.h). With ROW_BY_ROW, tables of ONE_KIND are empty.
 */
#define SUMS_OF(fn, x)                                                 \
    fn(x, NONE, UNROUNDED) fn(x, F32, UNROUNDED) fn(x, F16, UNROUNDED) \
    fn(x, F16, ROUNDED) fn(x, BF16, UNROUNDED) fn(x, BF16, ROUNDED)
#define SCALES_OF_KINDS(fn, norm, weight, offset)                                   \
    fn(F32, norm, weight, offset, F32) fn(F32, norm, weight, offset, F16)           \
    fn(F32, norm, weight, offset, BF16) fn(F16, norm, weight, offset, F16)          \
    fn(BF16, norm, weight, offset, BF16)
#define SCALES_OF(fn, norm)                                                          \
    SCALES_OF_KINDS(fn, norm, NONE, NO_OFFSET)                                       \
    SCALES_OF_KINDS(fn, norm, F32, NO_OFFSET) SCALES_OF_KINDS(fn, norm, F32, OFFSET) \
    SCALES_OF_KINDS(fn, norm, F16, NO_OFFSET) SCALES_OF_KINDS(fn, norm, F16, OFFSET) \
    SCALES_OF_KINDS(fn, norm, BF16, NO_OFFSET) SCALES_OF_KINDS(fn, norm, BF16, OFFSET)
#define AFFINE_SCALES_OF(fn, norm) \
    fn(F32, norm, F32) fn(F32, norm, F16) fn(F32, norm, BF16) fn(F16, norm, F16) fn(BF16, norm, BF16)
#define ADDS_OF(fn, x) fn(x, F32) fn(x, F16) fn(x, BF16)
#define ONE_KIND_OF(fn, kind) fn(kind, NONE, NONE) fn(kind, NONE, kind) fn(kind, kind, NONE) fn(kind, kind, kind)

#if defined(BF16_BY_PARITY)
#define SUMS_BY_PARITY(fn) fn(BF16P, NONE, UNROUNDED) fn(BF16P, BF16P, UNROUNDED) fn(BF16P, BF16P, ROUNDED)
#define SCALES_BY_PARITY_OF(fn, norm, weight, offset) \
    fn(F32, norm, weight, offset, BF16P) fn(BF16P, norm, weight, offset, BF16P)
#define SCALES_BY_PARITY(fn)                                                                       \
    SCALES_BY_PARITY_OF(fn, NONE, NONE, NO_OFFSET) SCALES_BY_PARITY_OF(fn, BF16P, NONE, NO_OFFSET) \
    SCALES_BY_PARITY_OF(fn, NONE, BF16P, NO_OFFSET) SCALES_BY_PARITY_OF(fn, NONE, BF16P, OFFSET)   \
    SCALES_BY_PARITY_OF(fn, BF16P, BF16P, NO_OFFSET) SCALES_BY_PARITY_OF(fn, BF16P, BF16P, OFFSET)
#define AFFINE_BY_PARITY(fn) \
    fn(F32, NONE, BF16P) fn(F32, BF16P, BF16P) fn(BF16P, NONE, BF16P) fn(BF16P, BF16P, BF16P)
#define ONE_KIND_BF16(fn) ONE_KIND_OF(fn, BF16P)
#define ONE_KIND_AS_IS(fn) ONE_KIND_BF16(fn)
#define AFFINE_AS_IS(fn) fn(F16, NONE) fn(F16, F16) fn(BF16P, NONE) fn(BF16P, BF16P)
#else
#define SUMS_BY_PARITY(fn)
#define SCALES_BY_PARITY(fn)
#define AFFINE_BY_PARITY(fn)
#define ONE_KIND_BF16(fn) ONE_KIND_OF(fn, BF16)
#define ONE_KIND_AS_IS(fn)
#define AFFINE_AS_IS(fn) fn(F16, NONE) fn(F16, F16) fn(BF16, NONE) fn(BF16, BF16)
#endif

#define AFFINE_SCALES(fn) \
    AFFINE_SCALES_OF(fn, NONE) AFFINE_SCALES_OF(fn, F16) AFFINE_SCALES_OF(fn, BF16) AFFINE_BY_PARITY(fn)
#define ADDS(fn) ADDS_OF(fn, F32) ADDS_OF(fn, F16) ADDS_OF(fn, BF16)
#define SUMS(fn) SUMS_OF(fn, F32) SUMS_OF(fn, F16) SUMS_OF(fn, BF16) SUMS_BY_PARITY(fn)
#define SCALES(fn) SCALES_OF(fn, NONE) SCALES_OF(fn, F16) SCALES_OF(fn, BF16) SCALES_BY_PARITY(fn)
#if ROW_BY_ROW
#define ONE_KIND(fn)
#else
#define ONE_KIND(fn) fn(F32, NONE, NONE) fn(F32, F32, NONE) ONE_KIND_OF(fn, F16) ONE_KIND_BF16(fn)
#endif

typedef void sum_fn(const struct fn_forward_job *, struct batch *);
#define SUM(x, residual, round_sum)                                                                         \
    static void sum_##x##_##residual##_##round_sum(const struct fn_forward_job *job, struct batch *batch) { \
        sum_rows(x, residual, round_sum, job, batch);                                                       \
    }
#define SUM_ENTRY(x, residual, round_sum) [x][residual][round_sum] = sum_##x##_##residual##_##round_sum,
SUMS(SUM)
static sum_fn *const sums[KINDS][KINDS][2] = {SUMS(SUM_ENTRY)};

typedef void scale_fn(const struct fn_forward_job *, const struct batch *);
#define SCALE(h, norm, weight, offset, out)                                                        \
    static void scale_##h##_##norm##_##weight##_##offset##_##out(const struct fn_forward_job *job, \
                                                                 const struct batch *batch) {      \
        scale_rows(h, norm, weight, offset, NONE, out, job, batch);                                      \
    }
#define SCALE_ENTRY(h, norm, weight, offset, out) \
    [norm][weight][offset][out][h == out] = scale_##h##_##norm##_##weight##_##offset##_##out,
SCALES(SCALE)
static scale_fn *const scales[KINDS][KINDS][2][KINDS][2] = {SCALES(SCALE_ENTRY)};

#define AFFINE_SCALE(h, norm, out)                                                                               \
    static void affine_scale_##h##_##norm##_##out(const struct fn_forward_job *job, const struct batch *batch) { \
        scale_rows(h, norm, F32, NO_OFFSET, F32, out, job, batch);                                               \
    }
#define AFFINE_SCALE_ENTRY(h, norm, out) [norm][out][h == out] = affine_scale_##h##_##norm##_##out,
AFFINE_SCALES(AFFINE_SCALE)
static scale_fn *const affine_scales[KINDS][KINDS][2] = {AFFINE_SCALES(AFFINE_SCALE_ENTRY)};

#define SCALE_AS_IS(kind, norm)                                                                            \
    static void scale_as_is_##kind##_##norm(const struct fn_forward_job *job, const struct batch *batch) { \
        scale_rows(kind, norm, kind, NO_OFFSET, kind, kind, job, batch);                                   \
    }
#define SCALE_AS_IS_ENTRY(kind, norm) [norm][kind] = scale_as_is_##kind##_##norm,
AFFINE_AS_IS(SCALE_AS_IS)
static scale_fn *const affine_as_is[KINDS][KINDS] = {AFFINE_AS_IS(SCALE_AS_IS_ENTRY)};

typedef void overlap_fn(const struct fn_forward_job *, int64_t, int64_t, struct scale *, char *);
#define OVERLAP(kind, residual, norm)                                                                              \
    static void overlap_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin, int64_t end, \
                                                     struct scale *previous, char *scratch) {                      \
        overlap_rows(kind, residual, norm, NONE, job, begin, end, previous, scratch, NULL);                                  \
    }
#define OVERLAP_ENTRY(kind, residual, norm) \
    [kind][residual != NONE][norm != NONE] = overlap_##kind##_##residual##_##norm,
ONE_KIND(OVERLAP)
static overlap_fn *const overlaps[KINDS][2][2] = {[NONE] = {{NULL}}, ONE_KIND(OVERLAP_ENTRY)};

typedef void affine_overlap_fn(const struct fn_forward_job *, int64_t, int64_t, struct scale *, char *,
                               const struct affine *);
#define AFFINE_OVERLAP_OF(bias, kind, residual, norm)                                                                \
    static void affine_overlap_##bias##_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin, \
                                                                     int64_t end, struct scale *previous,            \
                                                                     char *scratch, const struct affine *a) {        \
        overlap_rows(kind, residual, norm, bias, job, begin, end, previous, scratch, a);                             \
    }
#define AFFINE_OVERLAP(kind, residual, norm) AFFINE_OVERLAP_OF(F32, kind, residual, norm)
#define AFFINE_OVERLAP_AS_IS(kind, residual, norm) AFFINE_OVERLAP_OF(BF16P, kind, residual, norm)
#define AFFINE_OVERLAP_ENTRY(kind, residual, norm) \
    [kind][residual != NONE][norm != NONE][0] = affine_overlap_F32_##kind##_##residual##_##norm,
#define AFFINE_OVERLAP_AS_IS_ENTRY(kind, residual, norm) \
    [kind][residual != NONE][norm != NONE][1] = affine_overlap_BF16P_##kind##_##residual##_##norm,
ONE_KIND(AFFINE_OVERLAP) ONE_KIND_AS_IS(AFFINE_OVERLAP_AS_IS)
static affine_overlap_fn *const affine_overlaps[KINDS][2][2][2] = {
    [NONE] = {{{NULL}}}, ONE_KIND(AFFINE_OVERLAP_ENTRY) ONE_KIND_AS_IS(AFFINE_OVERLAP_AS_IS_ENTRY)};

typedef void add_fn(const struct fn_forward_job *, int64_t, int64_t);
#define ADD(x, residual)                                                                             \
    static void add_##x##_##residual(const struct fn_forward_job *job, int64_t begin, int64_t end) { \
        add_rows(x, residual, job, begin, end);                                                      \
    }
#define ADD_ENTRY(x, residual) [x][residual] = add_##x##_##residual,
ADDS(ADD)
static add_fn *const adds[KINDS][KINDS] = {ADDS(ADD_ENTRY)};

/* The most frequent lengths of heads are known to the compiler. */
#define SHORT_ROWS(kind, residual, norm, affine, weight, a)                                                   \
    if (job->hidden == 64) short_rows(kind, residual, norm, affine, 64, job, begin, end, weight, a);          \
    else if (job->hidden == 128) short_rows(kind, residual, norm, affine, 128, job, begin, end, weight, a);   \
    else if (job->hidden == 256) short_rows(kind, residual, norm, affine, 256, job, begin, end, weight, a);   \
    else short_rows(kind, residual, norm, affine, job->hidden, job, begin, end, weight, a);
typedef void short_fn(const struct fn_forward_job *, int64_t, int64_t, const void *);
#define SHORT(kind, residual, norm)                                                                              \
    static void short_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin, int64_t end, \
                                                   const void *weight) {                                         \
        SHORT_ROWS(kind, residual, norm, NONE, weight, NULL)                                                        \
    }
#define SHORT_ENTRY(kind, residual, norm) \
    [kind][residual != NONE][norm != NONE] = short_##kind##_##residual##_##norm,
ONE_KIND(SHORT)
static short_fn *const shorts[KINDS][2][2] = {[NONE] = {{NULL}}, ONE_KIND(SHORT_ENTRY)};

typedef void affine_short_fn(const struct fn_forward_job *, int64_t, int64_t, const struct affine *);
#define AFFINE_SHORT(kind, residual, norm)                                                                     \
    static void affine_short_##kind##_##residual##_##norm(const struct fn_forward_job *job, int64_t begin,     \
                                                          int64_t end, const struct affine *a) {               \
        SHORT_ROWS(kind, residual, norm, F32, NULL, a)                                                           \
    }
#define AFFINE_SHORT_ENTRY(kind, residual, norm) \
    [kind][residual != NONE][norm != NONE] = affine_short_##kind##_##residual##_##norm,
ONE_KIND(AFFINE_SHORT)
static affine_short_fn *const affine_shorts[KINDS][2][2] = {[NONE] = {{NULL}}, ONE_KIND(AFFINE_SHORT_ENTRY)};
