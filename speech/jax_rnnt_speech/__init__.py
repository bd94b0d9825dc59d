"""A recipe for any corpus: trains a transducer, measures error rates, transcribes and streams.

Read in this order: `config` (every option), `audio`, `manifests`, `texts`, `corpora` and `digits` (where utterances
come from), `augmentation`, `cache`, `check`, `tokens`, `features`, `batches` and `epochs`, `encoders`, `model`,
`losses`, `recogniser`, `runs` (checkpoints and logs) and `checkpoints`, `pretrained` (what a training may start from),
`parts`, `programs`, `steps`, `train`, `results`, `streams` and `windows` (recordings of any length), `recognise`,
`transcripts` and `align`, `errors`, `testing` and `pictures`, `server` and `serve`, `export`.
`synthesis` makes a corpus.
"""
