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

/* A row's logits, and the steps before the softmax. */
struct OF(logits) {
    const char *x, *next; /* next: the row after it, which is fetched, or NULL */
    int64_t kind;
    int divides;
    REAL temperature;
    struct fn_gate cap; /* whose limit is 0 where there is none */
};

/*
 * n numbers from i on as the softmax takes them, at `t` or, where nothing is to be done, in the row itself; `slope` is NULL or
 * receives the softcap's. Of kind BF16P they lie by parity.
 */
static const REAL *OF(numbers)(const struct OF(logits) *row, int64_t kind, int64_t i, int n, REAL *t, REAL *slope) {
    const int all = (n + UNIT - 1) / UNIT * UNIT;
    const REAL *const as_it_is = (const REAL *)(const void *)row->x + i;
    if (fn_element_size(kind) == sizeof(REAL) && !row->cap.limit && !row->divides && (uintptr_t)row->x % sizeof(REAL) == 0)
        return as_it_is;
    OF(widen)(kind, row->x, i, n, t);
    if (row->cap.limit) {
        REAL values[FN_SEGMENT];
        OF(softcap)(&row->cap, t, n, values, slope);
        for (int j = n; j < all; j++) values[j] = 0;
        OF(round_tile)(kind, values, all);
        memcpy(t, values, (size_t)n * sizeof *t);
    }
    if (row->divides)
        for (int j = 0; j < n; j++) t[j] /= row->temperature;
    return t;
}

/* The greatest number of a row; some NaN are not found. */
static REAL OF(greatest_of)(const struct OF(logits) *row, int64_t n) {
    REAL t[FN_SEGMENT];
    PLACE most = LEAST_PLACE;
    /* Division by a number greater than 0 keeps the order. */
    const int in_order = !row->divides || (row->temperature > 0 && row->temperature < INFINITY);
    if (in_order && !row->cap.limit && OF(greatest_in_memory)(row->kind, row->x, n, &most)) {
        const REAL m = OF(of_order)(most);
        return row->divides ? m / row->temperature : m;
    }
    for (int64_t i = 0; i < n; i += FN_SEGMENT) {
        const int count = n - i < FN_SEGMENT ? (int)(n - i) : FN_SEGMENT;
        most = OF(greatest)(OF(numbers)(row, row->kind, i, count, t, NULL), count, most);
    }
    return OF(of_order)(most);
}

