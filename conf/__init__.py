"""Hydra's configuration files; shipped as the package `sharebert.conf`."""
