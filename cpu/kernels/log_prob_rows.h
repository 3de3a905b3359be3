/*
 * One row of log-probabilities, or of their gradient. log_prob_body.h includes this file once for each type: REAL is the type,
 * PLACE a whole number of its size, and OF gives a name its suffix; these end with the file.
 */

static REAL OF(log_of)(REAL x) {
    const PLACE beyond = (PLACE)OF(bits_of)(x) - OF(root), part = beyond & (((PLACE)1 << OF(mantissa)) - 1);
    const REAL k = (REAL)(beyond >> OF(mantissa)), f = OF(number_of)((PLACE)(part + OF(root))) - 1;
    const REAL s = f / (f + 2), half = f * f * (REAL)0.5, z = s * s;
    const REAL rest = OF(polynomial)(OF(logarithm), sizeof OF(logarithm) / sizeof(REAL), z, z * z) * z;
    return k * OF(ln2_high) + (f - (half - ((half + rest) * s + k * OF(ln2_low)))) + (x - x);
}

/* A row's logits, and the steps before the softmax; and what is done with it. */
struct OF(logits) {
    const struct fn_row_work *work;
    const char *x;
    int64_t kind;
    int divides;
    REAL temperature;
    struct fn_gate cap; /* whose limit is 0 where there is none */
};

/* Elements of a segment, in a thread's room: there is one for each of FN_ROOMS numbers. */
static REAL *OF(room)(const struct OF(logits) *row, int number) { return (REAL *)row->work->room + number * FN_SEGMENT; }

/* What the threads of a row share: these numbers, and then, for each segment, a place and two sums. */
enum { OF(AT_M), OF(AT_LOG_S), OF(AT_SUM) = OF(AT_LOG_S), OF(AT_PLACES) };
static REAL *OF(shared)(const struct OF(logits) *row) { return row->work->shared; }
static PLACE *OF(places)(const struct OF(logits) *row) { return (PLACE *)row->work->shared + OF(AT_PLACES); }
static REAL *OF(sums_of)(const struct fn_declared *job, const struct OF(logits) *row, int second) {
    return OF(shared)(row) + OF(AT_PLACES) + (1 + second) * fn_numbers_of_segments(job->hidden);
}

/*
 * n numbers from i on as the softmax takes them, at `t` or, where nothing is to be done, in the row itself; `other` has as much
 * room, and `slope` is NULL or receives the softcap's. Of kind BF16P they lie by parity.
 */
static const REAL *OF(numbers)(const struct OF(logits) *row, int64_t kind, int64_t i, int n, REAL *restrict t, REAL *restrict other,
                               REAL *slope) {
    const int all = (n + UNIT - 1) / UNIT * UNIT;
    const REAL *const as_it_is = (const REAL *)(const void *)row->x + i;
    if (fn_element_size(kind) == sizeof(REAL) && !row->cap.limit && !row->divides && (uintptr_t)row->x % sizeof(REAL) == 0)
        return as_it_is;
    OF(widen)(kind, row->x, i, n, row->cap.limit ? other : t);
    if (row->cap.limit) {
        OF(softcap)(&row->cap, other, n, t, slope);
        for (int j = n; j < all; j++) t[j] = 0;
        OF(round_tile)(kind, t, all);
    }
    if (row->divides)
        for (int j = 0; j < n; j++) t[j] /= row->temperature;
    return t;
}

