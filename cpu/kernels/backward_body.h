/*
 * Gradients, over the operations that kernel_body.h lists; included by it. A row takes two passes: the first computes a
 * sum that the gradient of every element needs, the second the gradients. The second pass of a row is made together
 * with the first pass of the next row. So memory is read in order, one new row at a time, while the caches hold the row
 * before; and the end of a row's sum overlaps with work on the other row.
 */

struct gradient_row {
    const void *dy, *h, *d_total; /* d_total is the gradient of residual_out */
    const float *g; /* weight + offset in whole units */
    /* Sums of parameters' gradients, in whole units: sum[0] becomes this row's share + sum[merged - 1] + ... + sum[0]. */
    void *const *sum;
    float *oldest; /* sum[0], which loops would load again after each store */
    int merged;
    int64_t at, bias_at; /* where the head's sums of the weight's gradient begin, and of the bias's */
    void *d; /* the gradient of x */
    int64_t ahead; /* operands that come from memory are fetched so many bytes ahead */
    const char *next_dy, *next_h; /* where operands come from memory: those of a later row, or of this one */
    float rstd;
    float c; /* mean(wdy * xhat), for the second pass */
    float mean, b; /* where rows are centered: mean(h), and mean(wdy) for the second pass */
};

/*
 * What passes do. The loops of usual rows have it as a constant, and copies of the rows: with a branch for each part, and
 * addresses that are loaded again because a store might have changed them, a row took up to half as long again.
 */
enum part {
    WEIGHTED = 1, /* there is a weight */
    GRADIENT = 2, /* x has a gradient */
    SUMMED = 4, /* the weight has one, or the bias */
    BIASED = 8, /* the bias has one */
    MERGED = 16, /* the share of the row is added to another sum */
    MERGED_MORE = 32, /* or to several */
    TOTALLED = 64, /* there is a gradient of residual_out */
    FROM_MEMORY = 128, /* operands come from memory */
    BYPASSING = 256 /* the gradient of x bypasses the caches */
};

FN_INLINE int parts_of(const struct fn_backward_job *job, int summed) {
    return (job->weight ? WEIGHTED : 0) | (job->dx ? GRADIENT : 0) | (summed ? SUMMED : 0) |
           (summed && job->bias_sums ? BIASED : 0) | (job->d_total ? TOTALLED : 0) | (job->from_memory ? FROM_MEMORY : 0) |
           (STREAMS && job->bypass_cache ? BYPASSING : 0);
}

FN_INLINE U gradient_operand(int kind, int parts, int64_t ahead, const void *operand, int64_t i, int n) {
    return parts & FROM_MEMORY ? u_read(kind, ahead, operand, i, n) : u_load(kind, operand, i, n);
}

FN_INLINE U weighted(int parts, U dy, const struct gradient_row *row, int64_t i) {
    return parts & WEIGHTED ? u_mul(dy, u_load(F32, row->g, i, UNIT)) : dy;
}

/* Adds a unit's share to the sums that it is merged with, where they have this unit. */
FN_INLINE void add_share(int parts, const struct gradient_row *row, int64_t place, U share) {
    if (parts & MERGED_MORE)
        for (int k = row->merged; --k > 0;) share = u_add(u_load(F32, row->sum[k], place, UNIT), share);
    if (parts & (MERGED | MERGED_MORE)) share = u_add(u_load(F32, row->oldest, place, UNIT), share);
    u_store(F32, row->oldest, place, UNIT, share);
}

FN_INLINE U normalised(int center, const struct gradient_row *row, U h) {
    return u_mul(center ? u_add(h, u_set1(-row->mean)) : h, u_set1(row->rstd));
}

