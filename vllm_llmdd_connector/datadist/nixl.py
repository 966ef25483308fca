"""Where NIXL's C library lies, if the extra ``nixl`` is installed.

The engine loads it when it makes its first link that needs it.
"""

from __future__ import annotations

from importlib import metadata

__all__ = ["find_nixl_library"]

_LIBRARY = "libnixl_capi.so"
_DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13")  # the same library beside either CUDA


def find_nixl_library() -> str:
    """Its path; empty if it is not installed."""
    for name in _DISTRIBUTIONS:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == _LIBRARY:
                return str(file.locate())
    return ""
