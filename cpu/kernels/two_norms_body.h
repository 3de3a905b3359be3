/*
 * A norm, an addition and a norm in one call, over the operations that kernel_body.h lists; included by it. x, the
 * residual and the outputs are of one kind. A row takes three passes: the first sums the squares of x, the second
 * normalises x, adds the residual and sums the squares of the sum, the third multiplies the sum. The rows between the
 * first norm and the addition stay in the nearest cache; a chain of both calls stores and reads whole rows of them.
 */

enum { ALONE, TOGETHER }; /* whether passes of other rows are made together with a row's second pass */
enum { MAY_STREAM = 1 }; /* whether a unit of residual_out may bypass the caches */

/* The operands of one row's second pass. */
struct middle {
    float rstd;
    const float *gain;
    const char *x; /* what follows may overlap it: a call in place */
    const void *residual;
    void *residual_out, *stream; /* stream: where residual_out is stored a second time, bypassing the caches; or NULL */
    const char *next_x; /* the next row, whose first pass is made meanwhile; or NULL */
    const struct scale *previous; /* the row before, whose third pass is made meanwhile; or NULL */
    float *sums, *next_sums; /* one per segment, of this row's sum and of the next row's x */
    int fetches; /* whether the operands are fetched */
    int64_t ahead; /* as in struct row */
};

/* A unit of x, normalised. */
FN_INLINE U normed(int kind, int norm, const struct middle *row, int64_t i, int n) {
    U y = u_mul(u_load(kind, row->x, i, n), u_set1(row->rstd));
    if (norm != NONE) y = u_round(norm, y);
    return u_mul(y, u_load(F32, row->gain, i, kind == BF16P ? UNIT : n)); /* stored by parity, see scale_unit */
}

/* Adds the residual to a unit, and stores the sum. */
FN_INLINE U add_to_residual(int kind, int stream, const struct middle *row, int64_t i, int n, U y) {
    U h = u_store(kind, row->residual_out, i, n, u_add(y, u_read(kind, row->ahead, row->residual, i, n)));
    if (STREAMS && stream && row->stream) u_stream(kind, row->stream, i, n, h);
    return h;
}

/* The square of a unit of the second pass. */
FN_INLINE U add_normed_unit(int kind, int norm, int passed, int stream, const struct middle *row, int64_t i, int n) {
    U y = normed(kind, norm, row, i, n);
    if (passed != F32) y = u_round(passed, y);
    return u_square(add_to_residual(kind, stream, row, i, n, y));
}

/*
 * Eight units of the second pass. Rounded values are stored and loaded, although they are in registers: from a load to
 * the second rounding a unit takes so many steps that the processor's queues hold only two or three units, which wait
 * for each other. In two halves a row took a tenth less time.
 */
FN_INLINE void add_normed_eight(int kind, int norm, int passed, int stream, const struct middle *row, int64_t i) {
    if (passed == F32) {
        for (int k = 0; k < 8; k++)
            add_normed_unit(kind, norm, passed, stream, row, u_index(i + k * UNIT), UNIT);
        return;
    }
    _Alignas(64) uint16_t rounded[FN_SEGMENT];
    for (int k = 0; k < 8; k++)
        u_store(kind, rounded, k * UNIT, UNIT, normed(kind, norm, row, u_index(i + k * UNIT), UNIT));
    for (int k = 0; k < 8; k++)
        add_to_residual(kind, stream, row, u_index(i + k * UNIT), UNIT, u_load(kind, rounded, k * UNIT, UNIT));
}

/* Fetches eight units into the second cache: with three rows under way, memory's prefetchers alone left a call half again as long. */
FN_INLINE void fetch_eight(int kind, const void *row, int64_t i) {
    const int size = kind == F32 ? 4 : 2;
    for (int k = 0; k < 8 * UNIT * size; k += FN_ALIGNMENT) FN_PREFETCH_2((const char *)row + i * size + k);
}