/* First pass: the share of the weight's gradient, and the products that the row's sum adds; and wdy, which another adds. */
FN_INLINE void multiply_unit(int center, int kind, int parts, const struct gradient_row *row, int64_t i, int n, float *products,
                             float *wdys) {
    U dy = gradient_operand(kind, parts, row->ahead, row->dy, i, n);
    U xhat = normalised(center, row, gradient_operand(kind, parts, row->ahead, row->h, i, n));
    if (parts & SUMMED) add_share(parts, row, row->at + i, u_mul(dy, xhat));
    if (parts & BIASED) add_share(parts, row, row->bias_at + i, dy);
    if (parts & GRADIENT) u_store(F32, products, 0, UNIT, u_mul(weighted(parts, dy, row, i), xhat));
    if (parts & GRADIENT && center) u_store(F32, wdys, 0, UNIT, weighted(parts, dy, row, i));
}

/*
 * Fetches a unit of a later row. The tree takes blocks of rows far from each other, so that the hardware would fetch the
 * beginning of each late.
 */
FN_INLINE void fetch_unit(int kind, const char *row, int64_t i) {
    const int size = kind == F32 ? 4 : 2;
    if (i * size % FN_ALIGNMENT) return; /* a line is fetched once */
    for (int k = 0; k < UNIT * size; k += FN_ALIGNMENT) FN_PREFETCH_2(row + i * size + k);
}

/* Second pass. */
FN_INLINE void gradient_unit(int center, int kind, int parts, const struct gradient_row *row, int64_t i, int n) {
    U xhat = normalised(center, row, u_load(kind, row->h, i, n));
    U wdy = weighted(parts, u_load(kind, row->dy, i, n), row, i);
    if (center) wdy = u_add(wdy, u_set1(-row->b));
    U d = u_mul(u_add(wdy, u_mul(xhat, u_set1(-row->c))), u_set1(row->rstd)); /* rounding is symmetric: -(xhat * c) */
    if (parts & TOTALLED) d = u_add(d, gradient_operand(kind, parts, row->ahead, row->d_total, i, n));
    if (parts & BYPASSING) u_stream(kind, row->d, i, n, d);
    else u_store(kind, row->d, i, n, d);
}

/*
 * The first pass of `row` and the second pass of `before`, over the whole units among the n elements from `begin` on; either
 * may be NULL. Returns how many elements these units have.
 */
FN_INLINE int64_t pass_over_units(int center, int kind, int parts, const struct gradient_row *before, const struct gradient_row *row,
                                  int64_t begin, int64_t n, float *products, float *wdys) {
    const struct gradient_row first = row ? *row : *before, second = before ? *before : *row;
    int64_t done = 0;
    for (; done + UNIT <= n; done += UNIT) {
        if (row && parts & FROM_MEMORY) {
            fetch_unit(kind, first.next_dy, begin + done);
            fetch_unit(kind, first.next_h, begin + done);
        }
        if (row) multiply_unit(center, kind, parts, &first, begin + done, UNIT, products + done, wdys + done);
        if (before) gradient_unit(center, kind, parts, &second, begin + done, UNIT);
    }
    return done;
}

