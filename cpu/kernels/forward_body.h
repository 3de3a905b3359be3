/*
 * The forward pass, over the operations that kernel_body.h lists; included by it. `forward_rows`, at the end, chooses one
 * of three strategies (forward_strategies.h), and kernel_tables.h has the functions for the kinds of the operands.
 */

/* How the rows of a job are computed. */
struct plan {
    int x, residual, weight, out; /* the operands' kinds: BF16P for BF16 where rows are taken by parity */
    int norm; /* the kind that h * rstd is rounded to, or NONE */
    int gain; /* the weight as tables have it: its kind, WITH_OFFSET, or ANY */
    int round_sum, offset; /* whether h is the rounded sum and not itself float; whether the weight has an offset */
    int center; /* whether rows are normalised less their means */
    int ordered; /* whether the weight, of float, is put into the order of rows that are read by parity */
    int h, keep; /* the kind that the second pass reads h in; whether the first pass keeps it in scratch, as float */
};

/* Whether a weight or a bias may be of this kind where rows are read by parity: if there are few, float is not put into order. */
static int fits_parity(int kind, int64_t rows) { return kind == NONE || kind == BF16 || (kind == F32 && rows >= FN_ONE_KIND_ROWS); }

static int by_parity(const struct fn_forward_job *job, int64_t rows) {
    if (job->flags & FN_CENTER && job->residual_kind && !(job->flags & FN_ROUND_SUM)) return 0; /* there are no such passes */
    return ALL_BF16 == BF16P && job->x_kind == FN_BF16 && job->out_kind == FN_BF16 &&
           (job->residual_kind == FN_NONE || job->residual_kind == FN_BF16) &&
           fits_parity(job->weight_kind, rows) && fits_parity(job->bias_kind, rows);
}

static struct plan plan_of(const struct fn_forward_job *job, int64_t rows) {
    struct plan p = {
        .x = job->x_kind, .residual = job->residual_kind, .weight = job->weight_kind, .out = job->out_kind,
    };
    if (by_parity(job, rows)) {
        p.x = p.out = BF16P;
        if (p.residual) p.residual = BF16P;
        p.ordered = p.weight == F32;
        if (p.weight == BF16) p.weight = BF16P;
    }
    const int rounded_to = job->flags & FN_GATE_BEFORE ? p.out : p.x;
    if (job->flags & FN_ROUND_NORM && rounded_to != F32) p.norm = rounded_to;
    p.round_sum = job->flags & FN_ROUND_SUM && p.residual != NONE && p.residual != F32;
    p.offset = p.weight != NONE && !p.ordered && (float)job->weight_offset != 0;
    p.gain = !p.offset ? p.weight : p.weight == p.out ? (int)WITH_OFFSET : (int)ANY;
    /* h is an operand, unless it is a sum before rounding. The second pass reads an operand of out's kind, or float. */
    int operand = p.residual ? p.residual : p.x;
    p.keep = (p.residual && p.residual != F32 && !p.round_sum) || (operand != p.out && operand != F32);
    if (FEW_KINDS && !(job->flags & FN_SCALE_ONLY)) p.keep = p.x != F32 || (p.residual != NONE && p.residual != F32);
    p.center = (job->flags & FN_CENTER) != 0;
    if (AFFINE && p.center && (p.residual ? p.x != p.residual || !FN_OF(centered_passes).add[p.x] : !FN_OF(centered_passes).sum[p.x]))
        p.keep = 1;
    p.h = p.keep ? F32 : operand;
    return p;
}

/* The weight plus its offset, or a bias, as float, in the order of rows that go to `out`. */
static void widen_affine(int out, int kind, const void *weight, float offset, float fill, int64_t hidden, float *g) {
    if (out == BF16P) widen_by_parity(kind, weight, offset, fill, hidden, g);
    else widen_weight(kind, weight, offset, fill, hidden, g);
}

/* The weight plus its offset, as float: in scratch, unless the weight is that already. Ones if there is no weight. */
static const void *float_weight(const struct fn_forward_job *job, const struct plan *p, float *scratch) {
    if (p->weight == F32 && !p->offset && !p->ordered) return job->weight;
    widen_affine(p->out, p->weight, job->weight, (float)job->weight_offset, 1, job->hidden, scratch);
    return scratch;
}

