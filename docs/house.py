"""Draws docs/house.png: the folders of the library and the arrows between them. `python docs/house.py`."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOMS = {  # name: (x, y, text)
    "losses/": (0, 3, "a loss as a value;\nits methods"),
    "decode/, flax/": (2.4, 3, "searches; networks"),
    "sharding/": (4.4, 2, "losses over\nseveral devices"),
    "layouts/": (0, 2, "how logits are given:\nchecks and emission"),
    "emissions/": (0, 1, "logits -> planes\n[..., T, U + 1]"),
    "lattices/": (2.4, 1, "arcs -> loss,\nposteriors, best path"),
    "_xla/": (1.2, 0, "custom calls, primitives,\nlowering, meshes"),
    "xla_kernels/": (3.6, 0, "common, cpu, cuda"),
}
ARROWS = [
    ("losses/", "layouts/"), ("losses/", "lattices/"), ("decode/, flax/", "losses/"), ("layouts/", "emissions/"),
    ("losses/", "sharding/"), ("sharding/", "emissions/"),
    ("emissions/", "_xla/"), ("lattices/", "_xla/"), ("_xla/", "xla_kernels/"),
]  # fmt: skip

figure, axes = plt.subplots(figsize=(8, 4.2))
for name, (x, y, text) in ROOMS.items():
    axes.add_patch(plt.Rectangle((x - 0.9, y - 0.32), 1.8, 0.64, facecolor="#eef3f8", edgecolor="#456"))
    axes.text(x, y + 0.14, name, ha="center", va="center", weight="bold", family="monospace")
    axes.text(x, y - 0.12, text, ha="center", va="center", fontsize=8)
for start, end in ARROWS:
    (x, y, _), (v, w, _) = ROOMS[start], ROOMS[end]
    if y == w:
        tail, head = (x + (0.9 if v > x else -0.9), y), (v + (-0.9 if v > x else 0.9), w)
    else:
        tail, head = (x + (0.85 if y - w > 1 else 0), y - 0.32), (v, w + 0.32)
    axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "color": "#456"})
axes.set(xlim=(-1.1, 5.4), ylim=(-0.5, 3.5))
axes.axis("off")
figure.savefig(pathlib.Path(__file__).with_name("house.png"), dpi=110, bbox_inches="tight")
