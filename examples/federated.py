"""CIFAR-10 on ten clients with few classes each: filtered updates, top-k, averages.

    python examples/federated.py

The first call makes an environment with Flower (flwr) next to this one, and starts
itself there. Clients run one after the other in this process, without Ray. A client's
update is a sample: every tenth round clients send them unfiltered and the server learns
its directions, which it sends as thin matrices with the next model. In other rounds
each client filters its update with these, and compresses what is left.
"""

import argparse
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome.compression import ErrorFeedback, Message, TopK
from dome_lab.paper.tasks import load_task

CLIENTS, ALPHA = 10, 0.1  # clients; of the Dirichlet distribution of their classes
RATE, LEARNING_RATE = 50, 10  # of compression; the same at rounds that learn
RANK, THIN, EVERY = 5, 4, 10  # directions; rank of their matrices; rounds in between
ARMS = {
    "no filter, nothing compressed": (False, False),
    "no filter, top-k with feedback": (False, True),
    "filtered, top-k with feedback": (True, True),
}
FLOWER = "flwr==1.42.0"
NEEDED = ["grpcio", "grpcio-health-checking", "protobuf<7", "cryptography", "httpx"]
NEEDED += ["pycryptodome", "iterators", "typer<0.21", "rich<15"]
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))


def into_environment_with_flower():
    """Start this file again where Flower is; make that place if it is missing."""
    folder = HOME / "dome" / "federated"
    if Path(sys.prefix) == folder:
        raise  # noqa: PLE0704 (of an import that failed there too)
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"making an environment with Flower in {folder}", flush=True)
        venv.create(folder, with_pip=False, clear=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "outer.pth").write_text("\n".join(site.getsitepackages()))
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        # What a server and its clients in one process need, without what serves them.
        subprocess.run([*pip, "--no-deps", FLOWER], check=True)
        subprocess.run([*pip, *NEEDED], check=True)
        (folder / "complete").touch()
    sys.exit(subprocess.run([python, *sys.argv], check=False).returncode)


try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
    from flwr.app import Message as Letter
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity
except ModuleNotFoundError:
    into_environment_with_flower()


def network():
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(1568, 10))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def write_(model, vector, grad=False):
    """Write a vector into the parameters of a model, or into their gradients."""
    parts = vector.split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        if grad:
            p.grad = part.view_as(p).clone()
        else:
            p.detach().copy_(part.view_as(p))


def filtered(model, grad_filter, update):
    """An update without its part in the filter's directions."""
    write_(model, update, grad=True)
    grad_filter.filter_()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def thin_filter(model):
    return dome.GradientFilter(model, RANK, direction_rank=THIN, samples="microbatch")


def in_arrays(**tensors):
    return ArrayRecord([t.numpy() for t in tensors.values()])


def vector_of(record):
    return torch.from_numpy(record.to_numpy_ndarrays()[0].copy())


class OneProcess(Grid):
    """Clients that are called one after the other; counts bytes both ways."""

    def __init__(self, client):
        self.client, self.down, self.up = client, 0, 0
        # What Flower's own engines set before they start a server.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 0, CLIENTS
        self.contexts = {
            node: Context(0, node, {}, RecordDict(), {}) for node in range(CLIENTS)
        }

    def set_run(self, run):
        pass

    run = property(lambda self: None)

    def get_node_ids(self):
        return list(self.contexts)

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Letter(content, dst_node_id=dst_node_id, message_type=message_type)

    def push_messages(self, messages):
        raise NotImplementedError

    pull_messages = push_messages

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            self.down += bytes_in(message)
            node = message.metadata.dst_node_id
            replies.append(self.client(message, self.contexts[node]))
            self.up += bytes_in(replies[-1])
        return replies


def bytes_in(message):
    records = message.content.array_records.values()
    return sum(len(a.data) for record in records for a in record.values())