/* The places of the greatest numbers of these segments in their order, or of several in the first one; some NaN are not found. */
static void OF(find_greatest)(const struct OF(logits) *row) {
    const int64_t begin = row->work->begin, end = row->work->end;
    PLACE *const places = OF(places)(row) + begin / FN_SEGMENT, most;
    /* Division by a number greater than 0 keeps the order. */
    const int in_order = !row->divides || (row->temperature > 0 && row->temperature < INFINITY);
    const int known = in_order && !row->cap.limit &&
                      OF(greatest_in_memory)(row->kind, row->x + begin * fn_element_size(row->kind), end - begin, &most);
    if (known) {
        const REAL m = OF(of_order)(most);
        most = OF(order)(row->divides ? m / row->temperature : m);
    }
    for (int64_t i = begin, segment = 0; i < end; i += FN_SEGMENT, segment++) {
        const int n = end - i < FN_SEGMENT ? (int)(end - i) : FN_SEGMENT;
        if (known) places[segment] = segment ? LEAST_PLACE : most;
        else places[segment] = OF(greatest)(OF(numbers)(row, row->kind, i, n, OF(room)(row, 0), OF(room)(row, 1), NULL), n, LEAST_PLACE);
    }
}

static REAL OF(greatest_of)(const struct OF(logits) *row, int64_t segments) {
    PLACE most = LEAST_PLACE;
    for (int64_t k = 0; k < segments; k++) most = OF(places)(row)[k] > most ? OF(places)(row)[k] : most;
    return OF(of_order)(most);
}

static int OF(has_nan)(const struct OF(logits) *row, int64_t n) {
    for (int64_t i = 0; i < n; i += FN_SEGMENT) {
        const int count = n - i < FN_SEGMENT ? (int)(n - i) : FN_SEGMENT;
        const REAL *const v = OF(numbers)(row, row->kind, i, count, OF(room)(row, 0), OF(room)(row, 1), NULL);
        for (int j = 0; j < count; j++)
            if (v[j] != v[j]) return 1;
    }
    return 0;
}

/* The sums of segments, halved as the specification's tree. */
static REAL OF(sum_of_sums)(REAL *sums, int64_t count) {
    int64_t width = 1;
    while (width < count) width *= 2;
    for (int64_t i = count; i < width; i++) sums[i] = 0;
    while (width > 1) {
        width /= 2;
        for (int64_t i = 0; i < width; i++) sums[i] += sums[i + width];
    }
    return sums[0];
}

/* The sums of the exponentials of each segment; and, where `of_z` has room, those of z. */
static void OF(sums_of_exponentials)(const struct OF(logits) *row, REAL m, REAL *sums, REAL *of_z) {
    REAL *const t = OF(room)(row, 0), *const restrict e = OF(room)(row, 1), *const restrict z = OF(room)(row, 2);
    const struct fn_row_work *const work = row->work;
    for (int64_t i = work->begin; i < work->end; i += FN_SEGMENT) {
        const int count = work->end - i < FN_SEGMENT ? (int)(work->end - i) : FN_SEGMENT;
        const int by_parity = ALL_BF16 == BF16P && row->kind == BF16 && count == FN_SEGMENT;
        const REAL *const v = OF(numbers)(row, by_parity ? BF16P : row->kind, i, count, t, e, NULL);
        OF(exponentials)(v, m, count, e);
        if (work->next) fetch_row(work->next, i * fn_element_size(row->kind), count * fn_element_size(row->kind));
        for (int j = count; j < FN_SEGMENT; j++) e[j] = 0;
        if (of_z) {
            FN_VECTORS()
            for (int j = 0; j < count; j++) z[j] = OF(chosen)(e[j] == 0, 0, e[j] * (v[j] - m));
            for (int j = count; j < FN_SEGMENT; j++) z[j] = 0;
            of_z[i / FN_SEGMENT] = OF(sum_segment)(by_parity, z);
        }
        sums[i / FN_SEGMENT] = OF(sum_segment)(by_parity, e);
    }
}

/* Of a part of a row, whose m is given: the sums of its segments, which other parts take. */
static void OF(log_prob_sums)(const struct fn_declared *job, const struct OF(logits) *row, int64_t at, char *out) {
    const struct fn_operand *o = job->operand;
    const int64_t first = at * ((job->hidden + FN_SEGMENT - 1) / FN_SEGMENT);
    REAL *const of_z = o[FN_SUMS_ENTROPY].kind == NONE ? NULL : (REAL *)o[FN_SUMS_ENTROPY].address + first;
    const REAL m = ((const REAL *)o[FN_SUMS_M].address)[at];
    OF(sums_of_exponentials)(row, m, (REAL *)out + first, of_z);
}

