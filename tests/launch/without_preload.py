"""`paceline`, except that the fork server imports no torch, so that a launch takes 0.3 s, and that waits are short."""

from __future__ import annotations

from paceline.cli.main import main
from paceline.launch import coordinator, exit_rules, supervisor

if __name__ == "__main__":
    supervisor.PRELOADED = ()
    supervisor.ACTIVITY_EVERY_S = 0.1
    coordinator.LOOK_EVERY_S = 0.05
    exit_rules.SERVERS_END_S = 1.0
    main()