/* The sum of eight squares that are 128 elements apart, of a row that is in memory as it is normalised. */
FN_INLINE U column_of(int kind, const void *h, int64_t i) {
#define SQUARE(k) u_square(u_load(kind, h, u_index(i + (k)), UNIT))
    return SUM_OF_EIGHT(SQUARE, 128);
#undef SQUARE
}

/* The last n < FN_SEGMENT elements of the passes that are made together; `s` is their place among the sums. */
FN_INLINE void add_normed_rest(int kind, int norm, int passed, const struct middle *row, int64_t begin, int64_t n,
                               int64_t s) {
    _Alignas(64) float squares[FN_SEGMENT], next_squares[FN_SEGMENT];
    int64_t width = UNIT, i = 0;
    while (width < n) width *= 2;
    for (; i < width; i += UNIT) {
        const int left = n - i < UNIT ? (int)(n - i) : UNIT;
        U square = u_set1(0), next_square = square;
        if (left > 0) {
            square = add_normed_unit(kind, norm, passed, MAY_STREAM, row, begin + i, left);
            if (row->next_x) next_square = u_square(u_load(kind, row->next_x, begin + i, left));
            if (row->previous)
                scale_unit(kind, norm, F32, NONE, kind, row->previous, begin + i, left,
                           row->previous->bypass_cache);
        }
        u_store(F32, squares, i, UNIT, square);
        u_store(F32, next_squares, i, UNIT, next_square);
    }
    row->sums[s] = u_halve(kind == BF16P, sum_units(squares, width));
    if (row->next_x) row->next_sums[s] = u_halve(kind == BF16P, sum_units(next_squares, width));
}

/* The first pass of a row: the sum of the squares of x, which is fetched or not. `sums` has room for one per segment. */
FN_INLINE float sum_of_x(int kind, const void *x, int64_t hidden, float *sums, int fetches) {
    _Alignas(64) float columns[128];
    int64_t begin = 0, s = 0;
    for (; begin + FN_SEGMENT <= hidden; begin += FN_SEGMENT, s++) {
        FN_ROLLED
        for (int c = 0; c < 128; c += UNIT) {
            if (fetches) fetch_eight(kind, x, begin + 8 * c + FN_AHEAD_OF_PASSES);
            u_store(F32, columns, c, UNIT, column_of(kind, x, begin + c));
        }
        sums[s] = u_halve(kind == BF16P, sum_units(columns, 128));
    }
    const struct row row = {.x = x};
    if (begin < hidden)
        sums[s++] = u_halve(kind == BF16P, sum_short_segment(kind, NONE, UNROUNDED, &row, begin, hidden - begin));
    return halve_sums(sums, s);
}

typedef void add_normed_rest_fn(const struct middle *, int64_t, int64_t, int64_t);

/* The second pass of a row, with the passes of other rows that are made together with it. */
FN_INLINE void add_normed_row(int kind, int norm, int passed, int together, const struct middle *given, int64_t hidden,
                              add_normed_rest_fn *rest) {
    _Alignas(64) float columns[128], next_columns[128];
    /* No store can alias a copy that no other function gets. */
    const struct middle copy = *given, *row = &copy;
    const struct scale none = {0}, previous = row->previous ? *row->previous : none;
    int64_t begin = 0, s = 0;
    const int by_column = kind == F32 && !together; /* as sum_segments_in_cache does, for its reason */
    for (; begin + FN_SEGMENT <= hidden; begin += FN_SEGMENT, s++) {
        FN_ROLLED
        for (int c = 0; by_column && c < 128; c += UNIT) {
            if (row->fetches) fetch_eight(kind, row->residual, begin + 8 * c + FN_AHEAD_OF_PASSES);
#define SQUARE(k) add_normed_unit(kind, norm, passed, MAY_STREAM, row, u_index(begin + c + (k)), UNIT)
            u_store(F32, columns, c, UNIT, SUM_OF_EIGHT(SQUARE, 128));
#undef SQUARE
        }
        FN_ROLLED
        for (int c = 0; !by_column && c < 128; c += UNIT) {
            if (together && row->fetches) fetch_eight(kind, row->residual, begin + 8 * c + FN_AHEAD_OF_PASSES);
            if (together && row->fetches && row->next_x) fetch_eight(kind, row->next_x, begin + 8 * c + FN_AHEAD_OF_PASSES);
            add_normed_eight(kind, norm, passed, together, row, begin + 8 * c);
            if (together && row->next_x) u_store(F32, next_columns, c, UNIT, column_of(kind, row->next_x, begin + c));
            if (together && row->previous) scale_eight(kind, norm, NONE, &previous, begin + 8 * c);
        }
        FN_ROLLED
        for (int c = 0; !by_column && c < 128; c += UNIT)
            u_store(F32, columns, c, UNIT, column_of(kind, row->residual_out, begin + c));
        row->sums[s] = u_halve(kind == BF16P, sum_units(columns, 128));
        if (together && row->next_x) row->next_sums[s] = u_halve(kind == BF16P, sum_units(next_columns, 128));
    }
    if (begin < hidden) rest(given, begin, hidden - begin, s);
}

