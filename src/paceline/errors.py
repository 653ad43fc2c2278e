"""Every error paceline raises on purpose, drawn once.

    PacelineError
    ├── WorldError            the environment contradicts itself, or the workers could not meet
    ├── LaunchError           the launcher was asked for something it can't start
    ├── ConfigError           lanes, batch sizes or options that can't be honoured together
    │   └── UnknownNameError  an attribute that the Engine doesn't have, with the nearest that it has
    ├── LoopError             the training loop broke a rule of the work queue
    ├── ReplicaError          workers that should hold the same thing don't
    ├── NonFiniteLossError    a loss that is NaN or infinite, with its step and lane
    ├── DataError             a sample that can't be fetched, a loader process that died, a file that is damaged
    ├── CollectiveError       ranks that call different collectives, a rank that died or is late in one
    ├── PeerLostError         another worker left, died or fell silent
    ├── GenerationEnded       likewise in an elastic job, which goes on: a loop never sees it
    └── CheckpointError       a state that can't be saved or loaded
        └── StateLostError    in an elastic job, a part of the state of which no copy is left

The text is for the person awake at 3 a.m.: where, what was expected, what came, what to do. Each class has a section in
docs/troubleshooting.md, which `error.see` names.
"""

from __future__ import annotations


class PacelineError(Exception):
    """The root of the tree; catch it to catch everything paceline raises on purpose."""

    @property
    def see(self) -> str:
        """The section of the documentation that has the usual causes, and what to do about each."""
        drawn = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return f"docs/troubleshooting.md#{drawn.__name__.lower()}"


class WorldError(PacelineError):
    """The environment contradicts itself, or the workers could not meet."""


class LaunchError(PacelineError):
    """The launcher was asked for something it can't start."""


class ConfigError(PacelineError, ValueError):
    """Lanes, batch sizes or options that can't be honoured together; scripts expect a ValueError of a bad argument."""


class UnknownNameError(ConfigError, AttributeError):
    """An attribute that the Engine doesn't have; `hasattr` and `getattr` with a default expect an AttributeError."""


class LoopError(PacelineError, RuntimeError):
    """The training loop broke a rule of the work queue (docs/concepts/loop.md); for scripts a RuntimeError."""


class ReplicaError(PacelineError):
    """Workers that should hold the same thing don't."""


class NonFiniteLossError(PacelineError):
    """A loss that is NaN or infinite, with its step and lane."""


class DataError(PacelineError):
    """A sample that can't be fetched, a loader process that died, a data file that is damaged."""


class CollectiveError(PacelineError, RuntimeError):
    """Ranks that call different collectives, or one that died or is late in one; torch expects a RuntimeError here."""


class PeerLostError(PacelineError):
    """Another worker left, died or fell silent; the launcher looks for the cause there, not here."""


class GenerationEnded(PacelineError):  # noqa: N818 (nothing went wrong that the job does not mend)
    """The workers that were grouped are not all there any more; the engine regroups those that are, and goes on."""


class CheckpointError(PacelineError):
    """A state that can't be saved or loaded."""


class StateLostError(CheckpointError):
    """In an elastic job, a part of the state of which no copy is left; all workers start anew, from a checkpoint."""
