"""torch's flight recorder, attached to a wait that has timed out: this worker's last collectives, as torch saw them.

    TORCH_FR_BUFFER_SIZE=2000    turns it on, in torch
    a wait times out             its worker writes the record to a file, and says where

It knows what goes through gloo and NCCL, and not our shared memory: where nothing was recorded nothing is said.
"""

from __future__ import annotations

import json
import os
import tempfile

from paceline.errors import ConfigError
from paceline.world import messages
from paceline.world.environment import flight_recorder_is_on


def tell_flight_record(name: str) -> None:
    """Of the worker of that name."""
    if not flight_recorder_is_on():
        return
    from paceline.torch_compat import flight_record  # not before: supervisors import no torch

    log = messages.logger("world")
    try:
        record = flight_record(includeCollectives=True, onlyActive=False)
        entries = json.loads(record).get("entries") or []
        if not entries:
            return
        descriptor, path = tempfile.mkstemp(prefix=f"paceline-flight-{name.replace(' ', '-')}-", suffix=".json")
        with os.fdopen(descriptor, "wb") as file:
            file.write(record if isinstance(record, bytes) else record.encode())
    except (ConfigError, OSError, ValueError) as error:  # the wait's own error is what the script gets
        log.warning(f"paceline: {name}: torch's flight recorder is on, and its record can't be had: {error}")
        return
    last = entries[-1]
    what = f"{last.get('profiling_name', 'a collective')} of {last.get('input_sizes')}, {last.get('state')}"
    told = f"its last {len(entries)} collectives, in {path}; the last: {what}"
    log.error(f"paceline: {name}: torch's flight recorder has {told}")
