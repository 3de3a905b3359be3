/* Products of rows of int8 with a weight of int8 (docs/spec.md, section 16), included by declared_body.h behind product_body.h. */

/* What a block works on: rows as `with` takes them, and behind them, where there are zero points, one of ones: its sums are those of the columns. */
struct int8_block {
    const struct fn_declared *job;
    const struct fn_int8_dots *with;
    int64_t row_step; /* bytes */
    char *x;
    int32_t *sums, *of_columns; /* of each row FN_PRODUCT_COLUMNS; of the weight's rows, where there are zero points */
    int32_t of_row[FN_PRODUCT_ROWS]; /* times the offset */
};

static void take_int8_rows(struct int8_block *b, int64_t begin, int64_t end) {
    const int64_t hidden = b->job->hidden;
    for (int64_t m = begin; m < end; m++) {
        const int8_t *const row = (const int8_t *)fn_row_of(b->job, FN_INT8_LINEAR_Q, m);
        b->with->take_row(row, hidden, b->x + (m - begin) * b->row_step);
        int32_t sum = 0;
        for (int64_t k = 0; b->with->offset && k < hidden; k++) sum += row[k];
        b->of_row[m - begin] = sum * (int32_t)b->with->offset;
    }
    if (!b->job->operand[FN_INT8_LINEAR_ZERO_POINT].kind) return;
    int8_t *const ones = (int8_t *)b->of_columns; /* which is written later, and has room for a row */
    memset(ones, 1, (size_t)hidden);
    b->with->take_row(ones, hidden, b->x + (end - begin) * b->row_step);
}

/* Scales the sums of row m in columns [first, first + n), adds the bias, and rounds. */
static void end_int8_row(const struct int8_block *b, int64_t m, int64_t first, int n, const int32_t *sums) {
    const struct fn_operand *const o = b->job->operand;
    const float scale = ((const float *)o[FN_INT8_LINEAR_SCALE].address)[m];
    const float *const of_weight = (const float *)o[FN_INT8_LINEAR_WEIGHT_SCALE].address + first;
    const int64_t zero = o[FN_INT8_LINEAR_ZERO_POINT].kind ? ((const int32_t *)o[FN_INT8_LINEAR_ZERO_POINT].address)[m] : 0;
    float y[FN_PRODUCT_COLUMNS];
    if (zero)
        for (int i = 0; i < n; i++) y[i] = (float)(sums[i] - zero * b->of_columns[i]);
    else
        for (int i = 0; i < n; i++) y[i] = (float)sums[i];
    for (int i = 0; i < n; i++) y[i] = y[i] * of_weight[i] * scale;
    end_products(b->job, FN_INT8_LINEAR_BIAS, FN_INT8_LINEAR_OUT, m, first, n, y);
}

/* Rows [begin, end), which lie at x, and columns [first, first + n). */
static void int8_block(const struct int8_block *b, int64_t begin, int64_t end, int64_t first, int n) {
    const struct fn_operand *const weight = &b->job->operand[FN_INT8_LINEAR_WEIGHT];
    const int64_t hidden = b->job->hidden, step = weight->stride, rows = end - begin;
    const int8_t *const w = (const int8_t *)weight->address + first * step;
    b->with->dots((int)rows, b->x, b->row_step, n, w, step, hidden, b->sums, FN_PRODUCT_COLUMNS);
    if (b->job->operand[FN_INT8_LINEAR_ZERO_POINT].kind) {
        b->with->dots(1, b->x + rows * b->row_step, b->row_step, n, w, step, hidden, b->of_columns, FN_PRODUCT_COLUMNS);
        for (int i = 0; i < n; i++) b->of_columns[i] -= (int32_t)(b->with->offset * hidden);
    }
    for (int64_t m = 0; m < rows; m++) {
        int32_t *const restrict sums = b->sums + m * FN_PRODUCT_COLUMNS;
        const uint32_t more = (uint32_t)b->of_row[m];
        for (int i = 0; i < n; i++) sums[i] = (int32_t)((uint32_t)sums[i] - more);
        end_int8_row(b, begin + m, first, n, sums);
    }
}

static void int8_products(const struct fn_declared *job, const struct fn_int8_dots *dots, int64_t begin, int64_t end, char *room) {
    struct int8_block b = {.job = job, .with = dots, .x = room};
    b.row_step = fn_int8_row(b.with->size, job->hidden);
    const int64_t rows = job->rows < FN_PRODUCT_ROWS ? job->rows : FN_PRODUCT_ROWS;
    b.sums = (int32_t *)(void *)(room + (rows + 1) * b.row_step);
    b.of_columns = b.sums + rows * FN_PRODUCT_COLUMNS;
    int64_t taken = -1;
    for (int64_t i = begin; i < end; i++) {
        const struct place at = place_of_block(job, i);
        if (taken != at.begin) take_int8_rows(&b, at.begin, at.end);
        taken = at.begin;
        int8_block(&b, at.begin, at.end, at.first, at.columns);
    }
}
