"""Writes the small random checkpoints of tests/golden, and what `transformers` makes of them: golden.npz of each.

    pip install torch torchaudio transformers==5.24.0
    python tests/golden/write.py FOLDER

The RNN-T loss is torchaudio's, so its release must fit that of torch. The tests read the files alone.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from tones import LABELS, RATE, recordings
from transformers.loss.loss_rnnt import rnnt_loss
from transformers.loss.loss_tdt import tdt_loss

ENCODER = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, num_mel_bins=16)
ENCODER |= dict(subsampling_conv_channels=4, dropout=0.0, layerdrop=0.0, activation_dropout=0.0, attention_dropout=0.0)
SHARED = dict(vocab_size=20, decoder_hidden_size=12, blank_token_id=19, pad_token_id=2, max_symbols_per_step=3)
BLANK_BIAS = 1.0
REDUCTIONS = "none", "mean", "mean_volume", "mean_batch", "sum"
LOOKAHEAD = 1  # encoder frames: of the streaming model, whose chunks have one more


def build(kind):
    """(model, feature extractor), both random but for sizes."""
    if kind == "streaming":
        context = dict(sliding_window=6, default_num_lookahead_tokens=LOOKAHEAD)
        encoder = hf.NemotronAsrStreamingEncoderConfig(**ENCODER, **context)
        config = hf.NemotronAsrStreamingConfig(**SHARED, encoder_config=encoder)
        return hf.NemotronAsrStreamingForRNNT(config), hf.NemotronAsrStreamingFeatureExtractor(feature_size=16)
    encoder = hf.ParakeetEncoderConfig(**ENCODER)
    extractor = hf.ParakeetFeatureExtractor(feature_size=16)
    if kind == "tdt":
        return hf.ParakeetForTDT(hf.ParakeetTDTConfig(**SHARED, encoder_config=encoder)), extractor
    return hf.ParakeetForRNNT(hf.ParakeetRNNTConfig(**SHARED, encoder_config=encoder)), extractor


@torch.no_grad()
def randomize(model, seed):
    """Weights large enough for every part of the network to matter, and for blanks and labels to take turns."""
    torch.manual_seed(seed)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("running_var", "inv_freq", "num_batches_tracked")):
            if name.endswith("running_var"):
                x.uniform_(0.5, 1.5)
        elif "norm" in name and name.endswith("weight"):
            x.normal_(1.0, 0.2)
        elif x.ndim == 1:
            x.normal_(0.0, 0.2)
        else:
            x.normal_(0.0, x[0].numel() ** -0.5)
    model.decoder.embedding.weight.normal_()


@torch.no_grad()
def balance(model, features, mask):
    """Centres what the projections and the joint make of these features, so that every class has its turn."""
    rows = model.get_audio_features(input_features=features, attention_mask=mask)
    labels = decoder_input_ids(model)
    for layer, x in (
        (model.encoder_projector, rows.pooler_output),
        (model.decoder.decoder_projector, model.decoder(labels)),
    ):
        layer.weight.mul_(2.0 / x.std())
        layer.bias.copy_(-2.0 * (x - layer.bias).mean((0, 1)) / x.std())
    head = model.joint.head
    if hasattr(model.config, "durations"):  # duration 0 goes with the blank, where the rules of decoding differ
        head.weight[model.config.vocab_size] += head.weight[model.config.blank_token_id]
    rows = model.get_audio_features(input_features=features, attention_mask=mask)
    logits = model(encoder_outputs=rows, decoder_input_ids=labels).logits
    head.weight.mul_(3.0)
    head.bias.copy_(-3.0 * (logits - head.bias).mean((0, 1, 2)))
    head.bias[model.config.blank_token_id] += BLANK_BIAS
    for x in model.state_dict().values():  # as the files have them: bfloat16 halves their size
        x.copy_(x.bfloat16())


def losses(model, logits, lengths):
    """{reduction: loss} of the loss function of `transformers` itself."""
    targets = torch.tensor(LABELS["targets"])
    batch = targets, lengths, torch.tensor(LABELS["target_lengths"]), model.config.blank_token_id
    if not hasattr(model.config, "durations"):
        return {f"loss_{x}": rnnt_loss(logits, *batch, reduction=x) for x in REDUCTIONS}
    heads = logits[..., : model.config.vocab_size], logits[..., model.config.vocab_size :]
    return {f"loss_{x}": tdt_loss(*heads, *batch, model.config.durations, reduction=x) for x in REDUCTIONS}


def decoder_input_ids(model):
    targets = torch.tensor(LABELS["targets"])
    return torch.nn.functional.pad(targets, (1, 0), value=model.config.blank_token_id)


def training_step(model, features, mask):
    """Loss, three gradients and one running mean of a step in training mode, with the model's own reduction."""
    model.train()
    rows = model.get_audio_features(input_features=features, attention_mask=mask)
    out = model(encoder_outputs=rows, decoder_input_ids=decoder_input_ids(model))
    loss = losses(model, out.logits, rows.attention_mask.sum(-1))["loss_mean_batch"]
    loss.backward()
    named = dict(model.named_parameters())
    expected = {"train_loss": loss}
    for name in ("encoder.layers.0.self_attn.relative_k_proj.weight", "encoder_projector.weight", "joint.head.bias"):
        expected[f"gradient:{name}"] = named[name].grad
    return expected