#if AFFINE
/*
 * The weight and the bias as rows of float: in scratch, unless they are that already. Without a bias -0, as y + -0 is y. Or
 * as they are, if they are of out's kind.
 */
static struct affine affine_of(const struct fn_forward_job *job, const struct plan *p, int as_is, float *scratch) {
    const int64_t room = fn_float_row(job->hidden);
    const float offset = (float)job->weight_offset;
    const int bias = p->out == BF16P && job->bias_kind == BF16 ? BF16P : job->bias_kind;
    scale_fn *const known = p->center ? FN_OF(centered_passes).as_is[p->norm][p->out]
                                      : second_passes_to(p->out)->affine_as_is[p->norm][p->out];
    as_is = as_is && p->weight == p->out && bias == p->out && !p->offset && p->h == p->out && known;
    struct affine a = {job->weight, job->bias, job->weight_stride, job->bias_stride, job->heads, as_is};
    if (as_is) return a;
    if (p->weight != F32 || p->offset || p->ordered) {
        a.gain = (const char *)scratch;
        a.gain_stride = job->weight_stride ? (int64_t)sizeof(float) * room : 0;
        for (int64_t h = 0; h < (job->weight_stride ? job->heads : 1); h++)
            widen_affine(p->out, p->weight, (const char *)job->weight + h * job->weight_stride, offset, 1, job->hidden,
                         scratch + h * room);
    }
    scratch += job->heads * room;
    if (bias != F32 || p->out == BF16P) {
        a.bias = (const char *)scratch;
        a.bias_stride = job->bias_stride ? (int64_t)sizeof(float) * room : 0;
        for (int64_t h = 0; h < (job->bias_stride ? job->heads : 1); h++)
            widen_affine(p->out, bias, (const char *)job->bias + h * job->bias_stride, 0, -0.0f, job->hidden,
                         scratch + h * room);
    }
    return a;
}
#endif

/* The job whose first row is row m. */
static struct fn_forward_job job_from(const struct fn_forward_job *job, int64_t m) {
    struct fn_forward_job part = *job;
    part.x += m * job->x_stride;
    part.out += m * job->out_stride;
    part.first_row += m;
    if (job->rstd) part.rstd = (float *)job->rstd + m;
    if (job->residual_kind) {
        part.residual += m * job->residual_stride;
        part.residual_out += m * job->residual_out_stride;
    }
    return part;
}

#if AFFINE
/* Rows of kinds that cannot be centered, or with FEW_KINDS summed, as they are: h is kept as float. */
static void widen_rows(const struct fn_forward_job *part, const struct batch *batch) {
    for (int64_t k = 0; k < batch->rows; k++) {
        const struct row row = row_at(part->residual_kind, part, k);
        void *const total = batch->residual_out ? batch->residual_out + k * batch->residual_out_stride : row.residual_out;
        for (int64_t i = 0; i < part->hidden; i += UNIT) {
            const int n = part->hidden - i < UNIT ? (int)(part->hidden - i) : UNIT;
            U h = load_any(part->x_kind, row.x, i, n);
            if (part->residual_kind) {
                h = u_add(h, load_any(part->residual_kind, row.residual, i, n));
                const U rounded = store_any(part->residual_kind, total, i, n, h);
                if (part->flags & FN_ROUND_SUM) h = rounded;
            }
            u_store(F32, (char *)batch->kept + k * batch->h_stride, i, UNIT, h);
        }
    }
}

/* The means of rows, and the sums of the squares of what is left of them. */
static void center_rows(const struct plan *p, const struct fn_forward_job *part, struct batch *batch) {
    const struct centered_passes *const passes = &FN_OF(centered_passes);
    if (p->keep) widen_rows(part, batch);
    if (p->residual && !p->keep) passes->add[p->x](part, batch);
    else
        for (int64_t k = 0; k < batch->rows; k++)
            batch->mean[k] = passes->sum[p->h](batch->h + k * batch->h_stride, 0, part->hidden, part->ahead, batch->sums) /
                             (float)part->hidden + 0.0f;
    for (int64_t k = 0; k < batch->rows; k++)
        batch->rstd[k] = passes->squares[p->h](batch->h + k * batch->h_stride, batch->mean[k], part->hidden, 0, batch->sums);
}

