"""Decoders of other libraries on a given transducer, in PyTorch and ONNX. Nothing here imports jax_rnnt.

A predictor is a module of (labels [N, 1], state) -> (rows [N, 1, H], state: arrays [N, ...]), a joint one of two rows.
The last class is the blank, which is the start label too. Each function makes {name: (decode, labels)}:
`decode(encoder_out [B, T, H], lengths)`, and `labels(its result)` as lists.
"""

import tempfile
from pathlib import Path

import torch

SYMBOLS, WIDTH = 3, 8  # labels of a frame; hypotheses


def parameter(array):
    return torch.nn.Parameter(torch.tensor(array), requires_grad=False)


class Stateless(torch.nn.Module):
    """relu(sum of embeddings) @ weight + bias; a label has an embedding for each distance, the oldest one first."""

    def __init__(self, embedding, history, weight, bias):
        super().__init__()
        self.history, self.blank = history, len(embedding) // history - 1
        self.embedding, self.weight, self.bias = map(parameter, (embedding, weight, bias))
        self.offsets = (self.blank + 1) * torch.arange(history)

    def rows(self, past):
        return torch.relu(self.embedding[past + self.offsets].sum(1)) @ self.weight + self.bias

    def forward(self, labels, state=None):
        state = state or [torch.full((len(labels), self.history - 1), self.blank)]
        past = torch.cat([state[0], labels], 1)
        return self.rows(past)[:, None], [past[:, 1:]]


class LSTM(torch.nn.Module):
    """An embedding and one layer; weights [2 H, 4 H] of inputs over those of states, gates in PyTorch's order."""

    def __init__(self, embedding, weights, bias):
        super().__init__()
        width = embedding.shape[1]
        self.embedding = torch.nn.Embedding.from_pretrained(torch.tensor(embedding))
        self.lstm = torch.nn.LSTM(width, width, batch_first=True).requires_grad_(False)
        for own, array in zip(self.lstm.parameters(), (weights[:width].T, weights[width:].T, bias, 0 * bias)):
            own.copy_(torch.tensor(array))

    def forward(self, labels, state=None):
        rows, state = self.lstm(self.embedding(labels), state and tuple(x[None] for x in state))
        return rows, [x[0] for x in state]


