"""Models that add scores to labels: n-grams, word n-grams, phrases. They do not depend on any search."""