@torch.no_grad()
def transcripts(model, features, mask):
    """Labels and their frames, -1 from each utterance's count on."""
    emissions = []
    for i in range(len(features)):
        out = model.generate(input_features=features[i : i + 1], attention_mask=mask[i : i + 1], max_new_tokens=1000)
        emissions.append(emitted(model, out))
    width = max(max(len(labels) for labels, _ in emissions), 1)
    pads = [(0, width - len(labels)) for labels, _ in emissions]
    columns = [np.stack([np.pad(x, pad, constant_values=-1) for x, pad in zip(side, pads)]) for side in zip(*emissions)]
    return dict(zip(("labels", "frames"), columns))


def emitted(model, out):
    """Labels of a sequence without its start and its blanks, and the frame of each."""
    tokens, durations = out.sequences[0].numpy(), out.durations[0].numpy()
    keep = tokens != model.config.blank_token_id
    return tokens[keep], (np.cumsum(durations) - durations)[keep]


@torch.no_grad()
def streamed(model, features):
    """Encoder rows of the first utterance, chunk by chunk, and the labels of a stream."""
    first, later = 1 + 8 * LOOKAHEAD, 8 * (LOOKAHEAD + 1)
    features = features[:1]
    count = (features.shape[1] - first) // later
    chunks = [features[:, :first]] + [features[:, first + i * later :][:, :later] for i in range(count)]
    state, rows = {}, []
    for chunk in chunks:
        out = model.encoder(chunk, num_lookahead_tokens=LOOKAHEAD, use_cache=True, **state)
        state = {"past_key_values": out.past_key_values, "padding_cache": out.padding_cache}
        rows.append(out.last_hidden_state)
    options = dict(num_lookahead_tokens=LOOKAHEAD, max_new_tokens=1000)
    labels, frames = emitted(model, model.generate(input_features=(x for x in chunks), **options))
    return {"stream_rows": torch.cat(rows, 1), "stream_labels": labels, "stream_frames": frames}


def write(folder, kind, seed):
    model, extractor = build(kind)
    randomize(model, seed)
    model.eval()
    # As the converters of the released checkpoints set them: the blank comes first, and durations are no tokens.
    model.generation_config.decoder_start_token_id = model.config.blank_token_id
    if kind == "tdt":
        width = model.config.vocab_size
        model.generation_config.suppress_tokens = [width + i for i in range(len(model.config.durations))]
    batch = extractor([*recordings()], sampling_rate=RATE, return_tensors="pt")
    features, mask = batch.input_features, batch.attention_mask
    balance(model, features, mask)
    with torch.no_grad():
        rows = model.get_audio_features(input_features=features, attention_mask=mask)
        logits = model(encoder_outputs=rows, decoder_input_ids=decoder_input_ids(model)).logits
    lengths = rows.attention_mask.sum(-1)
    arrays = {"features": features, "feature_lengths": mask.sum(-1)}
    arrays |= {"rows": rows.last_hidden_state, "lengths": lengths, "logits": logits}
    arrays |= losses(model, logits, lengths) | transcripts(model, features, mask)
    if kind == "streaming":
        arrays |= streamed(model, features)
    half = {name: x.bfloat16() if x.is_floating_point() else x for name, x in model.state_dict().items()}
    model.save_pretrained(folder / kind, state_dict=half)
    extractor.save_pretrained(folder / kind)
    arrays |= training_step(model, features, mask)
    arrays = {name: np.asarray(x.detach() if isinstance(x, torch.Tensor) else x) for name, x in arrays.items()}
    np.savez_compressed(folder / kind / "golden.npz", **arrays)
    print(kind, lengths.tolist(), arrays["labels"].tolist(), arrays["loss_none"], arrays.get("stream_labels"))