/* The same, with usual parts as constants. */
FN_INLINE int64_t pass_over_segment(int center, int kind, int parts, const struct gradient_row *before, const struct gradient_row *row,
                                    int64_t begin, int64_t n, float *products, float *wdys) {
    enum { LARGE = FROM_MEMORY | (STREAMS ? BYPASSING : 0), ALWAYS = WEIGHTED | GRADIENT };
#define PASS(parts) pass_over_units(center, kind, parts, before, row, begin, n, products, wdys)
    if (center) {
        enum { USUAL = ALWAYS | SUMMED | BIASED };
        const int large = parts & (FROM_MEMORY | BYPASSING);
        if (kind == F32 && row && before) switch (parts - large) { /* copies gain a tenth in others */
            case USUAL: return PASS(USUAL | large);
            case USUAL | MERGED:
            case USUAL | MERGED_MORE: return PASS(USUAL | MERGED_MORE | large);
        }
        return PASS(parts);
    }
    if (row && before && !FEW_KINDS) switch (parts) {
        case ALWAYS: return PASS(ALWAYS);
        case ALWAYS | SUMMED: return PASS(ALWAYS | SUMMED);
        case ALWAYS | SUMMED | MERGED: return PASS(ALWAYS | SUMMED | MERGED);
        case ALWAYS | SUMMED | MERGED_MORE: return PASS(ALWAYS | SUMMED | MERGED_MORE);
        case ALWAYS | TOTALLED: return PASS(ALWAYS | TOTALLED);
        case ALWAYS | SUMMED | TOTALLED: return PASS(ALWAYS | SUMMED | TOTALLED);
        case ALWAYS | SUMMED | MERGED | TOTALLED: return PASS(ALWAYS | SUMMED | MERGED | TOTALLED);
        case ALWAYS | SUMMED | MERGED_MORE | TOTALLED: return PASS(ALWAYS | SUMMED | MERGED_MORE | TOTALLED);
        case ALWAYS | LARGE: return PASS(ALWAYS | LARGE);
        case ALWAYS | SUMMED | LARGE: return PASS(ALWAYS | SUMMED | LARGE);
        case ALWAYS | SUMMED | MERGED | LARGE: return PASS(ALWAYS | SUMMED | MERGED | LARGE);
        case ALWAYS | SUMMED | MERGED_MORE | LARGE: return PASS(ALWAYS | SUMMED | MERGED_MORE | LARGE);
        case ALWAYS | LARGE | TOTALLED: return PASS(ALWAYS | LARGE | TOTALLED);
        case ALWAYS | SUMMED | LARGE | TOTALLED: return PASS(ALWAYS | SUMMED | LARGE | TOTALLED);
        case ALWAYS | SUMMED | MERGED | LARGE | TOTALLED: return PASS(ALWAYS | SUMMED | MERGED | LARGE | TOTALLED);
        case ALWAYS | SUMMED | MERGED_MORE | LARGE | TOTALLED: return PASS(ALWAYS | SUMMED | MERGED_MORE | LARGE | TOTALLED);
        case ALWAYS | SUMMED | BIASED: return PASS(ALWAYS | SUMMED | BIASED);
        case ALWAYS | SUMMED | MERGED | BIASED: return PASS(ALWAYS | SUMMED | MERGED | BIASED);
        case ALWAYS | SUMMED | MERGED_MORE | BIASED: return PASS(ALWAYS | SUMMED | MERGED_MORE | BIASED);
        case ALWAYS | SUMMED | BIASED | LARGE: return PASS(ALWAYS | SUMMED | BIASED | LARGE);
        case ALWAYS | SUMMED | MERGED | BIASED | LARGE: return PASS(ALWAYS | SUMMED | MERGED | BIASED | LARGE);
        case ALWAYS | SUMMED | MERGED_MORE | BIASED | LARGE: return PASS(ALWAYS | SUMMED | MERGED_MORE | BIASED | LARGE);
    }
    return PASS(parts);
#undef PASS
}

/*
 * Both passes over all of a row; that of `row` returns treesum(wdy * xhat). With centered rows `wdys` has room for a segment of
 * wdy and for the sums of segments, of which treesum(wdy) is left.
 */
