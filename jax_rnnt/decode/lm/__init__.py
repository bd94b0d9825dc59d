"""Models that add scores to labels: n-grams, word n-grams, phrases, and how a search weighs them (fusion)."""