/* x's kind, the kind that each norm is rounded to, and the kind that passes between the norms; `fn` as in kernel_tables.h. */
#define TWO_NORMS_OF(fn, kind) fn(kind, NONE, kind) fn(kind, NONE, F32) fn(kind, kind, kind)
#if ROW_BY_ROW
#define TWO_NORMS(fn)
#else
#define TWO_NORMS(fn) fn(F32, NONE, F32) TWO_NORMS_OF(fn, F16) TWO_NORMS_OF(fn, ALL_BF16)
#endif

/* The passes of one combination. They are functions of their own: inlined into one, they made compiling half as long again. */
struct passes {
    float (*sum)(const void *, int64_t, float *, int);
    void (*add[2])(const struct middle *, int64_t); /* alone, or together with passes of other rows */
    void (*scale)(const struct scale *, int64_t);
};
#define PASSES(kind, norm, passed)                                                                              \
    static FN_NOINLINE float sum_of_x_##kind##_##norm##_##passed(const void *x, int64_t hidden, float *sums,    \
                                                                 int fetches) {                                 \
        return sum_of_x(kind, x, hidden, sums, fetches);                                                        \
    }                                                                                                           \
    static FN_NOINLINE void add_normed_rest_##kind##_##norm##_##passed(const struct middle *row, int64_t begin, \
                                                                       int64_t n, int64_t s) {                  \
        add_normed_rest(kind, norm, passed, row, begin, n, s);                                                  \
    }                                                                                                           \
    static void add_normed_##kind##_##norm##_##passed(const struct middle *row, int64_t hidden) {               \
        add_normed_row(kind, norm, passed, ALONE, row, hidden, add_normed_rest_##kind##_##norm##_##passed);     \
    }                                                                                                           \
    static void add_normed_together_##kind##_##norm##_##passed(const struct middle *row, int64_t hidden) {      \
        add_normed_row(kind, norm, passed, TOGETHER, row, hidden, add_normed_rest_##kind##_##norm##_##passed);  \
    }                                                                                                           \
    static void scale_sum_##kind##_##norm##_##passed(const struct scale *row, int64_t hidden) {                 \
        if (STREAMS && row->bypass_cache)                                                                       \
            scale_row(kind, norm, F32, NONE, kind, row, hidden, PAST_CACHE);                         \
        else                                                                                                    \
            scale_row(kind, norm, F32, NONE, kind, row, hidden, THROUGH_CACHE);                      \
    }
