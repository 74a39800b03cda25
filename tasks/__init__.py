"""Tasks: pure functions of (key, batch size) that give tokens, targets and weights.

Every task is a frozen value with the contract of `tasks.task.Task`. Which batch is drawn at which
step is decided by the keys of `tasks.streams`.
"""

from tasks.batch import Batch
from tasks.copy import Copy
from tasks.induction import Induction
from tasks.markov import Markov
from tasks.mixture import Mixture
from tasks.recall import Recall
from tasks.streams import dropout_key, evaluation_key, init_key, train_key
from tasks.task import Task
from tasks.text import Text
from tasks.transduction import SourceCopy, SourceReverse

TASKS = {
    task.name: task for task in (Copy, Induction, Recall, Markov, Text, SourceCopy, SourceReverse)
}

__all__ = [
    "TASKS",
    "Batch",
    "Copy",
    "Induction",
    "Markov",
    "Mixture",
    "Recall",
    "SourceCopy",
    "SourceReverse",
    "Task",
    "Text",
    "dropout_key",
    "evaluation_key",
    "init_key",
    "train_key",
]
