"""Tests of other projects, run on ours, fetched by `fetching.py`.

    clone of theirs, packages that they need ─▶ pytest, twice ─▶ what passes with theirs and not with ours

Every test runs with the project's own classes, which says what can pass here at all, and with ours, by a pytest plugin
that swaps them (unless `WHOSE` in the environment names the project). A run fails if a test that passes with theirs
neither passes with ours nor is among the deliberate failures, or is among them and passes. Where the tests or their
packages can't be had, it says so and runs nothing. There is no network while they run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.fetching import CACHE, ROOT, MissingError, Source, fetch_folder, fetch_packages

WHOSE = "PACELINE_WHOSE_CLASSES"


@dataclass(frozen=True)
class OthersTests:
    project: str
    version: str
    repository: str
    folders: tuple[str, ...]
    """To fetch of the repository."""
    tests: str
    """A file or a folder of it."""
    plugin: str
    """In this folder, without its suffix."""
    packages: tuple[str, ...]
    deliberate: Mapping[str, str]
    """Tests that pass with theirs and can't with ours, each with its reason."""
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.tests} of {self.project} {self.version}"

    def main(self, arguments: list[str] | None = None) -> int:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--repository", default=self.repository, help="a clone, or where there is one")
        parser.add_argument("--cache", type=Path, default=CACHE)
        parser.add_argument("--only", nargs="*", default=[], help=f"files of {self.tests}")
        options = parser.parse_args(arguments)
        options.cache.mkdir(parents=True, exist_ok=True)
        try:
            source = Source(self.project, self.version, options.repository)
            folder = fetch_folder(source, self.folders, options.cache, "the tests")
            packages = fetch_packages(self.project, self.packages, options.cache)
            theirs, ours = (
                self._outcomes(folder, packages, whose, options.only, options.cache / f"{self.project}-{whose}.xml")
                for whose in (self.project, "paceline")
            )
        except MissingError as error:
            print(f"{self.name}: NOT RUN: {error}")
            return 0
        found = self.complaints(theirs, ours)
        passing = [name for name, result in theirs.items() if result == "passed"]
        if not passing:
            print(f"{self.name}: NOT RUN: none of its tests passes with its own classes here")
            return 0
        good = sum(ours.get(name) == "passed" for name in passing)
        deliberate = sum(name in self.deliberate for name in passing)
        for name, result in theirs.items():
            if not result.startswith(("passed", "skipped")):
                print(f"not with its own classes either: {name}: {result}")
        print("\n".join(found))
        print(
            f"{self.name}: of {len(passing)} that pass with its own classes {good} pass with "
            f"paceline's, {deliberate} fail deliberately, {len(found)} are neither"
        )
        return int(bool(found))

    def complaints(self, theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
        """What is not as it should be, one line each."""
        found = []
        for name in sorted(name for name, result in theirs.items() if result == "passed"):
            result = ours.get(name, "missing")
            if result == "passed" and name in self.deliberate:
                found.append(f"{name} passes: take it out of DELIBERATE")
            elif result != "passed" and name not in self.deliberate:
                found.append(f"{name}: {result}")
        return found

    def _outcomes(self, folder: Path, packages: Path, whose: str, only: list[str], report: Path) -> dict[str, str]:
        """Test → passed, failure, error or skipped, with a line that says why."""
        report.unlink(missing_ok=True)
        tests = folder / self.tests
        wanted = [str(tests / name) for name in only] or [str(tests)]
        ignored = [f"--ignore={tests / name}" for name in self.left_out]
        options = ["-q", "--tb=line", "--timeout=120", "-p", "no:cacheprovider", "-c", os.devnull]
        environment = os.environ | {
            WHOSE: whose,
            # Not this repository itself: its package `tests` would hide theirs.
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", Path(__file__).parent, folder, packages))),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        command = [sys.executable, "-m", "pytest", "-p", self.plugin, *options, f"--rootdir={folder}", *ignored]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *wanted, "--continue-on-collection-errors"],
            cwd=folder,
            env=environment,
            capture_output=True,
        )
        if not report.exists():
            raise MissingError(f"pytest did not run: {(done.stdout + done.stderr).decode(errors='replace')[-2000:]}")
        return dict(_read(report))


def _read(report: Path) -> list[tuple[str, str]]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{str(case.get('classname')).rsplit('.', 1)[-1]}::{case.get('name')}"
        result = "passed"
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                result = f"{child.tag}: {(child.get('message') or '').splitlines()[:1]}"
        found.append((name, result))
    return found
