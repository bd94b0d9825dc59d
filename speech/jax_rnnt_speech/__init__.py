"""A recipe for any corpus: trains a transducer, measures error rates, transcribes and streams.

These are its packages, from the ground floor up; a module imports those of its own package and of the packages before:

`system`: processes and devices, files, compiled programs, errors for people.
`config`: every option, as a tree of dataclasses; the command line and JSON files are derived from it.
`data`: the sources of utterances, from audio to batches.
`model`: encoders, predictor and joint, and its losses.
`recognition`: from audio to text: searches, streams, windows of long recordings, transcripts, error rates.
`runs`: folders of trainings: checkpoints, metrics.
`pretrained`: what a training may start from, and what transcribes without one.
`models`: a model of any folder, of a run or pretrained; and the model of a new training.
`export`: a model as files that run without Python: ONNX graphs, for sherpa-onnx.
`training`: from a corpus to a model: the loss, the parameters that learn, steps, epochs.
`serving`: a model for others, over HTTP.
`cli`: the commands.
"""
