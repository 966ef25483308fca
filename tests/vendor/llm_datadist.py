"""Put this folder on the import path, and our engine stands under the vendor's name."""

from fakes.strict_vendor import *  # noqa: F403
