"""A training of seconds, as a program: python -m tests.training.tiny_loop JOB ..., all at once.

A job is a JSON object: arguments of ``train`` and "env". Each runs in a process of its own that is forked once torch is
imported, which takes longer than everything else. Prints how each ended.
"""

import hashlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

from outpace.training.data import Answer
from outpace.training.loop import Loop, Team
from outpace.training.objective import Packing
from outpace.training.options import EagleOptions, LoopOptions
from tests.training import eagle_helpers as tiny


class Said:
    """What the loop asks of ``Answers``."""

    def __init__(self, count, seed):
        draw = np.random.default_rng(seed)
        self.all = [
            Answer(str(i), "test", draw.integers(0, tiny.VOCAB, n).astype(np.int32), 2)
            for i, n in enumerate(draw.integers(5, 15, count).tolist())
        ]

    def __len__(self):
        return len(self.all)

    def __getitem__(self, i):
        return self.all[i]

    def lengths(self):
        return np.array([len(answer.tokens) for answer in self.all], np.int32)


class Random:
    """Hidden states that follow from an answer's place; ``spoilt``: one that is infinite."""

    def __init__(self, answers, spoilt=None):
        self.answers, self.spoilt = answers, spoilt

    def plan(self, order):
        pass

    def states(self, i):
        draw = torch.Generator().manual_seed(i)
        states = torch.randn(len(self.answers[i].tokens), 4, tiny.HIDDEN, generator=draw)
        return states * float("inf") if i == self.spoilt else states


def loop(out, steps, gather=1, identity=None, spoilt=None, team=None, **options):
    torch.set_num_threads(1)
    train, held_out = Said(20, 0), Said(5, 1)
    objective = tiny.objective(EagleOptions(share=0.5, noise=0.1, candidates=16))
    return Loop(
        objective,
        Packing(train, Random(train, spoilt), 40, 40, 1.0, 0),
        Packing(held_out, Random(held_out), 40, 40, 0.0, 0),
        Path(out),
        LoopOptions(steps=steps, gather=gather, evaluate=5, warm_up=2, report=0, **options),
        identity or {"data": "a", "target": "b"},
        {"name": "tiny"},
        team or Team(),
    )


def digest(made):
    """Of all weights."""
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in made.objective.network.parameters())
    ).hexdigest()


def train(out, steps, gather, dies_at=None):
    made = loop(out, steps, gather)
    if dies_at is not None:
        step = made._step

        def dying():
            if made.at.step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return step()

        made._step = dying
    made.run()
    if made.team.rank == 0:
        torch.save([p.detach() for p in made.objective.network.parameters()], Path(out) / "weights.pt")
    made.team.close()


def started(env, **job):
    """The process that runs a job."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ.update(env)
        train(**job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main():
    pids = [started(**json.loads(job)) for job in sys.argv[1:]]
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    main()
