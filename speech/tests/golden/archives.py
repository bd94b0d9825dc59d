"""Writes small random models as archives of NeMo, and what NeMo makes of them: archives.npz.

    pip install "nemo_toolkit[asr]==3.0.0"
    python tests/golden/archives.py FOLDER             # a relative one: the archives name it

hybrid.nemo is a TDT with a head for CTC; eou.nemo streams, and its vocabulary ends with <EOU> and <EOB>.
"""

import io
import shutil
import sys
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from nemo.collections.asr import models
from nemo.collections.asr.models.asr_eou_models import EncDecRNNTBPEEOUModel
from omegaconf import OmegaConf
from sentencepiece import sentencepiece_model_pb2
from tones import LABELS, recordings

MODULES, WIDTH, ROOM = "nemo.collections.asr.modules.", 12, 64
ENCODER = {
    "_target_": f"{MODULES}ConformerEncoder", "feat_in": 16, "feat_out": -1, "n_layers": 2, "d_model": 16,
    "subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": 4, "ff_expansion_factor": 2,
    "self_attention_model": "rel_pos", "n_heads": 4, "xscaling": True, "untie_biases": True, "pos_emb_max_len": ROOM,
    "conv_kernel_size": 9,
}  # fmt: skip
CLASSES = {"hybrid": models.EncDecHybridRNNTCTCBPEModel, "eou": EncDecRNNTBPEEOUModel}
STYLES = {
    "hybrid": {"att_context_size": [-1, -1], "att_context_style": "regular", "xscaling": False, "use_bias": False},
    "eou": {
        "att_context_size": [[4, 1], [2, 0]], "att_context_style": "chunked_limited", "att_context_probs": [0.5, 0.5],
        "causal_downsampling": True, "conv_norm_type": "layer_norm", "conv_context_size": "causal",
    },
}  # fmt: skip


def tokenizer(folder, special):
    """A model of sentencepiece with 17 pieces and special ones behind them, as a folder that NeMo reads."""
    model, text = io.BytesIO(), "ten red tar tea rat net are neat " * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text]), model_writer=model, vocab_size=17, model_type="bpe", bos_id=-1, eos_id=-1,
        normalization_rule_name="identity", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    whole = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    for name in special:
        whole.pieces.add(piece=name, score=0.0, type=whole.SentencePiece.USER_DEFINED)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(whole.SerializeToString())
    (folder / "vocab.txt").write_text("".join(f"##{x.piece}\n" for x in whole.pieces))


def fields_of(kind, folder):
    special = ["<EOU>", "<EOB>"] if kind == "eou" else []
    tokenizer(folder / f"{kind}.tokens", special)
    fields = {
        "sample_rate": 16000, "compute_eval_loss": False, "log_prediction": False, "skip_nan_grad": False,
        "model_defaults": {"enc_hidden": 16, "pred_hidden": WIDTH, "joint_hidden": WIDTH},
        "tokenizer": {"dir": str(folder / f"{kind}.tokens"), "type": "bpe"},
        "preprocessor": {
            "_target_": f"{MODULES}AudioToMelSpectrogramPreprocessor", "sample_rate": 16000, "window_size": 0.025,
            "normalize": "NA" if special else "per_feature", "window_stride": 0.01, "window": "hann", "features": 16,
            "n_fft": 512, "frame_splicing": 1, "dither": 1e-5, "pad_to": 0,
        },
        "spec_augment": {"_target_": f"{MODULES}SpectrogramAugmentation", "freq_masks": 2, "time_masks": 10},
        "encoder": ENCODER | STYLES[kind],
        "decoder": {
            "_target_": f"{MODULES}RNNTDecoder", "normalization_mode": None, "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": {"pred_hidden": WIDTH, "pred_rnn_layers": 1, "t_max": None, "dropout": 0.2},
        },
        "joint": {
            "_target_": f"{MODULES}RNNTJoint", "log_softmax": None, "preserve_memory": False, "fuse_loss_wer": False,
            "jointnet": {"joint_hidden": WIDTH, "activation": "relu", "dropout": 0.2},
        },
        "decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": 3}},
        "loss": {"loss_name": "default"},
    }  # fmt: skip
    if kind == "hybrid":
        durations = [0, 1, 2, 3, 4]
        fields["model_defaults"] |= {"tdt_durations": durations, "num_tdt_durations": 5}
        fields["joint"]["num_extra_outputs"] = 5
        fields["decoding"] |= {"model_type": "tdt", "durations": durations}
        fields["loss"] = {"loss_name": "tdt", "tdt_kwargs": {"durations": durations, "sigma": 0.02, "omega": 0.1}}
        head = {"_target_": f"{MODULES}ConvASRDecoder", "feat_in": None, "num_classes": -1, "vocabulary": []}
        fields["aux_ctc"] = {"ctc_loss_weight": 0.3, "use_cer": False, "decoder": head}
        fields["aux_ctc"]["decoding"] = {"strategy": "greedy"}
    return OmegaConf.create(fields)


