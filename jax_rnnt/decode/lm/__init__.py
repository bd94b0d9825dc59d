"""Models that add scores to labels: n-grams, word n-grams, phrases. They know no search."""
