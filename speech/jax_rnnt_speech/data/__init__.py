"""Where utterances come from: audio, manifests, corpora, texts and their labels, features, batches."""