@torch.no_grad()
def relatives(folder):
    """Parakeet CTC and Nemotron 3.5 with the weights of the golden TDT and stream: their further tensors, and results.

    relatives.npz names them ctc/... and prompted/...; ctc.json and prompted.json are their config.json.
    """
    torch.manual_seed(0)
    old = hf.ParakeetForTDT.from_pretrained(folder / "tdt", dtype=torch.float32)
    sizes = dict(vocab_size=20, pad_token_id=19, ctc_loss_reduction="none")
    config = hf.ParakeetCTCConfig(**sizes, encoder_config=old.config.encoder_config)
    arrays, batch = {}, build("tdt")[1]([*recordings()], sampling_rate=RATE, return_tensors="pt")
    ctc = hf.ParakeetForCTC(config).eval()
    ctc.encoder.load_state_dict(old.encoder.state_dict())
    ctc.ctc_head.weight.normal_()
    ctc.ctc_head.bias.normal_()
    targets, inside = torch.tensor(LABELS["targets"]), torch.arange(5) < torch.tensor(LABELS["target_lengths"])[:, None]
    out = ctc(**batch, labels=torch.where(inside, targets, -100))
    arrays["ctc"] = {"loss": out.loss, "best": ctc.generate(**batch)}
    arrays["ctc"] |= {f"tensor:ctc_head.{name}": x for name, x in ctc.ctc_head.named_parameters()}

    old = hf.NemotronAsrStreamingForRNNT.from_pretrained(folder / "streaming", dtype=torch.float32)
    prompts = dict(num_prompts=3, prompt_intermediate_size=5, default_prompt_id=2)
    more = hf.Nemotron3_5AsrConfig(**SHARED, **prompts, encoder_config=old.config.encoder_config)
    batch = build("streaming")[1]([*recordings()], sampling_rate=RATE, return_tensors="pt")
    told, arrays["prompted"] = hf.Nemotron3_5AsrForRNNT(more).eval(), {}
    told.load_state_dict(old.state_dict(), strict=False)
    for name, x in told.prompt_projector.named_parameters():
        x.normal_()
        arrays["prompted"][f"tensor:prompt_projector.{name}"] = x
    languages = torch.tensor([0, 1, 2])
    rows = told.get_audio_features(**batch, prompt_ids=languages)
    logits = told(encoder_outputs=rows, decoder_input_ids=decoder_input_ids(told)).logits
    arrays["prompted"]["logits"] = logits[:, :, 0]
    ctc.config.to_json_file(folder / "ctc.json")
    told.config.to_json_file(folder / "prompted.json")
    flat = {f"{kind}/{name}": x.numpy() for kind, some in arrays.items() for name, x in some.items()}
    np.savez_compressed(folder / "relatives.npz", **flat)


folder = Path(sys.argv[1])
for seed, kind in ((0, "rnnt"), (7, "tdt"), (2, "streaming")):  # 7: "token_first" and "pair" find other labels
    write(folder, kind, seed)
relatives(folder)
wide = hf.ParakeetFeatureExtractor(feature_size=128)  # as large checkpoints have it: some filters are narrow
batch = wide([recordings()[2][:3000]], sampling_rate=RATE, return_tensors="np")
np.savez_compressed(folder / "features128.npz", features=batch.input_features)