/* The sums of squares of rows of kinds that have no function. */
static void sum_widened(const struct fn_forward_job *part, struct batch *batch) {
    struct fn_forward_job kept = *part;
    widen_rows(part, batch);
    kept.x = (const char *)batch->kept;
    kept.x_stride = batch->h_stride;
    sums[F32][NONE][UNROUNDED](&kept, batch);
}
#endif

/* The first pass over a batch, up to rstd. */
static void first_pass(const struct plan *p, const struct fn_forward_job *part, struct batch *batch) {
#if AFFINE
    if (p->center) center_rows(p, part, batch);
    else if (FEW_KINDS && p->keep) sum_widened(part, batch);
    else
#endif
    sums[p->x][p->residual][p->round_sum](part, batch);
    for (int64_t k = 0; k < batch->rows; k++) batch->rstd[k] = rstd_of(batch->rstd[k], part->hidden, part->eps);
    if (part->rstd) memcpy(part->rstd, batch->rstd, (size_t)batch->rows * sizeof(float));
}

static void second_pass(const struct plan *p, const struct fn_forward_job *part, const struct batch *batch) {
    const struct second_passes *const passes = second_passes_to(p->out);
    scale_fn *const known = passes->of[p->norm][p->gain][p->out][p->h == p->out];
#if AFFINE
    const int as_is = batch->affine && batch->affine->as_is;
    const struct centered_passes *const centered = &FN_OF(centered_passes);
    if (p->center && as_is) centered->as_is[p->norm][p->out](part, batch);
    else if (p->center) centered->second[p->out][p->h == p->out](part, batch);
    else if (as_is) passes->affine_as_is[p->norm][p->out](part, batch);
    else if (batch->affine) passes->of_any[1][p->out][p->h == p->out](part, batch);
    else
#endif
    (known ? known : passes->of_any[0][p->out][p->h == p->out])(part, batch);
}

/* Long rows of one kind: the first pass of each with the second pass of the row before it. */
static void forward_overlapped(const struct plan *p, const struct fn_forward_job *job, int64_t begin, int64_t end,
                               char *scratch, const struct affine *affine) {
    int bypass_cache = STREAMS && job->bypass_cache;
    int64_t kept = (int64_t)sizeof(float) * fn_kept(job->hidden);
    struct batch batch = {
        .rows = 1, .norm = p->norm, .affine = affine, .sums = (float *)(scratch + kept), .bypass_cache = bypass_cache,
    };
    struct fn_forward_job first = job_from(job, begin), last = job_from(job, end - 1);
    struct scale previous = {.out = first.out, .bypass_cache = bypass_cache};
    if (affine) {
        const int64_t head = first.first_row % affine->heads;
        previous.weight = affine->gain + head * affine->gain_stride;
        previous.bias = affine->bias + head * affine->bias_stride;
    } else {
        previous.weight = float_weight(job, p, (float *)scratch);
    }
    if (bypass_cache && p->residual) {
        batch.residual_out = first.residual_out;
        first.residual_out = scratch + job->bypass_cache + kept; /* the next row lies before it */
    }
    first_pass(p, &first, &batch);
    previous.rstd = batch.rstd[0];
    previous.h = p->residual ? first.residual_out : first.x;
    const int bias = !affine ? NONE : affine->as_is ? BF16P : F32;
    FN_OF(overlaps)[p->x][p->residual != NONE][p->norm != NONE][bias](job, begin + 1, end, &previous, scratch, affine);
    batch.rstd[0] = previous.rstd;
    batch.h = previous.h;
    second_pass(p, &last, &batch);
}

/* Of rows that are centered, none of which is in scratch, more go together: two sums would keep the processor waiting. */
static int64_t centered_batch_rows(const struct fn_forward_job *job) {
    int64_t element = fn_element_size(job->x_kind) + fn_element_size(job->residual_kind);
    int64_t rows = 2 * FN_BATCH_BYTES / element / fn_float_row(job->hidden);
    return rows < 1 ? 1 : rows < BATCH ? rows : BATCH;
}

