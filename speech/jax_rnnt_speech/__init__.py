"""A recipe for any corpus: trains a transducer, measures error rates, transcribes and streams.

The rooms, from the ground floor up; a module imports those of its own room and of the rooms before it:

`system`: processes and devices, files, compiled programs, errors for people.
`config`: every option, as a tree of dataclasses; the command line and JSON files are derived from it.
`data`: where utterances come from, from audio to batches.
`model`: encoders, predictor and joint, and its losses.
`recognition`: from audio to text: searches, streams, windows of long recordings, transcripts, error rates.
`runs`: folders of trainings: checkpoints, metrics.
`pretrained`: what a training may start from, and what transcribes without one.
`models`: a model of any folder, of a run or pretrained; and the model of a new training.
`export`: a model as files that run without Python: ONNX graphs, for sherpa-onnx.
`training`: from a corpus to a model: what is made small, which parameters learn, steps, epochs.
`serving`: a model for others, over HTTP.
`cli`: the commands.
"""
