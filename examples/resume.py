"""A loop that can be stopped and started again at any time: checkpoints and signals with the Engine.

python examples/resume.py                            train; press Ctrl-C whenever you like ...
paceline run --workers 2 examples/resume.py          ... and start it again, on any number of workers up to 4
paceline checkpoint list runs/resume                 what there is to go on from

The hash in the last line is that of a run which was never stopped.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--samples", type=int, default=200_000)
parser.add_argument("--run-dir", default="runs/resume")
args = parser.parse_args()

engine = paceline.Engine(lanes=4)
points = torch.randn(args.samples, 2)
rings = (2 * points.norm(dim=1)).long() % 2  # does a point lie on an even ring, or on an odd one?
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points, rings), batch_size=16, shuffle=True)
hidden = [torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()]
model = torch.nn.Sequential(*hidden, torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = engine.prepare(model, optimizer, loader)

checkpoints = engine.checkpoints(args.run_dir, keep=2)
checkpoints.resume()  # from the newest that is complete and unharmed; the first time there is none
engine.stop_on_signals()

while loader.epoch < args.epochs and not engine.stop_requested:
    for x, y in (bar := engine.progress(loader, total=args.epochs * engine.steps_per_epoch(loader))):
        loss = cross_entropy(model(x), y)
        engine.mean("loss", loss)
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if engine.stepped:
            bar.show(loss=engine.means["loss"])
            if engine.step % 100 == 0:
                checkpoints.save()  # written while the loop goes on
checkpoints.save()  # after the last step, or after the one that a signal let finish
checkpoints.close()
engine.exit_if_stopped()  # with code 75, which means: start again
engine.print("weights", engine.weights_hash())