/* The numbers of a row, from the sums of its segments. */
static void OF(log_prob_numbers)(const struct fn_declared *job, const struct OF(logits) *row, int64_t at, char *out) {
    const struct fn_operand *o = job->operand;
    const int64_t segments = (job->hidden + FN_SEGMENT - 1) / FN_SEGMENT;
    REAL m = OF(greatest_of)(row, segments);
    const REAL s = OF(sum_of_sums)(OF(sums_of)(job, row, 0), segments), log_s = OF(log_of)(s);
    if (s != s && OF(has_nan)(row, job->hidden)) m = (REAL)NAN;
    OF(shared)(row)[OF(AT_M)] = m;
    OF(shared)(row)[OF(AT_LOG_S)] = log_s;
    if (o[FN_LOG_PROB_M].kind) {
        ((REAL *)o[FN_LOG_PROB_M].address)[at] = m;
        ((REAL *)o[FN_LOG_PROB_S].address)[at] = s;
    }
    if (job->operation == FN_LOGSUMEXP) {
        ((REAL *)out)[at] = m == INFINITY || m == -INFINITY ? m : m + log_s;
    } else if (job->operation != FN_LOG_SOFTMAX) {
        const int64_t ids = fn_ids_of_row(job);
        int counted = 0;
        for (int64_t k = at * ids; k < (at + 1) * ids; k++) {
            const int64_t id = fn_id_at(job, k);
            const int ignored = fn_is_ignored(job, id), there = id >= 0 && id < job->hidden;
            REAL lp = ignored ? 0 : (REAL)NAN;
            if (!ignored && there)
                lp = (OF(numbers)(row, row->kind, id, 1, OF(room)(row, 0), OF(room)(row, 1), NULL)[0] - m) - log_s;
            counted |= !ignored;
            ((REAL *)out)[k] = lp;
        }
        if (job->operation == FN_SELECTED_AND_ENTROPY)
            ((REAL *)o[FN_LOG_PROB_ENTROPY].address)[at] =
                counted ? log_s - OF(sum_of_sums)(OF(sums_of)(job, row, 1), segments) / s : 0;
    }
}

static void OF(log_prob_forward)(const struct fn_declared *job, const struct OF(logits) *row, int64_t at, char *out) {
    const struct fn_row_work *const work = row->work;
    if (work->steps & FN_FIND_GREATEST) OF(find_greatest)(row);
    if (work->steps & FN_SUM_SEGMENTS) {
        const REAL m = OF(greatest_of)(row, (job->hidden + FN_SEGMENT - 1) / FN_SEGMENT);
        REAL *const of_z = job->operation == FN_SELECTED_AND_ENTROPY ? OF(sums_of)(job, row, 1) : NULL;
        OF(sums_of_exponentials)(row, m, OF(sums_of)(job, row, 0), of_z);
    }
    if (work->steps & FN_FIND_NUMBERS) OF(log_prob_numbers)(job, row, at, out);
    if (!(work->steps & FN_WRITE_ROW)) return;
    REAL *const t = OF(room)(row, 0), *const restrict y = OF(room)(row, 1);
    const REAL m = OF(shared)(row)[OF(AT_M)], log_s = OF(shared)(row)[OF(AT_LOG_S)];
    for (int64_t i = work->begin; i < work->end; i += FN_SEGMENT) {
        const int n = work->end - i < FN_SEGMENT ? (int)(work->end - i) : FN_SEGMENT;
        const REAL *const v = OF(numbers)(row, row->kind, i, n, t, y, NULL);
        FN_VECTORS()
        for (int j = 0; j < n; j++) y[j] = (v[j] - m) - log_s;
        OF(narrow)(job->operand[FN_LOG_PROB_OUT].kind, y, n, out, i);
    }
}