FN_INLINE float pass_over(int center, int kind, int parts, const struct gradient_row *before, const struct gradient_row *row,
                          int64_t hidden, float *sums, float *wdys) {
    _Alignas(64) float products[FN_SEGMENT];
    int64_t segments = 0;
    for (int64_t begin = 0; begin < hidden; begin += FN_SEGMENT) {
        int64_t n = hidden - begin < FN_SEGMENT ? hidden - begin : FN_SEGMENT, width = UNIT;
        while (width < n) width *= 2;
        int64_t done = pass_over_segment(center, kind, parts, before, row, begin, n, products, wdys);
        if (done < n) {
            if (row) multiply_unit(center, kind, parts, row, begin + done, (int)(n - done), products + done, wdys + done);
            if (before) gradient_unit(center, kind, parts, before, begin + done, (int)(n - done));
            /* Padding is +0, also where 0 * rstd is NaN. */
            for (int64_t k = n - done; k < UNIT; k++)
                products[done + (kind == BF16P ? k % 2 * (UNIT / 2) + k / 2 : k)] = 0;
            if (center) clear_rest(kind == BF16P, wdys + done, n - done);
            done += UNIT;
        }
        if (!row || !(parts & GRADIENT)) continue;
        for (; done < width; done += UNIT) {
            u_store(F32, products, done, UNIT, u_set1(0));
            if (center) u_store(F32, wdys, done, UNIT, u_set1(0));
        }
        if (center) wdys[FN_SEGMENT + segments] = u_halve(kind == BF16P, sum_units(wdys, width));
        sums[segments++] = u_halve(kind == BF16P, sum_units(products, width));
    }
    if (center && segments) halve_sums(wdys + FN_SEGMENT, segments);
    return segments ? halve_sums(sums, segments) : 0;
}

/* Converts n elements of a row. Float rows have room for whole units, which are read and written whole. */
FN_INLINE void convert(int from_kind, int to_kind, const void *from, void *to, int64_t n) {
    for (int64_t i = 0; i < n; i += UNIT) {
        int left = n - i < UNIT ? (int)(n - i) : UNIT;
        U u = u_load(from_kind, from, i, from_kind == F32 ? UNIT : left);
        u_store(to_kind, to, i, to_kind == F32 ? UNIT : left, u);
    }
}

/* A row as float: itself if it is float, else converted into `room`. */
static const void *as_float(int kind, const void *row, float *room, int64_t n) {
    if (kind == FN_F32 || !row) return row;
    if (kind == FN_F16) convert(F16, F32, row, room, n);
    else convert(BF16, F32, row, room, n);
    return room;
}

/* Floats that lie by parity; exactly n elements are written. */
static void take_in_order(const float *from, int64_t n, float *to) {
    float last[UNIT];
    const int64_t whole = n / UNIT * UNIT;
    order_again(from, whole, to);
    if (whole == n) return;
    order_again(from + whole, UNIT, last);
    memcpy(to + whole, last, (size_t)(n - whole) * sizeof *to);
}

/* Rounds floats that u_mul or u_add made; exactly n elements are written. */
static void from_float(int kind, const float *from, void *row, int64_t n) {
    if (kind == FN_F32) memcpy(row, from, (size_t)n * sizeof *from);
    else if (kind == FN_F16) convert(F32, F16, from, row, n);
    else convert(F32, BF16, from, row, n);
}

/* The kind of all rows, or NONE. */
static int kind_of_rows(const struct fn_backward_job *job) {
    int kind = job->dy_kind;
    int same = job->h_kind == kind && (!job->dx || job->dx_kind == kind) && !job->dresidual &&
               (!job->d_total || job->d_total_kind == kind);
    if (ALL_BF16 == BF16P && kind == BF16) {
        if ((job->weight && job->weight_kind == F16) || (job->dbias && job->bias_kind == F16)) return NONE;
        kind = BF16P;
    }
    if (job->center && !FN_OF(centered_passes).sum[kind]) return NONE;
    return same ? kind : NONE;
}

/* A thread's scratch: one row of each operand as float, the sums of a row's segments, and the gains of all heads. */
struct backward_scratch {
    float *dy, *h, *d_total, *d, *sums, *gains;
    float *wdys; /* where rows are centered: see pass_over */
};

FN_INLINE struct backward_scratch backward_scratch(const struct fn_backward_job *job, void *scratch) {
    int64_t padded = (job->hidden + FN_SEGMENT - 1) / FN_SEGMENT * FN_SEGMENT;
    float *dy = scratch, *sums = dy + 4 * padded;
    float *wdys = sums + fn_room_for_sums(job->hidden);
    float *gains = wdys + (job->center ? FN_SEGMENT + fn_room_for_sums(job->hidden) : 0);
    return (struct backward_scratch){dy, dy + padded, dy + 2 * padded, dy + 3 * padded, sums, gains, wdys};
}