class Joint(torch.nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.output = torch.nn.Linear(*weight.shape)
        self.output.weight, self.output.bias = parameter(weight.T.copy()), parameter(bias)

    def forward(self, encoder, predictor):
        return self.output(torch.tanh(encoder + predictor))


def torchaudio(predictor, joint):
    from torchaudio.models import RNNTBeamSearch

    class Model:
        """What RNNTBeamSearch asks of `torchaudio.models.RNNT`."""

        def transcribe(self, rows, lengths):
            return rows, lengths

        def predict(self, labels, lengths, state):
            rows, state = predictor(labels, state and state[0])
            return rows, lengths, [state]

        def join(self, rows, frames, predicted, lengths):
            return joint(rows, predicted)[:, None], frames, lengths

    search = RNNTBeamSearch(Model(), len(joint.output.bias) - 1, step_max_tokens=SYMBOLS)

    def decode(encoder, lengths):
        return [search(x[:n], n, WIDTH)[0] for x, n in zip(encoder, lengths)]

    return {"torchaudio beam": (decode, lambda found: [best[0][1:] for best in found])}


def nemo(predictor, joint):
    """Modules of NeMo with these weights, and its searches in PyTorch alone, as it runs them on a CPU."""
    from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint, StatelessTransducerDecoder
    from nemo.collections.asr.parts.submodules import rnnt_maes_batched_computer as maes
    from nemo.collections.asr.parts.submodules import rnnt_malsd_batched_computer as malsd
    from nemo.collections.asr.parts.submodules.transducer_decoding import rnnt_label_looping as looping

    class StatelessDecoder(StatelessTransducerDecoder):
        """With the method that beam search needs and NeMo 3.0 defines for the LSTM alone."""

        @classmethod
        def batch_aggregate_states_beam(cls, src_states, batch_size, beam_size, indices, dst_states=None):
            first = torch.arange(batch_size)[:, None] * beam_size
            return [src_states[0][(first + indices).flatten()]]

    blank, width = joint.output.weight.shape[0] - 1, joint.output.weight.shape[1]
    if isinstance(predictor, Stateless):
        decoder = StatelessDecoder({"pred_hidden": width}, blank, predictor.history)
        decoder.prediction = predictor
    else:
        decoder = RNNTDecoder({"pred_hidden": width, "pred_rnn_layers": 1}, blank)
        decoder.prediction["embed"] = predictor.embedding
        decoder.prediction["dec_rnn"].lstm.load_state_dict(predictor.lstm.state_dict())
    sizes = dict.fromkeys(("encoder_hidden", "pred_hidden", "joint_hidden"), width)
    # Without log_softmax=False it normalises the logits of greedy search too.
    network = RNNTJoint(sizes | {"activation": "tanh"}, blank, log_softmax=False)
    network.enc, network.pred, network.joint_net[-1] = torch.nn.Identity(), torch.nn.Identity(), joint.output
    shared, off = (decoder.eval(), network.eval(), blank), {"allow_cuda_graphs": False}
    greedy = looping.GreedyBatchedRNNTLabelLoopingComputer(*shared, SYMBOLS, **off)
    searches = {
        "NeMo MALSD": malsd.ModifiedALSDBatchedRNNTComputer(*shared, WIDTH, SYMBOLS, **off),
        "NeMo mAES": maes.ModifiedAESBatchedRNNTComputer(*shared, WIDTH, 2, 2, 2.3, **off),  # its defaults
    }

    def rows(found):
        return [row[:n].tolist() for row, n in zip(found[0].transcript, found[0].current_lengths)]

    def best(found):
        return [torch.as_tensor(x.y_sequence).tolist() for x in found[0].to_hyps_list()]

    return {"NeMo greedy": (greedy, rows)} | {name: (search, best) for name, search in searches.items()}


class Network(torch.nn.Module):
    """A function as a module, which ONNX takes."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def sherpa_onnx(predictor, joint, encoder, lengths, threads):
    """Models as icefall exports them: the first class is the blank, and a history begins with -1 and the blank.

    It computes features itself, so the encoder is a table of the rows, and utterance b is audio of b + 1 frames.
    """
    import numpy as np
    import onnx
    from sherpa_onnx import OfflineRecognizer

    if not isinstance(predictor, Stateless):
        raise ImportError("such models have no recurrent predictor")
    classes, tables = len(joint.output.bias), (torch.tensor(encoder), torch.tensor(lengths.astype(np.int64)))

    def rows(features, frames):
        return tables[0][frames - 1] + 0 * features[:, :1, :1], tables[1][frames - 1]

    def predict(labels):
        return predictor.rows((labels.clamp(min=0) - 1) % classes)

    row, number = torch.zeros(2, encoder.shape[-1]), torch.ones(2, dtype=torch.int64)
    weight, bias = (np.roll(x.numpy().T, 1, -1) for x in joint.output.parameters())
    modules = {
        "encoder": (Network(rows), {"x": torch.zeros(2, 3, 80), "frames": number}, ["rows", "lengths"]),
        "decoder": (Network(predict), {"y": number[:, None].repeat(1, predictor.history)}, ["rows"]),
        "joiner": (Joint(weight, bias), {"encoder": row, "decoder": row}, ["logits"]),
    }
    audio = [np.zeros(160 * (b + 1), np.float32) for b in range(len(encoder))]

    def search(folder, method):
        files = {name: f"{folder}/{name}" for name in (*modules, "tokens")}
        options = dict(num_threads=threads, decoding_method=method, max_active_paths=WIDTH)
        recognizer = OfflineRecognizer.from_transducer(**files, **options)
        streams = [recognizer.create_stream() for _ in audio]
        for stream, samples in zip(streams, audio):
            stream.accept_waveform(16000, samples)

        def decode(encoder, lengths):
            recognizer.decode_streams(streams)
            return [stream.result.tokens for stream in streams]

        return decode, lambda found: [[int(x.strip()[1:]) for x in tokens] for tokens in found]

    with tempfile.TemporaryDirectory() as folder:
        for name, (module, inputs, outputs) in modules.items():
            axes = {x: {0: "N"} for x in (*inputs, *outputs)} | {"x": {0: "N", 1: "T"}}
            names = dict(input_names=list(inputs), output_names=outputs, dynamic_axes=axes, dynamo=False)
            torch.onnx.export(module, tuple(inputs.values()), f"{folder}/{name}", **names)
            model = onnx.load(f"{folder}/{name}")
            onnx.helper.set_model_props(model, {"context_size": str(predictor.history), "vocab_size": str(classes)})
            onnx.save(model, f"{folder}/{name}")
        Path(folder, "tokens").write_text("<blk> 0\n" + "".join(f"t{k} {k + 1}\n" for k in range(classes - 1)))
        kinds = {"greedy": "greedy_search", "modified beam": "modified_beam_search"}
        return {f"sherpa-onnx {name}": search(folder, method) for name, method in kinds.items()}
