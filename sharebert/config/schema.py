"""The way of the dataclasses into Hydra."""

from __future__ import annotations

from importlib import resources

from sharebert.config.deep_linear import DeepLinearConfig
from sharebert.config.finetune import FinetuneConfig
from sharebert.config.train import TrainConfig

SCHEMAS: dict[str, type] = {
    "train_schema": TrainConfig,
    "finetune_schema": FinetuneConfig,
    "deep_linear_schema": DeepLinearConfig,
}
"""Name of each schema in the defaults list of a primary configuration."""


def conf_file(name: str) -> str:
    """Path of a file that came with sharebert, by its name below `conf/`: ``${conf_file:experiment/a.txt}``."""
    return str(resources.files("sharebert.conf").joinpath(name))


def register() -> None:
    """Put every schema into Hydra's ConfigStore, and :func:`conf_file` among the resolvers.

    OmegaConf makes nodes of frozen dataclasses read-only, and Hydra could not apply an override to them:
    the flag is taken off the nodes, the dataclasses stay frozen.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.register_new_resolver("conf_file", conf_file, replace=True)

    def thaw(node: DictConfig) -> None:
        OmegaConf.set_readonly(node, None)
        for key in node:
            child = node._get_node(key)
            if isinstance(child, DictConfig):
                thaw(child)

    for name, kind in SCHEMAS.items():
        schema = OmegaConf.structured(kind)
        thaw(schema)
        ConfigStore.instance().store(name=name, node=schema)
