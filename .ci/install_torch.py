"""Sees to it that the Python that runs this has a torch of pyproject.toml's range.

    install_torch.py FILE

One that is installed, or that pip finds on this machine, stays; else PyTorch's CPU build is
downloaded, or the default one where there is an NVIDIA driver. FILE becomes a pip constraint that
keeps later installs from replacing it. TORCH_INDEX names another index to download from.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement  # what pip itself compares with

PIP_INSTALL = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def wanted() -> Requirement:
    """Return the range of pyproject.toml."""
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    dependencies = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    (found,) = (line for line in dependencies if line.startswith("torch"))
    return Requirement(found)


def installed(torch: Requirement) -> str | None:
    """Return the version in this environment if it is in the range."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    return version if torch.specifier.contains(version, prereleases=True) else None


def has_nvidia_driver() -> bool:
    """Return whether the default build, with gigabytes of CUDA libraries, is worth its download."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def size(url: str) -> int:
    """Bytes behind `url`, or 0 when the server does not say."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.headers.get("Content-Length", 0))
    except OSError:
        return 0


def download(torch: Requirement) -> None:
    """Installs torch and what it needs, after saying how much will be downloaded."""
    index = os.environ.get("TORCH_INDEX") or ("" if has_nvidia_driver() else CPU_INDEX)
    where = ["--index-url", index] if index else []
    build = f"the build of {index}" if index else "the default build"
    print(f"torch: looking up {build}", flush=True)
    plan = subprocess.run(
        [*PIP_INSTALL, "--dry-run", "--report", "-", *where, str(torch)],
        stdout=subprocess.PIPE,
        text=True,
    )
    if plan.returncode:
        sys.exit(
            f"torch: {build} could not be had (see above). Install a torch into .venv yourself, "
            "or name another index: make demo TORCH_INDEX=URL"
        )
    items = json.loads(plan.stdout)["install"]
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(size, (item["download_info"]["url"] for item in items)))
    unknown = f", {sizes.count(0)} of them of unknown size" if 0 in sizes else ""
    print(
        f"torch: downloading {sum(sizes) / 1e6:,.0f} MB in {len(items)} packages{unknown}",
        flush=True,
    )
    subprocess.run([*PIP_INSTALL, *where, str(torch)], check=True)


def main(constraint: Path) -> None:
    """Install torch if none fits, and write what pip is to keep into `constraint`."""
    torch = wanted()
    local = [*PIP_INSTALL, "--no-index", "--no-deps", str(torch)]
    if version := installed(torch):
        print(f"torch {version} is installed and stays")
    elif subprocess.run(local, capture_output=True).returncode == 0:
        print(f"torch {metadata.version('torch')} lay on this machine")
    else:
        download(torch)
    constraint.write_text(f"torch=={metadata.version('torch')}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
