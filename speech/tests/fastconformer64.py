"""FastConformer in float64 of NumPy, by NeMo's names of tensors and by loops over what a frame sees."""

import numpy as np


def normed(x, tensors, name):
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return (x - x.mean(-1, keepdims=True)) / deviation * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def linear(x, tensors, name):
    weight = tensors[f"{name}.weight"]
    return x @ weight.reshape(len(weight), -1).T + tensors.get(f"{name}.bias", 0)


def swish(x):
    return x / (1 + np.exp(-x))


def forward(x, tensors, name, i):
    x = linear(normed(x, tensors, f"{name}.norm_feed_forward{i}"), tensors, f"{name}.feed_forward{i}.linear1")
    return linear(swish(x), tensors, f"{name}.feed_forward{i}.linear2")


def strided(x, weight, bias, apart):
    """x [C, T, F] after a convolution of 3 x 3 with stride 2 and zeros around; `apart`: each channel by itself."""
    x = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    sizes = [(n - 3) // 2 + 1 for n in x.shape[1:]]
    out = np.zeros((len(weight), *sizes))
    for t, f in np.ndindex(*sizes):
        part = x[:, 2 * t : 2 * t + 3, 2 * f : 2 * f + 3]
        out[:, t, f] = (weight[:, 0] * part).sum((1, 2)) if apart else (weight * part).sum((1, 2, 3))
    return out + bias[:, None, None]


def subsampled(x, tensors):
    name, last = "encoder.pre_encode.conv", 2
    x = np.maximum(strided(x[None], tensors[f"{name}.0.weight"], tensors[f"{name}.0.bias"], False), 0)
    while f"{name}.{last}.weight" in tensors:
        x = strided(x, tensors[f"{name}.{last}.weight"], tensors[f"{name}.{last}.bias"], True)
        point = linear(x.transpose(1, 2, 0), tensors, f"{name}.{last + 1}")
        x, last = np.maximum(point.transpose(2, 0, 1), 0), last + 3
    return linear(x.transpose(1, 0, 2).reshape(x.shape[1], -1), tensors, "encoder.pre_encode.out")


def attended(x, tensors, name, heads, edges):
    query, key, value = (linear(x, tensors, f"{name}.linear_{part}").reshape(len(x), heads, -1) for part in "qkv")
    size, width = query.shape[-1], x.shape[-1]
    u, v = tensors[f"{name}.pos_bias_u"], tensors[f"{name}.pos_bias_v"]
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    out = np.zeros_like(query)
    for t, (first, end) in enumerate(edges):
        angles = (t - np.arange(first, end))[:, None] * frequencies
        place = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(end - first, width)
        place = linear(place, tensors, f"{name}.linear_pos").reshape(-1, heads, size)
        for h in range(heads):
            scores = key[first:end, h] @ (query[t, h] + u[h]) + place[:, h] @ (query[t, h] + v[h])
            weights = np.exp((scores - scores.max()) / size**0.5)
            out[t, h] = weights @ value[first:end, h] / weights.sum()
    return linear(out.reshape(x.shape), tensors, f"{name}.linear_out")


def convolved(x, tensors, name, edges):
    a, b = np.split(linear(x, tensors, f"{name}.pointwise_conv1"), 2, -1)
    x, kernel = a / (1 + np.exp(-b)), tensors[f"{name}.depthwise_conv.weight"][:, 0]
    half, out = kernel.shape[1] // 2, np.zeros_like(x)
    for t, (_, end) in enumerate(edges):
        for place in range(max(0, t - half), min(t + half + 1, end)):
            out[t] += kernel[:, place - t + half] * x[place]
    out += tensors.get(f"{name}.depthwise_conv.bias", 0)
    norm = {x: tensors[f"{name}.batch_norm.{x}"] for x in ("weight", "bias", "running_mean", "running_var")}
    out = (out - norm["running_mean"]) / np.sqrt(norm["running_var"] + 1e-5) * norm["weight"] + norm["bias"]
    return linear(swish(out), tensors, f"{name}.pointwise_conv2")


def rows(tensors, x, heads, left, chunk, right, before=0):
    """Rows [T, E] of features [S, M] in a context, whose first chunk has lost `before` frames."""
    x, layer = subsampled(np.float64(x), tensors), 0
    edges = []
    for t in range(len(x)):
        start = (t + before) // chunk * chunk - before
        edges.append((max(0, start - left), min(len(x), start + chunk + right)))
    while f"encoder.layers.{layer}.norm_out.weight" in tensors:
        name = f"encoder.layers.{layer}"
        x = x + forward(x, tensors, name, 1) / 2
        x = x + attended(normed(x, tensors, f"{name}.norm_self_att"), tensors, f"{name}.self_attn", heads, edges)
        x = x + convolved(normed(x, tensors, f"{name}.norm_conv"), tensors, f"{name}.conv", edges)
        x = normed(x + forward(x, tensors, name, 2) / 2, tensors, f"{name}.norm_out")
        layer += 1
    return x
