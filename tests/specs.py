"""Specs for tests, composed from conf/ as the command line composes them.

Takes overrides as typed, gives TrainSpec or RunSpec; raises ConfigError as the launcher does.
"""

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from orchestrator.config import to_spec
from orchestrator.project import CONF_DIR
from orchestrator.spec import RunSpec
from train.spec import TrainSpec


def run_spec(*overrides: str) -> RunSpec:
    """The RunSpec of these overrides."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        config = compose("config", list(overrides), return_hydra_config=True)
    choices = {k: str(v) for k, v in config.hydra.runtime.choices.items() if v is not None}
    plain = config.copy()
    OmegaConf.set_struct(plain, False)
    del plain["hydra"]
    return to_spec(plain, choices, overrides)


def train_spec(*overrides: str) -> TrainSpec:
    """The trainer's part of it."""
    return run_spec(*overrides).train