/* Row m of one head, which is m % heads. A division would take a tenth of a short row's time. */
FN_INLINE struct gradient_row operands_of(const struct fn_backward_job *job, int64_t m, const float *gains) {
    const int64_t at = (job->heads == 1 ? job->head : m % job->heads) * job->gain_stride;
    return (struct gradient_row){
        .dy = fn_row_of_dy(job, m),
        .h = fn_row_of_h(job, m),
        .d_total = fn_row_of_d_total(job, m),
        .g = gains + at,
        .at = at,
        .bias_at = job->bias_sums + at,
        .d = job->dx ? job->dx + m * job->dx_stride : NULL,
        .ahead = job->ahead,
        .rstd = ((const float *)job->rstd)[m],
    };
}

/* How many of the newest sums row m's share is added to: that of the block's rows before is on the stack too. */
FN_INLINE int merged_into(const struct fn_backward_part *part, int64_t m, int64_t begin, int64_t end, int merged) {
    return (m > begin || part->continues) + (m + 1 < end ? 0 : merged);
}

/* The passes over centered rows, one function for a kind. */
typedef float pass_over_fn(int parts, const struct gradient_row *before, const struct gradient_row *row, int64_t hidden,
                           const struct backward_scratch *room);
#define PASS_OVER_CENTERED(kind)                                                                             \
    static float pass_over_centered_##kind(int parts, const struct gradient_row *before,                     \
                                           const struct gradient_row *row, int64_t hidden,                   \
                                           const struct backward_scratch *room) {                            \
        return pass_over(1, kind, parts, before, row, hidden, room->sums, room->wdys);                       \
    }
#define PASS_OVER_CENTERED_ENTRY(kind) [kind] = pass_over_centered_##kind,
CENTERED_KINDS(PASS_OVER_CENTERED)
static pass_over_fn *const pass_over_centered[KINDS] = {CENTERED_KINDS(PASS_OVER_CENTERED_ENTRY)};

static float mean_of(int kind, const struct fn_backward_job *job, const struct gradient_row *row, float *sums) {
    return FN_OF(centered_passes).sum[kind](row->h, 0, job->hidden, job->ahead, sums) / (float)job->hidden;
}

/* Rows of one kind, as fn_backward_rows says. */
FN_INLINE void gradient_rows(int center, int kind, const struct fn_backward_job *job, int64_t begin, int64_t end,
                             struct fn_sum_stack *sums, int merged, struct fn_backward_part *part) {
    const struct backward_scratch room = backward_scratch(job, part->scratch);
    const int parts = parts_of(job, sums != NULL);
    struct gradient_row before = {0};
    if (part->pending) {
        before = operands_of(job, part->row, room.gains);
        before.c = part->c;
        if (center) before.mean = part->mean, before.b = part->b;
    }
    for (int64_t m = begin; m < end; m++) {
        const int into = merged_into(part, m, begin, end, merged);
        void *const *const sum = sums ? sums->row + sums->count - into : NULL;
        if (sums) sums->count += 1 - into;
        const int does = parts | (!sums || !into ? 0 : into == 1 ? MERGED : MERGED_MORE);
        const int64_t next = m + 1 < end ? m + 1 : part->after ? part->after : m;
        for (int64_t head = 0; head < job->heads; head++) {
            struct gradient_row row = operands_of(job, m * job->heads + head, room.gains);
            row.merged = into;
            row.sum = sum;
            row.oldest = sum ? sum[0] : NULL;
            if (parts & FROM_MEMORY) {
                row.next_dy = fn_row_of_dy(job, next * job->heads + head);
                row.next_h = fn_row_of_h(job, next * job->heads + head);
            }
            if (center) row.mean = mean_of(kind, job, &row, room.sums);
            float total = center     ? pass_over_centered[kind](does, before.d ? &before : NULL, &row, job->hidden, &room)
                          : before.d ? pass_over(0, kind, does, &before, &row, job->hidden, room.sums, NULL)
                                     : pass_over(0, kind, does, NULL, &row, job->hidden, room.sums, NULL);
            row.c = total / (float)job->hidden;
            if (center) row.b = room.wdys[FN_SEGMENT] / (float)job->hidden;
            before = row;
        }
    }
    part->pending = before.d != NULL;
    part->row = end * job->heads - 1;
    part->c = before.c;
    if (center) part->mean = before.mean, part->b = before.b;
}