@torch.no_grad()
def randomize(model, seed):
    """Weights large enough for every part of the network to matter; bfloat16 has them, so that they pack well."""
    torch.manual_seed(seed)
    for name, x in model.state_dict().items():
        if name.endswith("running_var"):
            x.uniform_(0.5, 1.5)
        elif "norm" in name and name.endswith("weight"):
            x.normal_(1.0, 0.2)
        elif name.endswith(("bias", "running_mean")):
            x.normal_(0.0, 0.2)
        elif "preprocessor" not in name and x.is_floating_point():
            x.normal_(0.0, x[0].numel() ** -0.5)
    embedding = model.decoder.prediction["embed"]
    embedding.weight.normal_()[embedding.padding_idx] = 0  # of the blank, as NeMo trains it
    for x in model.parameters():
        x.copy_(x.bfloat16())


@torch.no_grad()
def heard(model):
    """(rows [B, E, T], their lengths [B], what the joint makes of them and the labels [B, T, U + 1, V])."""
    waves = recordings()
    lengths = torch.tensor([len(x) for x in waves])
    padded = torch.tensor(np.stack([np.pad(x, (0, lengths.max() - len(x))) for x in waves]))
    rows, counts = model(input_signal=padded, input_signal_length=lengths)
    states, *_ = model.decoder(targets=torch.tensor(LABELS["targets"]) % 17, target_length=lengths)
    joint = model.joint
    frames, labels = joint.project_encoder(rows.transpose(1, 2)), joint.project_prednet(states.transpose(1, 2))
    return rows, counts, joint.joint_net(frames[:, :, None] + labels[:, None])


@torch.no_grad()
def write(folder, kind, seed):
    model = CLASSES[kind](cfg=fields_of(kind, folder)).eval()
    randomize(model, seed)
    head, blank = model.joint.joint_net[-1], model.decoder.blank_idx
    head.weight.mul_(3.0)
    *_, logits = heard(model)
    head.bias.sub_(logits.mean((0, 1, 2)))  # every class has its turn
    if kind == "eou":  # more blanks, and some <EOU>
        head.bias[[blank, 17]] += torch.tensor([1.5, 1.0])
    head.bias.copy_(head.bias.bfloat16())
    rows, lengths, logits = heard(model)
    arrays = {"logits": logits[:, :, :3], "lengths": lengths}
    if kind == "hybrid":
        arrays["ctc"] = model.ctc_decoder(encoder_output=rows).argmax(-1)
    options = {"encoder_output": rows, "encoded_lengths": lengths, "return_hypotheses": True}
    found = model.decoding.rnnt_decoder_predictions_tensor(**options)
    model.save_to(str(folder / f"{kind}.nemo"))
    shutil.rmtree(folder / f"{kind}.tokens")
    arrays |= {f"labels{i}": x.y_sequence for i, x in enumerate(found)}
    arrays |= {"texts": np.array([x.text for x in found])}
    print(kind, [x.y_sequence.tolist() for x in found], arrays["texts"])
    return {f"{kind}/{name}": np.asarray(x) for name, x in arrays.items()}


folder, found = Path(sys.argv[1]), {}
for seed, kind in ((2, "hybrid"), (7, "eou")):  # many labels and blanks
    found |= write(folder, kind, seed)
np.savez_compressed(folder / "archives.npz", **found)
