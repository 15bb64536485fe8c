/* Connect Four by search: negamax with alpha and beta over boards as bits, moves towards the middle first, and a table of
 * boards that were judged before. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define COLUMNS 7
#define ROWS 6
#define STRIDE 7
#define CELLS 42
#define ENTRIES (1 << 18)
#define LOST (-1000000)

typedef struct {
    uint64_t key;
    int32_t score;
    int8_t depth, kind; /* kind: 0 exact, 1 at least, 2 at most */
} entry;

static const int ORDER[COLUMNS] = {3, 2, 4, 1, 5, 0, 6};

static int has_four(uint64_t b) {
    static const int steps[4] = {1, STRIDE - 1, STRIDE, STRIDE + 1};
    for (int i = 0; i < 4; i++) {
        uint64_t pairs = b & (b >> steps[i]);
        if (pairs & (pairs >> (2 * steps[i]))) return 1;
    }
    return 0;
}

static uint64_t bottom(int c) { return 1ULL << (STRIDE * c); }
static uint64_t top(int c) { return 1ULL << (STRIDE * c + ROWS - 1); }

/* For the player to move; a win is worth the more, the fewer stones are on the board when it comes. */
static int32_t search(uint64_t own, uint64_t taken, int depth, int32_t alpha, int32_t beta, entry *table) {
    int stones = __builtin_popcountll(taken);
    if (stones == CELLS) return 0;
    for (int c = 0; c < COLUMNS; c++)
        if (!(taken & top(c)) && has_four(own | ((taken + bottom(c)) & ~taken & (((1ULL << ROWS) - 1) << (STRIDE * c)))))
            return CELLS + 1 - stones;
    if (!depth) return 0;
    int32_t most = CELLS - 1 - stones; /* no win before the one after the next move */
    if (beta > most) {
        beta = most;
        if (alpha >= beta) return beta;
    }
    uint64_t key = own + taken + 0x0204081020408ULL; /* unlike for any other board: a flag above each column */
    entry *kept = &table[(key * 0x9E3779B97F4A7C15ULL) >> 46];
    if (kept->key == key && kept->depth == depth) {
        if (kept->kind == 0 || (kept->kind == 1 && kept->score >= beta) || (kept->kind == 2 && kept->score <= alpha))
            return kept->score;
    }
    int32_t best = LOST, first = alpha;
    for (int i = 0; i < COLUMNS; i++) {
        int c = ORDER[i];
        if (taken & top(c)) continue;
        uint64_t after = taken | (taken + bottom(c));
        int32_t score = -search(taken ^ own, after, depth - 1, -beta, -alpha, table);
        if (score > best) best = score;
        if (best > alpha) alpha = best;
        if (alpha >= beta) break;
    }
    kept->key = key;
    kept->score = best;
    kept->depth = (int8_t)depth;
    kept->kind = best >= beta ? 1 : best <= first ? 2 : 0;
    return best;
}

/* out (boards, columns): what each column comes to within `depth` moves; columns that are full LOST. */
void tm_connect_four(const uint64_t *own, const uint64_t *taken, int64_t boards, int64_t depth, int32_t *out) {
    entry *table = calloc(ENTRIES, sizeof(entry));
    for (int64_t i = 0; i < boards; i++)
        for (int c = 0; c < COLUMNS; c++) {
            int32_t *score = out + i * COLUMNS + c;
            *score = LOST;
            if (!table || (taken[i] & top(c))) continue;
            uint64_t after = taken[i] | (taken[i] + bottom(c)), mine = own[i] | (after ^ taken[i]);
            int stones = __builtin_popcountll(taken[i]);
            *score = has_four(mine) ? CELLS + 1 - stones : -search(after ^ mine, after, (int)depth - 1, -CELLS, CELLS, table);
        }
    free(table);
}