/* The gradient of the log-probability of id `id`; 0 where it is ignored. */
static REAL OF(d_of)(const struct fn_declared *job, int64_t k, int64_t id) {
    if (fn_is_ignored(job, id)) return 0;
    return id >= 0 && id < (job->size ? job->size : job->hidden) ? (REAL)number_at(&job->operand[FN_LOG_PROB_D], k) : (REAL)NAN;
}

/* a of the element `id`, whose probability is p. */
static REAL OF(a_of)(const struct fn_declared *job, int64_t at, int64_t id, REAL p) {
    const int64_t ids = fn_ids_of_row(job);
    REAL own = 0, others = 0;
    for (int64_t k = at * ids; k < (at + 1) * ids; k++) {
        const int64_t other = fn_id_at(job, k);
        const REAL d = OF(d_of)(job, k, other);
        if (other == id) own += d;
        else others += d;
    }
    return own * (1 - p) + others * (0 - p);
}

/* Whether a row of ids has one that is not ignored; and rows of log_softmax. */
static int OF(is_counted)(const struct fn_declared *job, int64_t at) {
    const int64_t ids = fn_ids_of_row(job);
    int counted = job->operation < FN_SELECTED;
    for (int64_t k = at * ids; k < (at + 1) * ids; k++) counted |= !fn_is_ignored(job, fn_id_at(job, k));
    return counted;
}

/* What the gradients of all elements take: the sum of d. */
static REAL OF(sum_of_d)(const struct fn_declared *job, const struct OF(logits) *row, int64_t at) {
    const struct fn_operand *o = job->operand;
    const int64_t ids = fn_ids_of_row(job);
    REAL sum = 0;
    if (job->operation >= FN_SELECTED) {
        for (int64_t k = at * ids; k < (at + 1) * ids; k++) sum += OF(d_of)(job, k, fn_id_at(job, k));
        return sum;
    }
    if (job->operation == FN_LOGSUMEXP) return (REAL)number_at(&o[FN_LOG_PROB_D], at);
    if (o[FN_LOG_PROB_D_ENTROPY].kind != NONE) return (REAL)number_at(&o[FN_LOG_PROB_D_ENTROPY], at);
    return OF(sum_of_sums)(OF(sums_of)(job, row, 0), (job->hidden + FN_SEGMENT - 1) / FN_SEGMENT);
}