FN_INLINE void flush_row(int center, int kind, const struct fn_backward_job *job, struct fn_backward_part *part) {
    const struct backward_scratch room = backward_scratch(job, part->scratch);
    struct gradient_row row = operands_of(job, part->row, room.gains);
    row.c = part->c;
    if (center) row.mean = part->mean, row.b = part->b;
    if (center) pass_over_centered[kind](parts_of(job, 0), &row, NULL, job->hidden, &room);
    else pass_over(0, kind, parts_of(job, 0), &row, NULL, job->hidden, room.sums, NULL);
    part->pending = 0;
}

#define GRADIENTS_OF(name, center, kind)                                                                   \
    static void gradients_##name(const struct fn_backward_job *job, int64_t begin, int64_t end,      \
                                       struct fn_sum_stack *sums, int merged, struct fn_backward_part *part) { \
        gradient_rows(center, kind, job, begin, end, sums, merged, part);                                  \
    }                                                                                                      \
    static void flush_##name(const struct fn_backward_job *job, struct fn_backward_part *part) {     \
        flush_row(center, kind, job, part);                                                                \
    }
GRADIENTS_OF(f32, 0, F32) GRADIENTS_OF(f16, 0, F16) GRADIENTS_OF(bf16, 0, ALL_BF16)
GRADIENTS_OF(centered, 1, kind_of_rows(job)) /* of any kind */

/* A row of a head whose operands have several kinds: a job of its own, with its operands as float. */
static void gradients_of_row(const struct fn_backward_job *job, int64_t m, int64_t head, struct fn_sum_stack *sums, int merged,
                             struct fn_backward_part *part) {
    const struct backward_scratch room = backward_scratch(job, part->scratch);
    const int64_t n = job->hidden, i = m * job->heads + head;
    char *dx = job->dx ? job->dx + i * job->dx_stride : NULL;
    char *dresidual = job->dresidual ? job->dresidual + i * job->dresidual_stride : NULL;
    /* Whole units of it are read for the residual's gradient, so that it then lies in scratch. */
    char *const d = dx && !dresidual && job->dx_kind == F32 ? dx : (char *)room.d;
    const struct fn_backward_job one = {
        .dy = as_float(job->dy_kind, fn_row_of_dy(job, i), room.dy, n),
        .h = as_float(job->h_kind, fn_row_of_h(job, i), room.h, n),
        .d_total = as_float(job->d_total_kind, fn_row_of_d_total(job, i), room.d_total, n),
        .rstd = (const float *)job->rstd + i,
        .weight = job->weight,
        .dx = dx || dresidual ? d : NULL,
        .hidden = n,
        .heads = 1,
        .head = head,
        .gain_stride = job->gain_stride,
        .bias_sums = job->bias_sums,
        .center = job->center,
        .dy_kind = FN_F32,
        .h_kind = FN_F32,
        .d_total_kind = FN_F32,
        .dx_kind = FN_F32,
    };
    if (job->center) {
        gradients_centered(&one, 0, 1, sums, merged, part);
        if (part->pending) flush_centered(&one, part);
    } else {
        gradients_f32(&one, 0, 1, sums, merged, part);
        if (part->pending) flush_f32(&one, part);
    }
    if (dx && dx != d) from_float(job->dx_kind, (const float *)d, dx, n);
    if (dresidual) from_float(job->dresidual_kind, (const float *)d, dresidual, n);
}

