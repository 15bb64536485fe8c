"""The Python trainer: what recipes, notebooks and the command line all call."""

from tidemill.trainer.callbacks import Callback
from tidemill.trainer.steps import Step
from tidemill.trainer.table import Table
from tidemill.trainer.trainer import Result, Trainer

__all__ = ["Callback", "Result", "Step", "Table", "Trainer"]
