// An answer that repeats itself without an end; the rule is that of pylongctx chat.

const LEAST_PIECES = 64;
const LEAST_TIMES = 4;
const MOST_PERIOD = 128;

/** Return whether the last pieces of an answer are a few of them, over and over. */
export function isLoop(pieces) {
  const n = pieces.length;
  for (let period = 1; period <= MOST_PERIOD; period++) {
    const span = Math.max(LEAST_PIECES, LEAST_TIMES * period);
    if (span > n) return false;
    let same = 0;
    while (same < span - period && pieces[n - 1 - same] === pieces[n - 1 - same - period]) same++;
    if (same === span - period) return true;
  }
  return false;
}
