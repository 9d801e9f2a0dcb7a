"""Every setting of sharebert, its default, its meaning and its check.

The dataclasses in this package are the only place of defaults; the YAML files under ``conf/`` make choices and
state differences. Hydra composes a dictionary, :func:`from_dict` turns it into frozen dataclasses once,
and everything below the command line sees only those. Standard library only (and Hydra's ConfigStore in
:func:`register`), so that a wrong key is refused before torch is even imported.
"""

from sharebert.config.checks import ConfigError, flatten, from_dict, near_match, to_dict
from sharebert.config.deep_linear import DeepLinearConfig
from sharebert.config.finetune import (
    FinetuneCheckpointConfig,
    FinetuneConfig,
    FinetuneEngineConfig,
    FinetuneEvaluationConfig,
    FinetuneOptimConfig,
    RunConfig,
    TaskConfig,
    check_complete,
)
from sharebert.config.schema import register
from sharebert.config.train import (
    POLICIES,
    CheckpointConfig,
    DataConfig,
    DebugConfig,
    EngineConfig,
    EvaluationConfig,
    LoggingConfig,
    MaskingConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    UnshareConfig,
    check_world_size,
)

__all__ = [
    "POLICIES",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DebugConfig",
    "DeepLinearConfig",
    "EngineConfig",
    "EvaluationConfig",
    "FinetuneCheckpointConfig",
    "FinetuneConfig",
    "FinetuneEngineConfig",
    "FinetuneEvaluationConfig",
    "FinetuneOptimConfig",
    "LoggingConfig",
    "MaskingConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "TaskConfig",
    "TrainConfig",
    "UnshareConfig",
    "check_complete",
    "check_world_size",
    "flatten",
    "from_dict",
    "near_match",
    "register",
    "to_dict",
]