/* Any rows, a batch at a time. */
static void forward_batched(const struct plan *p, const struct fn_forward_job *job, int64_t begin, int64_t end,
                            char *scratch, const struct affine *affine) {
    const int in_scratch = p->keep || (job->bypass_cache && p->residual);
    int64_t rows = p->center && !in_scratch ? centered_batch_rows(job) : batch_rows(job);
    int64_t row_bytes = (int64_t)sizeof(float) * fn_float_row(job->hidden);
    struct batch batch = {
        .norm = p->norm,
        .kept = p->keep ? (float *)scratch : NULL,
        .sums = (float *)scratch + fn_kept(job->hidden),
        .affine = affine,
        .bypass_cache = STREAMS && job->bypass_cache,
    };
    for (int64_t m = begin; m < end; m += rows) {
        struct fn_forward_job part = job_from(job, m);
        if (batch.bypass_cache && p->residual) { /* the second pass reads h in scratch */
            batch.residual_out = part.residual_out;
            batch.residual_out_stride = part.residual_out_stride;
            part.residual_out = scratch + job->bypass_cache;
            part.residual_out_stride = row_bytes;
        }
        batch.rows = end - m < rows ? end - m : rows;
        batch.h = p->keep ? scratch : p->residual ? part.residual_out : part.x;
        batch.h_stride = p->keep ? row_bytes : p->residual ? part.residual_out_stride : part.x_stride;
        first_pass(p, &part, &batch);
        second_pass(p, &part, &batch);
    }
}

/* x times a number, which takes the place of rstd. */
static void scale_only(const struct plan *p, const struct fn_forward_job *job, int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
        const struct fn_forward_job part = job_from(job, m);
        const struct batch batch = {.rows = 1, .norm = p->norm, .h = part.x, .rstd = {(float)job->eps}};
        second_pass(p, &part, &batch);
    }
}

void FN_OF(forward_rows)(const struct fn_forward_job *job, int64_t begin, int64_t end, void *scratch) {
    if (job->x_kind == FN_F64) {
        FN_TAKEN(forward_rows_f64)(job, begin, end, scratch);
        return;
    }
    struct plan p = plan_of(job, end - begin);
#if defined(REST)
    const int adds_f16 = ADDS_F16 && p.x == F16 && p.residual == F16 && p.round_sum && p.out == F16;
    if (p.center || fn_has_affine_rows(job) || (p.x != BF16P && !adds_f16)) {
        FN_JOIN(fn_forward_rows, REST)(job, begin, end, scratch);
        return;
    }
#else
    if (!p.out) {
        adds[p.x][p.residual](job, begin, end);
        return;
    }
#endif
    if (job->flags & FN_SCALE_ONLY) {
        scale_only(&p, job, begin, end);
        return;
    }
    const int is_short = job->hidden < FN_SEGMENT, few = end - begin < FN_ONE_KIND_ROWS;
    int one_kind = !p.center && !few && p.x == p.out && p.h == p.out && !p.keep &&
                   FN_OF(overlaps)[p.x][p.residual != NONE][0][NONE] && /* BF16 has none where BF16P has */
                   (is_short || job->overlaps);
    const struct affine *affine = NULL;
    struct fn_forward_job in_order;
    if (p.ordered && !fn_has_affine_rows(job)) { /* the weight takes the place of the one that is not in order */
        in_order = *job;
        in_order.weight = float_weight(job, &p, (float *)((char *)scratch + job->affine));
        job = &in_order;
        p.ordered = 0;
    }
#if AFFINE
    struct affine rows;
    if (fn_has_affine_rows(job)) {
        const int as_is = few || (!is_short && job->affine_as_is && (OVERLAPS_AS_IS || !one_kind));
        rows = affine_of(job, &p, as_is, (float *)((char *)scratch + job->affine));
        affine = &rows;
    }
#endif
    if (one_kind && !is_short)
        forward_overlapped(&p, job, begin, end, scratch, affine);
    else if (one_kind && !job->bypass_cache)
        FN_OF(shorts)[p.x][p.residual != NONE][p.norm != NONE][affine != NULL](job, begin, end,
                                                                       affine ? NULL : float_weight(job, &p, scratch), affine);
    else
        forward_batched(&p, job, begin, end, scratch, affine);
    if (STREAMS && job->bypass_cache) u_stream_end();
}
