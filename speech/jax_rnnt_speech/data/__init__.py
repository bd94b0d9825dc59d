"""The sources of utterances: audio, manifests, corpora, texts and their labels, features, batches."""
