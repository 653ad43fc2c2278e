"""`paceline`, except that the stable imports no torch, so that a launch takes 0.3 s, and that waits are short."""

from __future__ import annotations

from paceline.cli.main import main
from paceline.launch import decision, ending, supervisor

if __name__ == "__main__":
    supervisor.PRELOADED = ()
    supervisor.PULSE_EVERY_S = 0.1
    decision.LOOK_EVERY_S = 0.05
    ending.SERVERS_END_S = 1.0
    main()
