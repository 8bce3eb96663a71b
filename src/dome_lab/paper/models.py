"""The networks of the experiments, and the table of their names.

All of them treat samples independently, which per-sample gradients need: the residual
networks have group normalisation.

Shapes: B inputs; of texts, T positions, E width, H heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

from dome_lab.paper.tasks.selection import Task
from dome_lab.paper.tasks.texts import LENGTH, PADDING

NUM_GROUPS = 8  # of group normalisation
WIDTH, NUM_HEADS, FEED_FORWARD, NUM_LAYERS = 64, 4, 256, 3  # the paper's Transformer


def mlp(num_inputs: int = 784, num_classes: int = 10) -> nn.Sequential:
    """Two hidden layers of 32 tanh units, small enough for its Hessian.

    The network of most results of Song et al. (2024), "Does SGD really happen in tiny
    subspaces?" 26,506 parameters at 784 inputs and ten classes.
    """
    return _fully_connected(num_inputs, 32, num_classes, nn.Tanh)


def relu_mlp(num_inputs: int = 784, num_classes: int = 10) -> nn.Sequential:
    """Two hidden layers of 100 ReLUs, for continual learning on MNIST.

    As in Kirkpatrick et al. (2017), "Overcoming catastrophic forgetting in neural
    networks", with fewer and narrower layers. 89,610 parameters for MNIST.
    """
    return _fully_connected(num_inputs, 100, num_classes, nn.ReLU)


def _fully_connected(
    num_inputs: int, width: int, num_classes: int, unit: type[nn.Module]
) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, width),
        unit(),
        nn.Linear(width, width),
        unit(),
        nn.Linear(width, num_classes),
    )


def tanh_cnn(
    in_channels: int = 1, num_classes: int = 10, side: int = 28
) -> nn.Sequential:
    """Two convolutions with tanh and a hidden layer of 32, for private training.

    Papernot et al. (2021), "Tempered sigmoid activations for deep learning with
    differential privacy". Noise grows with the number of parameters: these are few,
    26,010 for MNIST. For square images of 16 pixels or more.
    """
    body = nn.Sequential(
        nn.Conv2d(in_channels, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    with torch.no_grad():
        width = body(torch.zeros(1, in_channels, side, side)).shape[1]
    return nn.Sequential(
        *body, nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, num_classes)
    )


def resnet8(in_channels: int = 3, num_classes: int = 10) -> nn.Sequential:
    """ResNet-8 of Song et al. (2024), for images of eight pixels or more.

    A stem, three stages of one basic block each and a linear head.

    Convolutions have no bias. 78,042 parameters at three channels and ten classes.
    """
    first, second, third = 16, 32, 64
    return nn.Sequential(
        _convolution(in_channels, first, kernel_size=3),
        nn.ReLU(inplace=True),
        BasicBlock(first, first, stride=1),
        BasicBlock(first, second, stride=2),
        BasicBlock(second, third, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(third, num_classes),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut: relu(body(x) + shortcut(x)).

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Of the first convolution; 2 halves height and width.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(in_channels, out_channels, kernel_size=3, stride=stride),
            nn.ReLU(inplace=True),
            _convolution(out_channels, out_channels, kernel_size=3),
        )
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut: nn.Module = (
            nn.Identity()
            if same_shape
            else _convolution(in_channels, out_channels, kernel_size=1, stride=stride)
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, shape (B, out_channels, height/stride, width/stride)."""
        return self.activation(self.body(x) + self.shortcut(x))


def _convolution(
    in_channels: int, out_channels: int, *, kernel_size: int, stride: int = 1
) -> nn.Sequential:
    """A convolution that keeps the size (up to the stride), then group norm."""
    return nn.Sequential(
        nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2,
            bias=False,
        ),
        nn.GroupNorm(NUM_GROUPS, out_channels),
    )


def resnet18(in_channels: int = 3, num_classes: int = 200) -> nn.Sequential:
    """ResNet-18 of He et al. (2016), for images of 16 pixels or more.

    With a 3 x 3 stem, as is usual for small images: eight basic blocks in four stages.

    Convolutions have no bias. 11,271,432 parameters at three channels and 200 classes.
    """
    width, *_ = widths = (64, 128, 256, 512)
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        nn.GroupNorm(NUM_GROUPS, width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    for stage, out_width in enumerate(widths):
        stride = 1 if stage == 0 else 2
        layers.append(BasicBlock(width, out_width, stride=stride))
        layers.append(BasicBlock(out_width, out_width, stride=1))
        width = out_width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)]
    return nn.Sequential(*layers)


