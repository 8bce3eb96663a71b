import torch
from samples.models import B, Then, images, sequence, words
from torch import nn


def bags(mode, **options):
    return nn.EmbeddingBag(7, 3, mode=mode, **options)


LAYERS = {
    "linear": lambda: (nn.Linear(4, 3), sequence(B, 4)),
    "linear without bias": lambda: (nn.Linear(4, 3, bias=False), sequence(B, 4)),
    "linear on sequences": lambda: (nn.Linear(4, 3), sequence(B, 5, 4)),
    "linear on long sequences": lambda: (nn.Linear(4, 3), sequence(B, 20, 4)),
    "linear on grids": lambda: (nn.Linear(4, 3), sequence(B, 2, 3, 4)),
    "linear on flattened positions": lambda: (
        Then(
            lambda m, x: m.layer(x.reshape(-1, 4)).view(-1, 5, 3), layer=nn.Linear(4, 3)
        ),
        sequence(B, 5, 4),
    ),
    "bilinear": lambda: (
        Then(lambda m, x: m.layer(x, x.sin()), layer=nn.Bilinear(4, 4, 3)),
        sequence(B, 4),
    ),
    "prelu": lambda: (nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)), sequence(B, 4)),
    "conv1d": lambda: (nn.Conv1d(3, 4, 3, padding=1), images(size=(7,))),
    "conv2d": lambda: (nn.Conv2d(3, 4, 3, stride=2, padding=1), images()),
    "conv2d of many channels": lambda: (nn.Conv2d(9, 4, 3, padding=1), images(9)),
    "conv2d in groups": lambda: (nn.Conv2d(4, 6, 3, groups=2, dilation=2), images(4)),
    "conv2d depthwise": lambda: (nn.Conv2d(4, 8, 3, groups=4), images(4)),
    "conv2d same": lambda: (nn.Conv2d(3, 4, (2, 4), padding="same"), images()),
    "conv2d valid": lambda: (nn.Conv2d(3, 4, (2, 3), padding="valid"), images()),
    "conv2d reflecting": lambda: (
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        images(),
    ),
    "conv2d circular same": lambda: (
        nn.Conv2d(3, 4, (2, 3), padding="same", padding_mode="circular"),
        images(),
    ),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), images(2, (3, 4, 3))),
    "conv2d on frames": lambda: (
        Then(
            lambda m, x: m.layer(x.flatten(0, 1)).unflatten(0, (-1, 3)),
            layer=nn.Conv2d(2, 4, 3),
        ),
        sequence(B, 3, 2, 5, 5),
    ),
    "conv_transpose1d": lambda: (
        nn.ConvTranspose1d(3, 4, 3, stride=2),
        images(size=(5,)),
    ),
    "conv_transpose2d": lambda: (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        images(4),
    ),
    "conv_transpose3d": lambda: (
        nn.ConvTranspose3d(2, 3, 2, dilation=2),
        images(2, (3, 2, 2)),
    ),
    "group norm": lambda: (nn.GroupNorm(2, 6), images(6)),
    "group norm on vectors": lambda: (nn.GroupNorm(2, 6), sequence(B, 6)),
    "layer norm": lambda: (nn.LayerNorm(5), images()),
    "layer norm on images": lambda: (nn.LayerNorm((3, 6, 5)), images()),
    "layer norm without bias": lambda: (nn.LayerNorm(5, bias=False), images()),
    "rms norm": lambda: (nn.RMSNorm((6, 5)), images()),
    "instance norm": lambda: (nn.InstanceNorm2d(3, affine=True), images()),
    "batch norm in evaluation mode": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4).eval()),
        images(),
    ),
    "embedding": lambda: (nn.Embedding(7, 3), words()),
    "embedding with padding": lambda: (nn.Embedding(7, 3, padding_idx=-1), words()),
    "embedding with max norm": lambda: (nn.Embedding(7, 3, max_norm=1.0), words()),
    "embedding of single words": lambda: (nn.Embedding(7, 3), words(B)),
    "bag mean": lambda: (bags("mean"), words()),
    "bag sum": lambda: (bags("sum"), words()),
    "bag max": lambda: (bags("max"), words()),
    "bag with padding": lambda: (bags("mean", padding_idx=2), words(high=4)),
    "bag max with padding": lambda: (bags("max", padding_idx=2), words(high=4)),
    "weighted bag": lambda: (
        Then(lambda m, x, w: m.bag(x, per_sample_weights=w), bag=bags("sum")),
        [*words(), torch.randn(B, 5)],
    ),
}