#define PASSES_ENTRY(kind, norm, passed)                                                                           \
    [kind][norm != NONE][passed == F32] = {                                                                        \
        sum_of_x_##kind##_##norm##_##passed,                                                                       \
        {add_normed_##kind##_##norm##_##passed, add_normed_together_##kind##_##norm##_##passed},                   \
        scale_sum_##kind##_##norm##_##passed,                                                                      \
    },
TWO_NORMS(PASSES)
static const struct passes two_norms[KINDS][2][2] = {TWO_NORMS(PASSES_ENTRY)};

/*
 * Rows [begin, end), in one level; 0 where another way is needed. `first` is the norm before the addition, whose rows
 * pass to `next`. `gain` has room for a row of float.
 *
 * Where passes overlap (tuning.c), the second pass of a row is made together with the first pass of the next row and the
 * third pass of the row before. Else they follow each other, the first pass of the next row before the third, so that the
 * end of a row's sum, a root and a division overlap with work on the other row; but not of float rows, two of which the
 * nearest cache does not hold.
 */
int FN_OF(two_norms_rows)(const struct fn_forward_job *first, const struct fn_forward_job *next, int64_t begin, int64_t end,
                          void *scratch, float *gain) {
    const int kind = first->x_kind;
    const int64_t hidden = next->hidden, kept = (int64_t)sizeof(float) * fn_kept(hidden);
    const int64_t segments = (hidden + FN_SEGMENT - 1) / FN_SEGMENT;
    if (hidden < FN_SEGMENT) return 0; /* a chain halves the sums of several short rows together */
    if (first->flags & FN_SCALE_ONLY || fn_has_affine_rows(next) || next->rstd || next->residual_kind != kind || next->out_kind != kind) return 0;
    if (kind == FN_F64 || (kind != FN_F32 && (!(next->flags & FN_ROUND_SUM) || end - begin < FN_ONE_KIND_ROWS))) return 0;
    struct fn_forward_job before = *first, after = *next; /* as if no other kind passed between them */
    before.out_kind = after.x_kind = kind;
    const struct plan a = plan_of(&before, end - begin), b = plan_of(&after, end - begin);
    const int together = next->two_norms_overlap, alone = kind == FN_F32 && !together, fetches = next->from_memory;
    const struct passes *const pass = &two_norms[a.x][a.norm != NONE][first->out_kind == FN_F32];
    /* BF16 has none where BF16P has, and weights may be of other kinds than a bfloat16 x. */
    if (a.x != b.x || !pass->sum) return 0;

    float *const room = (float *)((char *)scratch + kept); /* for the sums of two rows */
    struct scale previous = {.weight = float_weight(&after, &b, scratch), .bypass_cache = STREAMS && next->bypass_cache};
    struct middle row = {.gain = float_weight(&before, &a, gain), .sums = room, .next_sums = room + fn_padded_sums(hidden),
                         .fetches = fetches, .ahead = next->ahead};
    float sum = pass->sum(first->x + begin * first->x_stride, hidden, room, fetches);
    for (int64_t m = begin; m < end; m++) {
        const int last = m + 1 == end;
        row.rstd = rstd_of(sum, hidden, first->eps);
        row.x = first->x + m * first->x_stride;
        row.next_x = together && !last ? row.x + first->x_stride : NULL;
        row.previous = together && m > begin ? &previous : NULL;
        row.residual = next->residual + m * next->residual_stride;
        row.residual_out = next->residual_out + m * next->residual_out_stride;
        if (previous.bypass_cache) {
            row.stream = row.residual_out;
            row.residual_out = (char *)scratch + next->bypass_cache + (m - begin) % 2 * kept;
        }
        pass->add[together](&row, hidden);
        previous.rstd = rstd_of(halve_sums(row.sums, segments), hidden, next->eps);
        previous.h = previous.next_x = previous.next_residual = row.residual_out;
        previous.out = next->out + m * next->out_stride;
        if (row.next_x) {
            sum = halve_sums(row.next_sums, segments);
            continue;
        }
        if (!alone && !last) sum = pass->sum(row.x + first->x_stride, hidden, room, fetches);
        pass->scale(&previous, hidden);
        if (alone && !last) sum = pass->sum(row.x + first->x_stride, hidden, room, fetches);
    }
    if (previous.bypass_cache) u_stream_end();
    return 1;
}
