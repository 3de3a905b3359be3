/* Passes over rows that are normalised less their means, as center_body.h has them; included by kernel_body.h. */
#if FEW_KINDS
#define CENTERED_KINDS(fn) fn(F32)
#else
#define CENTERED_KINDS(fn) fn(F32) fn(F16) fn(ALL_BF16)
#endif

struct batch;
typedef void sum_fn(const struct fn_forward_job *, struct batch *);
typedef void scale_fn(const struct fn_forward_job *, const struct batch *);
typedef float row_sum_fn(const void *row, float mean, int64_t hidden, int64_t ahead, float *sums);

struct centered_passes {
    row_sum_fn *sum[KINDS], *squares[KINDS]; /* of a row, fetched so many bytes ahead; of a row less its mean */
    sum_fn *add[KINDS]; /* adds the residual, of x's kind, and finds the means of the rounded sums */
    scale_fn *second[KINDS][2], *as_is[KINDS][KINDS]; /* by out and whether h is of its kind; by norm and out */
};
extern const struct centered_passes FN_OF(centered_passes);
