"""Products and eigenvalues of dome.curvature, against hessian-eigenthings 1.0 alpha.

A network of 8,554 parameters on 512 digits, in float64, after 50 steps of training. In
an environment of its own:

    pip install --no-deps hessian-eigenthings==1.0.0a5
    python benchmarks/curvature_oracle.py
"""

from collections.abc import Callable

import hessian_eigenthings as other
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dome.curvature import Covariance, Curvature, GaussNewton, Hessian, top_eigenpairs
from dome_lab.paper.tasks.images import digits

NUM, ENOUGH = 5, 200  # eigenvalues; Lanczos steps until they stand still


def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """The network, inputs and labels."""
    torch.manual_seed(0)
    task = digits()
    x = task.train_x[:512].flatten(1).double()
    y = task.train_y[:512]
    model = nn.Sequential(nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


def uncentred(covariance: Curvature, mean: Tensor) -> Callable[[Tensor], Tensor]:
    """The second moment of gradients, from their covariance and mean."""

    def product(v: Tensor) -> Tensor:
        return covariance @ v + mean * (mean @ v)

    return product


def compare(
    name: str, ours: Callable[[Tensor], Tensor], theirs: other.CurvatureOperator
) -> None:
    """Print the largest relative difference of three products."""
    generator = torch.Generator().manual_seed(1)
    size = theirs.size
    vectors = torch.randn(3, size, dtype=torch.float64, generator=generator)
    off = [
        float((ours(v) - w).norm() / w.norm())
        for v in vectors
        for w in (theirs.matvec(v).detach(),)
    ]
    print(f"{name:<14} products differ by {max(off):.1e}")


def eigenvalues(
    name: str, matrix: Curvature, operator: other.CurvatureOperator
) -> None:
    """Print how far the leading eigenvalues are apart."""
    own = top_eigenpairs(matrix, NUM, tolerance=1e-10, dtype=torch.float64)
    for steps in (None, ENOUGH):
        found = other.lanczos(
            operator, k=NUM, max_iter=steps, which="LA", seed=0, reorthogonalize=True
        )
        off = (found.eigenvalues - own.values).abs() / own.values
        angle = float(own.angles(found.eigenvectors.T).max())
        listed = " ".join(f"{value:.1e}" for value in off.tolist())
        print(
            f"{name:<14} {found.iterations:>4} steps: eigenvalues differ by {listed}, "
            f"largest angle {angle:.1e}, converged {found.converged.tolist()}"
        )
    print(f"{name:<14} ours, {own.num_products} products: {own.values.tolist()}")


def main() -> None:
    """Print every comparison."""
    torch.set_num_threads(1)
    model, x, y = trained()
    batches = [(x, y)]
    loss = other.supervised_loss(cross_entropy)
    hessian = other.HessianOperator(model, batches, loss)
    compare("Hessian", Hessian(model, cross_entropy, (x, y)).__matmul__, hessian)
    ggn = other.GGNOperator(
        model,
        batches,
        other.supervised_forward,
        other.supervised_loss_of_output(cross_entropy),
    )
    compare("Gauss-Newton", GaussNewton(model, cross_entropy, (x, y)).__matmul__, ggn)
    fisher = other.EmpiricalFisherOperator(
        model, batches, other.supervised_per_sample_loss(cross_entropy)
    )
    parameters = list(model.parameters())
    grads = torch.autograd.grad(cross_entropy(model(x), y), parameters)
    mean = torch.cat([g.flatten() for g in grads])
    covariance = Covariance(model, cross_entropy, (x, y))
    compare("Second moment", uncentred(covariance, mean), fisher)
    eigenvalues("Hessian", Hessian(model, cross_entropy, (x, y)), hessian)
    eigenvalues("Gauss-Newton", GaussNewton(model, cross_entropy, (x, y)), ggn)


if __name__ == "__main__":
    main()
