"""Pretrain deep networks of repeated layers by sharing one set of weights, then unsharing."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sharebert")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
