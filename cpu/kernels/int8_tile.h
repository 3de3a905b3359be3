/*
 * Sums of int8 products, included once for each instruction set (variants/int8_dots.c), which defines:
 *
 *   NAME, STEP, ROWS           of the function; the elements of a vector; the rows whose sums with four columns registers hold
 *   A, S                       vectors of elements, and of sums
 *   row_at column_at           STEP elements of a row, and of a column
 *   column_end                 `left` elements of a column, fewer than STEP, and then anything: rows have zeros there
 *   add_products               to sums
 *   store_sums                 of four vectors of sums the sum of each
 *   zero                       no sums
 */
#define FETCHED_AHEAD 8192 /* at least so many bytes: memory takes as long as reading them */
#define TILE_OF_(name) tile_##name
#define TILE_OF(name) TILE_OF_(name)
#define DOTS_OF_(name) dots_##name
#define DOTS_OF(name) DOTS_OF_(name)

/* Adds the products of elements [k, k + STEP), or of the last `left`, to the sums of four columns. */
#define ADD_STEP(load)                                                                   \
    do {                                                                                 \
        A a[ROWS];                                                                       \
        FN_UNROLLED                                                                      \
        for (int r = 0; r < rows; r++) a[r] = row_at(x + r * row_step, k);               \
        FN_UNROLLED                                                                      \
        for (int c = 0; c < 4; c++) {                                                    \
            const A b = load;                                                            \
            FN_UNROLLED                                                                  \
            for (int r = 0; r < rows; r++) s[r][c] = add_products(s[r][c], a[r], b);     \
        }                                                                                \
    } while (0)

/* Four columns, while those `ahead` bytes further on are fetched; fewer are the last one several times, whose sums are not stored. */
FN_INLINE void TILE_OF(NAME)(int rows, const char *x, int64_t row_step, int columns, const int8_t *w, int64_t w_step, int64_t n, int32_t *sums,
                             int64_t step, int64_t ahead) {
    S s[ROWS][4];
    const int8_t *column[4];
    FN_UNROLLED
    for (int c = 0; c < 4; c++) column[c] = w + (c < columns ? c : columns - 1) * w_step;
    FN_UNROLLED
    for (int r = 0; r < rows; r++) {
        FN_UNROLLED
        for (int c = 0; c < 4; c++) s[r][c] = zero();
    }
    const int64_t whole = n / STEP * STEP;
    int64_t k = 0;
    for (; k < whole; k += STEP) {
        if (ahead && k % 64 == 0) {
            FN_UNROLLED
            for (int c = 0; c < 4; c++) FN_PREFETCH_2(column[c] + k + ahead);
        }
        ADD_STEP(column_at(column[c] + k));
    }
    if (k < n) ADD_STEP(column_end(column[c] + k, n - k));
    FN_UNROLLED
    for (int r = 0; r < rows; r++) {
        int32_t four[4];
        store_sums(four, s[r][0], s[r][1], s[r][2], s[r][3]);
        if (columns == 4) memcpy(sums + r * step, four, sizeof four);
        else memcpy(sums + r * step, four, (size_t)columns * sizeof *four);
    }
}

static void DOTS_OF(NAME)(int rows, const void *from, int64_t row_step, int columns, const int8_t *w, int64_t w_step, int64_t n, int32_t *sums,
                          int64_t step) {
    const int64_t four = 4 * w_step, ahead = four ? (FETCHED_AHEAD / four + 1) * four : 0; /* one row may be all columns */
    for (int c = 0; c < columns; c += 4, w += four) {
        const int of = columns - c < 4 ? columns - c : 4;
        const char *x = from;
        for (int r = 0; r < rows; r += ROWS, x += ROWS * row_step) {
            int32_t *const to = sums + r * step + c;
            switch (rows - r) {
            case 1: TILE_OF(NAME)(1, x, row_step, of, w, w_step, n, to, step, r ? 0 : ahead); break;
#if ROWS > 2
            case 2: TILE_OF(NAME)(2, x, row_step, of, w, w_step, n, to, step, r ? 0 : ahead); break;
            case 3: TILE_OF(NAME)(3, x, row_step, of, w, w_step, n, to, step, r ? 0 : ahead); break;
#endif
            default: TILE_OF(NAME)(ROWS, x, row_step, of, w, w_step, n, to, step, r ? 0 : ahead);
            }
        }
    }
}

#undef FETCHED_AHEAD
#undef TILE_OF_
#undef TILE_OF
#undef DOTS_OF_
#undef DOTS_OF
#undef NAME
#undef STEP
#undef ROWS
#undef A
#undef S
#undef row_at
#undef column_at
#undef column_end
#undef ADD_STEP
#undef add_products
#undef store_sums
#undef zero