def client_app(parts, task, compresses):
    """What a client does with a model: train, maybe filter, send its update."""
    app, model = ClientApp(), network()
    memories = {node: ErrorFeedback(TopK(RATE)) for node in range(CLIENTS)}
    # Every client has the directions that were sent last. The filter is on a model that
    # is not trained: zeros in the gradients of one that is would be taken for a mask.
    still, names = network(), []
    grad_filter = thin_filter(still)

    @app.train()
    def train(message, context):
        content, node = message.content, context.node_id
        start = vector_of(content["arrays"])
        write_(model, start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        order = torch.randperm(len(parts[node]))
        for batch in parts[node][order].split(32):
            optimizer.zero_grad()
            cross_entropy(model(task.train_x[batch]), task.train_y[batch]).backward()
            optimizer.step()
        update = flat(model) - start
        if "directions" in content:
            state = grad_filter.state_dict()
            arrays = content["directions"].to_numpy_ndarrays()
            names[:] = state
            new = {
                n: torch.from_numpy(a.copy())
                for n, a in zip(names, arrays, strict=True)
            }
            grad_filter.load_state_dict(new)
        if content["config"]["filters"] and names:
            update = filtered(still, grad_filter, update)
        if not compresses:
            sent = update
        elif content["config"]["learns"]:
            sent = TopK(LEARNING_RATE).encode(update).payload
        else:
            sent = memories[node].encode(update).payload
        return Letter(RecordDict({"update": in_arrays(sent=sent)}), reply_to=message)

    return app


class Server(FedAvg):
    """Averages updates; learns directions from those that are not filtered."""

    def __init__(self, filters, compresses):
        super().__init__()
        self.filters, self.compresses, self.model = filters, compresses, network()
        self.grad_filter, self.is_news = thin_filter(self.model), False

    def configure_train(self, server_round, arrays, config, grid):
        self.learns = self.filters and server_round % EVERY == 1
        filters = self.filters and not self.learns
        said = ConfigRecord({"filters": filters, "learns": self.learns})
        content = {"arrays": arrays, "config": said}
        if self.is_news:
            content["directions"] = in_arrays(**self.grad_filter.state_dict())
            self.is_news = False
        return [
            grid.create_message(RecordDict(dict(content)), "train", node, "")
            for node in grid.get_node_ids()
        ]

    def configure_evaluate(self, server_round, arrays, config, grid):
        return []

    def aggregate_train(self, server_round, replies):
        sent = [vector_of(reply.content["update"]) for reply in replies]
        if self.compresses:
            fed_back = ErrorFeedback(TopK(RATE))
            reader = TopK(LEARNING_RATE) if self.learns else fed_back
            sent = [reader.decode(Message(payload)) for payload in sent]
        update = torch.stack(sent).mean(dim=0)
        if self.learns:
            self.grad_filter.observe(torch.stack(sent))
            self.is_news = True
            update = filtered(self.model, self.grad_filter, update)
        write_(self.model, flat(self.model) + update)
        return in_arrays(model=flat(self.model)), None


def split(labels, generator):
    """The images of each client: shares of every class by a Dirichlet distribution."""
    torch.manual_seed(0)
    shares = torch.distributions.Dirichlet(torch.full((CLIENTS,), ALPHA)).sample((10,))
    parts = [[] for _ in range(CLIENTS)]
    for label in range(10):
        own = (labels == label).nonzero().flatten()
        own = own[torch.randperm(len(own), generator=generator)]
        ends = (shares[label].cumsum(0) * len(own)).round().long().tolist()
        for part, first, last in zip(parts, [0, *ends], ends, strict=False):
            part.append(own[first:last])
    return [torch.cat(part) for part in parts]


def train(arm, task, rounds, seed):
    """Accuracy in per cent, and megabytes down and up."""
    filters, compresses = ARMS[arm]
    parts = split(task.train_y, torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    server = Server(filters, compresses)
    grid = OneProcess(client_app(parts, task, compresses))
    server.start(grid, in_arrays(model=flat(server.model)), rounds)
    with torch.no_grad():
        answers = server.model(task.test_x).argmax(dim=1)
    accuracy = 100 * (answers == task.test_y).double().mean().item()
    return accuracy, grid.down / 1e6, grid.up / 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = load_task("cifar10", num_train=options.images, num_test=1000)
    for arm in ARMS:
        ends = [train(arm, task, options.rounds, s) for s in range(options.seeds)]
        accuracy, down, up = (
            sum(column) / len(ends) for column in zip(*ends, strict=True)
        )
        each = " ".join(f"{end[0]:.1f}" for end in ends)
        print(
            f"{arm:<32} accuracy {accuracy:.1f} % ({each}), "
            f"{down:.2f} MB down, {up:.3f} MB up",
            flush=True,
        )


if __name__ == "__main__":
    main()