/* Rows of several kinds. */
static void gradients_mixed(const struct fn_backward_job *job, int64_t begin, int64_t end, struct fn_sum_stack *sums,
                            int merged, struct fn_backward_part *part) {
    struct fn_backward_part alone = {.scratch = part->scratch}; /* nothing is pending after a row */
    for (int64_t m = begin; m < end; m++) {
        const int into = merged_into(part, m, begin, end, merged), count = sums ? sums->count : 0;
        for (int64_t head = 0; head < job->heads; head++) {
            if (sums) sums->count = count;
            gradients_of_row(job, m, head, sums, into, &alone);
        }
    }
}

static const struct {
    fn_backward_rows *rows;
    fn_backward_flush *flush;
} gradients[] = {
    [NONE] = {gradients_mixed, NULL}, /* nothing is pending after it */
    [F32] = {gradients_f32, flush_f32},
    [F16] = {gradients_f16, flush_f16},
    [ALL_BF16] = {gradients_bf16, flush_bf16},
};

void FN_OF(backward_rows)(const struct fn_backward_job *job, int64_t begin, int64_t end, struct fn_sum_stack *sums,
                          int merged, struct fn_backward_part *part) {
    if (job->wide) gradients_f64(job, begin, end, sums, merged, part);
    else if (job->center && kind_of_rows(job)) gradients_centered(job, begin, end, sums, merged, part);
    else gradients[kind_of_rows(job)].rows(job, begin, end, sums, merged, part);
}

void FN_OF(backward_flush)(const struct fn_backward_job *job, struct fn_backward_part *part) {
    if (part->pending && job->center) flush_centered(job, part);
    else if (part->pending) gradients[kind_of_rows(job)].flush(job, part);
    if (STREAMS && job->bypass_cache) u_stream_end();
}

/* Run once by each thread: the gains, in the order in which rows read them. */
void FN_OF(backward_begin)(const struct fn_backward_job *job, void *scratch) {
    const int by_parity = kind_of_rows(job) == BF16P;
    if (!job->weight) return;
    for (int64_t head = 0; head < job->heads; head++) {
        const void *weight = (const char *)job->weight + head * job->hidden * fn_element_size(job->weight_kind);
        float *const gains = backward_scratch(job, scratch).gains + head * job->gain_stride;
        if (job->wide) begin_f64(job, weight, gains_f64(job, scratch) + head * job->gain_stride);
        else if (by_parity) widen_by_parity(job->weight_kind, weight, (float)job->weight_offset, 1, job->hidden, gains);
        else widen_weight(job->weight_kind, weight, (float)job->weight_offset, 1, job->hidden, gains);
    }
}

/* A parameter's gradient from a row of sums for each head, rounded to the parameter's type. The sums have whole units. */
static void round_sums(const struct fn_backward_job *job, int kind, const char *sums, char *into) {
    const int64_t n = job->hidden;
    const int by_parity = kind_of_rows(job) == BF16P;
    for (int64_t head = 0; head < job->heads; head++, into += n * fn_element_size(kind)) {
        if (job->wide) narrow_from_f64(kind, (const double *)sums + head * job->gain_stride, into, n);
        else if (by_parity && kind == BF16) convert(F32, BF16P, (const float *)sums + head * job->gain_stride, into, n);
        else if (by_parity) take_in_order((const float *)sums + head * job->gain_stride, n, (float *)into);
        else from_float(kind, (const float *)sums + head * job->gain_stride, into, n);
    }
}

void FN_OF(backward_end)(const struct fn_backward_job *job, const void *sum) {
    const int64_t item = job->wide ? sizeof(double) : sizeof(float);
    if (job->dweight) round_sums(job, job->weight_kind, sum, job->dweight);
    if (job->dbias) round_sums(job, job->bias_kind, (const char *)sum + job->bias_sums * item, job->dbias);
}