static void OF(log_prob_backward)(const struct fn_declared *job, const struct OF(logits) *row, int64_t at, char *dx, const char *d) {
    const struct fn_operand *o = job->operand;
    const struct fn_row_work *const work = row->work;
    REAL *const t = OF(room)(row, 0), *const restrict e = OF(room)(row, 1), *const restrict dt = OF(room)(row, 2);
    REAL *const restrict slope = OF(room)(row, 3);
    const int64_t ids = fn_ids_of_row(job);
    const int selects = job->operation >= FN_SELECTED, whole = job->operation == FN_LOG_SOFTMAX;
    for (int64_t i = work->begin; work->steps & FN_SUM_SEGMENTS && i < work->end; i += FN_SEGMENT) {
        const int n = work->end - i < FN_SEGMENT ? (int)(work->end - i) : FN_SEGMENT;
        OF(widen)(o[FN_LOG_PROB_D].kind, d, i, n, dt);
        for (int j = n; j < FN_SEGMENT; j++) dt[j] = 0;
        OF(sums_of)(job, row, 0)[i / FN_SEGMENT] = OF(sum_segment)(0, dt);
    }
    if (work->steps & FN_FIND_NUMBERS) OF(shared)(row)[OF(AT_SUM)] = OF(sum_of_d)(job, row, at);
    if (!(work->steps & FN_WRITE_ROW)) return;
    const REAL m = ((const REAL *)o[FN_LOG_PROB_KEPT_M].address)[at], s = ((const REAL *)o[FN_LOG_PROB_KEPT_S].address)[at];
    const REAL sum = OF(shared)(row)[OF(AT_SUM)], temperature = row->temperature;
    const int entropy = selects && o[FN_LOG_PROB_D_ENTROPY].kind != NONE, counted = OF(is_counted)(job, at);
    const REAL dh = entropy ? (REAL)number_at(&o[FN_LOG_PROB_D_ENTROPY], at) : 0, log_s = entropy ? OF(log_of)(s) : 0;
    const REAL h = entropy ? ((const REAL *)o[FN_LOG_PROB_KEPT_ENTROPY].address)[at] : 0;
    for (int64_t i = work->begin; i < work->end; i += FN_SEGMENT) {
        const int n = work->end - i < FN_SEGMENT ? (int)(work->end - i) : FN_SEGMENT;
        if (!counted) {
            memset(dt, 0, FN_SEGMENT * sizeof *dt);
            OF(narrow)(o[FN_DLOGITS].kind, dt, n, dx, i);
            continue;
        }
        const REAL *const v = OF(numbers)(row, row->kind, i, n, t, e, slope);
        OF(exponentials)(v, m, n, e);
        if (whole) {
            OF(widen)(o[FN_LOG_PROB_D].kind, d, i, n, dt);
            FN_VECTORS()
            for (int j = 0; j < n; j++) dt[j] -= e[j] / s * sum;
        } else if (!selects) {
            FN_VECTORS()
            for (int j = 0; j < n; j++) dt[j] = sum * (e[j] / s);
        } else {
            FN_VECTORS()
            for (int j = 0; j < n; j++) dt[j] = sum * (0 - e[j] / s);
            for (int64_t k = at * ids; k < (at + 1) * ids; k++) {
                const int64_t id = fn_id_at(job, k), begin = job->first + i;
                if (id >= begin && id < begin + n) dt[id - begin] = OF(a_of)(job, at, id, e[id - begin] / s);
            }
        }
        if (entropy) {
            FN_VECTORS()
            for (int j = 0; j < n; j++) {
                const REAL p = e[j] / s;
                dt[j] -= OF(chosen)(p == 0, 0, dh * (p * (((v[j] - m) - log_s) + h)));
            }
        }
        if (row->divides)
            for (int j = 0; j < n; j++) dt[j] /= temperature;
        if (row->cap.limit) {
            const int all = (n + UNIT - 1) / UNIT * UNIT;
            for (int j = n; j < all; j++) dt[j] = 0;
            OF(round_tile)(row->kind, dt, all);
            for (int j = 0; j < n; j++) dt[j] *= slope[j];
        }
        OF(narrow)(o[FN_DLOGITS].kind, dt, n, dx, i);
    }
}

static void OF(log_prob_row)(const struct fn_declared *job, int64_t at, const char *x, char *out, const char *d,
                             const struct fn_row_work *work) {
    const struct fn_operand *o = job->operand;
    struct OF(logits) row = {.work = work, .x = x, .kind = o[FN_LOGITS].kind,
                             .cap = {.limit = job->flag[FN_LOG_PROB_SOFTCAP].number, .between = NONE}};
    row.divides = o[FN_LOG_PROB_TEMPERATURE].kind != NONE;
    if (row.divides) row.temperature = (REAL)number_at(&o[FN_LOG_PROB_TEMPERATURE], at);
    if (job->operation == FN_LOGARITHM) {
        for (int64_t i = 0; i < job->hidden; i++) ((REAL *)out)[at * job->hidden + i] = OF(log_of)(((const REAL *)x)[i]);
    } else if (job->operation == FN_SUMS) {
        OF(log_prob_sums)(job, &row, at, out);
    } else if (job->pass == FN_BACKWARD) {
        OF(log_prob_backward)(job, &row, at, out, d);
    } else {
        OF(log_prob_forward)(job, &row, at, out);
    }
}
#undef REAL
#undef OF
#undef PLACE
#undef LEAST_PLACE