class Transformer(nn.Module):
    """A small Transformer encoder for texts (B, T) of word numbers, T = ``length``.

    Vaswani et al. (2017), "Attention is all you need": word embeddings, learned
    positions, encoder layers with the normalisation after each sum, and a linear
    classifier on what comes out at [CLS], the first position. No dropout.

    Args:
        vocabulary_size: How many word numbers there are.
        num_classes: Outputs.
        length: Positions in a text, [CLS] included.
    """

    def __init__(
        self, vocabulary_size: int, num_classes: int, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, WIDTH)
        # Small against the words', which have variance 1.
        self.positions = nn.Parameter(0.02 * torch.randn(length, WIDTH))
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(NUM_LAYERS))
        self.classifier = nn.Linear(WIDTH, num_classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Logits, shape (B, num_classes)."""
        x = self.words(texts) + self.positions
        seen = (texts != PADDING)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        return self.classifier(x[:, 0])


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each added and then normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, FEED_FORWARD)
        self.narrow = nn.Linear(FEED_FORWARD, WIDTH)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        # As torch initialises its own attention.
        nn.init.xavier_uniform_(self.query_key_value.weight)
        nn.init.zeros_(self.query_key_value.bias)
        nn.init.zeros_(self.merge.bias)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """The layer's output, shape (B, T, E).

        Args:
            x: What came out below, shape (B, T, E).
            seen: Positions that are not padding, shape (B, 1, 1, T).
        """
        x = self.attention_norm(x + self._attention(x, seen))
        return self.feed_forward_norm(x + self.narrow(relu(self.widen(x))))

    def _attention(self, x: Tensor, seen: Tensor) -> Tensor:
        B, T, E = x.shape
        heads = self.query_key_value(x).view(B, T, 3, NUM_HEADS, E // NUM_HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.merge(mixed.transpose(1, 2).reshape(B, T, E))


class NextWord(nn.Module):
    """A small GPT: what the next word is, at each place of a piece of text (B, T).

    The layers of ``Transformer``, each place of which sees no later ones.

    Args:
        vocabulary_size: How many word numbers there are.
        length: T.
    """

    def __init__(self, vocabulary_size: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(length, WIDTH))
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, vocabulary_size)

    def forward(self, texts: Tensor) -> Tensor:
        """Logits, shape (B, vocabulary_size, T), as ``cross_entropy`` takes them."""
        x = self.words(texts) + self.positions
        length = texts.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            x = layer(x, earlier)
        return self.head(x).mT


MODELS: dict[str, Callable[[Task], nn.Module]] = {
    "resnet8": lambda task: resnet8(task.train_x.shape[1], task.num_classes),
    "resnet18": lambda task: resnet18(task.train_x.shape[1], task.num_classes),
    "tanh_cnn": lambda task: tanh_cnn(
        task.train_x.shape[1], task.num_classes, task.train_x.shape[3]
    ),
    "mlp": lambda task: mlp(task.train_x[0].numel(), task.num_classes),
    "relu_mlp": lambda task: relu_mlp(task.train_x[0].numel(), task.num_classes),
    "transformer": lambda task: Transformer(
        task.vocabulary_size or 0, task.num_classes, task.train_x.shape[1]
    ),
    "gpt": lambda task: NextWord(task.vocabulary_size or 0, task.train_x.shape[1]),
}


def make_model(name: str, task: Task) -> nn.Module:
    """A network of ``MODELS`` for a task; images and texts have different ones."""
    has_texts = task.vocabulary_size is not None
    fitting = "transformer" if has_texts else "resnet8' or 'resnet18"
    if has_texts and task.train_y.ndim > 1:
        fitting = "gpt"
    takes_texts = name in ("transformer", "gpt")
    if has_texts and name != fitting:
        taken = "texts with other targets" if takes_texts else "images"
        raise ValueError(
            f"model {name!r} takes {taken}, task {task.name!r} has texts: choose model "
            f"'{fitting}'"
        )
    if takes_texts and not has_texts:
        raise ValueError(
            f"model {name!r} takes texts, task {task.name!r} has images: choose "
            f"model '{fitting}'"
        )
    return MODELS[name](task)
