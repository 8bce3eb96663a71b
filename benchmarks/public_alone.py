"""What table 2's public images are worth by themselves, without any private image.

A public basis comes from 500 images that DP-SGD does not see. Before crediting the
filter with the difference, train on nothing but those images: no noise, no clipping,
plain SGD at several learning rates, the table's network, seeds and test images.

    python benchmarks/public_alone.py
"""

import statistics
from dataclasses import replace

from dome_lab.paper.figures.tab02_privacy import PRETRAIN, SCALES
from dome_lab.paper.private import train_publicly
from dome_lab.paper.run import Run
from dome_lab.paper.train import evaluate, start

LEARNING_RATES = (0.03, 0.1, 0.3)


def accuracy(run: Run, lr: float) -> float:
    """Test accuracy after training on the public images."""
    task, model = start(run)
    train_publicly(model, task, replace(run, pretrain=PRETRAIN), lr)
    return float(evaluate(model, task.test_x, task.test_y)["test_accuracy"])


def main() -> None:
    """Print the mean over seeds for each learning rate."""
    config = SCALES["cpu"]
    for lr in LEARNING_RATES:
        runs = [replace(config.run, seed=seed) for seed in range(config.num_seeds)]
        found = [accuracy(run, lr) for run in runs]
        each = "  ".join(f"{value:.3f}" for value in found)
        print(f"learning rate {lr}: mean {statistics.mean(found):.3f}   {each}")


if __name__ == "__main__":
    main()
