"""Find a Chromium for the browser tests.

``python -m tests.support.chromium`` prints its path and may install one.

If the environment has BROWSER=install, Debian's package is installed where Chromium is missing;
otherwise Playwright is asked to download its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """Return the path of a Chromium on PATH or downloaded by Playwright, or None."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def attempts() -> list[list[list[str]]]:
    """Return the ways to install Chromium, in order: each a list of commands."""
    ways = [[[sys.executable, "-m", "playwright", "install", "chromium"]]]
    if os.environ.get("BROWSER") == "install" and shutil.which("apt-get"):
        sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
        ways.insert(
            0,
            [
                [*sudo, "apt-get", "update", "-qq"],
                [*sudo, "apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium"],
            ],
        )
    return ways


def get() -> str | None:
    """Return the path of a Chromium, after installing or downloading it if necessary."""
    if path := find():
        return path
    for way in attempts():
        print("browser: " + " && ".join(" ".join(command) for command in way), flush=True)
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        for command in way:
            done = subprocess.run(
                command,
                env={**os.environ, **quiet},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                print(f"browser: that failed: {(done.stderr or done.stdout).strip()[-400:]}")
                break
        if path := find():
            return path
    return None


if __name__ == "__main__":
    found = get()
    print(
        f"browser: {found}"
        if found
        else "browser: none, so the tests marked 'browser' will not run. Install one "
        "(apt-get install chromium) or let `make test BROWSER=install` do it.",
        flush=True,
    )
    if not found and os.environ.get("ORTLAB_REQUIRE_BROWSER") == "1":
        sys.exit(1)
