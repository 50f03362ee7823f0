"""Across machines: two trainers share four experts, and a server is killed while they train.

    python examples/remote_experts.py [--steps 600] [--seed 0] [--out torchweft-report]

    8 x 8 image ──> stem ──┬──> mixture: the 2 best of 4 experts ──> + ──> head ──> 10 scores
                           |         at two servers                  ^
                           └─────────────────────────────────────────┘

Each expert is a module and its optimizer, served by `torchweft serve` in its own process. Each trainer has its own
stem, router and head. The experts form a grid of two by two, and each server has a diagonal of it. Of the two best
experts of a sample, one is therefore at each server. If one server dies, `k_min=1` is met and training continues. The
killed server is restarted and continues from its last checkpoint.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft
from torchweft import report
from torchweft.experts.client import Connections, RemoteExpert
from torchweft.experts.mixture import RemoteSwitchMixtureOfExperts

SERVERS = (("digits.0.0", "digits.1.1"), ("digits.0.1", "digits.1.0"))  # the diagonals of the grid
WIDTH = 64
ROWS = 64
CONFIG = """
address = "{address}"
checkpoints = "{folder}"

[options]
checkpoint_seconds = 1.0
"""
EXPERT = """
[[experts]]
name = "{name}"
kind = "ffn"
arguments = {{ hidden = 64, inner = 128 }}
optimizer = "Adam"
optimizer_arguments = {{ lr = 0.001 }}
"""


class Server:
    """A `torchweft serve` process. Every start uses the same address and the same checkpoints."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.names = names
        self.config = folder / f"{names[0]}.toml"
        experts = "".join(EXPERT.format(name=name) for name in names)
        self.config.write_text(CONFIG.format(address=self.address, folder=folder / "checkpoints") + experts)

    def start(self) -> None:
        """Start the process and wait until it listens."""
        command = [sys.executable, "-m", "torchweft", "serve", str(self.config)]
        single = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=single)
        if not self.process.stdout.readline():
            raise SystemExit(f"the server of {', '.join(self.names)} did not start; see above")

    def kill(self) -> None:
        """Stop like a crash, without saving and without notice to clients."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Shut down gracefully: finish the accepted work and save the experts."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=30)

    def steps(self) -> dict[str, tuple[int, int]]:
        """For each expert: its optimizer steps, and how many of them would survive a crash."""
        counts = {}
        for name in self.names:
            with RemoteExpert(name, self.address) as remote:
                description = remote.describe()
                counts[name] = (description.steps, description.durable or 0)
        return counts


class Classifier(nn.Module):
    """N x 64 pixels -> N x 10 scores, and the loss that balances the load of the experts."""

    def __init__(self, connections: Connections) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, WIDTH), nn.GELU())
        self.mixture = RemoteSwitchMixtureOfExperts(
            in_features=WIDTH,
            grid_size=(2, 2),
            uid_prefix="digits",
            connections=connections,
            k_best=2,
            k_min=1,  # of the two experts of a sample, one must answer, forward ...
            backward_k_min=1,  # ... and backward
            forward_timeout=20.0,
            backward_timeout=20.0,
            timeout_after_k_min=5.0,
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(images)
        y, balance = self.mixture(x)
        return self.head(x + y), balance


class Trainer:
    """One of two trainers, with every second image, and with its own weights around the shared experts."""

    def __init__(self, number: int, images: Tensor, digits: Tensor, connections: Connections, began: float) -> None:
        self.images, self.digits = images[number::2], digits[number::2]
        self.model = Classifier(connections)
        self.steps, self.failed, self.began = 0, None, began
        self.losses: list[tuple[float, float]] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        try:
            while not self.stop.is_set():
                rows = torch.randint(len(self.images), (ROWS,))
                scores, balance = self.model(self.images[rows])
                optimizer.zero_grad()
                loss = functional.cross_entropy(scores, self.digits[rows])
                (loss + 0.05 * balance).backward()  # the servers step the experts
                optimizer.step()
                self.losses.append((time.monotonic() - self.began, loss.item()))
                self.steps += 1
        except Exception as error:
            self.failed = error

    @torch.no_grad()
    def accuracy(self, images: Tensor, digits: Tensor) -> float:
        return (self.model(images)[0].argmax(1) == digits).float().mean().item()


def data(seed: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's bundled digits, 1797 of 8 x 8, in a random order."""
    bundled = load_digits()
    order = torch.randperm(len(bundled.target), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(bundled.images).float().flatten(1)[order] / 16, torch.tensor(bundled.target)[order]


def train_until(trainers: list[Trainer], steps: int) -> None:
    """Wait until the trainers have taken `steps` steps together. Exit if a trainer failed."""
    while sum(trainer.steps for trainer in trainers) < steps:
        for trainer in trainers:
            if trainer.failed is not None:
                raise SystemExit(f"a trainer failed: {trainer.failed!r}") from trainer.failed
        time.sleep(0.02)


def picture(trainers: list[Trainer], marks: list[tuple[float, str]]) -> str:
    """A page with the loss of both trainers over time, and the events of a server."""
    lines = {f"trainer {number}": trainer.losses for number, trainer in enumerate(trainers)}
    x, y = report.Axis("seconds"), report.Axis("loss")
    chart = report.line_chart(lines, title="Loss of two trainers", x=x, y=y, marks=marks)
    return report.page("Four experts on two servers", [report.Section("Training", [report.figure(chart)])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="steps of both trainers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("torchweft-report"), help="folder of the picture")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", weft.errors.StepsLostWarning)  # the steps that are lost are printed below
    images, digits = data(options.seed)
    held_out = images[:297], digits[:297]
    print("across machines: two trainers share four experts, and a server is killed while they train")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        servers = [Server(folder, names) for names in SERVERS]
        for server in servers:
            server.start()
            stack.callback(server.kill)
        where = {name: server.address for server in servers for name in server.names}
        connections = stack.enter_context(Connections(where))
        began = time.monotonic()
        trainers = [Trainer(number, images[297:], digits[297:], connections, began) for number in range(2)]
        for trainer in trainers:
            stack.callback(trainer.stop.set)
            trainer.thread.start()

        train_until(trainers, options.steps // 2)
        before = servers[0].steps()
        servers[0].kill()
        marks = [(time.monotonic() - began, "a server is killed")]
        killed_at = sum(trainer.steps for trainer in trainers)
        print(f"  killed the server of {', '.join(servers[0].names)} after {killed_at} steps of the trainers")
        train_until(trainers, killed_at + options.steps // 10)
        print(f"  the trainers took {sum(trainer.steps for trainer in trainers) - killed_at} steps without it")
        servers[0].start()
        marks.append((time.monotonic() - began, "it is back"))
        restored = servers[0].steps()
        for name, (taken, durable) in before.items():
            again = restored[name][0]
            print(f"  {name}: had taken {taken} steps, {durable} of them durable; it continues from step {again}")
            if again < durable:
                raise SystemExit("a durable step was lost")
        train_until(trainers, sum(trainer.steps for trainer in trainers) + options.steps // 3)
        for trainer in trainers:
            trainer.stop.set()
            trainer.thread.join()
        scores = ", ".join(f"{trainer.accuracy(*held_out):.1%}" for trainer in trainers)
        print(f"  held-out digits after {sum(trainer.steps for trainer in trainers)} steps: {scores} right")
        for server in servers:
            server.end()
    options.out.mkdir(parents=True, exist_ok=True)
    page = options.out / "experts.html"
    page.write_text(picture(trainers, marks), encoding="utf-8")
    print(f"  wrote {page.resolve()} (open it in a browser)")


if __name__ == "__main__":
    main()