static int OF(has_nan)(const struct OF(logits) *row, int64_t n) {
    REAL t[FN_SEGMENT];
    for (int64_t i = 0; i < n; i += FN_SEGMENT) {
        const int count = n - i < FN_SEGMENT ? (int)(n - i) : FN_SEGMENT;
        const REAL *const v = OF(numbers)(row, row->kind, i, count, t, NULL);
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

/* The sums of the exponentials of each segment; and, where `of_z` has room, those of z. Returns how many there are. */
static int64_t OF(sums_of_exponentials)(const struct OF(logits) *row, int64_t n, REAL m, REAL *sums, REAL *of_z) {
    _Alignas(64) REAL t[FN_SEGMENT], e[FN_SEGMENT], z[FN_SEGMENT];
    int64_t segments = 0;
    for (int64_t i = 0; i < n; i += FN_SEGMENT, segments++) {
        const int count = n - i < FN_SEGMENT ? (int)(n - i) : FN_SEGMENT;
        const int by_parity = ALL_BF16 == BF16P && row->kind == BF16 && count == FN_SEGMENT;
        const REAL *const v = OF(numbers)(row, by_parity ? BF16P : row->kind, i, count, t, NULL);
        OF(exponentials)(v, m, count, e);
        if (row->next) fetch_row(row->next, i * fn_element_size(row->kind), count * fn_element_size(row->kind));
        for (int j = count; j < FN_SEGMENT; j++) e[j] = 0;
        if (of_z) {
            FN_VECTORS()
            for (int j = 0; j < count; j++) z[j] = OF(chosen)(e[j] == 0, 0, e[j] * (v[j] - m));
            for (int j = count; j < FN_SEGMENT; j++) z[j] = 0;
            of_z[segments] = OF(sum_segment)(by_parity, z);
        }
        sums[segments] = OF(sum_segment)(by_parity, e);
    }
    return segments;
}

/* Of a part of a row, whose m is given: the sums of its segments, which other parts take. */
static void OF(log_prob_sums)(const struct fn_declared *job, const struct OF(logits) *row, int64_t at, char *out) {
    const struct fn_operand *o = job->operand;
    const int64_t first = at * ((job->hidden + FN_SEGMENT - 1) / FN_SEGMENT);
    REAL *const of_z = o[FN_LOG_PROB_H].kind == NONE ? NULL : (REAL *)o[FN_LOG_PROB_H].address + first;
    const REAL m = ((const REAL *)o[FN_LOG_PROB_M].address)[at];
    OF(sums_of_exponentials)(row, job->hidden, m, (REAL *)out + first, of_z);
}

static void OF(log_prob_forward)(const struct fn_declared *job, const struct OF(logits) *row, int64_t at, char *out, REAL *sums) {
    const struct fn_operand *o = job->operand;
    REAL t[FN_SEGMENT];
    REAL *const of_z = job->operation == FN_SELECTED_AND_ENTROPY ? sums + fn_declared_sums(job->hidden) : NULL;
    REAL m = OF(greatest_of)(row, job->hidden);
    const int64_t segments = OF(sums_of_exponentials)(row, job->hidden, m, sums, of_z);
    const REAL s = OF(sum_of_sums)(sums, segments), log_s = OF(log_of)(s);
    if (s != s && OF(has_nan)(row, job->hidden)) m = (REAL)NAN;
    if (o[FN_LOG_PROB_M].kind) {
        ((REAL *)o[FN_LOG_PROB_M].address)[at] = m;
        ((REAL *)o[FN_LOG_PROB_S].address)[at] = s;
    }
    if (job->operation == FN_LOGSUMEXP) {
        ((REAL *)out)[at] = m == INFINITY || m == -INFINITY ? m : m + log_s;
    } else if (job->operation == FN_LOG_SOFTMAX) {
        for (int64_t i = 0; i < job->hidden; i += FN_SEGMENT) {
            const int n = job->hidden - i < FN_SEGMENT ? (int)(job->hidden - i) : FN_SEGMENT;
            const REAL *const v = OF(numbers)(row, row->kind, i, n, t, NULL);
            REAL y[FN_SEGMENT];
            FN_VECTORS()
            for (int j = 0; j < n; j++) y[j] = (v[j] - m) - log_s;
            OF(narrow)(o[FN_LOG_PROB_OUT].kind, y, n, out, i);
        }
    } else {
        int counted = 0;
        for (int64_t k = at * job->count; k < (at + 1) * job->count; k++) {
            const int64_t id = fn_id_at(job, k);
            const int ignored = fn_is_ignored(job, id), there = id >= 0 && id < job->hidden;
            REAL lp = ignored ? 0 : (REAL)NAN;
            if (!ignored && there) lp = (OF(numbers)(row, row->kind, id, 1, t, NULL)[0] - m) - log_s;
            counted |= !ignored;
            ((REAL *)out)[k] = lp;
        }
        if (of_z) ((REAL *)o[FN_LOG_PROB_H].address)[at] = counted ? log_s - OF(sum_of_sums)(of_z, segments) / s : 0;
    }
}

/* The gradient of the log-probability of id `id`; 0 where it is ignored. */
static REAL OF(d_of)(const struct fn_declared *job, int64_t k, int64_t id) {
    if (fn_is_ignored(job, id)) return 0;
    return id >= 0 && id < (job->size ? job->size : job->hidden) ? (REAL)number_at(&job->operand[FN_LOG_PROB_D], k) : (REAL)NAN;
}

/* a of the element `id`, whose probability is p. */
static REAL OF(a_of)(const struct fn_declared *job, int64_t at, int64_t id, REAL p) {
    REAL own = 0, others = 0;
    for (int64_t k = at * job->count; k < (at + 1) * job->count; k++) {
        const int64_t other = fn_id_at(job, k);
        const REAL d = OF(d_of)(job, k, other);
        if (other == id) own += d;
        else others += d;
    }
    return own * (1 - p) + others * (0 - p);
}

static void OF(log_prob_backward)(const struct fn_declared *job, const struct OF(logits) *row, int64_t at, char *dx,
                                  const char *d, REAL *sums) {
    const struct fn_operand *o = job->operand;
    _Alignas(64) REAL t[FN_SEGMENT], e[FN_SEGMENT], slope[FN_SEGMENT], dt[FN_SEGMENT];
    const REAL m = ((const REAL *)o[FN_LOG_PROB_M].address)[at], s = ((const REAL *)o[FN_LOG_PROB_S].address)[at];
    const int selects = job->operation >= FN_SELECTED, whole = job->operation == FN_LOG_SOFTMAX;
    const int entropy = selects && o[FN_LOG_PROB_DH].kind != NONE;
    const REAL dh = entropy ? (REAL)number_at(&o[FN_LOG_PROB_DH], at) : 0, log_s = entropy ? OF(log_of)(s) : 0;
    const REAL h = entropy ? ((const REAL *)o[FN_LOG_PROB_H].address)[at] : 0;
    REAL sum = 0;
    int counted = !selects;
    if (selects) {
        for (int64_t k = at * job->count; k < (at + 1) * job->count; k++) {
            const int64_t id = fn_id_at(job, k);
            sum += OF(d_of)(job, k, id);
            counted |= !fn_is_ignored(job, id);
        }
    } else if (whole && o[FN_LOG_PROB_DH].kind != NONE) {
        sum = (REAL)number_at(&o[FN_LOG_PROB_DH], at);
    } else if (whole) {
        int64_t segments = 0;
        for (int64_t i = 0; i < job->hidden; i += FN_SEGMENT, segments++) {
            const int n = job->hidden - i < FN_SEGMENT ? (int)(job->hidden - i) : FN_SEGMENT;
            OF(widen)(o[FN_LOG_PROB_D].kind, d, i, n, dt);
            for (int j = n; j < FN_SEGMENT; j++) dt[j] = 0;
            sums[segments] = OF(sum_segment)(0, dt);
        }
        sum = OF(sum_of_sums)(sums, segments);
    } else {
        sum = (REAL)number_at(&o[FN_LOG_PROB_D], at);
    }
    for (int64_t i = 0; i < job->hidden; i += FN_SEGMENT) {
        const int n = job->hidden - i < FN_SEGMENT ? (int)(job->hidden - i) : FN_SEGMENT;
        if (!counted) {
            memset(dt, 0, sizeof dt);
            OF(narrow)(o[FN_LOG_PROB_OUT].kind, dt, n, dx, i);
            continue;
        }
        const REAL *const v = OF(numbers)(row, row->kind, i, n, t, slope);
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
            for (int64_t k = at * job->count; k < (at + 1) * job->count; k++) {
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
            for (int j = 0; j < n; j++) dt[j] /= row->temperature;
        if (row->cap.limit) {
            const int all = (n + UNIT - 1) / UNIT * UNIT;
            for (int j = n; j < all; j++) dt[j] = 0;
            OF(round_tile)(row->kind, dt, all);
            for (int j = 0; j < n; j++) dt[j] *= slope[j];
        }
        OF(narrow)(o[FN_LOG_PROB_OUT].kind, dt, n, dx, i);
    }
}

static void OF(log_prob_row)(const struct fn_declared *job, int64_t at, const char *x, char *out, const char *d, void *sums,
                             const char *next) {
    const struct fn_operand *o = job->operand;
    struct OF(logits) row = {.x = x, .next = next, .kind = o[FN_LOGITS].kind, .cap = {.limit = job->number[FN_LOG_PROB_SOFTCAP], .between = NONE}};
    row.divides = o[FN_LOG_PROB_TEMPERATURE].kind != NONE;
    if (row.divides) row.temperature = (REAL)number_at(&o[FN_LOG_PROB_TEMPERATURE], at);
    if (job->operation == FN_LOGARITHM) {
        for (int64_t i = 0; i < job->hidden; i++) ((REAL *)out)[at * job->hidden + i] = OF(log_of)(((const REAL *)x)[i]);
    } else if (job->operation == FN_SUMS) {
        OF(log_prob_sums)(job, &row, at, out);
    } else if (job->pass == FN_BACKWARD) {
        OF(log_prob_backward)(job, &row, at, out, d, sums);
    } else {
        OF(log_prob_forward)(job, &row, at, out, sums);
    }
}
#undef REAL
#undef OF
#undef PLACE
#undef LEAST_PLACE
