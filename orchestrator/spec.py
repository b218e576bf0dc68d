"""What a run is made of: the trainer's part and the launcher's part, frozen and strict.

Takes plain JSON, gives RunSpec. It must not import torch, hydra or omegaconf.
"""

from typing import Annotated, Literal

from pydantic import Field

from train.spec import Count, PositiveFloat, Spec, TrainSpec


class LaunchSpec(Spec):
    """Where and how the ranks are started."""

    kind: Literal["local", "inline"]
    """local: processes on this machine; inline: this process, one rank."""
    wait: bool
    """Follow the run to its end, or return as soon as it is submitted."""
    runs_dir: str
    """Folder of run folders."""
    lease_dir: str | None
    """Folder of device leases, shared by all who use this machine; null: /tmp/orchestrator-leases."""
    cpu_slots: Count | None
    """Slots that CPU ranks may lease; null: the cores this process may use."""
    cpus_per_rank: Count | None
    """Threads of a CPU rank, and slots it leases; null: an even share of all."""
    cancel_timeout_s: PositiveFloat
    """Seconds that a run asked to stop may take to write its checkpoint."""
    collective_timeout_s: PositiveFloat
    """Seconds after which a collective that does not end fails."""


class TrackingSpec(Spec):
    """Where metrics go besides the run folder."""

    kind: Literal["wandb", "none"]
    """wandb, or nothing."""
    project: str
    """wandb project."""
    entity: str | None
    """wandb entity; null: the account's own."""
    group: str | None
    """wandb group."""
    tags: tuple[str, ...]
    """Tags beside the group choices."""
    timeout_s: Annotated[float, Field(gt=0, le=30)]
    """Longest time that tracking may hold the end of a run."""


class OomguardSpec(Spec):
    """The pre-flight check of memory."""

    method: Literal["formula"]
    """How the peak is predicted."""
    allow_unknown: bool
    """Run a config whose peak cannot be predicted."""
    enforce: bool
    """false: the verdict is recorded, and the run starts whatever it is."""


class RunSpec(Spec):
    """Everything about one run; spec.json in its folder."""

    name: str
    """Name of the run and of its folder."""
    choices: dict[str, str]
    """Option chosen in each config group."""
    overrides: tuple[str, ...]
    """The command line's overrides, as typed."""
    train: TrainSpec
    """The trainer's part."""
    launch: LaunchSpec
    tracking: TrackingSpec
    oomguard: OomguardSpec
    output: Literal["text", "json", "explain"]
    """What check and run print; explain: text, and under check the ledger of saved tensors behind it."""
